//! Locks without poisoning.
//!
//! If a thread panics while it holds a lock of the standard library, each later use of the lock is an error. All
//! critical sections of the workspace leave their data valid at each step, so these locks ignore the panic.
//!
//! Inside are the standard library's locks. They have no state outside of themselves, so that a child after fork(2) finds
//! nothing else of its parent's threads, and they bring no further library into the programs of guests.

#![forbid(unsafe_code)]

use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

pub use std::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns nothing if the lock is held.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

#[derive(Debug, Default)]
pub struct RwLock<T: ?Sized>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub const fn new(value: T) -> Self {
        Self(std::sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
pub struct Condvar(std::sync::Condvar);

impl Condvar {
    pub const fn new() -> Self {
        Self(std::sync::Condvar::new())
    }

    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        let woken = self.0.wait(guard);
        woken.unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits at most `timeout`.
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
    ) -> MutexGuard<'a, T> {
        let woken = self.0.wait_timeout(guard, timeout);
        woken.unwrap_or_else(PoisonError::into_inner).0
    }

    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_open_after_a_panic_of_their_holder() {
        let (mutex, lock) = (Mutex::new(1), RwLock::new(1));
        std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let (mut first, mut second) = (mutex.lock(), lock.write());
                (*first, *second) = (2, 2);
                panic!("while both are held");
            });
            assert!(holder.join().is_err());
        });
        assert_eq!((*mutex.lock(), *lock.read()), (2, 2));
        assert_eq!(*lock.write(), 2);
        let held = mutex.try_lock().expect("no thread holds it");
        assert!(mutex.try_lock().is_none());
        drop(held);
        let guard = Condvar::new().wait_timeout(mutex.lock(), Duration::ZERO);
        assert_eq!(*guard, 2);
        drop(guard);
        assert_eq!(mutex.into_inner(), 2);
    }
}
