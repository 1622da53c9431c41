//! Registered memory that is a shared mapping of a file: the worker maps the same file, and the device reaches the same
//! pages. No page is moved, so other processes that map the file see the device's writes. In a VM these are the files of
//! `/dev/shm`, if the guest has memory for files.

use std::fs::{File, OpenOptions};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use wormhole_lock::{Mutex, MutexGuard};

use super::maps::{self, Mapping};
use crate::error::{CuError, Result};
use crate::pages::Pages;
use crate::session::{MappedFile, OnDevice};

/// A registration of a file's memory.
#[derive(Debug)]
struct Reached {
    /// The device's address of the registered memory.
    device: u64,
    file: MappedFile,
}

static REACHED: Mutex<Vec<Reached>> = Mutex::new(Vec::new());

fn reached() -> MutexGuard<'static, Vec<Reached>> {
    REACHED.lock()
}

/// Identity of a file: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    device: (u32, u32),
    inode: u64,
}

impl Identity {
    /// Returns the file that all parts map: shared, and at consecutive offsets.
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

    /// Returns true if a descriptor refers to this file, for reading and writing, and the file lies in a file system of this
    /// kind: the device can map no other.
    fn is(self, number: RawFd, kind: i64) -> bool {
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
            && system.f_type == kind
            && status.st_ino == self.inode
            && (libc::major(status.st_dev), libc::minor(status.st_dev)) == self.device
    }

    /// Returns a descriptor of the file that is mapped at an address: one that this process has open, or one opened by
    /// the name of the mapping (`/proc/self/map_files`, which needs a privilege) or by the file's own name, if it still
    /// has it.
    ///
    /// A descriptor of the program is not duplicated: closing a duplicate would release the program's locks on the
    /// file. A descriptor opened here comes with its owner.
    fn open(self, address: u64, kind: i64) -> Option<(RawFd, Option<File>)> {
        let numbers = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
        let mut numbers =
            numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        if let Some(number) = numbers.find(|number| self.is(*number, kind)) {
            return Some((number, None));
        }
        let names = maps::names(address).ok().flatten().into_iter().flatten();
        let mut files = names.filter_map(|name| {
            // Another file may have the name by now; opening a device or a FIFO could have side effects.
            let status = std::fs::metadata(&name).ok()?;
            if !status.is_file() || status.ino() != self.inode {
                return None;
            }
            let mut options = OpenOptions::new();
            options.custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK);
            options.read(true).write(true).open(&name).ok()
        });
        let file = files.find(|file| self.is(file.as_raw_fd(), kind))?;
        Some((file.as_raw_fd(), Some(file)))
    }
}

/// Maps registered memory of a file for the device; returns the device's address.
pub fn place(session: OnDevice, address: u64, pages: Pages, parts: &[Mapping]) -> Result<u64> {
    let (identity, first) = Identity::of(parts)
        .zip(parts.first())
        .ok_or(CuError::NOT_SUPPORTED)?;
    let kind = session.file_system().ok_or(CuError::NOT_SUPPORTED)?;
    let opened = identity.open(address, kind);
    let (number, _owner) = opened.ok_or(CuError::NOT_SUPPORTED)?;
    // Pages that the file does not have yet are charged to this process, as natively, and not to the worker.
    pages.populate();
    let is_still = || identity.is(number, kind);
    let file = session.map_file(number, is_still, first.offset, pages.bytes())?;
    let device = file.address + (address - pages.start);
    reached().push(Reached { device, file });
    Ok(device)
}

/// Ends the registration with this device address; returns false if it was not of a file.
pub fn release(session: OnDevice, device: u64) -> bool {
    let mut reached = reached();
    let found = reached.iter().position(|one| one.device == device);
    let Some(one) = found.map(|index| reached.swap_remove(index)) else {
        return false;
    };
    drop(reached);
    session.unmap_file(&one.file);
    true
}
