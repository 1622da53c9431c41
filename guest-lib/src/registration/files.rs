//! Registered memory that is a file's, shared with other processes: the worker maps the same file, and the device
//! reaches the same pages. Nothing is moved, so whoever else has the file mapped sees what the device writes.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::maps::{self, Mapping};
use super::pages::Pages;
use crate::error::{CuError, Result};
use crate::session::OnDevice;

/// A registration.
#[derive(Debug)]
struct Reached {
    /// What the program registered.
    address: u64,
    /// Where the device has its first page.
    at: u64,
}

static REACHED: Mutex<Vec<Reached>> = Mutex::new(Vec::new());

fn reached() -> MutexGuard<'static, Vec<Reached>> {
    REACHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file, as the kernel names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    device: (u32, u32),
    inode: u64,
}

impl Identity {
    /// The file that all of the parts are shared with, one after the other.
    pub fn of(parts: &[Mapping]) -> Option<Self> {
        let first = parts.first()?;
        let same = |part: &Mapping| {
            part.is_shared
                && (part.device, part.inode) == (first.device, first.inode)
                && part.offset.wrapping_sub(part.start) == first.offset.wrapping_sub(first.start)
        };
        let found = Self {
            device: first.device,
            inode: first.inode,
        };
        (first.inode != 0 && parts.iter().all(same)).then_some(found)
    }

    /// Whether an open file is this one, to read and to write.
    fn is(self, file: &File) -> bool {
        // SAFETY: plain system call on a descriptor that is open.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        let is_named = |status: &std::fs::Metadata| {
            let device = status.dev();
            status.is_file()
                && status.ino() == self.inode
                && (libc::major(device), libc::minor(device)) == self.device
        };
        flags >= 0
            && flags & libc::O_ACCMODE == libc::O_RDWR
            && file.metadata().as_ref().is_ok_and(is_named)
    }

    /// The file that is mapped at an address: by the name of its mapping, which takes a privilege, by its own name,
    /// if it still has it, or by any descriptor that this process has of it.
    fn open(self, address: u64) -> Option<File> {
        let names = maps::names(address).ok().flatten().into_iter().flatten();
        let by_name = names.filter_map(|name| {
            // What has the name now may be anything, which to open might do anything.
            let status = std::fs::metadata(&name).ok()?;
            if !status.is_file() || status.ino() != self.inode {
                return None;
            }
            let mut options = OpenOptions::new();
            options.custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK);
            options.read(true).write(true).open(&name).ok()
        });
        let numbers = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
        let by_number = numbers.filter_map(|entry| {
            let number: RawFd = entry.ok()?.file_name().to_str()?.parse().ok()?;
            // SAFETY: another thread may close it meanwhile; then there is no copy, or one of something else.
            let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
            // SAFETY: the copy has no other owner.
            (copy >= 0).then(|| unsafe { File::from_raw_fd(copy) })
        });
        by_name.chain(by_number).find(|file| self.is(file))
    }
}

/// Lets the device reach registered memory that is a file's: its address for the device.
pub fn place(session: OnDevice, address: u64, pages: Pages, parts: &[Mapping]) -> Result<u64> {
    let (identity, first) = Identity::of(parts)
        .zip(parts.first())
        .ok_or(CuError::NOT_SUPPORTED)?;
    let file = identity.open(address).ok_or(CuError::NOT_SUPPORTED)?;
    // What the file does not have yet is this process's, as natively, and not the worker's.
    pages.populate();
    let at = session.map_file(&file, first.offset, pages.bytes())?;
    reached().push(Reached { address, at });
    Ok(at + (address - pages.start))
}

/// Ends a registration; false if it was not of a file.
pub fn release(session: OnDevice, address: u64) -> bool {
    let mut reached = reached();
    let found = reached.iter().position(|file| file.address == address);
    let Some(file) = found.map(|index| reached.swap_remove(index)) else {
        return false;
    };
    drop(reached);
    session.unmap_file(file.at);
    true
}
