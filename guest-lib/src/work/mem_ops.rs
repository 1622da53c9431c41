//! Memory operations of streams.

use std::sync::atomic::AtomicU64;

use wormhole_api::constants::memory_barrier;
use wormhole_api::constants::memory_operation::{BARRIER, FLUSH_REMOTE_WRITES};
pub use wormhole_api::constants::memory_operation::{
    WAIT_VALUE_32 as WAIT_32, WAIT_VALUE_64 as WAIT_64, WRITE_VALUE_32 as WRITE_32,
    WRITE_VALUE_64 as WRITE_64,
};
pub use wormhole_api::constants::wait_value::GEQ;
use wormhole_api::constants::wait_value::{FLUSH, NOR};
use wormhole_api::{Items, MemoryOperation, StreamMemory};

use crate::error::{CuError, Result};
use crate::memory::end::End;
use crate::memory::residence;
use crate::object::context::Scope;
use crate::object::stream::Target;
use crate::types::CUstreamBatchMemOpParams;
use crate::work::peer;

/// Bits of the conditions.
const CONDITIONS: u32 = NOR;

/// Greatest number of operations of one message.
const MESSAGE: usize = 128;

/// Address of a 64-bit word of the arena that the device also reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct Word(u64);

impl Word {
    /// Names the word at an address of the arena, which must stay allocated.
    pub const fn new(address: u64) -> Self {
        Self(address)
    }

    pub const fn address(self) -> u64 {
        self.0
    }

    pub fn get(&self) -> &AtomicU64 {
        let address = usize::try_from(self.0).unwrap_or(0);
        // SAFETY: the word lies aligned in arena that this library keeps for itself, mapped as long as the
        // process lives; all sides access it atomically.
        unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(address)) }
    }
}

/// Converts one operation of a program; refuses what the native driver refuses.
pub fn read(parameters: &CUstreamBatchMemOpParams) -> Result<MemoryOperation> {
    let (width, known) = match parameters.operation {
        WAIT_32 => (4, CONDITIONS),
        WAIT_64 => (8, CONDITIONS),
        // The driver accepts no flag, not even the documented one.
        WRITE_32 => (4, 0),
        WRITE_64 => (8, 0),
        BARRIER if parameters.barrier_flags & !memory_barrier::GPU == 0 => {
            return Ok(MemoryOperation {
                kind: BARRIER,
                flags: parameters.barrier_flags,
                address: 0,
                value: 0,
            });
        }
        // The device attribute for these flushes is 0.
        FLUSH_REMOTE_WRITES => return Err(CuError::NOT_SUPPORTED),
        _ => return Err(CuError::INVALID_VALUE),
    };
    if known == CONDITIONS && parameters.flags & FLUSH != 0 {
        return Err(CuError::NOT_SUPPORTED);
    }
    let (end, address) = End::of(parameters.address, width)?;
    let is_whole = parameters.address.is_multiple_of(width);
    if parameters.flags & !known != 0 || !is_whole || end == End::Pageable {
        return Err(CuError::INVALID_VALUE);
    }
    // The device may wait for a write of the program there.
    residence::keep_home(address);
    Ok(MemoryOperation {
        kind: parameters.operation,
        flags: parameters.flags,
        address,
        value: parameters.value64,
    })
}

/// Hands operations to a stream.
pub fn send(scope: Scope, target: Target, operations: &[MemoryOperation]) -> Result {
    for operation in operations {
        peer::check(scope, target, operation.address)?;
    }
    for part in operations.chunks(MESSAGE) {
        scope.session.record(&StreamMemory {
            stream: target.handle,
            operations: Items::new(part),
        })?;
    }
    target.worked(scope)
}
