//! Known differences from the recorded answers, each with its reason: behaviour that the PTX ISA leaves
//! open, or in which the GPU departs from it.

use crate::compare::Difference;
use crate::form::{Form, Format};

/// Known difference.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    pub group: &'static str,
    /// Prefix of the names of the forms.
    pub forms: &'static str,
    /// Returns whether the difference explains a row.
    pub covers: fn(&Form, &Difference) -> bool,
    pub reason: &'static str,
}

const fn rows(
    group: &'static str,
    forms: &'static str,
    covers: fn(&Form, &Difference) -> bool,
    reason: &'static str,
) -> Known {
    Known {
        group,
        forms,
        covers,
        reason,
    }
}

const PAYLOAD: &str = "which encoding a NaN has is not specified";
const COUNTS: &str = "positions and lengths beyond 255 are not specified";
const BORROW: &str =
    "the GPU's flag after a subtraction is the complement of the borrow; only mixed chains show it";
const FLUSHED: &str =
    "the GPU rounds subnormal operands of a conversion to f16 although .ftz makes them zeros";
const EMULATED: &str =
    "the GPU's driver emulates video instructions and saturates other than the PTX ISA says";

const WEIGHTS: &str = "how rounding spreads over the weights of eight texels, or of two levels of them, is not specified";
const CORNERS: &str =
    "how the three texels around a cube's corner share its weight is not specified";
const CURVE: &str =
    "the GPU's table of the sRGB curve has eight bits, of which the last is not always the nearest";
const SIGNED: &str = "how sums of signed bytes round in their last bit is not specified";
const GRADIENTS: &str = "the level of detail that suits gradients is approximated";
const DIRECTIONS: &str =
    "a direction of no length meets no face, and one that meets two texels' edge either of them";

/// Differences that do not count as errors.
pub const LATITUDE: &[Known] = &[
    rows("bits", "bfi.b64", counts, COUNTS),
    rows("bits", "bfe.u64", counts, COUNTS),
    rows("bits", "bfe.s64", counts, COUNTS),
    rows("carry", "add.cc, subc.", |_, _| true, BORROW),
    rows("carry", "sub.cc, addc.", |_, _| true, BORROW),
    rows("f32", "abs.", |_, d| nans(Format::F32, d), PAYLOAD),
    rows("f32", "neg.", |_, d| nans(Format::F32, d), PAYLOAD),
    rows("f64", "", |_, d| nans(Format::F64, d), PAYLOAD),
    rows("f16", "abs.", |_, d| nans(Format::F16, d), PAYLOAD),
    rows("f16", "neg.", |_, d| nans(Format::F16, d), PAYLOAD),
    rows("bf16", "abs.", |_, d| nans(Format::Bf16, d), PAYLOAD),
    rows("bf16", "neg.", |_, d| nans(Format::Bf16, d), PAYLOAD),
    rows(
        "approximate",
        "rcp.approx.ftz.f64",
        |_, d| nans(Format::F64, d),
        PAYLOAD,
    ),
    rows(
        "approximate",
        "rsqrt.approx.ftz.f64",
        |_, d| nans(Format::F64, d),
        PAYLOAD,
    ),
    rows(
        "approximate",
        "rcp.approx.ftz.f64",
        short_nan,
        "the lower half of the operand is not looked at: a NaN without bits above it is an infinity",
    ),
    rows(
        "approximate",
        "rsqrt.approx.ftz.f64",
        short_nan,
        "the lower half of the operand is not looked at: a NaN without bits above it is an infinity",
    ),
    rows("cvt-float", "cvt", converted_nan, PAYLOAD),
    rows(
        "cvt-float",
        "cvt.rna.",
        cut_nan,
        "the GPU drops a NaN's low bits, after which it may be an infinity",
    ),
    rows("cvt-float", "cvt.rm.ftz.f16.f32", subnormal, FLUSHED),
    rows("cvt-float", "cvt.rp.ftz.f16.f32", subnormal, FLUSHED),
    rows("cvt-float", "cvt.rp.ftz.sat.f16.f32", subnormal, FLUSHED),
    rows(
        "warp",
        "shfl.sync.bfly.b32 0x1c03 among 0xf0f0f00f",
        stranger,
        "what a lane reads of one that is no member is not specified",
    ),
    rows(
        "atomic",
        "atom.global.add.f64",
        |_, d| nans(Format::F64, d),
        PAYLOAD,
    ),
    rows(
        "atomic",
        "red.global.add.f64",
        |_, d| nans(Format::F64, d),
        PAYLOAD,
    ),
    rows(
        "mma",
        "mma.sync.aligned.m8n8k4.col.row.f32.f16.f16.f32",
        zeros,
        "the sign of a sum of zeros is not specified",
    ),
    rows(
        "tex",
        "tex.3d.v4.f32.f32 linear mirror normalized",
        |_, d| near(d, 1.0),
        WEIGHTS,
    ),
    rows("tex-level", "tex.3d.", |_, d| near(d, 1.0), WEIGHTS),
    rows("tex-level", "tex.base.3d.", |_, d| near(d, 1.0), WEIGHTS),
    rows("tex-level", "tex.level.3d.", |_, d| near(d, 1.0), WEIGHTS),
    rows("tex-level", "tex.grad.", |_, _| true, GRADIENTS),
    rows("tex-level", "tex.base.cube.", edge, DIRECTIONS),
    rows("tex-level", "tex.level.cube.", edge, DIRECTIONS),
    rows("tex-cube", "tex.cube.v4.f32.f32 linear", edge, DIRECTIONS),
    rows(
        "tex-cube",
        "tex.cube.v4.f32.f32 linear",
        |_, d| near(d, 0.5),
        CORNERS,
    ),
    rows(
        "tex-cube",
        "tex.acube.v4.f32.f32 linear",
        |_, d| near(d, 0.5),
        CORNERS,
    ),
    rows("tex-format", "tex.2d.v4.f32.f32 of u8", curved, CURVE),
    rows(
        "tex-format",
        "tex.2d.v4.f32.f32 of s8",
        |_, d| near(d, 1.5 / 32_767.0),
        SIGNED,
    ),
    rows("video", "vadd.", saturated, EMULATED),
    rows("video", "vsub.", saturated, EMULATED),
    rows("video", "vabsdiff.", saturated, EMULATED),
    rows("video", "vmin.", saturated, EMULATED),
    rows("video", "vmax.", saturated, EMULATED),
    rows("video", "vshl.", saturated, EMULATED),
    rows(
        "video",
        "vmad.",
        taken_as_signed,
        "the GPU's driver emulates vmad and takes words as signed before it scales or saturates",
    ),
];

/// Returns whether every result is equal to the recorded one, or a NaN on both sides.
pub(crate) fn nans(format: Format, difference: &Difference) -> bool {
    let parts = 64 / format.bits();
    let mask = u64::MAX >> (64 - format.bits());
    difference
        .kept
        .iter()
        .zip(&difference.found)
        .all(|(&kept, &found)| {
            (0..parts).all(|part| {
                let cut = |word: u64| word >> (part * format.bits()) & mask;
                let (kept, found) = (cut(kept), cut(found));
                kept == found || format.value(kept).is_nan() && format.value(found).is_nan()
            })
        })
}

fn converted_nan(form: &Form, difference: &Difference) -> bool {
    let format = match form.name.rsplit('.').nth(1) {
        Some("f16") => Format::F16,
        Some("bf16") => Format::Bf16,
        Some("f32" | "tf32") => Format::F32,
        Some("f64") => Format::F64,
        _ => return false,
    };
    nans(format, difference)
}

fn counts(_: &Form, difference: &Difference) -> bool {
    let operands = &difference.operands;
    operands[operands.len() - 2..]
        .iter()
        .any(|&count| count > 255)
}

fn short_nan(_: &Form, difference: &Difference) -> bool {
    let operand = difference.operands[0];
    operand >> 32 & 0x7fff_ffff == 0x7ff0_0000 && operand << 32 != 0
}

fn cut_nan(_: &Form, difference: &Difference) -> bool {
    let operand = difference.operands[0];
    Format::F32.value(operand).is_nan() && operand & 0x007f_e000 == 0
}

fn subnormal(_: &Form, difference: &Difference) -> bool {
    Format::F32.is_subnormal(difference.operands[0])
}

fn stranger(_: &Form, difference: &Difference) -> bool {
    let source = (difference.row as u64 % 32) ^ (difference.operands[1] & 31);
    0xf0f0_f00f_u64 >> source & 1 == 0
}

fn zeros(_: &Form, difference: &Difference) -> bool {
    let zero = |word: u64| word << 33 == 0;
    difference
        .kept
        .iter()
        .zip(&difference.found)
        .all(|(&kept, &found)| kept == found || zero(kept) && zero(found))
}

/// Returns whether an unsigned form has a final modifier (`.sat`, `.shr`) and one of its words has its
/// highest bit set.
fn taken_as_signed(form: &Form, difference: &Difference) -> bool {
    let finished = form.name.contains(".sat") || form.name.contains(".shr");
    let words = if form.name.ends_with("b1, h1") { 2 } else { 0 };
    finished
        && form.name.contains("u32")
        && difference.operands[words..]
            .iter()
            .any(|word| word >> 31 == 1)
}

/// Returns whether the results, as singles, differ by at most `distance`.
fn near(difference: &Difference, distance: f64) -> bool {
    let results = difference.kept.iter().zip(&difference.found);
    results
        .map(|(&kept, &found)| (Format::F32.value(kept) - Format::F32.value(found)).abs())
        .all(|apart| apart <= distance)
}

/// Returns whether a form reads sRGB colours, and no result differs by more than 1/32 of the recorded
/// one.
fn curved(form: &Form, difference: &Difference) -> bool {
    form.name.contains("sRGB")
        && difference
            .kept
            .iter()
            .zip(&difference.found)
            .all(|(&kept, &found)| {
                let (kept, found) = (Format::F32.value(kept), Format::F32.value(found));
                (kept - found).abs() <= kept.abs() / 32.0
            })
}

/// Returns whether the direction is zero, or meets a face on the border of two texels of an image of
/// eight.
fn edge(_: &Form, difference: &Difference) -> bool {
    let direction: Vec<f64> = difference.operands[..3]
        .iter()
        .map(|&bits| Format::F32.value(bits))
        .collect();
    let major = direction.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let place = |x: &f64| (x / major + 1.0) * 4.0;
    major == 0.0
        || direction
            .iter()
            .filter(|x| x.abs() < major)
            .any(|x| (place(x) - place(x).round()).abs() < 1e-4)
}

fn saturated(form: &Form, _: &Difference) -> bool {
    form.name.contains(".sat")
}

/// Returns the index of the entry in [`LATITUDE`] that explains a differing row.
#[must_use]
pub fn row(group: &str, form: &Form, difference: &Difference) -> Option<usize> {
    LATITUDE.iter().position(|known| {
        known.group == group
            && form.name.starts_with(known.forms)
            && (known.covers)(form, difference)
    })
}
