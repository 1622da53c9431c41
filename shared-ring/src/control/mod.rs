//! The messages of the control channel: frozen header, one fixed body per message, and for some a
//! text behind it.
//!
//! Integers are little-endian. The decoder is total: any bytes give a message or a [`ControlError`].

mod body;
pub mod facts;
mod message;

pub use body::{
    ArenaDenied, ArenaRequest, ArenaRun, Attach, Band, Fetch, Fetched, Grant, HelloFixed,
    ObservationFixed, Observe, ProcessNumber, ReadyFixed, Refusal, RefusedFixed, Share, Shared,
    Stream, WindowRun,
};
pub use message::Message;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The first four bytes of a message: `WHC1`.
pub const MAGIC: u32 = 0x3143_4857;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 16;
/// The longest body.
pub const MAX_CONTROL_BODY: usize = 8192;
/// The longest message with its header.
pub const MAX_FRAME: usize = HEADER_BYTES + MAX_CONTROL_BODY;
/// The port that the supervisor listens on when the channel is vsock.
pub const VSOCK_PORT: u32 = 9000;

/// A feature of the hello and of the grant: the supervisor takes [`Message::Process`].
pub const FEATURE_PROCESS: u64 = 1;
/// The same, for a guest process of the supervisor's system: it may send its worker descriptors of files, on a
/// socket that comes with the grant.
pub const FEATURE_FILES: u64 = 2;

/// Why bytes are no control message, or a message cannot be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// The stream does not speak this protocol, or lost its place.
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
    /// The body is longer than any may be.
    #[error("control message of kind {kind}: {length} bytes exceed the limit of {limit}")]
    TooLong {
        /// The kind.
        kind: u16,
        /// Bytes of the body.
        length: usize,
        /// The longest body.
        limit: usize,
    },
    /// No message has this kind.
    #[error("control message of unknown kind {kind}, {length} bytes")]
    Kind {
        /// The kind.
        kind: u16,
        /// Bytes of the body.
        length: usize,
    },
    /// The body is not as long as this message's.
    #[error("control message {message}: {length} bytes, expected {expected}")]
    Length {
        /// The message's name.
        message: &'static str,
        /// Bytes of the body.
        length: usize,
        /// Bytes that the message has, with the text it announces.
        expected: usize,
    },
    /// The text behind the body is not UTF-8.
    #[error("control message {message}: its text of {length} bytes is not UTF-8 at byte {valid}")]
    Text {
        /// The message's name.
        message: &'static str,
        /// Bytes of the text.
        length: usize,
        /// Bytes before the first wrong one.
        valid: usize,
    },
    /// The message does not fit the buffer it is to be encoded in.
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

/// A checked header.
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
    /// Reads a header.
    ///
    /// # Errors
    /// It is none, or announces more than a message may hold.
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
