//! Functions of CUDA 3.1 with 32-bit addresses and sizes, as they behave in contexts with 64-bit addresses. Functions
//! with a constant result are declared in the API table.

use std::ffi::c_void;

use super::devices::device;
use crate::error::{CuError, Result};
use crate::object::{array, context, texture_reference};
use crate::parameter::{Out, Pointer};
use crate::types::{CUarray, CUdevice};

/// Returns the total memory, saturated at 32 bits.
pub fn cuDeviceTotalMem(bytes: Out<'_, u32>, dev: CUdevice) -> Result {
    bytes.put_if_wanted(0);
    let total = device(dev)?.total_memory;
    bytes.put(u32::try_from(total).unwrap_or(u32::MAX))
}

/// Succeeds without outputs. Otherwise zeroes them and fails with `INVALID_CONTEXT`.
pub fn cuMemGetAddressRange(pbase: Out<'_, u32>, psize: Out<'_, u32>, _dptr: u32) -> Result {
    context::scope()?;
    if pbase.is_null() && psize.is_null() {
        return Ok(());
    }
    pbase.put_if_wanted(0);
    psize.put_if_wanted(0);
    Err(CuError::INVALID_CONTEXT)
}

/// Fails with `INVALID_CONTEXT`, or with `INVALID_HANDLE` for an unknown reference.
pub fn cuTexRefSetAddress(ByteOffset: Out<'_, u32>, hTexRef: *mut c_void) -> Result {
    context::scope()?;
    ByteOffset.put_if_wanted(0);
    texture_reference::find(hTexRef.addr())?;
    Err(CuError::INVALID_CONTEXT)
}

pub fn cuTexRefGetAddress(pdptr: Out<'_, u32>, hTexRef: *mut c_void) -> Result {
    cuTexRefSetAddress(pdptr, hTexRef)
}

pub fn cuTexRefSetAddress2D(hTexRef: *mut c_void) -> Result {
    cuTexRefSetAddress(Out::none(), hTexRef)
}

/// Fails with `INVALID_CONTEXT`, or with an unknown array's error.
pub fn cuArrayGetDescriptor(_pArrayDescriptor: Pointer<'_, c_void>, hArray: CUarray) -> Result {
    context::scope()?;
    array::find(hArray)?;
    Err(CuError::INVALID_CONTEXT)
}
