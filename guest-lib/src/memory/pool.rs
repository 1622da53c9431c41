//! Memory pools and stream-ordered allocation.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use wormhole_api::constants::pool_attribute::RELEASE_THRESHOLD;
use wormhole_api::handle::{Pool as PoolKind, Stream};
use wormhole_api::{
    Access, DevicePtr, Handle, MemFree, OpenPointer, OpenPool, PoolAlloc, PoolCreate, PoolDefault,
    PoolDestroy, PoolFree, PoolGetAttribute, PoolSetAccess, PoolSetAttribute, PoolTrim,
    ShareAddress, SharePool, SharedAddress,
};
use wormhole_lock::{Mutex, MutexGuard};

use crate::device::MOST;
use crate::error::{CuError, Result};
use crate::handle::{self, Table};
use crate::log;
use crate::memory::map::{Allocation, Origin};
use crate::memory::{memory_map, pool_reuse, with_unused};
use crate::object::context::Scope;
use crate::object::sharing::{self, Token};
use crate::object::stream::Target;
use crate::object::stream::release::RELEASES;
use crate::types::CUmemoryPool;

/// Facts of a pool.
#[derive(Debug, Default)]
pub struct Pool {
    threshold: AtomicU64,
    /// Ordinal of the pool's device.
    device: AtomicUsize,
    /// Access of other devices to the pool's memory, by ordinal.
    accesses: Mutex<BTreeMap<usize, Access>>,
    /// `CUmemAllocationHandleType`s of the pool's exports.
    handle_types: AtomicU32,
    /// True for a pool of another process, from which nothing is allocated here.
    foreign: AtomicBool,
}

static POOLS: Table<PoolKind, Pool> = Table::new();
/// Default pools of the devices, once they were requested.
static DEFAULT: Mutex<[Option<Handle<PoolKind>>; MOST]> = Mutex::new([None; MOST]);
/// Wire handles of the pools that `cuMemAllocAsync` allocates from, by device; 0 for the default pool.
static CURRENT: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];

/// Notes that memory was freed, if it is a pool's, in the order of one stream or of all.
pub fn freed(allocation: &Allocation, stream: Option<Handle<Stream>>) {
    if let Origin::Pool { pool } = allocation.origin {
        freed_to(pool, stream);
    }
}

/// Notes that memory of a pool was freed, in the order of one stream or of all. Call it after the message was sent: a
/// synchronization that takes the note is then sent after the message, in whichever thread.
pub fn freed_to(pool: Handle<PoolKind>, stream: Option<Handle<Stream>>) {
    // A destroyed pool releases all its memory.
    let known = POOLS.get(pool);
    let threshold = known.map_or(0, |pool| pool.threshold.load(Ordering::Relaxed));
    if threshold != u64::MAX {
        RELEASES.note(stream);
    }
}

fn mint(scope: Scope, handle_types: u32, foreign: bool) -> Result<Handle<PoolKind>> {
    POOLS.mint(|pool| {
        pool.threshold.store(0, Ordering::Relaxed);
        pool.device
            .store(scope.session.ordinal(), Ordering::Relaxed);
        pool.accesses().clear();
        pool.handle_types.store(handle_types, Ordering::Relaxed);
        pool.foreign.store(foreign, Ordering::Relaxed);
    })
}

impl Pool {
    fn accesses(&self) -> MutexGuard<'_, BTreeMap<usize, Access>> {
        self.accesses.lock()
    }
}

/// Returns the ordinal of a pool's device.
pub fn device_of(pool: Handle<PoolKind>) -> usize {
    POOLS
        .get(pool)
        .map_or(0, |pool| pool.device.load(Ordering::Relaxed))
}

/// Returns a device's access to a pool's memory.
pub fn access(pool: Handle<PoolKind>, device: usize) -> Access {
    if device == device_of(pool) {
        return Access::ReadWrite;
    }
    let known = POOLS
        .get(pool)
        .and_then(|pool| pool.accesses().get(&device).copied());
    known.unwrap_or(Access::None)
}

/// Implements `cuMemPoolSetAccess`, for another device than the pool's.
pub fn set_access(scope: Scope, pool: Handle<PoolKind>, device: usize, access: Access) -> Result {
    let facts = POOLS.get(pool).ok_or(CuError::INVALID_VALUE)?;
    let message = PoolSetAccess {
        pool,
        peer: scope.session.session().on(device).number(),
        access,
    };
    scope.session.request(&message, |()| ())?;
    facts.accesses().insert(device, access);
    Ok(())
}

/// Returns the `CUmemAllocationHandleType`s of a pool's exports.
pub fn handle_types(pool: Handle<PoolKind>) -> u32 {
    let known = POOLS.get(pool);
    known.map_or(0, |pool| pool.handle_types.load(Ordering::Relaxed))
}

/// Prepares a pool for a query or a change: frees in the worker what this library holds of it. Fails for a pool of another
/// process, which alone may query and change it.
fn prepare(scope: Scope, pool: Handle<PoolKind>) -> Result {
    if is_foreign(pool) {
        return Err(CuError::INVALID_VALUE);
    }
    pool_reuse::free_of_pool(scope, pool)
}

/// Returns whether this process alone uses the pool, so that freed memory may be allocated again without the worker.
fn is_private(pool: Handle<PoolKind>) -> bool {
    POOLS.get(pool).is_some_and(|pool| {
        pool.handle_types.load(Ordering::Relaxed) == 0 && !pool.foreign.load(Ordering::Relaxed)
    })
}

fn is_foreign(pool: Handle<PoolKind>) -> bool {
    let known = POOLS.get(pool);
    known.is_some_and(|pool| pool.foreign.load(Ordering::Relaxed))
}

/// Returns the device's default pool.
pub fn default_pool(scope: Scope) -> Result<Handle<PoolKind>> {
    let mut default = DEFAULT.lock();
    let default = &mut default[scope.session.ordinal()];
    if let Some(pool) = *default {
        return Ok(pool);
    }
    let new = mint(scope, 0, false)?;
    if let Err(error) = scope.session.request(&PoolDefault { new }, |()| ()) {
        POOLS.forget(new);
        return Err(error);
    }
    *default = Some(new);
    Ok(new)
}

fn is_default(pool: Handle<PoolKind>) -> bool {
    let default = DEFAULT.lock();
    default.contains(&Some(pool))
}

/// Returns the pool that `cuMemAllocAsync` allocates from.
pub fn current(scope: Scope) -> Result<Handle<PoolKind>> {
    match Handle::from_wire(CURRENT[scope.session.ordinal()].load(Ordering::Acquire)) {
        Some(pool) => Ok(pool),
        None => default_pool(scope),
    }
}

/// Makes a pool of a device its current one.
pub fn set_current(device: usize, pool: Handle<PoolKind>) -> Result {
    if device != device_of(pool) {
        return Err(CuError::INVALID_VALUE);
    }
    CURRENT[device].store(pool.to_wire(), Ordering::Release);
    Ok(())
}

/// Returns the pool of a handle that a program passed.
pub fn find(pool: CUmemoryPool) -> Result<Handle<PoolKind>> {
    let handle = handle::from_pointer(pool).ok_or(CuError::INVALID_VALUE)?;
    POOLS
        .get(handle)
        .map(|_| handle)
        .ok_or(CuError::INVALID_VALUE)
}

/// Implements `cuMemPoolCreate`.
pub fn create(scope: Scope, handle_types: u32, most: u64) -> Result<Handle<PoolKind>> {
    let new = mint(scope, handle_types, false)?;
    let message = PoolCreate {
        new,
        handle_types,
        most,
    };
    match scope.session.request(&message, |()| ()) {
        Ok(()) => Ok(new),
        Err(error) => {
            POOLS.forget(new);
            Err(error)
        }
    }
}

/// Implements `cuMemPoolExportToShareableHandle`; returns a new descriptor.
pub fn export(scope: Scope, pool: Handle<PoolKind>) -> Result<RawFd> {
    if handle_types(pool) == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let token = scope
        .session
        .request(&SharePool { pool }, |reply| reply.token)?;
    sharing::export(token)
}

/// Implements `cuMemPoolImportFromShareableHandle`.
pub fn import(scope: Scope, token: Token) -> Result<Handle<PoolKind>> {
    let new = mint(scope, 0, true)?;
    match scope.session.request(&OpenPool { new, token }, |()| ()) {
        Ok(()) => Ok(new),
        Err(error) => {
            POOLS.forget(new);
            Err(error)
        }
    }
}

/// Implements `cuMemPoolExportPointer`, for the start of an allocation.
pub fn export_pointer(scope: Scope, address: u64) -> Result<Token> {
    let allocation = memory_map().find(address).ok_or(CuError::INVALID_VALUE)?;
    match allocation.origin {
        Origin::Pool { pool } if handle_types(pool) != 0 && allocation.base == address => {}
        _ => return Err(CuError::INVALID_VALUE),
    }
    let message = ShareAddress {
        address: DevicePtr(allocation.base),
        what: SharedAddress::Pointer,
    };
    scope.session.request(&message, |reply| reply.token)
}

/// Implements `cuMemPoolImportPointer`.
pub fn import_pointer(scope: Scope, pool: Handle<PoolKind>, token: Token) -> Result<u64> {
    if !is_foreign(pool) {
        return Err(CuError::INVALID_VALUE);
    }
    let message = OpenPointer { pool, token };
    let (address, bytes) = scope
        .session
        .request(&message, |reply| (reply.address.0, reply.bytes))?;
    if !scope.session.is_reserved(address, bytes) {
        log::error_once!(
            "shared memory would lie at {address:#x}, where this program has something of its own"
        );
        let address = DevicePtr(address);
        scope.session.request(&MemFree { address }, |()| ())?;
        return Err(CuError::OUT_OF_MEMORY);
    }
    memory_map().insert(address, bytes, Origin::Pool { pool }, scope.context);
    Ok(address)
}

/// Implements `cuMemPoolDestroy`. If the pool was the current one, the default pool becomes current.
pub fn destroy(scope: Scope, pool: Handle<PoolKind>) -> Result {
    if is_default(pool) {
        return Err(CuError::INVALID_VALUE);
    }
    let current = &CURRENT[device_of(pool)];
    POOLS.retire(pool).ok_or(CuError::INVALID_VALUE)?;
    // The exchange fails if another pool is current.
    let _ = current.compare_exchange(pool.to_wire(), 0, Ordering::AcqRel, Ordering::Relaxed);
    let destroyed = pool_reuse::free_of_pool(scope, pool)
        .and_then(|()| scope.session.request(&PoolDestroy { pool }, |()| ()));
    POOLS.recycle(pool);
    destroyed
}

/// Implements `cuMemPoolTrimTo`.
pub fn trim(scope: Scope, pool: Handle<PoolKind>, keep: u64) -> Result {
    prepare(scope, pool)?;
    scope.session.request(&PoolTrim { pool, keep }, |()| ())
}

/// Returns an attribute's value; 32-bit values are widened.
pub fn attribute(scope: Scope, pool: Handle<PoolKind>, attribute: u32) -> Result<u64> {
    prepare(scope, pool)?;
    let message = PoolGetAttribute { pool, attribute };
    scope.session.request(&message, |reply| reply.value)
}

/// Implements `cuMemPoolSetAttribute`.
pub fn set_attribute(scope: Scope, pool: Handle<PoolKind>, attribute: u32, value: u64) -> Result {
    prepare(scope, pool)?;
    let message = PoolSetAttribute {
        pool,
        attribute,
        value,
    };
    scope.session.request(&message, |()| ())?;
    if attribute == RELEASE_THRESHOLD
        && let Some(facts) = POOLS.get(pool)
    {
        facts.threshold.store(value, Ordering::Relaxed);
    }
    Ok(())
}

/// Operation of `cuMemAllocFromPoolAsync`.
#[derive(Debug)]
pub struct Alloc<'a> {
    pool: Handle<PoolKind>,
    pub bytes: u64,
    /// Place of the memory's address, written when the operation is handed to a stream.
    pub address: &'a mut u64,
}

impl<'a> Alloc<'a> {
    pub fn new(pool: Handle<PoolKind>, bytes: u64, address: &'a mut u64) -> Result<Self> {
        if bytes == 0 || is_foreign(pool) {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(Self {
            pool,
            bytes,
            address,
        })
    }

    /// Allocates in the order of a stream.
    pub fn send(self, scope: Scope, target: Target) -> Result {
        let Self { pool, bytes, .. } = self;
        scope.session.alive()?;
        let address = match pool_reuse::take(scope, target, pool, bytes) {
            Some(address) => address,
            None => self.request(scope, target)?,
        };
        memory_map().insert(address, bytes, Origin::Pool { pool }, scope.context);
        *self.address = address;
        Ok(())
    }

    /// Allocates in the worker.
    fn request(&self, scope: Scope, target: Target) -> Result<u64> {
        let Self { pool, bytes, .. } = *self;
        let message = PoolAlloc {
            pool,
            stream: target.handle,
            bytes,
        };
        let request = || scope.session.request(&message, |reply| reply.address.0);
        if pool_reuse::is_much() {
            pool_reuse::free_in_order(scope, |stream| stream == target.handle)?;
        }
        let address = with_unused(scope, request)?;
        if !scope.session.is_reserved(address, bytes) {
            log::error_once!(
                "a pool's memory would lie at {address:#x}, where this program has something of its own"
            );
            let message = PoolFree {
                address: DevicePtr(address),
                stream: target.handle,
            };
            scope.session.record(&message)?;
            return Err(CuError::OUT_OF_MEMORY);
        }
        Ok(address)
    }
}

/// Frees memory of a pool in the order of a stream (`cuMemFreeAsync`); returns nothing for other memory.
pub fn free(scope: Scope, target: Target, address: u64) -> Option<Result> {
    // Removed from the map first: once the worker has freed the memory, another thread's allocation may get its
    // address.
    let from_pool = |allocation: &Allocation| matches!(allocation.origin, Origin::Pool { .. });
    let allocation = memory_map().remove(address, from_pool).ok()?;
    if let Origin::Pool { pool } = allocation.origin
        && is_private(pool)
        && pool_reuse::store(scope, target, pool, address, allocation.bytes)
    {
        return Some(scope.session.alive());
    }
    let message = PoolFree {
        address: DevicePtr(address),
        stream: target.handle,
    };
    let sent = scope.session.record(&message);
    Some(sent.and_then(|()| {
        freed(&allocation, Some(target.handle));
        target.worked(scope)
    }))
}
