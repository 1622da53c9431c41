//! Implements the console's registers.

use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

use crate::devices::virtio::VirtioDevice;

/// Simple communication controller, "other".
const PCI_CLASS: [u8; 3] = [0x07, 0x80, 0];
pub(super) const QUEUE_SIZE: u16 = 64;

/// The console: a receive queue (0) and a transmit queue (1) of its only port, and no configuration.
#[derive(Debug)]
pub struct Console;

impl VirtioDevice for Console {
    fn id(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn pci_class(&self) -> [u8; 3] {
        PCI_CLASS
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE, QUEUE_SIZE]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_console_has_one_port_and_no_features() {
        assert_eq!(Console.queue_sizes(), [QUEUE_SIZE; 2]);
        assert_eq!((Console.features(), Console.config().len()), (0, 0));
    }
}
