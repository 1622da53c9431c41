//! Defines the two halves of a virtio device: the registers, accessed on vCPU threads, and the worker
//! that serves the queues, on a device thread.

use std::fmt::Debug;

use event_manager::{EventOps, Events};

use super::queue::ActiveQueue;
use crate::snapshot::OpenConnection;

/// Properties of a virtio device that its transport exposes in registers.
pub trait VirtioDevice: Debug + Send {
    /// Returns the virtio device id (virtio 1.2, section 5), `VIRTIO_ID_*`.
    fn id(&self) -> u32;
    /// Returns PCI class, subclass and interface.
    fn pci_class(&self) -> [u8; 3];
    /// Returns the device-specific feature bits. The transport adds the generic ones.
    fn features(&self) -> u64 {
        0
    }
    /// Returns whether a driver may accept this set of features. One feature may need another.
    fn accepts(&self, features: u64) -> bool {
        let _ = features;
        true
    }
    /// Returns the maximum size of each queue, powers of two.
    fn queue_sizes(&self) -> &[u16];
    /// Returns how many queues every driver sets up. Later queues belong to features that a driver may leave out.
    fn required_queues(&self) -> usize {
        self.queue_sizes().len()
    }
    /// Returns the device-specific configuration. The driver reads zeros past its end.
    fn config(&self) -> &[u8] {
        &[]
    }
}

/// Serves a device's queues. All calls between [`Self::start`] and [`Self::stop`] or
/// [`Self::finish`] come from the device thread. None may block for long, since other devices share
/// the thread.
pub trait VirtioWorker: Debug + Send {
    /// Starts serving after DRIVER_OK: receives the queues that the driver set up and the negotiated feature bits.
    fn start(&mut self, queues: Vec<ActiveQueue>, features: u64);
    /// Follows [`Self::start`] where the driver did not start the device now, but before a snapshot. The host's end of
    /// the device is another one than the driver knows.
    fn restored(&mut self) {}
    /// Returns the connections of the guest that a snapshot would break.
    fn connections(&self) -> Vec<OpenConnection> {
        Vec::new()
    }
    /// Adds the descriptors that the worker waits for to `ops`, after the driver has started the device.
    fn watch(&mut self, ops: &mut EventOps<'_>) {
        let _ = ops;
    }
    /// Processes a bounded number of buffers after the driver notified `queue`, or the worker requested
    /// another turn ([`ActiveQueue::again`]).
    fn queue_ready(&mut self, queue: usize, ops: &mut EventOps<'_>);
    /// Handles an event of a descriptor that the worker added to `ops`.
    fn descriptor_ready(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let _ = (events, ops);
    }
    /// Returns the buffers that the worker has taken, before a snapshot. Waits for the host where it must.
    fn settle(&mut self) {}
    /// Drops the queues and all state of this driver after it reset the device. No descriptor of the
    /// worker is watched any more.
    fn stop(&mut self);
    /// Stops after the guest has ended and its vCPUs have stopped. May process the remaining buffers.
    fn finish(&mut self) {
        self.stop();
    }
}
