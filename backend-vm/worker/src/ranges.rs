//! The addresses a session may name.

use std::collections::BTreeMap;

use wormhole_link::device;

/// Disjoint ranges of addresses by where they start.
#[derive(Debug, Default)]
pub struct Ranges {
    /// Start → bytes, never 0, and the number of a device; no range reaches into the next.
    starts: BTreeMap<u64, (u64, usize)>,
    /// The sum of their bytes, by device.
    bytes: [u64; device::MOST],
    /// The range that was found last: programs name the same one again and again.
    last: std::cell::Cell<(u64, u64)>,
}

impl Ranges {
    /// Adds a range. False, and nothing changes, when it is empty, wraps or overlaps another.
    pub fn insert(&mut self, start: u64, bytes: u64) -> bool {
        self.insert_of(0, start, bytes)
    }

    /// Adds a range of a device, by its number.
    pub fn insert_of(&mut self, device: usize, start: u64, bytes: u64) -> bool {
        let Some(end) = start.checked_add(bytes) else {
            return false;
        };
        let before = self.starts.range(..end).next_back();
        let Some(sum) = self.bytes.get_mut(device) else {
            return false;
        };
        if bytes == 0 || before.is_some_and(|(&at, &(length, _))| at + length > start) {
            return false;
        }
        *sum += bytes;
        self.starts.insert(start, (bytes, device));
        true
    }

    /// Removes the range that starts at `start`: its bytes, and the number of its device.
    pub fn remove(&mut self, start: u64) -> Option<(u64, usize)> {
        self.last.set((0, 0));
        let (bytes, device) = self.starts.remove(&start)?;
        self.bytes[device] -= bytes;
        Some((bytes, device))
    }

    /// Bytes of all ranges of a device.
    pub fn bytes_of(&self, device: usize) -> u64 {
        self.bytes.get(device).copied().unwrap_or(0)
    }

    /// Whether `address..address + bytes` lies in one of the ranges.
    pub fn contains(&self, address: u64, bytes: u64) -> bool {
        let within = |(start, length): (u64, u64)| {
            address >= start && bytes <= length && address - start <= length - bytes
        };
        if within(self.last.get()) {
            return true;
        }
        match self.starts.range(..=address).next_back() {
            Some((&start, &(length, _))) if within((start, length)) => {
                self.last.set((start, length));
                true
            }
            _ => false,
        }
    }

    pub fn clear(&mut self) {
        self.starts.clear();
        self.bytes = [0; device::MOST];
        self.last.set((0, 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_range_that_reaches_over_an_end_is_not_contained() {
        let mut ranges = Ranges::default();
        assert!(ranges.insert(0x1000, 0x1000));
        assert!(ranges.insert(0x2000, 0x1000));
        assert!(ranges.contains(0x1000, 0x1000));
        assert!(ranges.contains(0x1fff, 1));
        assert!(!ranges.contains(0x1fff, 2), "no access spans two ranges");
        assert!(!ranges.contains(0x0fff, 1));
        assert!(!ranges.contains(0x3000, 1));
        assert!(!ranges.contains(0x1000, u64::MAX));
        assert!(!ranges.contains(u64::MAX, 2));
    }

    #[test]
    fn what_was_removed_is_not_remembered() {
        let mut ranges = Ranges::default();
        assert!(ranges.insert_of(2, 0x1000, 0x1000));
        assert!(ranges.insert_of(1, 0x8000, 0x10));
        assert!(!ranges.insert_of(device::MOST, 0x9000, 0x10));
        assert!(ranges.contains(0x1800, 8));
        let sums = |ranges: &Ranges| [0, 1, 2].map(|device| ranges.bytes_of(device));
        assert_eq!(sums(&ranges), [0, 0x10, 0x1000]);
        assert_eq!(ranges.remove(0x1000), Some((0x1000, 2)));
        assert_eq!(sums(&ranges), [0, 0x10, 0]);
        assert!(!ranges.contains(0x1800, 8));
    }

    proptest! {
        #[test]
        fn ranges_never_overlap(inserts in prop::collection::vec((0usize..64, 0usize..16), 0..40)) {
            let mut ranges = Ranges::default();
            let mut owner = [false; 96];
            for (start, bytes) in inserts {
                let cells = start..start + bytes;
                let free = bytes > 0 && !owner[cells.clone()].iter().any(|&taken| taken);
                prop_assert_eq!(ranges.insert(start as u64, bytes as u64), free);
                if free {
                    owner[cells].fill(true);
                }
            }
            for (address, taken) in owner.into_iter().enumerate() {
                prop_assert_eq!(ranges.contains(address as u64, 1), taken);
            }
        }
    }
}
