//! Memory pools and stream-ordered allocation.

use std::ffi::c_void;

use wormhole_api::handle::Pool;
use wormhole_api::{Access, Handle};

use super::devices::ordinal;
use super::{body, put};
use crate::context::{self, Scope, on_device};
use crate::error::{CuError, Result};
use crate::handle::to_pointer;
use crate::pool;
use crate::stream::target;
use crate::types::{
    CUdevice, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationType, CUmemLocation,
    CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUresult, CUstream, DefaultStream,
    LOCATION_DEVICE, MEMORY_PINNED,
};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const FILE_DESCRIPTOR: u32 = 1;
/// All there are: file descriptors, two of Windows, fabric.
const HANDLE_TYPES: u32 = 0xF;
/// The attributes that are 32-bit words; the others have 64 bits.
const WORDS: std::ops::RangeInclusive<u32> = 1..=3;
/// All attributes there are, of which the last four are statistics.
const ATTRIBUTES: std::ops::RangeInclusive<u32> = 1..=8;

pub unsafe fn cuMemAllocAsync(
    default: DefaultStream,
    dptr: *mut CUdeviceptr,
    bytesize: usize,
    hStream: CUstream,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        if dptr.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // Natively nothing is allocated for nothing.
        let address = match bytesize as u64 {
            0 => 0,
            bytes => pool::allocate(scope, target, pool::current(scope)?, bytes)?,
        };
        // SAFETY: as the caller promises.
        unsafe { put(dptr, address) }
    }
}

pub unsafe fn cuMemAllocFromPoolAsync(
    default: DefaultStream,
    dptr: *mut CUdeviceptr,
    bytesize: usize,
    pool: CUmemoryPool,
    hStream: CUstream,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        let pool = pool::find(pool)?;
        if dptr.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let address = match bytesize as u64 {
            0 => 0,
            bytes => pool::allocate(scope, target, pool, bytes)?,
        };
        // SAFETY: as the caller promises.
        unsafe { put(dptr, address) }
    }
}

pub unsafe fn cuMemFreeAsync(
    default: DefaultStream,
    dptr: CUdeviceptr,
    hStream: CUstream,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        pool::free(scope, target, dptr)
    }
}

/// Hands out a pool's handle.
///
/// # Safety
/// `place` is null or writable.
unsafe fn give(
    place: *mut CUmemoryPool,
    device: usize,
    find: impl FnOnce(Scope) -> Result<Handle<Pool>>,
) -> Result {
    let scope = on_device(device)?;
    if place.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: as the caller promises.
    unsafe { put(place, to_pointer(find(scope)?)) }
}

pub unsafe fn cuDeviceGetDefaultMemPool(pool_out: *mut CUmemoryPool, dev: CUdevice) -> CUresult {
    body! {
        let device = ordinal(dev)?;
        // SAFETY: as the caller promises.
        unsafe { give(pool_out, device, pool::default_pool) }
    }
}

pub unsafe fn cuDeviceGetMemPool(pool: *mut CUmemoryPool, dev: CUdevice) -> CUresult {
    body! {
        let device = ordinal(dev)?;
        // SAFETY: as the caller promises.
        unsafe { give(pool, device, pool::current) }
    }
}

pub unsafe fn cuDeviceSetMemPool(dev: CUdevice, pool: CUmemoryPool) -> CUresult {
    body! {
        let device = ordinal(dev)?;
        pool::set_current(device, pool::find(pool)?)
    }
}

/// The device of a location, if there are pools for it and the type of allocation.
///
/// # Safety
/// `location` is null or points to a location.
unsafe fn located(location: *const CUmemLocation, kind: CUmemAllocationType) -> Result<usize> {
    if location.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: not null, so a location.
    let location = unsafe { location.read() };
    match (location.r#type, kind) {
        (LOCATION_DEVICE, MEMORY_PINNED) => ordinal(location.id).map_err(|error| match error {
            CuError::INVALID_DEVICE => CuError::INVALID_VALUE,
            error => error,
        }),
        (LOCATION_DEVICE, _) => Err(CuError::NOT_SUPPORTED),
        // Pools of host memory: the attributes say that there are none.
        (2 | 3, MEMORY_PINNED) => Err(CuError::NOT_SUPPORTED),
        _ => Err(CuError::INVALID_VALUE),
    }
}

pub unsafe fn cuMemGetDefaultMemPool(
    pool_out: *mut CUmemoryPool,
    location: *const CUmemLocation,
    allocType: CUmemAllocationType,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe {
        let device = located(location, allocType)?;
        give(pool_out, device, pool::default_pool)
    } }
}

pub unsafe fn cuMemGetMemPool(
    pool: *mut CUmemoryPool,
    location: *const CUmemLocation,
    allocType: CUmemAllocationType,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe {
        let device = located(location, allocType)?;
        give(pool, device, pool::current)
    } }
}

pub unsafe fn cuMemSetMemPool(
    location: *const CUmemLocation,
    allocType: CUmemAllocationType,
    pool: CUmemoryPool,
) -> CUresult {
    body! {
        // SAFETY: as the caller promises.
        let device = unsafe { located(location, allocType) }?;
        pool::set_current(device, pool::find(pool)?)
    }
}

pub unsafe fn cuMemPoolCreate(
    pool: *mut CUmemoryPool,
    poolProps: *const CUmemPoolProps,
) -> CUresult {
    body! {
        context::scope_or_primary()?;
        if pool.is_null() || poolProps.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so properties.
        let wanted = unsafe { poolProps.read() };
        let plain = wanted.allocType == MEMORY_PINNED
            && wanted.usage == 0
            && wanted.reserved == [0; 54]
            && wanted.handleTypes & !HANDLE_TYPES == 0;
        if !plain {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: of this very function.
        let device = unsafe { located(&raw const wanted.location, wanted.allocType) }?;
        if wanted.handleTypes & !FILE_DESCRIPTOR != 0 {
            return Err(CuError::NOT_SUPPORTED);
        }
        let made = pool::create(on_device(device)?, wanted.handleTypes, wanted.maxSize as u64)?;
        // SAFETY: as the caller promises.
        unsafe { put(pool, to_pointer(made)) }
    }
}

pub unsafe fn cuMemPoolDestroy(pool: CUmemoryPool) -> CUresult {
    body! { pool::destroy(context::scope_or_primary()?, pool::find(pool)?) }
}

pub unsafe fn cuMemPoolTrimTo(pool: CUmemoryPool, minBytesToKeep: usize) -> CUresult {
    body! { pool::trim(context::scope_or_primary()?, pool::find(pool)?, minBytesToKeep as u64) }
}

pub unsafe fn cuMemPoolGetAttribute(
    pool: CUmemoryPool,
    attr: CUmemPool_attribute,
    value: *mut c_void,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        let pool = pool::find(pool)?;
        if value.is_null() || !ATTRIBUTES.contains(&attr) {
            return Err(CuError::INVALID_VALUE);
        }
        let found = pool::attribute(scope, pool, attr)?;
        // SAFETY: not null, so as wide as the attribute; the program's place may have any alignment.
        unsafe {
            if WORDS.contains(&attr) {
                value.cast::<u32>().write_unaligned(u32::from(found != 0));
            } else {
                value.cast::<u64>().write_unaligned(found);
            }
        }
        Ok(())
    }
}

pub unsafe fn cuMemPoolSetAttribute(
    pool: CUmemoryPool,
    attr: CUmemPool_attribute,
    value: *mut c_void,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        let pool = pool::find(pool)?;
        if value.is_null() || !ATTRIBUTES.contains(&attr) {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as in `cuMemPoolGetAttribute`.
        let wanted = unsafe {
            if WORDS.contains(&attr) {
                value.cast::<u32>().read_unaligned().into()
            } else {
                value.cast::<u64>().read_unaligned()
            }
        };
        pool::set_attribute(scope, pool, attr, wanted)
    }
}

pub unsafe fn cuMemPoolSetAccess(
    pool: CUmemoryPool,
    map: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        let pool = pool::find(pool)?;
        if count == 0 {
            return Ok(());
        }
        if map.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        for index in 0..count {
            // SAFETY: as many descriptions as the caller says.
            let wanted = unsafe { map.add(index).read() };
            if wanted.location.r#type != LOCATION_DEVICE {
                return Err(CuError::INVALID_VALUE);
            }
            let device = ordinal(wanted.location.id)?;
            let access = match Access::from_wire(wanted.flags).ok_or(CuError::INVALID_VALUE)? {
                Access::Read => return Err(CuError::NOT_SUPPORTED),
                access => access,
            };
            if device != pool::device_of(pool) {
                pool::set_access(scope, pool, device, access)?;
            } else if access != Access::ReadWrite {
                // The device that a pool lies on keeps its access.
                return Err(CuError::INVALID_DEVICE);
            }
        }
        Ok(())
    }
}

pub unsafe fn cuMemPoolGetAccess(
    flags: *mut CUmemAccess_flags,
    memPool: CUmemoryPool,
    location: *const CUmemLocation,
) -> CUresult {
    body! {
        context::scope_or_primary()?;
        let pool = pool::find(memPool)?;
        if flags.is_null() || location.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so a location.
        let location = unsafe { location.read() };
        if location.r#type != LOCATION_DEVICE {
            return Err(CuError::INVALID_VALUE);
        }
        let device = ordinal(location.id).map_err(|_| CuError::INVALID_VALUE)?;
        let access = pool::access(pool, device);
        // SAFETY: as the caller promises.
        unsafe { put(flags, access.to_wire()) }
    }
}
