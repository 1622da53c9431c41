//! Sharing between processes: parts of the files that back device memory, and events, each in its own file.

use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use wormhole_device::{
    CuError, EventRecord, Found, RawEvent, RawMemory, RawPool, Result, Shared, SharedWords, Sharing,
};

use crate::device::CpuDevice;
use crate::memory::Owner;

/// Interval at which a thread polls an event of another process.
const LOOK: Duration = Duration::from_micros(50);

/// An event that several processes use.
#[derive(Debug)]
pub struct SharedEvent(SharedWords);

impl SharedEvent {
    /// Creates an event that is not recorded yet and can be shared.
    pub fn new() -> Result<Self> {
        let words = SharedWords::new().map_err(|error| {
            tracing::warn!(%error, "no file can be had for an event that is to be shared");
            CuError::OUT_OF_MEMORY
        })?;
        Ok(Self(words))
    }

    /// Creates a new record, which others wait for from now on.
    pub fn record(&self) -> EventRecord {
        let record = self.0.record();
        self.0.words().publish(record);
        record
    }

    pub fn complete(&self, record: EventRecord) {
        self.0.words().complete(record);
    }

    pub fn is_complete(&self, record: EventRecord) -> bool {
        self.0.words().is_complete(record)
    }

    /// Returns the last record, made by any process.
    pub fn last(&self) -> EventRecord {
        self.0.words().last()
    }

    /// Waits until a record is complete or `stopped` returns true.
    pub fn wait(&self, record: EventRecord, stopped: impl Fn() -> bool) {
        while !self.is_complete(record) && !stopped() {
            thread::sleep(LOOK);
        }
    }
}

/// Describes a part of a file for sharing.
fn part(file: OwnedFd, offset: u64, bytes: u64) -> Shared {
    Shared {
        descriptor: Some(file),
        ..Shared::described([offset, bytes, 0, 0, 0, 0, 0, 0])
    }
}

/// Returns the file, offset and bytes that another process has shared.
fn found_part(found: Found) -> Result<(OwnedFd, u64, u64)> {
    let file = found.descriptor.ok_or(CuError::INVALID_VALUE)?;
    let [offset, bytes, ..] = found.description;
    Ok((file, offset, bytes))
}

impl Sharing for CpuDevice {
    fn share_allocation(&self, address: u64) -> Result<Shared> {
        self.context()?;
        let (file, offset, bytes) = self.memory.home(address, Owner::Program)?;
        Ok(part(file, offset, bytes))
    }

    fn open_allocation(&self, found: Found) -> Result<(u64, u64)> {
        self.context()?;
        let (file, offset, bytes) = found_part(found)?;
        let address = self.memory.open(&file, offset, bytes, Owner::Program)?;
        Ok((address, bytes))
    }

    fn share_event(&self, event: RawEvent) -> Result<Shared> {
        let event = self.context()?.events.shared(event)?;
        event.0.share()
    }

    fn open_event(&self, found: Found) -> Result<RawEvent> {
        let context = self.context()?;
        Ok(context.events.add(SharedEvent(SharedWords::open(found)?)))
    }

    fn share_memory(&self, memory: RawMemory, _: u64) -> Result<Shared> {
        self.memory.shared().share_memory(memory)
    }

    fn open_memory(&self, found: Found) -> Result<(RawMemory, u64)> {
        self.memory.shared().open_memory(&self.memory, found)
    }

    fn share_pool(&self, pool: RawPool) -> Result<Shared> {
        self.pools().shared(pool)?;
        Ok(part(self.memory.file()?, 0, 0))
    }

    fn open_pool(&self, found: Found) -> Result<RawPool> {
        let (file, ..) = found_part(found)?;
        Ok(self.pools().open(file))
    }

    fn share_pointer(&self, address: u64) -> Result<Shared> {
        let (offset, bytes) = self.pools().home(address)?;
        Ok(Shared::described([offset, bytes, 0, 0, 0, 0, 0, 0]))
    }

    fn open_pointer(&self, pool: RawPool, found: Found) -> Result<(u64, u64)> {
        let [offset, bytes, ..] = found.description;
        let address = self.pools().open_pointer(pool, offset, bytes)?;
        Ok((address, bytes))
    }
}
