//! Copies as programs describe them.

use std::ffi::c_void;

use crate::error::{CuError, Result};
use crate::object::array;
use crate::types::{CUDA_MEMCPY3D, CUarray};
use crate::work::boxes::Place;

/// `CU_MEMORYTYPE_HOST`, `_DEVICE`, `_ARRAY`, `_UNIFIED`.
pub const HOST: u32 = 1;
pub const DEVICE: u32 = 2;
pub const ARRAY: u32 = 3;
const UNIFIED: u32 = 4;

/// One end of a copy as a program describes it.
#[derive(Clone, Copy, Debug)]
pub struct Described {
    pub kind: u32,
    pub host: u64,
    pub device: u64,
    pub array: CUarray,
    /// Bytes, rows, slices.
    pub origin: [usize; 3],
    pub pitch: usize,
    pub rows: usize,
}

impl Described {
    /// Where the box lies. A pitch or a number of rows that is not given is the box's own.
    pub fn place(&self, extent: [u64; 3]) -> Result<Place> {
        let [width, height, _] = extent;
        let origin = self.origin.map(|place| place as u64);
        let base = match self.kind {
            HOST if self.host == 0 && !extent.contains(&0) => return Err(CuError::INVALID_VALUE),
            HOST => self.host,
            DEVICE | UNIFIED => self.device,
            ARRAY if self.array.is_null() => return Err(CuError::INVALID_VALUE),
            ARRAY => {
                let (array, shape) = array::find(self.array)?;
                return Ok(Place::Array {
                    array,
                    shape,
                    origin,
                });
            }
            _ => return Err(CuError::INVALID_VALUE),
        };
        let given = |value: usize, otherwise: u64| match value {
            0 => otherwise,
            value => value as u64,
        };
        let (pitch, rows) = (given(self.pitch, width), given(self.rows, height));
        let [x, y, z] = origin;
        if self.pitch != 0 && x.checked_add(width).is_none_or(|end| end > pitch) {
            return Err(CuError::INVALID_VALUE);
        }
        let start = z
            .checked_mul(rows)
            .and_then(|before| before.checked_add(y))
            .and_then(|before| before.checked_mul(pitch))
            .and_then(|before| before.checked_add(x))
            .and_then(|offset| base.checked_add(offset));
        Ok(Place::Memory {
            start: start.ok_or(CuError::INVALID_VALUE)?,
            pitch,
            rows,
            device: self.kind == DEVICE,
        })
    }
}

/// The address of memory of the program's own.
pub fn address(pointer: *const c_void) -> u64 {
    pointer.expose_provenance() as u64
}

/// Both ends of a copy, and how much it moves.
pub fn described(wanted: &CUDA_MEMCPY3D) -> ((Described, Described), [usize; 3]) {
    let to = Described {
        kind: wanted.dstMemoryType,
        host: address(wanted.dstHost),
        device: wanted.dstDevice,
        array: wanted.dstArray,
        origin: [wanted.dstXInBytes, wanted.dstY, wanted.dstZ],
        pitch: wanted.dstPitch,
        rows: wanted.dstHeight,
    };
    let from = Described {
        kind: wanted.srcMemoryType,
        host: address(wanted.srcHost),
        device: wanted.srcDevice,
        array: wanted.srcArray,
        origin: [wanted.srcXInBytes, wanted.srcY, wanted.srcZ],
        pitch: wanted.srcPitch,
        rows: wanted.srcHeight,
    };
    let extent = [wanted.WidthInBytes, wanted.Height, wanted.Depth];
    ((to, from), extent)
}

/// Where both ends of a copy lie, and how much it moves.
pub fn ends(wanted: &CUDA_MEMCPY3D) -> Result<((Place, Place), [u64; 3])> {
    let ((to, from), extent) = described(wanted);
    let extent = extent.map(|extent| extent as u64);
    Ok(((to.place(extent)?, from.place(extent)?), extent))
}
