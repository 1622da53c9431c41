//! Anonymous files, for the CPU device's memory and for the words of shared events.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

const NAME: &CStr = c"wormhole-device";
const SIZE_SEALS: SealFlags = SealFlags::GROW.union(SealFlags::SHRINK);

/// Creates a file of zeros with a sealed size.
///
/// # Errors
/// As `memfd_create`, `ftruncate` and `F_ADD_SEALS`.
pub fn anonymous(bytes: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create(NAME, flags)?);
    set_size(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SIZE_SEALS | SealFlags::SEAL)?;
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
    let seals = rustix::fs::fcntl_get_seals(file).ok()?;
    if !seals.contains(SIZE_SEALS) {
        return None;
    }
    let status = rustix::fs::fstat(file).ok()?;
    u64::try_from(status.st_size).ok()
}

/// Frees the memory of whole pages of a file. They read as zeros.
///
/// # Errors
/// As `fallocate`.
pub fn punch_hole(file: &impl AsFd, offset: u64, bytes: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, flags, offset, bytes)?)
}
