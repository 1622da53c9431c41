//! Notes of the guest's waiting threads, for a dump of the supervisor.
//!
//! A guest thread that goes to sleep notes its wait in the session's header page and clears the note afterwards. A wait
//! that ends without sleep writes nothing. The notes are the guest's own and decide nothing.

use core::fmt;

use crate::{layout::session, memory::SessionMemory, sync::Ordering};

/// Bytes of a note: the wait, then its value.
const STRIDE: usize = 16;

/// Events that a guest thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The answer in this slot.
    Answer(u16),
    /// An answer slot that no other thread uses.
    Slot,
    /// Room in the ring.
    Room,
    /// A fence, and the value that it must reach.
    Fence(u32, u64),
    /// The turn of a host function in its stream or graph.
    HostFunction,
    /// A staging buffer that the device no longer uses.
    Staging,
}

impl Wait {
    /// Returns the kind's number, the detail (below 2^24) and the value.
    const fn parts(self) -> (u8, u32, u64) {
        match self {
            Self::Answer(slot) => (1, slot as u32, 0),
            Self::Slot => (2, 0, 0),
            Self::Room => (3, 0, 0),
            Self::Fence(fence, value) => (4, fence & 0xff_ffff, value),
            Self::HostFunction => (5, 0, 0),
            Self::Staging => (6, 0, 0),
        }
    }
}

/// The notes of a session, for both sides.
///
/// ```
/// use wormhole_ring::{memory::OwnedMemory, waits::{Wait, Waits}};
/// let region = OwnedMemory::segments(1);
/// // SAFETY: the region outlives the notes.
/// let waits = Waits::new(unsafe { region.session(0) }.unwrap());
/// let note = waits.note(77, Wait::Fence(3, 9));
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
        (0..session::WAITS).map(offset).find_map(|offset| {
            self.memory
                .word(offset)
                .compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed)
                .ok()?;
            self.memory.word(offset + 8).store(value, Ordering::Relaxed);
            Some(Note {
                waits: self,
                offset,
            })
        })
    }
}

/// Returns the offset of a note.
const fn offset(index: usize) -> usize {
    session::WAITS_BASE + index * STRIDE
}

/// Formats the notes, each after a semicolon.
impl fmt::Display for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for offset in (0..session::WAITS).map(offset) {
            let word = self.memory.word(offset).load(Ordering::Relaxed);
            if word == 0 {
                continue;
            }
            let value = self.memory.word(offset + 8).load(Ordering::Relaxed);
            let (thread, detail) = (word & 0xffff_ffff, (word >> 32) & 0xff_ffff);
            write!(f, "; guest thread {thread} waits for ")?;
            match word >> 56 {
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
    offset: usize,
}

impl Drop for Note<'_> {
    fn drop(&mut self) {
        self.waits
            .memory
            .word(self.offset)
            .store(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::OwnedMemory;

    #[test]
    fn a_thread_that_finds_no_place_for_its_note_disturbs_no_other() {
        let region = OwnedMemory::segments(1);
        // SAFETY: the region outlives the notes.
        let waits = Waits::new(unsafe { region.session(0) }.unwrap());
        let mut notes: Vec<_> = (1..=session::WAITS)
            .map(|_| waits.note(5, Wait::Room).unwrap())
            .collect();
        assert!(waits.note(6, Wait::Slot).is_none());
        notes.pop();
        let last = waits.note(7, Wait::Answer(127)).unwrap();
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
        let region = OwnedMemory::segments(1);
        // SAFETY: the region outlives the memory.
        let memory = unsafe { region.session(0) }.unwrap();
        for index in 0..2 * session::WAITS {
            memory
                .word(session::WAITS_BASE + 8 * index)
                .store(u64::MAX, Ordering::Relaxed);
        }
        assert!(Waits::new(memory).to_string().contains("unknown kind 255"));
    }
}
