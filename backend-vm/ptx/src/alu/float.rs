//! Single and double precision (PTX ISA 9.7.3), and the functions that dispatch to the 16-bit types.
#![expect(
    clippy::cast_possible_truncation,
    reason = "rounding to a narrower type is what is meant"
)]

use super::half::Rounding;
use super::round::{self, Operation};
use super::{Alu, alu1, alu2, alu3, by_flags, plain, short};
use crate::parse::ast::Type;

/// Modifiers of a floating-point instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style {
    /// Rounding mode.
    pub rounding: Rounding,
    /// Whether subnormal operands and results are zeros.
    pub ftz: bool,
    /// Whether the result is clamped to [0, 1].
    pub saturate: bool,
}

/// NaN that single-precision instructions return.
const NAN32: f32 = f32::from_bits(0x7fff_ffff);

/// Replaces every NaN by the one that single-precision instructions return.
#[inline(always)]
pub(crate) fn canonical(x: f32) -> f32 {
    if x.is_nan() { NAN32 } else { x }
}

/// Replaces a subnormal by a zero of its sign.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE {
        f32::from_bits(x.to_bits() & 1 << 31)
    } else {
        x
    }
}

#[inline(always)]
fn input<const FTZ: bool>(x: f32) -> f32 {
    if FTZ { flush(x) } else { x }
}

#[inline(always)]
fn input64<const FTZ: bool>(x: f64) -> f64 {
    if FTZ && x.abs() < f64::MIN_POSITIVE {
        0.0_f64.copysign(x)
    } else {
        x
    }
}

#[inline(always)]
fn output<const FTZ: bool, const SAT: bool>(x: f32) -> f32 {
    finish::<SAT>(if FTZ { flush(x) } else { x })
}

/// Finishes a result. If `FTZ`, a `tiny` result becomes a zero of its sign: one that was below the
/// normal numbers before rounding, even if rounding carried it to a normal exponent.
#[inline(always)]
fn unless_tiny<const FTZ: bool, const SAT: bool>(x: f32, tiny: bool) -> f32 {
    finish::<SAT>(if FTZ && tiny { 0.0_f32.copysign(x) } else { x })
}

/// Factor (2^32) that moves results near the subnormal range into the normal range. An operand that
/// overflows when multiplied by it has no result near that range.
const SCALE: f32 = 4_294_967_296.0;

/// Returns whether a result computed from operands times [`SCALE`] is tiny.
#[inline(always)]
fn is_tiny(scaled: f32) -> bool {
    scaled.abs() < f32::MIN_POSITIVE * SCALE
}

/// Returns whether the quotient of two numbers that are not subnormal is tiny; false for NaNs.
#[inline(always)]
fn quotient_is_tiny(a: f32, b: f32) -> bool {
    // Exact where it matters: for `b` below one, only a zero is less than the product.
    a.abs() < b.abs() * f32::MIN_POSITIVE
}

#[inline(always)]
fn finish<const SAT: bool>(x: f32) -> f32 {
    if SAT {
        // A NaN saturates to zero.
        return if x > 0.0 { x.min(1.0) } else { 0.0 };
    }
    canonical(x)
}

/// Returns the handler of `add`, `sub`, `mul` or `div` in single precision.
fn binary32(name: &str, style: Style) -> Option<Alu> {
    // These functions return whether a result is tiny, from the operands, the result and the
    // operation.
    #[inline(always)]
    fn sum(_: f32, _: f32, x: f32, _: impl Fn(f32, f32) -> f32) -> bool {
        // A subnormal sum is exact.
        x.abs() < f32::MIN_POSITIVE
    }
    #[inline(always)]
    fn product(a: f32, b: f32, _: f32, f: impl Fn(f32, f32) -> f32) -> bool {
        is_tiny(f(a * SCALE, b))
    }
    #[inline(always)]
    fn quotient(a: f32, b: f32, _: f32, _: impl Fn(f32, f32) -> f32) -> bool {
        quotient_is_tiny(a, b)
    }
    macro_rules! nearest {
        ($op:tt, $tiny:expr) => {
            by_flags!(style.ftz, F, style.saturate, S =>
                alu2!(f32, f32 => f32, |a, b| {
                    let (a, b) = (input::<F>(a), input::<F>(b));
                    unless_tiny::<F, S>(a $op b, F && $tiny(a, b, a $op b, |a, b| a $op b))
                }))
        };
    }
    macro_rules! directed {
        ($operation:ident, $tiny:expr, $($rounding:ident),*) => {
            match style.rounding {
                $(Rounding::$rounding => by_flags!(style.ftz, F, style.saturate, S =>
                    plain!(two<f32, f32, f32>, |a, b| {
                        let f = |a, b| round::single(Operation::$operation, Rounding::$rounding, a, b);
                        let (a, b) = (input::<F>(a), input::<F>(b));
                        let x = f(a, b);
                        unless_tiny::<F, S>(x, F && $tiny(a, b, x, f))
                    })),)*
                Rounding::Nearest => return None,
            }
        };
    }
    Some(match (name, style.rounding) {
        ("add", Rounding::Nearest) => nearest!(+, sum),
        ("sub", Rounding::Nearest) => nearest!(-, sum),
        ("mul", Rounding::Nearest) => nearest!(*, product),
        ("div", Rounding::Nearest) => nearest!(/, quotient),
        ("add", _) => directed!(Add, sum, Zero, Down, Up),
        ("sub", _) => directed!(Sub, sum, Zero, Down, Up),
        ("mul", _) => directed!(Mul, product, Zero, Down, Up),
        ("div", _) => directed!(Div, quotient, Zero, Down, Up),
        _ => return None,
    })
}

/// Returns the handler of `div.approx.f32`, a product with the divisor's reciprocal. The reciprocal
/// of a divisor beyond 2^126 is a zero.
pub(crate) fn approximate_quotient(ftz: bool) -> Alu {
    #[inline(always)]
    fn one<const FTZ: bool>(a: f32, b: f32) -> f32 {
        /// 2^126
        const GREATEST: f32 = 1.0 / f32::MIN_POSITIVE;
        let (a, b) = (input::<FTZ>(a), input::<FTZ>(b));
        let b = if b.abs() > GREATEST {
            f32::INFINITY.copysign(b)
        } else {
            b
        };
        unless_tiny::<FTZ, false>(a / b, FTZ && quotient_is_tiny(a, b))
    }
    by_flags!(ftz, F => alu2!(f32, f32 => f32, one::<F>))
}

fn binary64(name: &str, style: Style) -> Option<Alu> {
    macro_rules! directed {
        ($operation:ident, $($rounding:ident),*) => {
            match style.rounding {
                $(Rounding::$rounding => plain!(two<f64, f64, f64>,
                    |a, b| round::double(Operation::$operation, Rounding::$rounding, a, b)),)*
                Rounding::Nearest => return None,
            }
        };
    }
    if style.saturate || style.ftz {
        return None;
    }
    Some(match (name, style.rounding) {
        ("add", Rounding::Nearest) => alu2!(f64, f64 => f64, |a, b| a + b),
        ("sub", Rounding::Nearest) => alu2!(f64, f64 => f64, |a, b| a - b),
        ("mul", Rounding::Nearest) => alu2!(f64, f64 => f64, |a, b| a * b),
        ("div", Rounding::Nearest) => alu2!(f64, f64 => f64, |a, b| a / b),
        ("add", _) => directed!(Add, Zero, Down, Up),
        ("sub", _) => directed!(Sub, Zero, Down, Up),
        ("mul", _) => directed!(Mul, Zero, Down, Up),
        ("div", _) => directed!(Div, Zero, Down, Up),
        _ => return None,
    })
}

/// Returns the handler of `add`, `sub`, `mul` or `div`.
pub(crate) fn binary(name: &str, ty: Type, style: Style) -> Option<Alu> {
    match ty {
        Type::F32 => binary32(name, style),
        Type::F64 => binary64(name, style),
        _ => short::binary(name, ty, style),
    }
}

/// Returns the handler of `fma` and `mad`; `relu` clamps negative results to zero (16-bit types).
pub(crate) fn fused(ty: Type, style: Style, relu: bool) -> Option<Alu> {
    #[inline(always)]
    fn one<const FTZ: bool, const SAT: bool>(
        [a, b, c]: [f32; 3],
        f: impl Fn(f32, f32, f32) -> f32,
    ) -> f32 {
        let (a, b, c) = (input::<FTZ>(a), input::<FTZ>(b), input::<FTZ>(c));
        unless_tiny::<FTZ, SAT>(f(a, b, c), FTZ && is_tiny(f(a * SCALE, b, c * SCALE)))
    }
    macro_rules! single {
        ($($rounding:ident),*) => {
            match style.rounding {
                Rounding::Nearest => by_flags!(style.ftz, F, style.saturate, S =>
                    alu3!(f32, f32, f32 => f32, |a, b, c| one::<F, S>([a, b, c], |a, b, c| a.mul_add(b, c)))),
                $(Rounding::$rounding => by_flags!(style.ftz, F, style.saturate, S =>
                    plain!(three<f32, f32, f32, f32>, |a, b, c| one::<F, S>([a, b, c], |a, b, c| {
                        round::fma_single(Rounding::$rounding, a, b, c)
                    }))),)*
            }
        };
    }
    Some(match ty {
        Type::F32 if !relu => single!(Zero, Down, Up),
        Type::F64 if !relu => match style.rounding {
            Rounding::Nearest => alu3!(f64, f64, f64 => f64, |a, b, c| a.mul_add(b, c)),
            Rounding::Zero => {
                plain!(three<f64, f64, f64, f64>, |a, b, c| round::fma_double(Rounding::Zero, a, b, c))
            }
            Rounding::Down => {
                plain!(three<f64, f64, f64, f64>, |a, b, c| round::fma_double(Rounding::Down, a, b, c))
            }
            Rounding::Up => {
                plain!(three<f64, f64, f64, f64>, |a, b, c| round::fma_double(Rounding::Up, a, b, c))
            }
        },
        Type::F32 | Type::F64 => return None,
        _ => return short::fused(ty, style, relu),
    })
}

fn least(a: f64, b: f64) -> f64 {
    let first = b.is_nan() || a < b || (a == b && a.is_sign_negative());
    if first { a } else { b }
}

fn greatest(a: f64, b: f64) -> f64 {
    let first = b.is_nan() || a > b || (a == b && b.is_sign_negative());
    if first { a } else { b }
}

/// Returns the handler of `min` or `max`. `nan` passes NaNs on; `xorsign` compares magnitudes and
/// applies the product's sign.
pub(crate) fn extreme(name: &str, ty: Type, ftz: bool, nan: bool, xorsign: bool) -> Option<Alu> {
    #[inline(always)]
    fn single<const MAX: bool, const FTZ: bool, const NAN: bool, const XOR: bool>(
        a: f32,
        b: f32,
    ) -> f32 {
        let (a, b) = (input::<FTZ>(a), input::<FTZ>(b));
        let sign = (a.to_bits() ^ b.to_bits()) & 1 << 31;
        if NAN && (a.is_nan() || b.is_nan()) || (a.is_nan() && b.is_nan()) {
            return NAN32;
        }
        let (a, b) = if XOR { (a.abs(), b.abs()) } else { (a, b) };
        let first = if MAX {
            a > b || b.is_nan() || (a == b && b.is_sign_negative())
        } else {
            a < b || b.is_nan() || (a == b && a.is_sign_negative())
        };
        let r = if first { a } else { b };
        if XOR {
            f32::from_bits(r.to_bits() | sign)
        } else {
            r
        }
    }
    let max = name == "max";
    if ty == Type::F32 {
        return Some(by_flags!(max, M, ftz, F => by_flags!(nan, N, xorsign, X =>
            alu2!(f32, f32 => f32, single::<M, F, N, X>))));
    }
    match (ty, max) {
        (Type::F64, _) if nan || xorsign || ftz => None,
        (Type::F64, false) => Some(alu2!(f64, f64 => f64, least)),
        (Type::F64, true) => Some(alu2!(f64, f64 => f64, greatest)),
        _ => short::extreme(name, ty, ftz, nan, xorsign),
    }
}

/// Returns the handler of `neg` or `abs`.
pub(crate) fn sign(name: &str, ty: Type, ftz: bool) -> Option<Alu> {
    Some(match (name, ty) {
        ("neg", Type::F32) => by_flags!(ftz, F => alu1!(f32 => f32, |a| -input::<F>(a))),
        ("abs", Type::F32) => by_flags!(ftz, F => alu1!(f32 => f32, |a| input::<F>(a).abs())),
        ("neg", Type::F64) => alu1!(f64 => f64, |a| -a),
        ("abs", Type::F64) => alu1!(f64 => f64, |a| a.abs()),
        _ => return short::sign(name, ty, ftz),
    })
}

/// Returns the handler of `copysign`: the magnitude of the second operand with the sign of the first.
pub(crate) fn copy_sign(ty: Type) -> Option<Alu> {
    Some(match ty {
        Type::F32 => alu2!(f32, f32 => f32, |a, b| b.copysign(a)),
        Type::F64 => alu2!(f64, f64 => f64, |a, b| b.copysign(a)),
        _ => return None,
    })
}

/// Computes a square root. Rust guarantees no particular NaN for the host's `sqrt`, so [`NAN32`] is
/// returned explicitly.
#[inline(always)]
fn root(x: f32) -> f32 {
    if x >= 0.0 { x.sqrt() } else { NAN32 }
}

/// Returns the handler of `rcp`, `sqrt`, `rsqrt`, `sin`, `cos`, `lg2`, `ex2` or `tanh`.
///
/// The approximate forms are computed to within half a unit in the last place, which meets every
/// error bound that PTX states for them.
pub(crate) fn function(name: &str, ty: Type, style: Style) -> Option<Alu> {
    let ftz = style.ftz;
    macro_rules! nearest {
        ($f:expr) => {
            by_flags!(ftz, F => alu1!(f32 => f32, |a| output::<F, false>($f(input::<F>(a)))))
        };
    }
    macro_rules! library {
        ($f:expr) => {
            by_flags!(ftz, F => plain!(one<f32, f32>, |a| output::<F, false>($f(input::<F>(a)))))
        };
    }
    macro_rules! directed {
        ($f:expr, $double:expr, $($rounding:ident),*) => {
            match (ty, style.rounding) {
                $((Type::F32, Rounding::$rounding) => by_flags!(ftz, F =>
                    plain!(one<f32, f32>, |a| output::<F, false>($f(Rounding::$rounding, input::<F>(a))))),
                (Type::F64, Rounding::$rounding) => plain!(one<f64, f64>, |a| $double(Rounding::$rounding, a)),)*
                _ => return None,
            }
        };
    }
    Some(match (name, ty, style.rounding) {
        ("rcp", Type::F32, Rounding::Nearest) => nearest!(|x: f32| 1.0 / x),
        ("rcp", Type::F64, Rounding::Nearest) => {
            by_flags!(ftz, F => alu1!(f64 => f64, |a| 1.0 / input64::<F>(a)))
        }
        ("rcp", ..) => directed!(
            |mode, x| round::single(Operation::Div, mode, 1.0, x),
            |mode, x| round::double(Operation::Div, mode, 1.0, x),
            Zero,
            Down,
            Up
        ),
        ("sqrt", Type::F32, Rounding::Nearest) => nearest!(root),
        ("sqrt", Type::F64, Rounding::Nearest) => alu1!(f64 => f64, |a| a.sqrt()),
        ("sqrt", ..) => directed!(
            |mode, x| round::single(Operation::Sqrt, mode, x, x),
            |mode, x| round::double(Operation::Sqrt, mode, x, x),
            Zero,
            Down,
            Up
        ),
        ("rsqrt", Type::F32, _) => nearest!(|x: f32| (1.0 / f64::from(x).sqrt()) as f32),
        ("rsqrt", Type::F64, _) => {
            by_flags!(ftz, F => alu1!(f64 => f64, |a| 1.0 / input64::<F>(a).sqrt()))
        }
        ("sin", Type::F32, _) => library!(|x: f32| x.sin()),
        ("cos", Type::F32, _) => library!(|x: f32| x.cos()),
        ("lg2", Type::F32, _) => library!(|x: f32| x.log2()),
        ("ex2", Type::F32, _) => library!(|x: f32| x.exp2()),
        ("tanh", Type::F32, _) => library!(|x: f32| x.tanh()),
        ("ex2" | "tanh", _, Rounding::Nearest) => return short::function(name, ty, ftz),
        _ => return None,
    })
}
