//! Registered memory that is a file's, shared with other processes: the worker maps the same file, and the device
//! reaches the same pages. Nothing is moved, so whoever else has the file mapped sees what the device writes.

use std::fs::{File, OpenOptions};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::maps::{self, Mapping};
use crate::error::{CuError, Result};
use crate::pages::Pages;
use crate::session::OnDevice;

/// A registration.
#[derive(Debug)]
struct Reached {
    /// The device's address of what the program registered.
    device: u64,
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

    /// Whether a descriptor is of this file, to read and to write, and the file is memory that processes share: no
    /// other can be mapped for the device.
    fn is(self, number: RawFd) -> bool {
        let mut status = MaybeUninit::<libc::stat>::uninit();
        let mut system = MaybeUninit::<libc::statfs>::uninit();
        // SAFETY: another thread may close the descriptor meanwhile, which fails. The kernel fills both structures
        // where it succeeds.
        let (flags, status, system) = unsafe {
            if libc::fstat(number, status.as_mut_ptr()) != 0
                || libc::fstatfs(number, system.as_mut_ptr()) != 0
            {
                return false;
            }
            let flags = libc::fcntl(number, libc::F_GETFL);
            (flags, status.assume_init(), system.assume_init())
        };
        flags >= 0
            && flags & libc::O_ACCMODE == libc::O_RDWR
            && status.st_mode & libc::S_IFMT == libc::S_IFREG
            && system.f_type == libc::TMPFS_MAGIC
            && status.st_ino == self.inode
            && (libc::major(status.st_dev), libc::minor(status.st_dev)) == self.device
    }

    /// The file that is mapped at an address: by any descriptor that this process has of it, or by the name of its
    /// mapping, which takes a privilege, or by its own name, if it still has it.
    ///
    /// A descriptor is used as it is: to close a copy of it would release the locks that the program has on the file.
    /// One that was opened here comes with its owner.
    fn open(self, address: u64) -> Option<(RawFd, Option<File>)> {
        let numbers = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
        let mut numbers =
            numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        if let Some(number) = numbers.find(|number| self.is(*number)) {
            return Some((number, None));
        }
        let names = maps::names(address).ok().flatten().into_iter().flatten();
        let mut files = names.filter_map(|name| {
            // What has the name now may be anything, which to open might do anything.
            let status = std::fs::metadata(&name).ok()?;
            if !status.is_file() || status.ino() != self.inode {
                return None;
            }
            let mut options = OpenOptions::new();
            options.custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK);
            options.read(true).write(true).open(&name).ok()
        });
        let file = files.find(|file| self.is(file.as_raw_fd()))?;
        Some((file.as_raw_fd(), Some(file)))
    }
}

/// Lets the device reach registered memory that is a file's: its address for the device.
pub fn place(session: OnDevice, address: u64, pages: Pages, parts: &[Mapping]) -> Result<u64> {
    let (identity, first) = Identity::of(parts)
        .zip(parts.first())
        .filter(|_| session.maps_files())
        .ok_or(CuError::NOT_SUPPORTED)?;
    let (number, _owner) = identity.open(address).ok_or(CuError::NOT_SUPPORTED)?;
    // What the file does not have yet is this process's, as natively, and not the worker's.
    pages.populate();
    let is_still = || identity.is(number);
    let at = session.map_file(number, is_still, first.offset, pages.bytes())?;
    let device = at + (address - pages.start);
    reached().push(Reached { device, at });
    Ok(device)
}

/// Ends the registration that has this address for the device; false if it was not of a file.
pub fn release(session: OnDevice, device: u64) -> bool {
    let mut reached = reached();
    let found = reached.iter().position(|file| file.device == device);
    let Some(file) = found.map(|index| reached.swap_remove(index)) else {
        return false;
    };
    drop(reached);
    session.unmap_file(file.at);
    true
}
