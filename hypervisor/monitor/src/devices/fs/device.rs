//! Implements the file system device's registers: its tag, and the number of its queues.

use std::fmt;

use virtio_bindings::virtio_ids::VIRTIO_ID_FS;

use crate::devices::virtio::VirtioDevice;

/// Mass storage controller, other.
const PCI_CLASS: [u8; 3] = [0x01, 0x80, 0];
/// Buffers of each queue. Linux reads 128 KiB at once, which takes a descriptor for each page and four more.
pub(super) const QUEUE_SIZE: u16 = 128;
/// The high priority queue, and one for requests.
pub(super) const QUEUES: usize = 2;
/// Bytes of the tag in the configuration.
const TAG_LEN: usize = 36;

/// Name of a file system in the guest, the source of its mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag([u8; TAG_LEN]);

/// The text is no tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the tag of a file system has 1 to {TAG_LEN} bytes, and none of them is 0")]
pub struct BadTag;

impl Tag {
    /// Creates a tag.
    pub fn new(name: &str) -> Result<Self, BadTag> {
        let mut tag = [0; TAG_LEN];
        let place = tag.get_mut(..name.len()).ok_or(BadTag)?;
        place.copy_from_slice(name.as_bytes());
        match name.is_empty() || name.contains('\0') {
            true => Err(BadTag),
            false => Ok(Self(tag)),
        }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = String::from_utf8_lossy(&self.0);
        f.write_str(name.trim_end_matches('\0'))
    }
}

/// A file system with one queue for requests.
#[derive(Debug)]
pub struct Fs {
    config: [u8; TAG_LEN + 4],
}

impl Fs {
    /// Creates a file system with this tag.
    pub fn new(tag: Tag) -> Self {
        let mut config = [0; TAG_LEN + 4];
        config[..TAG_LEN].copy_from_slice(&tag.0);
        config[TAG_LEN..].copy_from_slice(&1u32.to_le_bytes());
        Self { config }
    }
}

impl VirtioDevice for Fs {
    fn id(&self) -> u32 {
        VIRTIO_ID_FS
    }

    fn pci_class(&self) -> [u8; 3] {
        PCI_CLASS
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE; QUEUES]
    }

    fn config(&self) -> &[u8] {
        &self.config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_tag_and_one_request_queue() {
        let device = Fs::new(Tag::new("root").expect("a tag"));
        let mut wanted =
            *b"root\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        wanted[TAG_LEN] = 1;
        assert_eq!(device.config(), wanted);
        for bad in ["", "a\0", &"t".repeat(TAG_LEN + 1)] {
            assert_eq!(Tag::new(bad), Err(BadTag), "{bad:?}");
        }
        assert!(Tag::new(&"t".repeat(TAG_LEN)).is_ok());
    }
}
