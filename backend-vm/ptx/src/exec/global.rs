//! Global memory: translation of addresses, and access by atomic operations.
//!
//! Global memory is memory of this process that the guest's CPU and other blocks may access at the same time. Every
//! access is therefore an atomic operation of the access's size, at most eight bytes, relaxed unless the instruction
//! requires more. On the hosts' processors that is an ordinary load or store, and a race between a guest's own threads
//! remains the guest's concern. The engine never creates a reference to this memory.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::texture::Recent;
use super::{GlobalMemory, LOWEST_GLOBAL, Region};
use crate::alu::{Row, Slot};
use crate::error::FaultKind;

/// Element that one operation loads or stores.
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
    /// Converts from little-endian bytes.
    fn of(bytes: &[u8]) -> Self;
    /// Converts to little-endian bytes.
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

/// Returns how many bytes of a vector one operation reads or writes: eight, or all of a smaller vector, as on GPUs.
/// Programs that send words to other processors with a flag beside each word rely on it.
const fn at_once(bytes: usize) -> usize {
    if bytes < size_of::<u64>() {
        bytes
    } else {
        size_of::<u64>()
    }
}

/// Reads a vector, and passes the index and value of each element to `put`.
///
/// # Safety
///
/// As [`Word::read`], for `count` elements, a power of two, with the alignment of all.
#[inline]
pub(super) unsafe fn read_vector<T: Word>(
    at: *mut u8,
    count: usize,
    mut put: impl FnMut(usize, u64),
) {
    let size = T::BYTES as usize;
    let unit = at_once(count * size);
    for (first, at) in (0..count)
        .step_by(unit / size)
        .map(|first| (first, at.wrapping_add(first * size)))
    {
        // SAFETY: the caller vouches for the elements, which are aligned together.
        let word = unsafe {
            match unit {
                8 => u64::read(at),
                4 => u32::read(at).into(),
                2 => u16::read(at).into(),
                _ => u8::read(at).into(),
            }
        };
        let bytes = word.to_le_bytes();
        for (index, bytes) in bytes[..unit].chunks_exact(size).enumerate() {
            put(first + index, T::of(bytes).put());
        }
    }
}

/// Writes a vector of the elements that `get` returns.
///
/// # Safety
///
/// As [`Word::write`], for `count` elements, a power of two, with the alignment of all.
#[inline]
pub(super) unsafe fn write_vector<T: Word>(at: *mut u8, count: usize, get: impl Fn(usize) -> T) {
    let size = T::BYTES as usize;
    let unit = at_once(count * size);
    for (first, at) in (0..count)
        .step_by(unit / size)
        .map(|first| (first, at.wrapping_add(first * size)))
    {
        let mut bytes = [0; size_of::<u64>()];
        for (index, bytes) in bytes[..unit].chunks_exact_mut(size).enumerate() {
            get(first + index).store(bytes);
        }
        let word = u64::from_le_bytes(bytes);
        // SAFETY: the caller vouches for the elements, which are aligned together.
        unsafe {
            match unit {
                8 => word.write(at),
                4 => u32::get(word).write(at),
                2 => u16::get(word).write(at),
                _ => u8::get(word).write(at),
            }
        }
    }
}

/// Number of regions that are cached.
const RECENT: usize = 4;

/// Global memory, with the most recently used regions.
pub(super) struct Global<'a> {
    memory: &'a dyn GlobalMemory,
    recent: [Region; RECENT],
    latest: usize,
    next: usize,
    /// Most recently used texture and surface objects.
    pub objects: Recent,
}

impl<'a> Global<'a> {
    pub(super) fn new(memory: &'a dyn GlobalMemory) -> Self {
        Self {
            memory,
            recent: [Region::NONE; RECENT],
            latest: 0,
            next: 0,
            objects: Recent::default(),
        }
    }

    /// Returns the region that was found last.
    #[inline]
    pub(super) fn latest(&self) -> Region {
        self.recent[self.latest]
    }

    /// Translates an aligned address to the host's pointer to `bytes` bytes.
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

/// Returns the host's pointer to the region's start if every lane's element is aligned and inside it.
#[inline]
pub(super) fn all_within(
    region: &Region,
    addresses: &Row,
    bytes: u32,
    write: bool,
) -> Option<*mut u8> {
    let last = region.bytes.checked_sub(u64::from(bytes))?;
    let mut bad = u64::from(write && !region.writable);
    for address in addresses {
        let offset = address.wrapping_sub(region.start);
        bad |= u64::from(offset > last) | address & u64::from(bytes - 1);
    }
    (bad == 0).then_some(region.host)
}

/// Returns the host's pointer to bytes of a region if they are aligned and inside it.
#[inline]
pub(super) fn within(region: &Region, address: u64, bytes: u32, write: bool) -> Option<*mut u8> {
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
