//! Locks a mutex regardless of poisoning.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex` even if it is poisoned: every critical section of this crate leaves its data valid
/// at each step.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
