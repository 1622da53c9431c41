//! Disjoint ranges of addresses.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use wormhole_link::device;

/// A range. One of zero bytes is a free entry of the table.
#[derive(Clone, Copy, Debug, Default)]
struct Range {
    start: u64,
    bytes: u64,
    /// Number of the range's device.
    device: usize,
    /// Number of its insertion.
    number: u64,
}

/// A range that was found. One that was removed is unequal to any later one in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Found {
    pub start: u64,
    pub bytes: u64,
    number: u64,
}

impl Range {
    fn contains(&self, address: u64, bytes: u64) -> bool {
        self.bytes != 0
            && address >= self.start
            && bytes <= self.bytes
            && address - self.start <= self.bytes - bytes
    }
}

/// Disjoint ranges of addresses, ordered by start.
#[derive(Debug, Default)]
pub struct Ranges {
    /// Start → index in `table`. No range overlaps the next.
    starts: BTreeMap<u64, usize>,
    table: Vec<Range>,
    free: Vec<usize>,
    /// Number of insertions so far.
    inserted: u64,
    /// Sum of the ranges' bytes, by device.
    bytes: [u64; device::MOST],
    /// Index of the range found last: programs name the same range again and again. Any index is
    /// safe, because the entry is compared.
    last: AtomicUsize,
}

impl Ranges {
    /// Adds a range of device 0. Returns false, and changes nothing, if it is empty, wraps or
    /// overlaps another.
    pub fn insert(&mut self, start: u64, bytes: u64) -> bool {
        self.insert_of(0, start, bytes)
    }

    /// Adds a range of a device, given by number, as [`Ranges::insert`] does.
    pub fn insert_of(&mut self, device: usize, start: u64, bytes: u64) -> bool {
        let Some(end) = start.checked_add(bytes) else {
            return false;
        };
        let before = self.starts.range(..end).next_back();
        let Some(sum) = self.bytes.get_mut(device) else {
            return false;
        };
        let reach = before.map(|(&at, &place)| at + self.table[place].bytes);
        if bytes == 0 || reach.is_some_and(|reach| reach > start) {
            return false;
        }
        *sum += bytes;
        let place = self.free.pop().unwrap_or_else(|| {
            self.table.push(Range::default());
            self.table.len() - 1
        });
        self.inserted += 1;
        self.table[place] = Range {
            start,
            bytes,
            device,
            number: self.inserted,
        };
        self.starts.insert(start, place);
        true
    }

    /// Removes the range that starts at `start`, and returns its bytes and its device's number.
    pub fn remove(&mut self, start: u64) -> Option<(u64, usize)> {
        let place = self.starts.remove(&start)?;
        let Range { bytes, device, .. } = std::mem::take(&mut self.table[place]);
        self.free.push(place);
        self.bytes[device] -= bytes;
        Some((bytes, device))
    }

    /// Returns the bytes of all ranges of a device.
    pub fn bytes_of(&self, device: usize) -> u64 {
        self.bytes.get(device).copied().unwrap_or(0)
    }

    /// Returns whether `address..address + bytes` lies in one range. Threads may call it
    /// concurrently.
    pub fn contains(&self, address: u64, bytes: u64) -> bool {
        let holds = |place: usize| {
            let range = self.table.get(place);
            range.is_some_and(|range| range.contains(address, bytes))
        };
        if holds(self.last.load(Ordering::Relaxed)) {
            return true;
        }
        match self.starts.range(..=address).next_back() {
            Some((_, &place)) if holds(place) => {
                self.last.store(place, Ordering::Relaxed);
                true
            }
            _ => false,
        }
    }

    /// Returns the range that holds an address.
    pub fn find(&self, address: u64) -> Option<Found> {
        let (_, &place) = self.starts.range(..=address).next_back()?;
        let range = self.table.get(place)?;
        let holds = range.contains(address, 1);
        holds.then_some(Found {
            start: range.start,
            bytes: range.bytes,
            number: range.number,
        })
    }

    /// Adds a range of device 0 that was removed, as the same one.
    pub fn put_back(&mut self, range: Found) {
        if self.insert(range.start, range.bytes)
            && let Some(&place) = self.starts.get(&range.start)
        {
            self.table[place].number = range.number;
        }
    }

    pub fn clear(&mut self) {
        *self = Self {
            inserted: self.inserted,
            ..Self::default()
        };
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

    #[test]
    fn a_range_in_the_place_of_another_is_not_the_same() {
        let mut ranges = Ranges::default();
        let insert = |ranges: &mut Ranges| {
            assert!(ranges.insert(0x1000, 0x1000));
            ranges.find(0x1800).unwrap()
        };
        let first = insert(&mut ranges);
        ranges.remove(0x1000);
        assert_eq!(ranges.find(0x1800), None);
        ranges.put_back(first);
        assert_eq!(ranges.find(0x1000), Some(first));
        ranges.remove(0x1000);
        let second = insert(&mut ranges);
        assert_ne!(first, second);
        ranges.clear();
        let third = insert(&mut ranges);
        assert!(third != first && third != second);
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
