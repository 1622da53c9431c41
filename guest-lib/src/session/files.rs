//! Sends the worker files that the program shares with other processes, to be mapped for the device.

use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixDatagram;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_api::{DevicePtr, FileMap, FileUnmap};
use wormhole_lock::{Mutex, MutexGuard};
use wormhole_ring::arena::Arena;
use wormhole_ring::layout::FILES;

use super::OnDevice;
use crate::error::{CuError, Result};

/// Socket for descriptors to the worker (`SCM_RIGHTS`), and the addresses at which it maps their files.
#[derive(Debug)]
pub struct Files {
    socket: UnixDatagram,
    band: Mutex<Arena>,
}

impl Files {
    /// Makes the socket nonblocking, so that sending a file does not wait for the worker. The band for files must be
    /// reserved.
    pub fn new(socket: UnixDatagram) -> std::io::Result<Self> {
        socket.set_nonblocking(true)?;
        let mut band = Arena::default();
        band.add_extent(FILES.0, FILES.1)
            .map_err(std::io::Error::other)?;
        Ok(Self {
            socket,
            band: Mutex::new(band),
        })
    }

    pub fn descriptor(&self) -> i32 {
        self.socket.as_raw_fd()
    }

    fn band(&self) -> MutexGuard<'_, Arena> {
        self.band.lock()
    }
}

impl OnDevice {
    /// Returns true if the worker accepts files.
    pub fn maps_files(self) -> bool {
        self.files.is_some()
    }

    /// Maps whole pages of a file for the device; returns the device's address. Another thread may close and reuse the
    /// descriptor meanwhile: `is_still` checks that it still is the file.
    pub fn map_file(
        self,
        file: RawFd,
        is_still: impl Fn() -> bool,
        offset: u64,
        bytes: u64,
    ) -> Result<u64> {
        let files = self.files.as_ref().ok_or(CuError::NOT_SUPPORTED)?;
        let block = files.band().allocate(bytes, 4096);
        let address = block.map_err(|_| CuError::OUT_OF_MEMORY)?.address;
        let sent = files.socket.send_with_fd(&address.to_ne_bytes()[..], file);
        let message = FileMap {
            address: DevicePtr(address),
            offset,
            bytes,
        };
        let mapped = match sent {
            Ok(_) if is_still() => self.request(&message, |()| ()),
            Ok(_) => Err(CuError::NOT_SUPPORTED),
            Err(_) => Err(CuError::OPERATING_SYSTEM),
        };
        if mapped.is_err() {
            self.forget_file(address);
        }
        mapped.map(|()| address)
    }

    /// Unmaps a file that [`OnDevice::map_file`] mapped. The device must have finished with it.
    pub fn unmap_file(self, address: u64) {
        let message = FileUnmap {
            address: DevicePtr(address),
        };
        // The address is used again only if the worker has unmapped it.
        if self.request(&message, |()| ()).is_ok() {
            self.forget_file(address);
        }
    }

    fn forget_file(self, address: u64) {
        if let Some(files) = &self.files {
            // The address was allocated, so this cannot fail.
            let _ = files.band().free(address);
        }
    }
}
