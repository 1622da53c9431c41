//! Loads and stores of a warp in every state space.
//!
//! Global memory is memory of this process that the guest's CPU and other blocks
//! may access at the same time. Every access to it is therefore an atomic
//! operation of the access's size, relaxed unless the instruction says more: on
//! the hosts' processors that is an ordinary load or store, and a race between a
//! guest's own threads stays the guest's affair. No reference to it is ever made.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use super::frame::{Frame, Local};
use super::{GlobalMemory, LOCAL_WINDOW, LOWEST_GLOBAL, PARAM_WINDOW, Region, SHARED_WINDOW};
use crate::alu::{LANES, Row, Slot};
use crate::decode::insn::{Access, AddressSpace, Base, Copy};
use crate::error::FaultKind;
use crate::limits::{MAX_LOCAL_BYTES, MAX_SHARED_BYTES};

/// A fault and the lane that caused it.
#[derive(Debug)]
pub(super) struct LaneFault {
    pub kind: FaultKind,
    pub lane: u32,
}

/// The lanes of a mask, from the lowest.
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

/// An element that is loaded and stored at once.
pub(super) trait Word: Slot {
    const BYTES: u32;
    /// Reads global memory.
    ///
    /// # Safety
    ///
    /// `at` is valid for reads and aligned, and not accessed otherwise than atomically meanwhile.
    unsafe fn read(at: *mut u8) -> Self;
    /// Writes global memory.
    ///
    /// # Safety
    ///
    /// `at` is valid for writes and aligned, and not accessed otherwise than atomically meanwhile.
    unsafe fn write(self, at: *mut u8);
    /// From little-endian bytes.
    fn of(bytes: &[u8]) -> Self;
    /// To little-endian bytes.
    fn store(self, bytes: &mut [u8]);
}

macro_rules! word {
    ($($t:ty, $atomic:ty, $raw:ty;)*) => {$(
        impl Word for $t {
            const BYTES: u32 = <$t>::BITS / 8;
            #[inline(always)]
            #[allow(clippy::cast_possible_wrap, clippy::unnecessary_cast, reason = "bits are kept")]
            unsafe fn read(at: *mut u8) -> Self {
                // SAFETY: the caller vouches for validity, alignment and atomicity.
                unsafe { <$atomic>::from_ptr(at.cast()) }.load(Ordering::Relaxed) as $t
            }
            #[inline(always)]
            #[allow(clippy::cast_sign_loss, clippy::unnecessary_cast, reason = "bits are kept")]
            unsafe fn write(self, at: *mut u8) {
                // SAFETY: the caller vouches for validity, alignment and atomicity.
                unsafe { <$atomic>::from_ptr(at.cast()) }.store(self as $raw, Ordering::Relaxed);
            }
            #[inline(always)]
            fn of(bytes: &[u8]) -> Self {
                bytes.try_into().map_or(0, <$t>::from_le_bytes)
            }
            #[inline(always)]
            fn store(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
word! {
    u8, AtomicU8, u8; i8, AtomicU8, u8; u16, AtomicU16, u16; i16, AtomicU16, u16;
    u32, AtomicU32, u32; i32, AtomicU32, u32; u64, AtomicU64, u64;
}

/// Regions that are remembered.
const RECENT: usize = 4;

/// Global memory with the regions that were used last.
pub(super) struct Global<'a> {
    memory: &'a dyn GlobalMemory,
    recent: [Region; RECENT],
    latest: usize,
    next: usize,
}

impl<'a> Global<'a> {
    pub(super) fn new(memory: &'a dyn GlobalMemory) -> Self {
        Self {
            memory,
            recent: [Region::NONE; RECENT],
            latest: 0,
            next: 0,
        }
    }

    /// The region that was found last.
    #[inline]
    fn latest(&self) -> Region {
        self.recent[self.latest]
    }

    /// The host's pointer to `bytes` bytes at an aligned address.
    #[inline]
    pub(super) fn translate(
        &mut self,
        address: u64,
        bytes: u32,
        write: bool,
    ) -> Result<*mut u8, FaultKind> {
        if address & u64::from(bytes - 1) != 0 {
            return Err(FaultKind::Misaligned { address, bytes });
        }
        for (index, region) in self.recent.iter().enumerate() {
            if let Some(at) = within(region, address, bytes, write) {
                self.latest = index;
                return Ok(at);
            }
        }
        self.ask(address, bytes, write)
    }

    #[cold]
    fn ask(&mut self, address: u64, bytes: u32, write: bool) -> Result<*mut u8, FaultKind> {
        let region = self
            .memory
            .region(address, u64::from(bytes))
            .filter(|region| {
                region.start.checked_add(region.bytes).is_some()
                    && region.start >= LOWEST_GLOBAL
                    && !region.host.is_null()
            });
        let found =
            region.and_then(|region| within(&region, address, bytes, write).map(|at| (region, at)));
        let Some((region, at)) = found else {
            return Err(FaultKind::IllegalAddress {
                address,
                bytes,
                write,
            });
        };
        self.recent[self.next] = region;
        self.latest = self.next;
        self.next = (self.next + 1) % RECENT;
        Ok(at)
    }
}

/// The host's pointer to aligned bytes of a region.
#[inline]
fn within(region: &Region, address: u64, bytes: u32, write: bool) -> Option<*mut u8> {
    let offset = address.wrapping_sub(region.start);
    let inside = offset < region.bytes && region.bytes - offset >= u64::from(bytes);
    let aligned = address & u64::from(bytes - 1) == 0;
    if inside && aligned && (region.writable || !write) {
        let offset = usize::try_from(offset).ok()?;
        Some(region.host.wrapping_add(offset))
    } else {
        None
    }
}

/// The memories that the lanes of a warp see.
pub(super) struct Spaces<'w, 'a> {
    pub global: &'w mut Global<'a>,
    pub shared: &'w mut [u8],
    pub local: &'w mut Local,
    pub params: &'w [u8],
}

/// An address, resolved to a space.
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

    /// Reads one element; for code off the fast path.
    pub(super) fn read<T: Word>(
        &mut self,
        space: AddressSpace,
        lane: usize,
        address: u64,
    ) -> Result<T, FaultKind> {
        let size = T::BYTES as usize;
        Ok(match self.place(space, lane, address, T::BYTES, false)? {
            // SAFETY: `translate` found the aligned bytes inside a region that stays valid.
            Place::Global(at) => unsafe { T::read(at) },
            Place::Shared(at) => T::of(&self.shared[at..at + size]),
            Place::Local(at) => T::of(self.local.slice(lane, at, T::BYTES).unwrap_or(&[])),
            Place::Param(at) => T::of(&self.params[at..at + size]),
        })
    }

    /// The pointer for an atomic operation on global memory, or the place elsewhere.
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

    /// Executes a `cp.async`.
    pub(super) fn copy(&mut self, frame: &Frame, copy: &Copy, mask: u32) -> Result<(), LaneFault> {
        let from = addresses(frame, copy.source.0, copy.source.1);
        let to = addresses(frame, copy.dest.0, copy.dest.1);
        for lane in Lanes(mask) {
            let wanted = copy
                .source_bytes
                .map_or(copy.bytes, |reg| u32::get(frame.rows[reg as usize][lane]));
            self.copy_lane(
                lane,
                from[lane],
                to[lane],
                copy.bytes,
                wanted.min(copy.bytes),
            )
            .map_err(|kind| lane_fault(kind, lane))?;
        }
        Ok(())
    }

    fn copy_lane(
        &mut self,
        lane: usize,
        from: u64,
        to: u64,
        bytes: u32,
        wanted: u32,
    ) -> Result<(), FaultKind> {
        let mut buffer = [0; 16];
        if from & u64::from(bytes - 1) != 0 {
            return Err(FaultKind::Misaligned {
                address: from,
                bytes,
            });
        }
        for (index, byte) in buffer.iter_mut().take(wanted as usize).enumerate() {
            *byte = self.read(AddressSpace::Global, lane, from.wrapping_add(index as u64))?;
        }
        if let Place::Shared(at) = self.place(AddressSpace::Shared, lane, to, bytes, true)? {
            self.shared[at..at + bytes as usize].copy_from_slice(&buffer[..bytes as usize]);
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

    /// Loads one element of one lane, wherever it is.
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

    /// Loads vectors, and elements of the rarer spaces.
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
                    for (index, &reg) in access.regs.iter().enumerate() {
                        // SAFETY: `place` found all elements, aligned, inside a region that stays valid.
                        let value = unsafe { T::read(at.wrapping_add(index * size)) };
                        frame.rows[reg as usize][lane] = value.put();
                    }
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

    /// Loads a parameter at a constant offset: one value for all lanes.
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
                    for (index, &reg) in access.regs.iter().enumerate() {
                        let value = T::get(frame.rows[reg as usize][lane]);
                        // SAFETY: the aligned elements were found inside a writable region that stays valid.
                        unsafe { value.write(at.wrapping_add(index * size)) };
                    }
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

/// The bytes of shared memory at an aligned address, if they are there.
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

/// Where an atomic operation works.
pub(super) enum Target<'m> {
    /// Global memory, shared with everybody.
    Global(*mut u8),
    /// Memory that only this thread of the host touches.
    Private(&'m mut [u8]),
}

/// The space of a generic address, and the offset in it.
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

/// The addresses of all lanes.
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
