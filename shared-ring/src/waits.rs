//! Notes of the guest's waiting threads: by them the backend wakes a thread, and a dump of the supervisor shows it.
//!
//! A guest thread that goes to sleep notes its wait in the session's header page and clears the note afterwards. A wait
//! that ends without sleep writes nothing. On the backend's own system the thread sleeps on a word of its note (a
//! futex). The backend's threads look at the notes after events and wake the threads whose waits are over. With no
//! sleeping thread a look is one load. The notes are the guest's own: a wrong one costs a system call, and decides
//! nothing.

use core::fmt;

use crate::{
    fence::{FenceIndex, Fences},
    layout::session,
    memory::SessionMemory,
    slot::{SlotIndex, answered},
    sync::{AtomicU64, Ordering, SyncPoint},
};

/// Offsets in a note: the wait, its value, and 1 while the thread sleeps or is about to.
const WAIT: usize = 0;
const VALUE: usize = 8;
const ASLEEP: usize = 16;

/// Events that a guest thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The answer to a request: its slot and its sequence number.
    Answer(SlotIndex, u64),
    /// An answer slot that no other thread uses.
    Slot,
    /// Room in the ring.
    Room,
    /// A fence, and the value that it must reach.
    Fence(FenceIndex, u64),
    /// The turn of a host function in its stream or graph.
    HostFunction,
    /// A staging buffer that the device no longer uses.
    Staging,
}

impl Wait {
    /// Returns whether the backend wakes threads that wait so.
    #[must_use]
    pub const fn is_woken(self) -> bool {
        matches!(self, Self::Answer(..) | Self::Fence(..))
    }

    /// Returns the kind's number, the detail (below 2^24) and the value.
    const fn parts(self) -> (u8, u32, u64) {
        match self {
            Self::Answer(slot, sequence) => (1, slot.get() as u32, sequence),
            Self::Slot => (2, 0, 0),
            Self::Room => (3, 0, 0),
            Self::Fence(fence, value) => (4, fence.get() & 0xff_ffff, value),
            Self::HostFunction => (5, 0, 0),
            Self::Staging => (6, 0, 0),
        }
    }
}

/// The notes of a session, for both sides.
///
/// ```
/// use wormhole_ring::{fence::FenceIndex, memory::OwnedMemory, waits::{Wait, Waits}};
/// let region = OwnedMemory::segments(1);
/// // SAFETY: the region outlives the notes.
/// let waits = Waits::new(unsafe { region.session(0) }.unwrap());
/// let note = waits.note(77, Wait::Fence(FenceIndex::new(3).unwrap(), 9));
/// assert_eq!(waits.to_string(), "; guest thread 77 waits for fence 3 to become 9");
/// drop(note);
/// assert_eq!(waits.to_string(), "");
/// ```
#[derive(Clone, Debug)]
pub struct Waits {
    memory: SessionMemory,
}

impl Waits {
    /// Creates the view of the notes in `memory`.
    #[must_use]
    pub fn new(memory: SessionMemory) -> Self {
        Self { memory }
    }

    /// Notes the wait of a thread until the note is dropped. Returns `None` if all notes are in use.
    #[must_use]
    pub fn note(&self, thread: u32, wait: Wait) -> Option<Note<'_>> {
        let (kind, detail, value) = wait.parts();
        let word = u64::from(kind) << 56 | u64::from(detail) << 32 | u64::from(thread);
        (0..session::WAITS).find_map(|index| {
            self.word(index, WAIT)
                .compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed)
                .ok()?;
            self.word(index, VALUE).store(value, Ordering::Relaxed);
            Some(Note { waits: self, index })
        })
    }

    /// Returns whether a thread sleeps. Costs one load.
    #[inline]
    #[must_use]
    pub fn anyone_sleeps(&self) -> bool {
        self.sleeping() != 0
    }

    /// Calls `wake` with the word of each sleeping thread whose wait is over.
    ///
    /// A thread that went to sleep just before may be overlooked, unless a [`Waits::fence_before_look`] came between the event and
    /// this call. A caller that looks again and again needs none.
    #[inline]
    pub fn find_due(&self, wake: impl FnMut(&AtomicU64)) {
        let sleeping = self.sleeping();
        if sleeping != 0 {
            self.find_due_of(sleeping, wake);
        }
    }

    /// Orders the events before it and a look at the notes after it against threads that are about to sleep.
    #[inline]
    pub fn fence_before_look(&self) {
        // SYNC POINT: sleep. Either the next look sees the thread's announcement, or the thread, which checks once more
        // after it, sees the event.
        SyncPoint::Sleep.fence();
    }

    fn find_due_of(&self, sleeping: u64, mut wake: impl FnMut(&AtomicU64)) {
        let indices = (0..session::WAITS).filter(|index| sleeping >> index & 1 != 0);
        for index in indices.filter(|index| self.is_over(*index)) {
            let word = self.word(index, ASLEEP);
            if word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Relaxed) != 0 {
                wake(word);
            }
        }
    }

    #[inline]
    fn sleeping(&self) -> u64 {
        self.memory.word(session::SLEEPING).load(Ordering::Acquire)
    }

    /// Returns whether the awaited event has come, or the session has ended.
    fn is_over(&self, index: usize) -> bool {
        if self.memory.word(session::STATUS).load(Ordering::Acquire) != 0 {
            return true;
        }
        let (kind, detail, _) = self.read(index);
        let value = self.word(index, VALUE).load(Ordering::Relaxed);
        match kind {
            1 => u16::try_from(detail)
                .ok()
                .and_then(SlotIndex::new)
                .is_some_and(|slot| answered(&self.memory, slot) == value),
            4 => u32::try_from(detail)
                .ok()
                .and_then(FenceIndex::new)
                .is_some_and(|fence| Fences::new(self.memory.clone()).load(fence) >= value),
            _ => false,
        }
    }

    /// Returns kind, detail and thread of a note; the kind is 0 if the note is not in use.
    fn read(&self, index: usize) -> (u64, u64, u64) {
        let word = self.word(index, WAIT).load(Ordering::Relaxed);
        (word >> 56, word >> 32 & 0xff_ffff, word & 0xffff_ffff)
    }

    fn word(&self, index: usize, part: usize) -> &AtomicU64 {
        let note = session::WAITS_BASE + index * session::WAIT_STRIDE;
        self.memory.word(note + part)
    }
}

#[cfg(all(feature = "std", not(loom)))]
impl Waits {
    /// Wakes the threads whose waits are over. Returns whether it woke any.
    #[inline]
    pub fn wake(&self) -> bool {
        let mut woken = false;
        self.find_due(|word| {
            crate::futex::wake(word);
            woken = true;
        });
        woken
    }
}

/// Formats the notes, each after a semicolon.
impl fmt::Display for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for index in 0..session::WAITS {
            let (kind, detail, thread) = self.read(index);
            if kind == 0 {
                continue;
            }
            let value = self.word(index, VALUE).load(Ordering::Relaxed);
            write!(f, "; guest thread {thread} waits for ")?;
            match kind {
                1 => write!(f, "the answer in slot {detail}"),
                2 => f.write_str("a free answer slot"),
                3 => f.write_str("room in the ring"),
                4 => write!(f, "fence {detail} to become {value}"),
                5 => f.write_str("the turn of a host function"),
                6 => f.write_str("a staging buffer"),
                kind => write!(f, "an event of unknown kind {kind}"),
            }?;
        }
        Ok(())
    }
}

/// A note, cleared on drop.
#[derive(Debug)]
pub struct Note<'a> {
    waits: &'a Waits,
    index: usize,
}

impl Note<'_> {
    /// Announces that the thread is about to sleep, for the backend to wake it. The thread checks what it waits for
    /// between this and the sleep, on the word that is returned, while that is 1.
    pub fn announce(&self) -> &AtomicU64 {
        let asleep = self.waits.word(self.index, ASLEEP);
        asleep.store(1, Ordering::Relaxed);
        let sleeping = self.waits.memory.word(session::SLEEPING);
        sleeping.fetch_or(1 << self.index, Ordering::Release);
        // SYNC POINT: sleep.
        SyncPoint::Sleep.fence();
        asleep
    }

    /// Sleeps after [`Note::announce`] until the backend or a signal wakes the thread, or `limit` has passed. Returns
    /// false if the time has passed.
    #[cfg(all(feature = "std", not(loom)))]
    pub fn sleep(&self, limit: core::time::Duration) -> bool {
        crate::futex::wait(self.waits.word(self.index, ASLEEP), 1, limit)
    }
}

impl Drop for Note<'_> {
    fn drop(&mut self) {
        let sleeping = self.waits.memory.word(session::SLEEPING);
        if sleeping.load(Ordering::Relaxed) >> self.index & 1 != 0 {
            sleeping.fetch_and(!(1 << self.index), Ordering::Relaxed);
        }
        self.waits
            .word(self.index, WAIT)
            .store(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::OwnedMemory;
    use crate::status::{EndCause, Status};

    fn session() -> (SessionMemory, OwnedMemory) {
        let region = OwnedMemory::segments(1);
        // SAFETY: the tests keep the region as long as the memory.
        let memory = unsafe { region.session(0) }.unwrap();
        (memory, region)
    }

    #[test]
    fn a_thread_that_finds_no_place_for_its_note_disturbs_no_other() {
        let (memory, _region) = session();
        let waits = Waits::new(memory);
        let mut notes: Vec<_> = (1..=session::WAITS)
            .map(|_| waits.note(5, Wait::Room).unwrap())
            .collect();
        assert!(waits.note(6, Wait::Slot).is_none());
        notes.pop();
        let last = waits
            .note(7, Wait::Answer(SlotIndex::new(127).unwrap(), 1))
            .unwrap();
        assert!(
            waits
                .to_string()
                .contains("guest thread 7 waits for the answer in slot 127")
        );
        drop((last, notes));
        assert_eq!(waits.to_string(), "");
    }

    #[test]
    fn whatever_a_guest_writes_can_be_displayed() {
        let (memory, _region) = session();
        for index in 0..session::WAITS * session::WAIT_STRIDE / 8 {
            memory
                .word(session::WAITS_BASE + 8 * index)
                .store(u64::MAX, Ordering::Relaxed);
        }
        assert!(Waits::new(memory).to_string().contains("unknown kind 255"));
    }

    #[test]
    fn whatever_a_guest_writes_wakes_at_most_its_own_threads() {
        let (memory, _region) = session();
        let waits = Waits::new(memory.clone());
        let found = |kind: u64, detail: u64, value: u64| {
            memory
                .word(session::SLEEPING)
                .store(u64::MAX, Ordering::Relaxed);
            for index in 0..session::WAITS {
                let wait = kind << 56 | detail << 32;
                waits.word(index, WAIT).store(wait, Ordering::Relaxed);
                waits.word(index, VALUE).store(value, Ordering::Relaxed);
                waits.word(index, ASLEEP).store(u64::MAX, Ordering::Relaxed);
            }
            let mut found = 0;
            waits.find_due(|_| found += 1);
            waits.find_due(|_| found += 1);
            found
        };
        assert_eq!(found(4, 0, 0), session::WAITS);
        assert_eq!(found(4, 0, 1), 0);
        for (kind, detail) in [(1, 0xff_ffff), (4, 0xff_ffff), (1, 128), (255, 0), (0, 0)] {
            assert_eq!(found(kind, detail, 0), 0, "{kind} {detail}");
        }
        Status::new(memory.clone()).set_once(1, EndCause::Violation);
        assert_eq!(found(255, 0, 0), session::WAITS);
    }
}
