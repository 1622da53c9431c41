//! Virtual memory management: address reservations, and memory that is mapped there.
//!
//! One lock guards the reservations and mappings of this process, so that an invalid call fails at once; the worker
//! checks it again.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{LazyLock, OnceLock};

use wormhole_api::handle::Memory as MemoryKind;
use wormhole_api::{
    Access, AddressFree, AddressReserve, DevicePtr, Handle, MemCreate, MemGranularity, MemMap,
    MemRename, MemSetAccess, MemUnmap, OpenMemory, ShareMemory,
};
use wormhole_lock::{Mutex, MutexGuard};

use crate::error::{CuError, Result};
use crate::handle::{self, Table};
use crate::log;
use crate::memory::map::{Allocation, Origin};
use crate::memory::reservations::{Range, Reservations};
use crate::memory::{memory_map, released, with_unused};
use crate::object::context::Scope;
use crate::object::sharing::{self, Token};
use crate::pages::PAGE;
use crate::types::CUmemGenericAllocationHandle;

/// Mappable memory. It lives as long as any of its handles or mappings.
#[derive(Debug, Default)]
pub struct Memory {
    /// Ordinal of the memory's device.
    device: AtomicUsize,
    bytes: AtomicU64,
    handle_types: AtomicU32,
    /// Whether no other process can have it.
    is_own: AtomicBool,
    /// Number of handles: created or retained, and not released.
    handles: AtomicU32,
    mappings: AtomicU32,
}

impl Memory {
    /// Returns the ordinal of the memory's device.
    pub fn device(&self) -> usize {
        self.device.load(Ordering::Relaxed)
    }

    /// Returns the `CUmemAllocationHandleType`s of the memory's exports.
    pub fn handle_types(&self) -> u32 {
        self.handle_types.load(Ordering::Relaxed)
    }
}

/// Units of sizes and addresses.
#[derive(Clone, Copy, Debug)]
pub struct Granularity {
    pub minimum: u64,
    pub recommended: u64,
}

/// Access of devices to each mapping, by its start and the device's ordinal.
static ACCESSES: Mutex<BTreeMap<(u64, usize), Access>> = Mutex::new(BTreeMap::new());
static MEMORIES: Table<MemoryKind, Memory> = Table::new();
/// Reservations of this process. The lock is held during every change of reservations and mappings.
static RESERVED: LazyLock<Mutex<Reservations>> = LazyLock::new(Mutex::default);

/// Number of mappings up to which the backend has room for one more. On a processor each is a mapping of the worker's, and
/// Linux lets it have 65,530 in all, arena and code included.
const MAPPINGS: usize = 1 << 14;

fn reserved() -> MutexGuard<'static, Reservations> {
    RESERVED.lock()
}

fn accesses() -> MutexGuard<'static, BTreeMap<(u64, usize), Access>> {
    ACCESSES.lock()
}

/// Returns the granularity, which is requested from the device once.
pub fn granularity(scope: Scope) -> Result<Granularity> {
    static GRANULARITY: OnceLock<Granularity> = OnceLock::new();
    if let Some(known) = GRANULARITY.get() {
        return Ok(*known);
    }
    let found = scope
        .session
        .request(&MemGranularity {}, |reply| Granularity {
            minimum: reply.minimum,
            recommended: reply.recommended,
        })?;
    Ok(*GRANULARITY.get_or_init(|| found))
}

/// Returns `INVALID_VALUE` for a size of 0, or one that is no multiple of the granularity.
fn granular(scope: Scope, bytes: u64) -> Result {
    let unit = granularity(scope)?.minimum;
    if bytes != 0 && bytes.is_multiple_of(unit) {
        Ok(())
    } else {
        Err(CuError::INVALID_VALUE)
    }
}

/// Implements `cuMemAddressReserve`.
pub fn reserve(scope: Scope, bytes: u64, alignment: u64, hint: u64) -> Result<u64> {
    granular(scope, bytes)?;
    if alignment != 0 && !alignment.is_power_of_two() {
        return Err(CuError::INVALID_VALUE);
    }
    let pinned = memory_map().find(hint).is_some_and(|found| found.is_host());
    if !hint.is_multiple_of(PAGE) || pinned {
        return Err(CuError::INVALID_VALUE);
    }
    scope.session.alive()?;
    let mut reserved = reserved();
    // The program may have mappings of its own outside the ranges reserved for device memory.
    let hint = match scope.session.is_reserved(hint, bytes) {
        true => hint,
        false => 0,
    };
    let unit = alignment.max(granularity(scope)?.minimum);
    if let Some(address) = reserved.take(bytes, unit, hint) {
        return Ok(address);
    }
    // The program has freed them, so nothing of its own keeps the device from the hint.
    while let Some(kept) = reserved.take_kept(hint, bytes) {
        free_there(scope, kept)?;
    }
    let address = reserve_there(scope, bytes, alignment, hint)?;
    reserved.insert(address, bytes);
    Ok(address)
}

/// Reserves a range at the backend.
fn reserve_there(scope: Scope, bytes: u64, alignment: u64, hint: u64) -> Result<u64> {
    let message = AddressReserve {
        bytes,
        alignment,
        hint,
    };
    let address = scope.session.request(&message, |reply| reply.address.0)?;
    if !scope.session.is_reserved(address, bytes) {
        log::error_once!(
            "addresses at {address:#x} cannot be reserved: this program has something of its own there"
        );
        free_there(scope, Range { address, bytes })?;
        return Err(CuError::OUT_OF_MEMORY);
    }
    Ok(address)
}

/// Frees a range that the backend has reserved. It names no mapping, so nothing can fail there.
fn free_there(scope: Scope, Range { address, bytes }: Range) -> Result {
    scope.session.record(&AddressFree {
        address: DevicePtr(address),
        bytes,
    })
}

/// Implements `cuMemAddressFree`.
pub fn unreserve(scope: Scope, address: u64, bytes: u64) -> Result {
    scope.session.alive()?;
    let mut reserved = reserved();
    if !reserved.is_range(address, bytes) || memory_map().overlaps(address, bytes) {
        return Err(CuError::INVALID_VALUE);
    }
    match reserved.remove(address) {
        Some(range) => free_there(scope, range),
        None => Ok(()),
    }
}

/// Mints a handle for memory that `made` has the worker create; `made` returns the memory's size.
fn make(
    scope: Scope,
    bytes: u64,
    handle_types: u32,
    is_own: bool,
    made: impl FnOnce(Handle<MemoryKind>) -> Result<u64>,
) -> Result<CUmemGenericAllocationHandle> {
    let new = MEMORIES.mint(|memory| {
        memory
            .device
            .store(scope.session.ordinal(), Ordering::Relaxed);
        memory.bytes.store(bytes, Ordering::Relaxed);
        memory.handle_types.store(handle_types, Ordering::Relaxed);
        memory.is_own.store(is_own, Ordering::Relaxed);
        memory.handles.store(1, Ordering::Relaxed);
        memory.mappings.store(0, Ordering::Relaxed);
    })?;
    let made = made(new).and_then(|bytes| {
        let memory = MEMORIES.get(new).ok_or(CuError::UNKNOWN)?;
        memory.bytes.store(bytes, Ordering::Relaxed);
        Ok(value(new))
    });
    if made.is_err() {
        MEMORIES.forget(new);
    }
    made
}

/// Implements `cuMemCreate`.
pub fn create(scope: Scope, bytes: u64, handle_types: u32) -> Result<CUmemGenericAllocationHandle> {
    granular(scope, bytes)?;
    release_unnamed(scope);
    let is_own = handle_types == 0;
    make(scope, bytes, handle_types, is_own, |new| {
        if is_own && let Some(memory) = released::take(scope, bytes) {
            let renamed = scope.session.record(&MemRename { memory, new });
            forget(memory);
            return renamed.map(|()| bytes);
        }
        let message = MemCreate {
            new,
            bytes,
            handle_types,
        };
        with_unused(scope, || scope.session.request(&message, |()| bytes))
    })
}

/// Lets the number of a handle be used again that the program has no more.
pub fn forget(memory: Handle<MemoryKind>) {
    MEMORIES.recycle(memory);
}

/// Implements `cuMemExportToShareableHandle`; returns a new descriptor.
pub fn export(scope: Scope, memory: CUmemGenericAllocationHandle) -> Result<RawFd> {
    let _changing = reserved();
    let (handle, facts) = find(memory)?;
    if facts.handle_types() == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let message = ShareMemory { memory: handle };
    let token = scope.session.request(&message, |reply| reply.token)?;
    sharing::export_memory(handle, token)
}

/// Implements `cuMemImportFromShareableHandle`; each call returns a new handle.
pub fn import(scope: Scope, token: Token) -> Result<CUmemGenericAllocationHandle> {
    make(scope, 0, 0, false, |new| {
        let message = OpenMemory { new, token };
        let opened = scope.session.request(&message, |reply| reply.bytes);
        // Native CUDA returns UNKNOWN for a descriptor of memory that does not exist.
        opened.map_err(|error| match error {
            CuError::INVALID_VALUE => CuError::UNKNOWN,
            error => error,
        })
    })
}

/// Releases memory whose last descriptor was closed and which has no handle or mapping.
fn release_unnamed(scope: Scope) {
    let _changing = reserved();
    for handle in sharing::exports() {
        if let Some(memory) = MEMORIES.get(handle) {
            // A failure shows at the next call.
            let _ = sweep(scope, handle, memory);
        }
    }
}

/// Returns the `CUmemAllocationHandleType`s of a memory's exports.
pub fn handle_types(memory: Handle<MemoryKind>) -> u32 {
    MEMORIES.get(memory).map_or(0, Memory::handle_types)
}

/// Returns the handle for the program.
fn value(memory: Handle<MemoryKind>) -> CUmemGenericAllocationHandle {
    handle::to_pointer(memory).addr() as u64
}

/// Returns the memory of a handle that a program passed. Memory that only mappings keep alive has no handle.
pub fn find(memory: CUmemGenericAllocationHandle) -> Result<(Handle<MemoryKind>, &'static Memory)> {
    let pointer = usize::try_from(memory).map_err(|_| CuError::INVALID_VALUE)?;
    let handle = handle::from_pointer(std::ptr::without_provenance_mut(pointer));
    let handle = handle.ok_or(CuError::INVALID_VALUE)?;
    let memory = MEMORIES.get(handle).ok_or(CuError::INVALID_VALUE)?;
    if memory.handles.load(Ordering::Acquire) == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    Ok((handle, memory))
}

/// Releases memory that has neither handles nor mappings, and no descriptor in any process.
fn sweep(scope: Scope, handle: Handle<MemoryKind>, memory: &Memory) -> Result {
    let in_use = |count: &AtomicU32| count.load(Ordering::Acquire) != 0;
    if in_use(&memory.handles)
        || in_use(&memory.mappings)
        || sharing::is_exported(handle)
        || MEMORIES.retire(handle).is_none()
    {
        return Ok(());
    }
    match memory.is_own.load(Ordering::Relaxed) {
        true => released::put(
            scope,
            handle,
            memory.device(),
            memory.bytes.load(Ordering::Relaxed),
        ),
        false => released::free(scope, handle),
    }
}

/// Implements `cuMemRelease`.
pub fn release(scope: Scope, memory: CUmemGenericAllocationHandle) -> Result {
    let _changing = reserved();
    let (handle, memory) = find(memory)?;
    memory.handles.fetch_sub(1, Ordering::AcqRel);
    sweep(scope, handle, memory)
}

/// Implements `cuMemRetainAllocationHandle`.
pub fn retain(address: u64) -> Result<CUmemGenericAllocationHandle> {
    let _changing = reserved();
    let allocation = memory_map().find(address).ok_or(CuError::INVALID_VALUE)?;
    let Origin::Mapped { memory: handle, .. } = allocation.origin else {
        return Err(CuError::INVALID_VALUE);
    };
    let memory = MEMORIES.get(handle).ok_or(CuError::INVALID_VALUE)?;
    memory.handles.fetch_add(1, Ordering::AcqRel);
    Ok(value(handle))
}

/// Implements `cuMemMap`.
pub fn map(scope: Scope, address: u64, bytes: u64, memory: CUmemGenericAllocationHandle) -> Result {
    scope.session.alive()?;
    let mut reserved = reserved();
    let (handle, facts) = find(memory)?;
    // The driver maps whole allocations only.
    if bytes != 0 && facts.bytes.load(Ordering::Relaxed) != bytes {
        return Err(CuError::NOT_SUPPORTED);
    }
    let end = address.checked_add(bytes).ok_or(CuError::INVALID_VALUE)?;
    let inside = reserved.contains(address, end);
    let aligned = address.is_multiple_of(granularity(scope)?.minimum);
    if bytes == 0 || !inside || !aligned || memory_map().overlaps(address, bytes) {
        return Err(CuError::INVALID_VALUE);
    }
    let message = MemMap {
        address: DevicePtr(address),
        memory: handle,
    };
    // The driver only notes a mapping whose range and memory are good.
    match reserved.mappings < MAPPINGS {
        true => scope.session.record(&message)?,
        false => scope.session.request(&message, |()| ())?,
    }
    reserved.mappings += 1;
    facts.mappings.fetch_add(1, Ordering::AcqRel);
    let origin = Origin::Mapped { memory: handle };
    memory_map().insert(address, bytes, origin, scope.context);
    Ok(())
}

/// Returns the mappings that fill a range without a gap.
fn filled(address: u64, bytes: u64) -> Result<Vec<Allocation>> {
    let end = address.checked_add(bytes).ok_or(CuError::INVALID_VALUE)?;
    let mut at = address;
    let mut found = Vec::new();
    while at < end {
        let mapping = memory_map().find(at).ok_or(CuError::INVALID_VALUE)?;
        if mapping.base != at || !matches!(mapping.origin, Origin::Mapped { .. }) {
            return Err(CuError::INVALID_VALUE);
        }
        at += mapping.bytes;
        found.push(mapping);
    }
    if at == end && bytes != 0 {
        Ok(found)
    } else {
        Err(CuError::INVALID_VALUE)
    }
}

/// Implements `cuMemUnmap`.
pub fn unmap(scope: Scope, address: u64, bytes: u64) -> Result {
    let mut reserved = reserved();
    let mappings = filled(address, bytes)?;
    let message = MemUnmap {
        address: DevicePtr(address),
        bytes,
    };
    // Removed from the map first, so that another thread's copies are refused here rather than by the worker.
    for mapping in &mappings {
        memory_map().remove(mapping.base, |_| true)?;
    }
    if let Err(error) = scope.session.request(&message, |()| ()) {
        for mapping in mappings {
            memory_map().put_back(mapping);
        }
        return Err(error);
    }
    reserved.mappings -= mappings.len();
    let mut outcome = Ok(());
    for mapping in mappings {
        let all = (mapping.base, 0)..=(mapping.base, usize::MAX);
        accesses().extract_if(all, |_, _| true).for_each(drop);
        if let Origin::Mapped { memory } = mapping.origin
            && let Some(facts) = MEMORIES.get(memory)
        {
            facts.mappings.fetch_sub(1, Ordering::AcqRel);
            outcome = outcome.and(sweep(scope, memory, facts));
        }
    }
    outcome
}

/// Implements `cuMemSetAccess`, for the scope's device.
pub fn set_access(scope: Scope, address: u64, bytes: u64, access: Access) -> Result {
    let _changing = reserved();
    let mappings = filled(address, bytes)?;
    let message = MemSetAccess {
        address: DevicePtr(address),
        bytes,
        access,
    };
    scope.session.request(&message, |()| ())?;
    // Accesses are stored outside the map, so that concurrent copies go on finding the mapping.
    let mut accesses = accesses();
    for mapping in mappings {
        accesses.insert((mapping.base, scope.session.ordinal()), access);
    }
    Ok(())
}

/// Returns a device's access to a mapping.
pub fn access(address: u64, device: usize) -> Result<Access> {
    let mapping = memory_map().find(address).filter(Allocation::is_mapped);
    let mapping = mapping.ok_or(CuError::INVALID_VALUE)?;
    let known = accesses().get(&(mapping.base, device)).copied();
    Ok(known.unwrap_or(Access::None))
}

/// Returns the ordinal of a memory's device.
pub fn device_of(memory: Handle<MemoryKind>) -> usize {
    MEMORIES.get(memory).map_or(0, Memory::device)
}
