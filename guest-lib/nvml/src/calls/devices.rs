//! Implements device enumeration and identification.

use std::ffi::c_char;

use nvml_wrapper_sys::bindings::*;
use wormhole_ring::control::facts;

use super::{characters, put, put_text, text, version};
use crate::error::{NvmlError, Result};
use crate::library::{Age, library};
use crate::view::{Place, View, attribute};

/// Writes the handle of the first device whose view satisfies `wanted`.
///
/// # Safety
/// `place` is null or has room for a handle.
unsafe fn find(place: *mut nvmlDevice_t, wanted: impl Fn(&View) -> bool) -> Result {
    let library = library();
    for device in 0..library.devices()? {
        if wanted(library.view(device, Age::Any)?.as_ref()) {
            // SAFETY: the caller upholds the contract.
            return unsafe { put(place, library.handle(device)?) };
        }
    }
    Err(NvmlError::NOT_FOUND)
}

pub unsafe fn nvmlDeviceGetCount_v2(place: *mut u32) -> Result {
    let count = library().devices()?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, count) }
}

pub unsafe fn nvmlDeviceGetHandleByIndex_v2(index: u32, place: *mut nvmlDevice_t) -> Result {
    let handle = library().handle(index)?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, handle) }
}

pub unsafe fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, place: *mut nvmlDevice_t) -> Result {
    library().check()?;
    // SAFETY: the caller upholds the contract.
    let wanted = unsafe { text(uuid) }?;
    // SAFETY: the caller upholds the contract.
    unsafe { find(place, |view| view.uuid().as_deref() == Some(wanted)) }
}

pub unsafe fn nvmlDeviceGetHandleByUUIDV(
    uuid: *const nvmlUUID_t,
    place: *mut nvmlDevice_t,
) -> Result {
    const ASCII: u32 = 1;
    const BINARY: u32 = 2;
    library().check()?;
    // SAFETY: null, or a valid structure of the caller.
    let Some(uuid) = (unsafe { uuid.as_ref() }) else {
        return Err(NvmlError::INVALID_ARGUMENT);
    };
    if uuid.version != version::<nvmlUUID_t>(1) {
        return Err(NvmlError::VERSION_MISMATCH);
    }
    let wanted = match uuid.type_ {
        ASCII => {
            // SAFETY: the type selects this field of the union, and both fields are plain bytes.
            let bytes = unsafe { uuid.value.str_ };
            let bytes = bytes.iter().map(|byte| byte.cast_unsigned());
            let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
            String::from_utf8(bytes).ok()
        }
        BINARY => {
            // SAFETY: as above.
            let bytes = unsafe { uuid.value.bytes };
            let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            facts::uuid_name(&digits)
        }
        _ => return Err(NvmlError::INVALID_ARGUMENT),
    };
    // SAFETY: the caller upholds the contract.
    unsafe { find(place, |view| wanted.is_some() && view.uuid() == wanted) }
}

pub unsafe fn nvmlDeviceGetHandleByPciBusId_v2(
    id: *const c_char,
    place: *mut nvmlDevice_t,
) -> Result {
    library().check()?;
    // SAFETY: the caller upholds the contract.
    let wanted = Place::parse(unsafe { text(id) }?).ok_or(NvmlError::INVALID_ARGUMENT)?;
    // SAFETY: the caller upholds the contract.
    unsafe { find(place, |view| view.place() == Some(wanted)) }
}

pub unsafe fn nvmlDeviceGetName(device: nvmlDevice_t, place: *mut c_char, length: u32) -> Result {
    let library = library();
    let view = library.view(library.device(device)?, Age::Any)?;
    let name = view.text(facts::NAME).ok_or(NvmlError::NOT_SUPPORTED)?;
    // SAFETY: the caller upholds the contract.
    unsafe { put_text(place, length, name) }
}

pub unsafe fn nvmlDeviceGetUUID(device: nvmlDevice_t, place: *mut c_char, length: u32) -> Result {
    let library = library();
    let view = library.view(library.device(device)?, Age::Any)?;
    let uuid = view.uuid().ok_or(NvmlError::NOT_SUPPORTED)?;
    // SAFETY: the caller upholds the contract.
    unsafe { put_text(place, length, &uuid) }
}

pub unsafe fn nvmlDeviceGetIndex(device: nvmlDevice_t, place: *mut u32) -> Result {
    let index = library().device(device)?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, index) }
}

/// Returns the device's index, since the guest has no device files with minor numbers.
pub unsafe fn nvmlDeviceGetMinorNumber(device: nvmlDevice_t, place: *mut u32) -> Result {
    // SAFETY: the caller upholds the contract.
    unsafe { nvmlDeviceGetIndex(device, place) }
}

/// Returns PCI information with the address only.
fn at(place: Place) -> nvmlPciInfo_t {
    let Place {
        domain,
        bus,
        device,
    } = place;
    nvmlPciInfo_t {
        busIdLegacy: characters(&format!("{domain:04X}:{bus:02X}:{device:02X}.0")),
        domain,
        bus,
        device,
        pciDeviceId: 0,
        pciSubSystemId: 0,
        busId: characters(&format!("{domain:08X}:{bus:02X}:{device:02X}.0")),
    }
}

pub(super) fn pci(device: nvmlDevice_t) -> Result<nvmlPciInfo_t> {
    let library = library();
    let view = library.view(library.device(device)?, Age::Any)?;
    let number = |name| {
        let number = view.number(name).unwrap_or(0);
        u32::try_from(number).unwrap_or(0)
    };
    Ok(nvmlPciInfo_t {
        pciDeviceId: number(facts::PCI_ID),
        pciSubSystemId: number(facts::PCI_SUBSYSTEM),
        ..at(view.place().ok_or(NvmlError::NOT_SUPPORTED)?)
    })
}

pub unsafe fn nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, place: *mut nvmlPciInfo_t) -> Result {
    let info = pci(device)?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, info) }
}

/// Version 1 of `nvmlPciInfo_t`, which `nvmlDeviceGetPciInfo` fills.
#[repr(C)]
struct FirstPciInfo {
    bus_id: [c_char; 16],
    domain: u32,
    bus: u32,
    device: u32,
    device_id: u32,
}

/// Version 2 of `nvmlPciInfo_t`.
#[repr(C)]
pub(super) struct SecondPciInfo {
    first: FirstPciInfo,
    subsystem_id: u32,
    reserved: [u32; 4],
}

fn first(info: &nvmlPciInfo_t) -> FirstPciInfo {
    FirstPciInfo {
        bus_id: info.busIdLegacy,
        domain: info.domain,
        bus: info.bus,
        device: info.device,
        device_id: info.pciDeviceId,
    }
}

pub(super) fn second(info: &nvmlPciInfo_t) -> SecondPciInfo {
    SecondPciInfo {
        first: first(info),
        subsystem_id: info.pciSubSystemId,
        reserved: [0; 4],
    }
}

pub unsafe fn nvmlDeviceGetPciInfo(device: nvmlDevice_t, place: *mut nvmlPciInfo_t) -> Result {
    let info = pci(device)?;
    // SAFETY: the caller of this version has room for its structure, which is a prefix of the later ones.
    unsafe { put(place.cast(), first(&info)) }
}

pub unsafe fn nvmlDeviceGetPciInfo_v2(device: nvmlDevice_t, place: *mut nvmlPciInfo_t) -> Result {
    let info = pci(device)?;
    // SAFETY: as above.
    unsafe { put(place.cast(), second(&info)) }
}

pub unsafe fn nvmlDeviceGetPciInfoExt(
    device: nvmlDevice_t,
    place: *mut nvmlPciInfoExt_t,
) -> Result {
    /// Class code of a 3D display controller, which every compute device has.
    const CLASS: (u32, u32) = (3, 2);
    let pci = pci(device)?;
    // SAFETY: null, or a valid structure of the caller.
    let Some(info) = (unsafe { place.as_mut() }) else {
        return Err(NvmlError::INVALID_ARGUMENT);
    };
    if info.version != version::<nvmlPciInfoExt_t>(1) {
        return Err(NvmlError::VERSION_MISMATCH);
    }
    *info = nvmlPciInfoExt_t {
        version: info.version,
        domain: pci.domain,
        bus: pci.bus,
        device: pci.device,
        pciDeviceId: pci.pciDeviceId,
        pciSubSystemId: pci.pciSubSystemId,
        baseClass: CLASS.0,
        subClass: CLASS.1,
        busId: pci.busId,
    };
    Ok(())
}

/// Returns an attribute of the device (`cuDeviceGetAttribute`).
fn known(device: nvmlDevice_t, id: i32) -> Result<i32> {
    let library = library();
    let view = library.view(library.device(device)?, Age::Any)?;
    view.attribute(id).ok_or(NvmlError::NOT_SUPPORTED)
}

pub unsafe fn nvmlDeviceGetCudaComputeCapability(
    device: nvmlDevice_t,
    major: *mut i32,
    minor: *mut i32,
) -> Result {
    let capability = (
        known(device, attribute::COMPUTE_CAPABILITY_MAJOR)?,
        known(device, attribute::COMPUTE_CAPABILITY_MINOR)?,
    );
    // SAFETY: the caller upholds the contract.
    unsafe {
        put(major, capability.0)?;
        put(minor, capability.1)
    }
}

/// Returns the architecture of a compute capability.
fn architecture(major: i32, minor: i32) -> nvmlDeviceArchitecture_t {
    match (major, minor) {
        (3, _) => 2,
        (5, _) => 3,
        (6, _) => 4,
        (7, 0 | 2) => 5,
        (7, _) => 6,
        (8, 9) => 8,
        (8, _) => 7,
        (9, _) => 9,
        (10 | 12, _) => 10,
        _ => u32::MAX,
    }
}

pub unsafe fn nvmlDeviceGetArchitecture(
    device: nvmlDevice_t,
    place: *mut nvmlDeviceArchitecture_t,
) -> Result {
    let major = known(device, attribute::COMPUTE_CAPABILITY_MAJOR)?;
    let minor = known(device, attribute::COMPUTE_CAPABILITY_MINOR)?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, architecture(major, minor)) }
}

pub unsafe fn nvmlDeviceGetMemoryBusWidth(device: nvmlDevice_t, place: *mut u32) -> Result {
    let width = known(device, attribute::GLOBAL_MEMORY_BUS_WIDTH)?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, width.cast_unsigned()) }
}

pub unsafe fn nvmlDeviceGetComputeMode(
    device: nvmlDevice_t,
    place: *mut nvmlComputeMode_t,
) -> Result {
    let mode = known(device, attribute::COMPUTE_MODE)?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, mode.cast_unsigned()) }
}

/// Fails: no device is a MIG device.
pub unsafe fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
    device: nvmlDevice_t,
    _parent: *mut nvmlDevice_t,
) -> Result {
    library().device(device)?;
    Err(NvmlError::INVALID_ARGUMENT)
}

/// Fails: no device has MIG devices.
pub unsafe fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: nvmlDevice_t,
    _index: u32,
    _part: *mut nvmlDevice_t,
) -> Result {
    library().device(device)?;
    Err(NvmlError::NOT_FOUND)
}
