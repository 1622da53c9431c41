//! Comparisons of `set`, `setp`, `slct` and `testp` (PTX ISA 9.7.6).
#![expect(
    clippy::neg_cmp_op_on_partial_ord,
    reason = "an unordered comparison is the negation of the ordered opposite"
)]

use super::half::{Bf16, F16, Short};
use super::{Compare, Slot, by_bits, by_int, compare_rows};
use crate::parse::ast::Type;

macro_rules! test {
    ($t:ty, $f:expr) => {{
        let f: Compare = |rows, a, b| compare_rows::<$t>(rows, a, b, $f);
        f
    }};
}

macro_rules! floats {
    ($name:expr, $t:ty, $v:expr) => {
        Some(match $name {
            "eq" => test!($t, |a, b| $v(a) == $v(b)),
            "ne" => test!($t, |a, b| $v(a) < $v(b) || $v(a) > $v(b)),
            "lt" => test!($t, |a, b| $v(a) < $v(b)),
            "le" => test!($t, |a, b| $v(a) <= $v(b)),
            "gt" => test!($t, |a, b| $v(a) > $v(b)),
            "ge" => test!($t, |a, b| $v(a) >= $v(b)),
            "equ" => test!($t, |a, b| !($v(a) < $v(b) || $v(a) > $v(b))),
            "neu" => test!($t, |a, b| $v(a) != $v(b)),
            "ltu" => test!($t, |a, b| !($v(a) >= $v(b))),
            "leu" => test!($t, |a, b| !($v(a) > $v(b))),
            "gtu" => test!($t, |a, b| !($v(a) <= $v(b))),
            "geu" => test!($t, |a, b| !($v(a) < $v(b))),
            "num" => test!($t, |a, b| !$v(a).is_nan() && !$v(b).is_nan()),
            "nan" => test!($t, |a, b| $v(a).is_nan() || $v(b).is_nan()),
            _ => return None,
        })
    };
}
/// Upper lane of a pair.
#[derive(Clone, Copy)]
struct Upper<T>(T);

impl<T: Slot> Slot for Upper<T> {
    #[inline(always)]
    fn get(slot: u64) -> Self {
        Self(T::get(slot >> 16))
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.0.put() << 16
    }
}

/// Returns the comparison `name` of operands of type `ty`. For a pair it compares the lower lanes,
/// or the upper ones if `upper`.
pub(crate) fn find(name: &str, ty: Type, ftz: bool, upper: bool) -> Option<Compare> {
    match ty {
        Type::F16x2 if upper && ftz => {
            floats!(name, Upper<F16>, |x: Upper<F16>| x.0.flush().wide())
        }
        Type::F16x2 if upper => floats!(name, Upper<F16>, |x: Upper<F16>| x.0.wide()),
        Type::Bf16x2 if upper => floats!(name, Upper<Bf16>, |x: Upper<Bf16>| x.0.wide()),
        Type::F16 | Type::F16x2 if ftz => floats!(name, F16, |x: F16| x.flush().wide()),
        Type::F32 if ftz => floats!(name, f32, |x: f32| super::float::flush(x)),
        Type::F32 => floats!(name, f32, |x: f32| x),
        Type::F64 => floats!(name, f64, |x: f64| x),
        Type::F16 | Type::F16x2 => floats!(name, F16, |x: F16| x.wide()),
        Type::Bf16 | Type::Bf16x2 => floats!(name, Bf16, |x: Bf16| x.wide()),
        Type::B16 | Type::B32 | Type::B64 if !matches!(name, "eq" | "ne") => None,
        _ => {
            // The unsigned names of an ordering become its general name: the type decides.
            let name = match name {
                "lo" => "lt",
                "ls" => "le",
                "hi" => "gt",
                "hs" => "ge",
                other => other,
            };
            match name {
                "eq" => by_bits!(ty, T => test!(T, |a, b| a == b)).filter(|_| ty != Type::Pred),
                "ne" => by_bits!(ty, T => test!(T, |a, b| a != b)).filter(|_| ty != Type::Pred),
                "lt" => by_int!(ty, T => test!(T, |a, b| a < b)),
                "le" => by_int!(ty, T => test!(T, |a, b| a <= b)),
                "gt" => by_int!(ty, T => test!(T, |a, b| a > b)),
                "ge" => by_int!(ty, T => test!(T, |a, b| a >= b)),
                _ => None,
            }
        }
    }
}

/// Returns the handler of `testp`, a test of one operand.
pub(crate) fn property(name: &str, ty: Type) -> Option<Compare> {
    macro_rules! on {
        ($t:ty) => {
            Some(match name {
                "finite" => test!($t, |a, _| a.is_finite()),
                "infinite" => test!($t, |a, _| a.is_infinite()),
                "number" => test!($t, |a, _| !a.is_nan()),
                "notanumber" => test!($t, |a, _| a.is_nan()),
                // Zeros count as normal numbers.
                "normal" => test!($t, |a, _| a.is_normal() || a == 0.0),
                "subnormal" => test!($t, |a, _| a.is_subnormal()),
                _ => return None,
            })
        };
    }
    match ty {
        Type::F32 => on!(f32),
        Type::F64 => on!(f64),
        _ => None,
    }
}

/// Returns the selector of `slct`, which tests that the third operand is not negative.
pub(crate) fn not_negative(ty: Type, ftz: bool) -> Option<Compare> {
    match ty {
        Type::S32 => Some(test!(i32, |a, _| a >= 0)),
        Type::F32 if ftz => Some(test!(f32, |a, _| super::float::flush(a) >= 0.0)),
        Type::F32 => Some(test!(f32, |a, _| a >= 0.0)),
        _ => None,
    }
}
