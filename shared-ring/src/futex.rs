//! Sleep on a word of the window until another thread, of this process or of another, wakes the sleeper.

use core::time::Duration;

use crate::sync::AtomicU64;

/// Sleeps while the low half of `word` is `expected`, at most `limit`. Returns false if that time has passed; a signal
/// or a wake without a cause ends the sleep too.
pub fn wait(word: &AtomicU64, expected: u32, limit: Duration) -> bool {
    let limit = libc::timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    futex(word, libc::FUTEX_WAIT, expected, Some(&limit)) != Err(libc::ETIMEDOUT)
}

/// Wakes the thread that sleeps on `word`.
pub fn wake(word: &AtomicU64) {
    // Fails only for an address that is not mapped.
    let _ = futex(word, libc::FUTEX_WAKE, 1, None);
}

/// The operation is not private: the sleeper may be in another process, which maps the same file.
fn futex(
    word: &AtomicU64,
    operation: libc::c_int,
    value: u32,
    limit: Option<&libc::timespec>,
) -> Result<(), libc::c_int> {
    // The low half of a word lies at its address.
    let address: *const u32 = core::ptr::from_ref(word).cast();
    let limit = limit.map_or(core::ptr::null(), core::ptr::from_ref);
    // SAFETY: the kernel reads four mapped, aligned bytes and the time, which outlives the call.
    match unsafe { libc::syscall(libc::SYS_futex, address, operation, value, limit) } {
        -1 => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::sync::Ordering;

    #[test]
    fn a_sleep_ends_by_a_wake_or_by_its_limit() {
        const LONG: Duration = Duration::from_secs(60);
        let word = AtomicU64::new(0);
        assert!(wait(&word, 1, LONG), "the word is another one");
        assert!(!wait(&word, 0, Duration::from_millis(1)));
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while word.load(Ordering::Relaxed) == 0 {
                    wait(&word, 0, LONG);
                }
            });
            word.store(1, Ordering::Relaxed);
            wake(&word);
        });
        assert!(start.elapsed() < LONG);
    }
}
