//! The driver's own description of memory at an address.
//!
//! The address and the size of a variable come from an image, and those of shared memory from another process. Neither is
//! trusted: the worker lets a guest name only what the driver itself knows as memory of the device.

use wormhole_api::constants::memory_type::DEVICE;
use wormhole_api::constants::pointer_attribute::{IS_MANAGED, MEMORY_TYPE};
use wormhole_device::Result;

use crate::device::CudaDevice;

/// Memory as the driver describes it.
#[derive(Clone, Copy, Debug)]
pub struct Described {
    start: u64,
    bytes: u64,
    /// `CUmemorytype`.
    kind: u32,
    is_managed: bool,
}

impl Described {
    /// Returns whether a range lies in this memory, and this is memory of the device alone.
    pub fn holds(&self, address: u64, bytes: u64) -> bool {
        let offset = address.checked_sub(self.start);
        let room = offset.and_then(|offset| self.bytes.checked_sub(offset));
        self.kind == DEVICE && !self.is_managed && room.is_some_and(|room| bytes <= room)
    }

    /// Returns the size of this memory. `None` if it starts elsewhere, or is not of the device alone.
    pub fn bytes_from(&self, start: u64) -> Option<u64> {
        (start == self.start && self.holds(start, self.bytes)).then_some(self.bytes)
    }
}

impl CudaDevice {
    /// Asks the driver for the memory around an address.
    pub(crate) fn described(&self, address: u64) -> Result<Described> {
        let (mut start, mut bytes) = (0, 0);
        let (mut kind, mut is_managed) = (0_u32, 0_u32);
        let mut attributes = [MEMORY_TYPE, IS_MANAGED];
        let mut values = [(&raw mut kind).cast(), (&raw mut is_managed).cast()];
        // SAFETY: the pointers are good, and each attribute has four bytes at most; the driver checks the address.
        unsafe {
            self.driver()
                .cuMemGetAddressRange_v2(&raw mut start, &raw mut bytes, address)?;
            self.driver().cuPointerGetAttributes(
                2,
                attributes.as_mut_ptr(),
                values.as_mut_ptr(),
                address,
            )?;
        }
        Ok(Described {
            start,
            bytes: bytes as u64,
            kind,
            is_managed: is_managed != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use wormhole_api::constants::memory_type::{HOST, UNIFIED};

    use super::*;

    #[test]
    fn only_memory_of_the_device_holds_what_lies_in_it() {
        let memory = Described {
            start: 0x1000,
            bytes: 0x100,
            kind: DEVICE,
            is_managed: false,
        };
        for (address, bytes, is_held) in [
            (0x1000, 0x100, true),
            (0x1080, 0x80, true),
            (0x1100, 0, true),
            (0x1000, 0x101, false),
            (0x1080, 0x81, false),
            (0xfff, 2, false),
            (0x1101, 0, false),
            (0x1080, u64::MAX, false),
            (u64::MAX, 1, false),
        ] {
            assert_eq!(
                memory.holds(address, bytes),
                is_held,
                "{address:#x} {bytes:#x}"
            );
        }
        for kind in [0, HOST, UNIFIED] {
            let other = Described { kind, ..memory };
            assert!(!other.holds(0x1000, 1), "{kind}");
        }
        let managed = Described {
            is_managed: true,
            ..memory
        };
        assert!(!managed.holds(0x1000, 1));
        assert_eq!(memory.bytes_from(0x1000), Some(0x100));
        for other in [0xfff, 0x1001, 0x10ff, 0x1100] {
            assert_eq!(memory.bytes_from(other), None, "{other:#x}");
        }
        assert_eq!(managed.bytes_from(0x1000), None);
    }
}
