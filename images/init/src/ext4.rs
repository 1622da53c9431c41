//! Makes empty ext4 file systems, of what a guest's shared memory needs: without a journal, and without copies of their
//! description. The format leaves most blocks of a new file system unwritten, so that it takes little memory.
//!
//! The layout is that of Documentation/filesystems/ext4 of the kernel.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const BLOCK_BYTES: usize = 4096;
const BLOCK: u64 = BLOCK_BYTES as u64;
/// Blocks of a group: as many as one block has bits.
const GROUP: u64 = 8 * BLOCK;
/// Inodes of a group, one for 16 KiB.
const INODES: u64 = 8192;
const INODE_BYTES: usize = 256;
/// Blocks of a group's inodes.
const INODE_BLOCKS: u64 = INODES * INODE_BYTES as u64 / BLOCK;
/// Inodes that the format reserves. The second one is the root.
const RESERVED_INODES: u64 = 10;
/// Blocks of a group for its own description: two bitmaps and the inodes.
const GROUP_OVERHEAD: u64 = 2 + INODE_BLOCKS;
/// Bytes that describe a group.
const DESCRIPTOR: usize = 32;
/// Fewest blocks of the last group.
const LEAST: u64 = GROUP_OVERHEAD + 64;

/// `SPARSE_SUPER2`: no group needs a copy of the description.
const COMPATIBLE: u32 = 0x200;
/// `FILETYPE`, `EXTENTS`.
const INCOMPATIBLE: u32 = 0x2 | 0x40;
/// `LARGE_FILE`, `HUGE_FILE`, `GDT_CSUM` (for groups without bitmaps), `DIR_NLINK`, `EXTRA_ISIZE`.
const READ_ONLY_COMPATIBLE: u32 = 0x2 | 0x8 | 0x10 | 0x20 | 0x40;
/// State of a group whose inodes and their bitmap have not been written: `INODE_UNINIT`.
const INODES_UNWRITTEN: u16 = 0x1;
/// State of a group whose bitmap of blocks has not been written: `BLOCK_UNINIT`.
const BLOCKS_UNWRITTEN: u16 = 0x2;
/// Mode of a folder in which everyone may make files and remove their own.
const FOLDER: u16 = 0o4_1777;
/// Bytes before the file system's description, which the format leaves to others.
const BEFORE: usize = 1024;
/// Bytes of an inode behind its first 128 that are in use.
const EXTRA_BYTES: u16 = 32;

/// Sizes of a file system.
#[derive(Clone, Copy, Debug)]
struct Layout {
    blocks: u64,
    groups: u64,
    /// Blocks of the descriptions of all groups.
    descriptors: u64,
}

impl Layout {
    /// Returns the layout of a file system in so many bytes; `None` if they are too few or too many.
    fn new(bytes: u64) -> Option<Self> {
        let blocks = bytes / BLOCK;
        // A last group that has no room for files is left out.
        let blocks = match blocks % GROUP {
            rest if rest < LEAST => blocks - rest,
            _ => blocks,
        };
        let groups = blocks.div_ceil(GROUP);
        let descriptors = (groups * DESCRIPTOR as u64).div_ceil(BLOCK);
        let fits = blocks != 0 && u32::try_from(blocks).is_ok() && descriptors < GROUP / 2;
        let layout = Self {
            blocks,
            groups,
            descriptors,
        };
        (fits && layout.used(0) < layout.length(0)).then_some(layout)
    }

    /// Returns the number of blocks of a group.
    fn length(self, group: u64) -> u64 {
        GROUP.min(self.blocks - group * GROUP)
    }

    /// Returns the first block of a group behind the file system's own description.
    fn start(self, group: u64) -> u64 {
        match group {
            0 => 1 + self.descriptors,
            _ => group * GROUP,
        }
    }

    /// Returns the block of the root folder.
    fn root(self) -> u64 {
        self.start(0) + GROUP_OVERHEAD
    }

    /// Returns the number of blocks of a group that are taken.
    fn used(self, group: u64) -> u64 {
        match group {
            0 => self.root() + 1,
            _ => GROUP_OVERHEAD,
        }
    }

    fn free_inodes(group: u64) -> u64 {
        match group {
            0 => INODES - RESERVED_INODES,
            _ => INODES,
        }
    }

    /// Returns the description of a group.
    fn descriptor(self, group: u64) -> [u8; DESCRIPTOR] {
        let start = self.start(group);
        let free_inodes = low(Self::free_inodes(group));
        let mut bytes = [0; DESCRIPTOR];
        put(&mut bytes, 0x0, &word(start));
        put(&mut bytes, 0x4, &word(start + 1));
        put(&mut bytes, 0x8, &word(start + 2));
        put(
            &mut bytes,
            0xc,
            &low(self.length(group) - self.used(group)).to_le_bytes(),
        );
        put(&mut bytes, 0xe, &free_inodes.to_le_bytes());
        let (folders, state) = match group {
            0 => (1_u16, 0),
            _ if group == self.last() => (0, INODES_UNWRITTEN),
            _ => (0, INODES_UNWRITTEN | BLOCKS_UNWRITTEN),
        };
        put(&mut bytes, 0x10, &folders.to_le_bytes());
        put(&mut bytes, 0x12, &state.to_le_bytes());
        put(&mut bytes, 0x1c, &free_inodes.to_le_bytes());
        // The identity of the file system is all zeros.
        let sum = crc16(u16::MAX, &[0; 16]);
        let sum = crc16(sum, &word(group));
        let sum = crc16(sum, &bytes[..0x1e]);
        put(&mut bytes, 0x1e, &sum.to_le_bytes());
        bytes
    }

    /// Returns the file system's description, which begins behind [`BEFORE`].
    fn superblock(self) -> [u8; 1024] {
        let groups = 0..self.groups;
        let free: u64 = groups
            .map(|group| self.length(group) - self.used(group))
            .sum();
        let mut bytes = [0; 1024];
        let words = [
            (0x0, self.groups * INODES),
            (0x4, self.blocks),
            (0xc, free),
            (0x10, self.groups * INODES - RESERVED_INODES),
            // Blocks, and clusters, of 1024 << 2 bytes.
            (0x18, 2),
            (0x1c, 2),
            (0x20, GROUP),
            (0x24, GROUP),
            (0x28, INODES),
            // The revision with inodes of any size.
            (0x4c, 1),
            (0x54, RESERVED_INODES + 1),
            (0x5c, COMPATIBLE.into()),
            (0x60, INCOMPATIBLE.into()),
            (0x64, READ_ONLY_COMPATIBLE.into()),
        ];
        for (at, value) in words {
            put(&mut bytes, at, &word(value));
        }
        let halves = [
            // No number of mounts asks for a check.
            (0x36, u16::MAX),
            (0x38, 0xef53),
            // In order; errors are logged.
            (0x3a, 1),
            (0x3c, 1),
            (0x58, low(INODE_BYTES as u64)),
            (0x15c, EXTRA_BYTES),
            (0x15e, EXTRA_BYTES),
        ];
        for (at, value) in halves {
            put(&mut bytes, at, &value.to_le_bytes());
        }
        bytes
    }

    /// Returns the inode of the root.
    fn root_inode(self) -> [u8; INODE_BYTES] {
        let mut bytes = [0; INODE_BYTES];
        put(&mut bytes, 0x0, &FOLDER.to_le_bytes());
        put(&mut bytes, 0x4, &word(BLOCK));
        put(&mut bytes, 0x1a, &2_u16.to_le_bytes());
        put(&mut bytes, 0x1c, &word(BLOCK / 512));
        // It has an extent: one of the inode's four, of one block.
        put(&mut bytes, 0x20, &0x8_0000_u32.to_le_bytes());
        put(&mut bytes, 0x28, &0xf30a_u16.to_le_bytes());
        put(&mut bytes, 0x2a, &1_u16.to_le_bytes());
        put(&mut bytes, 0x2c, &4_u16.to_le_bytes());
        put(&mut bytes, 0x38, &1_u16.to_le_bytes());
        put(&mut bytes, 0x3c, &word(self.root()));
        put(&mut bytes, 0x80, &EXTRA_BYTES.to_le_bytes());
        bytes
    }

    /// Returns the last group, whose bitmap of blocks must be there.
    fn last(self) -> u64 {
        self.groups - 1
    }

    /// Returns the bitmap of a group's blocks.
    fn block_bitmap(self, group: u64) -> [u8; BLOCK_BYTES] {
        bitmap(self.used(group), self.length(group))
    }
}

/// Makes an empty file system in the first `bytes` of a device. The first KiB stays as it is.
///
/// # Errors
/// The device cannot be written, or is too small or too large.
pub fn format(device: &File, bytes: u64) -> io::Result<()> {
    let layout = Layout::new(bytes)
        .ok_or_else(|| io::Error::other(format!("no file system has {bytes} bytes")))?;
    let mut descriptors = Vec::new();
    for group in 0..layout.groups {
        descriptors.extend(layout.descriptor(group));
    }
    descriptors.resize(descriptors.len().next_multiple_of(BLOCK_BYTES), 0);
    let start = layout.start(0);
    let mut inodes = [0; BLOCK_BYTES];
    put(&mut inodes, INODE_BYTES, &layout.root_inode());
    let last = layout.last();
    let parts: [(u64, &[u8]); 6] = [
        (1, &descriptors),
        (start, &layout.block_bitmap(0)),
        (layout.start(last), &layout.block_bitmap(last)),
        (start + 1, &bitmap(RESERVED_INODES, INODES)),
        (start + 2, &inodes),
        (layout.root(), &root_folder()),
    ];
    for (block, data) in parts {
        device.write_all_at(data, block * BLOCK)?;
    }
    let mut rest = [0; BLOCK_BYTES - BEFORE];
    put(&mut rest, 0, &layout.superblock());
    device.write_all_at(&rest, BEFORE as u64)
}

/// Returns the contents of an empty root folder: itself, twice.
fn root_folder() -> [u8; BLOCK_BYTES] {
    /// Type of an entry that is a folder.
    const OF_FOLDER: u8 = 2;
    let mut bytes = [0; BLOCK_BYTES];
    let last = low(BLOCK - 12);
    for (at, length, name) in [
        (0, 12, &[1, OF_FOLDER, b'.'][..]),
        (12, last, &[2, OF_FOLDER, b'.', b'.']),
    ] {
        put(&mut bytes, at, &2_u32.to_le_bytes());
        put(&mut bytes, at + 4, &length.to_le_bytes());
        put(&mut bytes, at + 6, name);
    }
    bytes
}

/// Returns a bitmap whose first bits are set, and those behind `count`, which nothing has.
fn bitmap(first: u64, count: u64) -> [u8; BLOCK_BYTES] {
    let mut bytes = [0; BLOCK_BYTES];
    for bit in (0..first).chain(count..8 * BLOCK) {
        let byte = usize::try_from(bit / 8).ok();
        if let Some(byte) = byte.and_then(|byte| bytes.get_mut(byte)) {
            *byte |= 1 << (bit % 8);
        }
    }
    bytes
}

fn put(bytes: &mut [u8], at: usize, data: &[u8]) {
    bytes[at..at + data.len()].copy_from_slice(data);
}

/// Returns the low half of a number that fits there.
fn low(value: u64) -> u16 {
    u16::try_from(value).unwrap_or(u16::MAX)
}

fn word(value: u64) -> [u8; 4] {
    u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes()
}

/// CRC-16 with the polynomial 0x8005, bits reversed.
fn crc16(start: u16, bytes: &[u8]) -> u16 {
    bytes.iter().fold(start, |sum, byte| {
        (0..8).fold(sum ^ u16::from(*byte), |sum, _| match sum & 1 {
            0 => sum >> 1,
            _ => sum >> 1 ^ 0xa001,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_checksum_is_the_usual_one() {
        assert_eq!(crc16(0, b"123456789"), 0xbb3d);
    }

    #[test]
    fn a_memory_without_room_for_files_is_refused() {
        for bytes in [0, 4096, (GROUP_OVERHEAD + 3) * BLOCK, u64::MAX] {
            assert!(Layout::new(bytes).is_none(), "{bytes}");
        }
        let layout = Layout::new((GROUP + 100) * BLOCK).unwrap();
        assert_eq!((layout.blocks, layout.groups), (GROUP, 1));
    }

    /// Checks file systems of several sizes by `e2fsck`, on memory that had other contents.
    #[test]
    fn others_find_no_fault_in_a_file_system() {
        for mib in [4_u64, 100, 128, 256, 515, 20 << 10] {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(mib << 20).unwrap();
            for at in [0, 1 << 20, 3 << 20] {
                file.as_file().write_all_at(&[0x5a; 8192], at).unwrap();
            }
            format(file.as_file(), mib << 20).unwrap();
            let check = Command::new("/sbin/e2fsck")
                .args(["-f", "-n"])
                .arg(file.path())
                .output();
            let Ok(check) = check else {
                return eprintln!("skipped: this machine has no e2fsck");
            };
            let said = String::from_utf8_lossy(&check.stdout);
            // There is no folder for what a check finds.
            let said = said.replace("/lost+found not found.  Create? no\n", "");
            assert!(!said.contains("? no"), "{mib} MiB: {said}");
            let mut before = [0; BEFORE];
            file.as_file().read_exact_at(&mut before, 0).unwrap();
            assert_eq!(before, [0x5a; BEFORE]);
        }
    }
}
