//! Virtual memory management by the driver.

use wormhole_api::constants::memory_granularity::{MINIMUM, RECOMMENDED};
use wormhole_api::constants::{memory_allocation_type, memory_location};
use wormhole_api::ctypes::{CUmemAllocationProp, CUmemLocation};
use wormhole_device::{Access, Granularity, RawMemory, Result, VirtualMemory};

use crate::device::{CudaDevice, size};
use crate::peers::access_of;

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
}
