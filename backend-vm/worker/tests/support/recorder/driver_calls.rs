//! Operations that consist of one driver call each.

use wormhole_device::{DriverCalls, RawFunction, Result};

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
}
