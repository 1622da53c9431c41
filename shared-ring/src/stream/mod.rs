//! A session over a byte stream, in place of the ring: the classic way of forwarding, to be measured beside it.
//!
//! Each record is a message that waits for its answer. Data of copies and waits for fences are messages too. A [`Server`]
//! beside the backend has the session's memory, puts each record into the ring and sends the answer back, so that the
//! worker is the same one. A client is on one thread; each thread of a program has a stream of its own.

#[cfg(all(feature = "std", not(loom)))]
mod ends;

use zerocopy::{FromBytes, Immutable, IntoBytes};

#[cfg(all(feature = "std", not(loom)))]
pub use self::ends::{Client, Server, StreamError, pass_on, serve};
use crate::fence::FenceIndex;
use crate::ring::RecordHead;
use crate::slot::SlotIndex;

/// Greatest number of bytes of one message's data.
pub const MOST: usize = 1 << 20;

/// Kinds of messages of a client.
const RECORD: u32 = 1;
const PUT: u32 = 2;
const GET: u32 = 3;
const FENCE: u32 = 4;

/// A client's demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Execute a record, whose body follows.
    Record(RecordHead),
    /// Copy the data that follow to this offset of the session's file.
    Put(u64),
    /// Send data from this offset of the session's file.
    Get(u64),
    /// Wait until a fence has at least this value, or the session has ended.
    Fence(FenceIndex, u64),
}

/// A message without its data.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Request {
    kind: u32,
    /// Bytes: of the data that follow, or that are asked for.
    bytes: u32,
    /// Offset in the session's file; or the value of a fence; or the sequence number of a record.
    value: u64,
    /// Message, thread, slot and device of a record; or the index of a fence.
    words: [u16; 4],
}

impl Request {
    /// Returns the bytes of a message for which, or with which, so many bytes of data go.
    ///
    /// ```
    /// use wormhole_ring::stream::{Message, Request};
    /// let request = Request::new(Message::Put(4096), 17);
    /// assert_eq!(request.message(), Some((Message::Put(4096), 17)));
    /// ```
    #[must_use]
    pub fn new(message: Message, bytes: u32) -> Self {
        let (kind, value, words) = match message {
            Message::Record(head) => {
                let slot = head.slot.map_or(SlotIndex::NONE_WIRE, SlotIndex::get);
                let words = [head.message, head.thread, slot, head.device];
                (RECORD, head.sequence, words)
            }
            Message::Put(offset) => (PUT, offset, [0; 4]),
            Message::Get(offset) => (GET, offset, [0; 4]),
            Message::Fence(fence, value) => {
                // An index fits: the fences of a session are far fewer.
                let index = u16::try_from(fence.get()).unwrap_or(u16::MAX);
                (FENCE, value, [index, 0, 0, 0])
            }
        };
        Self {
            kind,
            bytes,
            value,
            words,
        }
    }

    /// Returns the bytes that a client sends before the data.
    #[must_use]
    pub fn wire(&self) -> &[u8] {
        self.as_bytes()
    }

    /// Returns the message and its number of bytes. `None` if no correct client sends it.
    #[must_use]
    pub fn message(&self) -> Option<(Message, usize)> {
        let bytes = self.bytes as usize;
        let [message, thread, slot, device] = self.words;
        let message = match self.kind {
            RECORD => Message::Record(RecordHead {
                message,
                thread,
                slot: match slot {
                    SlotIndex::NONE_WIRE => None,
                    slot => Some(SlotIndex::new(slot)?),
                },
                device,
                sequence: self.value,
            }),
            PUT => Message::Put(self.value),
            GET => Message::Get(self.value),
            FENCE => Message::Fence(FenceIndex::new(message.into())?, self.value),
            _ => return None,
        };
        (bytes <= MOST).then_some((message, bytes))
    }
}

/// An answer without its data.
#[cfg(all(feature = "std", not(loom)))]
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Reply {
    /// 0, or 1 if the session has ended without an answer.
    over: u32,
    /// `CUresult` of a request.
    status: u32,
    /// Bytes of the data that follow.
    bytes: u64,
}
