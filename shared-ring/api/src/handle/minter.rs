//! The guest's allocator of handles.

use core::fmt;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::boxed::Box;
use std::sync::OnceLock;

use super::{GENERATIONS, Handle, HandleKind, INDICES, Key};

/// Indices of one chunk; chunks are made when first used, so that an unused minter costs nothing.
const CHUNK: usize = 4096;
const CHUNKS: usize = INDICES as usize / CHUNK;
/// The end of the free list.
const NONE: u32 = u32::MAX;
/// Set in an entry's generation while its handle is live.
const LIVE: u16 = 1 << 15;

struct Entry {
    /// The generation of the live handle, with [`LIVE`], or of the next one.
    generation: AtomicU16,
    /// The entry below this one in the free list.
    below: AtomicU32,
}

/// Mints handles of one type and takes them back, without locks.
///
/// A released index is used again with the next generation, so a handle that the program destroyed is told
/// from its successor.
pub struct Minter<K> {
    chunks: Box<[OnceLock<Box<[Entry]>>]>,
    /// The lowest index that was never minted.
    fresh: AtomicU32,
    /// Top of the stack of released indices: a tag that changes at every push (so that a stale exchange
    /// fails) above the index.
    free: AtomicU64,
    kind: PhantomData<fn() -> K>,
}

impl<K: HandleKind> Default for Minter<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: HandleKind> Minter<K> {
    #[must_use]
    pub fn new() -> Self {
        Self {
            chunks: (0..CHUNKS).map(|_| OnceLock::new()).collect(),
            fresh: AtomicU32::new(0),
            free: AtomicU64::new(u64::from(NONE)),
            kind: PhantomData,
        }
    }

    /// A handle that is not in use, or `None` when all indices are.
    pub fn mint(&self) -> Option<Handle<K>> {
        let index = self.pop().or_else(|| self.grow())?;
        let entry = self.entry(index)?;
        let generation = entry.generation.fetch_or(LIVE, Ordering::AcqRel) & !LIVE;
        Handle::new(Key { index, generation })
    }

    /// Takes a handle back. False if it is not live (any more).
    pub fn release(&self, handle: Handle<K>) -> bool {
        let Some(key) = handle.key() else {
            return false;
        };
        let Some(entry) = self.entry(key.index) else {
            return false;
        };
        let next = (key.generation + 1) % GENERATIONS;
        let released = entry
            .generation
            .compare_exchange(
                key.generation | LIVE,
                next,
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .is_ok();
        if released {
            self.push(key.index, entry);
        }
        released
    }

    /// Whether a handle was minted and not released.
    #[must_use]
    pub fn is_live(&self, handle: Handle<K>) -> bool {
        handle.key().is_some_and(|key| {
            self.entry(key.index).is_some_and(|entry| {
                entry.generation.load(Ordering::Acquire) == key.generation | LIVE
            })
        })
    }

    fn entry(&self, index: u32) -> Option<&Entry> {
        let index = usize::try_from(index).ok()?;
        let chunk = self.chunks.get(index / CHUNK)?.get_or_init(|| {
            (0..CHUNK)
                .map(|_| Entry {
                    generation: AtomicU16::new(0),
                    below: AtomicU32::new(NONE),
                })
                .collect()
        });
        chunk.get(index % CHUNK)
    }

    fn grow(&self) -> Option<u32> {
        self.fresh
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                (next < INDICES).then_some(next + 1)
            })
            .ok()
    }

    fn pop(&self) -> Option<u32> {
        let mut top = self.free.load(Ordering::Acquire);
        loop {
            let index = index_of(top);
            if index == NONE {
                return None;
            }
            let below = self.entry(index)?.below.load(Ordering::Relaxed);
            match self.free.compare_exchange_weak(
                top,
                with_index(top, below),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Some(index),
                Err(now) => top = now,
            }
        }
    }

    fn push(&self, index: u32, entry: &Entry) {
        let mut top = self.free.load(Ordering::Relaxed);
        loop {
            entry.below.store(index_of(top), Ordering::Relaxed);
            match self.free.compare_exchange_weak(
                top,
                with_index(top.wrapping_add(1 << 32), index),
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }
}

impl<K: HandleKind> fmt::Debug for Minter<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Minter")
            .field("kind", &K::NAME)
            .field("minted", &self.fresh.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the lower half is the index"
)]
const fn index_of(top: u64) -> u32 {
    top as u32
}

const fn with_index(top: u64, index: u32) -> u64 {
    top & !(u32::MAX as u64) | index as u64
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::vec::Vec;

    use super::*;
    use crate::handle::Stream;

    #[test]
    fn a_released_handle_is_dead_and_its_index_returns_with_a_new_generation() {
        let minter = Minter::<Stream>::new();
        let first = minter.mint().expect("room");
        assert!(minter.is_live(first));
        assert!(minter.release(first));
        assert!(!minter.is_live(first));
        assert!(!minter.release(first));
        let second = minter.mint().expect("room");
        assert_eq!(
            second.key().map(|key| key.index),
            first.key().map(|key| key.index)
        );
        assert_ne!(second, first);
    }

    #[test]
    fn threads_never_hold_the_same_handle() {
        let minter = Minter::<Stream>::new();
        let held: Vec<Handle<Stream>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let mut held = Vec::new();
                        for round in 0..2000 {
                            held.push(minter.mint().expect("room"));
                            if round % 3 != 0 {
                                let handle = held.swap_remove(round % held.len());
                                assert!(minter.release(handle), "{handle:?} was released twice");
                            }
                        }
                        held
                    })
                })
                .collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().expect("no panic"))
                .collect()
        });
        let distinct: HashSet<_> = held.iter().map(|handle| handle.to_wire()).collect();
        assert_eq!(distinct.len(), held.len());
        assert!(held.iter().all(|handle| minter.is_live(*handle)));
    }
}
