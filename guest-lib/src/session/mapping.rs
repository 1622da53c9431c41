//! Maps granted parts of the window, and a page that is zeroed in forked children.

use std::fs::File;
use std::io;
use std::ptr;

use wormhole_ring::band;
use wormhole_ring::layout::SEGMENT_BYTES;

/// Address band of the window, reserved, into which granted segments are mapped.
#[derive(Debug)]
pub struct Window {
    base: u64,
    file: File,
    segments: u64,
    /// True if the file also holds the segments of other sessions.
    shared: bool,
}

impl Window {
    /// Describes the window whose band `base..base + bytes` has been reserved. The file belongs to this session alone,
    /// or is `shared` by the processes of a VM.
    pub fn new(base: u64, bytes: u64, file: File, shared: bool) -> Self {
        Self {
            base,
            file,
            segments: bytes / SEGMENT_BYTES as u64,
            shared,
        }
    }

    pub fn is_shared(&self) -> bool {
        self.shared
    }

    pub fn segments(&self) -> u64 {
        self.segments
    }

    /// Returns the address of a segment.
    pub fn address(&self, segment: u32) -> u64 {
        self.base + u64::from(segment) * SEGMENT_BYTES as u64
    }

    /// Maps a granted run of segments. Forked children do not inherit them if `private` is set or the file is shared: a
    /// segment that this process returns goes to another session while the child would still map it.
    pub fn map(&self, first: u32, count: u32, private: bool) -> io::Result<*mut u8> {
        if u64::from(first) + u64::from(count) > self.segments {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "segments {first}+{count} lie outside a window of {}",
                    self.segments
                ),
            ));
        }
        let bytes = count as usize * SEGMENT_BYTES;
        let offset = u64::from(first) * SEGMENT_BYTES as u64;
        // SAFETY: the range lies in the band that was reserved for the window, so it replaces nothing
        // but that reservation.
        let address = unsafe { band::map(self.address(first), bytes as u64, &self.file, offset) }?;
        if private || self.shared {
            keep_from_children(address, bytes)?;
        }
        Ok(address)
    }

    /// Maps a mapped range of the window a second time, at an address in the band of managed memory that this library
    /// has reserved.
    pub fn map_again(&self, address: u64, home: u64, bytes: u64) -> io::Result<()> {
        // SAFETY: the range replaces a reservation, or absent pages whose accesses this library serves.
        let mapped = unsafe { band::map(address, bytes, &self.file, home - self.base) }?;
        if self.shared {
            keep_from_children(mapped, usize::try_from(bytes).map_err(io::Error::other)?)?;
        }
        Ok(())
    }

    /// Returns the file and the offset of a mapped address, if the file can be mapped in pages. The file of a VM's
    /// window cannot.
    pub fn file_range(&self, address: u64) -> Option<(&File, u64)> {
        let offset = address.checked_sub(self.base)?;
        (!self.shared).then_some((&self.file, offset))
    }

    /// Returns the first segment and the number of segments of a run that is mapped at an address.
    pub fn run(&self, address: u64, bytes: u64) -> Option<(u32, u32)> {
        let segment = |bytes: u64| u32::try_from(bytes / SEGMENT_BYTES as u64).ok();
        Some((segment(address.checked_sub(self.base)?)?, segment(bytes)?))
    }

    /// Replaces a mapped range by the reservation again.
    ///
    /// # Safety
    /// The range was mapped by [`Window::map`], and memory in it is no longer used.
    pub unsafe fn unmap(&self, address: u64, bytes: u64) -> io::Result<()> {
        // SAFETY: as the caller promises, the mapping that is replaced is no longer used.
        unsafe { band::unmap(address, bytes) }
    }
}

/// Leaves a mapping out of forked children.
fn keep_from_children(address: *mut u8, bytes: usize) -> io::Result<()> {
    // SAFETY: changes no contents.
    if unsafe { libc::madvise(address.cast(), bytes, libc::MADV_DONTFORK) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Maps a zeroed page that is zeroed again in every forked child.
pub fn wiped_page() -> io::Result<*mut u8> {
    const PAGE: usize = 4096;
    // SAFETY: an anonymous mapping wherever the kernel likes.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the page was mapped above.
    if unsafe { libc::madvise(page, PAGE, libc::MADV_WIPEONFORK) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(page.cast())
}
