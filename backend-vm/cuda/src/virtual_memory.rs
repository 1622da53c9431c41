//! Virtual memory management by the driver.

use wormhole_api::constants::memory_granularity::{MINIMUM, RECOMMENDED};
use wormhole_api::constants::{memory_allocation_type, memory_location};
use wormhole_api::ctypes::{CUmemAllocationProp, CUmemLocation};
use wormhole_device::{
    Access, Comparison, CuError, Device, DriverCalls, Granularity, RawMemory, RawStream, Result,
    VirtualMemory,
};

use crate::device::{CudaDevice, size};
use crate::peers::access_of;

/// Unit in which driver 580 takes hints for reservations: multiples of it, in address and in size (measured).
const HINTED: u64 = 32 << 20;

impl CudaDevice {
    fn location(&self) -> CUmemLocation {
        CUmemLocation {
            r#type: memory_location::DEVICE,
            id: self.ordinal(),
        }
    }

    fn properties(&self, handle_types: u32) -> CUmemAllocationProp {
        CUmemAllocationProp {
            r#type: memory_allocation_type::PINNED,
            requestedHandleTypes: handle_types,
            location: self.location(),
            win32HandleMetaData: std::ptr::null_mut(),
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; _],
        }
    }
}

impl VirtualMemory for CudaDevice {
    fn granularity(&self) -> Result<Granularity> {
        let properties = self.properties(0);
        let ask = |option| -> Result<u64> {
            let mut bytes = 0;
            // SAFETY: both pointers are good.
            unsafe {
                self.driver().cuMemGetAllocationGranularity(
                    &raw mut bytes,
                    &raw const properties,
                    option,
                )
            }?;
            Ok(bytes as u64)
        };
        Ok(Granularity {
            minimum: ask(MINIMUM)?,
            recommended: ask(RECOMMENDED)?,
        })
    }

    fn create_memory(&self, bytes: u64, handle_types: u32) -> Result<RawMemory> {
        let properties = self.properties(handle_types);
        let mut memory = 0;
        // SAFETY: both pointers are good.
        unsafe {
            self.driver()
                .cuMemCreate(&raw mut memory, size(bytes), &raw const properties, 0)
        }?;
        Ok(RawMemory(memory))
    }

    fn map(&self, address: u64, bytes: u64, memory: RawMemory) -> Result<()> {
        // SAFETY: the memory exists; the driver checks the range.
        unsafe { self.driver().cuMemMap(address, size(bytes), 0, memory.0, 0) }
    }

    fn set_access(&self, address: u64, bytes: u64, access: Access) -> Result<()> {
        let description = access_of(self.ordinal(), access);
        // SAFETY: one description; the driver checks the range.
        unsafe {
            self.driver()
                .cuMemSetAccess(address, size(bytes), &raw const description, 1)
        }
    }

    fn place(&self, address: u64, bytes: u64) -> Result<()> {
        let memory = self.create_memory(bytes, 0)?;
        let placed = self.reserve_exactly(address, bytes).and_then(|()| {
            let mapped = self.map(address, bytes, memory).and_then(|()| {
                self.set_access(address, bytes, Access::ReadWrite)
                    .inspect_err(|_| _ = self.mem_unmap(address, bytes))
            });
            mapped.inspect_err(|_| _ = self.free_exactly(address, bytes))
        });
        // The mapping holds the memory from now on.
        let released = self.mem_release(memory);
        placed.and(released)
    }

    fn displace(&self, address: u64, bytes: u64) -> Result<()> {
        self.synchronize()?;
        self.mem_unmap(address, bytes)?;
        self.free_exactly(address, bytes)
    }

    fn differing(&self, comparison: &Comparison, stream: RawStream) -> Result<Vec<bool>> {
        self.compared(comparison, stream)
    }
}

impl CudaDevice {
    /// Maps memory for a moment, to find out whether it has this many bytes.
    ///
    /// # Errors
    /// The driver's, if it has fewer.
    pub(crate) fn try_map(&self, memory: RawMemory, bytes: u64) -> Result<()> {
        let room = bytes.checked_next_multiple_of(HINTED);
        let room = room.ok_or(CuError::INVALID_VALUE)?;
        let address = self.address_reserve(room, 0, 0)?;
        let mapped = self.map(address, bytes, memory);
        let unmapped = mapped.and_then(|()| self.mem_unmap(address, bytes));
        unmapped.and(self.address_free(address, room))
    }

    /// Reserves a range at this address, and the rest of its last unit. The driver treats the address as a hint.
    fn reserve_exactly(&self, address: u64, bytes: u64) -> Result<()> {
        match self.address_reserve(bytes.next_multiple_of(HINTED), 0, address)? {
            found if found == address => Ok(()),
            elsewhere => {
                self.free_exactly(elsewhere, bytes)?;
                Err(CuError::NOT_SUPPORTED)
            }
        }
    }

    fn free_exactly(&self, address: u64, bytes: u64) -> Result<()> {
        self.address_free(address, bytes.next_multiple_of(HINTED))
    }
}
