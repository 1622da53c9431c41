//! Conversions to and from the formats of tensor cores, and packing of integers (PTX ISA 9.7.9).
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "bit fields of fixed width"
)]

use super::half::{F16, Pair, Rounding, Short, magnitude};
use super::{Alu, alu1, alu2, alu3, plain};
use crate::parse::ast::Type;

/// 8-bit float.
trait Byte {
    /// Explicit bits of the significand.
    const MANTISSA: u32;
    /// Bias of the exponent.
    const BIAS: i32;
    /// Code of the greatest finite magnitude.
    const GREATEST: u8;
    /// Code of an infinity, if the format has one.
    const INFINITY: Option<u8>;
}

/// `.e4m3`: no infinity, one NaN of each sign.
struct E4m3;
/// `.e5m2`: a half without its low byte.
struct E5m2;

impl Byte for E4m3 {
    const MANTISSA: u32 = 3;
    const BIAS: i32 = 7;
    const GREATEST: u8 = 0x7e;
    const INFINITY: Option<u8> = None;
}

impl Byte for E5m2 {
    const MANTISSA: u32 = 2;
    const BIAS: i32 = 15;
    const GREATEST: u8 = 0x7b;
    const INFINITY: Option<u8> = Some(0x7c);
}

/// Returns the code of the nearest finite value; a NaN stays one.
fn to_byte<B: Byte>(value: f32, relu: bool) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    if relu && value <= 0.0 {
        return 0;
    }
    let sign = u8::from(value.is_sign_negative()) << 7;
    if value.is_infinite() {
        return B::GREATEST | sign;
    }
    let code = magnitude(f64::from(value), B::MANTISSA, B::BIAS, Rounding::Nearest);
    code.min(u64::from(B::GREATEST)) as u8 | sign
}

/// Returns the value of a code, which a half can hold, too.
fn of_byte<B: Byte>(code: u8) -> f32 {
    let (sign, code) = (code & 0x80, code & 0x7f);
    let value = if Some(code) == B::INFINITY {
        f32::INFINITY
    } else if code > B::GREATEST {
        return f32::NAN;
    } else {
        let fraction = u32::from(code) & ((1 << B::MANTISSA) - 1);
        let exponent = i32::from(code >> B::MANTISSA);
        let hidden = u32::from(exponent > 0) << B::MANTISSA;
        let scale = exponent.max(1) - B::BIAS + 127 - B::MANTISSA.cast_signed();
        (hidden + fraction) as f32 * f32::from_bits((scale as u32) << 23)
    };
    if sign == 0 { value } else { -value }
}

fn bytes_of_singles<B: Byte>(relu: bool) -> Alu {
    fn pack<B: Byte>(relu: bool, a: f32, b: f32) -> u16 {
        u16::from(to_byte::<B>(a, relu)) << 8 | u16::from(to_byte::<B>(b, relu))
    }
    if relu {
        plain!(two<f32, f32, u16>, |a, b| pack::<B>(true, a, b))
    } else {
        plain!(two<f32, f32, u16>, |a, b| pack::<B>(false, a, b))
    }
}

fn bytes_of_halves<B: Byte>(relu: bool) -> Alu {
    fn pack<B: Byte>(relu: bool, a: Pair<F16>) -> u16 {
        u16::from(to_byte::<B>(a.1.wide(), relu)) << 8 | u16::from(to_byte::<B>(a.0.wide(), relu))
    }
    if relu {
        plain!(one<Pair<F16>, u16>, |a| pack::<B>(true, a))
    } else {
        plain!(one<Pair<F16>, u16>, |a| pack::<B>(false, a))
    }
}

fn halves_of_bytes<B: Byte>(relu: bool) -> Alu {
    fn half<B: Byte>(relu: bool, code: u8) -> F16 {
        let value = of_byte::<B>(code);
        F16::nearest(if relu && value <= 0.0 { 0.0 } else { value })
    }
    fn unpack<B: Byte>(relu: bool, a: u16) -> Pair<F16> {
        Pair(half::<B>(relu, a as u8), half::<B>(relu, (a >> 8) as u8))
    }
    if relu {
        plain!(one<u16, Pair<F16>>, |a| unpack::<B>(true, a))
    } else {
        plain!(one<u16, Pair<F16>>, |a| unpack::<B>(false, a))
    }
}

/// Returns the handler of `cvt` of two values to or from a pair of 8-bit floats, always to the
/// nearest finite value. The first source goes into the high half of the pair, the first result
/// comes from it.
pub(crate) fn pair_of_bytes(to: Type, from: Type, relu: bool) -> Option<Alu> {
    Some(match (to, from) {
        (Type::E4m3x2, Type::F32) => bytes_of_singles::<E4m3>(relu),
        (Type::E5m2x2, Type::F32) => bytes_of_singles::<E5m2>(relu),
        (Type::E4m3x2, Type::F16x2) => bytes_of_halves::<E4m3>(relu),
        (Type::E5m2x2, Type::F16x2) => bytes_of_halves::<E5m2>(relu),
        (Type::F16x2, Type::E4m3x2) => halves_of_bytes::<E4m3>(relu),
        (Type::F16x2, Type::E5m2x2) => halves_of_bytes::<E5m2>(relu),
        _ => return None,
    })
}

/// Returns the value of an 8-bit float of type `.e4m3`, or `.e5m2` if `e4m3` is false.
pub(crate) fn byte_value(e4m3: bool, code: u8) -> f32 {
    if e4m3 {
        of_byte::<E4m3>(code)
    } else {
        of_byte::<E5m2>(code)
    }
}

/// Rounding of a single to `.tf32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToTf32 {
    Nearest,
    /// To the nearest, ties away from zero.
    Away,
    Zero,
}

/// Returns the handler of `cvt.tf32.f32`, which rounds a single to 10 explicit bits of significand.
pub(crate) fn tf32(rounding: ToTf32, relu: bool, finite: bool) -> Alu {
    /// Bits of the significand that `.tf32` lacks.
    const LOST: u32 = 0x1fff;
    #[inline(always)]
    fn narrow(x: f32, bias: impl Fn(u32) -> u32) -> f32 {
        if x.is_nan() {
            f32::from_bits(0x7fff_ffff)
        } else if x.is_infinite() {
            x
        } else {
            let bits = x.to_bits();
            f32::from_bits((bits + bias(bits)) & !LOST)
        }
    }
    macro_rules! finished {
        ($bias:expr) => {
            match (relu, finite) {
                (false, false) => alu1!(f32 => f32, |a| narrow(a, $bias)),
                (true, false) => alu1!(f32 => f32, |a| narrow(if a <= 0.0 { 0.0 } else { a }, $bias)),
                (false, true) => alu1!(f32 => f32, |a| bounded(narrow(a, $bias))),
                (true, true) => alu1!(f32 => f32, |a| bounded(narrow(if a <= 0.0 { 0.0 } else { a }, $bias))),
            }
        };
    }
    #[inline(always)]
    fn bounded(x: f32) -> f32 {
        let greatest = f32::from_bits(0x7f7f_ffff & !LOST);
        if x.is_infinite() {
            greatest.copysign(x)
        } else {
            x
        }
    }
    match rounding {
        ToTf32::Nearest => finished!(|bits| 0xfff + (bits >> 13 & 1)),
        ToTf32::Away => finished!(|_| 0x1000),
        ToTf32::Zero => finished!(|_| 0),
    }
}

/// Returns the handler of `cvt.pack.sat`: two integers, clamped to `bits` bits, the first above the
/// second. If there is room, the third operand's low bits lie above both.
pub(crate) fn pack(bits: u32, signed: bool) -> Option<Alu> {
    #[inline(always)]
    fn clamp(a: i32, bits: u32, signed: bool) -> u32 {
        let (least, greatest) = if signed {
            (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        } else {
            (0, (1 << bits) - 1)
        };
        a.clamp(least, greatest).cast_unsigned() & ((1 << bits) - 1)
    }
    macro_rules! wide {
        ($signed:expr) => {
            alu2!(i32, i32 => u32, |a, b| clamp(a, 16, $signed) << 16 | clamp(b, 16, $signed))
        };
    }
    macro_rules! small {
        ($bits:expr, $signed:expr) => {
            alu3!(i32, i32, u32 => u32, |a, b, c| {
                c << (2 * $bits) | clamp(a, $bits, $signed) << $bits | clamp(b, $bits, $signed)
            })
        };
    }
    Some(match (bits, signed) {
        (16, false) => wide!(false),
        (16, true) => wide!(true),
        (8, false) => small!(8, false),
        (8, true) => small!(8, true),
        (4, false) => small!(4, false),
        (4, true) => small!(4, true),
        (2, false) => small!(2, false),
        (2, true) => small!(2, true),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the value of a code from the definition of its format.
    fn by_definition(code: u8, mantissa: i32, bias: i32) -> f64 {
        let (exponent, fraction) = (
            i32::from(code & 0x7f) >> mantissa,
            i32::from(code) & ((1 << mantissa) - 1),
        );
        let fraction = f64::from(fraction) / f64::from(1 << mantissa);
        let sign = if code >> 7 == 1 { -1.0 } else { 1.0 };
        match exponent {
            0 => sign * fraction * 2.0_f64.powi(1 - bias),
            _ => sign * (1.0 + fraction) * 2.0_f64.powi(exponent - bias),
        }
    }

    #[test]
    fn every_byte_has_its_value_and_survives_the_round_trip() {
        for code in 0..=u8::MAX {
            let magnitude = code & 0x7f;
            if magnitude <= E4m3::GREATEST {
                let value = of_byte::<E4m3>(code);
                assert_eq!(f64::from(value), by_definition(code, 3, 7), "{code:x}");
                assert_eq!(to_byte::<E4m3>(value, false), code);
            }
            if magnitude <= E5m2::GREATEST {
                let value = of_byte::<E5m2>(code);
                assert_eq!(f64::from(value), by_definition(code, 2, 15), "{code:x}");
                assert_eq!(to_byte::<E5m2>(value, false), code);
            }
        }
        assert_eq!(of_byte::<E5m2>(0xfc), f32::NEG_INFINITY);
        assert!(of_byte::<E5m2>(0x7d).is_nan() && of_byte::<E4m3>(0xff).is_nan());
    }

    #[test]
    fn bytes_saturate_and_round_to_even() {
        assert_eq!(to_byte::<E4m3>(1e9, false), 0x7e);
        assert_eq!(to_byte::<E4m3>(f32::NEG_INFINITY, false), 0xfe);
        assert_eq!(to_byte::<E5m2>(61_440.0, false), 0x7b);
        assert_eq!(to_byte::<E4m3>(f32::NAN, true), 0x7f);
        assert_eq!(to_byte::<E4m3>(-3.0, true), 0);
        // Halfway between 1 and 1.125, and between 1.125 and 1.25.
        assert_eq!(to_byte::<E4m3>(1.0625, false), 0x38);
        assert_eq!(to_byte::<E4m3>(1.1875, false), 0x3a);
    }
}
