//! Memory pools and stream-ordered allocation.

use std::ffi::c_void;

use wormhole_api::constants::memory_handle_type::POSIX_FILE_DESCRIPTOR;
use wormhole_api::constants::memory_location;
use wormhole_api::handle::Pool;
use wormhole_api::pool::AttributeType;
use wormhole_api::{Access, Handle};

use super::devices::ordinal;
use crate::error::{CuError, Result};
use crate::graph::submit::{Operation, submit};
use crate::handle::to_pointer;
use crate::memory::pool::{self, Alloc};
use crate::object::context::{self, Scope, on_device};
use crate::object::stream::{Target, target};
use crate::parameter::{In, Out, Pointer};
use crate::types::{
    CUdevice, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationType, CUmemLocation,
    CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUstream, DefaultStream, HANDLE_TYPES,
    LOCATION_DEVICE, MEMORY_PINNED,
};

/// Returns the type of an attribute whose value a program exchanges at a place.
fn attribute_type(
    attribute: CUmemPool_attribute,
    value: &Pointer<'_, c_void>,
) -> Result<AttributeType> {
    let known = AttributeType::of(attribute).filter(|_| !value.is_null());
    known.ok_or(CuError::INVALID_VALUE)
}

fn allocate(scope: Scope, target: Target, pool: Handle<Pool>, bytes: u64) -> Result<u64> {
    let mut address = 0;
    let alloc = Alloc::new(pool, bytes, &mut address)?;
    submit(scope, target, Operation::Alloc(alloc))?;
    Ok(address)
}

pub fn cuMemAllocAsync(
    default: DefaultStream,
    dptr: Out<'_, CUdeviceptr>,
    bytesize: usize,
    hStream: CUstream,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    dptr.not_null()?;
    // The native driver allocates nothing for a size of 0.
    let address = match bytesize as u64 {
        0 => 0,
        bytes => allocate(scope, target, pool::current(scope)?, bytes)?,
    };
    dptr.put(address)
}

pub fn cuMemAllocFromPoolAsync(
    default: DefaultStream,
    dptr: Out<'_, CUdeviceptr>,
    bytesize: usize,
    pool: CUmemoryPool,
    hStream: CUstream,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    let pool = pool::find(pool)?;
    dptr.not_null()?;
    let address = match bytesize as u64 {
        0 => 0,
        bytes => allocate(scope, target, pool, bytes)?,
    };
    dptr.put(address)
}

pub fn cuMemFreeAsync(default: DefaultStream, dptr: CUdeviceptr, hStream: CUstream) -> Result {
    let (scope, target) = target(default, hStream)?;
    submit(scope, target, Operation::Free(dptr))
}

/// Writes the handle of a pool.
fn give(
    place: Out<'_, CUmemoryPool>,
    device: usize,
    find: impl FnOnce(Scope) -> Result<Handle<Pool>>,
) -> Result {
    let scope = on_device(device)?;
    place.not_null()?;
    place.put(to_pointer(find(scope)?))
}

pub fn cuDeviceGetDefaultMemPool(pool_out: Out<'_, CUmemoryPool>, dev: CUdevice) -> Result {
    let device = ordinal(dev)?;
    give(pool_out, device, pool::default_pool)
}

pub fn cuDeviceGetMemPool(pool: Out<'_, CUmemoryPool>, dev: CUdevice) -> Result {
    let device = ordinal(dev)?;
    give(pool, device, pool::current)
}

pub fn cuDeviceSetMemPool(dev: CUdevice, pool: CUmemoryPool) -> Result {
    let device = ordinal(dev)?;
    pool::set_current(device, pool::find(pool)?)
}

/// Returns the device of a location. Fails if there are no pools for the location or the allocation type.
fn located(location: CUmemLocation, kind: CUmemAllocationType) -> Result<usize> {
    match (location.r#type, kind) {
        (LOCATION_DEVICE, MEMORY_PINNED) => ordinal(location.id).map_err(|error| match error {
            CuError::INVALID_DEVICE => CuError::INVALID_VALUE,
            error => error,
        }),
        (LOCATION_DEVICE, _) => Err(CuError::NOT_SUPPORTED),
        // The device attributes report no support for pools of host memory.
        (memory_location::HOST | memory_location::HOST_NUMA, MEMORY_PINNED) => {
            Err(CuError::NOT_SUPPORTED)
        }
        _ => Err(CuError::INVALID_VALUE),
    }
}

pub fn cuMemGetDefaultMemPool(
    pool_out: Out<'_, CUmemoryPool>,
    location: In<'_, CUmemLocation>,
    allocType: CUmemAllocationType,
) -> Result {
    let device = located(location.get()?, allocType)?;
    give(pool_out, device, pool::default_pool)
}

pub fn cuMemGetMemPool(
    pool: Out<'_, CUmemoryPool>,
    location: In<'_, CUmemLocation>,
    allocType: CUmemAllocationType,
) -> Result {
    let device = located(location.get()?, allocType)?;
    give(pool, device, pool::current)
}

pub fn cuMemSetMemPool(
    location: In<'_, CUmemLocation>,
    allocType: CUmemAllocationType,
    pool: CUmemoryPool,
) -> Result {
    let device = located(location.get()?, allocType)?;
    pool::set_current(device, pool::find(pool)?)
}

pub fn cuMemPoolCreate(pool: Out<'_, CUmemoryPool>, poolProps: In<'_, CUmemPoolProps>) -> Result {
    context::scope_or_primary()?;
    if pool.is_null() || poolProps.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let wanted = poolProps.get()?;
    let plain = wanted.allocType == MEMORY_PINNED
        && wanted.usage == 0
        && wanted.reserved == [0; 54]
        && wanted.handleTypes & !HANDLE_TYPES == 0;
    if !plain {
        return Err(CuError::INVALID_VALUE);
    }
    let device = located(wanted.location, wanted.allocType)?;
    if wanted.handleTypes & !POSIX_FILE_DESCRIPTOR != 0 {
        return Err(CuError::NOT_SUPPORTED);
    }
    let made = pool::create(
        on_device(device)?,
        wanted.handleTypes,
        wanted.maxSize as u64,
    )?;
    pool.put(to_pointer(made))
}

pub fn cuMemPoolDestroy(pool: CUmemoryPool) -> Result {
    pool::destroy(context::scope_or_primary()?, pool::find(pool)?)
}

pub fn cuMemPoolTrimTo(pool: CUmemoryPool, minBytesToKeep: usize) -> Result {
    pool::trim(
        context::scope_or_primary()?,
        pool::find(pool)?,
        minBytesToKeep as u64,
    )
}

pub fn cuMemPoolGetAttribute(
    pool: CUmemoryPool,
    attr: CUmemPool_attribute,
    value: Pointer<'_, c_void>,
) -> Result {
    let scope = context::scope_or_primary()?;
    let pool = pool::find(pool)?;
    let attribute_type = attribute_type(attr, &value)?;
    let found = pool::attribute(scope, pool, attr)?;
    // SAFETY: the place is as wide as the attribute.
    unsafe {
        match attribute_type {
            AttributeType::Flag => value.of().put(u32::from(found != 0)),
            AttributeType::Bytes => value.of().put(found),
        }
    }
}

pub fn cuMemPoolSetAttribute(
    pool: CUmemoryPool,
    attr: CUmemPool_attribute,
    value: Pointer<'_, c_void>,
) -> Result {
    let scope = context::scope_or_primary()?;
    let pool = pool::find(pool)?;
    let attribute_type = attribute_type(attr, &value)?;
    // SAFETY: as in `cuMemPoolGetAttribute`.
    let wanted = unsafe {
        match attribute_type {
            AttributeType::Flag => value.of::<u32>().get()?.into(),
            AttributeType::Bytes => value.of::<u64>().get()?,
        }
    };
    pool::set_attribute(scope, pool, attr, wanted)
}

pub fn cuMemPoolSetAccess(
    pool: CUmemoryPool,
    map: In<'_, [CUmemAccessDesc]>,
    count: usize,
) -> Result {
    let scope = context::scope_or_primary()?;
    let pool = pool::find(pool)?;
    if count == 0 {
        return Ok(());
    }
    for wanted in map.values()? {
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
            // The device that owns a pool cannot lose its access.
            return Err(CuError::INVALID_DEVICE);
        }
    }
    Ok(())
}

pub fn cuMemPoolGetAccess(
    flags: Out<'_, CUmemAccess_flags>,
    memPool: CUmemoryPool,
    location: In<'_, CUmemLocation>,
) -> Result {
    context::scope_or_primary()?;
    let pool = pool::find(memPool)?;
    if flags.is_null() || location.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let location = location.get()?;
    if location.r#type != LOCATION_DEVICE {
        return Err(CuError::INVALID_VALUE);
    }
    let device = ordinal(location.id).map_err(|_| CuError::INVALID_VALUE)?;
    let access = pool::access(pool, device);
    flags.put(access.to_wire())
}
