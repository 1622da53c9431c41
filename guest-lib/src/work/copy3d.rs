//! 3-D copies: rows and slices of memory, and parts of arrays.
//!
//! The device performs each copy as a whole. Pageable memory goes through staging buffers, as in [`crate::work::copy`].
//! Each buffer holds as many whole slices or rows as fit.

use wormhole_api::array::{ArrayShape, span};
use wormhole_api::{Array, DevicePtr, Handle};

use crate::error::{CuError, Result};
use crate::memory::end::{CopyEnd, End};
use crate::object::context::Scope;
use crate::object::stream::Target;
use crate::work::copy::{self, CHUNK, Mode, host_pointer, stage_down, stage_up};

/// Bytes of a row, rows, slices; or an offset of these in an array.
type Extent = [u64; 3];

/// Location of a 3-D region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Memory {
        /// Address of the first byte.
        start: u64,
        /// Bytes from row to row.
        pitch: u64,
        /// Rows from slice to slice.
        rows: u64,
        /// True if the program describes it as device memory.
        device: bool,
    },
    Array {
        array: Handle<Array>,
        shape: ArrayShape,
        origin: Extent,
    },
}

impl Place {
    /// Returns the kind of memory, and the location for the side that reaches it. Checks that the whole region is
    /// allocated.
    pub fn end(self, extent: Extent) -> Result<(End, Self)> {
        match self {
            Self::Memory {
                start,
                pitch,
                rows,
                device,
            } => {
                let bytes = span(extent, pitch, rows).ok_or(CuError::INVALID_VALUE)?;
                let (end, start) = End::of(start, bytes)?;
                if device && end == End::Pageable {
                    return Err(CuError::INVALID_VALUE);
                }
                let reached = Self::Memory {
                    start,
                    pitch,
                    rows,
                    device,
                };
                Ok((end, reached))
            }
            Self::Array { shape, origin, .. } if shape.holds(origin, extent) => {
                Ok((End::Device, self))
            }
            Self::Array { .. } => Err(CuError::INVALID_VALUE),
        }
    }

    /// Returns the location of the part of the region that begins at `offset`. The whole region must have been checked.
    fn part(&self, offset: Extent) -> Self {
        let [x, y, z] = offset;
        match *self {
            Self::Memory {
                start,
                pitch,
                rows,
                device,
            } => Self::Memory {
                start: start + (z * rows + y) * pitch + x,
                pitch,
                rows,
                device,
            },
            Self::Array {
                array,
                shape,
                origin,
            } => Self::Array {
                array,
                shape,
                origin: [origin[0] + x, origin[1] + y, origin[2] + z],
            },
        }
    }

    /// Returns the fields of a message: an array and the origin in it, or an address, a pitch and rows.
    pub const fn fields(&self) -> (Option<Handle<Array>>, Extent, DevicePtr, u64, u64) {
        match *self {
            Self::Memory {
                start, pitch, rows, ..
            } => (None, [0; 3], DevicePtr(start), pitch, rows),
            Self::Array { array, origin, .. } => (Some(array), origin, DevicePtr(0), 0, 0),
        }
    }

    /// Returns the address of the first byte, if the region is memory without gaps.
    fn contiguous(&self, [width, height, depth]: Extent) -> Option<u64> {
        match *self {
            Self::Memory {
                start, pitch, rows, ..
            } => {
                let one_row = height == 1 && depth == 1;
                let one_slice = depth == 1 || rows == height;
                (one_row || (pitch == width && one_slice)).then_some(start)
            }
            Self::Array { .. } => None,
        }
    }

    /// Returns the address of each row of host memory, slice by slice.
    fn row_starts(&self, [_, height, depth]: Extent) -> impl Iterator<Item = u64> {
        let place = *self;
        (0..depth).flat_map(move |z| {
            (0..height).map(move |y| match place.part([0, y, z]) {
                Self::Memory { start, .. } => start,
                Self::Array { .. } => 0,
            })
        })
    }
}

/// Returns the location of a 3-D region in a staging buffer.
pub fn staged(buffer: u64, [width, height, _]: Extent) -> Place {
    Place::Memory {
        start: buffer,
        pitch: width,
        rows: height,
        device: false,
    }
}

/// Splits a 3-D region into parts of at most `limit` bytes: offset and extent. Each part is whole slices, whole rows of
/// a slice, or a part of a row.
fn parts([width, height, depth]: Extent, limit: u64) -> impl Iterator<Item = (Extent, Extent)> {
    let slice = width.saturating_mul(height);
    let step = if slice <= limit {
        [width, height, limit / slice]
    } else if width <= limit {
        [width, limit / width, 1]
    } else {
        [limit, 1, 1]
    };
    let along = |whole: u64, step: u64| {
        (0..whole.div_ceil(step)).map(move |index| {
            let at = index * step;
            (at, step.min(whole - at))
        })
    };
    along(depth, step[2]).flat_map(move |(z, deep)| {
        along(height, step[1]).flat_map(move |(y, high)| {
            along(width, step[0]).map(move |(x, wide)| ([x, y, z], [wide, high, deep]))
        })
    })
}

/// Hands a copy by the device to a stream.
fn submit(scope: Scope, target: Target, to: &Place, from: &Place, extent: Extent) -> Result {
    let (to_array, to_origin, to_memory, to_pitch, to_rows) = to.fields();
    let (from_array, from_origin, from_memory, from_pitch, from_rows) = from.fields();
    scope.session.record(&wormhole_api::MemCopy3d {
        extent,
        to_array,
        to_origin,
        to_memory,
        to_pitch,
        to_rows,
        from_array,
        from_origin,
        from_memory,
        from_pitch,
        from_rows,
        stream: target.handle,
    })?;
    target.worked(scope)
}

/// Copies the rows of a 3-D region that is host memory on both sides.
///
/// # Safety
/// Both are valid for the copy.
pub unsafe fn copy_rows(to: &Place, from: &Place, extent: Extent) {
    let width = usize::try_from(extent[0]).unwrap_or(0);
    for (to, from) in to.row_starts(extent).zip(from.row_starts(extent)) {
        // SAFETY: both rows are valid for their width, because the regions are valid.
        unsafe { host_pointer(to).copy_from(host_pointer(from), width) };
    }
}

/// A 3-D copy whose ends are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    pub to: (End, Place),
    pub from: (End, Place),
    pub extent: Extent,
}

impl Ends {
    /// Looks both ends up. The extent must not be empty.
    pub fn of((to, from): (Place, Place), extent: Extent) -> Result<Self> {
        Ok(Self {
            to: to.end(extent)?,
            from: from.end(extent)?,
            extent,
        })
    }
}

/// A 3-D copy.
#[derive(Clone, Copy, Debug)]
pub struct Copy3d {
    /// The destination and the source as the program gave them.
    pub given: (Place, Place),
    ends: Ends,
    pub mode: Mode,
}

impl Copy3d {
    /// Looks both ends up. The extent must not be empty.
    ///
    /// # Safety
    /// An end that is host memory is valid for the copy, when it is handed to its stream.
    pub unsafe fn new(given: (Place, Place), extent: Extent, mode: Mode) -> Result<Self> {
        Ok(Self {
            given,
            ends: Ends::of(given, extent)?,
            mode,
        })
    }

    pub fn extent(&self) -> Extent {
        self.ends.extent
    }

    /// Returns the same copy of one range, if both ends are memory without gaps.
    pub fn range(&self) -> Option<Result<copy::Copy>> {
        let extent = self.ends.extent;
        let (to, from) = self.given;
        let (to, from) = to.contiguous(extent).zip(from.contiguous(extent))?;
        let bytes = usize::try_from(extent.iter().product::<u64>());
        Some(bytes.map_err(|_| CuError::INVALID_VALUE).and_then(|bytes| {
            // SAFETY: these are the ends of this copy, and valid by the contract of `new`.
            let ends = unsafe { (CopyEnd::unified(to), CopyEnd::unified(from)) };
            copy::Copy::new(ends, bytes, self.mode)
        }))
    }

    /// Hands the copy to a stream.
    pub fn send(self, scope: Scope, target: Target) -> Result {
        let Ends {
            to: (to_end, to),
            from: (from_end, from),
            extent,
        } = self.ends;
        let mode = self.mode;
        match (to_end, from_end) {
            // From host to host every copy is synchronous (CUDA driver API, "API synchronization behavior").
            (End::Pageable | End::Pinned, End::Pageable | End::Pinned) => {
                target.synchronize(scope)?;
                // SAFETY: both ends are memory that the program holds and vouches for.
                unsafe { copy_rows(&to, &from, extent) };
                Ok(())
            }
            (End::Pageable, _) => {
                let hand_over = |&(offset, extent): &(Extent, Extent), buffer| {
                    let to = staged(buffer, extent);
                    submit(scope, target, &to, &from.part(offset), extent)
                };
                let empty = |&(offset, extent): &(Extent, Extent), buffer| {
                    // SAFETY: the device has written the buffer, and the caller vouches for the destination.
                    unsafe { copy_rows(&to.part(offset), &staged(buffer, extent), extent) };
                };
                let parts = parts(extent, CHUNK as u64);
                stage_down(scope, target, parts, hand_over, empty)?;
                target.show_output(scope)
            }
            (_, End::Pageable) => {
                if mode == Mode::Synchronous {
                    // The native driver waits before such a copy, so a fault of earlier launches shows here.
                    target.synchronize_if_faults_are_possible(scope)?;
                }
                let fill = |&(offset, extent): &(Extent, Extent), buffer| {
                    // SAFETY: the device has done with the buffer, and the caller vouches for the source.
                    unsafe { copy_rows(&staged(buffer, extent), &from.part(offset), extent) };
                };
                let hand_over = |&(offset, extent): &(Extent, Extent), buffer| {
                    let from = staged(buffer, extent);
                    submit(scope, target, &to.part(offset), &from, extent)
                };
                let parts = parts(extent, CHUNK as u64);
                stage_up(scope, target, parts, fill, hand_over)
            }
            _ => {
                submit(scope, target, &to, &from, extent)?;
                let with_host = to_end == End::Pinned || from_end == End::Pinned;
                if mode == Mode::Synchronous && with_host {
                    target.synchronize(scope)
                } else {
                    Ok(())
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_cover_a_box_once_and_fit_their_buffer(
            extent in prop::array::uniform3(1..12_u64), limit in 1..300_u64
        ) {
            let mut seen = std::collections::BTreeSet::new();
            for (offset, part) in parts(extent, limit) {
                prop_assert!(part.iter().product::<u64>() <= limit);
                for z in offset[2]..offset[2] + part[2] {
                    for y in offset[1]..offset[1] + part[1] {
                        for x in offset[0]..offset[0] + part[0] {
                            prop_assert!(seen.insert([x, y, z]));
                        }
                    }
                }
            }
            prop_assert_eq!(seen.len() as u64, extent.iter().product::<u64>());
        }
    }

    #[test]
    fn a_box_of_memory_without_gaps_is_one_range() {
        let memory = |pitch, rows| Place::Memory {
            start: 4096,
            pitch,
            rows,
            device: false,
        };
        for (pitch, rows, extent) in [(8, 3, [8, 3, 2]), (8, 9, [8, 3, 1]), (64, 3, [8, 1, 1])] {
            assert_eq!(memory(pitch, rows).contiguous(extent), Some(4096));
        }
        for (pitch, rows, extent) in [(9, 3, [8, 3, 2]), (8, 4, [8, 3, 2]), (9, 1, [8, 1, 2])] {
            assert_eq!(memory(pitch, rows).contiguous(extent), None);
        }
        let starts: Vec<u64> = memory(10, 3).row_starts([8, 2, 2]).collect();
        assert_eq!(starts, [4096, 4106, 4126, 4136]);
    }
}
