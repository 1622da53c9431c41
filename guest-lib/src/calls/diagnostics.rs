//! Core dumps of the device, notifications of the driver, and what concerns other devices than CUDA's.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use super::devices::device;
use super::{body, put};
use crate::context;
use crate::core_dump::{self, Of};
use crate::error::{CuError, Result};
use crate::stream::target;
use crate::types::{CUdevice, CUresult, CUstream, DefaultStream};

/// The current context's settings.
fn mine() -> Result<Of> {
    context::scope()?;
    let identity = context::identity(context::current()).ok_or(CuError::INVALID_CONTEXT)?;
    Ok(Of::Context(identity))
}

/// # Safety
/// `size` is null or readable and writable; `value` is null or has a place for that many bytes.
unsafe fn tell(of: Of, setting: u32, value: *mut c_void, size: *mut usize) -> Result {
    let found = core_dump::get(of, setting)?;
    if size.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    if value.is_null() {
        // SAFETY: not null, so writable.
        unsafe { size.write(found.bytes()) };
        return Ok(());
    }
    // SAFETY: not null, so readable.
    let place = found.place(unsafe { size.read() })?;
    // SAFETY: the place is no longer than the program says its own is.
    unsafe { value.cast::<u8>().copy_from(place.as_ptr(), place.len()) };
    Ok(())
}

/// # Safety
/// `size` is null or readable; `value` is null or has that many bytes.
unsafe fn keep(of: Of, setting: u32, value: *const c_void, size: *const usize) -> Result {
    let kept = core_dump::get(of, setting)?;
    if size.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    if value.is_null() {
        return Ok(());
    }
    // SAFETY: not null, so readable.
    let bytes = unsafe { size.read() };
    if bytes > kept.bytes() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: not null, so that many bytes.
    let place = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), bytes) };
    core_dump::set(of, setting, kept.read(place)?)
}

pub unsafe fn cuCoredumpGetAttribute(
    attrib: u32,
    value: *mut c_void,
    size: *mut usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { tell(mine()?, attrib, value, size) } }
}

pub unsafe fn cuCoredumpGetAttributeGlobal(
    attrib: u32,
    value: *mut c_void,
    size: *mut usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { tell(Of::Process, attrib, value, size) } }
}

pub unsafe fn cuCoredumpSetAttribute(
    attrib: u32,
    value: *const c_void,
    size: *mut usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { keep(mine()?, attrib, value, size) } }
}

pub unsafe fn cuCoredumpSetAttributeGlobal(
    attrib: u32,
    value: *const c_void,
    size: *mut usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { keep(Of::Process, attrib, value, size) } }
}

/// The registrations that there are, and the last handle. What the driver would notify of, a budget of memory
/// that is exceeded, is not known of the device's host, so nobody is called.
static NOTIFIED: Mutex<(BTreeSet<usize>, usize)> = Mutex::new((BTreeSet::new(), 0));

pub unsafe fn cuDeviceRegisterAsyncNotification(
    dev: CUdevice,
    callbackFunc: *mut c_void,
    _userData: *mut c_void,
    callback: *mut *mut c_void,
) -> CUresult {
    body! {
        device(dev)?;
        if callbackFunc.is_null() || callback.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let mut notified = NOTIFIED.lock().unwrap_or_else(PoisonError::into_inner);
        notified.1 += 1;
        let handle = notified.1;
        notified.0.insert(handle);
        // SAFETY: as the caller promises.
        unsafe { put(callback, std::ptr::without_provenance_mut(handle)) }
    }
}

pub unsafe fn cuDeviceUnregisterAsyncNotification(
    dev: CUdevice,
    callback: *mut c_void,
) -> CUresult {
    body! {
        device(dev)?;
        let mut notified = NOTIFIED.lock().unwrap_or_else(PoisonError::into_inner);
        if notified.0.remove(&callback.addr()) {
            Ok(())
        } else {
            Err(CuError::INVALID_VALUE)
        }
    }
}

/// Signals and waits of `NvSciSync`, a facility of embedded systems.
pub unsafe fn cuDeviceGetNvSciSyncAttributes(
    nvSciSyncAttrList: *mut c_void,
    dev: CUdevice,
    flags: i32,
) -> CUresult {
    body! {
        device(dev)?;
        if nvSciSyncAttrList.is_null() {
            return Err(CuError::INVALID_HANDLE);
        }
        Err(if (1..=3).contains(&flags) {
            CuError::NOT_SUPPORTED
        } else {
            CuError::INVALID_VALUE
        })
    }
}

/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`.
const TARGET_CURRENT: u32 = 0;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER` and `_TO_ALL_DEVICES`.
const SCOPES: [u32; 2] = [100, 200];

/// No other device of a guest writes to the memory of this one, so that nothing is left to flush.
pub unsafe fn cuFlushGPUDirectRDMAWrites(target: u32, scope: u32) -> CUresult {
    body! {
        context::scope()?;
        if target == TARGET_CURRENT && SCOPES.contains(&scope) {
            Ok(())
        } else {
            Err(CuError::INVALID_VALUE)
        }
    }
}

/// No array is without memory of its own, so there is none to map memory to.
pub unsafe fn cuMemMapArrayAsync(
    default: DefaultStream,
    _mapInfoList: *const c_void,
    _count: u32,
    hStream: CUstream,
) -> CUresult {
    body! {
        target(default, hStream)?;
        Err(CuError::INVALID_VALUE)
    }
}
