//! Output of the command itself.
//!
//! Failures of the output do not change how a run ends: errors are ignored, and so is SIGXFSZ, the
//! signal for the file size limit (the standard library ignores SIGPIPE).

use std::fmt::Arguments;
use std::io::{self, Write};

use vmm_sys_util::signal::register_signal_handler;
use wormhole_link::{harmless, harmless_bytes};

/// Writes a line to standard error in one piece, after the command's name. Parts of it come from
/// guests, workers and file names, so characters that would move a terminal's cursor or change its
/// state are replaced by dots, and ends of lines by spaces.
pub fn line(text: Arguments<'_>) {
    let text = harmless(&text.to_string()).replace('\n', " ");
    to_stderr(&format!("wormhole: {text}\n"));
}

/// Writes text to standard error, with its ends of lines. Other characters are replaced as by [`line`].
pub fn to_stderr(text: &str) {
    let _ = io::stderr().write_all(harmless(text).as_bytes());
}

/// Writes what a machine says to standard error, as [`to_stderr`] does, and no more bytes than it says.
#[derive(Debug)]
pub struct Foreign;

impl Write for Foreign {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(harmless_bytes(bytes).as_bytes());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a line to standard output.
pub fn result(text: Arguments<'_>) {
    let _ = io::stdout().write_all(format!("{text}\n").as_bytes());
}

/// Makes writes beyond the file size limit fail instead of ending this process. Programs that it
/// starts have the signal's default action: a handler does not outlive execve(2).
pub fn survive_the_file_size_limit() {
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    if !crate::signals::is_ignored(libc::SIGXFSZ) {
        // Cannot fail for a valid signal; otherwise the signal keeps its default action.
        let _ = register_signal_handler(libc::SIGXFSZ, nothing);
    }
}
