//! Address reservations, and physical memory that is mapped there.

use crate::{Access, Result};

/// Handle of device memory that can be mapped (`CUmemGenericAllocationHandle`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawMemory(pub u64);

/// Granularity of sizes and addresses in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granularity {
    pub minimum: u64,
    pub recommended: u64,
}

/// Virtual memory of a device. It belongs to no context: a reset does not affect it.
pub trait VirtualMemory {
    fn granularity(&self) -> Result<Granularity>;
    /// Reserves addresses in the device's bands; `alignment` is a power of two or 0. The hint is followed if possible.
    fn reserve(&self, bytes: u64, alignment: u64, hint: u64) -> Result<u64>;
    /// Frees a reservation without mappings.
    fn unreserve(&self, address: u64, bytes: u64) -> Result<()>;
    /// Creates memory, a multiple of the granularity in size, that can be exported as `handle_types`.
    fn create_memory(&self, bytes: u64, handle_types: u32) -> Result<RawMemory>;
    /// Releases memory. It is freed when no mapping uses it.
    fn release_memory(&self, memory: RawMemory) -> Result<()>;
    /// Maps all of the memory at a reserved address without mappings. Access rights are set later.
    fn map(&self, address: u64, bytes: u64, memory: RawMemory) -> Result<()>;
    /// Removes all mappings of a range, which they fill without a gap. Does not wait.
    fn unmap(&self, address: u64, bytes: u64) -> Result<()>;
    /// Sets the access rights of a range that mappings fill without a gap.
    fn set_access(&self, address: u64, bytes: u64, access: Access) -> Result<()>;
}
