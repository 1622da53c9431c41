//! Implements the balloon's registers: features and configuration.

use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;

use crate::devices::virtio::VirtioDevice;

/// Feature bits (virtio 1.2, 5.5.3).
const VIRTIO_BALLOON_F_DEFLATE_ON_OOM: u32 = 2;
const VIRTIO_BALLOON_F_PAGE_REPORTING: u32 = 5;

/// Class 0xff: a device that fits no defined class.
const PCI_CLASS: [u8; 3] = [0xff, 0, 0];
/// Buffers of each queue. The driver uses one at a time.
pub(super) const QUEUE_SIZE: u16 = 64;
/// Queues that every driver has: pages given, pages taken back.
const REQUIRED_QUEUES: usize = 2;

/// A balloon without a target size. Its configuration reads as zeros.
#[derive(Debug)]
pub struct Balloon {
    /// Whether the guest reports free memory, which the host then takes back. Linux reports all free memory, also what it
    /// has never used.
    pub reporting: bool,
}

impl VirtioDevice for Balloon {
    fn id(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn pci_class(&self) -> [u8; 3] {
        PCI_CLASS
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_BALLOON_F_DEFLATE_ON_OOM
            | u64::from(self.reporting) << VIRTIO_BALLOON_F_PAGE_REPORTING
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE; REQUIRED_QUEUES + 1]
    }

    fn required_queues(&self) -> usize {
        REQUIRED_QUEUES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_reported_only_if_the_host_may_take_it_back() {
        let reports =
            |reporting| Balloon { reporting }.features() >> VIRTIO_BALLOON_F_PAGE_REPORTING & 1;
        assert_eq!([false, true].map(reports), [0, 1]);
    }
}
