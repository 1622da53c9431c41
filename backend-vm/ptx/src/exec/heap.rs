//! Heap of `malloc` and `free` in kernels.

use std::collections::BTreeMap;

use wormhole_lock::Mutex;

/// Granularity of blocks: their sizes and addresses are multiples of it.
const GRAIN: u64 = 16;

#[derive(Debug)]
struct Blocks {
    /// Free ranges: start to length.
    free: BTreeMap<u64, u64>,
    /// Allocated ranges: start to length.
    used: BTreeMap<u64, u64>,
}

/// Allocator of one range of device memory.
///
/// The allocator's records are outside that memory, so that a kernel that writes out of bounds cannot corrupt them. The
/// range must be a region of the launch's [`crate::GlobalMemory`], and remains one region whatever is freed.
#[derive(Debug)]
pub struct DeviceHeap {
    blocks: Mutex<Blocks>,
}

impl DeviceHeap {
    /// Makes a heap of the `bytes` bytes at the device address `start`.
    #[must_use]
    pub fn new(start: u64, bytes: u64) -> Self {
        let aligned = start.next_multiple_of(GRAIN);
        let bytes = bytes.saturating_sub(aligned - start) / GRAIN * GRAIN;
        let free = if bytes == 0 {
            BTreeMap::new()
        } else {
            BTreeMap::from([(aligned, bytes)])
        };
        Self {
            blocks: Mutex::new(Blocks {
                free,
                used: BTreeMap::new(),
            }),
        }
    }

    /// Allocates `bytes` bytes, aligned to 16, and returns their address; `None` if there is no
    /// room or `bytes` is 0.
    pub fn malloc(&self, bytes: u64) -> Option<u64> {
        let bytes = bytes
            .checked_next_multiple_of(GRAIN)
            .filter(|&bytes| bytes > 0)?;
        let mut blocks = self.blocks.lock();
        let (start, length) = blocks
            .free
            .iter()
            .find(|(_, length)| **length >= bytes)
            .map(|(s, l)| (*s, *l))?;
        blocks.free.remove(&start);
        if length > bytes {
            blocks.free.insert(start + bytes, length - bytes);
        }
        blocks.used.insert(start, bytes);
        Some(start)
    }

    /// Frees a block that `malloc` returned. Returns false if `address` is no such block.
    pub fn free(&self, address: u64) -> bool {
        let mut blocks = self.blocks.lock();
        let Some(mut bytes) = blocks.used.remove(&address) else {
            return false;
        };
        let mut start = address;
        if let Some(after) = blocks.free.remove(&(start + bytes)) {
            bytes += after;
        }
        let before = blocks
            .free
            .range(..start)
            .next_back()
            .map(|(s, l)| (*s, *l));
        if let Some((before, length)) = before.filter(|(s, l)| s + l == start) {
            blocks.free.remove(&before);
            start = before;
            bytes += length;
        }
        blocks.free.insert(start, bytes);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_neighbours_become_one() {
        let heap = DeviceHeap::new(0x1000, 64);
        let blocks: Vec<u64> = (0..4).map(|_| heap.malloc(10).unwrap()).collect();
        assert_eq!(blocks, [0x1000, 0x1010, 0x1020, 0x1030]);
        assert_eq!(heap.malloc(1), None);
        for block in [0x1010, 0x1030, 0x1020, 0x1000] {
            assert!(heap.free(block));
            assert!(!heap.free(block));
        }
        assert_eq!(heap.malloc(64), Some(0x1000));
    }

    #[test]
    fn an_absurd_request_fails() {
        let heap = DeviceHeap::new(0x1000, 64);
        assert_eq!(heap.malloc(u64::MAX), None);
        assert_eq!(heap.malloc(0), None);
    }
}
