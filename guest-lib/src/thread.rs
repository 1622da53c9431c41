//! This process's threads: their numbers, and what nearly every call needs to know of its thread.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::types::CUcontext;

/// Numbers below this are given to one thread each, and 0 to none.
pub const FIRST: u16 = 32;

/// Number of threads that have asked for a number.
static THREADS: AtomicU32 = AtomicU32::new(0);

/// State of a thread, in one value: a call looks up its address once.
#[derive(Debug)]
pub struct Thread {
    /// 0 until it is asked for.
    number: Cell<u16>,
    /// Context on top of the thread's stack, or null.
    pub context: Cell<CUcontext>,
    /// True on a thread that runs host functions, which may not call the driver. Such a thread never has a context.
    pub is_forbidden: Cell<bool>,
}

thread_local! {
    pub static THREAD: Thread = const {
        Thread {
            number: Cell::new(0),
            context: Cell::new(ptr::null_mut()),
            is_forbidden: Cell::new(false),
        }
    };
}

/// Returns the number of this thread, from 1 on. Threads share numbers once there have been 65,535 of them, but none of
/// the [`FIRST`].
#[inline]
pub fn number() -> u16 {
    THREAD.with(|thread| match thread.number.get() {
        0 => take(thread),
        number => number,
    })
}

#[cold]
fn take(thread: &Thread) -> u16 {
    let number = number_of(THREADS.fetch_add(1, Ordering::Relaxed));
    thread.number.set(number);
    number
}

/// Returns the number of the thread before which `before` others have asked.
fn number_of(before: u32) -> u16 {
    const MOST: u32 = u16::MAX as u32;
    let first = u32::from(FIRST);
    let number = match before {
        0..MOST => before + 1,
        _ => first + (before - MOST) % (MOST + 1 - first),
    };
    u16::try_from(number).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_are_given_once() {
        assert_eq!(number_of(0), 1);
        assert_eq!(number_of(65_534), 65_535);
        assert_eq!(number_of(65_535), FIRST);
        assert_eq!(number_of(65_535 + 65_503), 65_535);
        assert_eq!(number_of(65_535 + 65_504), FIRST);
    }
}
