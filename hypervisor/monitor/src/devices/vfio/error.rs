//! Reasons why a device cannot be passed through.

use std::io;

use vfio_ioctls::VfioError;

use super::address::DeviceAddress;

/// Error from passing a device through.
#[derive(Debug, thiserror::Error)]
pub enum PassthroughError {
    /// The host has no such device.
    #[error("there is no device {0}: /sys/bus/pci/devices has the machine's PCI devices")]
    NoDevice(DeviceAddress),
    /// A device is named twice.
    #[error("the device {0} is named twice")]
    Twice(DeviceAddress),
    /// No IOMMU translates the device's addresses.
    #[error(
        "the device {0} has no IOMMU, which would confine it to the VM's memory: enable the IOMMU in the firmware and by the \
         kernel parameter intel_iommu=on"
    )]
    NoIommu(DeviceAddress),
    /// The device belongs to a driver of the host.
    #[error(
        "the device {address} has {}, not vfio-pci: `d=/sys/bus/pci/devices/{address}; echo vfio-pci >$d/driver_override; \
         echo {address} >$d/driver/unbind; echo {address} >/sys/bus/pci/drivers_probe` gives it to vfio-pci",
        driver.as_ref().map_or("no driver".to_owned(), |driver| format!("the driver {driver}"))
    )]
    Driver {
        /// The device.
        address: DeviceAddress,
        /// The device's driver.
        driver: Option<Box<str>>,
    },
    /// Another device of the IOMMU group belongs to a driver of the host.
    #[error(
        "the device {address} shares IOMMU group {group} with {other}, which has the driver {driver}: give {other} to \
         vfio-pci as well, since the IOMMU cannot tell the two apart"
    )]
    Shared {
        /// The device.
        address: DeviceAddress,
        /// Number of the group.
        group: Box<str>,
        /// The other device.
        other: Box<str>,
        /// The other device's driver.
        driver: Box<str>,
    },
    /// Another process has the IOMMU group open.
    #[error(
        "the device {address} is in use: another process, such as another VM, has IOMMU group {group} open"
    )]
    Busy {
        /// The device.
        address: DeviceAddress,
        /// Number of the group.
        group: Box<str>,
    },
    /// This user may not open VFIO's files.
    #[error(
        "this user may not open {path}, through which the device {address} is passed: give it to the user"
    )]
    Denied {
        /// The device.
        address: DeviceAddress,
        /// The file.
        path: Box<str>,
    },
    /// The host's kernel has no VFIO.
    #[error("this machine has no /dev/vfio/vfio: load the kernel module vfio-pci")]
    NoVfio,
    /// The host cannot reset the device.
    #[error(
        "the device {0} cannot be reset (its reset_method in /sys/bus/pci/devices is empty), so that requests of one VM would \
         remain for the next"
    )]
    NoReset(DeviceAddress),
    /// The host lets VFIO pass on interrupts that the IOMMU does not remap.
    #[error(
        "{0} is set, so that a device could send any interrupt to the host: load vfio_iommu_type1 without it"
    )]
    UnsafeInterrupts(&'static str),
    /// The IOMMU does not remap interrupts.
    #[error(
        "the IOMMU of the device {0} does not remap interrupts, so that the device could send any to the host: enable \
         interrupt remapping in the firmware"
    )]
    NoRemapping(DeviceAddress),
    /// The device has no MSI-X, or is no ordinary function.
    #[error("the device {address} cannot be passed through: {why}")]
    Unfit {
        /// The device.
        address: DeviceAddress,
        /// The reason.
        why: &'static str,
    },
    /// This process may not lock as much memory as the device can reach.
    #[error(
        "a device reaches memory that cannot be swapped out, {needed} MiB here, and this process may lock {limit} MiB: raise \
         the limit, by `ulimit -l` or LimitMEMLOCK= of systemd",
        needed = needed.div_ceil(1 << 20), limit = limit >> 20
    )]
    LockedMemory {
        /// Bytes to be locked.
        needed: u64,
        /// Bytes that may be locked (RLIMIT_MEMLOCK).
        limit: u64,
    },
    /// Memory cannot be shown to the devices.
    #[error("the IOMMU does not map {bytes} bytes of the VM's memory at {start:#x}")]
    Map {
        /// Guest physical address.
        start: u64,
        /// Number of bytes.
        bytes: u64,
        /// Error from VFIO.
        source: VfioError,
    },
    /// Memory cannot be removed from the devices' reach.
    #[error("the IOMMU does not unmap {bytes} bytes of the VM's memory at {start:#x}")]
    Unmap {
        /// Guest physical address.
        start: u64,
        /// Number of bytes.
        bytes: u64,
        /// Error from VFIO.
        source: VfioError,
    },
    /// A BAR cannot be mapped.
    #[error("BAR {bar} of the device {address} cannot be mapped")]
    Bar {
        /// The device.
        address: DeviceAddress,
        /// Number of the BAR.
        bar: u32,
        /// Underlying error.
        source: io::Error,
    },
    /// KVM has no device for VFIO.
    #[error("KVM has no device for VFIO")]
    Kvm(#[source] kvm_ioctls::Error),
    /// VFIO refused a request.
    #[error("VFIO refuses the device {address}")]
    Vfio {
        /// The device.
        address: DeviceAddress,
        /// Error from VFIO.
        source: VfioError,
    },
}
