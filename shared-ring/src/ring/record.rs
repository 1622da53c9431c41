use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::{layout, slot::SlotIndex};

/// Decoded header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHead {
    /// The message's id in the API table.
    pub message: u16,
    /// Number of the guest's thread that sends the record, from 1 on. Launches of one thread are executed in its order. A record
    /// with 0 is ordered by its stream alone.
    pub thread: u16,
    /// Answer slot of the request; `None` for a record without an answer.
    pub slot: Option<SlotIndex>,
    /// Number in the session of the device that the message is for.
    pub device: u16,
    /// Sequence number that the answer carries.
    pub sequence: u64,
}

impl RecordHead {
    /// Creates the head of a record that expects no answer.
    #[must_use]
    pub const fn record(message: u16) -> Self {
        Self {
            message,
            thread: 0,
            slot: None,
            device: 0,
            sequence: 0,
        }
    }

    /// Creates the head of a request whose answer goes to `slot` and carries `sequence`.
    #[must_use]
    pub const fn request(message: u16, slot: SlotIndex, sequence: u64) -> Self {
        Self {
            message,
            thread: 0,
            slot: Some(slot),
            device: 0,
            sequence,
        }
    }

    /// Returns the head for this device instead of the first one.
    #[must_use]
    pub const fn on(self, device: u16) -> Self {
        Self { device, ..self }
    }

    /// Returns the head of a record that this thread sends.
    #[must_use]
    pub const fn by(self, thread: u16) -> Self {
        Self { thread, ..self }
    }

    #[inline]
    pub(super) fn route(self) -> [u16; 4] {
        let slot = self.slot.map_or(SlotIndex::NONE_WIRE, SlotIndex::get);
        [self.message, self.thread, slot, self.device]
    }
}

/// Wire format of a record's header, without the commit word.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct WireHead {
    /// Message, thread, slot and device. The slot is [`SlotIndex::NONE_WIRE`] or the index of an answer slot.
    pub(super) route: [u16; 4],
    /// Always 0.
    pub(super) pad: [u16; 2],
    /// Bytes of the body, at most [`layout::MAX_BODY`].
    pub(super) body_len: u32,
    pub(super) sequence: u64,
}

const _: () = assert!(size_of::<WireHead>() + 8 == layout::RECORD_HEADER);

/// Returns the number of units of a record with a body of `body` bytes, at most [`layout::MAX_BODY`].
pub(super) const fn units_for(body: usize) -> usize {
    (layout::RECORD_HEADER + body).div_ceil(layout::UNIT)
}

/// Commit word of an entry: 0 while it is not published, otherwise its length, its lap around the ring and whether it
/// is a pad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Commit {
    /// Length in units. In `1..=MAX_RECORD / UNIT` for every entry that a producer writes.
    pub(super) units: usize,
    pub(super) pad: bool,
    pub(super) lap: u32,
}

const PAD_FLAG: u64 = 1 << 16;

impl Commit {
    /// Returns the lap of the entry that starts at `cursor`, modulo 2^32.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "laps are compared modulo 2^32"
    )]
    pub(super) const fn lap_of(cursor: u64) -> u32 {
        (cursor / layout::RING_BYTES as u64) as u32
    }

    pub(super) const fn to_word(self) -> u64 {
        let pad = if self.pad { PAD_FLAG } else { 0 };
        (self.lap as u64) << 32 | pad | self.units as u64
    }

    /// Decodes a commit word that is not 0. Returns `None` if it has bits that no producer sets.
    pub(super) const fn from_word(word: u64) -> Option<Self> {
        if word & 0xFFFE_0000 != 0 {
            return None;
        }
        let units = (word & 0xFFFF) as usize;
        Some(Self {
            units,
            pad: word & PAD_FLAG != 0,
            lap: (word >> 32) as u32,
        })
    }
}

/// Private memory that a record is copied to before it is parsed.
///
/// A buffer is large (36 KiB), so a consumer allocates one and reuses it.
#[derive(Clone)]
pub struct RecordBuf {
    bytes: RecordBytes,
    /// Bytes of the body, at most [`layout::MAX_BODY`].
    body_len: usize,
}

#[derive(Clone)]
#[repr(C, align(64))]
struct RecordBytes([u8; layout::MAX_RECORD]);

impl RecordBuf {
    /// Creates an empty buffer.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            bytes: RecordBytes([0; layout::MAX_RECORD]),
            body_len: 0,
        }
    }

    /// Returns the body of the record taken last. It starts at a multiple of 32 bytes.
    #[must_use]
    pub fn body(&self) -> &[u8] {
        &self.bytes.0[layout::RECORD_HEADER..layout::RECORD_HEADER + self.body_len]
    }

    pub(super) fn units_mut(&mut self, units: usize) -> &mut [u8] {
        self.body_len = 0;
        &mut self.bytes.0[..units * layout::UNIT]
    }

    pub(super) fn head(&self) -> WireHead {
        let bytes = &self.bytes.0[8..layout::RECORD_HEADER];
        WireHead::read_from_bytes(bytes).expect("the header is 24 bytes long")
    }

    /// Sets the body's length, at most [`layout::MAX_BODY`].
    pub(super) fn set_body(&mut self, length: usize) {
        debug_assert!(length <= layout::MAX_BODY);
        self.body_len = length;
    }
}

impl Default for RecordBuf {
    fn default() -> Self {
        Self::new()
    }
}

impl core::fmt::Debug for RecordBuf {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("RecordBuf")
            .field("body_len", &self.body_len)
            .finish_non_exhaustive()
    }
}
