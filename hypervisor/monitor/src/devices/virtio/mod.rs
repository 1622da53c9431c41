//! virtio: what a device is, and the PCI transport that carries it.

mod device;
mod pci_transport;

pub use device::{ActivateError, ActiveQueue, Interrupt, VirtioDevice};
pub use pci_transport::{BAR_SIZE, VirtioPci};
