//! Passes devices of the host through to the guest by VFIO: PCI functions, and mediated devices, which look like some.
//!
//! The guest's driver programs the device itself. Its BARs are memory slots over the device's own registers, its interrupts
//! go from VFIO's eventfds to KVM's irqfds, and its DMA passes the host's IOMMU, which translates guest physical addresses.
//! The monitor emulates what the guest must not reach: the BARs' addresses, the MSI-X table, and power states.
//!
//! The IOMMU's table contains the guest's RAM, and of an [`Aperture`](crate::Aperture) the memory that is attached to its
//! slots. VFIO pins what the table contains.
//!
//! A device is reset when it is opened and when the VM ends. When the process ends, however it ends, the kernel closes the
//! device, and resets it and gives it back to its driver.

mod address;
mod bars;
mod config;
mod error;
mod function;
mod open;

use std::fmt::Debug;

use vfio_ioctls::VfioError;
use vmm_sys_util::eventfd::EventFd;

pub use self::address::{AddressError, DeviceAddress};
pub(crate) use self::bars::{map, mapped};
#[cfg(feature = "fuzzing")]
pub(crate) use self::config::Config;
pub use self::error::PassthroughError;
pub(crate) use self::function::VfioFunction;
pub(crate) use self::open::{Dma, Opened, Passthrough, allow_locking};

/// Registers and interrupts of a device behind VFIO.
pub(crate) trait Hardware: Debug + Send + Sync {
    /// Reads at `offset` of a region. Bytes that cannot be read are all ones.
    fn read(&self, region: u32, offset: u64, data: &mut [u8]);
    /// Writes at `offset` of a region.
    fn write(&self, region: u32, offset: u64, data: &[u8]);
    /// Lets the device raise its MSI-X vectors by these eventfds, or by none.
    fn set_vectors(&self, events: Vec<&EventFd>) -> Result<(), VfioError>;
    /// Resets the device, if it can be reset.
    fn reset(&self);
}
