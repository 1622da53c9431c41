//! Operations that consist of one driver call each.

use std::sync::atomic::Ordering;

use wormhole_device::{
    CuError, DriverCalls, RawArray, RawEvent, RawFunction, RawMemory, RawMipmap, RawPool,
    RawStream, Result,
};

use super::Recorder;

impl DriverCalls for Recorder {
    fn function_get_attribute(&self, _: RawFunction, _: i32) -> Result<i32> {
        self.arrive("function_get_attribute");
        Ok(0)
    }
    fn function_set_attribute(&self, _: RawFunction, _: i32, _: i32) -> Result<()> {
        self.arrive("function_set_attribute");
        Ok(())
    }
    fn function_set_cache_config(&self, _: RawFunction, _: u32) -> Result<()> {
        self.arrive("function_set_cache_config");
        Ok(())
    }
    fn occupancy(&self, _: RawFunction, _: u32, _: u32, _: u64) -> Result<i32> {
        self.arrive("occupancy");
        Ok(1)
    }
    fn available_shared(&self, _: RawFunction, blocks: i32, block: i32) -> Result<u64> {
        self.arrive("available_shared");
        Ok(u64::from(blocks.unsigned_abs()) << 32 | u64::from(block.unsigned_abs()))
    }
    fn texture_linear_width(&self, format: u32, channels: u32) -> Result<u64> {
        self.arrive("texture_linear_width");
        Ok(u64::from(format) << 32 | u64::from(channels))
    }
    fn reset_persisting_l2(&self) -> Result<()> {
        self.arrive("reset_persisting_l2");
        Ok(())
    }
    fn mem_get_info(&self) -> Result<(u64, u64)> {
        self.arrive("mem_get_info");
        Ok((0, 1 << 30))
    }
    fn mem_alloc(&self, _: u64) -> Result<u64> {
        self.arrive("mem_alloc");
        if self.lacks_memory.load(Ordering::Acquire) {
            return Err(CuError::OUT_OF_MEMORY);
        }
        Ok(self.make())
    }
    fn mem_free(&self, address: u64) -> Result<()> {
        self.arrive("mem_free");
        self.end(address)
    }
    fn mem_copy(&self, _: u64, _: u64, _: u64, stream: RawStream) -> Result<()> {
        self.arrive("mem_copy");
        self.check(stream.0)
    }
    fn stream_create(&self, flags: u32, _: i32) -> Result<RawStream> {
        if let Some(crash) = self.crash {
            crash(flags);
        }
        let made = self.make();
        self.enter(flags);
        Ok(RawStream(made))
    }
    fn event_elapsed(&self, _: RawEvent, _: RawEvent) -> Result<f32> {
        self.arrive("event_elapsed");
        Err(CuError::NOT_SUPPORTED)
    }
    fn context_get_limit(&self, limit: u32) -> Result<u64> {
        self.arrive("context_get_limit");
        if let Some(crash) = self.crash {
            crash(1000 + limit);
        }
        Ok(0)
    }
    fn pool_default(&self) -> Result<RawPool> {
        self.arrive("pool_default");
        Ok(RawPool(1))
    }
    fn pool_destroy(&self, pool: RawPool) -> Result<()> {
        self.arrive("pool_destroy");
        self.end(pool.0)
    }
    fn pool_trim(&self, _: RawPool, _: u64) -> Result<()> {
        self.arrive("pool_trim");
        Ok(())
    }
    fn pool_alloc(&self, _: RawPool, stream: RawStream, _: u64) -> Result<u64> {
        self.arrive("pool_alloc");
        self.check(stream.0)?;
        Ok(self.make())
    }
    fn pool_free(&self, address: u64, stream: RawStream) -> Result<()> {
        self.check(stream.0)?;
        self.end(address)
    }
    fn address_reserve(&self, _: u64, _: u64, _: u64) -> Result<u64> {
        self.arrive("address_reserve");
        Ok(self.make())
    }
    fn address_free(&self, address: u64, _: u64) -> Result<()> {
        self.arrive("address_free");
        self.end(address)
    }
    fn mem_release(&self, memory: RawMemory) -> Result<()> {
        self.arrive("mem_release");
        self.end(memory.0)
    }
    fn mem_unmap(&self, _: u64, _: u64) -> Result<()> {
        self.arrive("mem_unmap");
        Ok(())
    }
    fn array_destroy(&self, array: RawArray) -> Result<()> {
        self.arrive("array_destroy");
        self.end(array.0)
    }
    fn mipmap_destroy(&self, mipmap: RawMipmap) -> Result<()> {
        self.arrive("mipmap_destroy");
        self.end(mipmap.0)
    }
    fn mipmap_get_level(&self, mipmap: RawMipmap, level: u32) -> Result<RawArray> {
        self.check(mipmap.0)?;
        Ok(RawArray(mipmap.0 + u64::from(level)))
    }
    fn texture_destroy(&self, texture: u64) -> Result<()> {
        self.end(texture)
    }
    fn surface_destroy(&self, surface: u64) -> Result<()> {
        self.end(surface)
    }
    fn close_allocation(&self, address: u64) -> Result<()> {
        self.arrive("close_allocation");
        self.end(address)
    }
}
