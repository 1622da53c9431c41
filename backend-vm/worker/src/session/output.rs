//! Output of kernels, on its way to the guest.

use wormhole_api::{Outcome, Serve, Served, TakeOutput, TakeOutputReply};
use wormhole_device::DeviceOutput;

use super::{Answer, Call, Session};

/// Largest number of bytes of text in one answer, both streams together.
const PART: usize = 3968;
/// Limit on the bytes of each stream that wait for the guest. Further text is lost, as is text that
/// overflows the device's own buffer.
const MOST: usize = 64 << 20;

/// Text of one stream. The part not sent yet starts at `taken`.
#[derive(Debug, Default)]
struct Text {
    bytes: Vec<u8>,
    taken: usize,
}

impl Text {
    fn append(&mut self, text: &[u8]) {
        if self.taken > self.bytes.len() / 2 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        let room = MOST - self.waiting();
        if text.len() > room {
            tracing::warn!("{} bytes of text are lost", text.len() - room);
        }
        self.bytes.extend_from_slice(&text[..text.len().min(room)]);
    }

    fn waiting(&self) -> usize {
        self.bytes.len() - self.taken
    }

    /// Takes at most `most` bytes.
    fn take(&mut self, most: usize) -> &[u8] {
        if self.waiting() == 0 {
            *self = Self::default();
        }
        let start = self.taken;
        self.taken += self.waiting().min(most);
        &self.bytes[start..self.taken]
    }
}

/// Text that was taken from the device and not sent yet.
#[derive(Debug, Default)]
pub struct PendingOutput {
    stdout: Text,
    stderr: Text,
}

impl PendingOutput {
    pub fn append(&mut self, text: &DeviceOutput) {
        self.stdout.append(&text.stdout);
        self.stderr.append(&text.stderr);
    }

    /// Returns whether no text waits for the guest.
    pub fn is_empty(&self) -> bool {
        self.stdout.waiting() + self.stderr.waiting() == 0
    }

    /// Takes the next text that fits an answer: the number of bytes left after it, stdout, stderr.
    pub fn next_part(&mut self) -> (u64, &[u8], &[u8]) {
        let stdout = self.stdout.waiting().min(PART);
        let stderr = self.stderr.waiting().min(PART - stdout);
        let remaining = self.stdout.waiting() - stdout + self.stderr.waiting() - stderr;
        (
            remaining as u64,
            self.stdout.take(stdout),
            self.stderr.take(stderr),
        )
    }
}

impl Serve<TakeOutput> for Session {
    fn serve<'s>(&'s mut self, call: &Call, _: &TakeOutput) -> Outcome<TakeOutputReply<'s>> {
        if self.output.is_empty() {
            let devices = self.devices.clone();
            return self.ask(
                call,
                self.here(call),
                move |_| Ok(devices.take_output()),
                |session, text| {
                    session.output.append(&text);
                    Answer::reply(&session.next_output())
                },
            );
        }
        Ok(Served::Done(self.next_output()))
    }
}

impl Session {
    fn next_output(&mut self) -> TakeOutputReply<'_> {
        let (remaining, stdout, stderr) = self.output.next_part();
        TakeOutputReply {
            remaining,
            stdout,
            stderr,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_text_leaves_in_parts_and_in_order() {
        let mut output = PendingOutput::default();
        let stdout: Vec<u8> = (0..9000u32).map(|at| (at % 251) as u8).collect();
        output.append(&DeviceOutput {
            stdout: stdout[..5000].to_vec(),
            stderr: b"assert".to_vec(),
        });
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut rest = Some(DeviceOutput {
            stdout: stdout[5000..].to_vec(),
            stderr: b"ion".to_vec(),
        });
        loop {
            let (remaining, stdout, stderr) = output.next_part();
            assert!(stdout.len() + stderr.len() <= PART);
            out.extend_from_slice(stdout);
            err.extend_from_slice(stderr);
            match rest.take() {
                Some(rest) => output.append(&rest),
                None if remaining == 0 => break,
                None => {}
            }
        }
        assert_eq!(out, stdout);
        assert_eq!(err, b"assertion");
        assert!(output.is_empty());
        assert_eq!(output.next_part(), (0, &[][..], &[][..]));
    }

    #[test]
    fn text_that_nobody_fetches_does_not_grow_without_bound() {
        let mut output = PendingOutput::default();
        let text = DeviceOutput {
            stdout: vec![b'x'; MOST / 4],
            stderr: Vec::new(),
        };
        for _ in 0..5 {
            output.append(&text);
        }
        let (remaining, stdout, _) = output.next_part();
        assert_eq!(remaining + stdout.len() as u64, MOST as u64);
        output.append(&text);
        assert!(output.stdout.bytes.len() <= MOST + PART);
    }
}
