//! Fetches from textures (CUDA C++ Programming Guide, "Texture Fetching").
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "coordinates become indices that are then brought inside the image"
)]

use super::{AddressMode, ChannelType, Image, Level, Texture};
use crate::alu::Slot;
use crate::alu::half::{F16, Short};
use crate::decode::insn::{Detail, Geometry, SampleArgs, TexelType};
use crate::error::FaultKind;
use crate::exec::frame::Frame;
use crate::exec::global::{Global, Word};
use crate::exec::launch::Launch;
use crate::exec::memory::{LaneFault, Lanes};
use crate::exec::step::{lane_fault, word};

/// Parts of the distance between two texels that filtering tells apart, and parts in which it weighs texels.
const WEIGHTS: u32 = 256;

/// A texel's channels: bits of integers or of singles.
type Texel = [u32; 4];

/// Where in its dimensions a texel is wanted.
#[derive(Debug, Clone, Copy, Default)]
struct Position {
    /// In texels.
    at: [f32; 3],
    /// The layer, or face of a cube.
    layer: u32,
}

/// Reads a texel that lies inside its level.
fn read(
    global: &mut Global<'_>,
    image: &Image,
    level: &Level,
    [x, y, z]: [u32; 3],
) -> Result<Texel, FaultKind> {
    let bytes = image.texel_bytes();
    let address = level
        .address
        .wrapping_add(u64::from(x) * u64::from(bytes))
        .wrapping_add(u64::from(y).wrapping_mul(level.row_pitch))
        .wrapping_add(u64::from(z).wrapping_mul(level.slice_pitch));
    let at = global.translate(address, bytes, false)?;
    let mut texel = [0; 4];
    for (index, value) in texel.iter_mut().take(image.channels as usize).enumerate() {
        let at = at.wrapping_add(index * image.channel.bytes() as usize);
        // SAFETY: `translate` found the aligned bytes of the texel inside a region that stays valid.
        *value = unsafe {
            match image.channel {
                ChannelType::Unsigned8 => u32::from(u8::read(at)),
                ChannelType::Signed8 => i32::from(i8::read(at)).cast_unsigned(),
                ChannelType::Unsigned16 => u32::from(u16::read(at)),
                ChannelType::Signed16 => i32::from(i16::read(at)).cast_unsigned(),
                ChannelType::Half => F16::of(u16::read(at)).wide().to_bits(),
                ChannelType::Unsigned32 | ChannelType::Signed32 | ChannelType::Single => {
                    u32::read(at)
                }
            }
        };
    }
    Ok(texel)
}

/// The sRGB curve, undone.
fn linear_colour(x: f32) -> f32 {
    if x <= 0.040_45 {
        x / 12.92
    } else {
        ((x + 0.055) / 1.055).powf(2.4)
    }
}

impl Texture {
    /// Whether fetches give floats.
    fn gives_floats(&self) -> bool {
        match self.image.channel {
            ChannelType::Single | ChannelType::Half => true,
            ChannelType::Unsigned32 | ChannelType::Signed32 => false,
            _ => self.as_floats,
        }
    }

    /// A texel as fetches give it: integers as they are, or as floats.
    fn finish(&self, mut texel: Texel) -> Texel {
        let channels = self.image.channels as usize;
        if self.gives_floats() {
            let scale = match self.image.channel {
                ChannelType::Unsigned8 => 255.0,
                ChannelType::Signed8 => 127.0,
                ChannelType::Unsigned16 => 65_535.0,
                ChannelType::Signed16 => 32_767.0,
                _ => 0.0,
            };
            if scale > 0.0 {
                for (index, value) in texel.iter_mut().take(channels).enumerate() {
                    let unit = (value.cast_signed() as f32 / scale).max(-1.0);
                    let colour = self.srgb && index < 3 && scale == 255.0;
                    *value = if colour { linear_colour(unit) } else { unit }.to_bits();
                }
            }
        }
        // The opacity of what has none is 1.
        if channels < 4 {
            texel[3] = if self.gives_floats() {
                1.0_f32.to_bits()
            } else {
                1
            };
        }
        texel
    }

    /// The index inside the image for one outside; `None` stands for the border.
    fn inside(&self, dimension: usize, index: i64, extent: u32) -> Option<u32> {
        let (extent, last) = (i64::from(extent), i64::from(extent) - 1);
        let inside = match self.address_modes[dimension] {
            AddressMode::Wrap if self.normalized => index.rem_euclid(extent),
            AddressMode::Mirror if self.normalized => {
                let index = index.rem_euclid(2 * extent);
                index.min(2 * extent - 1 - index)
            }
            AddressMode::Border if !(0..extent).contains(&index) => return None,
            _ => index.clamp(0, last),
        };
        Some(inside as u32)
    }

    fn texel(
        &self,
        global: &mut Global<'_>,
        level: &Level,
        dimensions: usize,
        index: [i64; 3],
        layer: u32,
    ) -> Result<Texel, FaultKind> {
        let mut place = [0; 3];
        for dimension in 0..dimensions {
            match self.inside(dimension, index[dimension], level.extent[dimension]) {
                Some(inside) => place[dimension] = inside,
                None => return Ok(self.border),
            }
        }
        if dimensions < 3 {
            place[2] = layer.min(self.image.layers - 1);
        }
        read(global, &self.image, level, place).map(|texel| self.finish(texel))
    }

    /// A fetch from one level.
    fn fetch(
        &self,
        global: &mut Global<'_>,
        level: &Level,
        dimensions: usize,
        position: Position,
    ) -> Result<Texel, FaultKind> {
        if !(self.linear && self.gives_floats()) {
            let index = position.at.map(|x| x.floor() as i64);
            return self.texel(global, level, dimensions, index, position.layer);
        }
        let (first, fractions) = footprint(position.at, dimensions);
        let mut sum = [0.0_f32; 4];
        for (corner, weight) in (0_i64..).zip(weights(fractions)) {
            if weight == 0 {
                continue;
            }
            let far = [corner & 1, corner >> 1 & 1, corner >> 2];
            let index = std::array::from_fn(|d| first[d].saturating_add(far[d]));
            let texel = self.texel(global, level, dimensions, index, position.layer)?;
            let weight = weight as f32 / WEIGHTS as f32;
            for (sum, bits) in sum.iter_mut().zip(texel) {
                *sum += weight * f32::from_bits(bits);
            }
        }
        Ok(sum.map(f32::to_bits))
    }

    /// One channel of the four texels around a position.
    fn gather(
        &self,
        global: &mut Global<'_>,
        level: &Level,
        position: Position,
        channel: usize,
    ) -> Result<Texel, FaultKind> {
        let ([x, y, _], _) = footprint(position.at, 2);
        let mut out = [0; 4];
        for (value, (dx, dy)) in out.iter_mut().zip([(0, 1), (1, 1), (1, 0), (0, 0)]) {
            let index = [x.saturating_add(dx), y.saturating_add(dy), 0];
            *value = self.texel(global, level, 2, index, position.layer)?[channel];
        }
        Ok(out)
    }

    /// The levels to fetch from, and how much the second counts.
    fn levels(&self, detail: f32) -> (&Level, Option<(&Level, f32)>) {
        let levels = &self.image.levels;
        let last = (levels.len() - 1) as f32;
        let [least, greatest] = self.level_clamp;
        let detail = (detail + self.level_bias).max(least).min(greatest);
        // A NaN becomes 0.
        let detail = detail.max(0.0).min(last);
        if !self.linear_levels {
            return (&levels[(detail + 0.5).floor().min(last) as usize], None);
        }
        let first = detail.floor();
        let parts = WEIGHTS as f32;
        let weight = ((detail - first) * parts).round() / parts;
        let next = levels.get(first as usize + 1);
        let second = next.filter(|_| weight > 0.0).map(|next| (next, weight));
        (&levels[first as usize], second)
    }
}

/// The texel before a position in each dimension, and how far behind it the position lies.
fn footprint(at: [f32; 3], dimensions: usize) -> ([i64; 3], [u32; 3]) {
    let parts = |x: f32| ((f64::from(x) - 0.5) * f64::from(WEIGHTS) + 0.5).floor() as i64;
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

/// How much each texel around a position counts. Bit 0 of an index is the texel behind it in x, bit 1 in y,
/// bit 2 in z.
///
/// The weights of an H200, found by filtering images of a single texel: whole parts, divided along z, then x,
/// then y, each time rounding the part of one side; the other side gets the rest.
fn weights([x, y, z]: [u32; 3]) -> [u32; 8] {
    let part = |weight: u32, of: u32| (weight * of + WEIGHTS / 2) / WEIGHTS;
    let mut weights = [0; 8];
    for (behind_z, slice) in [WEIGHTS - z, z].into_iter().enumerate() {
        let column = part(slice, x);
        let near = part(slice - column, WEIGHTS - y);
        let far = part(column, y);
        let here = &mut weights[4 * behind_z..];
        here[..4].copy_from_slice(&[near, column - far, slice - column - near, far]);
    }
    weights
}

/// The face of a cube in a direction, and the place on it from 0 to 1.
fn cube_face([x, y, z]: [f32; 3]) -> (u32, [f32; 3]) {
    let (face, major, s, t) = if x.abs() >= y.abs() && x.abs() >= z.abs() {
        if x >= 0.0 {
            (0, x, -z, -y)
        } else {
            (1, -x, z, -y)
        }
    } else if y.abs() >= z.abs() {
        if y >= 0.0 {
            (2, y, x, z)
        } else {
            (3, -y, x, -z)
        }
    } else if z >= 0.0 {
        (4, z, x, -y)
    } else {
        (5, -z, -x, -y)
    };
    (
        face,
        [(s / major + 1.0) / 2.0, (t / major + 1.0) / 2.0, 0.0],
    )
}

/// The level of detail at which neighbours in a grid are a texel apart.
fn detail_of(gradients: &[[f32; 3]; 2], level: &Level, normalized: bool) -> f32 {
    let length = |gradient: &[f32; 3]| {
        let scaled = gradient.iter().zip(level.extent).map(|(step, extent)| {
            if normalized {
                step * extent as f32
            } else {
                *step
            }
        });
        scaled.map(|step| step * step).sum::<f32>().sqrt()
    };
    length(&gradients[0]).max(length(&gradients[1])).log2()
}

/// The coordinates of a lane.
fn coordinates(frame: &Frame, regs: &[u32], lane: usize) -> [u32; 3] {
    let mut out = [0; 3];
    for (value, &reg) in out.iter_mut().zip(regs) {
        *value = word(&frame.rows[reg as usize], lane);
    }
    out
}

fn one(
    global: &mut Global<'_>,
    frame: &Frame,
    texture: &Texture,
    args: &SampleArgs,
    lane: usize,
) -> Result<Texel, FaultKind> {
    let geometry = args.geometry;
    let dimensions = geometry.dimensions();
    let layer = args
        .layer
        .map_or(0, |reg| word(&frame.rows[reg as usize], lane));
    let bits = coordinates(frame, &args.coordinates, lane);
    let base = &texture.image.levels[0];
    if args.integers {
        // No filtering, no addressing modes: what lies outside is 0.
        let level = match args.detail {
            Detail::Level(reg) => word(&frame.rows[reg as usize], lane) as usize,
            _ => 0,
        };
        let Some(level) = texture.image.levels.get(level) else {
            return Ok([0; 4]);
        };
        let mut place = [0; 3];
        for dimension in 0..dimensions {
            if bits[dimension] >= level.extent[dimension] {
                return Ok([0; 4]);
            }
            place[dimension] = bits[dimension];
        }
        if dimensions < 3 {
            place[2] = layer.min(texture.image.layers - 1);
        }
        return read(global, &texture.image, level, place).map(|texel| texture.finish(texel));
    }
    let mut at = bits.map(f32::from_bits);
    let mut position = Position {
        at,
        layer: layer.min(texture.image.layers - 1),
    };
    if geometry == Geometry::Cube {
        let (face, place) = cube_face(at);
        at = place;
        position.layer = layer.saturating_mul(6).saturating_add(face);
    }
    let normalized = texture.normalized || geometry == Geometry::Cube;
    let place = |level: &Level| {
        let mut position = position;
        position.at = at;
        if normalized {
            for (at, extent) in position.at.iter_mut().zip(level.extent) {
                *at *= extent as f32;
            }
        }
        position
    };
    if let Some(channel) = args.gather {
        return texture.gather(global, base, place(base), channel);
    }
    let detail = match &args.detail {
        Detail::Base => 0.0,
        Detail::Level(reg) => f32::from_bits(word(&frame.rows[*reg as usize], lane)),
        Detail::Gradients(steps) => {
            let steps = [&steps[0], &steps[1]]
                .map(|regs| coordinates(frame, regs, lane).map(f32::from_bits));
            detail_of(&steps, base, normalized)
        }
    };
    let (level, next) = match args.detail {
        Detail::Base => (base, None),
        _ => texture.levels(detail),
    };
    let texel = texture.fetch(global, level, dimensions, place(level))?;
    let Some((next, weight)) = next.filter(|_| texture.gives_floats()) else {
        return Ok(texel);
    };
    let other = texture.fetch(global, next, dimensions, place(next))?;
    let mut mixed = texel;
    for (value, other) in mixed.iter_mut().zip(other) {
        let (a, b) = (f32::from_bits(*value), f32::from_bits(other));
        *value = (a + weight * (b - a)).to_bits();
    }
    Ok(mixed)
}

/// Executes `tex` and `tld4` for the lanes of `mask`.
pub(in crate::exec) fn sample(
    global: &mut Global<'_>,
    launch: &Launch<'_>,
    frame: &mut Frame,
    args: &SampleArgs,
    mask: u32,
) -> Result<(), LaneFault> {
    let handles = frame.rows[args.handle as usize];
    let mut results = [[0_u32; 4]; crate::alu::LANES];
    for lane in Lanes(mask) {
        let fetched = global
            .objects
            .texture(launch, handles[lane])
            .and_then(|texture| one(global, frame, &texture, args, lane));
        results[lane] = fetched.map_err(|kind| lane_fault(kind, lane))?;
    }
    let half = |bits: u32| F16::nearest(f32::from_bits(bits)).put();
    for (index, dest) in args.dests.iter().enumerate() {
        let Some(dest) = dest else { continue };
        let row = &mut frame.rows[*dest as usize];
        for lane in Lanes(mask) {
            let texel = &results[lane];
            row[lane] = match args.texel {
                TexelType::Word => u64::from(texel[index]),
                TexelType::Half => half(texel[index]),
                TexelType::HalfPair => {
                    let pair = 2 * (index & 1);
                    let (low, high) = (texel[pair], texel[pair + 1]);
                    half(high) << 16 | half(low)
                }
            };
        }
    }
    if let Some(pred) = args.resident {
        frame.preds[pred as usize] |= mask;
    }
    Ok(())
}
