//! Memory pools and stream-ordered allocation.

use crate::Result;

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
    fn create_pool(&self, properties: &PoolProperties) -> Result<RawPool>;
    /// Returns a `CUmemPool_attribute`; 32-bit values are widened.
    fn pool_attribute(&self, pool: RawPool, attribute: u32) -> Result<u64>;
    fn set_pool_attribute(&self, pool: RawPool, attribute: u32, value: u64) -> Result<()>;
}
