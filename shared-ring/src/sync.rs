//! The atomics this crate uses: the processor's, or loom's when a model is checked (`--cfg loom`).
//!
//! Every shared word is 64 bits wide, including those that hold a smaller value, so that one word is
//! only ever accessed with one size.

#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the one place that names them"
)]

#[cfg(not(loom))]
use core::sync::atomic;

#[cfg(loom)]
use loom::sync::atomic;

pub use core::sync::atomic::Ordering;

/// A word that synchronises.
#[derive(Debug)]
#[repr(transparent)]
pub struct AtomicU64(atomic::AtomicU64);

impl AtomicU64 {
    /// A word of this process.
    #[must_use]
    pub fn new(value: u64) -> Self {
        Self(atomic::AtomicU64::new(value))
    }

    /// The word at `address`.
    ///
    /// # Safety
    /// `address` is aligned to 8 and mapped readable and writable for as long as the result lives.
    #[cfg(not(loom))]
    #[inline]
    pub(crate) unsafe fn at<'a>(address: *mut u64) -> &'a Self {
        // SAFETY: the wrapper is transparent, and so is the atomic over its integer; the caller
        // vouches for the address.
        unsafe { &*address.cast::<Self>() }
    }

    /// Reads the word.
    #[inline]
    pub fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    /// Writes the word.
    #[inline]
    pub fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }

    /// Writes `new` if the word is `current`.
    ///
    /// # Errors
    /// What the word is instead.
    #[inline]
    pub fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.0.compare_exchange(current, new, success, failure)
    }
}

/// A fence between the accesses before it and those after it.
#[inline]
pub fn fence(order: Ordering) {
    atomic::fence(order);
}

/// Tells the processor (or loom) that this thread is waiting for another.
#[inline]
pub fn relax() {
    #[cfg(not(loom))]
    core::hint::spin_loop();
    #[cfg(loom)]
    loom::thread::yield_now();
}
