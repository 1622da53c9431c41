//! Text that kernels printed, on its way to the guest.

use wormhole_device::DeviceOutput;

/// Bytes of text in one answer, both kinds together.
const PART: usize = 3968;

/// Text that was taken from the device and not yet sent.
#[derive(Debug, Default)]
pub struct PendingOutput {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// What was handed out last, and goes at the next call.
    sent: (usize, usize),
}

impl PendingOutput {
    pub fn append(&mut self, text: DeviceOutput) {
        self.stdout.extend_from_slice(&text.stdout);
        self.stderr.extend_from_slice(&text.stderr);
    }

    /// The next text that fits an answer, and how many bytes are left after it.
    pub fn next_part(&mut self) -> (u64, &[u8], &[u8]) {
        let (stdout, stderr) = std::mem::take(&mut self.sent);
        self.stdout.drain(..stdout);
        self.stderr.drain(..stderr);
        let stdout = self.stdout.len().min(PART);
        let stderr = self.stderr.len().min(PART - stdout);
        self.sent = (stdout, stderr);
        let remaining = self.stdout.len() - stdout + self.stderr.len() - stderr;
        (
            remaining as u64,
            &self.stdout[..stdout],
            &self.stderr[..stderr],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_leaves_in_parts_and_in_order() {
        let mut output = PendingOutput::default();
        let stdout: Vec<u8> = (0..9000u32).map(|at| (at % 251) as u8).collect();
        output.append(DeviceOutput {
            stdout: stdout.clone(),
            stderr: b"assertion".to_vec(),
        });
        let (mut out, mut err) = (Vec::new(), Vec::new());
        loop {
            let (remaining, stdout, stderr) = output.next_part();
            assert!(stdout.len() + stderr.len() <= PART);
            out.extend_from_slice(stdout);
            err.extend_from_slice(stderr);
            if remaining == 0 {
                break;
            }
        }
        assert_eq!(out, stdout);
        assert_eq!(err, b"assertion");
        assert_eq!(output.next_part(), (0, &[][..], &[][..]));
    }
}
