//! Fetches from textures (CUDA C++ Programming Guide, "Texture Fetching").
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "coordinates become indices that are then brought inside the image"
)]

use super::filter::{Sum, WEIGHTS, footprint, weights};
use super::texel::{self, Texel};
use super::{AddressMode, Level, Recent, Texture, cube};
use crate::decode::insn::{Detail, Geometry, SampleArgs, TexelType};
use crate::error::FaultKind;
use crate::exec::frame::Frame;
use crate::exec::global::Global;
use crate::exec::launch::Launch;
use crate::exec::memory::{LaneFault, Lanes};
use crate::exec::step::word;

/// Number of steps to which normalized coordinates are resolved.
const NORMALIZED_PARTS: f64 = 2_097_152.0;

/// Kind of image that a fetch expects of the texture.
#[derive(Debug, Clone, Copy)]
struct Shape {
    dimensions: usize,
    cube: bool,
}

/// Position of a texel.
#[derive(Debug, Clone, Copy, Default)]
struct Position {
    /// Coordinates in texels.
    at: [f64; 3],
    /// Layer, or face of a cube.
    layer: u32,
}

impl Texture {
    /// Converts a coordinate to texels. An H200 moves a normalized one inside, truncates it to a whole number
    /// of steps, and scales it.
    fn placed(&self, dimension: usize, x: f32, extent: u32, normalized: bool) -> f64 {
        let mode = match self.address_modes[dimension] {
            AddressMode::Wrap | AddressMode::Mirror if !normalized => AddressMode::Clamp,
            mode => mode,
        };
        let x = f64::from(x);
        let mut at = match mode {
            _ if x.is_nan() => 0.0,
            AddressMode::Wrap | AddressMode::Mirror if x.is_infinite() => 0.0,
            AddressMode::Wrap => x - x.floor(),
            AddressMode::Mirror => x - 2.0 * (x / 2.0).floor(),
            AddressMode::Clamp | AddressMode::Border => x,
        };
        if normalized {
            at = (at * NORMALIZED_PARTS).floor() / NORMALIZED_PARTS * f64::from(extent);
        }
        at
    }

    /// Returns the position for filtering. Where both texels are the same, it is the middle of the first.
    fn filter_position(&self, dimension: usize, at: f64, extent: u32) -> f64 {
        let extent = f64::from(extent);
        match self.address_modes[dimension] {
            AddressMode::Border => at,
            AddressMode::Wrap if self.normalized => at,
            AddressMode::Mirror if self.normalized => {
                if (at - extent).abs() < 0.5 {
                    extent - 0.5
                } else {
                    at.clamp(0.5, 2.0 * extent - 0.5)
                }
            }
            _ => at.clamp(0.5, extent - 0.5),
        }
    }

    /// Maps an index outside the image to one inside; `None` stands for the border.
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

    /// Reads a texel of a level, as it is stored.
    fn texel(
        &self,
        global: &mut Global<'_>,
        level: &Level,
        shape: Shape,
        index: [i64; 3],
        layer: u32,
    ) -> Result<Texel, FaultKind> {
        let mut place = [0; 3];
        for dimension in 0..shape.dimensions {
            match self.inside(dimension, index[dimension], level.extent[dimension]) {
                Some(inside) => place[dimension] = inside,
                None => return Ok(self.edge()),
            }
        }
        if shape.dimensions < 3 {
            place[2] = layer.min(self.image.layers - 1);
        }
        texel::read(global, &self.image, level, place)
    }

    /// Reads the texel in which a position lies.
    fn closest(
        &self,
        global: &mut Global<'_>,
        level: &Level,
        shape: Shape,
        position: Position,
    ) -> Result<Texel, FaultKind> {
        let mut index = position.at.map(|x| x.floor() as i64);
        if shape.cube && self.seamless {
            // No border lies between the faces.
            let last = i64::from(level.extent[0]) - 1;
            index = index.map(|at| at.clamp(0, last));
        }
        self.texel(global, level, shape, index, position.layer)
    }

    /// Adds a level's filtered value at a position to `sum`, with weights that add up to `total`.
    fn gather_weighted(
        &self,
        global: &mut Global<'_>,
        level: &Level,
        shape: Shape,
        position: Position,
        total: u32,
        sum: &mut Sum,
    ) -> Result<(), FaultKind> {
        if !self.linear {
            let texel = self.closest(global, level, shape, position)?;
            sum.add(self, texel, f64::from(total));
            return Ok(());
        }
        let seamless = shape.cube && self.seamless;
        let at = std::array::from_fn(|dimension| match position.at[dimension] {
            at if seamless => at,
            at => self.filter_position(dimension, at, level.extent[dimension]),
        });
        let (first, fractions) = footprint(at, shape.dimensions);
        for (corner, weight) in (0_i64..).zip(weights(fractions, total)) {
            if weight == 0 {
                continue;
            }
            let far = [corner & 1, corner >> 1 & 1, corner >> 2];
            let index: [i64; 3] = std::array::from_fn(|d| first[d].saturating_add(far[d]));
            if seamless {
                let shares =
                    cube::neighbours(position.layer, [index[0], index[1]], level.extent[0]);
                let count = f64::from(shares.count);
                for &(layer, [x, y]) in &shares.texels[..shares.count as usize] {
                    let index = [i64::from(x), i64::from(y), 0];
                    let texel = self.texel(global, level, shape, index, layer)?;
                    sum.add(self, texel, f64::from(weight) / count);
                }
            } else {
                let texel = self.texel(global, level, shape, index, position.layer)?;
                sum.add(self, texel, f64::from(weight));
            }
        }
        Ok(())
    }

    /// Fetches from one level, without any filter.
    fn nearest(
        &self,
        global: &mut Global<'_>,
        level: &Level,
        shape: Shape,
        position: Position,
    ) -> Result<Texel, FaultKind> {
        let texel = self.closest(global, level, shape, position)?;
        Ok(self.finish(texel))
    }

    /// Fetches one channel of the four texels around a position.
    fn gather(
        &self,
        global: &mut Global<'_>,
        level: &Level,
        shape: Shape,
        position: Position,
        channel: usize,
    ) -> Result<Texel, FaultKind> {
        let ([x, y, _], _) = footprint(position.at, 2);
        let mut out = [0; 4];
        for (value, (dx, dy)) in out.iter_mut().zip([(0, 1), (1, 1), (1, 0), (0, 0)]) {
            let index = [x.saturating_add(dx), y.saturating_add(dy), 0];
            let texel = self.texel(global, level, shape, index, position.layer)?;
            *value = self.finish(texel)[channel];
        }
        Ok(out)
    }

    /// Returns the levels to fetch from, and the weight of the second. Without a detail the level is 0, and no
    /// bias is added.
    fn levels(&self, detail: Option<f32>) -> (&Level, Option<(&Level, u32)>) {
        let levels = &self.image.levels;
        let last = (levels.len() - 1) as f32;
        let [least, greatest] = self.level_clamp;
        let detail = detail.map_or(0.0, |detail| {
            let parts = WEIGHTS as f32;
            let detail = if detail.is_nan() { 0.0 } else { detail };
            (detail * parts).trunc() / parts + self.level_bias
        });
        let detail = detail.max(least).min(greatest).max(0.0).min(last);
        if !self.linear_levels {
            return (&levels[(detail + 0.5).floor().min(last) as usize], None);
        }
        let first = detail.floor();
        let weight = ((detail - first) * WEIGHTS as f32) as u32;
        let next = levels.get(first as usize + 1);
        let second = next.filter(|_| weight > 0).map(|next| (next, weight));
        (&levels[first as usize], second)
    }
}

/// Returns the level of detail at which neighbours in a grid are a texel apart.
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

/// Returns the coordinates of a lane.
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
    (handle, texture): (u64, &Texture),
    args: &SampleArgs,
    lane: usize,
) -> Result<Texel, FaultKind> {
    let geometry = args.geometry;
    let shape = Shape {
        // A line is sampled as a plane of one row, with the position on the row's edge.
        dimensions: match (geometry, args.layer) {
            (Geometry::OneD, None) => 2,
            _ => geometry.dimensions(),
        },
        cube: geometry == Geometry::Cube,
    };
    let layer = args
        .layer
        .map_or(0, |reg| word(&frame.rows[reg as usize], lane));
    let bits = coordinates(frame, &args.coordinates, lane);
    let base = &texture.image.levels[0];
    if args.integers {
        // No filtering and no addressing modes: a fetch outside returns 0.
        let level = match args.detail {
            Detail::Level(reg) => word(&frame.rows[reg as usize], lane) as usize,
            _ => 0,
        };
        let Some(level) = texture.image.levels.get(level) else {
            return Ok([0; 4]);
        };
        let mut place = [0; 3];
        let dimensions = geometry.dimensions();
        for dimension in 0..dimensions {
            if bits[dimension] >= level.extent[dimension] {
                return Ok([0; 4]);
            }
            place[dimension] = bits[dimension];
        }
        if dimensions < 3 {
            place[2] = layer.min(texture.image.layers - 1);
        }
        return texel::read(global, &texture.image, level, place)
            .map(|texel| texture.finish(texel));
    }
    let mut at = bits.map(f32::from_bits);
    let mut position = Position {
        at: [0.0; 3],
        layer: layer.min(texture.image.layers - 1),
    };
    if geometry == Geometry::Cube {
        if texture.image.layers < cube::FACES {
            return Err(FaultKind::InvalidObject { handle });
        }
        let (face, place) = cube::face(at);
        at = place;
        position.layer = layer.min(texture.image.layers / cube::FACES - 1) * cube::FACES + face;
    }
    let normalized = texture.normalized || geometry == Geometry::Cube;
    let place = |level: &Level| {
        let mut position = position;
        position.at = std::array::from_fn(|dimension| {
            texture.placed(
                dimension,
                at[dimension],
                level.extent[dimension],
                normalized,
            )
        });
        position
    };
    if let Some(channel) = args.gather {
        return texture.gather(global, base, shape, place(base), channel);
    }
    let detail = match &args.detail {
        Detail::Base => None,
        Detail::Level(reg) => Some(f32::from_bits(word(&frame.rows[*reg as usize], lane))),
        Detail::Gradients(steps) => {
            let steps = [&steps[0], &steps[1]]
                .map(|regs| coordinates(frame, regs, lane).map(f32::from_bits));
            Some(detail_of(&steps, base, normalized))
        }
    };
    let (level, next) = texture.levels(detail);
    if !texture.gives_floats() || (!texture.linear && next.is_none()) {
        return texture.nearest(global, level, shape, place(level));
    }
    let mut sum = Sum::default();
    let far = next.map_or(0, |(_, weight)| weight);
    texture.gather_weighted(global, level, shape, place(level), WEIGHTS - far, &mut sum)?;
    if let Some((next, weight)) = next {
        texture.gather_weighted(global, next, shape, place(next), weight, &mut sum)?;
    }
    Ok(sum.finish(texture))
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
    let fetch = |global: &mut Global<'_>, objects: &mut Recent, lane: usize| {
        let texture = objects.texture(launch, handles[lane])?;
        let texel = one(global, frame, (handles[lane], texture), args, lane)?;
        results[lane] = match args.texel {
            TexelType::Word => texel,
            TexelType::Half | TexelType::HalfPair => texture.halves(texel),
        };
        Ok(())
    };
    Recent::beside(global, mask, fetch)?;
    for (index, dest) in args.dests.iter().enumerate() {
        let Some(dest) = dest else { continue };
        let row = &mut frame.rows[*dest as usize];
        for lane in Lanes(mask) {
            let texel = &results[lane];
            row[lane] = u64::from(match args.texel {
                TexelType::Word | TexelType::Half => texel[index],
                TexelType::HalfPair => {
                    let pair = 2 * (index & 1);
                    texel[pair + 1] << 16 | texel[pair]
                }
            });
        }
    }
    if let Some(pred) = args.resident {
        frame.preds[pred as usize] |= mask;
    }
    Ok(())
}
