//! Keeps tests apart that share a part of their process: copies of descriptors in a forked child.

use wormhole_lock::{Mutex, MutexGuard};

/// Waits until no other such test runs.
pub fn alone() -> MutexGuard<'static, ()> {
    static PROCESS: Mutex<()> = Mutex::new(());
    PROCESS.lock()
}
