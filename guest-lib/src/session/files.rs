//! Names files to the worker that the program shares with other processes, to be mapped for the device. On the worker's own
//! system it gets their descriptors. In a VM it gets the parts of the guest's memory for files in which they lie.

use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixDatagram;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_api::{DevicePtr, FileMap, FileMemoryMap, FileUnmap, Items};
use wormhole_lock::{Mutex, MutexGuard};
use wormhole_ring::arena::Arena;
use wormhole_ring::layout::FILES;

use super::OnDevice;
use super::keeper::{FileNumber, Keeper};
use crate::error::{CuError, Result};
use crate::log;

/// File system of a VM's memory for files.
const EXT4_MAGIC: i64 = libc::EXT4_SUPER_MAGIC;

/// Way of files to the worker, and the addresses at which it maps them.
#[derive(Debug)]
pub struct Files {
    way: Way,
    band: Mutex<Arena>,
}

#[derive(Debug)]
enum Way {
    /// Socket for descriptors (`SCM_RIGHTS`).
    Socket(UnixDatagram),
    Keeper(Keeper),
}

/// A file that the worker has mapped.
#[derive(Debug)]
pub struct MappedFile {
    /// The device's address of its first page.
    pub address: u64,
    /// The keeper's number of it.
    held: Option<FileNumber>,
}

impl Files {
    /// Makes the socket nonblocking, so that sending a file does not wait for the worker. The band for files must be
    /// reserved.
    pub fn by_socket(socket: UnixDatagram) -> std::io::Result<Self> {
        socket.set_nonblocking(true)?;
        Self::new(Way::Socket(socket))
    }

    /// Names files as parts of a VM's memory. The band for files must be reserved.
    pub fn by_keeper(keeper: Keeper) -> std::io::Result<Self> {
        Self::new(Way::Keeper(keeper))
    }

    fn new(way: Way) -> std::io::Result<Self> {
        let mut band = Arena::default();
        band.add_extent(FILES.0, FILES.1)
            .map_err(std::io::Error::other)?;
        Ok(Self {
            way,
            band: Mutex::new(band),
        })
    }

    /// Returns the descriptor of the socket, if there is one from the start.
    pub fn descriptor(&self) -> Option<i32> {
        match &self.way {
            Way::Socket(socket) => Some(socket.as_raw_fd()),
            Way::Keeper(_) => None,
        }
    }

    fn band(&self) -> MutexGuard<'_, Arena> {
        self.band.lock()
    }
}

impl OnDevice {
    /// Returns the file system whose files the worker accepts (`f_type` of statfs(2)), if there is one.
    pub fn file_system(self) -> Option<i64> {
        let files = self.files.as_ref()?;
        Some(match &files.way {
            Way::Socket(_) => libc::TMPFS_MAGIC,
            Way::Keeper(_) => EXT4_MAGIC,
        })
    }

    /// Maps whole pages of a file for the device. Another thread may close and reuse the descriptor meanwhile: `is_still`
    /// checks that it still is the file.
    pub fn map_file(
        self,
        file: RawFd,
        is_still: impl Fn() -> bool,
        offset: u64,
        bytes: u64,
    ) -> Result<MappedFile> {
        let files = self.files.as_ref().ok_or(CuError::NOT_SUPPORTED)?;
        let block = files.band().allocate(bytes, 4096);
        let address = block.map_err(|_| CuError::OUT_OF_MEMORY)?.address;
        let mapped = match &files.way {
            Way::Socket(socket) => {
                let sent = socket.send_with_fd(&address.to_ne_bytes()[..], file);
                let message = FileMap {
                    address: DevicePtr(address),
                    offset,
                    bytes,
                };
                match sent {
                    Ok(_) if is_still() => self.request(&message, |()| None),
                    Ok(_) => Err(CuError::NOT_SUPPORTED),
                    Err(_) => Err(CuError::OPERATING_SYSTEM),
                }
            }
            Way::Keeper(keeper) => self
                .map_parts(keeper, (file, offset, bytes), is_still, address)
                .map(Some),
        };
        if mapped.is_err() {
            self.forget_file(address);
        }
        mapped.map(|held| MappedFile { address, held })
    }

    /// Has the worker map the parts of a file at an address. Returns the keeper's number of the file.
    fn map_parts(
        self,
        keeper: &Keeper,
        (file, offset, bytes): (RawFd, u64, u64),
        is_still: impl Fn() -> bool,
        address: u64,
    ) -> Result<FileNumber> {
        let held = keeper.hold(file, offset, bytes).map_err(|error| {
            log::debug!("a file's place in the memory for files is not known: {error}");
            CuError::NOT_SUPPORTED
        })?;
        let message = FileMemoryMap {
            address: DevicePtr(address),
            parts: Items::new(&held.parts),
        };
        let sum = held.parts.iter().map(|part| part.bytes).sum::<u64>();
        let mapped = match sum == bytes && is_still() {
            true => self.request(&message, |()| held.number),
            false => Err(CuError::NOT_SUPPORTED),
        };
        mapped.inspect_err(|_| keeper.let_go(held.number))
    }

    /// Unmaps a file that [`OnDevice::map_file`] mapped. The device must have finished with it.
    pub fn unmap_file(self, file: &MappedFile) {
        let message = FileUnmap {
            address: DevicePtr(file.address),
        };
        // The address is used again, and the file let go, only if the worker has unmapped it.
        if self.request(&message, |()| ()).is_err() {
            return;
        }
        self.forget_file(file.address);
        let way = self.files.as_ref().map(|files| &files.way);
        if let (Some(Way::Keeper(keeper)), Some(number)) = (way, file.held) {
            keeper.let_go(number);
        }
    }

    fn forget_file(self, address: u64) {
        if let Some(files) = &self.files {
            // The address was allocated, so this cannot fail.
            let _ = files.band().free(address);
        }
    }
}
