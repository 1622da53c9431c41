//! Checks sizes of arrays and textures against the device's attributes.

use wormhole_device::array::{CUBEMAP, LAYERED, TEXTURE_GATHER};
use wormhole_device::constants::device_attribute as attribute;
use wormhole_device::{ArrayShape, CuError, Result};

use crate::description::{TEXTURE_ALIGNMENT, TEXTURE_LIMITS, TEXTURE_PITCH_ALIGNMENT};

/// Returns the value of a texture attribute.
fn limit(id: i32) -> u64 {
    let known = TEXTURE_LIMITS.iter().find(|(known, _)| *known == id);
    known.map_or(0, |(_, value)| u64::from(value.unsigned_abs()))
}

fn within(extent: [u64; 3], ids: [i32; 3]) -> bool {
    extent
        .iter()
        .zip(ids)
        .all(|(extent, id)| *extent <= limit(id))
}

fn check(possible: bool) -> Result<()> {
    if possible {
        Ok(())
    } else {
        Err(CuError::INVALID_VALUE)
    }
}

/// Checks the extent of an array, by its flags and dimensions.
pub fn check_array(shape: &ArrayShape) -> Result<()> {
    let extent = shape.extent();
    let [_, height, depth] = extent;
    let flags = shape.flags();
    let ids = match (flags & LAYERED != 0, flags & CUBEMAP != 0) {
        (true, true) => [
            attribute::MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH,
            attribute::MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH,
            attribute::MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS,
        ],
        (false, true) => [
            attribute::MAXIMUM_TEXTURECUBEMAP_WIDTH,
            attribute::MAXIMUM_TEXTURECUBEMAP_WIDTH,
            attribute::MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS,
        ],
        (true, false) if height == 0 => [
            attribute::MAXIMUM_TEXTURE1D_LAYERED_WIDTH,
            attribute::MAXIMUM_TEXTURE1D_LAYERED_WIDTH,
            attribute::MAXIMUM_TEXTURE1D_LAYERED_LAYERS,
        ],
        (true, false) => [
            attribute::MAXIMUM_TEXTURE2D_LAYERED_WIDTH,
            attribute::MAXIMUM_TEXTURE2D_LAYERED_HEIGHT,
            attribute::MAXIMUM_TEXTURE2D_LAYERED_LAYERS,
        ],
        (false, false) if depth != 0 => {
            return check(
                within(
                    extent,
                    [
                        attribute::MAXIMUM_TEXTURE3D_WIDTH,
                        attribute::MAXIMUM_TEXTURE3D_HEIGHT,
                        attribute::MAXIMUM_TEXTURE3D_DEPTH,
                    ],
                ) || within(
                    extent,
                    [
                        attribute::MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE,
                        attribute::MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE,
                        attribute::MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE,
                    ],
                ),
            );
        }
        (false, false) if flags & TEXTURE_GATHER != 0 => [
            attribute::MAXIMUM_TEXTURE2D_GATHER_WIDTH,
            attribute::MAXIMUM_TEXTURE2D_GATHER_HEIGHT,
            attribute::MAXIMUM_TEXTURE2D_GATHER_HEIGHT,
        ],
        (false, false) if height == 0 => [
            attribute::MAXIMUM_TEXTURE1D_WIDTH,
            attribute::MAXIMUM_TEXTURE1D_WIDTH,
            attribute::MAXIMUM_TEXTURE1D_WIDTH,
        ],
        (false, false) => [
            attribute::MAXIMUM_TEXTURE2D_WIDTH,
            attribute::MAXIMUM_TEXTURE2D_HEIGHT,
            attribute::MAXIMUM_TEXTURE2D_HEIGHT,
        ],
    };
    check(within(extent, ids))
}

/// Checks the extent of a mipmapped array.
pub fn check_mipmap(shape: &ArrayShape) -> Result<()> {
    match shape.extent() {
        extent @ [_, 0, 0] => check(within(
            extent,
            [
                attribute::MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH,
                attribute::MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH,
                attribute::MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH,
            ],
        )),
        extent @ [_, _, 0] => check(within(
            extent,
            [
                attribute::MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH,
                attribute::MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT,
                attribute::MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT,
            ],
        )),
        _ => check_array(shape),
    }
}

/// Most texels of a texture of linear memory.
pub const LINEAR_TEXELS: u64 = 1 << 30;

/// The most bytes of linear memory that a texture reads, as the driver says of devices of compute capability 9.0.
pub const LINEAR_BYTES: u64 = 1 << 32;

/// Checks the address of a texture of linear memory.
pub fn check_linear(address: u64) -> Result<()> {
    check(address.is_multiple_of(TEXTURE_ALIGNMENT.into()))
}

/// Checks address, width, height and pitch of a texture of pitched memory.
pub fn check_rows(address: u64, [width, height, pitch]: [u64; 3]) -> Result<()> {
    check(
        address.is_multiple_of(TEXTURE_ALIGNMENT.into())
            && pitch.is_multiple_of(TEXTURE_PITCH_ALIGNMENT.into())
            && (1..=limit(attribute::MAXIMUM_TEXTURE2D_LINEAR_WIDTH)).contains(&width)
            && (1..=limit(attribute::MAXIMUM_TEXTURE2D_LINEAR_HEIGHT)).contains(&height)
            && (1..=limit(attribute::MAXIMUM_TEXTURE2D_LINEAR_PITCH)).contains(&pitch),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    use wormhole_device::constants::array_format::UNSIGNED_INT8 as BYTE;

    fn array(extent: [u64; 3], flags: u32) -> Result<()> {
        check_array(&ArrayShape::new(extent, BYTE, 1, flags).expect("a shape"))
    }

    #[test]
    fn the_largest_arrays_are_those_of_the_attributes() {
        let refused = Err(CuError::INVALID_VALUE);
        assert_eq!(array([131_072, 0, 0], 0), Ok(()));
        assert_eq!(array([131_073, 0, 0], 0), refused);
        assert_eq!(array([131_072, 65_536, 0], 0), Ok(()));
        assert_eq!(array([1, 65_537, 0], 0), refused);
        assert_eq!(array([16_384, 16_384, 1], 0), Ok(()));
        assert_eq!(array([8_192, 1, 32_768], 0), Ok(()));
        assert_eq!(array([8_193, 1, 32_768], 0), refused);
        assert_eq!(array([1, 0, 2_049], LAYERED), refused);
        assert_eq!(array([32_769, 32_769, 6], CUBEMAP), refused);
        assert_eq!(array([32_769, 1, 0], TEXTURE_GATHER), refused);
    }

    #[test]
    fn textures_of_memory_are_aligned() {
        let refused = Err(CuError::INVALID_VALUE);
        assert_eq!(check_linear(512), Ok(()));
        assert_eq!(check_linear(256), refused);
        assert_eq!(check_rows(512, [8, 8, 32]), Ok(()));
        for size in [[8, 8, 48], [8, 8, 0], [8, 0, 32], [8, 65_001, 32]] {
            assert_eq!(check_rows(512, size), refused, "{size:?}");
        }
    }
}
