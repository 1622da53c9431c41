//! Memory operations of streams (waits for words, writes of words), and stream attributes.

pub use wormhole_api::MemoryOperationKind;
use wormhole_api::constants::{memory_barrier, wait_value, write_value};

use crate::{LaunchAttribute, RawStream, Result};

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

impl MemoryOperation {
    /// Returns the size of the word; 0 for a barrier.
    #[must_use]
    pub const fn width(&self) -> u64 {
        match self.kind {
            MemoryOperationKind::Wait32 | MemoryOperationKind::Write32 => 4,
            MemoryOperationKind::Wait64 | MemoryOperationKind::Write64 => 8,
            MemoryOperationKind::Barrier => 0,
        }
    }

    /// Returns whether the kind has all flags. No wait has `CU_STREAM_WAIT_VALUE_FLUSH`.
    #[must_use]
    pub const fn has_valid_flags(&self) -> bool {
        let valid = match self.kind {
            // The conditions are numbered from 0 to NOR.
            MemoryOperationKind::Wait32 | MemoryOperationKind::Wait64 => wait_value::NOR,
            MemoryOperationKind::Write32 | MemoryOperationKind::Write64 => {
                write_value::NO_MEMORY_BARRIER
            }
            MemoryOperationKind::Barrier => memory_barrier::GPU,
        };
        self.flags & !valid == 0
    }
}

/// Memory operations and attributes of streams.
pub trait MemOps {
    /// Executes operations in order (`cuStreamBatchMemOp`). Asynchronous. Work after a wait is delayed until the word
    /// fulfils the condition.
    fn memory_operations(&self, stream: RawStream, operations: &[MemoryOperation]) -> Result<()>;
    /// `cuStreamSetAttribute`.
    fn set_stream_attribute(&self, stream: RawStream, attribute: &LaunchAttribute) -> Result<()>;
}
