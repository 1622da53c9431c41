//! Device memory and registered host memory: allocation, and lookup of accessible ranges.
//!
//! A device address is an address of this process. All accesses use addresses that were looked up here. Freed memory is
//! zeroed and stays mapped, so a kernel that races with its own program's `cuMemFree` reads zeros at worst.

mod placed;
mod slabs;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_device::{CuError, Result, file};
use wormhole_lock::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::aperture::{Aperture, ApertureError, to_usize};
use crate::holes::Holes;
use crate::peer_set::{Accesses, PeerSet};
use crate::virtual_memory::VirtualRanges;

/// Alignment and unit of allocations in bytes.
pub const ALIGNMENT: u64 = 512;
/// Size from which allocations are aligned to this size.
const LARGE: u64 = 2 << 20;
/// Page size: alignment of views of files.
const PAGE: u64 = 4096;
/// Bytes of address space for each byte of memory. Programs reserve addresses for several times the memory, and
/// fragmentation must not exhaust them early.
const SPREAD: u64 = 16;
/// Bytes of the smallest aperture.
const SMALLEST_APERTURE: u64 = 1 << 30;

/// Owner of an allocation, which alone may free it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Owned by the program (`cuMemFree`).
    Program,
    /// Owned by the program, and a part of one of its slabs.
    Part,
    /// Owned by the device itself: for a module's variables, or the heap. Each such owner has its own number.
    Internal(u64),
    /// Owned by a memory pool, which belongs to no context.
    Pool,
}

impl Owner {
    /// Creates a unique internal owner.
    pub fn internal() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self::Internal(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

#[derive(Clone, Copy, Debug)]
struct Block {
    bytes: u64,
    owner: Owner,
    /// Accesses allowed to other devices' kernels, for a pool's memory.
    accesses: Accesses,
}

/// A mapping of another device's memory.
#[derive(Clone, Copy, Debug)]
struct View {
    bytes: u64,
    owner: Owner,
    /// Start and bytes of the whole pages around it.
    pages: (u64, u64),
}

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    Read,
    Write,
}

/// A range of accessible memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub start: u64,
    pub bytes: u64,
    pub writable: bool,
}

#[derive(Debug)]
pub(crate) struct AddressMap {
    live: BTreeMap<u64, Block>,
    /// Memory that the program divides itself, bytes by address. Only its parts, which are in `live`, are accessible.
    slabs: BTreeMap<u64, u64>,
    views: BTreeMap<u64, View>,
    pub holes: Holes,
    pub used: u64,
    /// Registered host ranges, address to size.
    registered: BTreeMap<u64, u64>,
    /// Ranges at addresses of the caller's choice, address to size.
    placed: BTreeMap<u64, u64>,
    pub virtual_memory: VirtualRanges,
}

impl AddressMap {
    /// Returns the allocation that contains `bytes` bytes at `address`.
    fn allocation(&self, address: u64, bytes: u64) -> Option<(Range, &Block)> {
        let end = address.checked_add(bytes)?;
        let (&start, block) = self.live.range(..=address).next_back()?;
        let range = Range {
            start,
            bytes: block.bytes,
            writable: true,
        };
        (end <= start + block.bytes).then_some((range, block))
    }

    /// Returns the registration, the view of another process's memory, or the mapped range that contains the bytes. All
    /// devices of a process share these.
    fn shared(&self, address: u64, bytes: u64, device: usize) -> Option<Range> {
        let end = address.checked_add(bytes)?;
        let registered = self.registered.range(..=address).next_back();
        let placed = self.placed.range(..=address).next_back();
        let viewed = self.views.range(..=address).next_back();
        registered
            .into_iter()
            .chain(placed)
            .map(|(start, bytes)| (*start, *bytes))
            .chain(viewed.map(|(start, view)| (*start, view.bytes)))
            .map(|(start, bytes)| Range {
                start,
                bytes,
                writable: true,
            })
            .chain(self.virtual_memory.find(address, device))
            .find(|range| end <= range.start + range.bytes)
    }

    /// Sets the accesses of other devices' kernels to a pool's memory.
    pub fn set_accesses(&mut self, address: u64, accesses: Accesses) {
        if let Some(block) = self.live.get_mut(&address) {
            block.accesses = accesses;
        }
    }
}

/// Memory of one device.
#[derive(Debug)]
pub struct Memory {
    aperture: Aperture,
    limit: u64,
    map: RwLock<AddressMap>,
    peer_set: PeerSet,
}

impl Memory {
    /// Creates memory of `limit` bytes.
    pub fn new(limit: u64) -> std::result::Result<Self, ApertureError> {
        let bytes = limit
            .saturating_mul(SPREAD)
            .checked_next_power_of_two()
            .ok_or(ApertureError::Full { bytes: limit })?
            .max(SMALLEST_APERTURE);
        let aperture = Aperture::reserve(bytes)?;
        let mut holes = Holes::default();
        holes.put(aperture.start(), bytes);
        let map = RwLock::new(AddressMap {
            live: BTreeMap::new(),
            slabs: BTreeMap::new(),
            views: BTreeMap::new(),
            holes,
            used: 0,
            registered: BTreeMap::new(),
            placed: BTreeMap::new(),
            virtual_memory: VirtualRanges::default(),
        });
        Ok(Self {
            aperture,
            limit,
            map,
            peer_set: PeerSet::default(),
        })
    }

    pub(crate) fn peer_set(&self) -> &PeerSet {
        &self.peer_set
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, AddressMap> {
        self.map.read()
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, AddressMap> {
        self.map.write()
    }

    pub(crate) fn aperture(&self) -> &Aperture {
        &self.aperture
    }

    /// Returns the most bytes that can be in use.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns free and total bytes.
    pub fn info(&self) -> (u64, u64) {
        (self.limit - self.read().used, self.limit)
    }

    /// Allocates memory that reads as zeros.
    pub fn allocate(&self, bytes: u64, owner: Owner) -> Result<u64> {
        let mut map = self.write();
        let (address, bytes) = self.take(&mut map, bytes)?;
        map.live.insert(
            address,
            Block {
                bytes,
                owner,
                accesses: Accesses::default(),
            },
        );
        Ok(address)
    }

    /// Takes free memory, and counts it as in use. Returns its address and its bytes, rounded up.
    fn take(&self, map: &mut AddressMap, bytes: u64) -> Result<(u64, u64)> {
        if bytes == 0 {
            return Err(CuError::INVALID_VALUE);
        }
        if bytes > self.limit {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let alignment = if bytes >= LARGE { LARGE } else { ALIGNMENT };
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        if bytes > self.limit - map.used {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let address = map
            .holes
            .take(bytes, alignment)
            .ok_or(CuError::OUT_OF_MEMORY)?;
        if let Err(error) = self.aperture.commit(address, bytes) {
            tracing::warn!(%error, bytes, "the system gives no memory for an allocation");
            map.holes.put(address, bytes);
            return Err(CuError::OUT_OF_MEMORY);
        }
        map.used += bytes;
        Ok((address, bytes))
    }

    /// Checks that `address` is the start of an allocation of this owner.
    pub fn owned(&self, address: u64, owner: Owner) -> Result<()> {
        match self.read().live.get(&address) {
            Some(block) if block.owner == owner => Ok(()),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    /// Frees an allocation and zeroes it.
    pub fn free(&self, address: u64, owner: Owner) -> Result<()> {
        let mut map = self.write();
        match map.live.get(&address) {
            Some(block) if block.owner == owner => {}
            _ => return Err(CuError::INVALID_VALUE),
        }
        self.release(&mut map, address);
        Ok(())
    }

    fn release(&self, map: &mut AddressMap, address: u64) {
        let Some(block) = map.live.remove(&address) else {
            return;
        };
        self.aperture.scrub(address, block.bytes);
        // The whole slab of a part stays in use.
        if block.owner != Owner::Part {
            map.used -= block.bytes;
            map.holes.put(address, block.bytes);
        }
    }

    /// Frees all memory of the context and removes all registrations.
    pub fn clear(&self) {
        let mut map = self.write();
        let gone: Vec<u64> = map
            .live
            .iter()
            .filter(|(_, block)| block.owner != Owner::Pool)
            .map(|(address, _)| *address)
            .collect();
        for address in gone {
            self.release(&mut map, address);
        }
        Self::release_slabs(&mut map);
        let shown = map.views.iter();
        let hidden: Vec<u64> = shown
            .filter(|(_, view)| view.owner != Owner::Pool)
            .map(|(address, _)| *address)
            .collect();
        for address in hidden {
            self.hide(&mut map, address);
        }
        map.registered.clear();
    }

    /// Returns the device's file, with offset and bytes of an allocation of this owner or of a slab of the program.
    pub fn home(&self, address: u64, owner: Owner) -> Result<(OwnedFd, u64, u64)> {
        let map = self.read();
        let block = map.live.get(&address).filter(|block| block.owner == owner);
        let slab = || map.slabs.get(&address).filter(|_| owner == Owner::Program);
        let bytes = block.map(|block| &block.bytes).or_else(slab);
        let bytes = *bytes.ok_or(CuError::INVALID_VALUE)?;
        let (_, offset) = self.aperture.place(address);
        Ok((self.file()?, offset, bytes))
    }

    /// Returns the file that backs the device's memory.
    pub fn file(&self) -> Result<OwnedFd> {
        let (file, _) = self.aperture.place(self.aperture.start());
        file.try_clone_to_owned()
            .map_err(|_| CuError::OUT_OF_MEMORY)
    }

    /// Maps a part of another device's file.
    pub fn open(&self, file: &OwnedFd, offset: u64, bytes: u64, owner: Owner) -> Result<u64> {
        let end = offset.checked_add(bytes).filter(|_| bytes > 0);
        let end = end.and_then(|end| end.checked_next_multiple_of(PAGE));
        let (Some(end), Some(size)) = (end, file::fixed_size(file)) else {
            return Err(CuError::INVALID_VALUE);
        };
        if end > size || !offset.is_multiple_of(ALIGNMENT) {
            return Err(CuError::INVALID_VALUE);
        }
        let first = offset / PAGE * PAGE;
        let alignment = if offset.is_multiple_of(LARGE) {
            LARGE
        } else {
            PAGE
        };
        let mut map = self.write();
        let start = map.holes.take(end - first, alignment);
        let start = start.ok_or(CuError::OUT_OF_MEMORY)?;
        if let Err(error) = self.aperture.show(start, end - first, file, first) {
            tracing::warn!(%error, "memory of another device cannot be shown");
            map.holes.put(start, end - first);
            return Err(CuError::OUT_OF_MEMORY);
        }
        let address = start + (offset - first);
        let view = View {
            bytes,
            owner,
            pages: (start, end - first),
        };
        map.views.insert(address, view);
        Ok(address)
    }

    /// Checks that a view of another device's memory of this owner starts at `address`.
    pub fn opened(&self, address: u64, owner: Owner) -> Result<()> {
        match self.read().views.get(&address) {
            Some(view) if view.owner == owner => Ok(()),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    /// Removes a view created by [`Memory::open`].
    pub fn close(&self, address: u64, owner: Owner) -> Result<()> {
        let mut map = self.write();
        match map.views.get(&address) {
            Some(view) if view.owner == owner => self.hide(&mut map, address),
            _ => return Err(CuError::INVALID_VALUE),
        }
        Ok(())
    }

    fn hide(&self, map: &mut AddressMap, address: u64) {
        let Some(view) = map.views.remove(&address) else {
            return;
        };
        let (start, bytes) = view.pages;
        match self.aperture.hide(start, bytes) {
            Ok(()) => map.holes.put(start, bytes),
            // The addresses stay allocated, so that they are not used again.
            Err(error) => tracing::error!(%error, "memory of another device is shown for good"),
        }
    }

    /// Registers a host range, which makes it accessible.
    pub fn register(&self, address: u64, bytes: u64) -> Result<()> {
        let end = address.checked_add(bytes).ok_or(CuError::INVALID_VALUE)?;
        if bytes == 0
            || (address < self.aperture.start() + self.aperture.bytes()
                && end > self.aperture.start())
        {
            return Err(CuError::INVALID_VALUE);
        }
        let mut map = self.write();
        if let Some((&before, &size)) = map.registered.range(..end).next_back()
            && before + size > address
        {
            return Err(CuError::HOST_MEMORY_ALREADY_REGISTERED);
        }
        map.registered.insert(address, bytes);
        Ok(())
    }

    /// Checks that a registration starts at `address`.
    pub fn registered(&self, address: u64) -> Result<()> {
        let known = self.read().registered.contains_key(&address);
        known
            .then_some(())
            .ok_or(CuError::HOST_MEMORY_NOT_REGISTERED)
    }

    /// Ends a registration.
    pub fn unregister(&self, address: u64) -> Result<()> {
        let known = self.write().registered.remove(&address);
        known.map(drop).ok_or(CuError::HOST_MEMORY_NOT_REGISTERED)
    }

    /// Returns the accessible range that contains all the bytes, if kernels of this device may access it.
    pub fn region(&self, address: u64, bytes: u64) -> Option<Range> {
        let device = self.peer_set.number();
        let own = {
            let map = self.read();
            let allocation = map.allocation(address, bytes).map(|(range, _)| range);
            allocation.or_else(|| map.shared(address, bytes, device))
        };
        own.or_else(|| self.region_of_peers(address, bytes))
    }

    #[cold]
    fn region_of_peers(&self, address: u64, bytes: u64) -> Option<Range> {
        let device = self.peer_set.number();
        if let Some(first) = self.peer_set.first()
            && let Some(range) = first.read().shared(address, bytes, device)
        {
            return Some(range);
        }
        self.peer_set.others().find_map(|(number, peer)| {
            let map = peer.read();
            let (mut range, block) = map.allocation(address, bytes)?;
            if block.owner == Owner::Pool {
                range.writable = block.accesses.allows(device, Use::Write);
                return block.accesses.allows(device, Use::Read).then_some(range);
            }
            self.peer_set.reaches(number).then_some(range)
        })
    }

    /// Checks like [`Memory::check`], for memory that is not this device's own.
    #[cold]
    fn check_peers(&self, address: u64, bytes: u64, intent: Use) -> Result<()> {
        if let Some(first) = self.peer_set.first() {
            match first.check_own(address, bytes, intent, self.peer_set.number()) {
                Err(CuError::INVALID_VALUE) => {}
                found => return found,
            }
        }
        let found = self
            .peer_set
            .others()
            .any(|(_, peer)| peer.read().allocation(address, bytes).is_some());
        if found {
            Ok(())
        } else {
            Err(CuError::INVALID_VALUE)
        }
    }

    fn check_own(&self, address: u64, bytes: u64, intent: Use, device: usize) -> Result<()> {
        let map = self.read();
        let allocation = map.allocation(address, bytes).map(|(range, _)| range);
        match allocation.or_else(|| map.shared(address, bytes, device)) {
            Some(range) if range.writable || intent == Use::Read => Ok(()),
            None if !map.virtual_memory.maps(address, bytes) => Err(CuError::INVALID_VALUE),
            _ => Err(CuError::ILLEGAL_ADDRESS),
        }
    }

    /// Returns the memory of the first device, which keeps the state that all devices of the process share.
    pub(crate) fn shared(self: &Arc<Self>) -> Arc<Self> {
        self.peer_set.first().unwrap_or_else(|| Arc::clone(self))
    }

    /// Counts memory as in use. Fails with OUT_OF_MEMORY if the limit would be exceeded.
    pub(crate) fn charge(&self, bytes: u64) -> Result<()> {
        let mut map = self.write();
        if bytes > self.limit - map.used {
            return Err(CuError::OUT_OF_MEMORY);
        }
        map.used += bytes;
        Ok(())
    }

    pub(crate) fn discharge(&self, bytes: u64) {
        self.write().used -= bytes;
    }

    /// Checks that all of the range lies in one allocation, one registration or mapped memory, and allows this use.
    /// Copies and similar work may use allocations of every device of the process.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS` for mapped memory that does not allow that use, `CUDA_ERROR_INVALID_VALUE`
    /// for everything else.
    pub fn check(&self, address: u64, bytes: u64, intent: Use) -> Result<()> {
        match self.check_own(address, bytes, intent, self.peer_set.number()) {
            Err(CuError::INVALID_VALUE) => self.check_peers(address, bytes, intent),
            checked => checked,
        }
    }
}

/// Returns a pointer to the byte at an address of the device.
pub fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(to_usize(address))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Memory {
        Memory::new(64 << 20).expect("an aperture")
    }

    #[test]
    fn allocations_are_apart_aligned_and_counted() {
        let memory = memory();
        let mut all = Vec::new();
        for bytes in [1, 512, 513, 4096, 3 << 20, 7] {
            let address = memory.allocate(bytes, Owner::Program).expect("allocate");
            assert_eq!(address % if bytes >= LARGE { LARGE } else { ALIGNMENT }, 0);
            assert!(memory.check(address, bytes, Use::Read).is_ok());
            all.push((address, bytes.next_multiple_of(ALIGNMENT)));
        }
        let used: u64 = all.iter().map(|(_, bytes)| bytes).sum();
        assert_eq!(memory.info(), ((64 << 20) - used, 64 << 20));
        all.sort_unstable();
        assert!(
            all.windows(2)
                .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0)
        );
        for (address, _) in all {
            memory.free(address, Owner::Program).expect("free");
            assert_eq!(memory.region(address, 1), None);
            assert_eq!(
                memory.free(address, Owner::Program),
                Err(CuError::INVALID_VALUE)
            );
        }
        assert_eq!(memory.info().0, 64 << 20);
        assert_eq!(memory.read().holes.all().len(), 1, "holes were merged");
    }

    #[test]
    fn nothing_beyond_the_limit_is_given() {
        let memory = memory();
        assert_eq!(
            memory.allocate((64 << 20) + 1, Owner::Program),
            Err(CuError::OUT_OF_MEMORY)
        );
        let half = memory.allocate(40 << 20, Owner::Program).expect("allocate");
        assert_eq!(
            memory.allocate(40 << 20, Owner::Program),
            Err(CuError::OUT_OF_MEMORY)
        );
        memory.free(half, Owner::Program).expect("free");
        memory
            .allocate(40 << 20, Owner::Program)
            .expect("allocate again");
        assert_eq!(
            memory.allocate(0, Owner::Program),
            Err(CuError::INVALID_VALUE)
        );
        assert_eq!(
            memory.allocate(u64::MAX, Owner::Program),
            Err(CuError::OUT_OF_MEMORY)
        );
    }

    #[test]
    fn a_range_past_an_allocation_is_refused() {
        let memory = memory();
        let address = memory.allocate(1024, Owner::Program).expect("allocate");
        assert_eq!(
            memory.check(address, 1025, Use::Read),
            Err(CuError::INVALID_VALUE)
        );
        assert_eq!(
            memory.check(address + 1024, 1, Use::Read),
            Err(CuError::INVALID_VALUE)
        );
        assert_eq!(
            memory.check(address, u64::MAX, Use::Read),
            Err(CuError::INVALID_VALUE)
        );
        assert_eq!(
            memory.check(address + 1020, 8, Use::Read),
            Err(CuError::INVALID_VALUE)
        );
        assert_eq!(
            memory.check(u64::MAX, 8, Use::Read),
            Err(CuError::INVALID_VALUE)
        );
        let whole = Range {
            start: address,
            bytes: 1024,
            writable: true,
        };
        assert_eq!(memory.region(address + 1020, 4), Some(whole));
        assert_eq!(memory.region(0, 1), None);
    }

    #[test]
    fn the_device_s_own_memory_is_not_the_program_s_to_free() {
        let memory = memory();
        let owner = Owner::internal();
        let address = memory.allocate(64, owner).expect("allocate");
        assert_eq!(
            memory.free(address, Owner::Program),
            Err(CuError::INVALID_VALUE)
        );
        memory.free(address, owner).expect("free");
    }

    #[test]
    fn registrations_do_not_overlap_and_are_separate_ranges() {
        let memory = memory();
        memory.register(0x10000, 0x1000).expect("register");
        memory.register(0x11000, 0x1000).expect("register");
        for (address, bytes) in [(0x10000, 1), (0xffff, 2), (0x10fff, 1), (0xf000, 0x10000)] {
            assert_eq!(
                memory.register(address, bytes),
                Err(CuError::HOST_MEMORY_ALREADY_REGISTERED)
            );
        }
        assert!(memory.check(0x10800, 0x800, Use::Read).is_ok());
        assert_eq!(
            memory.check(0x10800, 0x1000, Use::Read),
            Err(CuError::INVALID_VALUE)
        );
        memory.unregister(0x10000).expect("unregister");
        assert_eq!(
            memory.unregister(0x10000),
            Err(CuError::HOST_MEMORY_NOT_REGISTERED)
        );
        assert_eq!(memory.region(0x10800, 4), None);
    }
}
