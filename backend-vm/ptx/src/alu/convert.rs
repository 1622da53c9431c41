//! `cvt`: between integers, floats and both (PTX ISA 9.7.9).
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::cast_lossless,
    clippy::cast_precision_loss,
    reason = "conversions are what this module does"
)]
#![allow(clippy::unnecessary_cast, reason = "one expression serves every width")]

use super::float::{canonical, flush};
use super::half::{Bf16, F16, Pair, Rounding, Short};
use super::{Alu, Ops, Row, Slot, alu1, by_int8, plain, round};
use crate::parse::ast::Type;

/// Modifiers of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style {
    /// Rounding mode.
    pub rounding: Rounding,
    /// Whether a float is rounded to an integer (`.rni` and its kin).
    pub integral: bool,
    /// Whether subnormal singles are zeros.
    pub ftz: bool,
    /// Whether to clamp: integers to the range of the type, floats to [0, 1].
    pub saturate: bool,
    /// Whether negative results, the negative zero among them, are positive zeros.
    pub relu: bool,
    /// Whether an overflow becomes the greatest finite value.
    pub finite: bool,
}

impl Style {
    /// Encodes the style in one word, a handler's last operand.
    pub(crate) fn encode(self) -> u32 {
        let rounding = match self.rounding {
            Rounding::Nearest => 0,
            Rounding::Zero => 1,
            Rounding::Down => 2,
            Rounding::Up => 3,
        };
        let flag = |set: bool, bit: u32| u32::from(set) << bit;
        rounding
            | flag(self.integral, 2)
            | flag(self.ftz, 3)
            | flag(self.saturate, 4)
            | flag(self.relu, 5)
            | flag(self.finite, 6)
    }

    fn decode(word: u32) -> Self {
        let rounding = match word & 3 {
            0 => Rounding::Nearest,
            1 => Rounding::Zero,
            2 => Rounding::Down,
            _ => Rounding::Up,
        };
        let flag = |bit: u32| word >> bit & 1 == 1;
        Self {
            rounding,
            integral: flag(2),
            ftz: flag(3),
            saturate: flag(4),
            relu: flag(5),
            finite: flag(6),
        }
    }
}

fn is_float(ty: Type) -> bool {
    matches!(ty, Type::F16 | Type::Bf16 | Type::F32 | Type::F64)
}

/// Returns the conversion from `from` to `to`. The handler reads its style, encoded, from its last
/// operand.
pub(crate) fn find(to: Type, from: Type, style: Style) -> Option<Alu> {
    match (is_float(to), is_float(from)) {
        _ if style.finite && !(is_float(to) && is_float(from)) => None,
        (false, false) if style.relu || style.integral => None,
        (false, false) => integers(to, from, style.saturate),
        (true, false) if style.relu => None,
        (true, false) => to_float(to, from, style),
        (false, true) if style.relu || !style.integral => None,
        (false, true) => from_float(to, from, style),
        (true, true) => floats(to, from, style),
    }
}

fn integers(to: Type, from: Type, saturate: bool) -> Option<Alu> {
    by_int8!(from, S => {
        let chosen: Option<Alu> = if saturate {
            by_int8!(to, D => plain!(one<S, D>, |a| (a as i128).clamp(D::MIN as i128, D::MAX as i128) as D))
        } else {
            by_int8!(to, D => alu1!(S => D, |a| a as D))
        };
        chosen
    })
    .flatten()
}

/// Applies a conversion whose style is in the last operand.
#[inline(always)]
fn styled<A: Slot, R: Slot>(rows: &mut [Row], mask: u32, ops: &Ops, f: impl Fn(A, Style) -> R) {
    let style = Style::decode(ops[4]);
    super::one::<A, R>(rows, mask, ops, |a| f(a, style));
}

macro_rules! styled {
    ($a:ty => $r:ty, $f:expr) => {{
        let handler: Alu = |rows, mask, ops| styled::<$a, $r>(rows, mask, ops, $f);
        handler
    }};
}

/// Floating-point type, converted through doubles, which hold all its values.
trait Float: Slot {
    fn wide(self, style: Style) -> f64;
    fn narrow(value: f64, style: Style) -> Self;
}

impl Float for f32 {
    fn wide(self, style: Style) -> f64 {
        f64::from(if style.ftz { flush(self) } else { self })
    }
    fn narrow(value: f64, style: Style) -> Self {
        if value.is_nan() {
            return Self::from_bits(0x7fff_ffff);
        }
        let x = round::narrow(value, style.rounding);
        if style.ftz { flush(x) } else { x }
    }
}

impl Float for f64 {
    fn wide(self, _: Style) -> f64 {
        self
    }
    fn narrow(value: f64, _: Style) -> Self {
        value
    }
}

fn narrow_short<T: Short>(value: f64, style: Style) -> T {
    if value.is_nan() {
        T::NAN
    } else if style.relu && value <= 0.0 {
        T::of(0)
    } else {
        let narrow = T::narrow(value, style.rounding);
        let infinite = narrow.bits() & 0x7fff == T::EXPONENT;
        T::of(narrow.bits() - u16::from(style.finite && infinite))
    }
}

impl Float for F16 {
    fn wide(self, _: Style) -> f64 {
        f64::from(Short::wide(self))
    }
    fn narrow(value: f64, style: Style) -> Self {
        narrow_short(value, style)
    }
}

impl Float for Bf16 {
    fn wide(self, _: Style) -> f64 {
        f64::from(Short::wide(self))
    }
    fn narrow(value: f64, style: Style) -> Self {
        narrow_short(value, style)
    }
}

/// Clamps to [0, 1] if the style saturates; a NaN becomes zero.
fn unit(x: f64, style: Style) -> f64 {
    match style.saturate {
        true if x > 0.0 => x.min(1.0),
        true => 0.0,
        false => x,
    }
}

fn integral(x: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => x.round_ties_even(),
        Rounding::Zero => x.trunc(),
        Rounding::Down => x.floor(),
        Rounding::Up => x.ceil(),
    }
}

/// Rounds an integer to a double, to odd: if 53 bits cannot hold it, the last bit is set, so that
/// one further rounding gives the right result.
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

fn to_float(to: Type, from: Type, style: Style) -> Option<Alu> {
    let simple = style.rounding == Rounding::Nearest && !style.saturate;
    by_int8!(from, S => match to {
        Type::F32 if simple => Some(alu1!(S => f32, |a| a as f32)),
        Type::F64 if simple => Some(alu1!(S => f64, |a| a as f64)),
        Type::F32 => Some(styled!(S => f32, |a, style| f32::narrow(unit(odd(a as i128), style), style))),
        Type::F64 => Some(styled!(S => f64, |a, style| unit(directed_double(a as i128, style.rounding), style))),
        Type::F16 => Some(styled!(S => F16, |a, style| Float::narrow(unit(odd(a as i128), style), style))),
        Type::Bf16 => Some(styled!(S => Bf16, |a, style| Float::narrow(unit(odd(a as i128), style), style))),
        _ => None,
    })
    .flatten()
}

fn from_float(to: Type, from: Type, style: Style) -> Option<Alu> {
    // Out-of-range values clamp. A NaN becomes zero, or the most significant bit alone if the
    // source is a double or the result has 64 bits.
    macro_rules! cast {
        ($d:ty, $wide:expr) => {
            |a, style: Style| {
                let x: f64 = Float::wide(a, style);
                if x.is_nan() && ($wide || <$d>::BITS == 64) {
                    (1 as $d) << (<$d>::BITS - 1)
                } else {
                    integral(x, style.rounding) as $d
                }
            }
        };
    }
    match (to, from) {
        (Type::S32, Type::F32) if style.rounding == Rounding::Zero && !style.ftz => {
            return Some(alu1!(f32 => i32, |a| a as i32));
        }
        (Type::U32, Type::F32) if style.rounding == Rounding::Zero && !style.ftz => {
            return Some(alu1!(f32 => u32, |a| a as u32));
        }
        _ => {}
    }
    by_int8!(to, D => match from {
        Type::F32 => Some(styled!(f32 => D, cast!(D, false))),
        Type::F64 => Some(styled!(f64 => D, cast!(D, true))),
        Type::F16 => Some(styled!(F16 => D, cast!(D, false))),
        Type::Bf16 => Some(styled!(Bf16 => D, cast!(D, false))),
        _ => None,
    })
    .flatten()
}

fn between<A: Float, R: Float>(a: A, style: Style) -> R {
    let x = a.wide(style);
    R::narrow(
        unit(
            if style.integral {
                integral(x, style.rounding)
            } else {
                x
            },
            style,
        ),
        style,
    )
}

fn floats(to: Type, from: Type, style: Style) -> Option<Alu> {
    if (style.relu || style.finite) && !matches!(to, Type::F16 | Type::Bf16) {
        return None;
    }
    let simple = !style.integral && !style.saturate && !style.ftz && !style.relu && !style.finite;
    let nearest = simple && style.rounding == Rounding::Nearest;
    macro_rules! to {
        ($from:ty) => {
            match to {
                Type::F32 => styled!($from => f32, between::<$from, f32>),
                Type::F64 => styled!($from => f64, between::<$from, f64>),
                Type::F16 => styled!($from => F16, between::<$from, F16>),
                Type::Bf16 => styled!($from => Bf16, between::<$from, Bf16>),
                _ => return None,
            }
        };
    }
    Some(match from {
        Type::F32 if to == Type::F64 && simple => alu1!(f32 => f64, f64::from),
        Type::F64 if to == Type::F32 && nearest => alu1!(f64 => f32, |a| a as f32),
        Type::F32 if to == Type::F16 && nearest => alu1!(f32 => F16, F16::nearest),
        Type::F32 if to == Type::Bf16 && nearest => alu1!(f32 => Bf16, Bf16::nearest),
        Type::F16 if to == Type::F32 && simple => alu1!(F16 => f32, |a| canonical(Short::wide(a))),
        Type::Bf16 if to == Type::F32 && simple => {
            alu1!(Bf16 => f32, |a| canonical(Short::wide(a)))
        }
        Type::F32 => to!(f32),
        Type::F64 => to!(f64),
        Type::F16 => to!(F16),
        Type::Bf16 => to!(Bf16),
        _ => return None,
    })
}

/// Returns the handler of `cvt.rn.f16x2.f32 d, a, b`: `a` goes into the high half, `b` into the low
/// one.
pub(crate) fn pack_halves(to: Type, style: Style) -> Option<Alu> {
    if style.integral
        || style.saturate
        || !matches!(style.rounding, Rounding::Nearest | Rounding::Zero)
    {
        return None;
    }
    fn pack<T: Float>(rows: &mut [Row], mask: u32, ops: &Ops) {
        let style = Style::decode(ops[4]);
        super::two::<f32, f32, Pair<T>>(rows, mask, ops, |a, b| {
            Pair(
                T::narrow(b.wide(style), style),
                T::narrow(a.wide(style), style),
            )
        });
    }
    match to {
        Type::F16x2 => Some(pack::<F16>),
        Type::Bf16x2 => Some(pack::<Bf16>),
        _ => None,
    }
}
