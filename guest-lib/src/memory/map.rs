//! Map of all allocations: finds an allocation by any address in it, without a lock.

use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_skiplist::SkipMap;
use wormhole_api::Handle;
use wormhole_api::handle::{Memory, Pool};

use crate::error::{CuError, Result};
use crate::memory::{pool, virtual_memory};
use crate::object::context;

/// Kind of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Memory of `cuMemAlloc` and similar functions.
    Device,
    /// Variable of a module, freed only with the module.
    Global,
    /// Page-locked host memory, with the flags of `cuMemHostAlloc`.
    Host { flags: u32 },
    /// Memory of `cuMemAllocManaged`.
    Managed,
    /// Managed variables of an image, freed with it.
    Variables,
    /// Registered memory of the program, with the flags of `cuMemHostRegister` and the device's address of it, if the
    /// device reaches it.
    Registered { flags: u32, device: Option<u64> },
    /// Registered memory at the device's address, with the program's address of it.
    RegisteredAlias { host: u64 },
    /// Memory of `cuMemAllocAsync` and similar functions. Belongs to no context.
    Pool { pool: Handle<Pool> },
    /// Memory allocated by a graph; freed with it.
    Graph,
    /// Memory of another process (`cuIpcOpenMemHandle`).
    Opened,
    /// Memory of `cuMemMap`. Belongs to no context.
    Mapped { memory: Handle<Memory> },
}

/// One allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    pub base: u64,
    pub bytes: u64,
    pub origin: Origin,
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID`, which is never used twice.
    pub id: u64,
    /// Context of the allocation.
    pub context: u32,
    /// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`: copies and fills of it that are synchronous always wait.
    pub synchronous: bool,
    /// Whether the program has made a handle of it for other processes.
    pub is_shared: bool,
}

impl Allocation {
    pub fn is_host(&self) -> bool {
        matches!(self.origin, Origin::Host { .. })
    }

    pub fn is_managed(&self) -> bool {
        matches!(self.origin, Origin::Managed | Origin::Variables)
    }

    /// Returns true if the allocation outlives its context.
    pub fn outlives_context(&self) -> bool {
        matches!(
            self.origin,
            Origin::Pool { .. } | Origin::Mapped { .. } | Origin::Variables
        )
    }

    pub fn is_mapped(&self) -> bool {
        matches!(self.origin, Origin::Mapped { .. })
    }

    /// Returns the ordinal of the allocation's device.
    pub fn device(&self) -> Option<usize> {
        Some(match self.origin {
            Origin::Pool { pool } => pool::device_of(pool),
            Origin::Mapped { memory } => virtual_memory::device_of(memory),
            _ => context::device_of(self.context)?,
        })
    }

    pub fn is_alias(&self) -> bool {
        matches!(self.origin, Origin::RegisteredAlias { .. })
    }

    pub fn is_registered(&self) -> bool {
        matches!(self.origin, Origin::Registered { .. })
    }

    /// Returns the device's address of host memory at `address`. `None` if the device does not reach it, and for device
    /// memory.
    pub fn for_device(&self, address: u64) -> Option<u64> {
        match self.origin {
            Origin::Device
            | Origin::Global
            | Origin::Graph
            | Origin::Opened
            | Origin::Pool { .. }
            | Origin::Mapped { .. } => None,
            Origin::Host { .. }
            | Origin::Managed
            | Origin::Variables
            | Origin::RegisteredAlias { .. } => Some(address),
            Origin::Registered { device, .. } => Some(device? + (address - self.base)),
        }
    }

    /// Returns the program's address of `address`, if the program reaches it.
    pub fn for_host(&self, address: u64) -> Option<u64> {
        match self.origin {
            Origin::Device
            | Origin::Global
            | Origin::Graph
            | Origin::Opened
            | Origin::Pool { .. }
            | Origin::Mapped { .. } => None,
            Origin::Host { .. }
            | Origin::Managed
            | Origin::Variables
            | Origin::Registered { .. } => Some(address),
            Origin::RegisteredAlias { host } => Some(host + (address - self.base)),
        }
    }

    /// Returns true if `address..address + bytes` lies in the allocation.
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
                synchronous: matches!(origin, Origin::Managed | Origin::Variables),
                is_shared: false,
            },
        );
    }

    /// Returns the allocation that contains an address.
    pub fn find(&self, address: u64) -> Option<Allocation> {
        let entry = self.allocations.upper_bound(Bound::Included(&address))?;
        let allocation = *entry.value();
        (address - allocation.base < allocation.bytes).then_some(allocation)
    }

    /// Returns the allocation that contains a whole range; `None` if its start lies in no allocation. Adjacent mappings
    /// count as one allocation: the first is returned.
    pub fn find_range(&self, address: u64, bytes: u64) -> Result<Option<Allocation>> {
        match self.find(address) {
            Some(allocation) if allocation.holds(address, bytes) => Ok(Some(allocation)),
            Some(first) if first.is_mapped() && self.is_mapped(&first, address, bytes) => {
                Ok(Some(first))
            }
            Some(_) => Err(CuError::INVALID_VALUE),
            None => Ok(None),
        }
    }

    /// Returns true if mappings without a gap contain a range that starts in the first of them.
    fn is_mapped(&self, first: &Allocation, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else {
            return false;
        };
        let mut at = first.base + first.bytes;
        while at < end {
            match self.find(at) {
                Some(next) if next.is_mapped() && next.base == at => at += next.bytes,
                _ => return false,
            }
        }
        true
    }

    /// Returns true if a range overlaps an allocation.
    pub fn overlaps(&self, address: u64, bytes: u64) -> bool {
        let end = address.saturating_add(bytes);
        self.allocations
            .upper_bound(Bound::Excluded(&end))
            .is_some_and(|entry| entry.value().base + entry.value().bytes > address)
    }

    /// Inserts an allocation with its identity, in place of any that has the same start.
    pub fn put_back(&self, allocation: Allocation) {
        self.allocations.insert(allocation.base, allocation);
    }

    /// Removes the allocation that starts at `base`, if `wanted` accepts it.
    pub fn remove(&self, base: u64, wanted: impl Fn(&Allocation) -> bool) -> Result<Allocation> {
        let entry = self.allocations.get(&base).ok_or(CuError::INVALID_VALUE)?;
        let allocation = *entry.value();
        if wanted(&allocation) && entry.remove() {
            Ok(allocation)
        } else {
            Err(CuError::INVALID_VALUE)
        }
    }

    /// Removes all allocations that `wanted` accepts.
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
    fn a_range_overlaps_what_it_shares_a_byte_with() {
        let map = MemoryMap::default();
        map.insert(0x1000, 0x100, Origin::Device, 0);
        for (address, bytes, overlaps) in [
            (0xF00, 0x100, false),
            (0xF00, 0x101, true),
            (0x1010, 1, true),
            (0x10FF, 1, true),
            (0x1100, 0x10, false),
            (0, u64::MAX, true),
        ] {
            assert_eq!(map.overlaps(address, bytes), overlaps, "{address:#x}");
        }
    }

    #[test]
    fn registered_memory_has_an_address_for_each_side() {
        let map = MemoryMap::default();
        let (flags, device) = (2, Some(0x9100));
        map.insert(0x1100, 0x100, Origin::Registered { flags, device }, 0);
        map.insert(0x9100, 0x100, Origin::RegisteredAlias { host: 0x1100 }, 0);
        map.insert(
            0x5000,
            8,
            Origin::Registered {
                flags,
                device: None,
            },
            0,
        );
        let both = |address| {
            let allocation = map.find(address).unwrap();
            (allocation.for_host(address), allocation.for_device(address))
        };
        assert_eq!(both(0x1104), (Some(0x1104), Some(0x9104)));
        assert_eq!(both(0x9104), both(0x1104));
        assert_eq!(both(0x5001), (Some(0x5001), None));
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

    fn mapped(index: u32) -> Origin {
        let key = wormhole_api::handle::Key {
            index,
            generation: 1,
        };
        Origin::Mapped {
            memory: Handle::new(key).unwrap(),
        }
    }

    #[test]
    fn mappings_without_a_gap_are_one_range() {
        let map = MemoryMap::default();
        for index in [0, 1, 3] {
            map.insert(0x1000 + u64::from(index) * 0x100, 0x100, mapped(index), 0);
        }
        map.insert(0x1400, 0x100, Origin::Device, 0);
        let found = |address, bytes| {
            map.find_range(address, bytes)
                .map(|found| found.unwrap().base)
        };
        assert_eq!(found(0x1080, 0x180), Ok(0x1000));
        assert_eq!(found(0x1080, 0x181), Err(CuError::INVALID_VALUE));
        assert_eq!(found(0x1300, 0x101), Err(CuError::INVALID_VALUE));
        assert_eq!(found(0x1080, u64::MAX), Err(CuError::INVALID_VALUE));
        assert!(map.overlaps(0x1100, 1) && map.overlaps(0xF00, 0x1000));
        assert!(!map.overlaps(0x1200, 0x100) && !map.overlaps(0xF00, 0x100));
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
