//! Answer slots, in which workers publish answers to requests of guest threads.
//!
//! A slot belongs to one guest thread. Its header holds the sequence number of the answer, then status and length in
//! one word. The worker writes an answer only after its request, and the guest reads it before its next request, so
//! neither side needs a lock.

use crate::{
    layout::{SLOT_PAYLOAD, SLOTS, session},
    memory::SessionMemory,
    sync::SyncPoint,
};

/// Index of an answer slot, below [`SLOTS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotIndex(u16);

impl SlotIndex {
    /// Value of a record's `slot` field if it expects no answer.
    pub(crate) const NONE_WIRE: u16 = 0xFFFF;

    /// Returns the slot with this index, or `None` if it is not below [`SLOTS`].
    ///
    /// ```
    /// use wormhole_ring::slot::SlotIndex;
    /// assert!(SlotIndex::new(127).is_some());
    /// assert!(SlotIndex::new(128).is_none());
    /// ```
    #[must_use]
    pub const fn new(index: u16) -> Option<Self> {
        if (index as usize) < SLOTS {
            Some(Self(index))
        } else {
            None
        }
    }

    /// Returns the index.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }
}

/// An answer, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The `CUresult` of the call.
    pub status: u32,
    /// Bytes of the payload, at most [`SLOT_PAYLOAD`].
    pub length: usize,
}

/// Errors of writing and of reading an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SlotError {
    /// The payload is longer than a slot.
    #[error("an answer of {length} bytes exceeds the {SLOT_PAYLOAD} bytes of slot {slot}")]
    TooLong {
        /// Index of the slot.
        slot: u16,
        /// Bytes of the payload.
        length: usize,
    },
}

/// The answer slots of a session, for both sides.
///
/// ```
/// use wormhole_ring::{memory::OwnedMemory, slot::{AnswerSlots, SlotIndex}};
/// let region = OwnedMemory::segments(1);
/// // SAFETY: the region outlives the slots.
/// let slots = unsafe { AnswerSlots::new(region.session(0).unwrap()) };
/// let slot = SlotIndex::new(3).unwrap();
/// assert_eq!(slots.poll(slot, 1).unwrap(), None);
/// slots.publish(slot, 1, 0, &[b"free", b"total"]).unwrap();
/// let answer = slots.poll(slot, 1).unwrap().unwrap();
/// let mut payload = [0; 9];
/// slots.copy_payload(slot, 0, &mut payload[..answer.length]);
/// assert_eq!(&payload, b"freetotal");
/// ```
#[derive(Clone, Debug)]
pub struct AnswerSlots {
    memory: SessionMemory,
}

const SEQUENCE: usize = 0;
const STATUS_AND_LENGTH: usize = 8;

impl AnswerSlots {
    /// Creates the view of the answer slots in `memory`.
    ///
    /// # Safety
    /// At any time at most one thread of this process publishes to a slot, in answer to the slot's pending request, and
    /// at most one thread polls it.
    #[must_use]
    pub unsafe fn new(memory: SessionMemory) -> Self {
        Self { memory }
    }

    /// Answers request `sequence` of `slot` with `status` and the concatenation of `parts`.
    ///
    /// # Errors
    /// The payload does not fit; nothing was written.
    #[inline]
    pub fn publish(
        &self,
        slot: SlotIndex,
        sequence: u64,
        status: u32,
        parts: &[&[u8]],
    ) -> Result<(), SlotError> {
        let length = parts
            .iter()
            .map(|part| part.len())
            .fold(0, usize::saturating_add);
        let wire_length = match u32::try_from(length) {
            Ok(wire_length) if length <= SLOT_PAYLOAD => wire_length,
            _ => {
                return Err(SlotError::TooLong {
                    slot: slot.0,
                    length,
                });
            }
        };
        let offset = offset(slot);
        let mut at = offset + session::SLOT_HEADER;
        for part in parts {
            self.memory.write(at, part);
            at += part.len();
        }
        let word = u64::from(wire_length) << 32 | u64::from(status);
        self.memory.write_word(offset + STATUS_AND_LENGTH, word);
        // SYNC POINT: answer. A thread that sees this number sees status, length and payload.
        self.memory
            .word(offset + SEQUENCE)
            .store(sequence, SyncPoint::Answer.release());
        Ok(())
    }

    /// Returns the answer to request `sequence` of `slot`, or `None` if it is not published yet.
    ///
    /// # Errors
    /// The answer claims more payload than a slot has: the session is lost.
    #[inline]
    pub fn poll(&self, slot: SlotIndex, sequence: u64) -> Result<Option<Answer>, SlotError> {
        if answered(&self.memory, slot) != sequence {
            return Ok(None);
        }
        let word = self.memory.read_word(offset(slot) + STATUS_AND_LENGTH);
        let length = (word >> 32) as usize;
        if length > SLOT_PAYLOAD {
            return Err(SlotError::TooLong {
                slot: slot.0,
                length,
            });
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the low half is the status"
        )]
        Ok(Some(Answer {
            status: word as u32,
            length,
        }))
    }

    /// Copies payload bytes from `start` on to `destination`, after [`AnswerSlots::poll`] returned
    /// the answer.
    ///
    /// # Panics
    /// The range does not lie in a slot's payload. Ranges within [`Answer::length`] always do.
    #[inline]
    pub fn copy_payload(&self, slot: SlotIndex, start: usize, destination: &mut [u8]) {
        assert!(start <= SLOT_PAYLOAD && destination.len() <= SLOT_PAYLOAD - start);
        self.memory
            .read(offset(slot) + session::SLOT_HEADER + start, destination);
    }
}

/// Returns the sequence number of the answer that a slot holds.
#[inline]
pub(crate) fn answered(memory: &SessionMemory, slot: SlotIndex) -> u64 {
    // SYNC POINT: answer. The worker's writes before this number are visible from here on.
    memory
        .word(offset(slot) + SEQUENCE)
        .load(SyncPoint::Answer.acquire())
}

#[inline]
const fn offset(slot: SlotIndex) -> usize {
    session::SLOT_BASE + slot.0 as usize * session::SLOT_STRIDE
}
