//! Loads and stores of a warp in every state space.

use std::sync::atomic::{Ordering, fence};

use super::check::{Kind, Watch};
use super::frame::{Frame, Local};
use super::global::{Global, Word, all_within, read_vector, within, write_vector};
use super::{LOCAL_WINDOW, PARAM_WINDOW, Region, SHARED_WINDOW};
use crate::alu::{LANES, Row};
use crate::decode::insn::{self, Access, AddressSpace, Base};
use crate::error::FaultKind;
use crate::limits::{MAX_LOCAL_BYTES, MAX_SHARED_BYTES};

/// Fault, and the lane that caused it.
#[derive(Debug)]
pub(super) struct LaneFault {
    pub kind: FaultKind,
    pub lane: u32,
}

/// Iterator over the lanes of a mask, from the lowest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lanes(pub u32);

impl Iterator for Lanes {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let lane = self.0.trailing_zeros() as usize;
        self.0 &= self.0 - 1;
        Some(lane)
    }
}

/// Memory spaces of a warp's lanes.
pub(super) struct Spaces<'w, 'a> {
    pub global: &'w mut Global<'a>,
    pub shared: &'w mut [u8],
    pub local: &'w mut Local,
    pub params: &'w [u8],
    /// Checker to which accesses are reported, if the launch is checked.
    pub watch: Option<Watch<'w>>,
}

/// Address, resolved to a space.
enum Place {
    Global(*mut u8),
    Shared(usize),
    Local(u64),
    Param(usize),
}

impl Spaces<'_, '_> {
    fn place(
        &mut self,
        space: AddressSpace,
        lane: usize,
        address: u64,
        bytes: u32,
        write: bool,
    ) -> Result<Place, FaultKind> {
        let illegal = || FaultKind::IllegalAddress {
            address,
            bytes,
            write,
        };
        if address & u64::from(bytes - 1) != 0 {
            return Err(FaultKind::Misaligned { address, bytes });
        }
        let (space, offset) = match space {
            AddressSpace::Generic => resolve(address),
            AddressSpace::Global => (space, address),
            // These spaces are addressed by 32-bit registers too, whose slots may be wider.
            space => (space, address & u64::from(u32::MAX)),
        };
        match space {
            AddressSpace::Global | AddressSpace::Generic => self
                .global
                .translate(address, bytes, write)
                .map(Place::Global),
            AddressSpace::Shared => {
                let start = usize::try_from(offset).map_err(|_| illegal())?;
                let end = start.checked_add(bytes as usize).ok_or_else(illegal)?;
                if end <= self.shared.len() {
                    Ok(Place::Shared(start))
                } else {
                    Err(illegal())
                }
            }
            AddressSpace::Local => self
                .local
                .slice(lane, offset, bytes)
                .map(|_| Place::Local(offset))
                .ok_or_else(illegal),
            AddressSpace::Param => {
                let start = usize::try_from(offset).map_err(|_| illegal())?;
                let end = start.checked_add(bytes as usize).ok_or_else(illegal)?;
                if end <= self.params.len() && !write {
                    Ok(Place::Param(start))
                } else {
                    Err(illegal())
                }
            }
        }
    }

    /// Reads one element, off the fast path.
    pub(super) fn read<T: Word>(
        &mut self,
        space: AddressSpace,
        lane: usize,
        address: u64,
    ) -> Result<T, FaultKind> {
        let size = T::BYTES as usize;
        let place = self.place(space, lane, address, T::BYTES, false)?;
        if self.watch.is_some() {
            self.watch_element(lane, (space, address), Kind::Read, &[0; 8][..size]);
        }
        Ok(match place {
            // SAFETY: `translate` found the aligned bytes inside a region that stays valid.
            Place::Global(at) => unsafe { T::read(at) },
            Place::Shared(at) => T::of(&self.shared[at..at + size]),
            Place::Local(at) => T::of(self.local.slice(lane, at, T::BYTES).unwrap_or(&[])),
            Place::Param(at) => T::of(&self.params[at..at + size]),
        })
    }

    /// Returns the pointer for an atomic operation on global memory, or the bytes of other memory.
    pub(super) fn atomic_target(
        &mut self,
        space: AddressSpace,
        lane: usize,
        address: u64,
        bytes: u32,
    ) -> Result<Target<'_>, FaultKind> {
        Ok(match self.place(space, lane, address, bytes, true)? {
            Place::Global(at) => Target::Global(at),
            Place::Shared(at) => Target::Private(&mut self.shared[at..at + bytes as usize]),
            Place::Local(at) => {
                Target::Private(self.local.slice_mut(lane, at, bytes).unwrap_or(&mut []))
            }
            Place::Param(_) => return Err(FaultKind::AddressSpace { address }),
        })
    }

    /// Writes one element, off the fast path.
    pub(super) fn write<T: Word>(
        &mut self,
        space: AddressSpace,
        lane: usize,
        address: u64,
        value: T,
    ) -> Result<(), FaultKind> {
        let size = T::BYTES as usize;
        let place = self.place(space, lane, address, T::BYTES, true)?;
        if self.watch.is_some() {
            let bytes = value.put().to_le_bytes();
            self.watch_element(lane, (space, address), Kind::Write, &bytes[..size]);
        }
        match place {
            // SAFETY: `translate` found the aligned bytes inside a writable region that stays valid.
            Place::Global(at) => unsafe { value.write(at) },
            Place::Shared(at) => value.store(&mut self.shared[at..at + size]),
            Place::Local(at) => {
                if let Some(bytes) = self.local.slice_mut(lane, at, T::BYTES) {
                    value.store(bytes);
                }
            }
            Place::Param(_) => {}
        }
        Ok(())
    }

    /// Executes a load.
    pub(super) fn load(
        &mut self,
        frame: &mut Frame,
        access: &Access,
        mask: u32,
    ) -> Result<(), LaneFault> {
        if self.watch.is_some() {
            self.watch_access(frame, access, mask, Kind::Read);
            // The elements of this load are reported; `read` must not report them again.
            self.watch = None;
        }
        match (access.size, access.signed) {
            (1, false) => self.load_as::<u8>(frame, access, mask),
            (1, true) => self.load_as::<i8>(frame, access, mask),
            (2, false) => self.load_as::<u16>(frame, access, mask),
            (2, true) => self.load_as::<i16>(frame, access, mask),
            (4, false) => self.load_as::<u32>(frame, access, mask),
            (4, true) => self.load_as::<i32>(frame, access, mask),
            _ => self.load_as::<u64>(frame, access, mask),
        }?;
        if access.order.acquire {
            fence(Ordering::SeqCst);
        }
        Ok(())
    }

    fn load_as<T: Word>(
        &mut self,
        frame: &mut Frame,
        access: &Access,
        mask: u32,
    ) -> Result<(), LaneFault> {
        if access.space == AddressSpace::Param && access.base == Base::Absolute {
            return self.load_param::<T>(frame, access, mask);
        }
        let addresses = addresses(frame, access.base, access.offset);
        match (access.space, &access.regs[..]) {
            (AddressSpace::Global | AddressSpace::Generic, &[reg]) => {
                let row = &mut frame.rows[reg as usize];
                let mut region = self.global.latest();
                if mask == u32::MAX
                    && let Some(host) = all_within(&region, &addresses, T::BYTES, false)
                {
                    for (slot, address) in row.iter_mut().zip(&addresses) {
                        let at = host.wrapping_add(offset_in(&region, *address));
                        // SAFETY: `all_within` found every element aligned and inside the region.
                        *slot = unsafe { T::read(at) }.put();
                    }
                    return Ok(());
                }
                for lane in Lanes(mask) {
                    let address = addresses[lane];
                    let Some(at) = within(&region, address, T::BYTES, false) else {
                        row[lane] = self.load_slowly::<T>(access.space, lane, address)?;
                        region = self.global.latest();
                        continue;
                    };
                    // SAFETY: `within` found the aligned element inside a region that stays valid.
                    row[lane] = unsafe { T::read(at) }.put();
                }
                Ok(())
            }
            (AddressSpace::Shared, &[reg]) => {
                let row = &mut frame.rows[reg as usize];
                for lane in Lanes(mask) {
                    let address = addresses[lane];
                    row[lane] = match shared_slice(self.shared, address, T::BYTES) {
                        Some(bytes) => T::of(bytes).put(),
                        None => self.load_slowly::<T>(AddressSpace::Shared, lane, address)?,
                    };
                }
                Ok(())
            }
            _ => self.load_pieces::<T>(frame, access, mask, &addresses),
        }
    }

    /// Loads one element of one lane from any memory.
    #[cold]
    fn load_slowly<T: Word>(
        &mut self,
        space: AddressSpace,
        lane: usize,
        address: u64,
    ) -> Result<u64, LaneFault> {
        let value: Result<T, FaultKind> = self.read(space, lane, address);
        value.map(T::put).map_err(|kind| lane_fault(kind, lane))
    }

    /// Loads vectors, and elements of the less frequent spaces.
    fn load_pieces<T: Word>(
        &mut self,
        frame: &mut Frame,
        access: &Access,
        mask: u32,
        addresses: &Row,
    ) -> Result<(), LaneFault> {
        let size = T::BYTES as usize;
        let total = T::BYTES * u32::try_from(access.regs.len()).unwrap_or(1);
        for lane in Lanes(mask) {
            let place = self.place(access.space, lane, addresses[lane], total, false);
            let bytes = match place.map_err(|kind| lane_fault(kind, lane))? {
                Place::Global(at) => {
                    let put =
                        |index: usize, value| frame.rows[access.regs[index] as usize][lane] = value;
                    // SAFETY: `place` found all elements, aligned, inside a region that stays valid.
                    unsafe { read_vector::<T>(at, access.regs.len(), put) };
                    continue;
                }
                Place::Shared(at) => &self.shared[at..at + total as usize],
                Place::Local(at) => self.local.slice(lane, at, total).unwrap_or(&[]),
                Place::Param(at) => &self.params[at..at + total as usize],
            };
            for (bytes, &reg) in bytes.chunks_exact(size).zip(&access.regs) {
                frame.rows[reg as usize][lane] = T::of(bytes).put();
            }
        }
        Ok(())
    }

    /// Loads a parameter at a constant offset: all lanes load the same value.
    fn load_param<T: Word>(
        &mut self,
        frame: &mut Frame,
        access: &Access,
        mask: u32,
    ) -> Result<(), LaneFault> {
        let lane = mask.trailing_zeros() as usize;
        for (index, &reg) in access.regs.iter().enumerate() {
            let address = access
                .offset
                .cast_unsigned()
                .wrapping_add(index as u64 * u64::from(T::BYTES));
            let value: T = self
                .read(AddressSpace::Param, lane, address)
                .map_err(|kind| lane_fault(kind, lane))?;
            crate::alu::commit(&mut frame.rows[reg as usize], &[value.put(); LANES], mask);
        }
        Ok(())
    }

    /// Executes a store.
    pub(super) fn store(
        &mut self,
        frame: &Frame,
        access: &Access,
        mask: u32,
    ) -> Result<(), LaneFault> {
        if self.watch.is_some() {
            self.watch_access(frame, access, mask, Kind::Write);
        }
        if access.order.release {
            fence(Ordering::SeqCst);
        }
        match access.size {
            1 => self.store_as::<u8>(frame, access, mask),
            2 => self.store_as::<u16>(frame, access, mask),
            4 => self.store_as::<u32>(frame, access, mask),
            _ => self.store_as::<u64>(frame, access, mask),
        }
    }

    fn store_as<T: Word>(
        &mut self,
        frame: &Frame,
        access: &Access,
        mask: u32,
    ) -> Result<(), LaneFault> {
        let size = T::BYTES as usize;
        let total = T::BYTES * u32::try_from(access.regs.len()).unwrap_or(1);
        let addresses = addresses(frame, access.base, access.offset);
        let mut region = match access.space {
            AddressSpace::Global | AddressSpace::Generic => self.global.latest(),
            _ => Region::NONE,
        };
        if mask == u32::MAX
            && let &[reg] = &access.regs[..]
            && let Some(host) = all_within(&region, &addresses, T::BYTES, true)
        {
            for (slot, address) in frame.rows[reg as usize].iter().zip(&addresses) {
                let at = host.wrapping_add(offset_in(&region, *address));
                // SAFETY: `all_within` found every element aligned, and the region writable.
                unsafe { T::get(*slot).write(at) };
            }
            return Ok(());
        }
        for lane in Lanes(mask) {
            let address = addresses[lane];
            let place = match within(&region, address, total, true) {
                Some(at) => Place::Global(at),
                None => {
                    let place = self.place(access.space, lane, address, total, true);
                    let place = place.map_err(|kind| lane_fault(kind, lane))?;
                    if matches!(place, Place::Global(_)) {
                        region = self.global.latest();
                    }
                    place
                }
            };
            let bytes = match place {
                Place::Global(at) => {
                    let get = |index: usize| T::get(frame.rows[access.regs[index] as usize][lane]);
                    // SAFETY: the aligned elements were found inside a writable region that stays valid.
                    unsafe { write_vector(at, access.regs.len(), get) };
                    continue;
                }
                Place::Shared(at) => &mut self.shared[at..at + total as usize],
                Place::Local(at) => self.local.slice_mut(lane, at, total).unwrap_or(&mut []),
                Place::Param(_) => &mut [],
            };
            for (bytes, &reg) in bytes.chunks_exact_mut(size).zip(&access.regs) {
                T::get(frame.rows[reg as usize][lane]).store(bytes);
            }
        }
        Ok(())
    }
}

/// Returns the offset in a region of an address inside it.
#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "a region is memory of this process"
)]
fn offset_in(region: &Region, address: u64) -> usize {
    (address - region.start) as usize
}

/// Returns the bytes of shared memory at an aligned address, if they are inside it.
#[inline]
fn shared_slice(shared: &[u8], address: u64, bytes: u32) -> Option<&[u8]> {
    let address = usize::try_from(address & u64::from(u32::MAX)).ok()?;
    if address & (bytes as usize - 1) != 0 {
        return None;
    }
    shared.get(address..address + bytes as usize)
}

#[cold]
fn lane_fault(kind: FaultKind, lane: usize) -> LaneFault {
    LaneFault {
        kind,
        lane: u32::try_from(lane).unwrap_or(0),
    }
}

/// Memory on which an atomic operation works.
pub(super) enum Target<'m> {
    /// Global memory, which other threads and processes may access.
    Global(*mut u8),
    /// Memory that only this host thread accesses.
    Private(&'m mut [u8]),
}

/// Returns the space of a generic address, and the offset in it.
pub(super) fn resolve(address: u64) -> (AddressSpace, u64) {
    let inside = |base: u64, bytes: u64| address.wrapping_sub(base) < bytes;
    if inside(SHARED_WINDOW, u64::from(MAX_SHARED_BYTES)) {
        (AddressSpace::Shared, address - SHARED_WINDOW)
    } else if inside(LOCAL_WINDOW, u64::from(MAX_LOCAL_BYTES)) {
        (AddressSpace::Local, address - LOCAL_WINDOW)
    } else if inside(PARAM_WINDOW, u64::from(crate::limits::MAX_PARAM_BYTES)) {
        (AddressSpace::Param, address - PARAM_WINDOW)
    } else {
        (AddressSpace::Global, address)
    }
}

/// Returns the addresses of all lanes.
#[inline]
pub(super) fn addresses(frame: &Frame, base: Base, offset: i64) -> Row {
    let offset = offset.cast_unsigned();
    match base {
        Base::Row(reg) => {
            let mut row = frame.rows[reg as usize];
            for address in &mut row {
                *address = address.wrapping_add(offset);
            }
            row
        }
        Base::Absolute => [offset; LANES],
        Base::Frame => [offset.wrapping_add(u64::from(frame.local_base)); LANES],
    }
}

impl insn::Place {
    /// Returns the addresses of all lanes.
    pub(super) fn addresses(&self, frame: &Frame) -> Row {
        addresses(frame, self.base, self.offset)
    }
}
