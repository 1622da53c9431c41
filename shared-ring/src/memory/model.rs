use std::sync::Arc;

use loom::cell::UnsafeCell;

use crate::{layout, sync::AtomicU64};

/// A small session segment for loom. Words that synchronise are loom atomics, all others are cells,
/// so that an access the protocol does not order fails the model.
#[derive(Clone, Debug)]
pub struct SessionMemory {
    words: Arc<[Word]>,
}

#[derive(Debug)]
enum Word {
    Atomic(AtomicU64),
    Cell(UnsafeCell<u64>),
}

// SAFETY: loom itself reports unordered accesses to the cells.
unsafe impl Send for SessionMemory {}
// SAFETY: as above.
unsafe impl Sync for SessionMemory {}

impl SessionMemory {
    /// Creates a zeroed session.
    #[must_use]
    pub fn new() -> Self {
        use layout::session;
        let synchronises = |offset: usize| {
            offset <= session::SLOT_BASE
                || (session::FENCE_BASE..session::RING_BASE).contains(&offset)
                || (offset >= session::RING_BASE && offset.is_multiple_of(layout::UNIT))
        };
        let word = |index: usize| {
            if synchronises(index * 8) {
                Word::Atomic(AtomicU64::new(0))
            } else {
                Word::Cell(UnsafeCell::new(0))
            }
        };
        Self {
            words: (0..session::BYTES / 8).map(word).collect(),
        }
    }

    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        match &self.words[offset / 8] {
            Word::Atomic(word) => word,
            Word::Cell(_) => panic!("offset {offset:#x} holds no synchronising word"),
        }
    }

    /// Does nothing: the model has no caches.
    pub(crate) fn prefetch_for_write(&self, _offset: usize) {}

    pub(crate) fn write_word(&self, offset: usize, value: u64) {
        match &self.words[offset / 8] {
            Word::Atomic(word) => word.store(value, crate::sync::Ordering::Relaxed),
            // SAFETY: loom checks that no other thread accesses the cell.
            Word::Cell(cell) => cell.with_mut(|word| unsafe { *word = value }),
        }
    }

    pub(crate) fn read_word(&self, offset: usize) -> u64 {
        match &self.words[offset / 8] {
            Word::Atomic(word) => word.load(crate::sync::Ordering::Relaxed),
            // SAFETY: loom checks that no other thread writes the cell.
            Word::Cell(cell) => cell.with(|word| unsafe { *word }),
        }
    }

    pub(crate) fn write(&self, offset: usize, source: &[u8]) {
        let (words, rest) = source.as_chunks::<8>();
        assert!(rest.is_empty(), "models copy whole words");
        for (index, word) in words.iter().enumerate() {
            self.write_word(offset + index * 8, u64::from_le_bytes(*word));
        }
    }

    pub(crate) fn read(&self, offset: usize, destination: &mut [u8]) {
        let (words, rest) = destination.as_chunks_mut::<8>();
        assert!(rest.is_empty(), "models copy whole words");
        for (index, word) in words.iter_mut().enumerate() {
            *word = self.read_word(offset + index * 8).to_le_bytes();
        }
    }
}

impl Default for SessionMemory {
    fn default() -> Self {
        Self::new()
    }
}
