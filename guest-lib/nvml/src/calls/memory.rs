//! Implements queries of the tenant's memory and processes.

use std::sync::Arc;

use nvml_wrapper_sys::bindings::*;

use super::{put, version};
use crate::error::{NvmlError, Result};
use crate::library::{Age, library};
use crate::view::{Memory, Process, View};

/// GPU and compute instance id of a process outside MIG devices.
const NO_INSTANCE: u32 = u32::MAX;

fn now(device: nvmlDevice_t) -> Result<Arc<View>> {
    let library = library();
    library.view(library.device(device)?, Age::Now)
}

fn memory(device: nvmlDevice_t) -> Result<Memory> {
    now(device)?.memory().ok_or(NvmlError::NOT_SUPPORTED)
}

/// Returns total, free and used memory. Memory that is neither free on the host nor allocated by the tenant counts as
/// used, like the driver's reserved memory in the native library.
pub unsafe fn nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, place: *mut nvmlMemory_t) -> Result {
    let Memory { total, free, .. } = memory(device)?;
    let info = nvmlMemory_t {
        total,
        free,
        used: total - free,
    };
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, info) }
}

pub unsafe fn nvmlDeviceGetMemoryInfo_v2(
    device: nvmlDevice_t,
    place: *mut nvmlMemory_v2_t,
) -> Result {
    let Memory { total, used, free } = memory(device)?;
    // SAFETY: null, or a valid structure of the caller.
    let Some(info) = (unsafe { place.as_mut() }) else {
        return Err(NvmlError::INVALID_ARGUMENT);
    };
    // The native library does not return VERSION_MISMATCH here.
    if info.version != version::<nvmlMemory_v2_t>(2) {
        return Err(NvmlError::FUNCTION_NOT_FOUND);
    }
    *info = nvmlMemory_v2_t {
        version: info.version,
        total,
        reserved: total - used - free,
        free,
        used,
    };
    Ok(())
}

/// Writes the number of processes to `count` and the processes to `places`; fails if they do not fit.
///
/// # Safety
/// `count` is null or points to an integer; `places` is null or has room for that many structures.
unsafe fn put_processes<T>(
    processes: &[Process],
    count: *mut u32,
    places: *mut T,
    entry: impl Fn(&Process) -> T,
) -> Result {
    // SAFETY: null or an integer, as the caller guarantees.
    let Some(count) = (unsafe { count.as_mut() }) else {
        return Err(NvmlError::INVALID_ARGUMENT);
    };
    let room = if places.is_null() { 0 } else { *count as usize };
    *count = u32::try_from(processes.len()).unwrap_or(u32::MAX);
    if processes.len() > room {
        return Err(NvmlError::INSUFFICIENT_SIZE);
    }
    for (at, process) in processes.iter().enumerate() {
        // SAFETY: the index is less than the number of structures for which the caller guarantees room.
        unsafe { places.add(at).write(entry(process)) };
    }
    Ok(())
}

fn short(process: &Process) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t {
        pid: process.pid,
        usedGpuMemory: process.bytes,
    }
}

fn long(process: &Process) -> nvmlProcessInfo_t {
    nvmlProcessInfo_t {
        pid: process.pid,
        usedGpuMemory: process.bytes,
        gpuInstanceId: NO_INSTANCE,
        computeInstanceId: NO_INSTANCE,
    }
}

macro_rules! lists {
    ($($name:ident: $type:ty = $processes:ident as $entry:ident,)*) => {$(
        pub unsafe fn $name(device: nvmlDevice_t, count: *mut u32, places: *mut $type) -> Result {
            let processes = $processes(device)?;
            // SAFETY: the caller upholds the contract.
            unsafe { put_processes(&processes, count, places, $entry) }
        }
    )*};
}

lists! {
    nvmlDeviceGetComputeRunningProcesses: nvmlProcessInfo_v1_t = computing as short,
    nvmlDeviceGetComputeRunningProcesses_v2: nvmlProcessInfo_v2_t = computing as long,
    nvmlDeviceGetComputeRunningProcesses_v3: nvmlProcessInfo_t = computing as long,
    nvmlDeviceGetGraphicsRunningProcesses: nvmlProcessInfo_v1_t = none as short,
    nvmlDeviceGetGraphicsRunningProcesses_v2: nvmlProcessInfo_v2_t = none as long,
    nvmlDeviceGetGraphicsRunningProcesses_v3: nvmlProcessInfo_t = none as long,
    nvmlDeviceGetMPSComputeRunningProcesses: nvmlProcessInfo_v1_t = none as short,
    nvmlDeviceGetMPSComputeRunningProcesses_v2: nvmlProcessInfo_v2_t = none as long,
    nvmlDeviceGetMPSComputeRunningProcesses_v3: nvmlProcessInfo_t = none as long,
}

fn computing(device: nvmlDevice_t) -> Result<Vec<Process>> {
    Ok(now(device)?.processes())
}

/// Returns no processes: tenants have neither graphics nor an MPS server.
fn none(device: nvmlDevice_t) -> Result<Vec<Process>> {
    library().device(device)?;
    Ok(Vec::new())
}

pub unsafe fn nvmlDeviceGetRunningProcessDetailList(
    device: nvmlDevice_t,
    place: *mut nvmlProcessDetailList_t,
) -> Result {
    /// Number of modes: 0 is compute, 1 graphics and 2 MPS.
    const MODES: u32 = 3;
    let processes = computing(device)?;
    // SAFETY: null, or a valid structure of the caller.
    let Some(list) = (unsafe { place.as_mut() }) else {
        return Err(NvmlError::INVALID_ARGUMENT);
    };
    if list.version != version::<nvmlProcessDetailList_t>(1) {
        return Err(NvmlError::VERSION_MISMATCH);
    }
    let processes = match list.mode {
        0 => processes.as_slice(),
        1..MODES => &[],
        _ => return Err(NvmlError::INVALID_ARGUMENT),
    };
    let detail = |process: &Process| nvmlProcessDetail_v1_t {
        pid: process.pid,
        usedGpuMemory: process.bytes,
        gpuInstanceId: NO_INSTANCE,
        computeInstanceId: NO_INSTANCE,
        usedGpuCcProtectedMemory: 0,
    };
    // SAFETY: the structure's count is the size of the array.
    unsafe {
        put_processes(
            processes,
            &raw mut list.numProcArrayEntries,
            list.procArray,
            detail,
        )
    }
}
