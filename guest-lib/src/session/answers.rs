//! Allocation of answer slots to requests. A thread reuses its last slot while that is free; more threads than slots
//! take turns.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use wormhole_ring::layout::SLOTS;
use wormhole_ring::slot::SlotIndex;

/// Answer slots, each free or in use.
#[derive(Debug)]
pub struct Slots {
    busy: [AtomicBool; SLOTS],
    next: AtomicUsize,
}

/// A slot allocated to this thread until dropped.
#[derive(Debug)]
pub struct Held<'a> {
    busy: &'a AtomicBool,
    pub index: SlotIndex,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.busy.store(false, Ordering::Release);
    }
}

thread_local! {
    /// The slot this thread used last; `usize::MAX` before its first request.
    static PREFERRED: Cell<usize> = const { Cell::new(usize::MAX) };
}

impl Slots {
    pub fn new() -> Self {
        Self {
            busy: [const { AtomicBool::new(false) }; SLOTS],
            next: AtomicUsize::new(0),
        }
    }

    /// Allocates a slot, if one is free now.
    #[inline]
    pub fn take(&self) -> Option<Held<'_>> {
        let preferred = match PREFERRED.get() {
            usize::MAX => self.next.fetch_add(1, Ordering::Relaxed),
            preferred => preferred,
        };
        for step in 0..SLOTS {
            let number = preferred.wrapping_add(step) % SLOTS;
            let busy = &self.busy[number];
            if !busy.load(Ordering::Relaxed) && !busy.swap(true, Ordering::Acquire) {
                PREFERRED.set(number);
                let index = u16::try_from(number).ok().and_then(SlotIndex::new)?;
                return Some(Held { busy, index });
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_its_slot() {
        let slots = Slots::new();
        let first = slots.take().unwrap().index;
        assert_eq!(slots.take().unwrap().index, first);
        let held = slots.take().unwrap();
        assert_ne!(slots.take().unwrap().index, held.index);
    }

    #[test]
    fn every_slot_is_taken_before_none_is_left() {
        let slots = Slots::new();
        let held: Vec<_> = (0..SLOTS).map(|_| slots.take().unwrap()).collect();
        assert!(slots.take().is_none());
        let mut numbers: Vec<_> = held.iter().map(|held| held.index).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), SLOTS);
        drop(held);
        assert!(slots.take().is_some());
    }
}
