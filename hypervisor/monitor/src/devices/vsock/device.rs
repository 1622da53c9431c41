//! Implements the vsock device's registers: features, queues and configuration space.

use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;

use crate::devices::virtio::VirtioDevice;

/// "Simple communication controller", subclass "other".
const PCI_CLASS: [u8; 3] = [7, 0x80, 0];
const QUEUE_SIZE: u16 = 128;
/// Number of queues: receive, transmit, events.
pub(super) const QUEUES: usize = 3;

/// The vsock device.
#[derive(Debug)]
pub struct Vsock {
    /// `guest_cid` of `struct virtio_vsock_config`, little endian.
    guest_cid: [u8; 8],
}

impl Vsock {
    /// Creates the device of a guest with the context id `guest_cid`.
    pub fn new(guest_cid: u64) -> Self {
        Self {
            guest_cid: guest_cid.to_le_bytes(),
        }
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

    fn config(&self) -> &[u8] {
        &self.guest_cid
    }
}
