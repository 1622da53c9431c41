//! The device as the transport sees it; the work is done on the device thread.

use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;

use crate::devices::virtio::VirtioDevice;

/// "Simple communication controller", other.
const PCI_CLASS: [u8; 3] = [7, 0x80, 0];
const QUEUE_SIZE: u16 = 128;
/// Receive, transmit, events.
pub(super) const QUEUES: usize = 3;

/// The vsock device.
#[derive(Debug)]
pub struct Vsock {
    guest_cid: u64,
}

impl Vsock {
    /// The device of a guest with the context id `guest_cid`.
    pub fn new(guest_cid: u64) -> Self {
        Self { guest_cid }
    }
}

impl VirtioDevice for Vsock {
    fn id(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn pci_class(&self) -> [u8; 3] {
        PCI_CLASS
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
}
