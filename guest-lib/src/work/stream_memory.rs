//! Memory operations of streams, and what streams are told of beside work.

use std::sync::atomic::AtomicU64;

pub use wormhole_api::constants::launch_attribute::{
    ACCESS_POLICY_WINDOW, MEM_SYNC_DOMAIN, MEM_SYNC_DOMAIN_MAP, PRIORITY, SYNCHRONIZATION_POLICY,
};
use wormhole_api::constants::memory_operation::{BARRIER, FLUSH_REMOTE_WRITES};
pub use wormhole_api::constants::memory_operation::{
    WAIT_VALUE_32 as WAIT_32, WAIT_VALUE_64 as WAIT_64, WRITE_VALUE_32 as WRITE_32,
    WRITE_VALUE_64 as WRITE_64,
};
use wormhole_api::constants::wait_value::FLUSH;
pub use wormhole_api::constants::wait_value::GEQ;
use wormhole_api::{Items, MemoryOperation, StreamMemory, StreamSetAttribute};

use crate::error::{CuError, Result};
use crate::graph::capture;
use crate::object::context::Scope;
use crate::object::stream::Target;
use crate::types::{CUstreamAttrValue, CUstreamBatchMemOpParams};
use crate::work::copy::End;
use crate::work::peer;

const CONDITIONS: u32 = 3;
/// `CU_STREAM_MEMORY_BARRIER_TYPE_GPU`.
const BARRIER_GPU: u32 = 1;

/// Operations of one call: the documentation of `cuStreamBatchMemOp` says 256, the driver takes one less. And
/// operations of one message.
pub const MOST: usize = 255;
const MESSAGE: usize = 128;

/// A 64-bit word of the arena that the device reads or writes too.
#[derive(Clone, Copy, Debug)]
pub struct Word(u64);

impl Word {
    /// The word at an address of the arena, which stays allocated.
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

/// One operation of a program, with what the native driver refuses refused.
pub fn read(parameters: &CUstreamBatchMemOpParams) -> Result<MemoryOperation> {
    let (width, known) = match parameters.operation {
        WAIT_32 => (4, CONDITIONS),
        WAIT_64 => (8, CONDITIONS),
        // The driver takes no flag, not even the one that is documented.
        WRITE_32 => (4, 0),
        WRITE_64 => (8, 0),
        BARRIER if parameters.barrier_flags & !BARRIER_GPU == 0 => {
            return Ok(MemoryOperation {
                kind: BARRIER,
                flags: parameters.barrier_flags,
                address: 0,
                value: 0,
            });
        }
        // The attribute says that the device cannot.
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
    Ok(MemoryOperation {
        kind: parameters.operation,
        flags: parameters.flags,
        address,
        value: parameters.value64,
    })
}

/// Hands operations to a stream.
pub fn send(scope: Scope, target: Target, operations: &[MemoryOperation]) -> Result {
    if target.is_captured() {
        return capture::memory(target, operations);
    }
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

/// What a stream answers that was told no synchronization policy.
const NO_POLICY: u64 = 0xFFFF_FFFF;

/// What streams were told, by attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamAttributes {
    policy_window: CUstreamAttrValue,
    synchronization_policy: CUstreamAttrValue,
    domain_map: CUstreamAttrValue,
    domain: CUstreamAttrValue,
}

impl StreamAttributes {
    /// Those of a new stream: no policy yet (the native driver says -1, which it refuses to be told), no
    /// window, the default domain and its map of 0 and 1.
    pub const NEW: Self = Self {
        policy_window: [0; 8],
        synchronization_policy: [NO_POLICY, 0, 0, 0, 0, 0, 0, 0],
        domain_map: [1 << 8, 0, 0, 0, 0, 0, 0, 0],
        domain: [0; 8],
    };

    /// All but the priority, which is the stream's own.
    pub const KEPT: [u32; 4] = [
        ACCESS_POLICY_WINDOW,
        SYNCHRONIZATION_POLICY,
        MEM_SYNC_DOMAIN_MAP,
        MEM_SYNC_DOMAIN,
    ];

    /// Whether a stream was told this value; one that was told none has nothing to copy.
    pub const fn is_told(id: u32, value: &CUstreamAttrValue) -> bool {
        id != SYNCHRONIZATION_POLICY || value[0] != NO_POLICY
    }

    pub fn place(&mut self, id: u32) -> Result<&mut CUstreamAttrValue> {
        match id {
            ACCESS_POLICY_WINDOW => Ok(&mut self.policy_window),
            SYNCHRONIZATION_POLICY => Ok(&mut self.synchronization_policy),
            MEM_SYNC_DOMAIN_MAP => Ok(&mut self.domain_map),
            MEM_SYNC_DOMAIN => Ok(&mut self.domain),
            _ => Err(CuError::INVALID_VALUE),
        }
    }
}

impl Default for StreamAttributes {
    fn default() -> Self {
        Self::NEW
    }
}

fn low(word: u64) -> u32 {
    let [a, b, c, d, ..] = word.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// Access policy window (`CUaccessPolicyWindow`) with the address by which the device reaches it.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for a ratio or property that there is not, and for memory that the device does not reach.
pub fn window_for_device(value: &CUstreamAttrValue) -> Result<CUstreamAttrValue> {
    let [first, bytes, third, fourth, ..] = *value;
    let ratio = f32::from_bits(low(third));
    let (hit, miss) = (low(third >> 32), low(fourth));
    if !(0.0..=1.0).contains(&ratio) || hit > 2 || miss > 1 {
        return Err(CuError::INVALID_VALUE);
    }
    let mut reached = *value;
    if bytes != 0 {
        let (end, address) = End::of(first, bytes)?;
        if end == End::Pageable {
            return Err(CuError::INVALID_VALUE);
        }
        reached[0] = address;
    }
    Ok(reached)
}

/// Value of a stream's attribute as the device takes it.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for a value that the attribute cannot have.
fn for_device(id: u32, value: &CUstreamAttrValue) -> Result<CUstreamAttrValue> {
    let first = value[0];
    let valid = match id {
        ACCESS_POLICY_WINDOW => return window_for_device(value),
        // From CU_SYNC_POLICY_AUTO to CU_SYNC_POLICY_BLOCKING_SYNC.
        SYNCHRONIZATION_POLICY => (1..=4).contains(&low(first)),
        MEM_SYNC_DOMAIN_MAP | PRIORITY => true,
        MEM_SYNC_DOMAIN => low(first) <= 1,
        _ => false,
    };
    valid.then_some(*value).ok_or(CuError::INVALID_VALUE)
}

/// `cuStreamSetAttribute`.
pub fn set_attribute(scope: Scope, target: Target, id: u32, value: &CUstreamAttrValue) -> Result {
    scope.session.alive()?;
    let told = for_device(id, value)?;
    let mut bytes = [0; 64];
    for (place, word) in bytes.chunks_exact_mut(8).zip(told) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    let message = StreamSetAttribute {
        stream: target.handle,
        id,
        value: bytes,
    };
    scope.session.request(&message, |()| ())?;
    target.stream.note_attribute(id, value)
}
