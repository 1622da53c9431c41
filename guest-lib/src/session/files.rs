//! Files that the program shares with other processes, and that the worker maps for the device.

use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_api::{DevicePtr, FileMap, FileUnmap};
use wormhole_ring::arena::Arena;
use wormhole_ring::layout::FILES;

use super::OnDevice;
use crate::error::{CuError, Result};

/// The way to the worker for descriptors, and the addresses that their files get.
#[derive(Debug)]
pub struct Files {
    socket: UnixDatagram,
    band: Mutex<Arena>,
}

impl Files {
    /// The band for files is reserved. A file is sent without waiting for the worker.
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
        self.band.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OnDevice {
    /// Whether the worker can be sent files.
    pub fn maps_files(self) -> bool {
        self.files.is_some()
    }

    /// Lets the device reach a part of a file, in whole pages: where. The descriptor may be anybody's, who closes it
    /// meanwhile: `is_still` tells whether it was the file all along.
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

    /// Ends what [`OnDevice::map_file`] began. The device has finished with it.
    pub fn unmap_file(self, address: u64) {
        let message = FileUnmap {
            address: DevicePtr(address),
        };
        // The address is used again only if the worker has let go of it.
        if self.request(&message, |()| ()).is_ok() {
            self.forget_file(address);
        }
    }

    fn forget_file(self, address: u64) {
        if let Some(files) = &self.files {
            // It was allocated.
            let _ = files.band().free(address);
        }
    }
}
