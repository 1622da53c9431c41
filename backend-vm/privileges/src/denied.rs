//! Reports system calls that a filter denies.

use std::io;

use syscalls::Sysno;

/// Exit status after a denied call, equal to a shell's for SIGSYS.
pub const DENIED: i32 = 128 + libc::SIGSYS;

/// Used fields of the `siginfo_t` of SIGSYS (sigaction(2)).
#[repr(C)]
struct DeniedCall {
    signal: [i32; 3],
    /// Address of the calling instruction.
    address: u64,
    number: i32,
    architecture: u32,
}

/// Installs a handler of SIGSYS that ends this process: a line on standard error names the call and the thread, and the
/// exit status is [`DENIED`]. Such a call means that the list is wrong, or that an attacker controls the thread.
///
/// # Errors
/// As sigaction(2).
pub fn report_denied_calls() -> io::Result<()> {
    // SAFETY: all zeros are a valid value of this structure.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(i32, *const DeniedCall, *const libc::c_void) = denied;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: a complete structure, and a handler that makes system calls on its own memory alone.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn denied(_: i32, call: *const DeniedCall, _: *const libc::c_void) {
    // SAFETY: the kernel passes the structure of this signal.
    let number = unsafe { (*call).number };
    let mut thread = [0u8; 16];
    // SAFETY: the kernel writes at most 16 bytes, the last a zero. If a filter refuses the call, the name stays empty.
    unsafe { libc::prctl(libc::PR_GET_NAME, thread.as_mut_ptr()) };
    let end = thread.iter().position(|byte| *byte == 0);
    let mut line = Line::default();
    line.add(b"wormhole: the filter denies system call ");
    line.number(number.unsigned_abs());
    if let Some(call) = usize::try_from(number).ok().and_then(Sysno::new) {
        line.add(b" (");
        line.add(call.name().as_bytes());
        line.add(b")");
    }
    line.add(b" to thread ");
    line.add(&thread[..end.unwrap_or(0)]);
    line.add(b", and this process ends\n");
    // SAFETY: system calls on a local buffer; the process ends here.
    unsafe {
        libc::write(2, line.bytes.as_ptr().cast(), line.length);
        libc::_exit(DENIED)
    }
}

/// Text in a fixed buffer, because a signal handler must not allocate.
struct Line {
    bytes: [u8; 192],
    length: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            bytes: [0; 192],
            length: 0,
        }
    }
}

impl Line {
    /// Appends text, cut off at the end of the buffer.
    fn add(&mut self, text: &[u8]) {
        for (byte, value) in self.bytes[self.length..].iter_mut().zip(text) {
            *byte = *value;
            self.length += 1;
        }
    }

    fn number(&mut self, value: u32) {
        let mut digits = [0u8; 10];
        let mut left = value;
        let mut at = digits.len();
        loop {
            at -= 1;
            digits[at] = b'0' + (left % 10).to_le_bytes()[0];
            left /= 10;
            if left == 0 {
                break;
            }
        }
        self.add(&digits[at..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_decimal_and_a_line_is_cut_at_its_end() {
        let mut line = Line::default();
        for value in [0, 9, 10, 447, u32::MAX] {
            line.number(value);
            line.add(b" ");
        }
        assert_eq!(&line.bytes[..line.length], b"0 9 10 447 4294967295 ");
        line.add(&[b'x'; 500]);
        assert_eq!(line.length, line.bytes.len());
    }
}
