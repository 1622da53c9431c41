//! Conversion of copies from and to their description (`CUDA_MEMCPY3D`).

use std::ffi::c_void;

use crate::error::{CuError, Result};
use crate::handle::to_pointer;
use crate::object::array;
use crate::types::{CUDA_MEMCPY3D, CUarray};
use crate::work::copy3d::Place;

pub use wormhole_api::constants::memory_type::{ARRAY, DEVICE, HOST, UNIFIED};

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
    /// Returns the location of the 3-D region. A pitch or a number of rows of 0 stands for the region's own.
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

impl Described {
    /// Returns an end that is bytes from an address on.
    pub const fn memory(kind: u32, address: u64) -> Self {
        let (host, device) = match kind {
            HOST => (address, 0),
            _ => (0, address),
        };
        Self {
            kind,
            host,
            device,
            array: std::ptr::null_mut(),
            origin: [0; 3],
            pitch: 0,
            rows: 0,
        }
    }

    /// Returns an end that is a 3-D region in a place.
    fn of(place: Place) -> Result<Self> {
        Ok(match place {
            Place::Memory {
                start,
                pitch,
                rows,
                device,
            } => Self {
                pitch: size(pitch)?,
                rows: size(rows)?,
                ..Self::memory(if device { DEVICE } else { UNIFIED }, start)
            },
            Place::Array { array, origin, .. } => Self {
                array: to_pointer(array),
                origin: [size(origin[0])?, size(origin[1])?, size(origin[2])?],
                ..Self::memory(ARRAY, 0)
            },
        })
    }
}

fn size(value: u64) -> Result<usize> {
    usize::try_from(value).map_err(|_| CuError::INVALID_VALUE)
}

/// Returns the address of a host pointer, and exposes its provenance.
pub fn address(pointer: *const c_void) -> u64 {
    pointer.expose_provenance() as u64
}

/// Returns both ends of a copy and its extent.
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

/// Returns a copy as a program would describe it.
pub fn description(
    (to, from): (Described, Described),
    extent: [usize; 3],
) -> Result<CUDA_MEMCPY3D> {
    Ok(CUDA_MEMCPY3D {
        srcXInBytes: from.origin[0],
        srcY: from.origin[1],
        srcZ: from.origin[2],
        srcLOD: 0,
        srcMemoryType: from.kind,
        srcHost: std::ptr::with_exposed_provenance(size(from.host)?),
        srcDevice: from.device,
        srcArray: from.array,
        reserved0: std::ptr::null_mut(),
        srcPitch: from.pitch,
        srcHeight: from.rows,
        dstXInBytes: to.origin[0],
        dstY: to.origin[1],
        dstZ: to.origin[2],
        dstLOD: 0,
        dstMemoryType: to.kind,
        dstHost: std::ptr::with_exposed_provenance_mut(size(to.host)?),
        dstDevice: to.device,
        dstArray: to.array,
        reserved1: std::ptr::null_mut(),
        dstPitch: to.pitch,
        dstHeight: to.rows,
        WidthInBytes: extent[0],
        Height: extent[1],
        Depth: extent[2],
    })
}

/// Returns a 3-D copy as a program would describe it.
pub fn description_of(
    (to, from): (Place, Place),
    [width, height, depth]: [u64; 3],
) -> Result<CUDA_MEMCPY3D> {
    let ends = (Described::of(to)?, Described::of(from)?);
    description(ends, [size(width)?, size(height)?, size(depth)?])
}

/// Returns the locations of both ends of a copy and its extent.
pub fn places(wanted: &CUDA_MEMCPY3D) -> Result<((Place, Place), [u64; 3])> {
    let ((to, from), extent) = described(wanted);
    let extent = extent.map(|extent| extent as u64);
    Ok(((to.place(extent)?, from.place(extent)?), extent))
}
