//! Address bands: reserved with PROT_NONE mappings first, replaced by mappings of files piece by
//! piece afterwards.
//!
//! Unsafe code here only calls `mmap` and `munmap`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::ptr;

const NOTHING: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Reserves a range of addresses with an inaccessible mapping, so that no later `mmap` without
/// MAP_FIXED is placed there.
///
/// # Errors
/// `EEXIST` if a part of the range is mapped already.
pub fn reserve(address: u64, bytes: u64) -> io::Result<()> {
    let flags = NOTHING | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: MAP_FIXED_NOREPLACE never replaces an existing mapping.
    let mapped = unsafe { map_at(address, bytes, libc::PROT_NONE, flags, -1, 0) }?;
    if mapped.addr() as u64 == address {
        return Ok(());
    }
    // Kernels before 4.17 ignore MAP_FIXED_NOREPLACE and treat the address as a hint.
    // SAFETY: this call has just mapped that range; no other code has its address.
    unsafe { libc::munmap(mapped.cast(), length(bytes)?) };
    Err(io::Error::from_raw_os_error(libc::EEXIST))
}

/// Unmaps a reserved range, with all files mapped in it.
///
/// # Safety
/// The range was reserved by [`reserve`], and no code accesses memory in it any more.
pub unsafe fn release(address: u64, bytes: u64) {
    if let (Ok(address), Ok(bytes)) = (length(address), length(bytes)) {
        // SAFETY: the caller's promise.
        unsafe { libc::munmap(ptr::without_provenance_mut(address), bytes) };
    }
}

/// Maps a part of a file, shared, over a part of a reserved range.
///
/// # Safety
/// The range was reserved by [`reserve`], and no code accesses memory in it.
///
/// # Errors
/// As `mmap`.
pub unsafe fn map(address: u64, bytes: u64, file: &impl AsFd, offset: u64) -> io::Result<*mut u8> {
    let offset = libc::off_t::try_from(offset).map_err(invalid)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    let file = file.as_fd().as_raw_fd();
    // SAFETY: the caller promises that the mapping replaces a part of the reservation.
    let mapped = unsafe { map_at(address, bytes, protection, flags, file, offset) };
    mapped.inspect_err(|_| keep(address, bytes))
}

/// Reserves a range again over which a mapping with MAP_FIXED has failed. Before Linux 6.14 the call may have removed what
/// was there, and another mapping of this process would be placed in the range, where the other party of the band reaches
/// it. Ends the process if the range cannot be reserved.
pub fn keep(address: u64, bytes: u64) {
    let is_kept = match reserve(address, bytes) {
        Ok(()) => true,
        // The call has failed before it removed anything.
        Err(error) => error.raw_os_error() == Some(libc::EEXIST),
    };
    if !is_kept {
        std::process::abort();
    }
}

/// Undoes [`map`]: the range is reserved again.
///
/// # Safety
/// As [`release`].
///
/// # Errors
/// As `mmap`.
pub unsafe fn unmap(address: u64, bytes: u64) -> io::Result<()> {
    let flags = NOTHING | libc::MAP_FIXED;
    // SAFETY: the caller promises that the replaced mapping is no longer in use.
    let unmapped = unsafe { map_at(address, bytes, libc::PROT_NONE, flags, -1, 0) };
    unmapped.map(drop).inspect_err(|_| keep(address, bytes))
}

/// # Safety
/// With MAP_FIXED, no code accesses the mappings that this one replaces.
unsafe fn map_at(
    address: u64,
    bytes: u64,
    protection: i32,
    flags: i32,
    file: RawFd,
    offset: libc::off_t,
) -> io::Result<*mut u8> {
    let (address, bytes) = (length(address)?, length(bytes)?);
    let address = ptr::without_provenance_mut(address);
    // SAFETY: the caller's promise.
    let mapped = unsafe { libc::mmap(address, bytes, protection, flags, file, offset) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(mapped.cast())
}

fn length(value: u64) -> io::Result<usize> {
    usize::try_from(value).map_err(invalid)
}

fn invalid<E>(_: E) -> io::Error {
    io::Error::from_raw_os_error(libc::EINVAL)
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_band_is_reserved_once() {
        let (band, bytes) = (0x4800_0000_0000, 1 << 40);
        reserve(band, bytes).unwrap();
        let taken = reserve(band + 4096, 4096).unwrap_err();
        assert_eq!(taken.raw_os_error(), Some(libc::EEXIST));
        // SAFETY: nothing uses the band.
        unsafe { release(band, bytes) };
        reserve(band, bytes).unwrap();
    }

    #[test]
    fn what_a_failed_mapping_has_removed_is_reserved_again() {
        let (band, bytes) = (0x4c00_0000_0000, 1 << 20);
        reserve(band, bytes).unwrap();
        let file = File::open("/dev/null").unwrap();
        // SAFETY: nothing uses the band, and the device cannot be mapped.
        unsafe {
            // As the kernel before 6.14 does in a mapping that fails.
            release(band, bytes);
            keep(band, bytes);
            assert!(reserve(band, bytes).is_err(), "reserved");
            keep(band, bytes);
            map(band, bytes, &file, 0).unwrap_err();
            assert!(reserve(band, bytes).is_err(), "reserved still");
        }
    }

    #[test]
    fn what_a_file_is_mapped_over_stays_reserved() {
        let (band, bytes) = (0x4a00_0000_0000, 1 << 20);
        let file = File::options()
            .read(true)
            .write(true)
            .open("/dev/zero")
            .unwrap();
        reserve(band, bytes).unwrap();
        // SAFETY: only this test uses the band, and it accesses only its own mapping.
        unsafe {
            let mapped = map(band + 4096, 4096, &file, 0).unwrap();
            assert_eq!(mapped.addr() as u64, band + 4096);
            mapped.write_volatile(7);
            assert_eq!(mapped.read_volatile(), 7);
            assert!(reserve(band + 4096, 4096).is_err(), "a file is mapped");
            unmap(band + 4096, 4096).unwrap();
            assert!(reserve(band + 4096, 4096).is_err(), "kept");
            release(band, bytes);
        }
    }
}
