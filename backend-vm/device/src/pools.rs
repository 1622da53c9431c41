//! Memory pools and stream-ordered allocation.

use crate::{RawStream, Result};

/// A memory pool of this device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawPool(pub u64);

/// What a pool is made with (`CUmemPoolProps`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolProperties {
    /// `CUmemAllocationHandleType`s that its allocations can be exported as.
    pub handle_types: u32,
    /// The most bytes that it may hold; 0 for the device's own limit.
    pub most: u64,
}

/// Pools of a device. They belong to no context: a reset leaves them, and what was allocated from them, alone.
pub trait Pools {
    /// The pool that is always there.
    fn default_pool(&self) -> Result<RawPool>;
    fn create_pool(&self, properties: &PoolProperties) -> Result<RawPool>;
    /// The pool may not be named any more; its allocations stay until each is freed.
    fn destroy_pool(&self, pool: RawPool) -> Result<()>;
    /// Gives unused memory back until the pool holds no more than `keep` bytes, as far as that goes.
    fn trim_pool(&self, pool: RawPool, keep: u64) -> Result<()>;
    /// A `CUmemPool_attribute`; words are widened.
    fn pool_attribute(&self, pool: RawPool, attribute: u32) -> Result<u64>;
    fn set_pool_attribute(&self, pool: RawPool, attribute: u32, value: u64) -> Result<()>;
    /// Memory that work may use which is handed to the stream after this call. May wait for the system.
    fn allocate_async(&self, pool: RawPool, bytes: u64, stream: RawStream) -> Result<u64>;
    /// Asynchronous: the memory is used again when the work before it on the stream is complete.
    /// [`crate::Device::free`] frees such memory too, at once.
    fn free_async(&self, address: u64, stream: RawStream) -> Result<()>;
}
