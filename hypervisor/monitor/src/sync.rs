//! Locks a mutex regardless of poisoning, and tells threads that the VM ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Locks `mutex` even if it is poisoned: every critical section of this crate leaves its data valid
/// at each step.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A flag that the VM ends. Long work looks at it between its steps.
#[derive(Debug, Clone, Default)]
pub struct Ending(Arc<AtomicBool>);

impl Ending {
    /// Sets the flag.
    pub fn begin(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub fn has_begun(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
