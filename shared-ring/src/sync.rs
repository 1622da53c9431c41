//! The atomics this crate uses: the processor's, or loom's when a model is checked (`--cfg loom`).
//!
//! Every shared word is 64 bits wide, including those that hold a smaller value, so that one word is
//! only ever accessed with one size.

#![cfg_attr(
    not(loom),
    expect(
        clippy::disallowed_types,
        clippy::disallowed_methods,
        reason = "the one place that names them"
    )
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

    /// Writes the word and returns what it was.
    #[inline]
    pub fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.0.swap(value, order)
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

/// The places where one side's writes become the other side's reads. Each has a side that releases
/// and a side that acquires, or two sides with a full fence; the comments `SYNC POINT: name` mark
/// them. Models can break one, to show that they would notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncPoint {
    /// A record's content, by its commit word.
    Commit,
    /// Room in the ring, by the consumer's head.
    Head,
    /// How far the head was when a producer moved the tail, told to the producers that see that tail.
    Tail,
    /// What one producer learnt of the head, told to the others of its process.
    CachedHead,
    /// The consumer's PARKED against a producer's record.
    Park,
    /// An answer's content, by its sequence number.
    Answer,
    /// What work wrote to the window, by its fence.
    Fence,
    /// What preceded the end of a session, by its status word.
    Status,
    /// What a state of a session was about, by the next state.
    SessionState,
}

impl SyncPoint {
    /// The order in which the releasing side stores.
    #[inline]
    #[must_use]
    pub fn release(self) -> Ordering {
        if self.is_broken() {
            Ordering::Relaxed
        } else {
            Ordering::Release
        }
    }

    /// The order in which the acquiring side loads.
    #[inline]
    #[must_use]
    pub fn acquire(self) -> Ordering {
        Ordering::Acquire
    }

    /// The order of an access that does both.
    #[inline]
    #[must_use]
    pub fn acquire_release(self) -> Ordering {
        if self.is_broken() {
            Ordering::Relaxed
        } else {
            Ordering::AcqRel
        }
    }

    /// The full fence that both sides have between their store and their load.
    #[inline]
    pub fn fence(self) {
        if !self.is_broken() {
            atomic::fence(Ordering::SeqCst);
        }
    }

    #[cfg(not(loom))]
    #[inline]
    const fn is_broken(self) -> bool {
        false
    }

    #[cfg(loom)]
    fn is_broken(self) -> bool {
        model::BROKEN.get() == Some(self)
    }
}

/// What only models do.
#[cfg(loom)]
pub mod model {
    use std::cell::Cell;

    use super::SyncPoint;

    std::thread_local! {
        pub(super) static BROKEN: Cell<Option<SyncPoint>> = const { Cell::new(None) };
    }

    /// Runs `model` with a sync point that synchronises nothing.
    pub fn without<R>(point: SyncPoint, model: impl FnOnce() -> R) -> R {
        BROKEN.set(Some(point));
        model()
    }
}

/// Tells the processor (or loom) that this thread is waiting for another.
#[inline]
pub fn relax() {
    #[cfg(not(loom))]
    core::hint::spin_loop();
    #[cfg(loom)]
    loom::thread::yield_now();
}
