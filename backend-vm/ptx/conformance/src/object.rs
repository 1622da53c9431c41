//! Images that forms read through a texture object, or read and write through a surface object.

use wormhole_device::{Format, Sampling};

use crate::operands::{Random, hash};

/// Alignment in bytes of the rows of memory that a texture reads.
const PITCH: u64 = 64;

/// Location of the texels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Array, or a mipmapped one of `levels` levels.
    Array { levels: u32 },
    /// Memory in one dimension.
    Linear,
    /// Memory in two dimensions.
    Rows,
}

/// Image, whose contents follow from its shape.
#[derive(Clone, Copy, Debug)]
pub struct Picture {
    /// Texels of a row, rows, slices or layers; 0 in dimensions that the image lacks.
    pub extent: [u64; 3],
    pub format: Format,
    pub channels: u32,
    /// Flags of the array: `CUDA_ARRAY3D_*`.
    pub flags: u32,
    pub source: Source,
}

impl Picture {
    #[must_use]
    pub const fn new(extent: [u64; 3], format: Format, channels: u32, flags: u32) -> Self {
        Self {
            extent,
            format,
            channels,
            flags,
            source: Source::Array { levels: 1 },
        }
    }

    #[must_use]
    pub const fn from(self, source: Source) -> Self {
        Self { source, ..self }
    }

    #[must_use]
    pub fn texel_bytes(&self) -> u64 {
        self.format.bytes() * u64::from(self.channels)
    }

    /// Returns the number of levels of detail.
    #[must_use]
    pub fn levels(&self) -> u32 {
        match self.source {
            Source::Array { levels } => levels,
            Source::Linear | Source::Rows => 1,
        }
    }

    /// Returns the texels of a row, rows, slices or layers of a level; at least 1 each.
    #[must_use]
    pub fn extent_of(&self, level: u32) -> [u64; 3] {
        let [width, height, depth] = self.extent;
        let layered =
            self.flags & (wormhole_device::array::LAYERED | wormhole_device::array::CUBEMAP);
        let depth = if layered == 0 { depth >> level } else { depth };
        [width >> level, height >> level, depth].map(|extent| extent.max(1))
    }

    /// Returns the bytes from row to row.
    #[must_use]
    pub fn pitch(&self, level: u32) -> u64 {
        let row = self.extent_of(level)[0] * self.texel_bytes();
        match self.source {
            Source::Rows => row.next_multiple_of(PITCH),
            Source::Array { .. } | Source::Linear => row,
        }
    }

    /// Returns a level's bytes: floats that are integers up to 63, so that weighted sums of them are exact,
    /// otherwise any bits.
    #[must_use]
    pub fn contents(&self, level: u32) -> Vec<u8> {
        let [_, height, depth] = self.extent_of(level);
        let count = self.pitch(level) * height * depth / self.format.bytes();
        let mut random = Random::new(u64::from(level) + 1);
        let mut bytes = Vec::new();
        for _ in 0..count {
            let any = random.next();
            let small = u8::try_from(any >> 58).unwrap_or(0);
            match self.format {
                Format::Single => bytes.extend(f32::from(small).to_le_bytes()),
                Format::Half => bytes.extend(half(small).to_le_bytes()),
                format => {
                    let width = usize::try_from(format.bytes()).unwrap_or(1);
                    bytes.extend(&any.to_le_bytes()[..width]);
                }
            }
        }
        bytes
    }
}

/// Encodes an integer up to 63 in half precision.
fn half(integer: u8) -> u16 {
    let Some(exponent) = integer.checked_ilog2() else {
        return 0;
    };
    let exponent = u16::try_from(exponent).unwrap_or(0);
    (exponent + 15) << 10 | (u16::from(integer) << 10 >> exponent) & 0x3ff
}

/// Texture or surface that a form accesses.
#[derive(Clone, Copy, Debug)]
pub enum Object {
    Texture(Picture, Sampling),
    Surface(Picture),
    /// Surface whose bytes, after the kernel, are the form's results, the same number for each row.
    Written(Picture),
}

impl Object {
    #[must_use]
    pub fn picture(&self) -> &Picture {
        match self {
            Self::Texture(picture, _) | Self::Surface(picture) | Self::Written(picture) => picture,
        }
    }

    /// Returns a 64-bit digest of the object.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let picture = self.picture();
        let kind = match self {
            Self::Texture(..) => 0,
            Self::Surface(_) => 1,
            Self::Written(_) => 2,
        };
        let source = match picture.source {
            Source::Array { levels } => u64::from(levels),
            Source::Linear => 100,
            Source::Rows => 101,
        };
        let mut words = vec![kind, source, picture.format as u64];
        words.extend([picture.channels, picture.flags].map(u64::from));
        words.extend(picture.extent);
        if let Self::Texture(_, sampling) = self {
            words.extend(sampling.address_modes.map(u64::from));
            let numbers = [
                sampling.filter,
                sampling.level_filter,
                sampling.flags,
                sampling.anisotropy,
                sampling.level_bias.to_bits(),
            ];
            words.extend(numbers.map(u64::from));
            words.extend(sampling.level_clamp.map(|level| u64::from(level.to_bits())));
            words.extend(sampling.border.map(u64::from));
        }
        let contents = (0..picture.levels()).flat_map(|level| picture.contents(level));
        hash(words.into_iter().flat_map(u64::to_le_bytes).chain(contents))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_the_integers() {
        assert_eq!([0, 1, 3, 63].map(half), [0, 0x3c00, 0x4200, 0x53e0]);
    }
}
