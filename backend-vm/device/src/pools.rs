//! Memory pools and stream-ordered allocation.

use crate::{RawStream, Result};

/// Handle of a memory pool of this device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawPool(pub u64);

/// Properties of a new pool (`CUmemPoolProps`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolProperties {
    /// `CUmemAllocationHandleType`s that the pool's allocations can be exported as.
    pub handle_types: u32,
    /// Greatest size in bytes; 0 for the device's limit.
    pub most: u64,
}

/// Operations on pools. Pools belong to no context: a reset does not affect them and their allocations.
pub trait Pools {
    /// Returns the default pool, which always exists.
    fn default_pool(&self) -> Result<RawPool>;
    fn create_pool(&self, properties: &PoolProperties) -> Result<RawPool>;
    /// Destroys a pool. Its allocations remain until each is freed.
    fn destroy_pool(&self, pool: RawPool) -> Result<()>;
    /// Releases unused memory until the pool reserves at most `keep` bytes, as far as possible.
    fn trim_pool(&self, pool: RawPool, keep: u64) -> Result<()>;
    /// Returns a `CUmemPool_attribute`; 32-bit values are widened.
    fn pool_attribute(&self, pool: RawPool, attribute: u32) -> Result<u64>;
    fn set_pool_attribute(&self, pool: RawPool, attribute: u32, value: u64) -> Result<()>;
    /// Allocates memory for work submitted to the stream after this call. May wait for the system.
    fn allocate_async(&self, pool: RawPool, bytes: u64, stream: RawStream) -> Result<u64>;
    /// Frees memory after the preceding work of the stream. Asynchronous. [`crate::Device::free`] frees such memory at
    /// once.
    fn free_async(&self, address: u64, stream: RawStream) -> Result<()>;
}
