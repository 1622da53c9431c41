//! Anonymous files, for the CPU device's memory and for the words of shared events.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const NAME: &CStr = c"wormhole-device";
const SIZE_SEALS: i32 = libc::F_SEAL_GROW | libc::F_SEAL_SHRINK;

/// Creates a file of zeros with a sealed size.
///
/// # Errors
/// As `memfd_create`, `ftruncate` and `F_ADD_SEALS`.
pub fn anonymous(bytes: u64) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a C string; the result is a fresh descriptor or an error.
    let file = unsafe {
        let descriptor = libc::memfd_create(NAME.as_ptr(), flags);
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        File::from_raw_fd(descriptor)
    };
    set_size(&file, bytes)?;
    // SAFETY: an open descriptor and flags.
    if unsafe {
        libc::fcntl(
            file.as_raw_fd(),
            libc::F_ADD_SEALS,
            SIZE_SEALS | libc::F_SEAL_SEAL,
        )
    } != 0
    {
        return Err(io::Error::last_os_error());
    }
    Ok(file.into())
}

/// Sets the size of a file.
///
/// # Errors
/// As `ftruncate`. If `RLIMIT_FSIZE` is exceeded, the error names the limit.
pub fn set_size(file: &File, bytes: u64) -> io::Result<()> {
    file.set_len(bytes).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => io::Error::new(
            error.kind(),
            "the size limit of files is reached (RLIMIT_FSIZE, ulimit -f)",
        ),
        _ => error,
    })
}

/// Returns the size of another process's file if its size is sealed, so that mappings of it stay valid; else `None`.
#[must_use]
pub fn fixed_size(file: &OwnedFd) -> Option<u64> {
    // SAFETY: an open descriptor.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & SIZE_SEALS != SIZE_SEALS {
        return None;
    }
    // SAFETY: all zeros are a valid value of this structure.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: an open descriptor, and a local structure that the kernel fills.
    if unsafe { libc::fstat(file.as_raw_fd(), &raw mut status) } != 0 {
        return None;
    }
    u64::try_from(status.st_size).ok()
}

/// Frees the memory of whole pages of a file. They read as zeros.
///
/// # Errors
/// As `fallocate`.
pub fn punch_hole(file: &impl AsRawFd, offset: u64, bytes: u64) -> io::Result<()> {
    let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let number = |value: u64| libc::off_t::try_from(value).map_err(io::Error::other);
    let (offset, bytes) = (number(offset)?, number(bytes)?);
    // SAFETY: an open descriptor and integers.
    if unsafe { libc::fallocate(file.as_raw_fd(), flags, offset, bytes) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
