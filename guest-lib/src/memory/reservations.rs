//! Reserved addresses of this process. Small ranges are parts of blocks that the backend has reserved for it, so that it
//! can reserve and free them by itself.

use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of a block.
pub const BLOCK: u64 = 256 << 20;
/// Greatest number of bytes of a range in a block, and greatest alignment.
const PART: u64 = BLOCK / 8;

/// Ranges that the program has reserved, and the blocks that some of them lie in.
#[derive(Debug, Default)]
pub struct Reservations {
    /// Start and bytes.
    ranges: BTreeMap<u64, u64>,
    /// Start and number of ranges.
    blocks: BTreeMap<u64, usize>,
    /// Number of mappings in all ranges.
    pub mappings: usize,
}

/// A range of the backend's that a program's range was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whole {
    pub address: u64,
    pub bytes: u64,
}

impl Reservations {
    /// Returns true if a range may lie in a block. The backend chooses the address of any other range: only the device
    /// knows whether a hint is free. A range of a greater alignment need not fit even into an empty block.
    pub fn may_be_part(&self, bytes: u64, alignment: u64, hint: u64) -> bool {
        bytes <= PART && alignment <= PART && (hint == 0 || self.block_of(hint).is_some())
    }

    /// Reserves a range in a block, at `hint` if that is aligned and free there. Fails if no block has room. Memory is
    /// mapped at multiples of the device's granularity only, so `alignment` is a multiple of it.
    pub fn take(&mut self, bytes: u64, alignment: u64, hint: u64) -> Option<u64> {
        let fits = |&start: &u64| {
            self.block_of(start)
                .is_some_and(|block| bytes <= block.end - start)
                && start.is_multiple_of(alignment)
                && self.is_free(start, bytes)
        };
        let found = Some(hint).filter(fits).or_else(|| {
            let starts = self.blocks.keys();
            starts
                .copied()
                .find_map(|start| self.gap(start, bytes, alignment))
        })?;
        let block = self.block_of(found)?.start;
        *self.blocks.get_mut(&block)? += 1;
        self.ranges.insert(found, bytes);
        Some(found)
    }

    /// Adds a range that the backend has reserved for the program alone.
    pub fn insert(&mut self, address: u64, bytes: u64) {
        self.ranges.insert(address, bytes);
    }

    /// Adds a block that the backend has reserved, and reserves a range in it. On failure the block is not added, and the
    /// backend is to free it.
    pub fn take_in_new(&mut self, block: u64, bytes: u64, alignment: u64) -> Result<u64, Whole> {
        self.blocks.insert(block, 0);
        let taken = self.take(bytes, alignment, 0);
        if self.blocks.get(&block) == Some(&0) {
            self.blocks.remove(&block);
        }
        taken.ok_or(Whole {
            address: block,
            bytes: BLOCK,
        })
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

    /// Frees a range. The backend must then free the returned range: the same one if it lies in no block, or its block if that
    /// is empty and another block is left.
    pub fn remove(&mut self, address: u64) -> Option<Whole> {
        let bytes = self.ranges.remove(&address)?;
        let Some(block) = self.block_of(address) else {
            return Some(Whole { address, bytes });
        };
        let count = self.blocks.get_mut(&block.start)?;
        *count -= 1;
        if *count > 0 || self.blocks.len() == 1 {
            return None;
        }
        self.blocks.remove(&block.start);
        Some(Whole {
            address: block.start,
            bytes: BLOCK,
        })
    }

    fn block_of(&self, address: u64) -> Option<Range<u64>> {
        let (&start, _) = self.blocks.range(..=address).next_back()?;
        (address - start < BLOCK).then_some(start..start + BLOCK)
    }

    fn is_free(&self, address: u64, bytes: u64) -> bool {
        let before = self.ranges.range(..address + bytes).next_back();
        before.is_none_or(|(start, length)| start + length <= address)
    }

    /// Returns the first place in a block that has room.
    fn gap(&self, block: u64, bytes: u64, alignment: u64) -> Option<u64> {
        let end = block + BLOCK;
        let mut at = block.checked_next_multiple_of(alignment)?;
        for (start, length) in self.ranges.range(block..end) {
            if at.checked_add(bytes)? <= *start {
                return Some(at);
            }
            at = at.max((start + length).checked_next_multiple_of(alignment)?);
        }
        (at.checked_add(bytes)? <= end).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNIT: u64 = 2 << 20;
    const FIRST: u64 = 1 << 40;

    proptest! {
        #[test]
        fn parts_of_blocks_are_aligned_and_apart(
            steps in prop::collection::vec((any::<bool>(), 1..17_u64, 21..28_u32, 0..65_536_u64), 1..80)
        ) {
            let mut reserved = Reservations::default();
            for number in 0..2 {
                reserved.blocks.insert(FIRST + number * 2 * BLOCK, 0);
            }
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (takes, units, shift, at) in steps {
                let bytes = units * UNIT;
                if takes {
                    // Half of the hints are multiples of the unit.
                    let hint = FIRST + if at % 2 == 0 { at / 2 % 128 * UNIT } else { at * 4096 };
                    let alignment = 1 << shift;
                    if let Some(found) = reserved.take(bytes, alignment, hint) {
                        prop_assert!(found.is_multiple_of(alignment));
                        let block = [FIRST, FIRST + 2 * BLOCK].into_iter()
                            .any(|start| found >= start && found + bytes <= start + BLOCK);
                        prop_assert!(block);
                        let apart = |(start, length): &(u64, u64)| {
                            found + bytes <= *start || start + length <= found
                        };
                        prop_assert!(live.iter().all(apart));
                        prop_assert!(reserved.is_range(found, bytes));
                        prop_assert!(reserved.contains(found, found + bytes));
                        live.push((found, bytes));
                    }
                } else if !live.is_empty() {
                    let (address, _) = live.swap_remove(usize::try_from(at).unwrap() % live.len());
                    let whole = reserved.remove(address);
                    prop_assert!(whole.is_none_or(|whole| whole.bytes == BLOCK));
                    prop_assert!(!reserved.contains(address, address + 1));
                }
            }
        }
    }

    #[test]
    fn the_last_block_stays() {
        let mut reserved = Reservations::default();
        let second = FIRST + BLOCK;
        assert_eq!(reserved.take(UNIT, UNIT, 0), None);
        let mut parts = vec![reserved.take_in_new(FIRST, PART, UNIT).unwrap()];
        let count = BLOCK / PART;
        parts.extend((1..count).map(|_| reserved.take(PART, UNIT, 0).unwrap()));
        assert_eq!(reserved.take(UNIT, UNIT, 0), None);
        assert_eq!(reserved.take_in_new(second, UNIT, UNIT), Ok(second));
        let gone = reserved.remove(second);
        let address = second;
        assert_eq!(
            gone,
            Some(Whole {
                address,
                bytes: BLOCK
            })
        );
        assert!(parts.iter().all(|part| reserved.remove(*part).is_none()));
        // Freed ranges are used again first.
        assert_eq!(reserved.take(UNIT, UNIT, 0), Some(FIRST));
        assert_eq!(
            reserved.take(UNIT, UNIT, FIRST + 4 * UNIT),
            Some(FIRST + 4 * UNIT)
        );
        // A hint between two units is none.
        let between = FIRST + 8 * UNIT + 4096;
        assert_eq!(reserved.take(UNIT, UNIT, between), Some(FIRST + UNIT));
    }

    #[test]
    fn a_new_block_in_which_nothing_fits_is_given_back() {
        let mut reserved = Reservations::default();
        let address = FIRST + UNIT;
        let bytes = BLOCK;
        let whole = Whole { address, bytes };
        assert_eq!(reserved.take_in_new(address, UNIT, 1 << 30), Err(whole));
        assert!(!reserved.may_be_part(UNIT, UNIT, address));
        assert_eq!(reserved.take(UNIT, UNIT, 0), None);
    }

    #[test]
    fn large_ranges_and_foreign_hints_are_the_backend_s() {
        let mut reserved = Reservations::default();
        reserved.blocks.insert(FIRST, 0);
        assert!(reserved.may_be_part(PART, PART, 0));
        assert!(reserved.may_be_part(UNIT, UNIT, FIRST + UNIT));
        assert!(!reserved.may_be_part(PART + UNIT, UNIT, 0));
        assert!(!reserved.may_be_part(UNIT, 2 * PART, 0));
        assert!(!reserved.may_be_part(UNIT, UNIT, FIRST + BLOCK));
        let (address, bytes) = (FIRST - UNIT, UNIT);
        reserved.insert(address, bytes);
        assert_eq!(reserved.remove(address), Some(Whole { address, bytes }));
        assert_eq!(reserved.remove(address), None);
    }
}
