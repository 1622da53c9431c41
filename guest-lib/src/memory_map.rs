//! Which memory belongs to the device: every allocation, found by any address in it, without a lock.

use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_skiplist::SkipMap;

use crate::error::{CuError, Result};

/// What a piece of memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// `cuMemAlloc` and its kin.
    Device,
    /// A variable of a module: never freed by itself.
    Global,
    /// Page-locked host memory, with the flags of `cuMemHostAlloc`.
    Host { flags: u32 },
    /// `cuMemAllocManaged`.
    Managed,
}

/// One allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    pub base: u64,
    pub bytes: u64,
    pub origin: Origin,
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID`: never used twice.
    pub id: u64,
    /// The context it belongs to.
    pub context: u32,
}

impl Allocation {
    pub fn is_host(&self) -> bool {
        matches!(self.origin, Origin::Host { .. })
    }

    pub fn is_managed(&self) -> bool {
        self.origin == Origin::Managed
    }

    /// Whether it lies in the arena, so that the program and the device both reach it.
    pub fn is_in_arena(&self) -> bool {
        self.is_host() || self.is_managed()
    }

    /// Whether `address..address + bytes` lies in it.
    pub fn holds(&self, address: u64, bytes: u64) -> bool {
        address
            .checked_sub(self.base)
            .and_then(|offset| offset.checked_add(bytes))
            .is_some_and(|end| end <= self.bytes)
    }
}

/// The allocations of the process.
#[derive(Debug)]
pub struct MemoryMap {
    allocations: SkipMap<u64, Allocation>,
    next_id: AtomicU64,
}

impl Default for MemoryMap {
    fn default() -> Self {
        Self {
            allocations: SkipMap::new(),
            next_id: AtomicU64::new(1),
        }
    }
}

impl MemoryMap {
    pub fn insert(&self, base: u64, bytes: u64, origin: Origin, context: u32) {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.allocations.insert(
            base,
            Allocation {
                base,
                bytes,
                origin,
                id,
                context,
            },
        );
    }

    /// The allocation that an address lies in.
    pub fn find(&self, address: u64) -> Option<Allocation> {
        let entry = self.allocations.upper_bound(Bound::Included(&address))?;
        let allocation = *entry.value();
        (address - allocation.base < allocation.bytes).then_some(allocation)
    }

    /// The allocation that a whole range lies in; `None` where no allocation is.
    pub fn find_range(&self, address: u64, bytes: u64) -> Result<Option<Allocation>> {
        match self.find(address) {
            Some(allocation) if allocation.holds(address, bytes) => Ok(Some(allocation)),
            Some(_) => Err(CuError::INVALID_VALUE),
            None => Ok(None),
        }
    }

    /// Takes out the allocation that starts at `base`, if it is one that `wanted` accepts.
    pub fn remove(&self, base: u64, wanted: impl Fn(&Allocation) -> bool) -> Result<Allocation> {
        let entry = self.allocations.get(&base).ok_or(CuError::INVALID_VALUE)?;
        let allocation = *entry.value();
        if wanted(&allocation) && entry.remove() {
            Ok(allocation)
        } else {
            Err(CuError::INVALID_VALUE)
        }
    }

    /// Takes out all that `wanted` accepts.
    pub fn remove_all(&self, wanted: impl Fn(&Allocation) -> bool) -> Vec<Allocation> {
        self.allocations
            .iter()
            .filter(|entry| wanted(entry.value()))
            .filter_map(|entry| entry.remove().then(|| *entry.value()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_address_is_found_in_its_allocation_and_nowhere_else() {
        let map = MemoryMap::default();
        map.insert(0x1000, 0x100, Origin::Device, 0);
        map.insert(0x2000, 0x10, Origin::Host { flags: 2 }, 0);
        assert_eq!(map.find(0x10FF).unwrap().base, 0x1000);
        assert_eq!(map.find(0x1100), None);
        assert_eq!(map.find(0xFFF), None);
        assert!(map.find(0x2008).unwrap().is_host());
        assert_ne!(map.find(0x1000).unwrap().id, map.find(0x2000).unwrap().id);
    }

    #[test]
    fn a_range_past_the_end_is_an_invalid_value() {
        let map = MemoryMap::default();
        map.insert(0x1000, 0x100, Origin::Device, 0);
        assert!(map.find_range(0x1000, 0x100).unwrap().is_some());
        assert_eq!(map.find_range(0x1001, 0x100), Err(CuError::INVALID_VALUE));
        assert_eq!(
            map.find_range(0x1001, u64::MAX),
            Err(CuError::INVALID_VALUE)
        );
        assert_eq!(map.find_range(0x3000, 1), Ok(None));
    }

    #[test]
    fn only_the_start_of_an_allocation_frees_it_and_once() {
        let map = MemoryMap::default();
        map.insert(0x1000, 0x100, Origin::Device, 0);
        assert!(map.remove(0x1010, |_| true).is_err());
        assert!(map.remove(0x1000, Allocation::is_host).is_err());
        assert!(map.remove(0x1000, |_| true).is_ok());
        assert!(map.remove(0x1000, |_| true).is_err());
    }

    proptest! {
        #[test]
        fn a_range_is_held_exactly_if_it_ends_in_the_allocation(offset in 0..300_u64, bytes in 0..300_u64) {
            let map = MemoryMap::default();
            map.insert(0x1000, 0x100, Origin::Device, 0);
            let found = map.find_range(0x1000 + offset, bytes);
            if offset >= 0x100 {
                prop_assert_eq!(found, Ok(None));
            } else {
                prop_assert_eq!(found.is_ok(), offset + bytes <= 0x100);
            }
        }
    }
}
