//! Linear filtering, between texels and between levels of detail.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "places become indices that are then brought inside the image, and sums what results hold"
)]

use super::texel::{Texel, linear_colour};
use super::{ChannelType, Texture};
use crate::alu::half::{F16, Short};

/// Number of steps that filtering resolves between two texels, and denominator of the texels' weights.
pub(super) const WEIGHTS: u32 = 256;

/// Returns the texel before a position in each dimension, and the distance of the position from it in steps.
pub(super) fn footprint(at: [f64; 3], dimensions: usize) -> ([i64; 3], [u32; 3]) {
    let parts = |x: f64| ((x - 0.5) * f64::from(WEIGHTS) + 0.5).floor() as i64;
    let mut place = [0; 3];
    for (place, x) in place.iter_mut().zip(at).take(dimensions) {
        *place = parts(x);
    }
    let bits = WEIGHTS.ilog2();
    (
        place.map(|place| place >> bits),
        place.map(|place| (place & (i64::from(WEIGHTS) - 1)) as u32),
    )
}

/// Returns the weight of each texel around a position, `total` in all. Bit 0 of an index selects the next texel
/// in x, bit 1 in y, bit 2 in z.
///
/// The weights are those of an H200, measured by filtering images of a single texel: whole parts, divided along
/// z, then x, then y. Each division rounds the part of one side; the other side gets the rest.
pub(super) fn weights([x, y, z]: [u32; 3], total: u32) -> [u32; 8] {
    let part = |weight: u32, of: u32| (weight * of + WEIGHTS / 2) / WEIGHTS;
    let behind = part(total, z);
    let mut weights = [0; 8];
    for (behind_z, slice) in [total - behind, behind].into_iter().enumerate() {
        let column = part(slice, x);
        let near = part(slice - column, WEIGHTS - y);
        let far = part(column, y);
        let here = &mut weights[4 * behind_z..];
        here[..4].copy_from_slice(&[near, column - far, slice - column - near, far]);
    }
    weights
}

/// Weighted sum of texels, exact until it is finished.
#[derive(Debug, Default)]
pub(super) struct Sum([f64; 4]);

impl Sum {
    pub fn add(&mut self, texture: &Texture, texel: Texel, weight: f64) {
        for (channel, (sum, value)) in self.0.iter_mut().zip(texel).enumerate() {
            let integer = value.cast_signed();
            let value = if texture.unit().is_none() {
                f64::from(f32::from_bits(value))
            } else if texture.is_curved(channel) {
                f64::from(linear_colour(integer as f32 / 255.0))
            } else {
                f64::from(widened(texture.image.channel, integer))
            };
            *sum += weight * value;
        }
    }

    /// Returns the result. An H200 filters integers in 16 bits, halves and colours to their own precision.
    pub fn finish(self, texture: &Texture) -> Texel {
        let channel_type = texture.image.channel;
        let mut channel = 0;
        self.0.map(|sum| {
            let curved = texture.is_curved(channel);
            channel += 1;
            let value = sum / f64::from(WEIGHTS);
            let result = match channel_type {
                ChannelType::Half => rounded_half(value as f32).wide(),
                ChannelType::Unsigned8 | ChannelType::Unsigned16 if !curved => {
                    ((value + 0.5).floor() / 65_535.0) as f32
                }
                ChannelType::Signed8 | ChannelType::Signed16 => {
                    ((value + 0.5).floor() / 32_767.0).max(-1.0) as f32
                }
                _ => value as f32,
            };
            result.to_bits()
        })
    }
}

impl Texture {
    /// Converts a texel of singles for fetches that return halves.
    pub(super) fn halves(&self, texel: Texel) -> Texel {
        texel.map(|bits| {
            let value = f32::from_bits(bits);
            let half = if self.image.channel == ChannelType::Single {
                F16::nearest(value)
            } else {
                rounded_half(value)
            };
            u32::from(half.bits())
        })
    }
}

/// Rounds to half precision; a tie goes to the greater magnitude, as in an H200's texture units.
fn rounded_half(value: f32) -> F16 {
    if value.is_finite() {
        F16::nearest(f32::from_bits(value.to_bits() + 1))
    } else {
        F16::nearest(value)
    }
}

/// Widens an integer that represents a fraction to 16 bits: the bits repeat.
fn widened(channel: ChannelType, value: i32) -> i32 {
    match channel {
        ChannelType::Unsigned8 => value << 8 | value,
        ChannelType::Signed8 => {
            let magnitude = value.abs();
            (magnitude << 8 | magnitude << 1 | magnitude >> 6) * value.signum()
        }
        _ => value.max(-32_767),
    }
}
