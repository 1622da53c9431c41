//! The guest's allocator over the arena extents that the supervisor granted.
//!
//! An extent is one run of segments and one registration with the driver, so an allocation never spans two. The tables
//! lie in private memory; the allocator never reads the shared bytes.

use alloc::collections::{BTreeMap, BTreeSet};

/// Unit of allocation: every address and size is a multiple of it.
pub const GRANULE: u64 = 256;
/// Page size. Allocations of at least this many bytes are page-aligned and a whole number of pages.
pub const PAGE: u64 = 4096;

/// A range of addresses in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    /// The first address.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Block {
    /// Returns the first address behind the block.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.address + self.bytes
    }
}

/// Errors of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaError {
    /// No free range of any extent is large enough; another extent would help.
    #[error(
        "no free range of {bytes} bytes aligned to {align} in an arena of {capacity} bytes, {free} free"
    )]
    NoRoom {
        /// Bytes requested, rounded up.
        bytes: u64,
        /// The alignment.
        align: u64,
        /// Bytes of all extents.
        capacity: u64,
        /// Free bytes of all extents.
        free: u64,
    },
    /// The size is 0 or too large, or the alignment is not a power of two.
    #[error("an allocation of {bytes} bytes aligned to {align} is impossible")]
    Impossible {
        /// Bytes requested.
        bytes: u64,
        /// The alignment.
        align: u64,
    },
    /// No allocation starts at this address.
    #[error("no allocation starts at {address:#x}")]
    NotAllocated {
        /// The address.
        address: u64,
    },
    /// The extent is empty, unaligned, or overlaps another.
    #[error("an extent of {bytes:#x} bytes at {address:#x} is unaligned or overlaps another")]
    BadExtent {
        /// Address of the extent.
        address: u64,
        /// Bytes of the extent.
        bytes: u64,
    },
    /// No extent starts at the address, or the extent is in use.
    #[error("the extent at {address:#x} does not exist or is in use")]
    ExtentInUse {
        /// Address of the extent.
        address: u64,
    },
}

/// Result of [`Arena::free`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// The freed allocation.
    pub block: Block,
    /// The extent that held the allocation, if it is empty now. The guest may return it to the supervisor after
    /// [`Arena::remove_extent`].
    pub empty_extent: Option<Block>,
}

/// Best-fit allocator: chooses the smallest free range that holds the allocation, and the lowest address among equals.
/// A freed range is merged with its free neighbours at once.
///
/// ```
/// use wormhole_ring::arena::Arena;
/// let mut arena = Arena::new();
/// arena.add_extent(0x5000_0020_0000, 2 << 20).unwrap();
/// let small = arena.allocate(100, 1).unwrap();
/// assert_eq!(small.bytes, 256);
/// let large = arena.allocate(100_000, 1).unwrap();
/// assert_eq!((large.address % 4096, large.bytes), (0, 102_400));
/// assert_eq!(arena.find(large.address + 99_999), Some(large));
/// assert_eq!(arena.free(large.address).unwrap().empty_extent, None);
/// let extent = arena.free(small.address).unwrap().empty_extent.unwrap();
/// assert!(arena.is_unused(extent.address));
/// arena.remove_extent(extent.address).unwrap();
/// assert_eq!(arena.capacity(), 0);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Arena {
    /// Extents by address; none overlap. Adjacent extents are not merged.
    extents: BTreeMap<u64, Extent>,
    /// Free ranges, bytes by address. None overlap or touch within one extent; none cross an extent.
    free: BTreeMap<u64, u64>,
    /// The ranges of `free` as (bytes, address), for the search by size.
    free_by_size: BTreeSet<(u64, u64)>,
    /// Allocations, bytes by address. Together with `free` they cover the extents exactly.
    allocated: BTreeMap<u64, u64>,
    /// Bytes of all extents.
    capacity: u64,
    /// Bytes allocated.
    used: u64,
}

#[derive(Clone, Copy, Debug)]
struct Extent {
    bytes: u64,
    /// Number of allocations in the extent.
    allocations: u64,
}

impl Arena {
    /// Creates an arena without extents.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            extents: BTreeMap::new(),
            free: BTreeMap::new(),
            free_by_size: BTreeSet::new(),
            allocated: BTreeMap::new(),
            capacity: 0,
            used: 0,
        }
    }

    /// Returns the bytes of all extents.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the number of bytes allocated, rounding included.
    #[must_use]
    pub const fn used(&self) -> u64 {
        self.used
    }

    /// Adds an extent.
    ///
    /// # Errors
    /// The extent is not a whole number of pages, reaches past the address space, or overlaps another.
    pub fn add_extent(&mut self, address: u64, bytes: u64) -> Result<(), ArenaError> {
        let bad = ArenaError::BadExtent { address, bytes };
        if bytes == 0 || !bytes.is_multiple_of(PAGE) || !address.is_multiple_of(PAGE) {
            return Err(bad);
        }
        let end = address.checked_add(bytes).ok_or(bad)?;
        let before = self.extents.range(..end).next_back();
        if before.is_some_and(|(&start, extent)| start + extent.bytes > address) {
            return Err(bad);
        }
        self.extents.insert(
            address,
            Extent {
                bytes,
                allocations: 0,
            },
        );
        self.insert_free(address, bytes);
        self.capacity += bytes;
        Ok(())
    }

    /// Returns true if an extent starts at `address` and nothing in it is allocated.
    #[must_use]
    pub fn is_unused(&self, address: u64) -> bool {
        let extent = self.extents.get(&address);
        extent.is_some_and(|extent| extent.allocations == 0)
    }

    /// Removes an extent in which nothing is allocated.
    ///
    /// # Errors
    /// No extent starts at `address`, or something in it is allocated.
    pub fn remove_extent(&mut self, address: u64) -> Result<Block, ArenaError> {
        match self.extents.get(&address) {
            Some(&Extent {
                bytes,
                allocations: 0,
            }) => {
                self.extents.remove(&address);
                self.remove_free(address, bytes);
                self.capacity -= bytes;
                Ok(Block { address, bytes })
            }
            _ => Err(ArenaError::ExtentInUse { address }),
        }
    }

    /// Allocates at least `bytes` bytes at a multiple of `align`, which is a power of two.
    ///
    /// # Errors
    /// [`ArenaError::NoRoom`] when another extent would help, [`ArenaError::Impossible`] when none
    /// would.
    pub fn allocate(&mut self, bytes: u64, align: u64) -> Result<Block, ArenaError> {
        let class = if bytes >= PAGE { PAGE } else { GRANULE };
        let impossible = ArenaError::Impossible { bytes, align };
        if bytes == 0 || !align.is_power_of_two() {
            return Err(impossible);
        }
        let align = align.max(class);
        let bytes = bytes.checked_next_multiple_of(class).ok_or(impossible)?;
        let (start, length, address) = self
            .free_by_size
            .range((bytes, 0)..)
            .find_map(|&(length, start)| {
                let address = start.checked_next_multiple_of(align)?;
                (address.checked_add(bytes)? <= start + length).then_some((start, length, address))
            })
            .ok_or(ArenaError::NoRoom {
                bytes,
                align,
                capacity: self.capacity,
                free: self.capacity - self.used,
            })?;
        self.remove_free(start, length);
        if address > start {
            self.insert_free(start, address - start);
        }
        let (end, block_end) = (start + length, address + bytes);
        if block_end < end {
            self.insert_free(block_end, end - block_end);
        }
        self.allocated.insert(address, bytes);
        self.used += bytes;
        if let Some((_, extent)) = self.extents.range_mut(..=address).next_back() {
            extent.allocations += 1;
        }
        Ok(Block { address, bytes })
    }

    /// Frees the allocation that starts at `address`.
    ///
    /// # Errors
    /// No allocation starts at `address`.
    pub fn free(&mut self, address: u64) -> Result<Freed, ArenaError> {
        let bytes = self
            .allocated
            .remove(&address)
            .ok_or(ArenaError::NotAllocated { address })?;
        self.used -= bytes;
        let block = Block { address, bytes };
        let Some((&base, extent)) = self.extents.range_mut(..=address).next_back() else {
            unreachable!("every allocation lies in an extent");
        };
        extent.allocations -= 1;
        let whole = Block {
            address: base,
            bytes: extent.bytes,
        };
        let empty_extent = (extent.allocations == 0).then_some(whole);

        let (mut start, mut end) = (address, block.end());
        let before = self
            .free
            .range(..address)
            .next_back()
            .map(|(&at, &length)| (at, length));
        if let Some((at, length)) =
            before.filter(|&(at, length)| at >= base && at + length == start)
        {
            self.remove_free(at, length);
            start = at;
        }
        if let Some(length) = self.free.get(&end).copied().filter(|_| end < whole.end()) {
            self.remove_free(end, length);
            end += length;
        }
        self.insert_free(start, end - start);
        Ok(Freed {
            block,
            empty_extent,
        })
    }

    /// Returns the allocation that contains `address`.
    #[must_use]
    pub fn find(&self, address: u64) -> Option<Block> {
        let (&start, &bytes) = self.allocated.range(..=address).next_back()?;
        (address - start < bytes).then_some(Block {
            address: start,
            bytes,
        })
    }

    /// Returns all extents, by address.
    pub fn extents(&self) -> impl Iterator<Item = Block> + '_ {
        self.extents.iter().map(|(&address, extent)| Block {
            address,
            bytes: extent.bytes,
        })
    }

    /// Returns the extent that contains `address`.
    #[must_use]
    pub fn extent(&self, address: u64) -> Option<Block> {
        let (&start, extent) = self.extents.range(..=address).next_back()?;
        (address - start < extent.bytes).then_some(Block {
            address: start,
            bytes: extent.bytes,
        })
    }

    /// Returns all allocations, by address.
    pub fn allocations(&self) -> impl Iterator<Item = Block> + '_ {
        self.allocated
            .iter()
            .map(|(&address, &bytes)| Block { address, bytes })
    }

    /// Returns all free ranges, by address.
    pub fn free_ranges(&self) -> impl Iterator<Item = Block> + '_ {
        self.free
            .iter()
            .map(|(&address, &bytes)| Block { address, bytes })
    }

    fn insert_free(&mut self, address: u64, bytes: u64) {
        self.free.insert(address, bytes);
        self.free_by_size.insert((bytes, address));
    }

    fn remove_free(&mut self, address: u64, bytes: u64) {
        self.free.remove(&address);
        self.free_by_size.remove(&(bytes, address));
    }
}
