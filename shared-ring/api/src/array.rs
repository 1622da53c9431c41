//! Array shapes: checks descriptors and computes sizes, levels and copy extents (CUDA driver API, `cuArray3DCreate`).

pub use crate::constants::array_flags::{CUBEMAP, LAYERED, SURFACE_LDST, TEXTURE_GATHER};
use crate::constants::array_flags::{DEFERRED_MAPPING, SPARSE, VIDEO_ENCODE_DECODE};
use crate::constants::array_format::{
    FLOAT, HALF, SIGNED_INT8, SIGNED_INT16, SIGNED_INT32, UNSIGNED_INT8, UNSIGNED_INT16,
    UNSIGNED_INT32,
};
use crate::ctypes::CUDA_ARRAY3D_DESCRIPTOR;
use crate::result::CuResult;

/// Upper bound of an array's bytes, exclusive; sums of several arrays' bytes do not overflow.
const MOST_BYTES: u64 = 1 << 48;
const FACES: u64 = 6;

/// Type of a channel (`CUarray_format`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Format {
    Unsigned8 = UNSIGNED_INT8,
    Unsigned16 = UNSIGNED_INT16,
    Unsigned32 = UNSIGNED_INT32,
    Signed8 = SIGNED_INT8,
    Signed16 = SIGNED_INT16,
    Signed32 = SIGNED_INT32,
    Half = HALF,
    Single = FLOAT,
}

impl Format {
    /// Converts a `CUarray_format`.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for formats of blocks, planes and packed channels, `INVALID_VALUE` for other numbers.
    pub const fn new(number: u32) -> Result<Self, CuResult> {
        Ok(match number {
            UNSIGNED_INT8 => Self::Unsigned8,
            UNSIGNED_INT16 => Self::Unsigned16,
            UNSIGNED_INT32 => Self::Unsigned32,
            SIGNED_INT8 => Self::Signed8,
            SIGNED_INT16 => Self::Signed16,
            SIGNED_INT32 => Self::Signed32,
            HALF => Self::Half,
            FLOAT => Self::Single,
            0x50 | 0x91..=0x9f | 0xa1..=0xa9 | 0xb0..=0xb5 | 0xc0..=0xcb => {
                return Err(CuResult::NOT_SUPPORTED);
            }
            _ => return Err(CuResult::INVALID_VALUE),
        })
    }

    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Unsigned8 | Self::Signed8 => 1,
            Self::Unsigned16 | Self::Signed16 | Self::Half => 2,
            Self::Unsigned32 | Self::Signed32 | Self::Single => 4,
        }
    }
}

/// Format and number of channels of a texel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Texels {
    pub format: Format,
    /// 1, 2 or 4.
    channels: u32,
}

impl Texels {
    /// # Errors
    /// `INVALID_VALUE` for numbers that describe no texel, `NOT_SUPPORTED` as [`Format::new`].
    pub const fn new(format: u32, channels: u32) -> Result<Self, CuResult> {
        if !matches!(channels, 1 | 2 | 4) {
            return Err(CuResult::INVALID_VALUE);
        }
        match Format::new(format) {
            Ok(format) => Ok(Self { format, channels }),
            Err(error) => Err(error),
        }
    }

    #[must_use]
    pub const fn channels(self) -> u32 {
        self.channels
    }

    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.format.bytes() * self.channels as u64
    }
}

/// Shape of an array, or of the finest level of a mipmapped one. Always valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrayShape {
    extent: [u64; 3],
    texels: Texels,
    flags: u32,
}

impl ArrayShape {
    /// Checks a shape. `extent` is texels of a row, rows, slices or layers; 0 in dimensions that the array lacks.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a shape that no array can have, `NOT_SUPPORTED` for sparse, deferred-mapping and video
    /// arrays and for the formats of [`Format::new`], `OUT_OF_MEMORY` for one too large.
    pub fn new(extent: [u64; 3], format: u32, channels: u32, flags: u32) -> Result<Self, CuResult> {
        const KNOWN: u32 = LAYERED
            | SURFACE_LDST
            | CUBEMAP
            | TEXTURE_GATHER
            | SPARSE
            | DEFERRED_MAPPING
            | VIDEO_ENCODE_DECODE;
        let [width, height, depth] = extent;
        let layered = flags & LAYERED != 0;
        let makes_sense = flags & !KNOWN == 0
            && width > 0
            && if flags & CUBEMAP != 0 {
                width == height
                    && if layered {
                        depth > 0 && depth.is_multiple_of(FACES)
                    } else {
                        depth == FACES
                    }
            } else if layered {
                depth > 0
            } else {
                height > 0 || depth == 0
            };
        // Gathers need a two-dimensional array.
        if !makes_sense || (flags & TEXTURE_GATHER != 0 && (height == 0 || depth != 0)) {
            return Err(CuResult::INVALID_VALUE);
        }
        let texels = Texels::new(format, channels)?;
        if flags & (SPARSE | DEFERRED_MAPPING | VIDEO_ENCODE_DECODE) != 0 {
            return Err(CuResult::NOT_SUPPORTED);
        }
        let bytes = width
            .checked_mul(texels.bytes())
            .and_then(|bytes| bytes.checked_mul(height.max(1)))
            .and_then(|bytes| bytes.checked_mul(depth.max(1)));
        if bytes.is_none_or(|bytes| bytes >= MOST_BYTES) {
            return Err(CuResult::OUT_OF_MEMORY);
        }
        Ok(Self {
            extent,
            texels,
            flags,
        })
    }

    /// Texels of a row, rows, slices or layers; 0 in dimensions that the array lacks.
    #[must_use]
    pub const fn extent(&self) -> [u64; 3] {
        self.extent
    }

    #[must_use]
    pub const fn texels(&self) -> Texels {
        self.texels
    }

    #[must_use]
    pub const fn flags(&self) -> u32 {
        self.flags
    }

    #[must_use]
    pub fn descriptor(&self) -> CUDA_ARRAY3D_DESCRIPTOR {
        let size = |extent: u64| usize::try_from(extent).unwrap_or(usize::MAX);
        let [width, height, depth] = self.extent.map(size);
        CUDA_ARRAY3D_DESCRIPTOR {
            Width: width,
            Height: height,
            Depth: depth,
            Format: self.texels.format as u32,
            NumChannels: self.texels.channels,
            Flags: self.flags,
        }
    }

    /// Returns whether the slices are layers or faces.
    #[must_use]
    pub const fn has_layers(&self) -> bool {
        self.flags & (LAYERED | CUBEMAP) != 0
    }

    /// Extent as copies address it: bytes of a row, rows, slices.
    #[must_use]
    pub fn copied(&self) -> [u64; 3] {
        let [width, height, depth] = self.extent;
        [width * self.texels.bytes(), height.max(1), depth.max(1)]
    }

    /// Returns whether a 3-D region that begins at `origin` lies inside the array. The region may cut texels.
    #[must_use]
    pub fn holds(&self, origin: [u64; 3], extent: [u64; 3]) -> bool {
        let whole = self.copied();
        let inside = |dimension: usize| {
            origin[dimension]
                .checked_add(extent[dimension])
                .is_some_and(|end| end <= whole[dimension])
        };
        (0..3).all(inside)
    }

    /// Returns the greatest number of levels of a mipmapped array of this shape.
    #[must_use]
    pub fn most_levels(&self) -> u32 {
        let [width, height, depth] = self.extent;
        let depth = if self.has_layers() { 1 } else { depth };
        let longest = width.max(height).max(depth);
        u64::BITS - longest.leading_zeros()
    }

    /// Returns the shape of a level of a mipmapped array. Every level has the array's layers.
    #[must_use]
    pub fn level(&self, level: u32) -> Self {
        let shrunk = |extent: u64| match extent {
            0 => 0,
            extent => extent.checked_shr(level).unwrap_or(0).max(1),
        };
        let [width, height, depth] = self.extent;
        let depth = if self.has_layers() {
            depth
        } else {
            shrunk(depth)
        };
        Self {
            extent: [shrunk(width), shrunk(height), depth],
            ..*self
        }
    }
}

/// Bytes from the first to the last byte of a 3-D region in memory: rows `pitch` bytes apart, slices `rows` rows apart.
/// `None` if rows or slices overlap, or if the result overflows.
#[must_use]
pub fn span([width, height, depth]: [u64; 3], pitch: u64, rows: u64) -> Option<u64> {
    let (rows_before, slices_before) = (height.checked_sub(1)?, depth.checked_sub(1)?);
    if (rows_before | slices_before != 0 && pitch < width) || (slices_before != 0 && rows < height)
    {
        return None;
    }
    rows.checked_mul(slices_before)?
        .checked_add(rows_before)?
        .checked_mul(pitch)?
        .checked_add(width)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(extent: [u64; 3], flags: u32) -> Result<ArrayShape, CuResult> {
        ArrayShape::new(extent, FLOAT, 1, flags)
    }

    #[test]
    fn extents_and_flags_agree() {
        for (extent, flags) in [
            ([4, 0, 0], 0),
            ([4, 4, 0], 0),
            ([4, 4, 4], SURFACE_LDST),
            ([4, 0, 3], LAYERED),
            ([4, 2, 3], LAYERED),
            ([4, 4, 6], CUBEMAP),
            ([4, 4, 12], CUBEMAP | LAYERED),
            ([4, 4, 0], TEXTURE_GATHER),
        ] {
            assert!(shape(extent, flags).is_ok(), "{extent:?} {flags:#x}");
        }
        for (extent, flags) in [
            ([0, 0, 0], 0),
            ([0, 4, 0], 0),
            ([4, 0, 4], 0),
            ([4, 4, 0], LAYERED),
            ([4, 2, 6], CUBEMAP),
            ([4, 4, 7], CUBEMAP),
            ([4, 4, 7], CUBEMAP | LAYERED),
            ([4, 4, 4], TEXTURE_GATHER),
            ([4, 4, 0], 0x10),
            ([4, 4, 0], 0x20),
            ([4, 4, 0], 0x200),
        ] {
            assert_eq!(
                shape(extent, flags),
                Err(CuResult::INVALID_VALUE),
                "{extent:?} {flags:#x}"
            );
        }
        assert_eq!(
            ArrayShape::new([4, 0, 0], FLOAT, 3, 0),
            Err(CuResult::INVALID_VALUE)
        );
        assert_eq!(
            ArrayShape::new([4, 0, 0], 0xb0, 1, 0),
            Err(CuResult::NOT_SUPPORTED)
        );
        assert_eq!(shape([4, 4, 0], SPARSE), Err(CuResult::NOT_SUPPORTED));
    }

    #[test]
    fn sizes_never_overflow() {
        for extent in [[u64::MAX; 3], [1 << 62, 1 << 62, 0], [1 << 46, 0, 0]] {
            assert_eq!(shape(extent, 0), Err(CuResult::OUT_OF_MEMORY));
        }
    }

    #[test]
    fn a_box_is_held_if_it_ends_inside() {
        let plane = ArrayShape::new([8, 4, 0], FLOAT, 2, 0).expect("a shape");
        assert_eq!(plane.copied(), [64, 4, 1]);
        assert!(plane.holds([0; 3], [64, 4, 1]));
        assert!(plane.holds([8, 1, 0], [56, 3, 1]));
        assert!(plane.holds([2, 0, 0], [6, 1, 1]));
        for (origin, extent) in [
            ([8, 0, 0], [64, 1, 1]),
            ([0, 1, 0], [64, 4, 1]),
            ([0, 0, 1], [64, 1, 1]),
            ([u64::MAX, 0, 0], [8, 1, 1]),
        ] {
            assert!(!plane.holds(origin, extent), "{origin:?} {extent:?}");
        }
    }

    #[test]
    fn a_span_reaches_from_the_first_byte_to_the_last() {
        assert_eq!(span([10, 1, 1], 0, 0), Some(10));
        assert_eq!(span([10, 3, 1], 16, 0), Some(42));
        assert_eq!(span([10, 3, 2], 16, 5), Some(122));
        for (extent, pitch, rows) in [
            ([10, 2, 1], 9, 2),
            ([10, 1, 2], 9, 1),
            ([10, 3, 2], 16, 2),
            ([1, u64::MAX, 1], 2, 0),
            ([1, 1, u64::MAX], 1, 2),
            ([u64::MAX, 2, 1], u64::MAX, 0),
            ([1, 0, 1], 1, 1),
        ] {
            assert_eq!(span(extent, pitch, rows), None, "{extent:?} {pitch} {rows}");
        }
    }

    #[test]
    fn levels_shrink_to_one_and_keep_their_layers() {
        let plane = shape([40, 20, 0], 0).expect("a shape");
        assert_eq!(plane.most_levels(), 6);
        assert_eq!(plane.level(1).extent(), [20, 10, 0]);
        assert_eq!(plane.level(5).extent(), [1, 1, 0]);
        assert_eq!(plane.level(500).extent(), [1, 1, 0]);
        let layers = shape([8, 8, 100], LAYERED).expect("a shape");
        assert_eq!(layers.most_levels(), 4);
        assert_eq!(layers.level(3).extent(), [1, 1, 100]);
        let volume = shape([2, 2, 16], 0).expect("a shape");
        assert_eq!(volume.most_levels(), 5);
        assert_eq!(volume.level(2).extent(), [1, 1, 4]);
    }
}
