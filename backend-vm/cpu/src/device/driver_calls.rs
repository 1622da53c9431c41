//! Implements the `DriverCalls` trait: questions that a GPU's driver answers by one call.

use wormhole_device::constants::function_cache::PREFER_EQUAL;
use wormhole_device::constants::occupancy_flags::DISABLE_CACHING_OVERRIDE;
use wormhole_device::{CuError, DriverCalls, RawFunction, Result, Texels};

use super::CpuDevice;
use crate::image_limits::{LINEAR_BYTES, LINEAR_TEXELS};

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
}
