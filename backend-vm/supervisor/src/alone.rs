//! Keeps tests apart that share a part of their process: copies of descriptors in a forked child.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits until no other such test runs.
pub fn alone() -> MutexGuard<'static, ()> {
    static PROCESS: Mutex<()> = Mutex::new(());
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}
