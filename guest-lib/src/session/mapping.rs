//! Address space: reserved bands, and the granted parts of the window in them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

use wormhole_ring::layout::SEGMENT_BYTES;

fn check(address: *mut libc::c_void) -> io::Result<*mut u8> {
    if address == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(address.cast())
    }
}

fn length(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))
}

/// Takes a range of addresses that nothing may be mapped in and nothing is mapped in.
pub fn reserve(base: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: MAP_FIXED_NOREPLACE never touches what is mapped already.
    let address = unsafe {
        libc::mmap(
            ptr::without_provenance_mut(length(base)?),
            length(bytes)?,
            libc::PROT_NONE,
            libc::MAP_PRIVATE
                | libc::MAP_ANONYMOUS
                | libc::MAP_NORESERVE
                | libc::MAP_FIXED_NOREPLACE,
            -1,
            0,
        )
    };
    let address = check(address)?;
    if address.addr() as u64 == base {
        return Ok(());
    }
    // SAFETY: kernels that do not know the flag map elsewhere; that mapping is ours and unused.
    unsafe { libc::munmap(address.cast(), length(bytes)?) };
    Err(io::Error::from(io::ErrorKind::AddrInUse))
}

/// Gives a reserved range back.
pub fn release(base: u64, bytes: u64) {
    if let (Ok(base), Ok(bytes)) = (length(base), length(bytes)) {
        // SAFETY: the range was taken by `reserve` and nothing in it has been handed out.
        unsafe { libc::munmap(ptr::without_provenance_mut(base), bytes) };
    }
}

/// A band of the grant, reserved and ready to be filled.
#[derive(Debug)]
pub struct Window {
    base: u64,
    file: File,
    segments: u64,
}

impl Window {
    /// The window whose band `base..base + bytes` has been reserved.
    pub fn new(base: u64, bytes: u64, file: File) -> Self {
        Self {
            base,
            file,
            segments: bytes / SEGMENT_BYTES as u64,
        }
    }

    /// Where a segment lies.
    pub fn address(&self, segment: u32) -> u64 {
        self.base + u64::from(segment) * SEGMENT_BYTES as u64
    }

    /// Maps a granted run of segments. With `private`, a forked child does not get them.
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
        let bytes = u64::from(count) * SEGMENT_BYTES as u64;
        let offset = i64::from(first) * i64::try_from(SEGMENT_BYTES).unwrap_or(i64::MAX);
        // SAFETY: the range lies in the band that was reserved for the window, so it replaces nothing
        // but that reservation.
        let address = unsafe {
            libc::mmap(
                ptr::without_provenance_mut(length(self.address(first))?),
                length(bytes)?,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                self.file.as_raw_fd(),
                offset,
            )
        };
        let address = check(address)?;
        if private {
            // SAFETY: the range was mapped above.
            let done =
                unsafe { libc::madvise(address.cast(), length(bytes)?, libc::MADV_DONTFORK) };
            if done != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(address)
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
        let address = unsafe {
            libc::mmap(
                ptr::without_provenance_mut(length(address)?),
                length(bytes)?,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        check(address).map(drop)
    }
}

/// A zeroed page that is zeroed again in every forked child.
pub fn wiped_page() -> io::Result<*mut u8> {
    const PAGE: usize = 4096;
    // SAFETY: an anonymous mapping wherever the kernel likes.
    let page = check(unsafe {
        libc::mmap(
            ptr::null_mut(),
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    })?;
    // SAFETY: the page was mapped above.
    if unsafe { libc::madvise(page.cast(), PAGE, libc::MADV_WIPEONFORK) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_band_is_reserved_once() {
        let base = 0x4800_0000_0000;
        let bytes = 1 << 40;
        reserve(base, bytes).unwrap();
        assert!(reserve(base + 4096, 4096).is_err());
        release(base, bytes);
        reserve(base, bytes).unwrap();
        release(base, bytes);
    }
}
