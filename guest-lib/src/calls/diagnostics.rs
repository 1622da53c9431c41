//! Core dump settings, driver notifications, and calls for devices other than GPUs.

use std::collections::BTreeSet;
use std::ffi::c_void;

use wormhole_lock::Mutex;

use wormhole_api::constants::nvscisync_flags::{SIGNAL, WAIT};
use wormhole_api::constants::rdma_flush_scope::{TO_ALL_DEVICES, TO_OWNER};
use wormhole_api::constants::rdma_flush_target::CURRENT_CTX;

use super::devices::device;
use crate::error::{CuError, Result};
use crate::object::context;
use crate::object::core_dump::{self, SettingScope};
use crate::object::stream::target;
use crate::parameter::{InOut, Out, Pointer};
use crate::types::{CUdevice, CUstream, DefaultStream};

/// Returns the scope of the current context's settings.
fn current_scope() -> Result<SettingScope> {
    context::scope()?;
    let identity = context::identity(context::current()).ok_or(CuError::INVALID_CONTEXT)?;
    Ok(SettingScope::Context(identity))
}

/// Returns a setting's value for a call that passes the size of its buffer.
fn current_value(
    scope: SettingScope,
    setting: u32,
    size: &InOut<'_, usize>,
) -> Result<core_dump::Value> {
    let found = core_dump::get(scope, setting)?;
    size.not_null()?;
    Ok(found)
}

fn get_attribute(
    scope: SettingScope,
    setting: u32,
    value: Pointer<'_, c_void>,
    size: InOut<'_, usize>,
) -> Result {
    let found = current_value(scope, setting, &size)?;
    if value.is_null() {
        return size.put(found.bytes());
    }
    let bytes = size.get()?;
    // SAFETY: `size` is the length of the program's buffer.
    let place = unsafe { value.room(bytes) };
    place.put_all(found.place(bytes)?)
}

fn set_attribute(
    scope: SettingScope,
    setting: u32,
    value: Pointer<'_, c_void>,
    size: InOut<'_, usize>,
) -> Result {
    let found = current_value(scope, setting, &size)?;
    if value.is_null() {
        return Ok(());
    }
    let bytes = size.get()?;
    if bytes > found.bytes() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: `size` is the length of the program's value.
    let value = unsafe { value.bytes(bytes) };
    core_dump::set(scope, setting, found.read(&value.to_vec()?)?)
}

pub fn cuCoredumpGetAttribute(
    attrib: u32,
    value: Pointer<'_, c_void>,
    size: InOut<'_, usize>,
) -> Result {
    get_attribute(current_scope()?, attrib, value, size)
}

pub fn cuCoredumpGetAttributeGlobal(
    attrib: u32,
    value: Pointer<'_, c_void>,
    size: InOut<'_, usize>,
) -> Result {
    get_attribute(SettingScope::Process, attrib, value, size)
}

pub fn cuCoredumpSetAttribute(
    attrib: u32,
    value: Pointer<'_, c_void>,
    size: InOut<'_, usize>,
) -> Result {
    set_attribute(current_scope()?, attrib, value, size)
}

pub fn cuCoredumpSetAttributeGlobal(
    attrib: u32,
    value: Pointer<'_, c_void>,
    size: InOut<'_, usize>,
) -> Result {
    set_attribute(SettingScope::Process, attrib, value, size)
}

/// Registrations of notifications, and the last handle. The driver would notify of an exceeded memory budget. The
/// guest does not learn of one, so callbacks are never called.
static NOTIFIED: Mutex<(BTreeSet<usize>, usize)> = Mutex::new((BTreeSet::new(), 0));

pub fn cuDeviceRegisterAsyncNotification(
    dev: CUdevice,
    callbackFunc: *mut c_void,
    _userData: *mut c_void,
    callback: Out<'_, *mut c_void>,
) -> Result {
    device(dev)?;
    if callbackFunc.is_null() || callback.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let mut notified = NOTIFIED.lock();
    notified.1 += 1;
    let handle = notified.1;
    notified.0.insert(handle);
    callback.put(std::ptr::without_provenance_mut(handle))
}

pub fn cuDeviceUnregisterAsyncNotification(dev: CUdevice, callback: *mut c_void) -> Result {
    device(dev)?;
    let mut notified = NOTIFIED.lock();
    if notified.0.remove(&callback.addr()) {
        Ok(())
    } else {
        Err(CuError::INVALID_VALUE)
    }
}

/// Fails, because `NvSciSync` is a facility of embedded systems.
pub fn cuDeviceGetNvSciSyncAttributes(
    nvSciSyncAttrList: *mut c_void,
    dev: CUdevice,
    flags: i32,
) -> Result {
    device(dev)?;
    if nvSciSyncAttrList.is_null() {
        return Err(CuError::INVALID_HANDLE);
    }
    Err(if flags != 0 && flags & !(SIGNAL | WAIT) == 0 {
        CuError::NOT_SUPPORTED
    } else {
        CuError::INVALID_VALUE
    })
}

/// Succeeds without a flush: no other device writes to GPU memory of a guest.
pub fn cuFlushGPUDirectRDMAWrites(target: u32, scope: u32) -> Result {
    context::scope()?;
    if target == CURRENT_CTX && matches!(scope, TO_OWNER | TO_ALL_DEVICES) {
        Ok(())
    } else {
        Err(CuError::INVALID_VALUE)
    }
}

/// Fails: only arrays without memory of their own can be mapped, and no such array exists.
pub fn cuMemMapArrayAsync(
    default: DefaultStream,
    _mapInfoList: Pointer<'_, c_void>,
    _count: u32,
    hStream: CUstream,
) -> Result {
    target(default, hStream)?;
    Err(CuError::INVALID_VALUE)
}
