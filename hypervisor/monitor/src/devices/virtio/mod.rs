//! virtio: what a device is, the PCI transport that carries it, and the server of its queues.

mod device;
mod pci_transport;
mod queue;
mod server;
#[cfg(test)]
pub mod test_queue;

pub use device::{VirtioDevice, VirtioWorker};
pub use pci_transport::{BAR_SIZE, VirtioPci};
pub use queue::{ActiveQueue, Interrupt};
pub use server::{QueueServer, ServerHandle};
