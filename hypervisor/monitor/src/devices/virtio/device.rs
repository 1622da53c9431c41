//! The interface between a virtio device and its transport.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use virtio_queue::Queue;

use crate::devices::pci::Msix;

/// ISR status: a queue was used.
const ISR_QUEUE: u8 = 1;

/// Why a device could not start to work.
#[derive(Debug, thiserror::Error)]
pub enum ActivateError {
    /// The thread that serves the device has ended.
    #[error("the device's thread has ended")]
    ThreadGone,
}

/// A queue that the driver has set up, and the interrupt it asked for.
#[derive(Debug)]
pub struct ActiveQueue {
    /// The queue; its rings lie in RAM.
    pub queue: Queue,
    /// The MSI-X vector, or `NO_VECTOR`.
    pub vector: u16,
}

/// How a device interrupts the guest.
pub trait Interrupt: Debug + Send + Sync {
    /// A queue with this vector has used buffers.
    fn queue_used(&self, vector: u16);
}

/// Interrupts through MSI-X vectors, and the ISR status.
#[derive(Debug)]
pub(super) struct PciInterrupt {
    pub msix: Arc<Msix>,
    pub isr: Arc<AtomicU8>,
}

impl Interrupt for PciInterrupt {
    fn queue_used(&self, vector: u16) {
        self.isr.fetch_or(ISR_QUEUE, Ordering::SeqCst);
        self.msix.trigger(vector);
    }
}

/// A virtio device as its transport sees it.
pub trait VirtioDevice: Debug + Send {
    /// The virtio device id.
    fn id(&self) -> u16;
    /// PCI class, subclass and interface.
    fn pci_class(&self) -> [u8; 3];
    /// The feature bits offered, `VIRTIO_F_VERSION_1` included.
    fn features(&self) -> u64;
    /// The largest size of each queue.
    fn queue_sizes(&self) -> &[u16];
    /// Reads the device's configuration; bytes past its end are zero.
    fn read_config(&self, offset: usize, data: &mut [u8]);
    /// The driver is ready: serve these queues.
    fn activate(
        &mut self,
        queues: Vec<ActiveQueue>,
        interrupt: Arc<dyn Interrupt>,
    ) -> Result<(), ActivateError>;
    /// Stop serving; when this returns no queue is touched any more.
    fn reset(&mut self);
    /// The driver notified a queue by a write that KVM did not take.
    fn notify(&self, queue: u16);
}
