//! Numbers of this process's threads.

use std::cell::Cell;
use std::sync::atomic::{AtomicU16, Ordering};

static LAST: AtomicU16 = AtomicU16::new(0);

thread_local! {
    static NUMBER: Cell<u16> = const { Cell::new(0) };
}

/// Returns the number of this thread, from 1 on. Threads share numbers once there have been 65,535 of them.
#[inline]
pub fn number() -> u16 {
    let number = NUMBER.get();
    if number > 0 {
        return number;
    }
    let number = LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1);
    NUMBER.set(number);
    number
}
