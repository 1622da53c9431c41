//! Memory pools of the driver.

use std::ptr;

use wormhole_api::constants::{memory_allocation_type, memory_location};
use wormhole_api::ctypes::{CUmemLocation, CUmemPoolProps, CUmemoryPool};
use wormhole_api::pool::AttributeType;
use wormhole_device::{CuError, PoolProperties, Pools, RawPool, Result};

use crate::device::{CudaDevice, handle, pointer, size};

pub fn pool(pool: RawPool) -> CUmemoryPool {
    pointer(pool.0)
}

impl Pools for CudaDevice {
    fn create_pool(&self, properties: &PoolProperties) -> Result<RawPool> {
        let properties = CUmemPoolProps {
            allocType: memory_allocation_type::PINNED,
            handleTypes: properties.handle_types,
            location: CUmemLocation {
                r#type: memory_location::DEVICE,
                id: self.ordinal(),
            },
            win32SecurityAttributes: ptr::null_mut(),
            maxSize: size(properties.most),
            usage: 0,
            reserved: [0; _],
        };
        let mut pool = ptr::null_mut();
        // SAFETY: both pointers are good.
        unsafe {
            self.driver()
                .cuMemPoolCreate(&raw mut pool, &raw const properties)
        }?;
        Ok(RawPool(handle(pool)))
    }

    fn pool_attribute(&self, raw: RawPool, attribute: u32) -> Result<u64> {
        let mut value = 0_u64;
        AttributeType::of(attribute).ok_or(CuError::INVALID_VALUE)?;
        // SAFETY: the pool exists; the value is at least as wide as the driver writes, and initialised to zero.
        unsafe {
            self.driver()
                .cuMemPoolGetAttribute(pool(raw), attribute, (&raw mut value).cast())
        }?;
        Ok(value)
    }

    fn set_pool_attribute(&self, raw: RawPool, attribute: u32, value: u64) -> Result<()> {
        let mut value = match AttributeType::of(attribute).ok_or(CuError::INVALID_VALUE)? {
            AttributeType::Flag => u64::from(value != 0),
            AttributeType::Bytes => value,
        };
        // SAFETY: the pool exists; the value is at least as wide as the driver reads it.
        unsafe {
            self.driver()
                .cuMemPoolSetAttribute(pool(raw), attribute, (&raw mut value).cast())
        }
    }
}
