//! Implements the block device's registers: features and configuration.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes};

use super::image::{DiskAccess, DiskImage, SECTOR};
use crate::devices::virtio::VirtioDevice;

/// Mass storage, subclass "other".
const PCI_CLASS: [u8; 3] = [0x01, 0x80, 0];
pub(super) const QUEUE_SIZE: u16 = 256;
/// Maximum data descriptors of one request; header and status take one each.
pub(super) const MAX_SEGMENTS: u32 = QUEUE_SIZE as u32 - 2;
/// Maximum bytes of one data descriptor.
pub(super) const MAX_SEGMENT_BYTES: u32 = 1 << 20;
/// Maximum ranges of one discard or write-zeroes request.
pub(super) const MAX_RANGES: u32 = 32;
/// Maximum sectors of one such range: 1 GiB, which bounds the time that it occupies the disk's thread.
pub(super) const MAX_RANGE_SECTORS: u32 = (1 << 30) / 512;

/// `struct virtio_blk_config` up to the last field that the device offers (virtio 1.2, 5.2.4).
#[derive(Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
struct Config {
    capacity: U64,
    size_max: U32,
    seg_max: U32,
    geometry: [u8; 4],
    blk_size: U32,
    topology: [u8; 8],
    writeback: u8,
    unused: u8,
    num_queues: U16,
    max_discard_sectors: U32,
    max_discard_seg: U32,
    discard_sector_alignment: U32,
    max_write_zeroes_sectors: U32,
    max_write_zeroes_seg: U32,
    write_zeroes_may_unmap: u8,
    unused_too: [u8; 3],
}

/// A disk with one queue.
#[derive(Debug)]
pub struct Block {
    features: u64,
    config: Config,
}

impl Block {
    /// Creates a disk with the size of `image`.
    pub fn new(image: &DiskImage) -> Self {
        let mut features = [
            VIRTIO_BLK_F_SIZE_MAX,
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_FLUSH,
        ]
        .to_vec();
        features.extend(match image.access() {
            DiskAccess::ReadOnly => &[VIRTIO_BLK_F_RO][..],
            DiskAccess::ReadWrite => &[VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES],
        });
        Self {
            features: features.iter().fold(0, |bits, bit| bits | 1 << bit),
            config: Config {
                capacity: image.sectors().into(),
                size_max: MAX_SEGMENT_BYTES.into(),
                seg_max: MAX_SEGMENTS.into(),
                blk_size: u32::try_from(SECTOR).unwrap_or(u32::MAX).into(),
                num_queues: 1.into(),
                max_discard_sectors: MAX_RANGE_SECTORS.into(),
                max_discard_seg: MAX_RANGES.into(),
                discard_sector_alignment: 1.into(),
                max_write_zeroes_sectors: MAX_RANGE_SECTORS.into(),
                max_write_zeroes_seg: MAX_RANGES.into(),
                write_zeroes_may_unmap: 1,
                ..Config::default()
            },
        }
    }
}

impl VirtioDevice for Block {
    fn id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn pci_class(&self) -> [u8; 3] {
        PCI_CLASS
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn config(&self) -> &[u8] {
        self.config.as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushes_are_offered_always_and_what_is_unused_is_zero() {
        for access in [DiskAccess::ReadOnly, DiskAccess::ReadWrite] {
            let file = tempfile::NamedTempFile::new().expect("a temporary file");
            file.as_file().set_len(8 * SECTOR).expect("room");
            let image = DiskImage::open(file.path(), access).expect("an image");
            let disk = Block::new(&image);
            let offers = |feature: u32| disk.features() & 1 << feature != 0;
            assert!(offers(VIRTIO_BLK_F_FLUSH));
            assert_eq!(offers(VIRTIO_BLK_F_RO), access == DiskAccess::ReadOnly);
            assert_eq!(disk.config()[..8], 8u64.to_le_bytes());
            let unused = [&disk.config()[33..34], &disk.config()[57..60]].concat();
            assert_eq!(unused, [0; 4]);
        }
    }
}
