//! Device memory and page-locked host memory.

use std::ffi::c_void;

use wormhole_api::MemGetInfo;

use super::{body, put, put_if_wanted};
use crate::context;
use crate::error::{CuError, Result};
use crate::memory::{self, memory_map};
use crate::memory_map::Origin;
use crate::types::{CUdeviceptr, CUresult};

/// Rows of `cuMemAllocPitch` start at multiples of this.
const PITCH: u64 = 512;

pub unsafe fn cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytesize: usize) -> CUresult {
    body! {
        let scope = context::scope()?;
        if dptr.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        unsafe { put(dptr, memory::allocate(scope, bytesize as u64)?) }
    }
}

pub unsafe fn cuMemAllocPitch_v2(
    dptr: *mut CUdeviceptr,
    pPitch: *mut usize,
    WidthInBytes: usize,
    Height: usize,
    ElementSizeBytes: u32,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if dptr.is_null() || pPitch.is_null() || ![4, 8, 16].contains(&ElementSizeBytes) {
            return Err(CuError::INVALID_VALUE);
        }
        let pitch = (WidthInBytes as u64).checked_next_multiple_of(PITCH).ok_or(CuError::INVALID_VALUE)?;
        let bytes = pitch.checked_mul(Height as u64).ok_or(CuError::OUT_OF_MEMORY)?;
        // SAFETY: as the caller promises.
        unsafe {
            put(dptr, memory::allocate(scope, bytes)?)?;
            put(pPitch, usize::try_from(pitch).unwrap_or(usize::MAX))
        }
    }
}

pub unsafe fn cuMemFree_v2(dptr: CUdeviceptr) -> CUresult {
    body! { memory::free(context::scope_or_primary()?, dptr) }
}

pub unsafe fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    body! {
        let scope = context::scope()?;
        let info = scope.session.request(&MemGetInfo {}, |reply| [reply.free, reply.total])?;
        let [free_bytes, total_bytes] = info.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        // SAFETY: as the caller promises.
        unsafe {
            put_if_wanted(free, free_bytes);
            put_if_wanted(total, total_bytes);
        }
        Ok(())
    }
}

pub unsafe fn cuMemGetAddressRange_v2(
    pbase: *mut CUdeviceptr,
    psize: *mut usize,
    dptr: CUdeviceptr,
) -> CUresult {
    body! {
        context::scope()?.session.alive()?;
        let allocation = memory_map().find(dptr).ok_or(CuError::NOT_FOUND)?;
        // SAFETY: as the caller promises.
        unsafe {
            put_if_wanted(pbase, allocation.base);
            put_if_wanted(psize, usize::try_from(allocation.bytes).unwrap_or(usize::MAX));
        }
        Ok(())
    }
}

fn address_of(pointer: *mut c_void) -> u64 {
    pointer.expose_provenance() as u64
}

pub unsafe fn cuMemHostAlloc(pp: *mut *mut c_void, bytesize: usize, Flags: u32) -> CUresult {
    body! {
        let scope = context::scope()?;
        if pp.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let address = memory::allocate_host(scope, bytesize as u64, Flags)?;
        let address = usize::try_from(address).map_err(|_| CuError::UNKNOWN)?;
        // SAFETY: as the caller promises.
        unsafe { put(pp, std::ptr::with_exposed_provenance_mut(address)) }
    }
}

pub unsafe fn cuMemAllocHost_v2(pp: *mut *mut c_void, bytesize: usize) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuMemHostAlloc(pp, bytesize, 0) }
}

pub unsafe fn cuMemFreeHost(p: *mut c_void) -> CUresult {
    body! { memory::free_host(context::scope_or_primary()?, address_of(p)) }
}

pub unsafe fn cuMemHostGetDevicePointer_v2(
    pdptr: *mut CUdeviceptr,
    p: *mut c_void,
    Flags: u32,
) -> CUresult {
    body! {
        context::scope()?.session.alive()?;
        if Flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let address = address_of(p);
        let device = memory::find_host(address)?.for_device(address);
        // SAFETY: as the caller promises.
        unsafe { put(pdptr, device.ok_or(CuError::INVALID_VALUE)?) }
    }
}

pub unsafe fn cuMemHostRegister_v2(p: *mut c_void, bytesize: usize, Flags: u32) -> CUresult {
    body! { memory::register(context::scope()?, address_of(p), bytesize as u64, Flags) }
}

pub unsafe fn cuMemHostUnregister(p: *mut c_void) -> CUresult {
    body! { memory::unregister(context::scope_or_primary()?, address_of(p)) }
}

/// All page-locked memory is mapped and portable, so that is what the flags say.
fn reported_flags(flags: u32) -> u32 {
    const PORTABLE: u32 = 1;
    const MAPPED: u32 = 2;
    flags | PORTABLE | MAPPED
}

pub unsafe fn cuMemHostGetFlags(pFlags: *mut u32, p: *mut c_void) -> CUresult {
    body! {
        context::scope()?;
        let flags = flags_of(p)?;
        // SAFETY: as the caller promises.
        unsafe { put(pFlags, reported_flags(flags)) }
    }
}

fn flags_of(pointer: *mut c_void) -> Result<u32> {
    match memory::find_host(address_of(pointer))?.origin {
        Origin::Host { flags } | Origin::Registered { flags, .. } => Ok(flags),
        _ => Err(CuError::INVALID_VALUE),
    }
}
