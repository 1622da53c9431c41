//! The two halves of a virtio device: the one that its driver sees in registers, on vCPU threads, and
//! the one that serves the queues, on a device thread.

use std::fmt::Debug;

use event_manager::{EventOps, Events};

use super::queue::ActiveQueue;

/// A virtio device as its transport sees it.
pub trait VirtioDevice: Debug + Send {
    /// The virtio device id (virtio 1.2, section 5), `VIRTIO_ID_*`.
    fn id(&self) -> u32;
    /// PCI class, subclass and interface.
    fn pci_class(&self) -> [u8; 3];
    /// The device's own feature bits; the transport adds those of virtio itself.
    fn features(&self) -> u64 {
        0
    }
    /// The largest size of each queue, powers of two.
    fn queue_sizes(&self) -> &[u16];
    /// The device's configuration; the driver reads zeros past its end.
    fn config(&self) -> &[u8] {
        &[]
    }
}

/// Serves a device's queues. All calls between [`Self::start`] and [`Self::stop`] or
/// [`Self::finish`] come from the device thread; none may block for long, since other devices of the
/// guest wait meanwhile.
pub trait VirtioWorker: Debug + Send {
    /// The driver is ready: takes the queues, as many as the device has, and the feature bits that the driver chose.
    fn start(&mut self, queues: Vec<ActiveQueue>, features: u64);
    /// The driver notified `queue`, or the worker asked for another turn at it
    /// ([`ActiveQueue::again`]). Takes a bounded number of buffers.
    fn queue_ready(&mut self, queue: usize, ops: &mut EventOps<'_>);
    /// A descriptor is ready that the worker added to `ops` in an earlier call.
    fn descriptor_ready(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let _ = (events, ops);
    }
    /// The driver reset the device: drops the queues and all state of this driver. No descriptor of
    /// the worker is watched any more.
    fn stop(&mut self);
    /// The guest has ended and its vCPUs stand still; queues that it filled before may be emptied.
    fn finish(&mut self) {
        self.stop();
    }
}
