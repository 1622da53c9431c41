//! Sharing of memory and pools with other processes, by the driver's own mechanism.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use wormhole_api::constants::ipc_memory_flags::LAZY_ENABLE_PEER_ACCESS;
use wormhole_api::constants::memory_handle_type::POSIX_FILE_DESCRIPTOR;
use wormhole_api::ctypes::{CUipcMemHandle, CUmemPoolPtrExportData};
use wormhole_device::{
    CuError, DriverCalls, Found, RawEvent, RawMemory, RawPool, Result, Shared, Sharing,
};

use crate::device::{CudaDevice, handle};
use crate::pools::pool;
use crate::shared_events;

/// Converts the driver's 64 bytes to words.
fn words(bytes: [u8; 64]) -> [u64; 8] {
    let mut words = [0; 8];
    for (word, part) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*part);
    }
    words
}

fn bytes(words: &[u64; 8]) -> [u8; 64] {
    let mut bytes = [0; 64];
    for (part, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *part = word.to_ne_bytes();
    }
    bytes
}

/// Wraps a descriptor that the driver has exported.
fn exported(descriptor: RawFd) -> Result<Shared> {
    if descriptor < 0 {
        return Err(CuError::UNKNOWN);
    }
    // SAFETY: the driver has created the descriptor for this caller.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    Ok(Shared {
        descriptor: Some(descriptor),
        ..Shared::described([0; 8])
    })
}

/// Passes a descriptor as a pointer, as the driver expects.
fn as_pointer(descriptor: &OwnedFd) -> Result<*mut c_void> {
    let number = usize::try_from(descriptor.as_raw_fd()).map_err(|_| CuError::INVALID_VALUE)?;
    Ok(ptr::without_provenance_mut(number))
}

impl CudaDevice {
    /// Returns the size of opened memory. Closes the memory if the driver knows none of the device that starts there.
    fn opened(&self, address: u64, close: impl FnOnce(u64) -> Result<()>) -> Result<(u64, u64)> {
        let described = self.described(address);
        match described.map(|found| found.bytes_from(address)) {
            Ok(Some(bytes)) => Ok((address, bytes)),
            Ok(None) => {
                tracing::error!(
                    "the driver opened memory at {address:#x}, where it has none of the device that starts there"
                );
                close(address).and(Err(CuError::INVALID_VALUE))
            }
            Err(error) => close(address).and(Err(error)),
        }
    }
}

impl Sharing for CudaDevice {
    fn share_allocation(&self, address: u64) -> Result<Shared> {
        let mut made = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the pointer is good.
        unsafe { self.driver().cuIpcGetMemHandle(&raw mut made, address) }?;
        Ok(Shared::described(words(made.reserved)))
    }

    fn open_allocation(&self, found: Found) -> Result<(u64, u64)> {
        let reserved = bytes(&found.description);
        let mut address = 0;
        // SAFETY: the pointer is good. The driver checks a handle, even a forged one.
        unsafe {
            self.driver().cuIpcOpenMemHandle_v2(
                &raw mut address,
                CUipcMemHandle { reserved },
                LAZY_ENABLE_PEER_ACCESS,
            )
        }?;
        self.opened(address, |address| self.close_allocation(address))
    }

    fn share_event(&self, raw: RawEvent) -> Result<Shared> {
        let shared = shared_events::find(raw)?.ok_or(CuError::INVALID_HANDLE)?;
        shared.share()
    }

    fn open_event(&self, found: Found) -> Result<RawEvent> {
        self.open_shared(found)
    }

    fn share_memory(&self, memory: RawMemory, bytes: u64) -> Result<Shared> {
        let mut descriptor: RawFd = -1;
        // SAFETY: the memory exists; the driver writes one descriptor.
        unsafe {
            self.driver().cuMemExportToShareableHandle(
                (&raw mut descriptor).cast(),
                memory.0,
                POSIX_FILE_DESCRIPTOR,
                0,
            )
        }?;
        // The importing driver does not report the size.
        Ok(Shared {
            description: [bytes, 0, 0, 0, 0, 0, 0, 0],
            ..exported(descriptor)?
        })
    }

    fn open_memory(&self, found: Found) -> Result<(RawMemory, u64)> {
        let descriptor = found.descriptor.ok_or(CuError::INVALID_VALUE)?;
        let [bytes, ..] = found.description;
        let mut memory = 0;
        // SAFETY: the pointer is good; the driver checks the descriptor and does not close it.
        unsafe {
            self.driver().cuMemImportFromShareableHandle(
                &raw mut memory,
                as_pointer(&descriptor)?,
                POSIX_FILE_DESCRIPTOR,
            )
        }?;
        // The driver does not report the size, so the exporter did.
        let memory = RawMemory(memory);
        match self.try_map(memory, bytes) {
            Ok(()) => Ok((memory, bytes)),
            Err(error) => self.mem_release(memory).and(Err(error)),
        }
    }

    fn share_pool(&self, raw: RawPool) -> Result<Shared> {
        let mut descriptor: RawFd = -1;
        // SAFETY: the pool exists; the driver writes one descriptor.
        unsafe {
            self.driver().cuMemPoolExportToShareableHandle(
                (&raw mut descriptor).cast(),
                pool(raw),
                POSIX_FILE_DESCRIPTOR,
                0,
            )
        }?;
        exported(descriptor)
    }

    fn open_pool(&self, found: Found) -> Result<RawPool> {
        let descriptor = found.descriptor.ok_or(CuError::INVALID_VALUE)?;
        let mut opened = ptr::null_mut();
        // SAFETY: the pointer is good; the driver checks the descriptor and does not close it.
        unsafe {
            self.driver().cuMemPoolImportFromShareableHandle(
                &raw mut opened,
                as_pointer(&descriptor)?,
                POSIX_FILE_DESCRIPTOR,
                0,
            )
        }?;
        Ok(RawPool(handle(opened)))
    }

    fn share_pointer(&self, address: u64) -> Result<Shared> {
        let mut made = CUmemPoolPtrExportData { reserved: [0; 64] };
        // SAFETY: the pointer is good; the driver checks the address.
        unsafe { self.driver().cuMemPoolExportPointer(&raw mut made, address) }?;
        Ok(Shared::described(words(made.reserved)))
    }

    fn open_pointer(&self, raw: RawPool, found: Found) -> Result<(u64, u64)> {
        let mut data = CUmemPoolPtrExportData {
            reserved: bytes(&found.description),
        };
        let mut address = 0;
        // SAFETY: the pool exists, the pointers are good.
        unsafe {
            self.driver()
                .cuMemPoolImportPointer(&raw mut address, pool(raw), &raw mut data)
        }?;
        self.opened(address, |address| self.mem_free(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_made_is_carried_whole() {
        let description = [1, u64::MAX, 0x8182_8384_8586_8788, 4, 5, 6, 7, 8];
        assert_eq!(words(bytes(&description)), description);
    }
}
