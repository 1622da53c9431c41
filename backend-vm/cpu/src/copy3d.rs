//! 3-D copies: up to three-dimensional regions of memory and arrays.

use std::sync::Arc;

use wormhole_device::{Copy3dEnd, CuError, MemCopy3d, RawArray, Result, array};

use crate::aperture::to_usize;
use crate::arrays::Placed;
use crate::memory::{Memory, Use, pointer};

/// Location of a 3-D region: address of its first byte, row pitch and slice pitch.
#[derive(Clone, Copy, Debug)]
struct Laid {
    start: u64,
    row: u64,
    slice: u64,
}

impl Laid {
    /// Locates one end of a copy. Fails if a part of the region is not accessible memory.
    fn new(
        end: &Copy3dEnd,
        intent: Use,
        extent: [u64; 3],
        memory: &Memory,
        find: &dyn Fn(RawArray) -> Result<Placed>,
    ) -> Result<Self> {
        match *end {
            Copy3dEnd::Memory {
                address,
                pitch,
                rows,
            } => {
                let span = array::span(extent, pitch, rows).ok_or(CuError::INVALID_VALUE)?;
                memory.check(address, span, intent)?;
                Ok(Self {
                    start: address,
                    row: pitch,
                    slice: pitch.saturating_mul(rows),
                })
            }
            Copy3dEnd::Array { array, origin } => {
                let placed = find(array)?;
                if !placed.shape.holds(origin, extent) {
                    return Err(CuError::INVALID_VALUE);
                }
                let (row, slice) = placed.pitches();
                let [x, y, z] = origin;
                Ok(Self {
                    start: placed.address + x + y * row + z * slice,
                    row,
                    slice,
                })
            }
        }
    }

    /// Returns the offset of a row from the region's first byte.
    fn offset(&self, y: u64, z: u64) -> u64 {
        y * self.row + z * self.slice
    }
}

/// A copy with both ends located.
#[derive(Debug)]
pub struct Move {
    to: Laid,
    from: Laid,
    extent: [u64; 3],
    /// Keeps the device's memory mapped.
    _memory: Arc<Memory>,
}

impl Move {
    /// Locates both ends of a copy. `find` looks up arrays.
    pub fn new(
        copy: &MemCopy3d,
        memory: &Arc<Memory>,
        find: &dyn Fn(RawArray) -> Result<Placed>,
    ) -> Result<Self> {
        let extent = copy.extent;
        Ok(Self {
            to: Laid::new(&copy.to, Use::Write, extent, memory, find)?,
            from: Laid::new(&copy.from, Use::Read, extent, memory, find)?,
            extent,
            _memory: Arc::clone(memory),
        })
    }

    /// Executes the copy, as work of a stream.
    pub fn run(&self) {
        let (to, from) = (self.to, self.from);
        let [width, height, depth] = self.extent;
        for z in 0..depth {
            for y in 0..height {
                // SAFETY: both regions were checked to lie in memory of the device or in registered ranges, which stay
                // mapped until the work before their end is complete. The C library's function is used because other
                // threads may write to the memory meanwhile.
                unsafe {
                    libc::memmove(
                        pointer(to.start + to.offset(y, z)).cast(),
                        pointer(from.start + from.offset(y, z)).cast(),
                        to_usize(width),
                    )
                };
            }
        }
    }
}
