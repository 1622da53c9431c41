//! Devices: answered from the description that came at `cuInit`.

use std::ffi::c_char;

use super::{body, put, string};
use crate::device::{Device, attribute, copy_string};
use crate::error::{CuError, Result};
use crate::session::session;
use crate::types::{
    CUatomicOperation, CUdevice, CUdevice_attribute, CUdevprop, CUexecAffinityType, CUresult,
    CUuuid,
};

/// The device that a program names.
#[inline]
pub fn device(device: CUdevice) -> Result<&'static Device> {
    let devices = session()?.devices();
    let found = usize::try_from(device).ok().and_then(|at| devices.get(at));
    found.ok_or(CuError::INVALID_DEVICE)
}

/// The number of the device that a program names.
#[inline]
pub fn ordinal(device: CUdevice) -> Result<usize> {
    let count = session()?.devices().len();
    let number = usize::try_from(device).ok();
    number
        .filter(|number| *number < count)
        .ok_or(CuError::INVALID_DEVICE)
}

/// What a program calls a device.
pub fn named(ordinal: usize) -> CUdevice {
    CUdevice::try_from(ordinal).unwrap_or(-1)
}

pub unsafe fn cuDeviceGet(device: *mut CUdevice, ordinal: i32) -> CUresult {
    body! {
        self::ordinal(ordinal)?;
        // SAFETY: as the caller promises.
        unsafe { put(device, ordinal) }
    }
}

pub unsafe fn cuDeviceGetCount(count: *mut i32) -> CUresult {
    body! {
        let devices = session()?.devices().len();
        // SAFETY: as the caller promises.
        unsafe { put(count, named(devices)) }
    }
}

pub unsafe fn cuDeviceGetAttribute(
    pi: *mut i32,
    attrib: CUdevice_attribute,
    dev: CUdevice,
) -> CUresult {
    body! {
        if pi.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
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
        let devices = session()?.devices();
        // SAFETY: as the caller promises.
        let asked = unsafe { string(pciBusId) }?.to_string_lossy().to_ascii_uppercase();
        let found = devices.iter().position(|device| is_at(&device.pci_bus_id(), &asked));
        let found = found.ok_or(CuError::INVALID_DEVICE)?;
        // SAFETY: as the caller promises.
        unsafe { put(dev, named(found)) }
    }
}

/// Whether a device's address is the one that was asked for, of which the domain and the function may be left out.
fn is_at(own: &str, asked: &str) -> bool {
    let short = own.split_once(':').map_or("", |(_, rest)| rest);
    let plain = |text: &str| text.trim_end_matches(".0").to_owned();
    [plain(own), plain(short)].contains(&plain(asked))
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
    _kind: CUexecAffinityType,
    dev: CUdevice,
) -> CUresult {
    body! {
        device(dev)?;
        // SAFETY: as the caller promises.
        unsafe { put(pi, 0) }
    }
}

/// `CU_ATOMIC_CAPABILITY_*`.
mod capability {
    pub const SIGNED: u32 = 1;
    pub const UNSIGNED: u32 = 2;
    pub const REDUCTION: u32 = 4;
    pub const SCALAR_32: u32 = 8;
    pub const SCALAR_64: u32 = 16;
}

/// What PTX has of each `CUatomicOperation` ("PTX ISA", `atom` and `red`), for a device whose atomic operations
/// on host memory are native.
const ATOMICS: [u32; 13] = {
    use capability::{REDUCTION, SCALAR_32, SCALAR_64, SIGNED, UNSIGNED};
    const INTEGERS: u32 = SIGNED | UNSIGNED | REDUCTION | SCALAR_32 | SCALAR_64;
    const WRAPPING: u32 = UNSIGNED | REDUCTION | SCALAR_32;
    const BITS: u32 = UNSIGNED | REDUCTION | SCALAR_32 | SCALAR_64;
    const EXCHANGES: u32 = UNSIGNED | SCALAR_32 | SCALAR_64;
    const FLOATS: u32 = SIGNED | REDUCTION | SCALAR_32 | SCALAR_64;
    [
        INTEGERS, INTEGERS, INTEGERS, WRAPPING, WRAPPING, BITS, BITS, BITS, EXCHANGES, EXCHANGES,
        FLOATS, 0, 0,
    ]
};

pub unsafe fn cuDeviceGetHostAtomicCapabilities(
    capabilities: *mut u32,
    operations: *const CUatomicOperation,
    count: u32,
    dev: CUdevice,
) -> CUresult {
    body! {
        session()?;
        if capabilities.is_null() || operations.is_null() || count == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let native = device(dev)?.value(attribute::HOST_NATIVE_ATOMIC_SUPPORTED) != 0;
        // SAFETY: the program vouches for that many operations and places.
        unsafe { tell_atomics(capabilities, operations, count, native) }
    }
}

/// Says what is atomic where atomic operations are native.
///
/// # Safety
/// There are `count` operations, and as many places.
pub(super) unsafe fn tell_atomics(
    capabilities: *mut u32,
    operations: *const CUatomicOperation,
    count: u32,
    native: bool,
) -> Result {
    // SAFETY: as the caller promises.
    let operations = unsafe { std::slice::from_raw_parts(operations, count as usize) };
    let known = |operation: &CUatomicOperation| ATOMICS.get(*operation as usize).copied();
    let Some(found) = operations.iter().map(known).collect::<Option<Vec<u32>>>() else {
        return Err(CuError::INVALID_VALUE);
    };
    for (index, capability) in found.into_iter().enumerate() {
        // SAFETY: as the caller promises.
        unsafe {
            capabilities
                .add(index)
                .write(if native { capability } else { 0 })
        };
    }
    Ok(())
}
