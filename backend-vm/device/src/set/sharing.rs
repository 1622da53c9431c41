//! Sharing with other processes, by whichever device it is of.

use super::{DeviceSet, Tagged};
use crate::{Found, RawEvent, RawMemory, RawPool, Result, Shared, Sharing};

impl Sharing for DeviceSet {
    fn share_allocation(&self, address: u64) -> Result<Shared> {
        let holder = self.holder(address, self.current());
        self.on(holder)?.share_allocation(address)
    }

    fn open_allocation(&self, found: Found) -> Result<(u64, u64)> {
        self.here()?.open_allocation(found)
    }

    /// The device that opened it may be another than the current one.
    fn close_allocation(&self, address: u64) -> Result<()> {
        let holder = self.holder(address, self.current());
        self.on(holder)?.close_allocation(address)
    }

    fn share_event(&self, event: RawEvent) -> Result<Shared> {
        let (device, event) = self.of(event)?;
        device.share_event(event)
    }

    fn open_event(&self, found: Found) -> Result<RawEvent> {
        self.here()?.open_event(found)?.of(self.current())
    }

    fn share_memory(&self, memory: RawMemory, bytes: u64) -> Result<Shared> {
        let (device, memory) = self.of(memory)?;
        device.share_memory(memory, bytes)
    }

    fn open_memory(&self, found: Found) -> Result<(RawMemory, u64)> {
        let (memory, bytes) = self.here()?.open_memory(found)?;
        Ok((memory.of(self.current())?, bytes))
    }

    fn share_pool(&self, pool: RawPool) -> Result<Shared> {
        let (device, pool) = self.of(pool)?;
        device.share_pool(pool)
    }

    fn open_pool(&self, found: Found) -> Result<RawPool> {
        self.here()?.open_pool(found)?.of(self.current())
    }

    fn share_pointer(&self, address: u64) -> Result<Shared> {
        let holder = self.holder(address, self.current());
        self.on(holder)?.share_pointer(address)
    }

    fn open_pointer(&self, pool: RawPool, found: Found) -> Result<(u64, u64)> {
        let (device, pool) = self.of(pool)?;
        device.open_pointer(pool, found)
    }
}
