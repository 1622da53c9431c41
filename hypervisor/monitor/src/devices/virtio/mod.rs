//! Implements virtio: device traits, the PCI transport, and the server of a device's queues.

mod buffers;
mod device;
mod pci_transport;
mod queue;
mod server;
#[cfg(test)]
pub mod test_queue;

pub use buffers::{append_slices, guards, slices, vector};
pub use device::{VirtioDevice, VirtioWorker};
pub use pci_transport::{BAR_SIZE, VirtioPci, VirtioPciState};
pub use queue::{ActiveQueue, Fate, Interrupt};
pub use server::{QueueServer, ServerHandle};
