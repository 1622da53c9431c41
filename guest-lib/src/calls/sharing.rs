//! Sharing between the processes of one guest.

use std::ffi::c_void;
use std::os::fd::RawFd;

use super::{body, put};
use crate::context;
use crate::error::{CuError, Result};
use crate::handle::to_pointer;
use crate::types::{
    CUdeviceptr, CUevent, CUipcEventHandle, CUipcMemHandle, CUmemAllocationHandleType,
    CUmemGenericAllocationHandle, CUmemPoolPtrExportData, CUmemoryPool, CUresult,
};
use crate::{event, pool, sharing, virtual_memory};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const FILE_DESCRIPTOR: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_WIN32`.
const WIN32: u32 = 2;

pub unsafe fn cuIpcGetMemHandle(pHandle: *mut CUipcMemHandle, dptr: CUdeviceptr) -> CUresult {
    body! {
        let scope = context::scope()?;
        if pHandle.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let reserved = sharing::share_allocation(scope, dptr)?;
        // SAFETY: as the caller promises.
        unsafe { put(pHandle, CUipcMemHandle { reserved }) }
    }
}

pub unsafe fn cuIpcOpenMemHandle_v2(
    pdptr: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    Flags: u32,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        if pdptr.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let address = sharing::open_allocation(scope, &handle.reserved, Flags)?;
        // SAFETY: as the caller promises.
        unsafe { put(pdptr, address) }
    }
}

pub unsafe fn cuIpcCloseMemHandle(dptr: CUdeviceptr) -> CUresult {
    body! { sharing::close_allocation(context::scope()?, dptr) }
}

pub unsafe fn cuIpcGetEventHandle(pHandle: *mut CUipcEventHandle, event: CUevent) -> CUresult {
    body! {
        let scope = context::scope()?;
        if pHandle.is_null() || event.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let reserved = sharing::to_handle(event::share(scope, event)?);
        // SAFETY: as the caller promises.
        unsafe { put(pHandle, CUipcEventHandle { reserved }) }
    }
}

pub unsafe fn cuIpcOpenEventHandle(phEvent: *mut CUevent, handle: CUipcEventHandle) -> CUresult {
    body! {
        let scope = context::scope()?;
        if phEvent.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let token = sharing::from_handle(&handle.reserved).ok_or(CuError::MAP_FAILED)?;
        // SAFETY: as the caller promises.
        unsafe { put(phEvent, event::open(scope, token)?) }
    }
}

/// A descriptor, as programs pass it in place of a pointer.
fn passed_descriptor(handle: *mut c_void, kind: CUmemAllocationHandleType) -> Result<RawFd> {
    match kind {
        FILE_DESCRIPTOR => RawFd::try_from(handle.addr()).map_err(|_| CuError::UNKNOWN),
        WIN32 => Err(CuError::NOT_SUPPORTED),
        _ => Err(CuError::INVALID_VALUE),
    }
}

pub unsafe fn cuMemExportToShareableHandle(
    shareableHandle: *mut c_void,
    handle: CUmemGenericAllocationHandle,
    handleType: CUmemAllocationHandleType,
    flags: u64,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        if shareableHandle.is_null() || handleType != FILE_DESCRIPTOR || flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let descriptor = virtual_memory::export(scope, handle)?;
        // SAFETY: not null, so a place for a descriptor.
        unsafe { put(shareableHandle.cast::<RawFd>(), descriptor) }
    }
}

pub unsafe fn cuMemImportFromShareableHandle(
    handle: *mut CUmemGenericAllocationHandle,
    osHandle: *mut c_void,
    shHandleType: CUmemAllocationHandleType,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        if handle.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let token = sharing::from_descriptor(passed_descriptor(osHandle, shHandleType)?)?;
        // SAFETY: as the caller promises.
        unsafe { put(handle, virtual_memory::import(scope, token)?) }
    }
}

pub unsafe fn cuMemPoolExportToShareableHandle(
    handle_out: *mut c_void,
    pool: CUmemoryPool,
    handleType: CUmemAllocationHandleType,
    flags: u64,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        let pool = pool::find(pool)?;
        if handle_out.is_null() || handleType != FILE_DESCRIPTOR || flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let descriptor = pool::export(scope, pool)?;
        // SAFETY: not null, so a place for a descriptor.
        unsafe { put(handle_out.cast::<RawFd>(), descriptor) }
    }
}

pub unsafe fn cuMemPoolImportFromShareableHandle(
    pool_out: *mut CUmemoryPool,
    handle: *mut c_void,
    handleType: CUmemAllocationHandleType,
    flags: u64,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        if pool_out.is_null() || flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let token = sharing::from_descriptor(passed_descriptor(handle, handleType)?)?;
        // SAFETY: as the caller promises.
        unsafe { put(pool_out, to_pointer(pool::import(scope, token)?)) }
    }
}

pub unsafe fn cuMemPoolExportPointer(
    shareData_out: *mut CUmemPoolPtrExportData,
    ptr: CUdeviceptr,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        if shareData_out.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let reserved = sharing::to_handle(pool::export_pointer(scope, ptr)?);
        // SAFETY: as the caller promises.
        unsafe { put(shareData_out, CUmemPoolPtrExportData { reserved }) }
    }
}

pub unsafe fn cuMemPoolImportPointer(
    ptr_out: *mut CUdeviceptr,
    pool: CUmemoryPool,
    shareData: *const CUmemPoolPtrExportData,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        let pool = pool::find(pool)?;
        if ptr_out.is_null() || shareData.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so data that was exported.
        let data = unsafe { shareData.read() };
        let token = sharing::from_handle(&data.reserved).ok_or(CuError::INVALID_VALUE)?;
        // SAFETY: as the caller promises.
        unsafe { put(ptr_out, pool::import_pointer(scope, pool, token)?) }
    }
}
