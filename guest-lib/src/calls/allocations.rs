//! Device memory and page-locked host memory.

use std::ffi::c_void;

use wormhole_api::MemGetInfo;
use wormhole_api::constants::host_alloc_flags::{DEVICEMAP, PORTABLE};

use crate::error::{CuError, Result};
use crate::graph;
use crate::memory::map::Origin;
use crate::memory::{self, memory_map, residence};
use crate::object::context;
use crate::parameter::Out;
use crate::types::CUdeviceptr;

/// Row alignment of `cuMemAllocPitch` in bytes.
const PITCH: u64 = 512;

pub fn cuMemAlloc_v2(dptr: Out<'_, CUdeviceptr>, bytesize: usize) -> Result {
    let scope = context::scope()?;
    dptr.not_null()?;
    dptr.put(memory::allocate(scope, bytesize as u64)?)
}

pub fn cuMemAllocPitch_v2(
    dptr: Out<'_, CUdeviceptr>,
    pPitch: Out<'_, usize>,
    WidthInBytes: usize,
    Height: usize,
    ElementSizeBytes: u32,
) -> Result {
    let scope = context::scope()?;
    if dptr.is_null() || pPitch.is_null() || ![4, 8, 16].contains(&ElementSizeBytes) {
        return Err(CuError::INVALID_VALUE);
    }
    let pitch = (WidthInBytes as u64)
        .checked_next_multiple_of(PITCH)
        .ok_or(CuError::INVALID_VALUE)?;
    let bytes = pitch
        .checked_mul(Height as u64)
        .ok_or(CuError::OUT_OF_MEMORY)?;
    dptr.put(memory::allocate(scope, bytes)?)?;
    pPitch.put(usize::try_from(pitch).unwrap_or(usize::MAX))
}

pub fn cuMemFree_v2(dptr: CUdeviceptr) -> Result {
    graph::free(context::scope_or_primary()?, dptr)
}

pub fn cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) -> Result {
    let scope = context::scope()?;
    memory::free_kept(scope)?;
    let [unused, all] = scope
        .session
        .request(&MemGetInfo {}, |reply| [reply.free, reply.total])?;
    // The program can allocate the memory of mirrors, too.
    let info = [
        all.min(unused.saturating_add(residence::mirror_bytes())),
        all,
    ];
    let [free_bytes, total_bytes] = info.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    free.put_if_wanted(free_bytes);
    total.put_if_wanted(total_bytes);
    Ok(())
}

pub fn cuMemGetAddressRange_v2(
    pbase: Out<'_, CUdeviceptr>,
    psize: Out<'_, usize>,
    dptr: CUdeviceptr,
) -> Result {
    context::scope()?.session.alive()?;
    let allocation = memory_map().find(dptr).ok_or(CuError::NOT_FOUND)?;
    pbase.put_if_wanted(allocation.base);
    psize.put_if_wanted(usize::try_from(allocation.bytes).unwrap_or(usize::MAX));
    Ok(())
}

fn address_of(pointer: *mut c_void) -> u64 {
    pointer.expose_provenance() as u64
}

pub fn cuMemHostAlloc(pp: Out<'_, *mut c_void>, bytesize: usize, Flags: u32) -> Result {
    let scope = context::scope()?;
    pp.not_null()?;
    let address = memory::allocate_host(scope, bytesize as u64, Flags)?;
    let address = usize::try_from(address).map_err(|_| CuError::UNKNOWN)?;
    pp.put(std::ptr::with_exposed_provenance_mut(address))
}

pub fn cuMemFreeHost(p: *mut c_void) -> Result {
    memory::free_host(context::scope_or_primary()?, address_of(p))
}

pub fn cuMemHostGetDevicePointer_v2(
    pdptr: Out<'_, CUdeviceptr>,
    p: *mut c_void,
    Flags: u32,
) -> Result {
    context::scope()?.session.alive()?;
    if Flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let address = address_of(p);
    let device = memory::find_host(address)?.for_device(address);
    pdptr.put(device.ok_or(CuError::INVALID_VALUE)?)
}

pub fn cuMemHostRegister_v2(p: *mut c_void, bytesize: usize, Flags: u32) -> Result {
    memory::register(context::scope()?, address_of(p), bytesize as u64, Flags)
}

pub fn cuMemHostUnregister(p: *mut c_void) -> Result {
    memory::unregister(context::scope_or_primary()?, address_of(p))
}

/// Adds the flags PORTABLE and DEVICEMAP, because all page-locked memory has these properties.
fn reported_flags(flags: u32) -> u32 {
    flags | PORTABLE | DEVICEMAP
}

pub fn cuMemHostGetFlags(pFlags: Out<'_, u32>, p: *mut c_void) -> Result {
    context::scope()?;
    let flags = flags_of(p)?;
    pFlags.put(reported_flags(flags))
}

fn flags_of(pointer: *mut c_void) -> Result<u32> {
    match memory::find_host(address_of(pointer))?.origin {
        Origin::Host { flags } | Origin::Registered { flags, .. } => Ok(flags),
        _ => Err(CuError::INVALID_VALUE),
    }
}
