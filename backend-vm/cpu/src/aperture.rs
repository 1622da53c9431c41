//! The address range that device memory is taken from: reserved once, made usable piece by piece.
//!
//! Every device of a process takes a slot of its own inside the device band, so that several may
//! live side by side.

use std::io;
use std::ptr;

use wormhole_ring::band;
use wormhole_ring::layout::APERTURE_HIGH;

/// The band that device addresses lie in.
const BAND_START: u64 = APERTURE_HIGH.0;
const BAND_END: u64 = BAND_START + APERTURE_HIGH.1;
/// What is made usable at a time.
const COMMIT_UNIT: u64 = 2 << 20;

/// A reserved range of addresses.
#[derive(Debug)]
pub struct Aperture {
    start: u64,
    bytes: u64,
}

/// Why there is no aperture.
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
}

impl Aperture {
    /// Reserves the first free slot of `bytes` (a power of two) in the band.
    pub fn reserve(bytes: u64) -> Result<Self, ApertureError> {
        let mut start = BAND_START;
        while start + bytes <= BAND_END {
            match band::reserve(start, bytes) {
                Ok(()) => return Ok(Self { start, bytes }),
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

    /// First address.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes a range readable and writable. What is outside the aperture is not touched.
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

    /// Shows shared memory at an address of the aperture, beside where it was seen before.
    pub fn show(&self, memory: &Shared, address: u64) -> io::Result<()> {
        debug_assert!(self.holds(address, memory.bytes));
        // SAFETY: the new view replaces a part of the aperture, which this object owns; the old size of zero
        // leaves the views that there are alone.
        let view = unsafe {
            libc::mremap(
                memory.start.cast(),
                0,
                to_usize(memory.bytes),
                libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
                ptr::without_provenance_mut::<libc::c_void>(to_usize(address)),
            )
        };
        if view == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Ends a view: zeros are there instead.
    pub fn hide(&self, address: u64, bytes: u64) -> io::Result<()> {
        debug_assert!(self.holds(address, bytes));
        // SAFETY: what is replaced is a part of the aperture, which this object owns; it stays readable and
        // writable for those who are still there.
        let empty = unsafe {
            libc::mmap(
                ptr::without_provenance_mut(to_usize(address)),
                to_usize(bytes),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        if empty == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Empties a range in which views were shown, some of which may never have been.
    pub fn forget(&self, address: u64, bytes: u64) {
        debug_assert!(self.holds(address, bytes));
        // SAFETY: the range lies in the aperture and is private anonymous memory of this object: its views
        // have ended. A failure leaves what late kernels wrote there, all of it the session's own.
        unsafe {
            libc::madvise(
                ptr::without_provenance_mut(to_usize(address)),
                to_usize(bytes),
                libc::MADV_DONTNEED,
            )
        };
    }

    fn holds(&self, address: u64, bytes: u64) -> bool {
        address >= self.start && address + bytes <= self.start + self.bytes
    }

    /// Empties a range: it reads as zeros afterwards. Whole pages go back to the system.
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
        // SAFETY: first..last lies in the aperture and is private anonymous memory of this object.
        let result = unsafe {
            libc::madvise(
                ptr::without_provenance_mut(to_usize(first)),
                to_usize(last - first),
                libc::MADV_DONTNEED,
            )
        };
        if result != 0 {
            zero(first, last - first);
        }
    }
}

/// Memory that can be shown at several addresses.
#[derive(Debug)]
pub struct Shared {
    start: *mut u8,
    bytes: u64,
}

// SAFETY: a mapping of this process, reached by nobody through this object.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Zeros.
    pub fn new(bytes: u64) -> io::Result<Self> {
        // SAFETY: a new mapping where the kernel likes.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                to_usize(bytes),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            start: start.cast(),
            bytes,
        })
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: this object's own mapping; views of it elsewhere stay.
        unsafe { libc::munmap(self.start.cast(), to_usize(self.bytes)) };
    }
}

impl Drop for Aperture {
    fn drop(&mut self) {
        // SAFETY: the range is this object's own; whoever holds its addresses holds this object too.
        unsafe { band::release(self.start, self.bytes) };
    }
}

fn zero(address: u64, bytes: u64) {
    // SAFETY: callers pass committed ranges of the aperture.
    unsafe {
        ptr::with_exposed_provenance_mut::<u8>(to_usize(address)).write_bytes(0, to_usize(bytes))
    };
}

/// An address or a size of this 64-bit machine.
pub fn to_usize(value: u64) -> usize {
    const { assert!(usize::BITS == 64) };
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(address: u64) -> u8 {
        // SAFETY: the tests read what they committed.
        unsafe { ptr::with_exposed_provenance::<u8>(to_usize(address)).read_volatile() }
    }

    fn fill(address: u64, bytes: usize) {
        // SAFETY: the tests write what they committed.
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
