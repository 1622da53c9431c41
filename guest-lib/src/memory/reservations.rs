//! Reserved addresses of this process. Some that the program has freed are kept, so that it can reserve as many again
//! without a request.
//!
//! Each range is one of the backend's own: on an H200 `cuMemSetAccess` takes half as long again where a reservation is
//! larger than what is mapped in it.

use std::collections::{BTreeMap, VecDeque};

/// Greatest number of freed ranges that are kept.
const KEPT: usize = 32;
/// Greatest size of a range that is kept.
const KEPT_BYTES: u64 = 1 << 30;

/// Ranges that the program has reserved, and those that it has freed and that are kept.
#[derive(Debug, Default)]
pub struct Reservations {
    /// Start and bytes.
    ranges: BTreeMap<u64, u64>,
    /// The last freed range is at the end.
    kept: VecDeque<Range>,
    /// Number of mappings in all ranges.
    pub mappings: usize,
}

/// A range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub address: u64,
    pub bytes: u64,
}

impl Range {
    fn overlaps(self, address: u64, bytes: u64) -> bool {
        self.address < address.saturating_add(bytes) && address < self.address + self.bytes
    }
}

impl Reservations {
    /// Reserves a kept range of this size and alignment: the one at `hint`, unless that is 0.
    pub fn take(&mut self, bytes: u64, alignment: u64, hint: u64) -> Option<u64> {
        let fits = |range: &Range| {
            range.bytes == bytes
                && match hint {
                    0 => range.address.is_multiple_of(alignment),
                    _ => range.address == hint,
                }
        };
        let found = self.kept.iter().rposition(fits)?;
        let range = self.kept.remove(found)?;
        self.insert(range.address, bytes);
        Some(range.address)
    }

    /// Adds a range that the backend has reserved.
    pub fn insert(&mut self, address: u64, bytes: u64) {
        self.ranges.insert(address, bytes);
    }

    /// Takes a kept range that overlaps the other range. The backend must then free it.
    pub fn take_kept(&mut self, address: u64, bytes: u64) -> Option<Range> {
        let overlaps = |range: &Range| range.overlaps(address, bytes);
        let found = self.kept.iter().position(overlaps)?;
        self.kept.remove(found)
    }

    /// Returns true if this is the start and the size of a reserved range.
    pub fn is_range(&self, address: u64, bytes: u64) -> bool {
        self.ranges.get(&address) == Some(&bytes)
    }

    /// Returns true if a reserved range contains the other range.
    pub fn contains(&self, address: u64, end: u64) -> bool {
        let around = self.ranges.range(..=address).next_back();
        around.is_some_and(|(start, bytes)| end <= start + bytes)
    }

    /// Frees a range. The backend must then free the returned one, if any: it is too large to be kept, or the oldest of too
    /// many.
    pub fn remove(&mut self, address: u64) -> Option<Range> {
        let bytes = self.ranges.remove(&address)?;
        let range = Range { address, bytes };
        if bytes > KEPT_BYTES {
            return Some(range);
        }
        self.kept.push_back(range);
        match self.kept.len() > KEPT {
            true => self.kept.pop_front(),
            false => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = 2 << 20;
    const FIRST: u64 = 1 << 40;

    fn range(address: u64, bytes: u64) -> Range {
        Range { address, bytes }
    }

    /// Reserves and frees ranges.
    fn kept(ranges: &[Range]) -> Reservations {
        let mut reserved = Reservations::default();
        for range in ranges {
            reserved.insert(range.address, range.bytes);
        }
        for range in ranges {
            assert!(reserved.is_range(range.address, range.bytes));
            assert_eq!(reserved.remove(range.address), None);
            assert!(!reserved.contains(range.address, range.address + 1));
        }
        reserved
    }

    #[test]
    fn a_freed_range_is_reserved_again_by_its_size() {
        let mut reserved = kept(&[
            range(FIRST + UNIT, UNIT),
            range(FIRST + 4 * UNIT, 2 * UNIT),
            range(FIRST + 8 * UNIT, UNIT),
        ]);
        assert_eq!(reserved.take(4 * UNIT, UNIT, 0), None);
        // The last one first, and none twice.
        assert_eq!(reserved.take(UNIT, UNIT, 0), Some(FIRST + 8 * UNIT));
        assert!(reserved.contains(FIRST + 8 * UNIT, FIRST + 9 * UNIT));
        assert_eq!(reserved.take(UNIT, UNIT, 0), Some(FIRST + UNIT));
        assert_eq!(reserved.take(UNIT, UNIT, 0), None);
        assert_eq!(reserved.take(2 * UNIT, UNIT, 0), Some(FIRST + 4 * UNIT));
        assert_eq!(reserved.remove(FIRST + 2 * UNIT), None);
    }

    #[test]
    fn an_alignment_and_a_hint_are_kept_to() {
        let mut reserved = kept(&[range(FIRST, UNIT), range(FIRST + UNIT, UNIT)]);
        assert_eq!(reserved.take(UNIT, 2 * UNIT, 0), Some(FIRST));
        assert_eq!(reserved.take(UNIT, 2 * UNIT, 0), None);
        assert_eq!(reserved.take(UNIT, UNIT, FIRST + 2 * UNIT), None);
        assert_eq!(reserved.take(UNIT, UNIT, FIRST + UNIT), Some(FIRST + UNIT));
    }

    #[test]
    fn kept_ranges_in_the_way_of_another_are_found() {
        let mut reserved = kept(&[range(FIRST, UNIT), range(FIRST + 2 * UNIT, 2 * UNIT)]);
        assert_eq!(reserved.take_kept(FIRST + UNIT, UNIT), None);
        let found = reserved.take_kept(FIRST + UNIT, 2 * UNIT);
        assert_eq!(found, Some(range(FIRST + 2 * UNIT, 2 * UNIT)));
        assert_eq!(reserved.take_kept(FIRST + UNIT, 2 * UNIT), None);
        let found = reserved.take_kept(FIRST + UNIT - 1, u64::MAX);
        assert_eq!(found, Some(range(FIRST, UNIT)));
    }

    #[test]
    fn few_ranges_are_kept_and_no_large_ones() {
        let mut reserved = Reservations::default();
        reserved.insert(FIRST, KEPT_BYTES + UNIT);
        let large = range(FIRST, KEPT_BYTES + UNIT);
        assert_eq!(reserved.remove(FIRST), Some(large));
        let starts = || (0..=KEPT as u64).map(|number| FIRST + number * KEPT_BYTES);
        starts().for_each(|start| reserved.insert(start, KEPT_BYTES));
        let freed: Vec<_> = starts()
            .filter_map(|start| reserved.remove(start))
            .collect();
        assert_eq!(freed, [range(FIRST, KEPT_BYTES)]);
    }
}
