//! Atomics of this crate: the processor's, or loom's in a model (`--cfg loom`).
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

use crate::delay::{self, Access};

/// A word that synchronises.
#[derive(Debug)]
#[repr(transparent)]
pub struct AtomicU64(atomic::AtomicU64);

impl AtomicU64 {
    /// Creates a word in private memory.
    #[must_use]
    pub fn new(value: u64) -> Self {
        Self(atomic::AtomicU64::new(value))
    }

    /// Returns the word at `address`.
    ///
    /// # Safety
    /// `address` is aligned to 8 and mapped readable and writable for as long as the result lives.
    #[cfg(not(loom))]
    #[inline]
    pub(crate) unsafe fn at<'a>(address: *mut u64) -> &'a Self {
        // SAFETY: the wrapper is transparent, and so is the atomic over its integer; the caller promises that the
        // address is valid.
        unsafe { &*address.cast::<Self>() }
    }

    /// Reads the word.
    #[inline]
    pub fn load(&self, order: Ordering) -> u64 {
        delay::maybe(Access::Read);
        self.0.load(order)
    }

    /// Writes the word.
    #[inline]
    pub fn store(&self, value: u64, order: Ordering) {
        delay::maybe(Access::Write);
        self.0.store(value, order);
    }

    /// Writes the word and returns its previous value.
    #[inline]
    pub fn swap(&self, value: u64, order: Ordering) -> u64 {
        delay::maybe(Access::Write);
        self.0.swap(value, order)
    }

    /// Sets `bits`.
    #[inline]
    pub fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
        delay::maybe(Access::Write);
        self.0.fetch_or(bits, order)
    }

    /// Keeps only `bits`.
    #[inline]
    pub fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
        delay::maybe(Access::Write);
        self.0.fetch_and(bits, order)
    }

    /// Writes `new` if the word is `current`.
    ///
    /// # Errors
    /// The word has another value, which is returned.
    #[inline]
    pub fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        delay::maybe(Access::Write);
        self.0.compare_exchange(current, new, success, failure)
    }
}

/// Synchronisation points: places where one side's writes become visible to the other side. Each has a releasing and an
/// acquiring side, or two sides with a full fence; comments `SYNC POINT: name` mark them. A model can disable one to
/// show that it detects the missing order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncPoint {
    /// A record's content, published by its commit word.
    Commit,
    /// Room in the ring, published by the consumer's head.
    Head,
    /// The head that a producer saw when it moved the tail, published to producers that see that tail.
    Tail,
    /// The head that one producer read, published to the other producers of its process.
    CachedHead,
    /// The consumer's PARKED and a producer's record, ordered by a full fence on both sides.
    Park,
    /// A thread's announcement of its sleep and the event that ends it, ordered by a full fence on both sides.
    Sleep,
    /// An answer's content, published by its sequence number.
    Answer,
    /// The work's writes to the window, published by its fence.
    Fence,
    /// The writes before the end of a session, published by its status word.
    Status,
    /// The work done in a session's state, published by the next state.
    SessionState,
    /// An entry of a queue, published by its tail.
    Entry,
    /// Effects of the entries that a queue's reader has executed, published by its head.
    Done,
    /// A reader's announcement of its sleep and the entry that ends it, ordered by a full fence on both sides.
    Idle,
}

impl SyncPoint {
    /// Returns the ordering of the releasing side's store.
    #[inline]
    #[must_use]
    pub fn release(self) -> Ordering {
        if self.is_broken() {
            Ordering::Relaxed
        } else {
            Ordering::Release
        }
    }

    /// Returns the ordering of the acquiring side's load.
    #[inline]
    #[must_use]
    pub fn acquire(self) -> Ordering {
        Ordering::Acquire
    }

    /// Returns the ordering of an access that acquires and releases.
    #[inline]
    #[must_use]
    pub fn acquire_release(self) -> Ordering {
        if self.is_broken() {
            Ordering::Relaxed
        } else {
            Ordering::AcqRel
        }
    }

    /// Issues the full fence that both sides need between their store and their load.
    #[inline]
    pub fn fence(self) {
        delay::maybe(Access::Write);
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

/// Controls for loom models.
#[cfg(loom)]
pub mod model {
    use std::cell::Cell;

    use super::SyncPoint;

    std::thread_local! {
        pub(super) static BROKEN: Cell<Option<SyncPoint>> = const { Cell::new(None) };
    }

    /// Runs `model` with a sync point disabled.
    pub fn without<R>(point: SyncPoint, model: impl FnOnce() -> R) -> R {
        BROKEN.set(Some(point));
        model()
    }
}

/// Hints to the processor (or to loom) that this thread spins.
#[inline]
pub fn relax() {
    #[cfg(not(loom))]
    core::hint::spin_loop();
    #[cfg(loom)]
    loom::thread::yield_now();
}
