//! Virtual memory management: reserved addresses, and memory mapped there.
//!
//! Mappable memory is a part of a file, and a mapping is another view of it at addresses of the aperture. Lookups do
//! not find memory without access, so kernels and copies fault there. An unmapped range reads as zeros, so a kernel
//! that races with the unmapping reads zeros at worst.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use wormhole_device::{
    Access, Comparison, CuError, Found, Granularity, RawMemory, RawStream, Result, Shared, file,
};
use wormhole_ring::band;

use crate::aperture::Aperture;
use crate::memory::{AddressMap, Memory, Range, Use};
use crate::peer_set::Accesses;

/// Granularity of sizes and addresses, as on existing GPUs.
const GRANULARITY: u64 = 2 << 20;

/// Backing of mappable memory.
#[derive(Debug)]
enum Home {
    /// In the aperture's own file, at the offset of these addresses, which are allocated for nothing else.
    Own(u64),
    /// In a separate file, so that other processes can hold it for any time.
    File(OwnedFd),
    /// In a file of another process. It does not count as this device's memory.
    Foreign(OwnedFd),
}

#[derive(Debug)]
struct Physical {
    home: Home,
    bytes: u64,
    /// Number of the device that the memory belongs to.
    device: usize,
    mappings: usize,
    /// Set once its handle is released. The memory is freed with its last mapping.
    released: bool,
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    bytes: u64,
    memory: u64,
    accesses: Accesses,
}

/// Tables of reservations, mappings and mappable memory.
#[derive(Debug, Default)]
pub struct VirtualRanges {
    /// Reservations, bytes by address.
    reserved: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
    memories: BTreeMap<u64, Physical>,
    next: u64,
}

impl VirtualRanges {
    /// Returns the largest range around an address that consists of adjacent mappings with the same access for a
    /// device.
    pub fn find(&self, address: u64, device: usize) -> Option<Range> {
        let may = |mapping: &Mapping| {
            [Use::Read, Use::Write].map(|intent| mapping.accesses.allows(device, intent))
        };
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        let [readable, writable] = may(mapping);
        if !readable || address - start >= mapping.bytes {
            return None;
        }
        let (mut from, mut to) = (start, start + mapping.bytes);
        for (&before, other) in self.mappings.range(..start).rev() {
            if before + other.bytes != from || may(other) != may(mapping) {
                break;
            }
            from = before;
        }
        for (&behind, other) in self.mappings.range(to..) {
            if behind != to || may(other) != may(mapping) {
                break;
            }
            to += other.bytes;
        }
        Some(Range {
            start: from,
            bytes: to - from,
            writable,
        })
    }

    /// Returns true if adjacent mappings cover a range, with any access.
    pub fn maps(&self, address: u64, bytes: u64) -> bool {
        let Some((&first, _)) = self.mappings.range(..=address).next_back() else {
            return false;
        };
        let mut at = first;
        for (&start, mapping) in self.mappings.range(first..) {
            if start != at {
                return false;
            }
            at += mapping.bytes;
            if at > address && at - address >= bytes {
                return true;
            }
        }
        false
    }

    /// Returns the starts of the mappings that cover a range exactly, without a gap.
    fn filled(&self, address: u64, bytes: u64) -> Result<Vec<u64>> {
        let end = address.checked_add(bytes).ok_or(CuError::INVALID_VALUE)?;
        let mut at = address;
        let mut starts = Vec::new();
        for (&start, mapping) in self.mappings.range(address..end) {
            if start != at {
                return Err(CuError::INVALID_VALUE);
            }
            starts.push(start);
            at += mapping.bytes;
        }
        if at == end && bytes != 0 {
            Ok(starts)
        } else {
            Err(CuError::INVALID_VALUE)
        }
    }

    fn add(&mut self, home: Home, bytes: u64, device: usize) -> RawMemory {
        self.next += 1;
        let physical = Physical {
            home,
            bytes,
            device,
            mappings: 0,
            released: false,
        };
        self.memories.insert(self.next, physical);
        RawMemory(self.next)
    }

    fn is_mapped(&self, address: u64, bytes: u64) -> bool {
        let before = self.mappings.range(..address + bytes).next_back();
        before.is_some_and(|(start, mapping)| start + mapping.bytes > address)
    }
}

impl Home {
    fn show(&self, aperture: &Aperture, address: u64, bytes: u64) -> io::Result<()> {
        match self {
            Self::Own(home) => {
                let (file, offset) = aperture.place(*home);
                aperture.show(address, bytes, &file, offset)
            }
            Self::File(file) | Self::Foreign(file) => aperture.show(address, bytes, file, 0),
        }
    }
}

impl AddressMap {
    /// Frees mappable memory that has neither a handle nor mappings. Returns its device and its bytes.
    fn sweep(&mut self, memory: u64, aperture: &Aperture) -> Option<(usize, u64)> {
        let memories = &mut self.virtual_memory.memories;
        let gone = |physical: &Physical| physical.released && physical.mappings == 0;
        if !memories.get(&memory).is_some_and(gone) {
            return None;
        }
        let physical = memories.remove(&memory)?;
        match physical.home {
            Home::Own(address) => {
                aperture.forget(address, physical.bytes);
                self.holes.put(address, physical.bytes);
            }
            Home::File(_) => {}
            Home::Foreign(_) => return None,
        }
        Some((physical.device, physical.bytes))
    }
}

fn is_granular(value: u64) -> bool {
    value.is_multiple_of(GRANULARITY)
}

impl Memory {
    pub fn reserve(&self, bytes: u64, alignment: u64, hint: u64) -> Result<u64> {
        if bytes == 0 || !is_granular(bytes) || (alignment != 0 && !alignment.is_power_of_two()) {
            return Err(CuError::INVALID_VALUE);
        }
        let mut map = self.write();
        let alignment = alignment.max(GRANULARITY);
        let hinted = hint != 0 && hint.is_multiple_of(alignment) && map.holes.take_at(hint, bytes);
        let address = match hinted {
            true => hint,
            false => {
                let found = map.holes.take(bytes, alignment);
                found.ok_or(CuError::OUT_OF_MEMORY)?
            }
        };
        map.virtual_memory.reserved.insert(address, bytes);
        Ok(address)
    }

    pub fn unreserve(&self, address: u64, bytes: u64) -> Result<()> {
        let mut map = self.write();
        let known = map.virtual_memory.reserved.get(&address) == Some(&bytes);
        if !known || map.virtual_memory.is_mapped(address, bytes) {
            return Err(CuError::INVALID_VALUE);
        }
        map.virtual_memory.reserved.remove(&address);
        self.aperture().forget(address, bytes);
        map.holes.put(address, bytes);
        Ok(())
    }

    /// Creates mappable memory of the device `owner`, which may be another device than `self`.
    pub fn create_memory(&self, owner: &Self, bytes: u64, exportable: bool) -> Result<RawMemory> {
        if bytes == 0 || !is_granular(bytes) {
            return Err(CuError::INVALID_VALUE);
        }
        owner.charge(bytes)?;
        let made = self.make_memory(owner.peer_set().number(), bytes, exportable);
        made.inspect_err(|_| owner.discharge(bytes))
    }

    fn make_memory(&self, device: usize, bytes: u64, exportable: bool) -> Result<RawMemory> {
        let mut map = self.write();
        let home = if exportable {
            Home::File(file::anonymous(bytes).map_err(|error| {
                tracing::warn!(%error, bytes, "the system gives no mappable memory");
                CuError::OUT_OF_MEMORY
            })?)
        } else {
            let found = map.holes.take(bytes, GRANULARITY);
            Home::Own(found.ok_or(CuError::OUT_OF_MEMORY)?)
        };
        Ok(map.virtual_memory.add(home, bytes, device))
    }

    /// Returns the file of exportable memory.
    pub fn share_memory(&self, memory: RawMemory) -> Result<Shared> {
        let map = self.read();
        let physical = match map.virtual_memory.memories.get(&memory.0) {
            Some(physical) if !physical.released => physical,
            _ => return Err(CuError::INVALID_HANDLE),
        };
        let file = match &physical.home {
            Home::Own(_) => return Err(CuError::INVALID_VALUE),
            Home::File(file) | Home::Foreign(file) => file.try_clone(),
        };
        Ok(Shared {
            descriptor: Some(file.map_err(|_| CuError::OUT_OF_MEMORY)?),
            ..Shared::described([0; 8])
        })
    }

    /// Imports memory in another process's file.
    pub fn open_memory(&self, owner: &Self, found: Found) -> Result<(RawMemory, u64)> {
        let file = found.descriptor.ok_or(CuError::INVALID_VALUE)?;
        let bytes = file::fixed_size(&file).filter(|bytes| *bytes != 0 && is_granular(*bytes));
        let bytes = bytes.ok_or(CuError::INVALID_VALUE)?;
        let (home, device) = (Home::Foreign(file), owner.peer_set().number());
        let memory = self.write().virtual_memory.add(home, bytes, device);
        Ok((memory, bytes))
    }

    pub fn release_memory(&self, memory: RawMemory) -> Result<()> {
        let mut map = self.write();
        match map.virtual_memory.memories.get_mut(&memory.0) {
            Some(physical) if !physical.released => physical.released = true,
            _ => return Err(CuError::INVALID_HANDLE),
        }
        let swept = map.sweep(memory.0, self.aperture());
        drop(map);
        self.swept(swept);
        Ok(())
    }

    /// Discharges the bytes of freed memory from their devices.
    fn swept(&self, swept: impl IntoIterator<Item = (usize, u64)>) {
        for (device, bytes) in swept {
            if device == self.peer_set().number() {
                self.discharge(bytes);
            } else if let Some(owner) = self.peer_set().member(device) {
                owner.discharge(bytes);
            }
        }
    }

    pub fn map(&self, address: u64, bytes: u64, memory: RawMemory) -> Result<()> {
        let mut map = self.write();
        let map = &mut map.virtual_memory;
        let end = address.checked_add(bytes).ok_or(CuError::INVALID_VALUE)?;
        let reserved = map.reserved.range(..=address).next_back();
        let inside = reserved.is_some_and(|(start, length)| end <= start + length);
        if bytes == 0 || !is_granular(address) || !inside || map.is_mapped(address, bytes) {
            return Err(CuError::INVALID_VALUE);
        }
        let physical = match map.memories.get_mut(&memory.0) {
            Some(physical) if !physical.released => physical,
            _ => return Err(CuError::INVALID_HANDLE),
        };
        if physical.bytes != bytes {
            return Err(CuError::INVALID_VALUE);
        }
        let shown = physical.home.show(self.aperture(), address, bytes);
        shown.map_err(|error| {
            tracing::warn!(%error, bytes, "memory cannot be mapped");
            CuError::OUT_OF_MEMORY
        })?;
        physical.mappings += 1;
        let mapping = Mapping {
            bytes,
            memory: memory.0,
            accesses: Accesses::default(),
        };
        map.mappings.insert(address, mapping);
        Ok(())
    }

    pub fn unmap(&self, address: u64, bytes: u64) -> Result<()> {
        let mut map = self.write();
        let starts = map.virtual_memory.filled(address, bytes)?;
        let mut swept = Vec::new();
        for start in starts {
            let Some(mapping) = map.virtual_memory.mappings.get(&start).copied() else {
                continue;
            };
            self.aperture()
                .hide(start, mapping.bytes)
                .map_err(|error| {
                    tracing::warn!(%error, "a mapping cannot be ended");
                    CuError::OUT_OF_MEMORY
                })?;
            map.virtual_memory.mappings.remove(&start);
            if let Some(physical) = map.virtual_memory.memories.get_mut(&mapping.memory) {
                physical.mappings -= 1;
            }
            swept.extend(map.sweep(mapping.memory, self.aperture()));
        }
        drop(map);
        self.swept(swept);
        Ok(())
    }

    pub fn set_access(
        &self,
        address: u64,
        bytes: u64,
        device: usize,
        access: Access,
    ) -> Result<()> {
        let mut map = self.write();
        let map = &mut map.virtual_memory;
        for start in map.filled(address, bytes)? {
            if let Some(mapping) = map.mappings.get_mut(&start) {
                mapping.accesses.set(device, access);
            }
        }
        Ok(())
    }
}

impl wormhole_device::VirtualMemory for crate::CpuDevice {
    fn granularity(&self) -> Result<Granularity> {
        Ok(Granularity {
            minimum: GRANULARITY,
            recommended: GRANULARITY,
        })
    }

    fn create_memory(&self, bytes: u64, handle_types: u32) -> Result<RawMemory> {
        self.context()?;
        let exportable = handle_types != 0;
        self.memory
            .shared()
            .create_memory(&self.memory, bytes, exportable)
    }

    fn map(&self, address: u64, bytes: u64, memory: RawMemory) -> Result<()> {
        self.context()?;
        self.memory.shared().map(address, bytes, memory)
    }

    fn set_access(&self, address: u64, bytes: u64, access: Access) -> Result<()> {
        self.context()?;
        let device = self.memory.peer_set().number();
        self.memory
            .shared()
            .set_access(address, bytes, device, access)
    }

    fn place(&self, address: u64, bytes: u64) -> Result<()> {
        self.context()?;
        self.memory.place(address, bytes)
    }

    fn displace(&self, address: u64, bytes: u64) -> Result<()> {
        self.memory.withdraw(address, bytes)?;
        // Work that began before may have looked the range up.
        self.idle()?;
        // SAFETY: the range was placed, and neither the device's work nor the caller accesses it.
        unsafe { band::release(address, bytes) };
        Ok(())
    }

    fn differing(&self, comparison: &Comparison, stream: RawStream) -> Result<Vec<bool>> {
        self.compared(comparison, stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Use, pointer};

    const UNIT: u64 = GRANULARITY;

    fn memory() -> Memory {
        Memory::new(64 << 20).expect("an aperture")
    }

    fn byte(address: u64) -> u8 {
        // SAFETY: addresses of the aperture that are or were mapped stay readable.
        unsafe { pointer(address).read_volatile() }
    }

    #[test]
    fn one_memory_is_seen_at_two_addresses_and_outlives_its_handle() {
        let memory = memory();
        let base = memory.reserve(8 * UNIT, 0, 0).expect("reserve");
        let made = memory.create_memory(&memory, UNIT, false).expect("create");
        assert_eq!(memory.info().0, (64 << 20) - UNIT);
        memory.map(base, UNIT, made).expect("map");
        memory.map(base + 4 * UNIT, UNIT, made).expect("map again");
        memory.release_memory(made).expect("release");
        assert_eq!(memory.release_memory(made), Err(CuError::INVALID_HANDLE));
        // SAFETY: mapped above.
        unsafe { pointer(base + 5).write_volatile(7) };
        assert_eq!(byte(base + 4 * UNIT + 5), 7);
        memory.unmap(base, UNIT).expect("unmap");
        assert_eq!(
            byte(base + 5),
            0,
            "the other view is not seen here any more"
        );
        assert_eq!(byte(base + 4 * UNIT + 5), 7);
        assert_eq!(memory.info().0, (64 << 20) - UNIT);
        assert_eq!(
            memory.unreserve(base, 8 * UNIT),
            Err(CuError::INVALID_VALUE)
        );
        memory.unmap(base + 4 * UNIT, UNIT).expect("unmap");
        assert_eq!(memory.info().0, 64 << 20);
        memory.unreserve(base, 8 * UNIT).expect("unreserve");
    }

    #[test]
    fn only_what_has_access_is_found_and_neighbours_are_one_range() {
        let memory = memory();
        let base = memory.reserve(4 * UNIT, 0, 0).expect("reserve");
        for index in 0..3 {
            let made = memory.create_memory(&memory, UNIT, false).expect("create");
            memory.map(base + index * UNIT, UNIT, made).expect("map");
        }
        let read = |address, bytes| memory.check(address, bytes, Use::Read);
        let write = |address, bytes| memory.check(address, bytes, Use::Write);
        assert_eq!(read(base, 1), Err(CuError::ILLEGAL_ADDRESS));
        memory
            .set_access(base, 2 * UNIT, 0, Access::ReadWrite)
            .expect("access");
        memory
            .set_access(base + 2 * UNIT, UNIT, 0, Access::Read)
            .expect("access");
        assert_eq!(read(base + UNIT - 8, 16), Ok(()));
        assert_eq!(write(base, 2 * UNIT), Ok(()));
        assert_eq!(read(base + 2 * UNIT, UNIT), Ok(()));
        assert_eq!(write(base + 2 * UNIT, 1), Err(CuError::ILLEGAL_ADDRESS));
        assert_eq!(read(base + 3 * UNIT, 1), Err(CuError::INVALID_VALUE));
        assert_eq!(read(base + 3 * UNIT - 8, 16), Err(CuError::INVALID_VALUE));
        assert!(memory.set_access(base, 4 * UNIT, 0, Access::Read).is_err());
        assert!(memory.unmap(base + UNIT, 4 * UNIT).is_err());
        memory.unmap(base, 3 * UNIT).expect("unmap all");
        let gone = memory.check(base, 1, Use::Read);
        assert_eq!(gone, Err(CuError::INVALID_VALUE));
    }

    #[test]
    fn nothing_is_mapped_where_it_may_not_be() {
        let memory = memory();
        let base = memory.reserve(2 * UNIT, 1 << 30, 0).expect("reserve");
        assert!(base.is_multiple_of(1 << 30));
        let two = memory
            .create_memory(&memory, 2 * UNIT, false)
            .expect("create");
        assert!(
            memory.map(base + UNIT, 2 * UNIT, two).is_err(),
            "past the end"
        );
        assert!(memory.map(base, UNIT, two).is_err(), "a part");
        assert!(memory.map(base + 4096, 2 * UNIT, two).is_err(), "unaligned");
        memory.map(base, 2 * UNIT, two).expect("map");
        assert!(memory.map(base, 2 * UNIT, two).is_err(), "mapped already");
        assert!(memory.reserve(UNIT + 1, 0, 0).is_err());
        assert!(memory.reserve(UNIT, 3, 0).is_err());
        assert!(memory.create_memory(&memory, 1, false).is_err());
        assert_eq!(
            memory.create_memory(&memory, 64 << 20, false),
            Err(CuError::OUT_OF_MEMORY)
        );
    }

    #[test]
    fn a_hint_that_is_free_is_followed() {
        let memory = memory();
        let base = memory.reserve(UNIT, 0, 0).expect("reserve");
        let wanted = base + 64 * UNIT;
        assert_eq!(memory.reserve(UNIT, 0, wanted), Ok(wanted));
        assert_ne!(memory.reserve(UNIT, 0, wanted), Ok(wanted));
    }
}
