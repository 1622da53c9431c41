//! Defines the header of a vsock packet.

use zerocopy::byteorder::{LE, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a header.
pub const HEADER_LEN: usize = 44;
/// Socket type of streams, the only supported type.
pub const TYPE_STREAM: u16 = 1;
/// Flag of `SHUTDOWN`: the sender will receive no more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// Flag of `SHUTDOWN`: the sender will send no more.
pub const SHUTDOWN_SEND: u32 = 2;
/// Flags of `SHUTDOWN` for both directions.
pub const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// A packet's header as laid out in guest memory (virtio 1.2, 5.10.6). Any bytes are a valid header.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Header {
    /// Context id of the sender.
    pub src_cid: U64<LE>,
    /// Context id of the receiver.
    pub dst_cid: U64<LE>,
    /// Port of the sender.
    pub src_port: U32<LE>,
    /// Port of the receiver.
    pub dst_port: U32<LE>,
    /// Bytes of payload.
    pub len: U32<LE>,
    /// Socket type.
    pub kind: U16<LE>,
    /// Operation, see [`Op`].
    pub op: U16<LE>,
    /// Flags of the operation.
    pub flags: U32<LE>,
    /// Bytes of the sender's receive buffer.
    pub buf_alloc: U32<LE>,
    /// Bytes that have left the sender's receive buffer, modulo 2³².
    pub fwd_cnt: U32<LE>,
}

const _: () = assert!(size_of::<Header>() == HEADER_LEN);

/// Operation of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Requests a connection.
    Request,
    /// Accepts a connection.
    Response,
    /// Reports that the connection does not exist, or no longer.
    Reset,
    /// Ends one or both directions.
    Shutdown,
    /// Carries payload.
    Data,
    /// Reports the sender's buffer space.
    CreditUpdate,
    /// Requests the receiver's buffer space.
    CreditRequest,
    /// A value that virtio does not define.
    Unknown(u16),
}

impl From<u16> for Op {
    fn from(value: u16) -> Self {
        match value {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            other => Self::Unknown(other),
        }
    }
}

impl From<Op> for u16 {
    fn from(op: Op) -> Self {
        match op {
            Op::Request => 1,
            Op::Response => 2,
            Op::Reset => 3,
            Op::Shutdown => 4,
            Op::Data => 5,
            Op::CreditUpdate => 6,
            Op::CreditRequest => 7,
            Op::Unknown(other) => other,
        }
    }
}

impl Header {
    /// Returns the operation.
    pub fn op(&self) -> Op {
        Op::from(self.op.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn operations_survive_the_round_trip(value: u16) {
            prop_assert_eq!(u16::from(Op::from(value)), value);
        }

        #[test]
        fn any_bytes_are_a_header(bytes: [u8; HEADER_LEN]) {
            let header = Header::read_from_bytes(&bytes).expect("44 bytes");
            prop_assert_eq!(header.as_bytes(), &bytes[..]);
        }
    }
}
