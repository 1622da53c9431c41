//! Address reservations, and physical memory that is mapped there.

use crate::{Access, Comparison, CuError, RawStream, Result};

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
    /// Creates memory, a multiple of the granularity in size, that can be exported as `handle_types`.
    fn create_memory(&self, bytes: u64, handle_types: u32) -> Result<RawMemory>;
    /// Maps all of the memory at a reserved address without mappings. Access rights are set later.
    fn map(&self, address: u64, bytes: u64, memory: RawMemory) -> Result<()>;
    /// Sets the access rights of a range that mappings fill without a gap.
    fn set_access(&self, address: u64, bytes: u64, access: Access) -> Result<()>;
    /// Puts memory of the device at addresses of the caller's choice, whole units of its granularity. Fails if this
    /// process maps something there, or behind it up to a multiple of 32 MiB. A device that cannot do so answers
    /// `CUDA_ERROR_NOT_SUPPORTED`.
    fn place(&self, _address: u64, _bytes: u64) -> Result<()> {
        Err(CuError::NOT_SUPPORTED)
    }
    /// Ends [`VirtualMemory::place`]: frees the memory, and maps nothing at the addresses. Waits until the device no longer
    /// accesses them. Nothing else may access them any more.
    fn displace(&self, _address: u64, _bytes: u64) -> Result<()> {
        Err(CuError::NOT_SUPPORTED)
    }
    /// Returns for each part of two ranges whether it differs, once the work of the stream before is complete. Waits for the
    /// stream.
    fn differing(&self, _comparison: &Comparison, _stream: RawStream) -> Result<Vec<bool>> {
        Err(CuError::NOT_SUPPORTED)
    }
}
