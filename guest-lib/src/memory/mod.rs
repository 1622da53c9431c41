//! Device memory, and memory that host and device share: page-locked, managed and registered.

pub mod end;
mod kept;
pub mod managed;
pub mod map;
pub mod pool;
pub mod pool_reuse;
pub mod registration;
mod released;
mod reservations;
pub mod residence;
mod slabs;
pub mod virtual_memory;

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_api::constants::host_register_flags::{DEVICEMAP, IOMEMORY, PORTABLE, READ_ONLY};
use wormhole_api::constants::{host_alloc_flags, memory_attach_flags};
use wormhole_api::{DevicePtr, MemAlloc, MemFree};
use wormhole_lock::Mutex;

use crate::error::{CuError, Result};
use crate::log;
use crate::memory::map::{Allocation, MemoryMap, Origin};
use crate::object::capture_mode::check_call;
use crate::object::context::Scope;
use crate::object::{sharing, stream};

/// Flags that `cuMemAllocManaged` knows, one at a time.
const ATTACH: [u32; 2] = [memory_attach_flags::GLOBAL, memory_attach_flags::HOST];
/// Flags that `cuMemHostAlloc` knows.
const HOST_FLAGS: u32 =
    host_alloc_flags::PORTABLE | host_alloc_flags::DEVICEMAP | host_alloc_flags::WRITECOMBINED;
/// Host allocations start at a page.
const HOST_ALIGN: u64 = 4096;

/// Lock held while memory is registered, so that no two registrations overlap.
static REGISTERING: Mutex<()> = Mutex::new(());

/// Lock held while memory is freed that this library holds unused. A thread that finds none left meanwhile waits for it.
static FREEING: Mutex<()> = Mutex::new(());
/// Number of times that such memory was freed.
static FREED: AtomicU64 = AtomicU64::new(0);

static MAP: LazyLock<MemoryMap> = LazyLock::new(MemoryMap::default);

/// Returns the allocations of this process.
pub fn memory_map() -> &'static MemoryMap {
    &MAP
}

/// Sets whether synchronous copies and fills of an allocation always wait.
pub fn set_synchronous(address: u64, synchronous: bool) -> Result {
    let allocation = memory_map().find(address).ok_or(CuError::INVALID_VALUE)?;
    memory_map().put_back(Allocation {
        synchronous,
        ..allocation
    });
    Ok(())
}

/// Notes that another process may have an allocation open.
pub fn set_shared(allocation: Allocation) {
    memory_map().put_back(Allocation {
        is_shared: true,
        ..allocation
    });
}

/// Returns true if synchronous copies and fills that name one of these addresses always wait.
pub fn is_synchronous(addresses: [u64; 2]) -> bool {
    let synchronous = |address| {
        memory_map()
            .find(address)
            .is_some_and(|found| found.synchronous)
    };
    addresses.into_iter().any(synchronous)
}

/// Implements `cuMemAlloc`.
pub fn allocate(scope: Scope, bytes: u64) -> Result<u64> {
    if bytes == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    check_call()?;
    let address = match slabs::allocate(scope, bytes)? {
        Some(part) => part,
        None => match kept::take(scope, bytes) {
            Some(whole) => whole,
            None => allocate_whole(scope, bytes)?,
        },
    };
    memory_map().insert(address, bytes, Origin::Device, scope.context);
    Ok(address)
}

/// Allocates memory of the driver.
fn allocate_whole(scope: Scope, bytes: u64) -> Result<u64> {
    let message = MemAlloc { bytes };
    with_unused(scope, || {
        scope.session.request(&message, |reply| reply.address.0)
    })
}

/// Makes a request that takes memory of the device. If there is none left, frees what this library holds unused, and asks again.
pub fn with_unused<T>(scope: Scope, request: impl Fn() -> Result<T>) -> Result<T> {
    loop {
        let before = FREED.load(Ordering::Acquire);
        match request() {
            Err(CuError::OUT_OF_MEMORY) if free_unused(scope, before)? => {}
            answer => return answer,
        }
    }
}

/// Frees all that this library holds unused. Returns false if it holds nothing, and if no thread has freed anything since a
/// look at [`FREED`].
fn free_unused(scope: Scope, before: u64) -> Result<bool> {
    let _freeing = FREEING.lock();
    if FREED.load(Ordering::Acquire) != before {
        return Ok(true);
    }
    let freed = slabs::free_empty(scope)?
        | kept::free_all(scope)?
        | released::free_all(scope)?
        | pool_reuse::release_all(scope.session.session())?
        | residence::free_mirrors();
    FREED.fetch_add(freed.into(), Ordering::Release);
    Ok(freed)
}

/// Makes a request for which the driver itself may need memory of the device. If there is none left, frees the mirrors of
/// managed memory, and asks again: natively the memory of mirrors is free.
pub fn with_room<T>(mut request: impl FnMut() -> Result<T>) -> Result<T> {
    match request() {
        Err(CuError::OUT_OF_MEMORY) if residence::free_mirrors() => request(),
        answer => answer,
    }
}

/// Frees what this library holds and natively the driver would not: the program asks how much memory is free.
pub fn free_kept(scope: Scope) -> Result {
    let freeing = FREEING.lock();
    let freed = kept::free_all(scope)? | released::free_all(scope)?;
    FREED.fetch_add(freed.into(), Ordering::Release);
    drop(freeing);
    pool_reuse::release_idle(scope)
}

/// Returns the offset of an allocation in the memory of the driver that it is a part of; `None` if it is no part.
pub fn offset_in_slab(allocation: &Allocation) -> Option<u64> {
    slabs::offset(allocation)
}

/// Implements `cuMemFree`, for memory that no graph allocated.
pub fn free(scope: Scope, address: u64) -> Result {
    if address == 0 {
        return scope.session.alive();
    }
    check_call()?;
    // Removed from the map first: once the worker has freed the memory, another thread's allocation may get its
    // address.
    let allocation = memory_map().remove(address, |allocation| {
        allocation.origin == Origin::Device
            || allocation.origin == Origin::Managed
            || matches!(allocation.origin, Origin::Pool { .. })
    })?;
    if allocation.is_managed() {
        managed::forget(allocation.base);
        return free_in_arena(scope, &allocation);
    }
    if let Some(freed) = slabs::free(scope, &allocation) {
        return freed;
    }
    if allocation.origin == Origin::Device
        && let Some(kept) = kept::put(scope, &allocation)
    {
        return kept;
    }
    let message = MemFree {
        address: DevicePtr(allocation.base),
    };
    scope.session.request(&message, |()| ())?;
    pool::freed(&allocation, None);
    Ok(())
}

/// Implements `cuMemHostAlloc`.
pub fn allocate_host(scope: Scope, bytes: u64, flags: u32) -> Result<u64> {
    if flags & !HOST_FLAGS != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    scope.session.alive()?;
    check_call()?;
    // As natively, 0 bytes succeed without an allocation.
    if bytes == 0 {
        return Ok(0);
    }
    if i64::try_from(bytes).is_err() {
        return Err(CuError::OUT_OF_MEMORY);
    }
    let address = scope.session.allocate_arena(bytes, HOST_ALIGN)?;
    memory_map().insert(address, bytes, Origin::Host { flags }, scope.context);
    Ok(address)
}

/// Implements `cuMemAllocManaged`. Small memory lies in the arena, which host and device reach at one address; large memory
/// changes sides ([`residence`]).
pub fn allocate_managed(scope: Scope, bytes: u64, flags: u32) -> Result<u64> {
    if bytes == 0 || !ATTACH.contains(&flags) {
        return Err(CuError::INVALID_VALUE);
    }
    scope.session.alive()?;
    check_call()?;
    let address = match residence::allocate(scope.session, bytes)? {
        Some(address) => address,
        None => scope.session.allocate_arena(bytes, HOST_ALIGN)?,
    };
    memory_map().insert(address, bytes, Origin::Managed, scope.context);
    Ok(address)
}

/// Allocates memory for the managed variables of an image; returns its address and the address of the variables. They
/// differ, so that a program cannot free the memory by the address of a variable.
pub fn allocate_variables(scope: Scope, bytes: u64) -> Result<(u64, u64)> {
    let bytes = bytes
        .checked_add(HOST_ALIGN)
        .ok_or(CuError::OUT_OF_MEMORY)?;
    let address = scope.session.allocate_arena(bytes, HOST_ALIGN)?;
    memory_map().insert(address, bytes, Origin::Variables, scope.context);
    Ok((address, address + HOST_ALIGN))
}

/// Frees the memory of an image's managed variables. No kernel of the image runs any more.
pub fn free_variables(scope: Scope, address: u64) {
    let own = |allocation: &Allocation| {
        allocation.base == address && allocation.origin == Origin::Variables
    };
    if let Ok(allocation) = memory_map().remove(address, own) {
        give_back(scope, &allocation);
    }
}

/// Implements `cuMemFreeHost`.
pub fn free_host(scope: Scope, address: u64) -> Result {
    check_call()?;
    if address == 0 {
        return scope.session.alive();
    }
    let allocation = memory_map().remove(address, Allocation::is_host)?;
    free_in_arena(scope, &allocation)
}

/// Frees arena memory that was removed from the map, after waiting for all work that may still reach it.
fn free_in_arena(scope: Scope, allocation: &Allocation) -> Result {
    let waited = stream::synchronize_devices(scope);
    if waited.is_ok() {
        give_back_arena(scope, allocation);
    }
    waited
}

/// Frees arena memory that the device has finished with.
fn give_back_arena(scope: Scope, allocation: &Allocation) {
    if !residence::free(allocation.base) {
        scope.session.free_arena(allocation.base);
    }
}

/// Implements `cuMemHostRegister`.
pub fn register(scope: Scope, address: u64, bytes: u64, flags: u32) -> Result {
    scope.session.alive()?;
    let known = flags & !(PORTABLE | DEVICEMAP | IOMEMORY | READ_ONLY) == 0;
    if address == 0 || bytes == 0 || !known || address.checked_add(bytes).is_none() {
        return Err(CuError::INVALID_VALUE);
    }
    if flags & (IOMEMORY | READ_ONLY) != 0 {
        return Err(CuError::NOT_SUPPORTED);
    }
    check_call()?;
    let _registering = REGISTERING.lock();
    if memory_map()
        .find(address)
        .is_some_and(|found| !found.is_registered())
    {
        return Err(CuError::INVALID_VALUE);
    }
    if memory_map().overlaps(address, bytes) {
        return Err(CuError::HOST_MEMORY_ALREADY_REGISTERED);
    }
    let placed = registration::place(scope.session, address, bytes);
    let device = placed.map_err(|registration::NotMapped| CuError::INVALID_VALUE)?;
    if device.is_none() && flags & DEVICEMAP != 0 {
        log::error_once!(
            "{bytes} bytes at {address:#x} cannot be mapped for the device: only private memory of no file can, and files of shared memory that the backend reaches"
        );
        return Err(CuError::NOT_SUPPORTED);
    }
    memory_map().insert(
        address,
        bytes,
        Origin::Registered { flags, device },
        scope.context,
    );
    if let Some(device) = device {
        let alias = Origin::RegisteredAlias { host: address };
        memory_map().insert(device, bytes, alias, scope.context);
    }
    Ok(())
}

/// Implements `cuMemHostUnregister`.
pub fn unregister(scope: Scope, address: u64) -> Result {
    check_call()?;
    let removed = memory_map().remove(address, Allocation::is_registered);
    let registered = removed.map_err(|_| {
        // An address of any other allocation is INVALID_VALUE, except an alias's.
        if address == 0
            || memory_map()
                .find(address)
                .is_some_and(|found| !found.is_alias())
        {
            CuError::INVALID_VALUE
        } else {
            CuError::HOST_MEMORY_NOT_REGISTERED
        }
    })?;
    let Origin::Registered {
        device: Some(device),
        ..
    } = registered.origin
    else {
        return scope.session.alive();
    };
    let is_alias =
        |allocation: &Allocation| allocation.origin == Origin::RegisteredAlias { host: address };
    memory_map().remove(device, is_alias)?;
    stream::synchronize_devices(scope)?;
    registration::release(scope.session, address, device);
    Ok(())
}

/// Returns the page-locked or registered host memory at an address.
pub fn find_host(address: u64) -> Result<Allocation> {
    memory_map()
        .find(address)
        .filter(|allocation| allocation.is_host() || allocation.is_registered())
        .ok_or(CuError::INVALID_VALUE)
}

/// Frees the guest's resources of an allocation that was removed from the map and is no longer in use. Returns true if
/// the worker must free its part too.
fn give_back(scope: Scope, allocation: &Allocation) -> bool {
    match allocation.origin {
        Origin::Device => return !slabs::is_part(allocation),
        Origin::Opened => return true,
        Origin::Global
        | Origin::Graph
        | Origin::RegisteredAlias { .. }
        | Origin::Pool { .. }
        | Origin::Mapped { .. } => {}
        Origin::Host { .. } => scope.session.free_arena(allocation.base),
        Origin::Managed | Origin::Variables => {
            managed::forget(allocation.base);
            give_back_arena(scope, allocation);
        }
        Origin::Registered { device, .. } => {
            if let Some(device) = device {
                registration::release(scope.session, allocation.base, device);
            }
        }
    }
    false
}

/// Frees the memory of a context.
pub fn free_of(scope: Scope) {
    let own = |allocation: &Allocation| {
        allocation.context == scope.context
            && !matches!(allocation.origin, Origin::Global | Origin::Graph)
            && !allocation.outlives_context()
    };
    for allocation in memory_map().remove_all(own) {
        if give_back(scope, &allocation) {
            // The context is destroyed: a failure ends the session and shows at the next call.
            let _ = match allocation.origin {
                Origin::Opened => sharing::close_forgotten(scope, allocation.base),
                _ => {
                    let address = DevicePtr(allocation.base);
                    scope.session.request(&MemFree { address }, |()| ())
                }
            };
        }
    }
    slabs::free_of(scope);
    kept::free_of(scope);
}

/// Removes device memory from the map, after the worker has freed it, and frees arena memory.
pub fn forget_all(scope: Scope) {
    for allocation in memory_map().remove_all(|allocation| !allocation.outlives_context()) {
        give_back(scope, &allocation);
    }
    sharing::forget_opened();
    slabs::forget_all();
    kept::forget_all();
}
