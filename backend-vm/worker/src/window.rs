//! Parts of the tenant's window that this worker maps, at the addresses the guest uses.

use std::io;
use std::os::fd::OwnedFd;

use wormhole_ring::band;
use wormhole_ring::control::Grant;
use wormhole_ring::layout::{FILES, SEGMENT_BYTES, WINDOW_BASE, WINDOW_MAX_BYTES};
use wormhole_ring::memory::{MemoryError, SessionMemory};

const SEGMENT: u64 = SEGMENT_BYTES as u64;

/// Reason why a part of the window cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    #[error("the address range {base:#x}..{end:#x} is taken in this process")]
    Band {
        base: u64,
        end: u64,
        #[source]
        cause: io::Error,
    },
    #[error(
        "{bytes:#x} bytes of addresses cannot be reserved: the limit of address space is too low \
         (RLIMIT_AS, `ulimit -v`)"
    )]
    AddressSpace {
        bytes: u64,
        #[source]
        cause: io::Error,
    },
    #[error("the grant's window of {size:#x} bytes at {base:#x} lies outside the reserved band")]
    Grant { base: u64, size: u64 },
    #[error("segments {first}..{end} do not lie in a window of {segments}")]
    Run { first: u32, end: u64, segments: u64 },
    #[error("segments {first}..{end} of the window cannot be mapped")]
    Map {
        first: u32,
        end: u64,
        #[source]
        cause: io::Error,
    },
    #[error("the session segment cannot be used")]
    Session(#[from] MemoryError),
}

/// Reserves the address bands of the window and of files in this process, so that neither the
/// driver nor a library maps anything there. Call it once, before the device is initialised.
///
/// # Errors
/// A band is not free, or the address space is limited.
pub fn reserve_bands() -> Result<(), WindowError> {
    for (base, bytes) in [(WINDOW_BASE, WINDOW_MAX_BYTES), FILES] {
        let end = base + bytes;
        band::reserve(base, bytes).map_err(|cause| match cause.kind() {
            io::ErrorKind::OutOfMemory => WindowError::AddressSpace { bytes, cause },
            _ => WindowError::Band { base, end, cause },
        })?;
    }
    Ok(())
}

/// Window of this worker's tenant.
#[derive(Debug)]
pub struct Window {
    file: OwnedFd,
    base: u64,
    segments: u64,
}

impl Window {
    /// Creates the window that a grant describes, backed by `file`. Nothing is mapped yet. The
    /// caller has called [`reserve_bands`].
    ///
    /// # Errors
    /// The grant's window does not lie in the reserved band.
    pub fn new(file: OwnedFd, grant: &Grant) -> Result<Self, WindowError> {
        let (base, size) = (grant.window_base, grant.window_size);
        let fits = base
            .checked_sub(WINDOW_BASE)
            .is_some_and(|offset| size <= WINDOW_MAX_BYTES && offset <= WINDOW_MAX_BYTES - size);
        if !fits || !base.is_multiple_of(SEGMENT) || !size.is_multiple_of(SEGMENT) {
            return Err(WindowError::Grant { base, size });
        }
        Ok(Self {
            file,
            base,
            segments: size / SEGMENT,
        })
    }

    /// Maps a run of segments and returns its address and its bytes. It stays mapped until
    /// [`Window::unmap`].
    ///
    /// # Errors
    /// The run does not lie in the window, or cannot be mapped.
    pub fn map(&self, first: u32, count: u32) -> Result<(u64, u64), WindowError> {
        let (address, bytes) = self.range(first, count)?;
        let offset = u64::from(first) * SEGMENT;
        // SAFETY: inside the band that this process reserved; a run is mapped once, because the
        // supervisor grants it once, and nothing refers to memory in it before.
        unsafe { band::map(address, bytes, &self.file, offset) }.map_err(|cause| {
            WindowError::Map {
                first,
                end: u64::from(first) + u64::from(count),
                cause,
            }
        })?;
        Ok((address, bytes))
    }

    /// Maps a session segment.
    ///
    /// # Errors
    /// As [`Window::map`].
    pub fn map_session(&self, segment: u32) -> Result<SessionMemory, WindowError> {
        let (address, _) = self.map(segment, 1)?;
        let base = std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0));
        // SAFETY: just mapped, and never unmapped while the process lives: only arena is returned.
        Ok(unsafe { SessionMemory::new(base, SEGMENT_BYTES) }?)
    }

    /// Unmaps a run of arena.
    ///
    /// # Safety
    /// Nothing in this process refers to memory in the run any more.
    ///
    /// # Errors
    /// As [`Window::map`].
    pub unsafe fn unmap(&self, first: u32, count: u32) -> Result<(), WindowError> {
        let (address, bytes) = self.range(first, count)?;
        // SAFETY: the caller's promise.
        unsafe { band::unmap(address, bytes) }.map_err(|cause| WindowError::Map {
            first,
            end: u64::from(first) + u64::from(count),
            cause,
        })
    }

    /// Maps a part of the window a second time, at an address in the band of managed memory.
    ///
    /// # Errors
    /// The address is taken, or the part cannot be mapped.
    pub fn map_again(&self, address: u64, home: u64, bytes: u64) -> io::Result<()> {
        band::reserve(address, bytes)?;
        // SAFETY: reserved above.
        let mapped = unsafe { band::map(address, bytes, &self.file, home - self.base) };
        mapped
            .map(drop)
            .inspect_err(|_| Self::unmap_again(address, bytes))
    }

    /// Undoes [`Window::map_again`].
    ///
    /// Nothing in this process refers to memory there: the registrar, which alone maps the band, has unregistered it.
    pub fn unmap_again(address: u64, bytes: u64) {
        // SAFETY: the range lies in the band of managed memory, which only the device accesses.
        unsafe { band::release(address, bytes) };
    }

    /// Returns address and bytes of a run.
    ///
    /// # Errors
    /// The run does not lie in the window.
    pub fn range(&self, first: u32, count: u32) -> Result<(u64, u64), WindowError> {
        let end = u64::from(first) + u64::from(count);
        if count == 0 || end > self.segments {
            return Err(WindowError::Run {
                first,
                end,
                segments: self.segments,
            });
        }
        Ok((
            self.base + u64::from(first) * SEGMENT,
            u64::from(count) * SEGMENT,
        ))
    }
}
