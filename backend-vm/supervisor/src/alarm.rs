//! A signal that interrupts the event loop where a read waits although it is not to wait.
//!
//! A launcher may keep a copy of a control stream that it sends, and set the socket's options whenever it likes. A read can
//! so be made to free a byte out of band, and the kernel then closes the descriptor beside it here. A socket that lingers
//! has the close wait until a signal comes.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

/// How long a read may wait.
const PATIENCE: libc::timeval = libc::timeval {
    tv_sec: 0,
    tv_usec: 5_000,
};
const NEVER: libc::timeval = libc::timeval {
    tv_sec: 0,
    tv_usec: 0,
};

/// Signals so far.
static SIGNALS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_: i32) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// Has the signal interrupt this process, and not end it.
///
/// # Errors
/// As `sigaction`.
pub fn install() -> io::Result<()> {
    // SAFETY: all zeros are a valid value of both structures, which are complete; the handler adds to a number.
    let installed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(i32) = count;
        action.sa_sigaction = handler as usize;
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut set, libc::SIGALRM);
        libc::sigprocmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut())
    };
    match installed {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Does something that is not to wait: what came of it, and whether it was interrupted. It may also have been interrupted
/// because this process had no processor for so long.
pub fn within<T>(work: impl FnOnce() -> T) -> (T, bool) {
    let before = SIGNALS.load(Ordering::Relaxed);
    // Again and again: the first signal may come before the wait.
    set(PATIENCE);
    let result = work();
    set(NEVER);
    (result, SIGNALS.load(Ordering::Relaxed) != before)
}

fn set(time: libc::timeval) {
    let timer = libc::itimerval {
        it_interval: time,
        it_value: time,
    };
    // SAFETY: a complete local structure. It cannot fail with these values.
    unsafe {
        libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_for_ever_is_interrupted() {
        install().unwrap();
        // SAFETY: no descriptors. The signal may be another thread's, so the wait has an end.
        let wait = || unsafe { libc::poll(std::ptr::null_mut(), 0, 1000) };
        let (_, was_interrupted) = within(wait);
        assert!(was_interrupted);
        let (result, was_interrupted) = within(|| 7);
        assert_eq!((result, was_interrupted), (7, false));
    }
}
