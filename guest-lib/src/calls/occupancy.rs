//! Occupancy: resident blocks of a kernel per multiprocessor.

use std::ffi::c_void;

use crate::device::attribute as device_attribute;
use crate::error::{CuError, Result};
use crate::object::context::{self, Scope};
use crate::object::function::{self, attribute};
use crate::parameter::Out;
use crate::types::{CUfunction, CUoccupancyB2DSize};

fn blocks(
    scope: Scope,
    function: *mut c_void,
    block: i32,
    shared: usize,
    flags: u32,
) -> Result<i32> {
    let (handle, facts) = function::find_on(scope, function)?;
    let block = u32::try_from(block)
        .ok()
        .filter(|block| *block > 0)
        .ok_or(CuError::INVALID_VALUE)?;
    facts.blocks(scope, handle, block, shared as u64, flags)
}

pub fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    numBlocks: Out<'_, i32>,
    func: CUfunction,
    blockSize: i32,
    dynamicSMemSize: usize,
    flags: u32,
) -> Result {
    let scope = context::scope()?;
    let blocks = blocks(scope, func, blockSize, dynamicSMemSize, flags)?;
    numBlocks.put(blocks)
}

/// Returns the block size with the most resident threads, the greatest of equals. Tries the greatest size, then whole
/// warps in descending order.
pub fn cuOccupancyMaxPotentialBlockSizeWithFlags(
    minGridSize: Out<'_, i32>,
    blockSize: Out<'_, i32>,
    func: CUfunction,
    blockSizeToDynamicSMemSize: CUoccupancyB2DSize,
    dynamicSMemSize: usize,
    blockSizeLimit: i32,
    flags: u32,
) -> Result {
    let scope = context::scope()?;
    let (handle, facts) = function::find_on(scope, func)?;
    let device = scope.session.device();
    let warp = device.value(device_attribute::WARP_SIZE).max(1);
    let greatest = facts.attribute(scope, handle, attribute::MAX_THREADS_PER_BLOCK)?;
    let greatest = if blockSizeLimit > 0 {
        greatest.min(blockSizeLimit)
    } else {
        greatest
    };
    let whole = greatest - greatest % warp;
    let partial = (greatest % warp != 0).then_some(greatest);
    let sizes = (1..=whole / warp).rev().map(|warps| warps * warp);
    let (mut best_size, mut best_blocks) = (0, 0);
    for size in partial.into_iter().chain(sizes) {
        let shared = match blockSizeToDynamicSMemSize {
            // SAFETY: the program's function accepts a block size.
            Some(shared_of) => unsafe { shared_of(size) },
            None => dynamicSMemSize,
        };
        let resident = blocks(scope, func, size, shared, flags)?;
        if resident * size > best_blocks * best_size {
            (best_size, best_blocks) = (size, resident);
        }
    }
    let processors = device.value(device_attribute::MULTIPROCESSOR_COUNT);
    minGridSize.put(best_blocks * processors)?;
    blockSize.put(best_size)
}
