//! The device as the transport sees it; the work is done on the device thread.

use std::sync::Arc;

use event_manager::{RemoteEndpoint, SubscriberId};
use vmm_sys_util::eventfd::EventFd;

use super::event_handler::VsockEngine;
use crate::devices::virtio::{ActivateError, ActiveQueue, Interrupt, VirtioDevice};

const VIRTIO_ID_VSOCK: u16 = 19;
const VIRTIO_F_VERSION_1: u64 = 1 << 32;
/// "Simple communication controller", other.
const PCI_CLASS: [u8; 3] = [7, 0x80, 0];
const QUEUE_SIZE: u16 = 128;
/// Receive, transmit, events.
pub(super) const QUEUES: usize = 3;

/// The vsock device.
pub struct Vsock {
    guest_cid: u64,
    kicks: Vec<EventFd>,
    endpoint: RemoteEndpoint<VsockEngine>,
    engine: SubscriberId,
}

impl std::fmt::Debug for Vsock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vsock")
            .field("guest_cid", &self.guest_cid)
            .finish_non_exhaustive()
    }
}

impl Vsock {
    /// The device whose engine runs as `engine` behind `endpoint`; `kicks` are the eventfds that
    /// the engine waits for, one per queue.
    pub fn new(
        guest_cid: u64,
        kicks: Vec<EventFd>,
        endpoint: RemoteEndpoint<VsockEngine>,
        engine: SubscriberId,
    ) -> Self {
        Self {
            guest_cid,
            kicks,
            endpoint,
            engine,
        }
    }

    /// MSI-X vectors it can use: one per queue, and one for changes of configuration.
    pub const VECTORS: u16 = 4;
}

impl VirtioDevice for Vsock {
    fn id(&self) -> u16 {
        VIRTIO_ID_VSOCK
    }

    fn pci_class(&self) -> [u8; 3] {
        PCI_CLASS
    }

    fn features(&self) -> u64 {
        VIRTIO_F_VERSION_1
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE; QUEUES]
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let config = self.guest_cid.to_le_bytes();
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = config.get(offset + index).copied().unwrap_or(0);
        }
    }

    fn activate(
        &mut self,
        queues: Vec<ActiveQueue>,
        interrupt: Arc<dyn Interrupt>,
    ) -> Result<(), ActivateError> {
        let engine = self.engine;
        self.endpoint
            .call_blocking::<_, _, event_manager::Error>(move |ops| {
                ops.subscriber_mut(engine)?.start(queues, interrupt);
                Ok(())
            })
            .map_err(|_| ActivateError::ThreadGone)
    }

    fn reset(&mut self) {
        let engine = self.engine;
        let stopped = self
            .endpoint
            .call_blocking::<_, _, event_manager::Error>(move |ops| {
                let changes = ops.subscriber_mut(engine)?.stop();
                let mut watch = ops.event_ops(engine)?;
                VsockEngine::apply(changes, &mut watch);
                Ok(())
            });
        if stopped.is_err() {
            // The thread is gone, and with it every use of the queues.
            tracing::debug!("vsock reset after the end of its thread");
        }
    }

    fn notify(&self, queue: u16) {
        if let Some(kick) = self.kicks.get(usize::from(queue)) {
            // A full counter means that the queue is notified already.
            if let Err(error) = kick.write(1) {
                tracing::debug!(%error, "a queue's eventfd is full");
            }
        }
    }
}
