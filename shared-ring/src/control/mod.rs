//! Messages of the control channel: a frozen header, a fixed body for each message, and for some a text behind it.
//!
//! Integers are little-endian. The decoder is total: it turns any bytes into a message or a [`ControlError`].

mod body;
pub mod facts;
mod message;

pub use body::{
    ArenaDenied, ArenaRequest, ArenaRun, ArenaWithin, Attach, Band, Exits, Fetch, Fetched,
    FileMemory, Grant, HelloFixed, ObservationFixed, Observe, ProcessNumber, ReadyFixed, Refusal,
    RefusedFixed, Share, Shared, Stream, UsageFixed, WindowRun,
};
pub use message::Message;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The first four bytes of a message: `WHC1`.
pub const MAGIC: u32 = 0x3143_4857;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 16;
/// Most bytes of a body.
pub const MAX_CONTROL_BODY: usize = 8192;
/// Most bytes of a message with its header.
pub const MAX_FRAME: usize = HEADER_BYTES + MAX_CONTROL_BODY;
/// Port that the supervisor listens on when the channel is vsock.
pub const VSOCK_PORT: u32 = 9000;

/// Feature bit of the hello and of the grant: the supervisor accepts [`Message::Process`].
pub const FEATURE_PROCESS: u64 = 1;
/// Feature bit of the hello and of the grant, for a guest process on the supervisor's own system: it may send file
/// descriptors to its worker, on a socket that travels with the grant.
pub const FEATURE_FILES: u64 = 2;
/// Feature bit of the hello and of the grant: the supervisor accepts [`Message::ArenaWithin`].
pub const FEATURE_WITHIN: u64 = 4;
/// Feature bit of the hello and of the grant, for a process of a guest VM: the worker maps parts of the guest's file memory
/// ([`Message::FileMemory`]).
pub const FEATURE_FILE_MEMORY: u64 = 8;

/// Errors of decoding and of encoding a control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// The bytes do not start with [`MAGIC`]: the stream carries another protocol, or is out of step.
    #[error("a control message starts with {found:#010x} instead of {MAGIC:#010x}")]
    Magic {
        /// The first four bytes.
        found: u32,
    },
    /// The header's reserved fields are set.
    #[error(
        "control message of kind {kind}: reserved header fields are {flags:#x} and {reserved:#x}"
    )]
    Reserved {
        /// The kind.
        kind: u16,
        /// The flags.
        flags: u16,
        /// The reserved word.
        reserved: u32,
    },
    /// The body is longer than [`MAX_CONTROL_BODY`].
    #[error("control message of kind {kind}: {length} bytes exceed the limit of {limit}")]
    TooLong {
        /// The kind.
        kind: u16,
        /// Bytes of the body.
        length: usize,
        /// Most bytes of a body.
        limit: usize,
    },
    /// The kind is unknown.
    #[error("control message of unknown kind {kind}, {length} bytes")]
    Kind {
        /// The kind.
        kind: u16,
        /// Bytes of the body.
        length: usize,
    },
    /// The body does not have the length of this message's body.
    #[error("control message {message}: {length} bytes, expected {expected}")]
    Length {
        /// The message's name.
        message: &'static str,
        /// Bytes of the body.
        length: usize,
        /// Bytes of the message's fixed body, with the text that it announces.
        expected: usize,
    },
    /// The text behind the body is not UTF-8.
    #[error("control message {message}: its text of {length} bytes is not UTF-8 at byte {valid}")]
    Text {
        /// The message's name.
        message: &'static str,
        /// Bytes of the text.
        length: usize,
        /// Bytes before the first invalid one.
        valid: usize,
    },
    /// The encoded message does not fit the buffer.
    #[error("control message {message}: {length} bytes do not fit a buffer of {limit}")]
    Buffer {
        /// The message's name.
        message: &'static str,
        /// Bytes of header and body.
        length: usize,
        /// Bytes of the buffer.
        limit: usize,
    },
}

/// A header that passed [`Header::decode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of the message that follows.
    pub kind: u16,
    /// Bytes of the body, at most [`MAX_CONTROL_BODY`].
    pub body_len: usize,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct WireHeader {
    magic: u32,
    kind: u16,
    flags: u16,
    body_len: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<WireHeader>() == HEADER_BYTES);

impl Header {
    /// Decodes a header.
    ///
    /// # Errors
    /// The magic is wrong, a reserved field is set, or the body is longer than [`MAX_CONTROL_BODY`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, ControlError> {
        let WireHeader {
            magic,
            kind,
            flags,
            body_len,
            reserved,
        } = zerocopy::transmute!(*bytes);
        if magic != MAGIC {
            return Err(ControlError::Magic { found: magic });
        }
        if flags != 0 || reserved != 0 {
            return Err(ControlError::Reserved {
                kind,
                flags,
                reserved,
            });
        }
        let length = body_len as usize;
        if length > MAX_CONTROL_BODY {
            return Err(ControlError::TooLong {
                kind,
                length,
                limit: MAX_CONTROL_BODY,
            });
        }
        Ok(Self {
            kind,
            body_len: length,
        })
    }

    fn encode(self) -> [u8; HEADER_BYTES] {
        #[expect(clippy::cast_possible_truncation, reason = "at most MAX_CONTROL_BODY")]
        let body_len = self.body_len as u32;
        zerocopy::transmute!(WireHeader {
            magic: MAGIC,
            kind: self.kind,
            flags: 0,
            body_len,
            reserved: 0,
        })
    }
}
