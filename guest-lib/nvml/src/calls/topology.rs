//! Implements topology queries: common ancestors, peer-to-peer status and fabric.

use nvml_wrapper_sys::bindings::{
    nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_ATOMICS as ATOMICS,
    nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_NVLINK as NVLINK,
    nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_PCI as PCI,
    nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_UNKNOWN as UNKNOWN, *,
};

use super::{put, version};
use crate::error::{NvmlError, Result};
use crate::library::{Age, library};

/// Returns the numbers of two devices if both exist.
fn both(device: nvmlDevice_t, other: nvmlDevice_t) -> Result<(u32, u32)> {
    let library = library();
    Ok((library.device(device)?, library.device(other)?))
}

pub unsafe fn nvmlDeviceOnSameBoard(
    device: nvmlDevice_t,
    other: nvmlDevice_t,
    place: *mut i32,
) -> Result {
    let (device, other) = both(device, other)?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, i32::from(device == other)) }
}

/// Fails with NOT_SUPPORTED: the host's topology is not available to guests. The native library also fails for a device
/// and itself.
pub unsafe fn nvmlDeviceGetTopologyCommonAncestor(
    device: nvmlDevice_t,
    other: nvmlDevice_t,
    _level: *mut nvmlGpuTopologyLevel_t,
) -> Result {
    both(device, other)?;
    Err(NvmlError::NOT_SUPPORTED)
}

/// Returns no devices, since the host's topology is not available to guests.
pub unsafe fn nvmlDeviceGetTopologyNearestGpus(
    device: nvmlDevice_t,
    _level: nvmlGpuTopologyLevel_t,
    count: *mut u32,
    _devices: *mut nvmlDevice_t,
) -> Result {
    library().device(device)?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(count, 0) }
}

/// Returns the P2P status of two devices. Only devices that can access each other (`cuDeviceCanAccessPeer`) have one;
/// for
/// NVLink and atomics it comes from the host's NVML. PCI is never supported. A device supports every other capability
/// with itself.
pub unsafe fn nvmlDeviceGetP2PStatus(
    device: nvmlDevice_t,
    other: nvmlDevice_t,
    index: nvmlGpuP2PCapsIndex_t,
    place: *mut nvmlGpuP2PStatus_t,
) -> Result {
    let (device, other) = both(device, other)?;
    if index > UNKNOWN {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let view = library().view(device, Age::Any)?;
    let said = match index {
        _ if other != device && !view.reaches(other) => None,
        PCI => None,
        NVLINK | ATOMICS if other != device => view.p2p(index, other),
        _ => Some(nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK),
    };
    let status = said.unwrap_or(nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED);
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, status) }
}

/// Fabric information of every device: guests do not access the host's fabric.
const NO_FABRIC: nvmlGpuFabricInfo_t = nvmlGpuFabricInfo_t {
    clusterUuid: [0; 16],
    status: 0,
    cliqueId: 0,
    // NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
    state: 0,
};

pub unsafe fn nvmlDeviceGetGpuFabricInfo(
    device: nvmlDevice_t,
    place: *mut nvmlGpuFabricInfo_t,
) -> Result {
    library().device(device)?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, NO_FABRIC) }
}

pub unsafe fn nvmlDeviceGetGpuFabricInfoV(
    device: nvmlDevice_t,
    place: *mut nvmlGpuFabricInfoV_t,
) -> Result {
    library().device(device)?;
    if place.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // SAFETY: not null, so it points to a structure, which begins with its version.
    let given = unsafe { place.cast::<u32>().read() };
    let nvmlGpuFabricInfo_t {
        clusterUuid,
        status,
        cliqueId,
        state,
    } = NO_FABRIC;
    if given == version::<nvmlGpuFabricInfo_v2_t>(2) {
        let info = nvmlGpuFabricInfo_v2_t {
            version: given,
            clusterUuid,
            status,
            cliqueId,
            state,
            healthMask: 0,
        };
        // SAFETY: the version identifies this structure.
        return unsafe { put(place.cast(), info) };
    }
    if given != version::<nvmlGpuFabricInfo_v3_t>(3) {
        return Err(NvmlError::VERSION_MISMATCH);
    }
    let info = nvmlGpuFabricInfo_v3_t {
        version: given,
        clusterUuid,
        status,
        cliqueId,
        state,
        healthMask: 0,
        healthSummary: 0,
    };
    // SAFETY: as above.
    unsafe { put(place, info) }
}
