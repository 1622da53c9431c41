//! Stream attributes (`cuStreamSetAttribute`).

use wormhole_api::StreamSetAttribute;
use wormhole_api::constants::access_property::{PERSISTING, STREAMING};
pub use wormhole_api::constants::launch_attribute::{
    ACCESS_POLICY_WINDOW, MEM_SYNC_DOMAIN, MEM_SYNC_DOMAIN_MAP, PRIORITY, SYNCHRONIZATION_POLICY,
};
use wormhole_api::constants::memory_sync_domain::REMOTE;
use wormhole_api::constants::synchronization_policy::{AUTO, BLOCKING_SYNC};

use super::Target;
use crate::error::{CuError, Result};
use crate::memory::end::End;
use crate::object::context::Scope;
use crate::types::CUstreamAttrValue;

/// Synchronization policy of a stream on which none was set.
const NO_POLICY: u64 = 0xFFFF_FFFF;

/// Attribute values of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamAttributes {
    policy_window: CUstreamAttrValue,
    synchronization_policy: CUstreamAttrValue,
    domain_map: CUstreamAttrValue,
    domain: CUstreamAttrValue,
}

impl StreamAttributes {
    /// Attributes of a new stream: no synchronization policy (the native driver reports -1, which it refuses in a set),
    /// no access policy window, the default domain, and its map of 0 and 1.
    pub const NEW: Self = Self {
        policy_window: [0; 8],
        synchronization_policy: [NO_POLICY, 0, 0, 0, 0, 0, 0, 0],
        domain_map: [1 << 8, 0, 0, 0, 0, 0, 0, 0],
        domain: [0; 8],
    };

    /// Stored attributes: all but the priority, which the stream stores itself.
    pub const KEPT: [u32; 4] = [
        ACCESS_POLICY_WINDOW,
        SYNCHRONIZATION_POLICY,
        MEM_SYNC_DOMAIN_MAP,
        MEM_SYNC_DOMAIN,
    ];

    /// Returns whether a copy of this value is sent to the device. The default synchronization policy is not, since no
    /// stream can be set to it.
    pub const fn reaches_device(id: u32, value: &CUstreamAttrValue) -> bool {
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

/// Returns an access policy window (`CUaccessPolicyWindow`) with its device address.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for an invalid ratio or property, and for memory that the device cannot access.
pub fn window_for_device(value: &CUstreamAttrValue) -> Result<CUstreamAttrValue> {
    let [first, bytes, third, fourth, ..] = *value;
    let ratio = f32::from_bits(low(third));
    let (hit, miss) = (low(third >> 32), low(fourth));
    if !(0.0..=1.0).contains(&ratio) || hit > PERSISTING || miss > STREAMING {
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

/// Returns an attribute's value in the device's form.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for a value that the attribute cannot have.
fn for_device(id: u32, value: &CUstreamAttrValue) -> Result<CUstreamAttrValue> {
    let first = value[0];
    let valid = match id {
        ACCESS_POLICY_WINDOW => return window_for_device(value),
        SYNCHRONIZATION_POLICY => (AUTO..=BLOCKING_SYNC).contains(&low(first)),
        MEM_SYNC_DOMAIN_MAP | PRIORITY => true,
        MEM_SYNC_DOMAIN => low(first) <= REMOTE,
        _ => false,
    };
    valid.then_some(*value).ok_or(CuError::INVALID_VALUE)
}

/// Sets an attribute of a stream (`cuStreamSetAttribute`).
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
