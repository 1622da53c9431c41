//! Sharing between recorders: an export contains the object's number, and every open creates a new
//! object.

use wormhole_device::{Found, RawEvent, RawMemory, RawPool, Result, Shared, Sharing};

use super::Recorder;

impl Recorder {
    fn share(&self, call: &'static str, raw: u64) -> Result<Shared> {
        self.arrive(call);
        self.check(raw)?;
        Ok(Shared::described([raw; 8]))
    }
}

impl Sharing for Recorder {
    fn share_allocation(&self, address: u64) -> Result<Shared> {
        self.share("share_allocation", address)
    }
    fn open_allocation(&self, _: Found) -> Result<(u64, u64)> {
        self.arrive("open_allocation");
        Ok((self.make(), 64))
    }
    fn share_event(&self, event: RawEvent) -> Result<Shared> {
        self.share("share_event", event.0)
    }
    fn open_event(&self, _: Found) -> Result<RawEvent> {
        self.arrive("open_event");
        Ok(RawEvent(self.make()))
    }
    fn share_memory(&self, memory: RawMemory, _: u64) -> Result<Shared> {
        self.share("share_memory", memory.0)
    }
    fn open_memory(&self, _: Found) -> Result<(RawMemory, u64)> {
        self.arrive("open_memory");
        Ok((RawMemory(self.make()), 1 << 20))
    }
    fn share_pool(&self, pool: RawPool) -> Result<Shared> {
        self.share("share_pool", pool.0)
    }
    fn open_pool(&self, _: Found) -> Result<RawPool> {
        self.arrive("open_pool");
        Ok(RawPool(self.make()))
    }
    fn share_pointer(&self, address: u64) -> Result<Shared> {
        self.share("share_pointer", address)
    }
    fn open_pointer(&self, _: RawPool, _: Found) -> Result<(u64, u64)> {
        self.arrive("open_pointer");
        Ok((self.make(), 64))
    }
}
