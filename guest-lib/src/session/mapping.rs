//! Address space: the granted parts of the window, and a page that forked children find empty.

use std::fs::File;
use std::io;
use std::ptr;

use wormhole_ring::band;
use wormhole_ring::layout::SEGMENT_BYTES;

/// A band of the grant, reserved and ready to be filled.
#[derive(Debug)]
pub struct Window {
    base: u64,
    file: File,
    segments: u64,
    /// Other sessions get their segments from the same file.
    shared: bool,
}

impl Window {
    /// The window whose band `base..base + bytes` has been reserved. The file is this session's alone, or
    /// `shared` by the processes of a VM.
    pub fn new(base: u64, bytes: u64, file: File, shared: bool) -> Self {
        Self {
            base,
            file,
            segments: bytes / SEGMENT_BYTES as u64,
            shared,
        }
    }

    pub fn segments(&self) -> u64 {
        self.segments
    }

    /// Where a segment lies.
    pub fn address(&self, segment: u32) -> u64 {
        self.base + u64::from(segment) * SEGMENT_BYTES as u64
    }

    /// Maps a granted run of segments. A forked child does not get them with `private`, nor from a file that
    /// is shared: what this process gives back becomes another's while the child would still have it.
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
            // SAFETY: the range was mapped above.
            if unsafe { libc::madvise(address.cast(), bytes, libc::MADV_DONTFORK) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(address)
    }

    /// Where a mapped address lies in the file, if the file can be mapped in pages: that of a VM's window cannot.
    pub fn file_range(&self, address: u64) -> Option<(&File, u64)> {
        let offset = address.checked_sub(self.base)?;
        (!self.shared).then_some((&self.file, offset))
    }

    /// Where a run of segments lies that was mapped at an address: its first segment and their number.
    pub fn run(&self, address: u64, bytes: u64) -> Option<(u32, u32)> {
        let segment = |bytes: u64| u32::try_from(bytes / SEGMENT_BYTES as u64).ok();
        Some((segment(address.checked_sub(self.base)?)?, segment(bytes)?))
    }

    /// Takes a mapped range out again; nothing else may be mapped there.
    ///
    /// # Safety
    /// The range was mapped by [`Window::map`], and nobody uses memory in it any more.
    pub unsafe fn unmap(&self, address: u64, bytes: u64) -> io::Result<()> {
        // SAFETY: the caller's promise: the mapping that is replaced is in use no more.
        unsafe { band::unmap(address, bytes) }
    }
}

/// A zeroed page that is zeroed again in every forked child.
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
