//! Sharing between the processes of one guest.

use std::ffi::c_void;
use std::os::fd::RawFd;

use wormhole_api::constants::memory_handle_type::{POSIX_FILE_DESCRIPTOR, WIN32};

use crate::error::{CuError, Result};
use crate::handle::to_pointer;
use crate::memory::{pool, virtual_memory};
use crate::object::context;
use crate::object::{event, sharing};
use crate::parameter::{In, Out, Pointer};
use crate::types::{
    CUdeviceptr, CUevent, CUipcEventHandle, CUipcMemHandle, CUmemAllocationHandleType,
    CUmemGenericAllocationHandle, CUmemPoolPtrExportData, CUmemoryPool,
};

pub fn cuIpcGetMemHandle(pHandle: Out<'_, CUipcMemHandle>, dptr: CUdeviceptr) -> Result {
    let scope = context::scope()?;
    pHandle.not_null()?;
    let reserved = sharing::share_allocation(scope, dptr)?;
    pHandle.put(CUipcMemHandle { reserved })
}

pub fn cuIpcOpenMemHandle_v2(
    pdptr: Out<'_, CUdeviceptr>,
    handle: CUipcMemHandle,
    Flags: u32,
) -> Result {
    let scope = context::scope()?;
    pdptr.not_null()?;
    let address = sharing::open_allocation(scope, &handle.reserved, Flags)?;
    pdptr.put(address)
}

pub fn cuIpcCloseMemHandle(dptr: CUdeviceptr) -> Result {
    sharing::close_allocation(context::scope()?, dptr)
}

pub fn cuIpcGetEventHandle(pHandle: Out<'_, CUipcEventHandle>, event: CUevent) -> Result {
    let scope = context::scope()?;
    if pHandle.is_null() || event.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let reserved = sharing::to_handle(event::share(scope, event)?);
    pHandle.put(CUipcEventHandle { reserved })
}

pub fn cuIpcOpenEventHandle(phEvent: Out<'_, CUevent>, handle: CUipcEventHandle) -> Result {
    let scope = context::scope()?;
    phEvent.not_null()?;
    let token = sharing::from_handle(&handle.reserved).ok_or(CuError::MAP_FAILED)?;
    phEvent.put(event::open(scope, token)?)
}

/// Returns the descriptor that a program passes as a pointer.
fn passed_descriptor(handle: *mut c_void, kind: CUmemAllocationHandleType) -> Result<RawFd> {
    match kind {
        POSIX_FILE_DESCRIPTOR => RawFd::try_from(handle.addr()).map_err(|_| CuError::UNKNOWN),
        WIN32 => Err(CuError::NOT_SUPPORTED),
        _ => Err(CuError::INVALID_VALUE),
    }
}

pub fn cuMemExportToShareableHandle(
    shareableHandle: Pointer<'_, c_void>,
    handle: CUmemGenericAllocationHandle,
    handleType: CUmemAllocationHandleType,
    flags: u64,
) -> Result {
    let scope = context::scope_or_primary()?;
    if shareableHandle.is_null() || handleType != POSIX_FILE_DESCRIPTOR || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let descriptor = virtual_memory::export(scope, handle)?;
    // SAFETY: a handle of this type is a descriptor.
    unsafe { shareableHandle.of::<RawFd>() }.put(descriptor)
}

pub fn cuMemImportFromShareableHandle(
    handle: Out<'_, CUmemGenericAllocationHandle>,
    osHandle: *mut c_void,
    shHandleType: CUmemAllocationHandleType,
) -> Result {
    let scope = context::scope_or_primary()?;
    handle.not_null()?;
    let token = sharing::from_descriptor(passed_descriptor(osHandle, shHandleType)?)?;
    handle.put(virtual_memory::import(scope, token)?)
}

pub fn cuMemPoolExportToShareableHandle(
    handle_out: Pointer<'_, c_void>,
    pool: CUmemoryPool,
    handleType: CUmemAllocationHandleType,
    flags: u64,
) -> Result {
    let scope = context::scope_or_primary()?;
    let pool = pool::find(pool)?;
    if handle_out.is_null() || handleType != POSIX_FILE_DESCRIPTOR || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let descriptor = pool::export(scope, pool)?;
    // SAFETY: a handle of this type is a descriptor.
    unsafe { handle_out.of::<RawFd>() }.put(descriptor)
}

pub fn cuMemPoolImportFromShareableHandle(
    pool_out: Out<'_, CUmemoryPool>,
    handle: *mut c_void,
    handleType: CUmemAllocationHandleType,
    flags: u64,
) -> Result {
    let scope = context::scope_or_primary()?;
    if pool_out.is_null() || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let token = sharing::from_descriptor(passed_descriptor(handle, handleType)?)?;
    pool_out.put(to_pointer(pool::import(scope, token)?))
}

pub fn cuMemPoolExportPointer(
    shareData_out: Out<'_, CUmemPoolPtrExportData>,
    ptr: CUdeviceptr,
) -> Result {
    let scope = context::scope_or_primary()?;
    shareData_out.not_null()?;
    let reserved = sharing::to_handle(pool::export_pointer(scope, ptr)?);
    shareData_out.put(CUmemPoolPtrExportData { reserved })
}

pub fn cuMemPoolImportPointer(
    ptr_out: Out<'_, CUdeviceptr>,
    pool: CUmemoryPool,
    shareData: In<'_, CUmemPoolPtrExportData>,
) -> Result {
    let scope = context::scope_or_primary()?;
    let pool = pool::find(pool)?;
    if ptr_out.is_null() || shareData.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let data = shareData.get()?;
    let token = sharing::from_handle(&data.reserved).ok_or(CuError::INVALID_VALUE)?;
    ptr_out.put(pool::import_pointer(scope, pool, token)?)
}
