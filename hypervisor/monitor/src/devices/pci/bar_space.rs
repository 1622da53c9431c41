//! Allocates addresses for BARs.

use std::ops::Range;

/// The range for BARs has no room for another BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no room for a BAR of {size:#x} bytes in the guest's addresses")]
pub struct NoBarSpace {
    /// Size of the BAR.
    pub size: u64,
}

/// Allocator of BAR addresses. It never frees one, since a VM's devices exist until the VM ends.
#[derive(Debug)]
pub struct BarSpace {
    free: Range<u64>,
}

impl BarSpace {
    /// Creates an allocator of the addresses in `range`.
    pub fn new(range: Range<u64>) -> Self {
        Self { free: range }
    }

    /// Allocates an address for a BAR of `size` bytes, a power of two, aligned to its size as PCI requires.
    ///
    /// # Errors
    /// The range is used up, or the address has more than 32 bits.
    pub fn allocate(&mut self, size: u32) -> Result<u32, NoBarSpace> {
        let size = size.into();
        let address = self.allocate_wide(size)?;
        u32::try_from(address).map_err(|_| NoBarSpace { size })
    }

    /// Allocates an address for a BAR as [`BarSpace::allocate`] does, of 64 bits.
    ///
    /// # Errors
    /// The range is used up.
    pub fn allocate_wide(&mut self, size: u64) -> Result<u64, NoBarSpace> {
        let full = NoBarSpace { size };
        let start = self.free.start.checked_next_multiple_of(size).ok_or(full)?;
        let end = start.checked_add(size).ok_or(full)?;
        if end > self.free.end {
            return Err(full);
        }
        self.free.start = end;
        Ok(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_full_range_gives_no_more() {
        let mut space = BarSpace::new(0xc000_0000..0xc000_3000);
        assert_eq!(space.allocate(0x2000), Ok(0xc000_0000));
        let full = Err(NoBarSpace { size: 0x2000 });
        assert_eq!(space.allocate(0x2000), full);
        assert_eq!(space.allocate(0x1000), Ok(0xc000_2000));
        assert!(space.allocate(0x1000).is_err());
    }

    #[test]
    fn addresses_above_4_gib_are_no_32_bit_bar() {
        let mut space = BarSpace::new(1 << 32..1 << 33);
        assert!(space.allocate(0x1000).is_err());
        let mut space = BarSpace::new(5 << 30..9 << 30);
        assert_eq!(
            space.allocate_wide(1 << 32),
            Err(NoBarSpace { size: 1 << 32 })
        );
        assert_eq!(space.allocate_wide(1 << 31), Ok(6 << 30));
        assert_eq!(space.allocate_wide(1 << 30), Ok(8 << 30));
    }

    proptest! {
        #[test]
        fn bars_are_aligned_and_disjoint(shifts in proptest::collection::vec(12u32..24, 1..20)) {
            let mut space = BarSpace::new(0xc000_0000..0xfec0_0000);
            let mut end = 0;
            for size in shifts.into_iter().map(|shift| 1u32 << shift) {
                let Ok(address) = space.allocate(size) else { break };
                prop_assert!(address.is_multiple_of(size));
                prop_assert!(u64::from(address) >= end);
                end = u64::from(address) + u64::from(size);
            }
        }
    }
}
