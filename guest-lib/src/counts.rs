//! Counter of this process's calls that never leave the guest. The backend counts the others.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::thread::{self, FIRST};

/// Calls of a thread, on cache lines of their own.
#[derive(Debug)]
#[repr(align(128))]
struct Count(AtomicU64);

/// Counts of the first threads, each at its own, and of all others at the first place.
static COUNTS: [Count; FIRST as usize] = [const { Count(AtomicU64::new(0)) }; FIRST as usize];

/// Counts one call.
#[inline]
pub fn count() {
    let number = usize::from(thread::number());
    match COUNTS.get(number) {
        // No other thread writes there, so that the processor need not lock the line.
        Some(Count(own)) => own.store(own.load(Ordering::Relaxed) + 1, Ordering::Relaxed),
        None => {
            COUNTS[0].0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Returns the number of calls that never left the guest.
pub fn local() -> u64 {
    COUNTS
        .iter()
        .map(|count| count.0.load(Ordering::Relaxed))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_of_all_threads_are_counted() {
        let before = local();
        std::thread::scope(|scope| {
            for _ in 0..2 * FIRST {
                scope.spawn(|| (0..100).for_each(|_| count()));
            }
        });
        assert!(local() - before >= 2 * u64::from(FIRST) * 100);
    }
}
