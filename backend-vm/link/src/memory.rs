//! Mappings and memfds.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};

/// Creates a memfd that can be sealed and is closed on `exec`.
///
/// # Errors
/// As `memfd_create`.
pub fn anonymous_file(name: &CStr) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(rustix::fs::memfd_create(name, flags)?)
}

/// Seals the size of a memfd.
///
/// # Errors
/// As `F_ADD_SEALS`.
pub fn seal_size(file: &impl AsFd) -> io::Result<()> {
    let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    Ok(rustix::fs::fcntl_add_seals(file, seals)?)
}

/// Adds `F_SEAL_FUTURE_WRITE`: the file is written by existing mappings alone, and no holes are punched into it.
///
/// # Errors
/// As `F_ADD_SEALS`.
pub fn seal_writes(file: &impl AsFd) -> io::Result<()> {
    Ok(rustix::fs::fcntl_add_seals(file, SealFlags::FUTURE_WRITE)?)
}

/// Returns the seals of a memfd. Fails for other files.
///
/// # Errors
/// As `F_GET_SEALS`.
pub fn seals(file: &impl AsFd) -> io::Result<SealFlags> {
    Ok(rustix::fs::fcntl_get_seals(file)?)
}

/// Maps a part of a file, shared, at an address chosen by the kernel.
///
/// # Errors
/// As `mmap`.
pub fn map_shared(file: &impl AsRawFd, offset: u64, bytes: usize) -> io::Result<NonNull<u8>> {
    map(file, offset, bytes, libc::PROT_READ | libc::PROT_WRITE)
}

/// Maps the start of a file, shared, to be read only.
///
/// # Errors
/// As `mmap`.
pub fn map_to_read(file: &impl AsRawFd, bytes: usize) -> io::Result<NonNull<u8>> {
    map(file, 0, bytes, libc::PROT_READ)
}

fn map(file: &impl AsRawFd, offset: u64, bytes: usize, protection: i32) -> io::Result<NonNull<u8>> {
    let (fd, offset) = (file.as_raw_fd(), to_offset(offset)?);
    // SAFETY: no fixed address, so no existing mapping is replaced.
    let result = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            protection,
            libc::MAP_SHARED,
            fd,
            offset,
        )
    };
    if result == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(result.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// Copies out of mapped memory that a guest may be writing at the same time.
///
/// # Safety
/// `address..address + bytes` stays mapped and readable during the call.
pub unsafe fn copy_out(address: u64, bytes: usize) -> Vec<u8> {
    let mut copy = Vec::with_capacity(bytes);
    // SAFETY: the source is readable by the caller's promise, the destination has this capacity. The copy instruction
    // is opaque to the compiler, so a source that changes meanwhile yields old or new bytes, but is never read twice.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") bytes => _,
            inout("rdi") copy.as_mut_ptr() => _,
            inout("rsi") address => _,
            options(nostack, preserves_flags),
        );
        copy.set_len(bytes);
    }
    copy
}

/// Copies into mapped memory that a guest may be reading and writing at the same time.
///
/// # Safety
/// `address..address + data.len()` stays mapped and writable during the call, and none of it is `data`.
pub unsafe fn copy_in(address: u64, data: &[u8]) {
    // SAFETY: the destination is writable by the caller's promise. The copy instruction is opaque to the compiler, so
    // no reference to memory that the guest may access exists.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") data.len() => _,
            inout("rdi") address => _,
            inout("rsi") data.as_ptr() => _,
            options(nostack, preserves_flags),
        );
    }
}

/// A shared mapping of one range of a file, unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a range of addresses; code that accesses the memory synchronises by other means.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` of the file from `offset` on, shared.
    ///
    /// # Errors
    /// As `mmap`.
    pub fn new(file: &impl AsRawFd, offset: u64, bytes: usize) -> io::Result<Self> {
        let base = map_shared(file, offset, bytes)?;
        Ok(Self { base, bytes })
    }

    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; the users of the base promised to be dropped first.
        unsafe {
            libc::munmap(self.base.as_ptr().cast(), self.bytes);
        }
    }
}

fn to_offset(value: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}
