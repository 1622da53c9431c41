//! Virtual memory management (VMM): `cuMemCreate`, `cuMemMap` and the like.

use std::ffi::c_void;

use wormhole_api::Access;
use wormhole_api::constants::memory_compression::GENERIC;
use wormhole_api::constants::memory_granularity::{MINIMUM, RECOMMENDED};
use wormhole_api::constants::memory_handle_type::POSIX_FILE_DESCRIPTOR;
use wormhole_api::constants::memory_location;

use super::devices::{named, ordinal};
use crate::error::{CuError, Result};
use crate::memory::virtual_memory as memory;
use crate::object::context::{self, on_device};
use crate::parameter::{In, Out};
use crate::types::{
    CUdeviceptr, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemLocation, HANDLE_TYPES, LOCATION_DEVICE, MEMORY_PINNED,
};

pub fn cuMemAddressReserve(
    ptr: Out<'_, CUdeviceptr>,
    size: usize,
    alignment: usize,
    addr: CUdeviceptr,
    flags: u64,
) -> Result {
    let scope = context::scope_or_primary()?;
    if ptr.is_null() || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let address = memory::reserve(scope, size as u64, alignment as u64, addr)?;
    ptr.put(address)
}

pub fn cuMemAddressFree(ptr: CUdeviceptr, size: usize) -> Result {
    memory::unreserve(context::scope_or_primary()?, ptr, size as u64)
}

/// Reads allocation properties. Fails if a requested property is not supported.
fn offered(properties: In<'_, CUmemAllocationProp>) -> Result<CUmemAllocationProp> {
    let wanted = properties.get()?;
    let unknown = wanted.requestedHandleTypes & !HANDLE_TYPES != 0
        || !wanted.win32HandleMetaData.is_null()
        || wanted.reserved != [0; 4];
    // Compression is a hint.
    if wanted.r#type != MEMORY_PINNED || wanted.compressionType > GENERIC || unknown {
        return Err(CuError::INVALID_VALUE);
    }
    match wanted.location.r#type {
        LOCATION_DEVICE => ordinal(wanted.location.id)?,
        // The device attributes report no support for host memory.
        memory_location::HOST..=memory_location::HOST_NUMA_CURRENT => {
            return Err(CuError::NOT_SUPPORTED);
        }
        _ => return Err(CuError::INVALID_VALUE),
    };
    let known = wanted.requestedHandleTypes & !POSIX_FILE_DESCRIPTOR == 0
        && wanted.gpuDirectRDMACapable == 0
        && wanted.usage == 0;
    if known {
        Ok(wanted)
    } else {
        Err(CuError::NOT_SUPPORTED)
    }
}

pub fn cuMemCreate(
    handle: Out<'_, CUmemGenericAllocationHandle>,
    size: usize,
    prop: In<'_, CUmemAllocationProp>,
    flags: u64,
) -> Result {
    context::scope_or_primary()?;
    if handle.is_null() || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let wanted = offered(prop)?;
    let scope = on_device(ordinal(wanted.location.id)?)?;
    let made = memory::create(scope, size as u64, wanted.requestedHandleTypes)?;
    handle.put(made)
}

pub fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> Result {
    memory::release(context::scope_or_primary()?, handle)
}

pub fn cuMemRetainAllocationHandle(
    handle: Out<'_, CUmemGenericAllocationHandle>,
    addr: *mut c_void,
) -> Result {
    context::scope_or_primary()?;
    handle.not_null()?;
    let retained = memory::retain(addr.addr() as u64)?;
    handle.put(retained)
}

pub fn cuMemGetAllocationGranularity(
    granularity: Out<'_, usize>,
    prop: In<'_, CUmemAllocationProp>,
    option: CUmemAllocationGranularity_flags,
) -> Result {
    let scope = context::scope_or_primary()?;
    // The granularity does not depend on the properties.
    prop.not_null()?;
    let known = memory::granularity(scope)?;
    let bytes = match option {
        MINIMUM => known.minimum,
        RECOMMENDED => known.recommended,
        _ => return Err(CuError::INVALID_VALUE),
    };
    granularity.put(usize::try_from(bytes).unwrap_or(usize::MAX))
}

pub fn cuMemGetAllocationPropertiesFromHandle(
    prop: Out<'_, CUmemAllocationProp>,
    handle: CUmemGenericAllocationHandle,
) -> Result {
    context::scope_or_primary()?;
    let (_, memory) = memory::find(handle)?;
    let properties = CUmemAllocationProp {
        r#type: MEMORY_PINNED,
        requestedHandleTypes: memory.handle_types(),
        location: CUmemLocation {
            r#type: LOCATION_DEVICE,
            id: named(memory.device()),
        },
        win32HandleMetaData: std::ptr::null_mut(),
        compressionType: 0,
        gpuDirectRDMACapable: 0,
        usage: 0,
        reserved: [0; 4],
    };
    prop.put(properties)
}

pub fn cuMemMap(
    ptr: CUdeviceptr,
    size: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: u64,
) -> Result {
    let scope = context::scope_or_primary()?;
    if flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // The driver maps whole allocations only (CUDA driver API, `cuMemMap`).
    if offset != 0 {
        return Err(CuError::NOT_SUPPORTED);
    }
    memory::map(scope, ptr, size as u64, handle)
}

pub fn cuMemUnmap(ptr: CUdeviceptr, size: usize) -> Result {
    memory::unmap(context::scope_or_primary()?, ptr, size as u64)
}

pub fn cuMemSetAccess(
    ptr: CUdeviceptr,
    size: usize,
    desc: In<'_, [CUmemAccessDesc]>,
    count: usize,
) -> Result {
    context::scope_or_primary()?;
    if desc.is_null() || count == 0 {
        return Err(CuError::INVALID_VALUE);
    }
    for wanted in desc.values()? {
        if wanted.location.r#type != LOCATION_DEVICE {
            return Err(CuError::INVALID_VALUE);
        }
        let device = ordinal(wanted.location.id).map_err(|_| CuError::INVALID_VALUE)?;
        let scope = on_device(device)?;
        let access = Access::from_wire(wanted.flags).ok_or(CuError::INVALID_VALUE)?;
        memory::set_access(scope, ptr, size as u64, access)?;
    }
    Ok(())
}

pub fn cuMemGetAccess(
    flags: Out<'_, u64>,
    location: In<'_, CUmemLocation>,
    ptr: CUdeviceptr,
) -> Result {
    context::scope_or_primary()?;
    if flags.is_null() || location.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let location = location.get()?;
    if location.r#type != LOCATION_DEVICE {
        return Err(CuError::INVALID_VALUE);
    }
    let device = ordinal(location.id).map_err(|_| CuError::INVALID_VALUE)?;
    let access = memory::access(ptr, device)?;
    flags.put(access.to_wire().into())
}
