//! Memory operations of streams (waits for words, writes of words), and stream attributes.

use wormhole_api::constants::memory_operation::{
    BARRIER, WAIT_VALUE_32, WAIT_VALUE_64, WRITE_VALUE_32, WRITE_VALUE_64,
};
use wormhole_api::constants::{memory_barrier, wait_value, write_value};

use crate::{LaunchAttribute, RawStream, Result};

/// Kind of a [`MemoryOperation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryOperationKind {
    Wait32,
    Write32,
    Wait64,
    Write64,
    Barrier,
}

impl MemoryOperationKind {
    /// Converts a `CUstreamBatchMemOpType`.
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

    /// Returns the `CUstreamBatchMemOpType`.
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

    /// Returns the size of the word; 0 for a barrier.
    #[must_use]
    pub const fn width(self) -> u64 {
        match self {
            Self::Wait32 | Self::Write32 => 4,
            Self::Wait64 | Self::Write64 => 8,
            Self::Barrier => 0,
        }
    }

    /// Returns the valid flags of this kind. `CU_STREAM_WAIT_VALUE_FLUSH` is not among them.
    #[must_use]
    pub const fn flags(self) -> u32 {
        match self {
            // The conditions are numbered from 0 to NOR.
            Self::Wait32 | Self::Wait64 => wait_value::NOR,
            Self::Write32 | Self::Write64 => write_value::NO_MEMORY_BARRIER,
            Self::Barrier => memory_barrier::GPU,
        }
    }
}

/// Memory operation of a stream, already checked: the word is aligned and lies in device memory or registered host
/// memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryOperation {
    pub kind: MemoryOperationKind,
    /// Condition of a wait (`CUstreamWaitValue_flags`), or memory order of a write or barrier.
    pub flags: u32,
    pub address: u64,
    pub value: u64,
}

/// Memory operations and attributes of streams.
pub trait MemOps {
    /// Executes operations in order (`cuStreamBatchMemOp`). Asynchronous. Work after a wait is delayed until the word
    /// fulfils the condition.
    fn memory_operations(&self, stream: RawStream, operations: &[MemoryOperation]) -> Result<()>;
    /// `cuStreamSetAttribute`.
    fn set_stream_attribute(&self, stream: RawStream, attribute: &LaunchAttribute) -> Result<()>;
}
