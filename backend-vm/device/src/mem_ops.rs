//! Streams that wait for words in memory and write them, and what streams are told beside work.

use wormhole_api::constants::memory_operation::{
    BARRIER, WAIT_VALUE_32, WAIT_VALUE_64, WRITE_VALUE_32, WRITE_VALUE_64,
};

use crate::{LaunchAttribute, RawStream, Result};

/// What a [`MemoryOperation`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryOperationKind {
    Wait32,
    Write32,
    Wait64,
    Write64,
    Barrier,
}

impl MemoryOperationKind {
    /// From a `CUstreamBatchMemOpType`.
    #[must_use]
    pub const fn new(operation: u32) -> Option<Self> {
        Some(match operation {
            WAIT_VALUE_32 => Self::Wait32,
            WRITE_VALUE_32 => Self::Write32,
            WAIT_VALUE_64 => Self::Wait64,
            WRITE_VALUE_64 => Self::Write64,
            BARRIER => Self::Barrier,
            _ => return None,
        })
    }

    /// The `CUstreamBatchMemOpType`.
    #[must_use]
    pub const fn operation(self) -> u32 {
        match self {
            Self::Wait32 => WAIT_VALUE_32,
            Self::Write32 => WRITE_VALUE_32,
            Self::Wait64 => WAIT_VALUE_64,
            Self::Write64 => WRITE_VALUE_64,
            Self::Barrier => BARRIER,
        }
    }

    /// Bytes of the word it is about; 0 for a barrier.
    #[must_use]
    pub const fn width(self) -> u64 {
        match self {
            Self::Wait32 | Self::Write32 => 4,
            Self::Wait64 | Self::Write64 => 8,
            Self::Barrier => 0,
        }
    }

    /// The flags that an operation of this kind may have. `CU_STREAM_WAIT_VALUE_FLUSH` is none of them.
    #[must_use]
    pub const fn flags(self) -> u32 {
        match self {
            Self::Wait32 | Self::Wait64 => 3,
            Self::Write32 | Self::Write64 | Self::Barrier => 1,
        }
    }
}

/// One memory operation of a stream, already checked: the word is aligned and lies in device memory or in
/// registered host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryOperation {
    pub kind: MemoryOperationKind,
    /// Of a wait: its condition (`CUstreamWaitValue_flags`). Of a write or a barrier: what it orders.
    pub flags: u32,
    pub address: u64,
    pub value: u64,
}

/// Streams and words in memory.
pub trait StreamMemory {
    /// Asynchronous (`cuStreamBatchMemOp`): the operations, in this order. Work behind a wait is held back
    /// until its word fulfils the condition.
    fn memory_operations(&self, stream: RawStream, operations: &[MemoryOperation]) -> Result<()>;
    /// `cuStreamSetAttribute`.
    fn set_stream_attribute(&self, stream: RawStream, attribute: &LaunchAttribute) -> Result<()>;
}
