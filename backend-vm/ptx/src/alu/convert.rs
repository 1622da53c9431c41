//! `cvt`: between integers, floats and both (PTX ISA 9.7.9).
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::cast_lossless,
    clippy::cast_precision_loss,
    clippy::allow_attributes,
    reason = "conversions are what this module does"
)]
#![allow(clippy::unnecessary_cast, reason = "one expression serves every width")]

use super::half::{Bf16, F16, Pair, Rounding, Short};
use super::{Alu, alu1, alu2, by_flags, by_int8, round};
use crate::parse::ast::Type;

/// Modifiers of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style {
    /// How to round.
    pub rounding: Rounding,
    /// Whether a float is rounded to an integer (`.rni` and its kin).
    pub integral: bool,
    /// Whether subnormal singles are zeros.
    pub ftz: bool,
    /// Whether to clamp: integers to the range of the type, floats to [0, 1].
    pub saturate: bool,
    /// Whether negative results are zeros.
    pub relu: bool,
}

fn is_float(ty: Type) -> bool {
    matches!(ty, Type::F16 | Type::Bf16 | Type::F32 | Type::F64)
}

/// The conversion from `from` to `to`.
pub(crate) fn find(to: Type, from: Type, style: Style) -> Option<Alu> {
    match (is_float(to), is_float(from)) {
        (false, false) if style.relu || style.integral => None,
        (false, false) => integers(to, from, style.saturate),
        (true, false) => to_float(to, from, style),
        (false, true) => from_float(to, from, style),
        (true, true) => floats(to, from, style),
    }
}

fn integers(to: Type, from: Type, saturate: bool) -> Option<Alu> {
    by_int8!(from, S => {
        let chosen: Option<Alu> = if saturate {
            by_int8!(to, D => alu1!(S => D, |a| (a as i128).clamp(D::MIN as i128, D::MAX as i128) as D))
        } else {
            by_int8!(to, D => alu1!(S => D, |a| a as D))
        };
        chosen
    })
    .flatten()
}

/// Rounds an integer to a double so that one more rounding gives the right result:
/// what 53 bits cannot hold sets the last bit.
fn odd(value: i128) -> f64 {
    let nearest = value as f64;
    let rest = value - nearest as i128;
    if rest == 0 || nearest.to_bits() & 1 == 1 {
        return nearest;
    }
    if (rest > 0) == (value > 0) {
        f64::from_bits(nearest.to_bits() + 1)
    } else {
        f64::from_bits(nearest.to_bits() - 1)
    }
}

fn directed_double(value: i128, rounding: Rounding) -> f64 {
    let nearest = value as f64;
    let rest = value - nearest as i128;
    match rounding {
        Rounding::Up if rest > 0 => nearest.next_up(),
        Rounding::Down if rest < 0 => nearest.next_down(),
        Rounding::Zero if value > 0 && rest < 0 => nearest.next_down(),
        Rounding::Zero if value < 0 && rest > 0 => nearest.next_up(),
        _ => nearest,
    }
}

macro_rules! by_rounding {
    ($rounding:expr, $R:ident => $e:expr) => {
        match $rounding {
            Rounding::Nearest => { const $R: Rounding = Rounding::Nearest; $e }
            Rounding::Zero => { const $R: Rounding = Rounding::Zero; $e }
            Rounding::Down => { const $R: Rounding = Rounding::Down; $e }
            Rounding::Up => { const $R: Rounding = Rounding::Up; $e }
        }
    };
}

#[inline(always)]
fn unit<const SAT: bool>(x: f64) -> f64 {
    if SAT { if x > 0.0 { x.min(1.0) } else { 0.0 } } else { x }
}

fn to_float(to: Type, from: Type, style: Style) -> Option<Alu> {
    let nearest = style.rounding == Rounding::Nearest;
    by_int8!(from, S => match to {
        Type::F32 if nearest && !style.saturate => Some(alu1!(S => f32, |a| a as f32)),
        Type::F64 if nearest && !style.saturate => Some(alu1!(S => f64, |a| a as f64)),
        Type::F32 => Some(by_rounding!(style.rounding, R => by_flags!(style.saturate, C =>
            alu1!(S => f32, |a| round::narrow(unit::<C>(odd(a as i128)), R))))),
        Type::F64 => Some(by_rounding!(style.rounding, R => by_flags!(style.saturate, C =>
            alu1!(S => f64, |a| unit::<C>(directed_double(a as i128, R)))))),
        Type::F16 => Some(by_rounding!(style.rounding, R => by_flags!(style.saturate, C =>
            alu1!(S => F16, |a| F16::narrow(unit::<C>(odd(a as i128)), R))))),
        Type::Bf16 => Some(by_rounding!(style.rounding, R => by_flags!(style.saturate, C =>
            alu1!(S => Bf16, |a| Bf16::narrow(unit::<C>(odd(a as i128)), R))))),
        _ => None,
    })
    .flatten()
}

#[inline(always)]
fn integral(x: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => x.round_ties_even(),
        Rounding::Zero => x.trunc(),
        Rounding::Down => x.floor(),
        Rounding::Up => x.ceil(),
    }
}

fn from_float(to: Type, from: Type, style: Style) -> Option<Alu> {
    if !style.integral || style.relu {
        return None;
    }
    // Out of range values clamp; a NaN becomes zero, except that conversions from
    // double or to 64 bits give the most significant bit alone.
    let top = matches!(to, Type::S64 | Type::U64) || from == Type::F64;
    by_rounding!(style.rounding, R => by_flags!(top, TOP => by_int8!(to, D => {
        #[inline(always)]
        fn cast(x: f64) -> D {
            if TOP && x.is_nan() { (1 as D) << (D::BITS - 1) } else { integral(x, R) as D }
        }
        match from {
            Type::F32 => Some(by_flags!(style.ftz, F =>
                alu1!(f32 => D, |a| cast(f64::from(if F { super::float::flush(a) } else { a }))))),
            Type::F64 => Some(alu1!(f64 => D, |a| cast(a))),
            Type::F16 => Some(alu1!(F16 => D, |a| cast(a.wide()))),
            Type::Bf16 => Some(alu1!(Bf16 => D, |a| cast(a.wide()))),
            _ => None,
        }
    })))
    .flatten()
}

#[inline(always)]
fn single(x: f64, rounding: Rounding, ftz: bool) -> f32 {
    if x.is_nan() {
        return f32::from_bits(0x7fff_ffff);
    }
    let x = round::narrow(x, rounding);
    if ftz { super::float::flush(x) } else { x }
}

fn floats(to: Type, from: Type, style: Style) -> Option<Alu> {
    macro_rules! to {
        ($from:ty, $wide:expr) => {
            by_rounding!(style.rounding, R => by_flags!(style.integral, I, style.saturate, C => {
                #[inline(always)]
                fn value(a: $from) -> f64 {
                    let x: f64 = $wide(a);
                    unit::<C>(if I { integral(x, R) } else { x })
                }
                match to {
                    Type::F32 => by_flags!(style.ftz, F => alu1!($from => f32, |a| single(value(a), R, F))),
                    Type::F64 => alu1!($from => f64, |a| value(a)),
                    Type::F16 => by_flags!(style.relu, Z => alu1!($from => F16, |a| narrow::<F16, Z>(value(a), R))),
                    Type::Bf16 => by_flags!(style.relu, Z => alu1!($from => Bf16, |a| narrow::<Bf16, Z>(value(a), R))),
                    _ => return None,
                }
            }))
        };
    }
    if style.relu && !matches!(to, Type::F16 | Type::Bf16) {
        return None;
    }
    if (to, from) == (Type::F64, Type::F32) && !style.integral && !style.saturate && !style.ftz {
        return Some(alu1!(f32 => f64, |a| f64::from(a)));
    }
    if (to, from) == (Type::F32, Type::F64) && style.rounding == Rounding::Nearest && !style.saturate && !style.ftz {
        return Some(alu1!(f64 => f32, |a| a as f32));
    }
    Some(match from {
        Type::F32 if style.ftz => to!(f32, |a| f64::from(super::float::flush(a))),
        Type::F32 => to!(f32, |a| f64::from(a)),
        Type::F64 => to!(f64, |a| a),
        Type::F16 => to!(F16, |a: F16| a.wide()),
        Type::Bf16 => to!(Bf16, |a: Bf16| a.wide()),
        _ => return None,
    })
}

#[inline(always)]
fn narrow<T: Short, const RELU: bool>(x: f64, rounding: Rounding) -> T {
    if x.is_nan() {
        T::NAN
    } else if RELU && x < 0.0 {
        T::of(0)
    } else {
        T::narrow(x, rounding)
    }
}

/// `cvt.rn.f16x2.f32 d, a, b`: `a` into the high half, `b` into the low one.
pub(crate) fn pack_halves(to: Type, style: Style) -> Option<Alu> {
    if style.integral || style.saturate || !matches!(style.rounding, Rounding::Nearest | Rounding::Zero) {
        return None;
    }
    macro_rules! pack {
        ($t:ty) => {
            by_rounding!(style.rounding, R => by_flags!(style.relu, Z => alu2!(f32, f32 => Pair<$t>, |a, b|
                Pair(narrow::<$t, Z>(f64::from(b), R), narrow::<$t, Z>(f64::from(a), R)))))
        };
    }
    match to {
        Type::F16x2 => Some(pack!(F16)),
        Type::Bf16x2 => Some(pack!(Bf16)),
        _ => None,
    }
}
