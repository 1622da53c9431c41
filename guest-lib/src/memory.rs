//! Device memory, and memory that host and device share: page-locked and managed.

use std::sync::LazyLock;

use wormhole_api::{DevicePtr, MemAlloc, MemFree};

use crate::context::Scope;
use crate::error::{CuError, Result};
use crate::memory_map::{Allocation, MemoryMap, Origin};
use crate::{managed, stream};

/// Flags that `cuMemAllocManaged` knows, one at a time: attached to all, attached to the host.
const ATTACH: [u32; 2] = [1, 2];
/// Flags that `cuMemHostAlloc` knows: portable, mapped, write-combined.
const HOST_FLAGS: u32 = 7;
/// Host allocations start at a page.
const HOST_ALIGN: u64 = 4096;

static MAP: LazyLock<MemoryMap> = LazyLock::new(MemoryMap::default);

/// The allocations of this process.
pub fn memory_map() -> &'static MemoryMap {
    &MAP
}

/// `cuMemAlloc`.
pub fn allocate(scope: Scope, bytes: u64) -> Result<u64> {
    if bytes == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let address = scope
        .session
        .request(&MemAlloc { bytes }, |reply| reply.address.0)?;
    memory_map().insert(address, bytes, Origin::Device, scope.context);
    Ok(address)
}

/// `cuMemFree`.
pub fn free(scope: Scope, address: u64) -> Result {
    if address == 0 {
        return scope.session.alive();
    }
    // Out of the map first: once the worker has freed it, another thread may be given the address.
    let allocation = memory_map().remove(address, |allocation| {
        allocation.origin == Origin::Device || allocation.is_managed()
    })?;
    if allocation.is_managed() {
        managed::forget(allocation.base);
        return free_in_arena(scope, &allocation);
    }
    let message = MemFree {
        address: DevicePtr(allocation.base),
    };
    scope.session.request(&message, |()| ())
}

/// `cuMemHostAlloc`.
pub fn allocate_host(scope: Scope, bytes: u64, flags: u32) -> Result<u64> {
    if bytes == 0 || flags & !HOST_FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let address = scope.session.allocate_arena(bytes, HOST_ALIGN)?;
    memory_map().insert(address, bytes, Origin::Host { flags }, scope.context);
    Ok(address)
}

/// `cuMemAllocManaged`: arena, which host and device reach at one address.
pub fn allocate_managed(scope: Scope, bytes: u64, flags: u32) -> Result<u64> {
    if bytes == 0 || !ATTACH.contains(&flags) {
        return Err(CuError::INVALID_VALUE);
    }
    let address = scope.session.allocate_arena(bytes, HOST_ALIGN)?;
    memory_map().insert(address, bytes, Origin::Managed, scope.context);
    Ok(address)
}

/// `cuMemFreeHost`.
pub fn free_host(scope: Scope, address: u64) -> Result {
    let allocation = memory_map().remove(address, Allocation::is_host)?;
    free_in_arena(scope, &allocation)
}

/// Gives arena back that is out of the map. It is used again only when nothing that was handed to the device
/// can still reach it.
fn free_in_arena(scope: Scope, allocation: &Allocation) -> Result {
    let waited = stream::synchronize_all(scope);
    if waited.is_ok() {
        scope.session.free_arena(allocation.base);
    }
    waited
}

/// Page-locked memory that holds a whole range.
pub fn find_host(address: u64) -> Result<Allocation> {
    memory_map()
        .find(address)
        .filter(Allocation::is_host)
        .ok_or(CuError::INVALID_VALUE)
}

/// Frees the memory of a context.
pub fn free_of(scope: Scope) {
    let own = |allocation: &Allocation| {
        allocation.context == scope.context && allocation.origin != Origin::Global
    };
    for allocation in memory_map().remove_all(own) {
        if allocation.is_in_arena() {
            managed::forget(allocation.base);
            scope.session.free_arena(allocation.base);
        } else {
            let message = MemFree {
                address: DevicePtr(allocation.base),
            };
            // The context goes: a failure ends the session and shows at the next call.
            let _ = scope.session.request(&message, |()| ());
        }
    }
}

/// Forgets device memory, after the worker has freed it, and gives arena back.
pub fn forget_all(scope: Scope) {
    for allocation in memory_map().remove_all(|_| true) {
        if allocation.is_in_arena() {
            managed::forget(allocation.base);
            scope.session.free_arena(allocation.base);
        }
    }
}
