//! Text of kernels (`printf`, messages of assertions) on its way to the program's standard streams.

use std::cell::Cell;
use std::io::Write;
use std::os::fd::FromRawFd;
use std::sync::atomic::Ordering;

use wormhole_api::TakeOutput;

use super::Session;

thread_local! {
    /// True while this thread asks a dead context for its text, which finds the context dead again.
    static SHOWING: Cell<bool> = const { Cell::new(false) };
}

/// Writes output to the same streams as the native driver. Flushes the program's own buffers first, because their
/// text was printed earlier.
pub fn show(stdout: &[u8], stderr: &[u8]) {
    if stdout.is_empty() && stderr.is_empty() {
        return;
    }
    // SAFETY: a null stream means all streams of the C library.
    unsafe { libc::fflush(std::ptr::null_mut()) };
    for (descriptor, text) in [(libc::STDOUT_FILENO, stdout), (libc::STDERR_FILENO, stderr)] {
        // SAFETY: the descriptor is borrowed: `ManuallyDrop` keeps it open.
        let file = unsafe { std::fs::File::from_raw_fd(descriptor) };
        let mut file = std::mem::ManuallyDrop::new(file);
        // The native driver loses output to a closed standard stream too.
        let _ = file.write_all(text);
    }
}

impl Session {
    /// Notes that a kernel may write text: a dead context may then hold an assertion's message.
    pub fn expect_output(&self) {
        self.may_have_output.store(true, Ordering::Relaxed);
    }

    /// Writes what the kernels of a dead context have left, once. Other threads wait meanwhile, so that none ends the
    /// program before.
    #[cold]
    pub(super) fn show_last_output(&self) {
        if SHOWING.get() || !self.may_have_output.load(Ordering::Acquire) {
            return;
        }
        let _one_thread = self.last_output.lock();
        if !self.may_have_output.load(Ordering::Acquire) {
            return;
        }
        SHOWING.set(true);
        let mut remaining = 1;
        while remaining > 0 {
            let taken = self.ask(0, &TakeOutput {}, |reply| {
                show(reply.stdout, reply.stderr);
                reply.remaining
            });
            remaining = taken.unwrap_or(0);
        }
        SHOWING.set(false);
        self.may_have_output.store(false, Ordering::Release);
    }
}
