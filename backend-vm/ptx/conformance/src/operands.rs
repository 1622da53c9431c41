//! Generates operands: edge values, crossed, then random ones from a generator with a fixed seed.

use crate::form::{Form, Format};

/// Class of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Integer of 16, 32 or 64 bits (or a word of bytes).
    Int(u32),
    /// Float.
    Float(Format),
    /// Two halves in a word.
    Pair(Format),
    /// Shift count, position or length: around 0, 16, 32, 64, 255.
    Count,
    /// Predicate: true in all lanes of the first warp, in none of the second, in one of the third, then
    /// random.
    Pred,
    /// Value of 32 or 64 bits: one value in the first warp, two in the second, five in the third, then any.
    Clustered(u32),
    /// Index of a lane, or a few beyond the last.
    Lane,
    /// Floats that are small integers: sums of products are exact in every format.
    Small(Format),
    /// Two small integers as halves.
    SmallPair(Format),
    /// Floats below 1 in magnitude.
    Unit(Format),
    /// Two halves below 1 in magnitude.
    UnitPair(Format),
    /// Four floats of eight bits, none infinite or not a number.
    FiniteBytes,
    /// Small integer.
    SmallInt,
    /// Index: one of `count` integers from `first` on, times `step`.
    Index { first: i8, count: u8, step: u8 },
    /// Position in an image of `extent` texels, or a little or far outside, in 1/512 of a texel; divided by
    /// the extent if normalized.
    Coordinate { extent: u8, normalized: bool },
    /// Component of a direction, or of steps between neighbours, from -2 to 2 in 1/64.
    Direction,
    /// Level of detail, from -1 to 7 in 1/512.
    Detail,
}

impl Class {
    /// Returns the number of bits of the register; 1 is a predicate.
    #[must_use]
    pub fn bits(self) -> u32 {
        match self {
            Self::Int(bits) | Self::Clustered(bits) => bits,
            Self::Float(format) | Self::Small(format) | Self::Unit(format) => format.bits(),
            Self::Pred => 1,
            Self::Pair(_)
            | Self::Count
            | Self::Lane
            | Self::SmallPair(_)
            | Self::UnitPair(_)
            | Self::FiniteBytes
            | Self::SmallInt
            | Self::Index { .. }
            | Self::Coordinate { .. }
            | Self::Direction
            | Self::Detail => 32,
        }
    }

    /// Returns the values at which instructions change their behaviour.
    fn edges(self) -> Vec<u64> {
        match self {
            Self::Int(bits) => integer_edges(bits),
            Self::Float(format) => float_edges(format),
            Self::Pair(format) => {
                let edges = float_edges(format);
                let shifted = edges.iter().cycle().skip(7);
                edges
                    .iter()
                    .zip(shifted)
                    .map(|(a, b)| a | b << 16)
                    .collect()
            }
            Self::Count => vec![
                0,
                1,
                7,
                8,
                15,
                16,
                17,
                31,
                32,
                33,
                63,
                64,
                65,
                127,
                255,
                256,
                0x101,
                0x1_0000,
                0x7fff_ffff,
                0x8000_0000,
                0xffff_ffff,
            ],
            Self::Coordinate { extent, normalized } => {
                let far = f32::from(extent);
                let edges = [
                    0.0,
                    -0.0,
                    0.5,
                    1.0,
                    far - 0.5,
                    far,
                    -0.5,
                    0.25,
                    far - 0.25,
                    far + 0.25,
                    -0.25,
                    far.next_down(),
                    -far,
                    2.0 * far - 0.5,
                    -2.0 * far - 0.5,
                    0.5_f32.next_down(),
                    1.5 + 1.0 / 1024.0,
                    1e6,
                    -1e6,
                    1e30,
                    f32::INFINITY,
                    f32::NEG_INFINITY,
                    f32::NAN,
                ];
                let scale = if normalized { far } else { 1.0 };
                edges.iter().map(|x| single(x / scale)).collect()
            }
            Self::Direction => [0.0, 1.0, -1.0, 0.5, -0.5, 0.25]
                .iter()
                .map(|x| single(*x))
                .collect(),
            Self::Detail => [0.0, 1.0, 0.5, 0.25, 0.75, -1.0, 2.5, 9.0, f32::NAN]
                .iter()
                .map(|x| single(*x))
                .collect(),
            _ => Vec::new(),
        }
    }

    fn random(self, random: &mut Random, row: usize) -> u64 {
        match self {
            Self::Int(bits) => {
                // Small values are as frequent as large ones.
                let value = random.next() >> (64 - bits);
                match random.below(4) {
                    0 => value >> random.below(u64::from(bits)),
                    1 => {
                        let cut = random.below(u64::from(bits));
                        !(value >> cut) & (u64::MAX >> (64 - bits))
                    }
                    _ => value,
                }
            }
            Self::Float(format) => random_float(format, random),
            Self::Pair(format) => random_float(format, random) | random_float(format, random) << 16,
            Self::Count => random.below(70),
            Self::Pred => match row / 32 {
                0 => 1,
                1 => 0,
                2 => u64::from(row % 32 == 9),
                _ => random.below(2),
            },
            Self::Clustered(bits) => {
                let kinds = [1, 2, 5, 1 << 20][row / 32 % 4];
                (random.below(kinds) + 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - bits)
            }
            Self::Lane => random.below(36),
            Self::Small(format) => small(format, random),
            Self::SmallPair(format) => small(format, random) | small(format, random) << 16,
            Self::Unit(format) => unit(format, random),
            Self::UnitPair(format) => unit(format, random) | unit(format, random) << 16,
            // The exponent's highest bit is 0.
            Self::FiniteBytes => random.next() >> 32 & 0xbfbf_bfbf,
            Self::SmallInt => random.below(32),
            Self::Index { first, count, step } => {
                let index = i64::from(first) + random.below(u64::from(count)).cast_signed();
                (index * i64::from(step)).cast_unsigned() & 0xffff_ffff
            }
            Self::Coordinate { extent, normalized } => {
                let parts = 512 * 3 * u64::from(extent);
                let x = steps(random.below(parts), 512.0) - f32::from(extent);
                single(if normalized { x / f32::from(extent) } else { x })
            }
            Self::Direction => single(steps(random.below(257), 64.0) - 2.0),
            Self::Detail => single(steps(random.below(8 * 512), 512.0) - 1.0),
        }
    }
}

fn single(x: f32) -> u64 {
    u64::from(x.to_bits())
}

/// Returns `count` divided by `parts`.
fn steps(count: u64, parts: f32) -> f32 {
    f32::from(u16::try_from(count).unwrap_or(u16::MAX)) / parts
}

fn integer_edges(bits: u32) -> Vec<u64> {
    let all = u64::MAX >> (64 - bits);
    let least = 1 << (bits - 1);
    let half = 1_u64 << (bits / 2);
    vec![
        0,
        1,
        all,
        least,
        least - 1,
        2,
        all - 1,
        least + 1,
        half - 1,
        half,
        half + 1,
        3,
        7,
        10,
        all - 6,
        0x8080_8080_8080_8080 & all,
        0x7f80_ff01_7f80_ff01 & all,
        0xaaaa_aaaa_aaaa_aaaa & all,
    ]
}

fn float_edges(format: Format) -> Vec<u64> {
    let fraction = format.fraction();
    let sign = 1_u64 << (format.bits() - 1);
    let one = ((1_u64 << (format.exponent() - 1)) - 1) << fraction;
    let infinite = ((1_u64 << format.exponent()) - 1) << fraction;
    let quiet = 1_u64 << (fraction - 1);
    let normal = 1_u64 << fraction;
    // 2 to the power of n.
    let power = |n: u64| one + (n << fraction);
    let mut edges = vec![
        0,
        sign,
        one,
        sign | one,
        infinite,
        sign | infinite,
        infinite | quiet,
        sign | infinite | quiet | 3,
        infinite | 1,
        sign | infinite | 5,
        1,
        sign | 1,
        normal - 1,
        sign | (normal - 1),
        normal,
        sign | normal,
        normal + 1,
        infinite - 1,
        sign | (infinite - 1),
        one + 1,
        one - 1,
        sign | (one - 1),
        // One half, one and a half, two and a half, minus three and a half.
        one - normal,
        one + quiet,
        power(1) + quiet / 2,
        sign | (power(1) + quiet + quiet / 2),
        sign | (one - normal),
        quiet,
        // Values around which floats become integers, and around the limits of integers.
        power(u64::from(fraction)) - 1,
        power(u64::from(fraction) - 1) + 1,
        power(7),
        power(8) - 1,
        sign | power(7),
        power(15),
        sign | power(15),
    ];
    if format != Format::F16 {
        for n in [16, 31, 32, 63, 64, 127] {
            edges.extend([power(n), sign | power(n), power(n) - 1]);
        }
    }
    // Values around which other formats overflow, round and underflow.
    match format {
        Format::F32 => edges.extend([
            0x477f_efff,
            0x477f_f000,
            0x3880_0000,
            0x3300_0000,
            0x3300_0001,
            0xb2ff_ffff,
            0x3f80_1000,
            0x3f80_3000,
            0x3f80_8000,
            0x3f81_8000,
            0x7f7f_8000,
            0x43e0_0000,
            0x43e8_0000,
            0x4760_0000,
            0x3b00_0000,
        ]),
        Format::F64 => edges.extend([
            0x47ef_ffff_f000_0000,
            0x47ef_ffff_efff_ffff,
            0x3690_0000_0000_0000,
            0x3690_0000_0000_0001,
            0x3810_0000_0000_0000,
            0x380f_ffff_ffff_ffff,
            0x3ff0_0000_1000_0000,
            0x3ff0_0000_3000_0000,
            0x40ef_fdff_ffff_ffff,
            0x40ef_fe00_0000_0000,
        ]),
        _ => {}
    }
    edges
}

/// Returns a float of any kind, or one of medium magnitude, so that sums and products round.
fn random_float(format: Format, random: &mut Random) -> u64 {
    let any = random.next() >> (64 - format.bits());
    if random.below(4) == 0 {
        return any;
    }
    let spread = if format == Format::F16 { 8 } else { 24 };
    let exponent = (1 << (format.exponent() - 1)) - 1 + random.below(spread) - spread / 2;
    let fraction = format.fraction();
    let kept = any & (1 << (format.bits() - 1) | ((1 << fraction) - 1));
    kept | exponent << fraction
}

/// Returns an integer from -8 to 8.
fn small(format: Format, random: &mut Random) -> u64 {
    let magnitude = random.below(9);
    let sign = random.below(2) << (format.bits() - 1);
    if magnitude == 0 {
        return sign;
    }
    let exponent = u64::from(magnitude.ilog2());
    let fraction = u64::from(format.fraction());
    let one = (1 << (format.exponent() - 1)) - 1;
    sign | (one + exponent) << fraction
        | (magnitude << fraction >> exponent) & ((1 << fraction) - 1)
}

/// Returns a number from 1/16 to 1, of either sign.
fn unit(format: Format, random: &mut Random) -> u64 {
    let fraction = format.fraction();
    let exponent = (1 << (format.exponent() - 1)) - 2 - random.below(4);
    let any = random.next() >> (64 - format.bits());
    any & (1 << (format.bits() - 1) | ((1 << fraction) - 1)) | exponent << fraction
}

/// SplitMix64 generator.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        ((self.next() >> 32) * end) >> 32
    }
}

/// Computes the FNV-1a hash.
pub(crate) fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Returns the rows of operands of a form.
#[must_use]
pub fn rows(form: &Form) -> Vec<Vec<u64>> {
    let mut random = Random(hash(form.name.bytes()));
    let edges: Vec<Vec<u64>> = form.inputs.iter().map(|class| class.edges()).collect();
    // With one operand every edge value occurs once; with more, most rows combine edge values.
    let most = edges.iter().map(Vec::len).max().unwrap_or(0);
    let sharp = match edges.iter().filter(|edges| !edges.is_empty()).count() {
        0 => 0,
        1 => most.min(form.rows * 3 / 4),
        _ => form.rows * 5 / 8,
    };
    (0..form.rows)
        .map(|row| {
            let columns = form.inputs.iter().zip(&edges).enumerate();
            columns
                .map(|(column, (class, edges))| {
                    let count = edges.len() as u64;
                    if row >= sharp || edges.is_empty() {
                        class.random(&mut random, row)
                    } else if column == 0 {
                        edges[row % edges.len()]
                    } else {
                        let index = usize::try_from(random.below(count)).unwrap_or(0);
                        edges[index]
                    }
                })
                .collect()
        })
        .collect()
}
