//! Implements event sets. A tenant's devices report no events, so every set stays empty.

use std::collections::BTreeSet;
use std::time::Duration;

use nvml_wrapper_sys::bindings::*;
use wormhole_lock::Mutex;

use super::put;
use crate::error::{NvmlError, Result};
use crate::library::library;

/// Handles of the existing sets.
static SETS: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());
/// Distance between consecutive handles.
const STEP: usize = 16;

fn exists(set: nvmlEventSet_t) -> Result {
    let sets = SETS.lock();
    if sets.contains(&(set as usize)) {
        Ok(())
    } else {
        Err(NvmlError::INVALID_ARGUMENT)
    }
}

pub unsafe fn nvmlEventSetCreate(place: *mut nvmlEventSet_t) -> Result {
    library().check()?;
    if place.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let mut sets = SETS.lock();
    let handle = sets.last().copied().unwrap_or(0) + STEP;
    sets.insert(handle);
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, handle as nvmlEventSet_t) }
}

pub unsafe fn nvmlEventSetFree(set: nvmlEventSet_t) -> Result {
    library().check()?;
    let mut sets = SETS.lock();
    if sets.remove(&(set as usize)) {
        Ok(())
    } else {
        Err(NvmlError::INVALID_ARGUMENT)
    }
}

/// Waits for the whole timeout, since no event ever arrives.
pub unsafe fn nvmlEventSetWait_v2(
    set: nvmlEventSet_t,
    data: *mut nvmlEventData_t,
    milliseconds: u32,
) -> Result {
    library().check()?;
    exists(set)?;
    if data.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    std::thread::sleep(Duration::from_millis(milliseconds.into()));
    Err(NvmlError::TIMEOUT)
}

pub unsafe fn nvmlDeviceRegisterEvents(
    device: nvmlDevice_t,
    _types: u64,
    set: nvmlEventSet_t,
) -> Result {
    library().device(device)?;
    exists(set)?;
    Err(NvmlError::NOT_SUPPORTED)
}
