//! Memory pools of the driver.

use std::ptr;

use wormhole_api::constants::{memory_allocation_type, memory_location};
use wormhole_api::ctypes::{CUmemLocation, CUmemPoolProps, CUmemoryPool};
use wormhole_api::pool::AttributeType;
use wormhole_device::{CuError, PoolProperties, Pools, RawPool, RawStream, Result};

use crate::device::{CudaDevice, handle, pointer, size, stream};

pub fn pool(pool: RawPool) -> CUmemoryPool {
    pointer(pool.0)
}

impl Pools for CudaDevice {
    fn default_pool(&self) -> Result<RawPool> {
        let mut pool = ptr::null_mut();
        // SAFETY: the device exists and the pointer is good.
        unsafe {
            self.driver()
                .cuDeviceGetDefaultMemPool(&raw mut pool, self.ordinal())
        }?;
        Ok(RawPool(handle(pool)))
    }

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

    fn destroy_pool(&self, raw: RawPool) -> Result<()> {
        // SAFETY: the pool was created here and is not used elsewhere.
        unsafe { self.driver().cuMemPoolDestroy(pool(raw)) }
    }

    fn trim_pool(&self, raw: RawPool, keep: u64) -> Result<()> {
        // SAFETY: the pool exists.
        unsafe { self.driver().cuMemPoolTrimTo(pool(raw), size(keep)) }
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

    fn allocate_async(&self, raw: RawPool, bytes: u64, on: RawStream) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the pool and the stream exist, the pointer is good.
        unsafe {
            self.driver().cuMemAllocFromPoolAsync(
                &raw mut address,
                size(bytes),
                pool(raw),
                stream(on),
            )
        }?;
        Ok(address)
    }

    fn free_async(&self, address: u64, on: RawStream) -> Result<()> {
        // SAFETY: the stream exists; the driver checks the address.
        unsafe { self.driver().cuMemFreeAsync(address, stream(on)) }
    }
}
