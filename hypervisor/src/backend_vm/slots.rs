//! The slots of a backend VM, each for the window of one tenant.
//!
//! ```text
//! absent ──offer──▶ free ──take──▶ attached ──leave──▶ leaving
//!    ▲                                 │                  │
//!    └────────── acknowledged ─────────┴──────────────────┤
//!                                                         └─ not acknowledged ──▶ quarantined
//!                                                                                     │
//! absent ◀───────────────────────────── acknowledged late ────────────────────────────┘
//! ```
//!
//! The VM offers a slot when nothing in it refers to the slot's memory: after its start, and again after each tenant.
//! A slot whose end the VM has not acknowledged is not offered before that, since a process in the VM may still reach it, and
//! would reach the next tenant's memory.

/// State of a slot. A free one has the stream to its relay in the VM.
#[derive(Debug)]
enum State<W> {
    /// The VM has not offered it since its start, or since the last tenant.
    Absent,
    Free(W),
    Attached,
    /// The tenant has left, and the VM has not acknowledged that.
    Leaving,
    Quarantined,
}

/// Result of a request for a slot.
#[derive(Debug, PartialEq, Eq)]
pub enum Taken<W> {
    Slot(u32, W),
    /// A slot may become free without the end of a tenant.
    Later,
    /// All have tenants or are in quarantine.
    None {
        quarantined: usize,
    },
}

/// The slots by their numbers.
#[derive(Debug)]
pub struct SlotTable<W>(Vec<State<W>>);

impl<W> SlotTable<W> {
    /// Returns `count` slots that the VM has not offered.
    pub fn new(count: u32) -> Self {
        Self((0..count).map(|_| State::Absent).collect())
    }

    fn state(&mut self, slot: u32) -> Option<&mut State<W>> {
        self.0.get_mut(usize::try_from(slot).ok()?)
    }

    /// Makes a slot free, if the VM may offer it now. Returns whether it may.
    pub fn offer(&mut self, slot: u32, way: W) -> bool {
        match self.state(slot) {
            Some(state @ State::Absent) => {
                *state = State::Free(way);
                true
            }
            _ => false,
        }
    }

    /// Takes a free slot for a tenant.
    pub fn take(&mut self) -> Taken<W> {
        let free = self
            .0
            .iter()
            .position(|state| matches!(state, State::Free(_)));
        if let Some(at) = free
            && let State::Free(way) = std::mem::replace(&mut self.0[at], State::Attached)
        {
            // There are few slots.
            return Taken::Slot(u32::try_from(at).unwrap_or(u32::MAX), way);
        }
        let mut states = self.0.iter();
        if states.any(|state| matches!(state, State::Absent | State::Leaving)) {
            return Taken::Later;
        }
        Taken::None {
            quarantined: self.quarantined(),
        }
    }

    /// Notes that a slot's tenant leaves.
    pub fn leave(&mut self, slot: u32) {
        if let Some(state @ State::Attached) = self.state(slot) {
            *state = State::Leaving;
        }
    }

    /// Ends a tenant's time in a slot, whose memory is no longer mapped. The VM may offer the slot again if it has
    /// acknowledged the end, also if that was late.
    pub fn end(&mut self, slot: u32, is_acknowledged: bool) {
        if let Some(state @ (State::Attached | State::Leaving | State::Quarantined)) =
            self.state(slot)
        {
            *state = match is_acknowledged {
                true => State::Absent,
                false => State::Quarantined,
            };
        }
    }

    pub fn quarantined(&self) -> usize {
        let states = self.0.iter();
        states
            .filter(|state| matches!(state, State::Quarantined))
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_given_once_it_is_offered_and_to_one_tenant() {
        let mut slots = SlotTable::new(2);
        assert_eq!(slots.take(), Taken::Later);
        assert!(slots.offer(1, 'b'));
        assert!(!slots.offer(1, 'x'), "it is free already");
        assert!(!slots.offer(2, 'x'), "there is none of this number");
        assert_eq!(slots.take(), Taken::Slot(1, 'b'));
        assert!(!slots.offer(1, 'x'), "it has a tenant");
        assert_eq!(slots.take(), Taken::Later);
        assert!(slots.offer(0, 'a'));
        assert_eq!(slots.take(), Taken::Slot(0, 'a'));
        assert_eq!(slots.take(), Taken::None { quarantined: 0 });
    }

    #[test]
    fn a_slot_is_reused_only_after_it_was_acknowledged_and_offered() {
        let mut slots = SlotTable::new(1);
        for way in 0..10 {
            assert!(slots.offer(0, way));
            assert_eq!(slots.take(), Taken::Slot(0, way));
            slots.leave(0);
            assert!(!slots.offer(0, way), "its end is not acknowledged");
            assert_eq!(slots.take(), Taken::Later);
            slots.end(0, true);
            assert_eq!(slots.take(), Taken::Later, "it is not offered");
        }
        assert_eq!(slots.quarantined(), 0);
    }

    #[test]
    fn a_slot_is_not_reused_before_a_late_acknowledgement() {
        let mut slots = SlotTable::new(2);
        assert!(slots.offer(0, ()) && slots.offer(1, ()));
        assert_eq!(slots.take(), Taken::Slot(0, ()));
        slots.leave(0);
        slots.end(0, false);
        assert_eq!(slots.quarantined(), 1);
        for _ in 0..3 {
            assert!(!slots.offer(0, ()));
            assert_eq!(slots.take(), Taken::Slot(1, ()));
            assert_eq!(slots.take(), Taken::None { quarantined: 1 });
            slots.end(1, true);
            assert!(slots.offer(1, ()));
        }
        slots.end(0, true);
        assert_eq!(slots.quarantined(), 0);
        assert_eq!(slots.take(), Taken::Slot(1, ()));
        assert_eq!(slots.take(), Taken::Later, "it is not offered");
        assert!(slots.offer(0, ()));
        assert_eq!(slots.take(), Taken::Slot(0, ()));
    }

    #[test]
    fn all_slots_in_use_or_in_quarantine_leave_none() {
        let mut slots = SlotTable::new(3);
        for slot in 0..3 {
            assert!(slots.offer(slot, ()));
            assert_eq!(slots.take(), Taken::Slot(slot, ()));
        }
        assert_eq!(slots.take(), Taken::None { quarantined: 0 });
        slots.end(2, false);
        assert_eq!(slots.take(), Taken::None { quarantined: 1 });
        slots.leave(0);
        assert_eq!(slots.take(), Taken::Later);
    }
}
