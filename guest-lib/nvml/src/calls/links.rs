//! Implements NVLink queries. Only links to switches and to the tenant's devices are active.

use nvml_wrapper_sys::bindings::*;
use wormhole_ring::control::facts::Link;

use super::devices::{pci, second};
use super::{characters, put};
use crate::error::{NvmlError, Result};
use crate::library::{Age, library};
use crate::view::View;

/// Returns the PCI address of an unknown switch, as NVML returns it in virtual machines that have GPUs but not their
/// switches. NCCL does not find a device at this address and treats it as a switch (`ncclTopoGetXmlFromGpu` in its
/// src/graph/xml.cc).
fn nowhere() -> nvmlPciInfo_t {
    nvmlPciInfo_t {
        busIdLegacy: characters("FFFFFFF:FF:FF.0"),
        domain: u32::MAX,
        bus: 0xff,
        device: 0xff,
        pciDeviceId: u32::MAX,
        pciSubSystemId: 0,
        busId: characters("FFFFFFFF:FF:FF.0"),
    }
}

pub(super) fn is_active(view: &View, number: u32) -> bool {
    matches!(view.link(number), Some(Link::Switch | Link::Device(_)))
}

/// Returns a link of a device.
fn link(device: nvmlDevice_t, number: u32) -> Result<Link> {
    let library = library();
    let view = library.view(library.device(device)?, Age::Any)?;
    if number >= NVML_NVLINK_MAX_LINKS {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    match view.link(number) {
        Some(Link::Failed(code)) => Err(NvmlError(code)),
        Some(link) => Ok(link),
        None => Err(NvmlError::NOT_SUPPORTED),
    }
}

pub unsafe fn nvmlDeviceGetNvLinkState(
    device: nvmlDevice_t,
    number: u32,
    place: *mut nvmlEnableState_t,
) -> Result {
    let is_active = link(device, number)? != Link::Inactive;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, u32::from(is_active)) }
}

pub unsafe fn nvmlDeviceGetNvLinkRemoteDeviceType(
    device: nvmlDevice_t,
    number: u32,
    place: *mut nvmlIntNvLinkDeviceType_t,
) -> Result {
    let kind = match link(device, number)? {
        Link::Switch => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
        Link::Device(_) => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
        Link::Inactive | Link::Failed(_) => return Err(NvmlError::NOT_SUPPORTED),
    };
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, kind) }
}

fn remote(device: nvmlDevice_t, number: u32) -> Result<nvmlPciInfo_t> {
    match link(device, number)? {
        Link::Switch => Ok(nowhere()),
        Link::Device(other) => pci(library().handle(other)?),
        Link::Inactive | Link::Failed(_) => Err(NvmlError::NOT_SUPPORTED),
    }
}

pub unsafe fn nvmlDeviceGetNvLinkRemotePciInfo(
    device: nvmlDevice_t,
    number: u32,
    place: *mut nvmlPciInfo_t,
) -> Result {
    let info = remote(device, number)?;
    // SAFETY: the caller of this version has room for version 2 of the structure.
    unsafe { put(place.cast(), second(&info)) }
}

pub unsafe fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: nvmlDevice_t,
    number: u32,
    place: *mut nvmlPciInfo_t,
) -> Result {
    let info = remote(device, number)?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, info) }
}
