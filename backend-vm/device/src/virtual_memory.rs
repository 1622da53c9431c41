//! Addresses that are reserved, and memory that is mapped there.

use crate::{Access, Result};

/// Device memory that can be mapped (`CUmemGenericAllocationHandle`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawMemory(pub u64);

/// What sizes and addresses are multiples of, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granularity {
    pub minimum: u64,
    pub recommended: u64,
}

/// Virtual memory of a device. It belongs to no context: a reset leaves it alone.
pub trait VirtualMemory {
    fn granularity(&self) -> Result<Granularity>;
    /// Reserves addresses in the device's bands; `alignment` is a power of two or 0. The hint is followed
    /// where that is possible.
    fn reserve(&self, bytes: u64, alignment: u64, hint: u64) -> Result<u64>;
    /// Ends a reservation in which nothing is mapped.
    fn unreserve(&self, address: u64, bytes: u64) -> Result<()>;
    /// Memory of a multiple of the granularity, which can be exported as `handle_types`.
    fn create_memory(&self, bytes: u64, handle_types: u32) -> Result<RawMemory>;
    /// The memory goes when nothing maps it.
    fn release_memory(&self, memory: RawMemory) -> Result<()>;
    /// Maps all of the memory into reserved addresses where nothing is mapped; no access yet.
    fn map(&self, address: u64, bytes: u64, memory: RawMemory) -> Result<()>;
    /// Ends all mappings in a range, which they fill without a gap. Waits for nothing.
    fn unmap(&self, address: u64, bytes: u64) -> Result<()>;
    /// For a range that mappings fill without a gap.
    fn set_access(&self, address: u64, bytes: u64, access: Access) -> Result<()>;
}
