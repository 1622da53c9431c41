//! Functions of CUDA 3.1, with addresses and sizes of 32 bits, as contexts with 64-bit addresses serve them. What
//! they refuse always is in the table.

use std::ffi::c_void;

use super::devices::device;
use super::{body, put};
use crate::error::CuError;
use crate::runtime::clear;
use crate::types::{CUarray, CUdevice, CUresult};
use crate::{array, context, reference};

/// More than fits is the most that does.
pub unsafe fn cuDeviceTotalMem(bytes: *mut u32, dev: CUdevice) -> CUresult {
    body! {
        // SAFETY: as the caller promises.
        unsafe { clear(bytes) };
        let total = device(dev)?.total_memory;
        // SAFETY: as the caller promises.
        unsafe { put(bytes, u32::try_from(total).unwrap_or(u32::MAX)) }
    }
}

/// Nothing is asked, or nothing is known.
pub unsafe fn cuMemGetAddressRange(pbase: *mut u32, psize: *mut u32, _dptr: u32) -> CUresult {
    body! {
        context::scope()?;
        if pbase.is_null() && psize.is_null() {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        unsafe {
            clear(pbase);
            clear(psize);
        }
        Err(CuError::INVALID_CONTEXT)
    }
}

/// Only what is no reference is told from what is one.
pub unsafe fn cuTexRefSetAddress(ByteOffset: *mut u32, hTexRef: *mut c_void) -> CUresult {
    body! {
        context::scope()?;
        // SAFETY: as the caller promises.
        unsafe { clear(ByteOffset) };
        reference::find(hTexRef.addr())?;
        Err(CuError::INVALID_CONTEXT)
    }
}

pub unsafe fn cuTexRefGetAddress(pdptr: *mut u32, hTexRef: *mut c_void) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuTexRefSetAddress(pdptr, hTexRef) }
}

pub unsafe fn cuTexRefSetAddress2D(hTexRef: *mut c_void) -> CUresult {
    // SAFETY: nothing is written.
    unsafe { cuTexRefSetAddress(std::ptr::null_mut(), hTexRef) }
}

/// Only what is no array is told from what is one.
pub unsafe fn cuArrayGetDescriptor(_pArrayDescriptor: *mut c_void, hArray: CUarray) -> CUresult {
    body! {
        context::scope()?;
        array::find(hArray)?;
        Err(CuError::INVALID_CONTEXT)
    }
}

pub unsafe fn cuArray3DGetDescriptor(pArrayDescriptor: *mut c_void, hArray: CUarray) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuArrayGetDescriptor(pArrayDescriptor, hArray) }
}
