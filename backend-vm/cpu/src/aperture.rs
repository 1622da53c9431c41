//! Address range of device memory: reserved once, made accessible piece by piece.
//!
//! Each device of a process reserves its own slot in the device band. A memfd backs the range, so that other processes
//! can map its memory.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use wormhole_device::file;
use wormhole_ring::band;
use wormhole_ring::layout::APERTURE_HIGH;

/// Band of device addresses.
const BAND_START: u64 = APERTURE_HIGH.0;
const BAND_END: u64 = BAND_START + APERTURE_HIGH.1;
/// Unit in which memory is made accessible.
const COMMIT_UNIT: u64 = 2 << 20;

/// A reserved range of addresses.
#[derive(Debug)]
pub struct Aperture {
    start: u64,
    bytes: u64,
    /// Memfd that backs the range; each address has its own offset in it.
    file: OwnedFd,
}

/// Errors of reserving an aperture.
#[derive(Debug, thiserror::Error)]
pub enum ApertureError {
    #[error(
        "no {bytes:#x} bytes of address space are free in {BAND_START:#x}..{BAND_END:#x}, where \
         device memory must lie"
    )]
    Full { bytes: u64 },
    #[error("reserving {bytes:#x} bytes of address space at {start:#x} failed: {source}")]
    Reserve {
        start: u64,
        bytes: u64,
        source: io::Error,
    },
    #[error("no file of {bytes:#x} bytes can be made for device memory: {source}")]
    File { bytes: u64, source: io::Error },
}

impl Aperture {
    /// Reserves the first free slot of `bytes` (a power of two) in the band.
    pub fn reserve(bytes: u64) -> Result<Self, ApertureError> {
        let file =
            file::anonymous(bytes).map_err(|source| ApertureError::File { bytes, source })?;
        let mut start = BAND_START;
        while start + bytes <= BAND_END {
            match band::reserve(start, bytes) {
                Ok(()) => {
                    let aperture = Self { start, bytes, file };
                    return match aperture.fill(start, bytes, libc::PROT_NONE) {
                        Ok(()) => Ok(aperture),
                        Err(source) => Err(ApertureError::File { bytes, source }),
                    };
                }
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => start += bytes,
                Err(source) => {
                    return Err(ApertureError::Reserve {
                        start,
                        bytes,
                        source,
                    });
                }
            }
        }
        Err(ApertureError::Full { bytes })
    }

    /// Returns the first address.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes a range readable and writable, rounded to [`COMMIT_UNIT`] but not beyond the aperture.
    pub fn commit(&self, address: u64, bytes: u64) -> io::Result<()> {
        let first = (address & !(COMMIT_UNIT - 1)).max(self.start);
        let last = (address + bytes)
            .next_multiple_of(COMMIT_UNIT)
            .min(self.start + self.bytes);
        // SAFETY: first..last lies in the aperture, which this object owns.
        let result = unsafe {
            libc::mprotect(
                ptr::without_provenance_mut(to_usize(first)),
                to_usize(last - first),
                libc::PROT_READ | libc::PROT_WRITE,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Returns the file and the offset of an address in it.
    pub fn place(&self, address: u64) -> (BorrowedFd<'_>, u64) {
        (self.file.as_fd(), address - self.start)
    }

    /// Maps a part of another file at addresses of the aperture. The file must contain that part and must not be able
    /// to shrink.
    pub fn show(
        &self,
        address: u64,
        bytes: u64,
        file: &impl AsRawFd,
        offset: u64,
    ) -> io::Result<()> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        self.map(address, bytes, access, file.as_raw_fd(), offset)
    }

    /// Ends a view: maps the aperture's own file again, which reads as zeros there.
    pub fn hide(&self, address: u64, bytes: u64) -> io::Result<()> {
        self.fill(address, bytes, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn fill(&self, address: u64, bytes: u64, access: i32) -> io::Result<()> {
        let (file, offset) = self.place(address);
        self.map(address, bytes, access, file.as_raw_fd(), offset)
    }

    fn map(&self, address: u64, bytes: u64, access: i32, file: i32, offset: u64) -> io::Result<()> {
        debug_assert!(self.holds(address, bytes));
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        // SAFETY: the mapping replaces a part of the aperture, which this object owns; code that still accesses the
        // range finds the old or the new mapping.
        let mapped = unsafe {
            libc::mmap(
                ptr::without_provenance_mut(to_usize(address)),
                to_usize(bytes),
                access,
                libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED,
                file,
                offset,
            )
        };
        if mapped == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            band::keep(address, bytes);
            return Err(error);
        }
        Ok(())
    }

    /// Frees the aperture's own memory in a range of whole pages that was used for views.
    pub fn forget(&self, address: u64, bytes: u64) {
        debug_assert!(self.holds(address, bytes));
        // A failure leaves data there that late kernels wrote; it belongs to the same session.
        let _ = self.punch(address, bytes);
    }

    /// Frees whole pages of the aperture's own file, which then read as zeros.
    fn punch(&self, address: u64, bytes: u64) -> io::Result<()> {
        let (file, offset) = self.place(address);
        file::punch_hole(&file, offset, bytes)
    }

    fn holds(&self, address: u64, bytes: u64) -> bool {
        address >= self.start && address + bytes <= self.start + self.bytes
    }

    /// Zeroes a range. Frees its whole pages to the system.
    pub fn scrub(&self, address: u64, bytes: u64) {
        const PAGE: u64 = 4096;
        let first = address.next_multiple_of(PAGE);
        let last = (address + bytes) & !(PAGE - 1);
        if first >= last {
            zero(address, bytes);
            return;
        }
        zero(address, first - address);
        zero(last, address + bytes - last);
        if self.punch(first, last - first).is_err() {
            zero(first, last - first);
        }
    }
}

impl Drop for Aperture {
    fn drop(&mut self) {
        // SAFETY: this object owns the range; code that holds its addresses also holds this object.
        unsafe { band::release(self.start, self.bytes) };
    }
}

fn zero(address: u64, bytes: u64) {
    // SAFETY: callers pass committed ranges of the aperture.
    unsafe {
        ptr::with_exposed_provenance_mut::<u8>(to_usize(address)).write_bytes(0, to_usize(bytes))
    };
}

/// Converts an address or a size; `usize` has 64 bits.
pub fn to_usize(value: u64) -> usize {
    const { assert!(usize::BITS == 64) };
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(address: u64) -> u8 {
        // SAFETY: the tests read memory that they committed.
        unsafe { ptr::with_exposed_provenance::<u8>(to_usize(address)).read_volatile() }
    }

    fn fill(address: u64, bytes: usize) {
        // SAFETY: the tests write memory that they committed.
        unsafe {
            ptr::with_exposed_provenance_mut::<u8>(to_usize(address)).write_bytes(0xaa, bytes)
        };
    }

    #[test]
    fn two_apertures_do_not_overlap() {
        let first = Aperture::reserve(1 << 30).expect("reserve");
        let second = Aperture::reserve(1 << 30).expect("reserve");
        assert!(
            first.start() + first.bytes() <= second.start()
                || second.start() + second.bytes() <= first.start()
        );
        assert!(first.start() >= BAND_START && second.start() + second.bytes() <= BAND_END);
    }

    #[test]
    fn scrubbing_empties_the_range_and_nothing_else() {
        let aperture = Aperture::reserve(1 << 30).expect("reserve");
        let base = aperture.start();
        aperture.commit(base, 64 << 10).expect("commit");
        fill(base, 64 << 10);
        aperture.scrub(base + 512, 20_000);
        assert_eq!(read(base + 511), 0xaa);
        assert!((512..20_512).all(|offset| read(base + offset) == 0));
        assert_eq!(read(base + 20_512), 0xaa);
        aperture.scrub(base, 512);
        assert!((0..512).all(|offset| read(base + offset) == 0));
    }
}
