//! Sharing of memory, events and pools between the devices of different processes.

use std::os::fd::OwnedFd;

use crate::{RawEvent, RawMemory, RawPool, Result};

/// Export of an object, for another process's device.
#[derive(Debug)]
pub struct Shared {
    /// Description that only a device of the same kind understands.
    pub description: [u64; 8],
    /// Descriptor that belongs to the description.
    pub descriptor: Option<OwnedFd>,
    /// True if the descriptor is a file with an event's words.
    pub words: bool,
}

impl Shared {
    /// Makes an export that consists of a description alone.
    pub fn described(description: [u64; 8]) -> Self {
        Self {
            description,
            descriptor: None,
            words: false,
        }
    }
}

/// Import of an object. It comes from another worker, which is not trusted: the device checks it.
#[derive(Debug)]
pub struct Found {
    pub description: [u64; 8],
    pub descriptor: Option<OwnedFd>,
    /// Number of this process among the event's parties.
    pub party: u32,
}

/// Sharing with the devices of other processes. All operations may wait for the system, or for the device as the
/// driver's own functions do.
pub trait Sharing {
    /// Exports the allocation that starts at `address` (`cuIpcGetMemHandle`).
    fn share_allocation(&self, address: u64) -> Result<Shared>;
    /// Imports an allocation of another device. Returns address and size.
    fn open_allocation(&self, found: Found) -> Result<(u64, u64)>;
    /// Exports an event created for sharing (`CU_EVENT_INTERPROCESS`).
    fn share_event(&self, event: RawEvent) -> Result<Shared>;
    fn open_event(&self, found: Found) -> Result<RawEvent>;
    /// Exports memory of `bytes` bytes that was created for export (`cuMemExportToShareableHandle`).
    fn share_memory(&self, memory: RawMemory, bytes: u64) -> Result<Shared>;
    /// Imports memory of another device. Returns a handle of this device and the size.
    fn open_memory(&self, found: Found) -> Result<(RawMemory, u64)>;
    /// Exports a pool created for export (`cuMemPoolExportToShareableHandle`).
    fn share_pool(&self, pool: RawPool) -> Result<Shared>;
    /// Imports a pool of another device. It does not allocate.
    fn open_pool(&self, found: Found) -> Result<RawPool>;
    /// Exports an allocation of a shared pool (`cuMemPoolExportPointer`).
    fn share_pointer(&self, address: u64) -> Result<Shared>;
    /// Imports such an allocation. Returns address and size. It is freed as any allocation of a pool.
    fn open_pointer(&self, pool: RawPool, found: Found) -> Result<(u64, u64)>;
}
