//! Timer signal that interrupts the event loop when a non-blocking read sleeps nevertheless.
//!
//! A launcher may keep a copy of a control stream that it sends, and change the socket's options at
//! any time. It can thereby make a read free a byte sent out of band, and the kernel then closes
//! the descriptor that came with the byte in this process. If that is a lingering socket, the close
//! sleeps until a signal arrives.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

/// Time after which a read is interrupted.
const PATIENCE: libc::timeval = libc::timeval {
    tv_sec: 0,
    tv_usec: 5_000,
};
const NEVER: libc::timeval = libc::timeval {
    tv_sec: 0,
    tv_usec: 0,
};

/// Number of signals received.
static SIGNALS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_: i32) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// Installs a handler, so that the signal interrupts system calls and does not end this process.
///
/// # Errors
/// Same as `sigaction`.
pub fn install() -> io::Result<()> {
    // SAFETY: all zeros are a valid value of both structures, which are complete; the handler only
    // adds to an atomic.
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

/// Runs work that should not sleep. Returns its result, and true if it slept until a signal
/// arrived. The timer also runs while this process is preempted, which tenants do not cause and
/// which does not count as sleep.
pub fn within<T>(work: impl FnOnce() -> T) -> (T, bool) {
    let before = (SIGNALS.load(Ordering::Relaxed), sleeps());
    // The timer repeats, because the first signal may arrive before the sleep starts.
    set(PATIENCE);
    let result = work();
    set(NEVER);
    let was_late = SIGNALS.load(Ordering::Relaxed) != before.0;
    (result, was_late && sleeps() != before.1)
}

/// Returns the number of voluntary context switches of this thread (getrusage(2), `ru_nvcsw`).
fn sleeps() -> libc::c_long {
    // SAFETY: all-zero is a valid value of the structure, which the kernel fills. The call cannot fail with these values.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage.ru_nvcsw
    }
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
    use std::time::{Duration, Instant};

    use super::*;
    use crate::alone::alone;

    #[test]
    fn what_sleeps_for_ever_is_interrupted_and_what_only_takes_long_is_not() {
        let _alone = alone();
        install().unwrap();
        // SAFETY: no descriptors. The signal may reach another thread, so the wait has a limit.
        let wait = || unsafe { libc::poll(std::ptr::null_mut(), 0, 1000) };
        let (_, was_interrupted) = within(wait);
        assert!(was_interrupted);
        // Resembles preemption by another process, except for the count of sleeps.
        let start = Instant::now();
        let spin = || while start.elapsed() < Duration::from_millis(50) {};
        let before = SIGNALS.load(Ordering::Relaxed);
        let (_, was_interrupted) = within(spin);
        assert!(SIGNALS.load(Ordering::Relaxed) > before && !was_interrupted);
        let (result, was_interrupted) = within(|| 7);
        assert_eq!((result, was_interrupted), (7, false));
    }
}
