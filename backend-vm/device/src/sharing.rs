//! What one device lets the devices of other processes use: memory, events and pools.

use std::os::fd::OwnedFd;

use crate::{RawEvent, RawMemory, RawPool, Result};

/// What another process's device needs to use something of this one.
#[derive(Debug)]
pub struct Shared {
    /// Means something to a device of the same kind alone.
    pub description: [u64; 8],
    /// Goes with it.
    pub descriptor: Option<OwnedFd>,
    /// The descriptor is that of a file with an event's words.
    pub words: bool,
}

impl Shared {
    /// For which a description is enough.
    pub fn described(description: [u64; 8]) -> Self {
        Self {
            description,
            descriptor: None,
            words: false,
        }
    }
}

/// What another process's device has shared. It comes from another worker, and so from anywhere: it is checked.
#[derive(Debug)]
pub struct Found {
    pub description: [u64; 8],
    pub descriptor: Option<OwnedFd>,
    /// Which of an event's parties this process is.
    pub party: u32,
}

/// Sharing with the devices of other processes. Any of it may wait for the system, or for the device as the
/// driver's own functions do.
pub trait Sharing {
    /// Shares the allocation that starts at `address` (`cuIpcGetMemHandle`).
    fn share_allocation(&self, address: u64) -> Result<Shared>;
    /// Shows what another device has shared: address and bytes.
    fn open_allocation(&self, found: Found) -> Result<(u64, u64)>;
    /// Ends what [`Sharing::open_allocation`] began; waits as `cuIpcCloseMemHandle` does.
    fn close_allocation(&self, address: u64) -> Result<()>;
    /// Shares an event that was made for it (`CU_EVENT_INTERPROCESS`).
    fn share_event(&self, event: RawEvent) -> Result<Shared>;
    fn open_event(&self, found: Found) -> Result<RawEvent>;
    /// Shares mappable memory of that size, which was made for it (`cuMemExportToShareableHandle`).
    fn share_memory(&self, memory: RawMemory, bytes: u64) -> Result<Shared>;
    /// Another device's memory under a name of this one, and its bytes.
    fn open_memory(&self, found: Found) -> Result<(RawMemory, u64)>;
    /// Shares a pool that was made for it (`cuMemPoolExportToShareableHandle`).
    fn share_pool(&self, pool: RawPool) -> Result<Shared>;
    /// Another device's pool. Nothing can be allocated from it.
    fn open_pool(&self, found: Found) -> Result<RawPool>;
    /// Shares an allocation of a pool that is shared (`cuMemPoolExportPointer`).
    fn share_pointer(&self, address: u64) -> Result<Shared>;
    /// Shows such an allocation: address and bytes. It is freed like any other of a pool.
    fn open_pointer(&self, pool: RawPool, found: Found) -> Result<(u64, u64)>;
}
