//! Comparison of two ranges of device memory, part by part.

use crate::{CuError, Result};

/// Blocks of [`Comparison::TEXT`]'s kernel that share a part, and the threads of each.
const BLOCKS: u32 = 32;
const THREADS: u32 = 256;

/// Two ranges of device memory, of whole parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// Addresses of the ranges, multiples of 16.
    pub ranges: [u64; 2],
    /// Bytes of each range.
    pub bytes: u64,
    /// Address of device memory of [`Comparison::MARK`] bytes for each part, which the comparison may overwrite.
    pub marks: u64,
}

impl Comparison {
    /// Bytes of a part.
    pub const PART: u64 = 2 << 20;
    /// Bytes of a part's mark.
    pub const MARK: u64 = 4;
    /// PTX of the kernel `compare`, which sets the mark of each part that differs to 1, and changes no other mark. Each
    /// thread compares every 256th vector of 16 bytes of its block's share of a part.
    pub const TEXT: &'static str = include_str!("comparison.ptx");
    pub const KERNEL: &'static str = "compare";
    pub const BLOCK: [u32; 3] = [THREADS, 1, 1];

    /// Returns the bytes of the marks of a range.
    #[must_use]
    pub const fn marks_of(bytes: u64) -> u64 {
        bytes.div_ceil(Self::PART) * Self::MARK
    }

    /// Returns the number of parts.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`: the ranges are no whole parts, or do not lie at multiples of 16.
    pub fn parts(&self) -> Result<u32> {
        let aligned = self.ranges.iter().all(|start| start.is_multiple_of(16));
        if !aligned || self.bytes == 0 || !self.bytes.is_multiple_of(Self::PART) {
            return Err(CuError::INVALID_VALUE);
        }
        u32::try_from(self.bytes / Self::PART).map_err(|_| CuError::INVALID_VALUE)
    }

    /// Returns the grid of the kernel.
    ///
    /// # Errors
    /// As [`Comparison::parts`], or the ranges have more parts than a grid has room for.
    pub fn grid(&self) -> Result<[u32; 3]> {
        let blocks = self.parts()?.checked_mul(BLOCKS);
        let blocks = blocks.filter(|blocks| i32::try_from(*blocks).is_ok());
        Ok([blocks.ok_or(CuError::INVALID_VALUE)?, 1, 1])
    }

    /// Returns the parameters of the kernel.
    #[must_use]
    pub fn parameters(&self) -> [u8; 24] {
        let [first, second] = self.ranges;
        let mut packed = [0; 24];
        for (place, value) in packed.chunks_exact_mut(8).zip([first, second, self.marks]) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        packed
    }
}
