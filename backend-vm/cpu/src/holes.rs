//! Allocator of address ranges.

use std::collections::BTreeMap;

/// Free ranges, bytes by address. No two are adjacent.
#[derive(Debug, Default)]
pub struct Holes(BTreeMap<u64, u64>);

impl Holes {
    /// Allocates `bytes` bytes at a multiple of `alignment` from the first hole with room for them.
    pub fn take(&mut self, bytes: u64, alignment: u64) -> Option<u64> {
        let address = self.0.iter().find_map(|(hole, size)| {
            let address = hole.checked_next_multiple_of(alignment)?;
            let end = address.checked_add(bytes)?;
            (end <= hole + size).then_some(address)
        })?;
        self.take_at(address, bytes).then_some(address)
    }

    /// Allocates a range. Returns false if a part of it is not free.
    pub fn take_at(&mut self, address: u64, bytes: u64) -> bool {
        let Some((&hole, &size)) = self.0.range(..=address).next_back() else {
            return false;
        };
        let Some(end) = address.checked_add(bytes).filter(|end| *end <= hole + size) else {
            return false;
        };
        self.0.remove(&hole);
        if address > hole {
            self.0.insert(hole, address - hole);
        }
        if end < hole + size {
            self.0.insert(end, hole + size - end);
        }
        true
    }

    /// Frees an allocated range.
    pub fn put(&mut self, address: u64, bytes: u64) {
        let (mut start, mut size) = (address, bytes);
        if let Some((&before, &length)) = self.0.range(..address).next_back()
            && before + length == address
        {
            self.0.remove(&before);
            start = before;
            size += length;
        }
        if let Some(length) = self.0.remove(&(address + bytes)) {
            size += length;
        }
        self.0.insert(start, size);
    }

    /// Returns the holes: start and bytes.
    #[cfg(test)]
    pub fn all(&self) -> Vec<(u64, u64)> {
        self.0
            .iter()
            .map(|(start, bytes)| (*start, *bytes))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_joins_its_neighbours() {
        let mut holes = Holes::default();
        holes.put(0x1000, 0x1000);
        let first = holes.take(0x100, 0x100).expect("room");
        let second = holes.take(0x100, 0x400).expect("room");
        assert_eq!((first, second), (0x1000, 0x1400));
        assert_eq!(holes.all(), [(0x1100, 0x300), (0x1500, 0xb00)]);
        assert_eq!(holes.take(0xc00, 1), None);
        assert!(!holes.take_at(0x1200, 0x400));
        assert!(holes.take_at(0x1200, 0x200));
        holes.put(second, 0x100);
        holes.put(0x1200, 0x200);
        holes.put(first, 0x100);
        assert_eq!(holes.all(), [(0x1000, 0x1000)]);
        assert_eq!(holes.take(u64::MAX, 1 << 63), None);
    }
}
