//! Half precision and bfloat16 arithmetic, single and in pairs (PTX ISA 9.7.4 and 9.7.5).
//!
//! Sums and products are computed in single precision, whose 24 bits make a second rounding
//! harmless; fused operations are rounded to odd first.

use super::float::Style;
use super::half::{Bf16, F16, Short, to_odd};
use super::round::sum_to_odd;
use super::{Alu, by_flags, handler, plain};
use crate::parse::ast::Type;

/// Expands one expression for the scalar types and another for the pairs.
macro_rules! by_short {
    ($ty:expr, $t:ident => $one:expr, $two:expr) => {
        match $ty {
            Type::F16 => {
                type $t = F16;
                $one
            }
            Type::Bf16 => {
                type $t = Bf16;
                $one
            }
            Type::F16x2 => {
                type $t = F16;
                $two
            }
            Type::Bf16x2 => {
                type $t = Bf16;
                $two
            }
            _ => return None,
        }
    };
}

/// Converts an operand to single precision.
#[inline(always)]
fn input<T: Short, const FTZ: bool>(x: T) -> f32 {
    if FTZ { x.flush().wide() } else { x.wide() }
}

/// Rounds a result and applies the modifiers.
#[inline(always)]
fn output<T: Short, const FTZ: bool, const SAT: bool, const RELU: bool>(value: f32) -> T {
    // A NaN saturates to zero, but passes `.relu`.
    let value = if SAT {
        if value > 0.0 { value.min(1.0) } else { 0.0 }
    } else if RELU && value < 0.0 {
        0.0
    } else {
        value
    };
    // A result is flushed if it is subnormal before rounding.
    if FTZ && value.abs() < T::of(T::LEAST_NORMAL).wide() {
        T::of(T::nearest(value).bits() & 0x8000)
    } else {
        T::nearest(value)
    }
}

/// Returns the handler of `add`, `sub` or `mul`.
pub(crate) fn binary(name: &str, ty: Type, style: Style) -> Option<Alu> {
    macro_rules! on {
        ($op:tt) => {
            by_flags!(style.ftz, F, style.saturate, S => by_short!(ty, T =>
                handler!(two<T, T, T>, |a, b|
                    output::<T, F, S, false>(input::<T, F>(a) $op input::<T, F>(b))),
                handler!(two_pairs<T>, |a, b|
                    output::<T, F, S, false>(input::<T, F>(a) $op input::<T, F>(b)))))
        };
    }
    Some(match name {
        "add" => on!(+),
        "sub" => on!(-),
        "mul" => on!(*),
        _ => return None,
    })
}

#[inline(always)]
fn fuse<T: Short, const FTZ: bool>(a: T, b: T, c: T) -> f32 {
    let (a, b, c) = (input::<T, FTZ>(a), input::<T, FTZ>(b), input::<T, FTZ>(c));
    // The product is exact in double precision.
    to_odd(sum_to_odd(f64::from(a) * f64::from(b), f64::from(c)))
}

/// Returns the handler of `fma`.
pub(crate) fn fused(ty: Type, style: Style, relu: bool) -> Option<Alu> {
    if relu && style.saturate {
        return None;
    }
    Some(
        by_flags!(style.ftz, F, style.saturate, S => by_flags!(relu, R => by_short!(ty, T =>
            handler!(three<T, T, T, T>, |a, b, c| output::<T, F, S, R>(fuse::<T, F>(a, b, c))),
            handler!(three_pairs<T>, |a, b, c| output::<T, F, S, R>(fuse::<T, F>(a, b, c)))))),
    )
}

/// Returns the handler of `min` or `max`. `nan` passes NaNs on; `xorsign` compares magnitudes and
/// applies the product's sign.
pub(crate) fn extreme(name: &str, ty: Type, ftz: bool, nan: bool, xorsign: bool) -> Option<Alu> {
    #[inline(always)]
    fn one<T: Short, const MAX: bool, const FTZ: bool, const NAN: bool, const XOR: bool>(
        a: T,
        b: T,
    ) -> T {
        let (a, b) = if FTZ { (a.flush(), b.flush()) } else { (a, b) };
        let (x, y) = (a.wide(), b.wide());
        if NAN && (x.is_nan() || y.is_nan()) || x.is_nan() && y.is_nan() {
            return T::NAN;
        }
        let sign = (a.bits() ^ b.bits()) & 0x8000;
        let (x, y) = if XOR { (x.abs(), y.abs()) } else { (x, y) };
        let first = if MAX {
            x > y || y.is_nan() || (x == y && y.is_sign_negative())
        } else {
            x < y || y.is_nan() || (x == y && x.is_sign_negative())
        };
        let chosen = if first { a.bits() } else { b.bits() };
        T::of(if XOR { chosen & 0x7fff | sign } else { chosen })
    }
    let max = name == "max";
    Some(
        by_flags!(max, M, ftz, F => by_flags!(nan, N, xorsign, X => by_short!(ty, T =>
            handler!(two<T, T, T>, one::<T, M, F, N, X>),
            handler!(two_pairs<T>, one::<T, M, F, N, X>)))),
    )
}

/// Returns the handler of `neg` or `abs`.
pub(crate) fn sign(name: &str, ty: Type, ftz: bool) -> Option<Alu> {
    macro_rules! on {
        ($f:expr) => {
            by_flags!(ftz, F => by_short!(ty, T =>
                handler!(one<T, T>, |a| T::of($f(if F { a.flush() } else { a }.bits()))),
                handler!(one_pair<T>, |a| T::of($f(if F { a.flush() } else { a }.bits())))))
        };
    }
    Some(match name {
        "neg" => on!(|bits: u16| bits ^ 0x8000),
        "abs" => on!(|bits: u16| bits & 0x7fff),
        _ => return None,
    })
}

/// Returns the handler of `ex2` or `tanh`.
pub(crate) fn function(name: &str, ty: Type, ftz: bool) -> Option<Alu> {
    macro_rules! on {
        ($f:expr) => {
            by_flags!(ftz, F => by_short!(ty, T =>
                plain!(one<T, T>, |a| output::<T, F, false, false>($f(input::<T, F>(a)))),
                plain!(one_pair<T>, |a| output::<T, F, false, false>($f(input::<T, F>(a))))))
        };
    }
    Some(match name {
        "ex2" => on!(|x: f32| x.exp2()),
        "tanh" => on!(|x: f32| x.tanh()),
        _ => return None,
    })
}
