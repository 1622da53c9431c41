//! Devices: answered from the description that came at `cuInit`.

use std::ffi::c_char;

use super::{body, put, put_if_wanted, string};
use crate::device::{Device, attribute, copy_string};
use crate::error::{CuError, Result};
use crate::session::session;
use crate::types::{CUdevice, CUdevice_attribute, CUdevprop, CUexecAffinityType, CUresult, CUuuid};

/// The one device there is.
const DEVICE: CUdevice = 0;

/// The device that a program names.
#[inline]
pub fn device(device: CUdevice) -> Result<&'static Device> {
    let session = session()?;
    if device == DEVICE {
        Ok(session.device())
    } else {
        Err(CuError::INVALID_DEVICE)
    }
}

pub unsafe fn cuDeviceGet(device: *mut CUdevice, ordinal: i32) -> CUresult {
    body! {
        let count = session()?.device().count;
        if u32::try_from(ordinal).is_ok_and(|ordinal| ordinal < count) {
            // SAFETY: as the caller promises.
            unsafe { put(device, ordinal) }
        } else {
            Err(CuError::INVALID_DEVICE)
        }
    }
}

pub unsafe fn cuDeviceGetCount(count: *mut i32) -> CUresult {
    body! {
        let devices = session()?.device().count;
        // SAFETY: as the caller promises.
        unsafe { put(count, i32::try_from(devices).unwrap_or(0)) }
    }
}

pub unsafe fn cuDeviceGetAttribute(
    pi: *mut i32,
    attrib: CUdevice_attribute,
    dev: CUdevice,
) -> CUresult {
    body! {
        let value = device(dev)?.attribute(attrib)?;
        // SAFETY: as the caller promises.
        unsafe { put(pi, value) }
    }
}

pub unsafe fn cuDeviceGetName(name: *mut c_char, len: i32, dev: CUdevice) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { copy_string(device(dev)?.name.to_bytes(), name, len) } }
}

pub unsafe fn cuDeviceGetPCIBusId(pciBusId: *mut c_char, len: i32, dev: CUdevice) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { copy_string(device(dev)?.pci_bus_id().as_bytes(), pciBusId, len) } }
}

pub unsafe fn cuDeviceGetByPCIBusId(dev: *mut CUdevice, pciBusId: *const c_char) -> CUresult {
    body! {
        let own = session()?.device().pci_bus_id();
        // SAFETY: as the caller promises.
        let asked = unsafe { string(pciBusId) }?.to_string_lossy().to_ascii_uppercase();
        // The domain and the function may be left out.
        let short = own.split_once(':').map_or("", |(_, rest)| rest);
        let plain = |text: &str| text.trim_end_matches(".0").to_owned();
        if [plain(&own), plain(short)].contains(&plain(&asked)) {
            // SAFETY: as the caller promises.
            unsafe { put(dev, DEVICE) }
        } else {
            Err(CuError::INVALID_DEVICE)
        }
    }
}

pub unsafe fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, dev: CUdevice) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { put(uuid, CUuuid { bytes: device(dev)?.uuid }) } }
}

/// Locally unique identifiers are Windows' own.
pub unsafe fn cuDeviceGetLuid(
    _luid: *mut c_char,
    _deviceNodeMask: *mut u32,
    dev: CUdevice,
) -> CUresult {
    body! {
        device(dev)?;
        Err(CuError::NOT_SUPPORTED)
    }
}

pub unsafe fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice) -> CUresult {
    body! {
        let total = device(dev)?.total_memory;
        // SAFETY: as the caller promises.
        unsafe { put(bytes, usize::try_from(total).unwrap_or(usize::MAX)) }
    }
}

pub unsafe fn cuDeviceComputeCapability(
    major: *mut i32,
    minor: *mut i32,
    dev: CUdevice,
) -> CUresult {
    body! {
        let device = device(dev)?;
        // SAFETY: as the caller promises.
        unsafe {
            put(major, device.value(attribute::COMPUTE_CAPABILITY_MAJOR))?;
            put(minor, device.value(attribute::COMPUTE_CAPABILITY_MINOR))
        }
    }
}

pub unsafe fn cuDeviceGetProperties(prop: *mut CUdevprop, dev: CUdevice) -> CUresult {
    body! {
        let device = device(dev)?;
        let three = |first| [first, first + 1, first + 2].map(|id| device.value(id));
        let properties = CUdevprop {
            maxThreadsPerBlock: device.value(attribute::MAX_THREADS_PER_BLOCK),
            maxThreadsDim: three(attribute::MAX_BLOCK_DIM_X),
            maxGridSize: three(attribute::MAX_GRID_DIM_X),
            sharedMemPerBlock: device.value(attribute::MAX_SHARED_MEMORY_PER_BLOCK),
            totalConstantMemory: device.value(attribute::TOTAL_CONSTANT_MEMORY),
            SIMDWidth: device.value(attribute::WARP_SIZE),
            memPitch: device.value(attribute::MAX_PITCH),
            regsPerBlock: device.value(attribute::MAX_REGISTERS_PER_BLOCK),
            clockRate: device.value(attribute::CLOCK_RATE),
            textureAlign: device.value(attribute::TEXTURE_ALIGNMENT),
        };
        // SAFETY: as the caller promises.
        unsafe { put(prop, properties) }
    }
}

/// Execution affinity takes the multi-process service, which is the affair of the host.
pub unsafe fn cuDeviceGetExecAffinitySupport(
    pi: *mut i32,
    kind: CUexecAffinityType,
    dev: CUdevice,
) -> CUresult {
    body! {
        // CU_EXEC_AFFINITY_TYPE_SM_COUNT is the only one.
        if kind != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        device(dev)?;
        // SAFETY: as the caller promises.
        unsafe { put(pi, 0) }
    }
}

pub unsafe fn cuDeviceCanAccessPeer(
    canAccessPeer: *mut i32,
    dev: CUdevice,
    peerDev: CUdevice,
) -> CUresult {
    body! {
        device(dev)?;
        device(peerDev)?;
        // SAFETY: as the caller promises.
        unsafe { put_if_wanted(canAccessPeer, 0) };
        Ok(())
    }
}
