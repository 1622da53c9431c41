//! Device memory and page-locked host memory.

use std::sync::LazyLock;

use wormhole_api::{DevicePtr, MemAlloc, MemFree};

use crate::context::Scope;
use crate::error::{CuError, Result};
use crate::memory_map::{Allocation, MemoryMap, Origin};
use crate::stream;

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
    let allocation =
        memory_map().remove(address, |allocation| allocation.origin == Origin::Device)?;
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

/// `cuMemFreeHost`. The memory is used again only when nothing that was handed to the device can still
/// reach it.
pub fn free_host(scope: Scope, address: u64) -> Result {
    let allocation = memory_map().remove(address, Allocation::is_host)?;
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
        if allocation.is_host() {
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

/// Forgets device memory, after the worker has freed it, and gives page-locked memory back.
pub fn forget_all(scope: Scope) {
    for allocation in memory_map().remove_all(|_| true) {
        if allocation.is_host() {
            scope.session.free_arena(allocation.base);
        }
    }
}
