//! Implements the `DriverCalls` trait: operations for which a GPU's driver has one call each.

use std::sync::Arc;

use wormhole_device::constants::function_cache::PREFER_EQUAL;
use wormhole_device::constants::occupancy_flags::DISABLE_CACHING_OVERRIDE;
use wormhole_device::constants::stream_flags::NON_BLOCKING;
use wormhole_device::{
    CuError, DriverCalls, RawArray, RawEvent, RawFunction, RawMemory, RawMipmap, RawPool,
    RawStream, Result, Texels,
};

use super::CpuDevice;
use crate::aperture::to_usize;
use crate::image_limits::{LINEAR_BYTES, LINEAR_TEXELS};
use crate::memory::{Owner, Use, pointer};
use crate::scheduler::Work;

impl DriverCalls for CpuDevice {
    fn function_get_attribute(&self, function: RawFunction, attribute: i32) -> Result<i32> {
        self.context()?
            .modules
            .kernel(function)?
            .attribute(attribute)
    }

    fn function_set_attribute(
        &self,
        function: RawFunction,
        attribute: i32,
        value: i32,
    ) -> Result<()> {
        self.context()?
            .modules
            .kernel(function)?
            .set_attribute(attribute, value)
    }

    fn function_set_cache_config(&self, function: RawFunction, config: u32) -> Result<()> {
        // There is no cache to divide.
        self.context()?.modules.kernel(function)?;
        if config > PREFER_EQUAL {
            Err(CuError::INVALID_VALUE)
        } else {
            Ok(())
        }
    }

    fn occupancy(&self, function: RawFunction, block: u32, flags: u32, shared: u64) -> Result<i32> {
        let kernel = self.context()?.modules.kernel(function)?;
        if block == 0 || flags & !DISABLE_CACHING_OVERRIDE != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let blocks = crate::launch::occupancy(&kernel.needs(), block, shared);
        i32::try_from(blocks).map_err(|_| CuError::UNKNOWN)
    }

    fn available_shared(&self, function: RawFunction, blocks: i32, block: i32) -> Result<u64> {
        let kernel = self.context()?.modules.kernel(function)?;
        let (Ok(blocks @ 1..), Ok(block @ 1..)) = (u32::try_from(blocks), u32::try_from(block))
        else {
            return Err(CuError::INVALID_VALUE);
        };
        let needs = kernel.needs();
        if block > needs.max_threads {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(crate::launch::available_shared(&needs, blocks, block))
    }

    /// Checks that the context lives. The CPU device has no persisting L2 lines to reset.
    fn reset_persisting_l2(&self) -> Result<()> {
        self.context().map(drop)
    }

    fn texture_linear_width(&self, format: u32, channels: u32) -> Result<u64> {
        let texels = Texels::new(format, channels)?;
        Ok(LINEAR_TEXELS.min(LINEAR_BYTES / texels.bytes()))
    }

    fn pool_default(&self) -> Result<RawPool> {
        self.context()?;
        Ok(self.pools.default_pool())
    }

    fn pool_destroy(&self, pool: RawPool) -> Result<()> {
        self.pools.destroy(pool)
    }

    fn pool_trim(&self, pool: RawPool, keep: u64) -> Result<()> {
        self.pools.trim(pool, keep, &self.context()?.scheduler)
    }

    fn pool_alloc(&self, pool: RawPool, stream: RawStream, bytes: u64) -> Result<u64> {
        let context = self.context()?;
        self.pools.allocate(pool, bytes, stream, &context.scheduler)
    }

    fn pool_free(&self, address: u64, stream: RawStream) -> Result<()> {
        let context = self.context()?;
        if self.pools.owns(address) {
            return self.pools.free(address, stream, &context.scheduler);
        }
        context.scheduler.frontier(stream)?;
        self.mem_free(address)
    }

    fn close_allocation(&self, address: u64) -> Result<()> {
        self.memory.opened(address, Owner::Program)?;
        self.idle()?;
        self.memory.close(address, Owner::Program)
    }

    fn address_reserve(&self, bytes: u64, alignment: u64, hint: u64) -> Result<u64> {
        self.memory.shared().reserve(bytes, alignment, hint)
    }

    fn address_free(&self, address: u64, bytes: u64) -> Result<()> {
        self.memory.shared().unreserve(address, bytes)
    }

    fn mem_release(&self, memory: RawMemory) -> Result<()> {
        self.memory.shared().release_memory(memory)
    }

    fn mem_unmap(&self, address: u64, bytes: u64) -> Result<()> {
        self.memory.shared().unmap(address, bytes)
    }

    fn mem_get_info(&self) -> Result<(u64, u64)> {
        self.context()?;
        Ok(self.memory.info())
    }

    fn mem_alloc(&self, bytes: u64) -> Result<u64> {
        self.beside_pools(|| self.memory.allocate(bytes, Owner::Program))
    }

    fn mem_free(&self, address: u64) -> Result<()> {
        self.context()?;
        if self.pools.owns(address) {
            return self.pools.free_now(address);
        }
        self.memory.owned(address, Owner::Program)?;
        self.idle()?;
        self.memory.free(address, Owner::Program)
    }

    fn mem_copy(&self, destination: u64, source: u64, bytes: u64, stream: RawStream) -> Result<()> {
        let context = self.context()?;
        if bytes == 0 {
            return Ok(());
        }
        let ends = [(destination, bytes, Use::Write), (source, bytes, Use::Read)];
        if !self.reaches(&context, stream, &ends)? {
            return Ok(());
        }
        let memory = Arc::clone(&self.memory);
        let work = move || {
            let _mapped = memory;
            // SAFETY: both ranges were checked to lie in memory of the device or in registered ranges, which stay
            // mapped until the work before their unregistration is complete. The C library's function is used because
            // other threads may write to the memory meanwhile.
            unsafe {
                libc::memmove(
                    pointer(destination).cast(),
                    pointer(source).cast(),
                    to_usize(bytes),
                )
            };
            Ok(())
        };
        context.scheduler.submit(stream, Work::new(work)).map(drop)
    }

    fn stream_create(&self, flags: u32, _: i32) -> Result<RawStream> {
        let context = self.context()?;
        if flags & !NON_BLOCKING != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(context.scheduler.create(flags & NON_BLOCKING == 0))
    }

    fn event_elapsed(&self, start: RawEvent, end: RawEvent) -> Result<f32> {
        self.context()?.events.elapsed(start, end)
    }

    fn context_get_limit(&self, limit: u32) -> Result<u64> {
        self.context()?.limits.get(limit)
    }

    fn array_destroy(&self, array: RawArray) -> Result<()> {
        self.idle()?.arrays.destroy(array, &self.memory)
    }

    fn mipmap_destroy(&self, mipmap: RawMipmap) -> Result<()> {
        self.idle()?.arrays.destroy_mipmap(mipmap, &self.memory)
    }

    fn mipmap_get_level(&self, mipmap: RawMipmap, level: u32) -> Result<RawArray> {
        self.context()?.arrays.level(mipmap, level)
    }

    fn texture_destroy(&self, texture: u64) -> Result<()> {
        self.context()?.arrays.destroy_object(texture)
    }

    fn surface_destroy(&self, surface: u64) -> Result<()> {
        self.context()?.arrays.destroy_object(surface)
    }
}
