//! Single and double precision, and the 16-bit types (PTX ISA 9.7.3 to 9.7.5).
#![expect(
    clippy::cast_possible_truncation,
    reason = "rounding to a narrower type is what is meant"
)]

use super::half::{Bf16, F16, Pair, Rounding, Short};
use super::round::{self, Operation};
use super::{Alu, alu1, alu2, alu3, by_flags, plain};
use crate::parse::ast::Type;

/// Modifiers of a floating-point instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style {
    /// How to round.
    pub rounding: Rounding,
    /// Whether subnormal operands and results are zeros.
    pub ftz: bool,
    /// Whether the result is clamped to [0, 1].
    pub saturate: bool,
}

/// The NaN that single precision instructions return.
const NAN32: f32 = f32::from_bits(0x7fff_ffff);

/// A subnormal as a zero of its sign.
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
fn output<const FTZ: bool, const SAT: bool>(x: f32) -> f32 {
    if SAT {
        // A NaN saturates to zero.
        return if x > 0.0 { x.min(1.0) } else { 0.0 };
    }
    let x = if FTZ { flush(x) } else { x };
    if x.is_nan() { NAN32 } else { x }
}

#[inline(always)]
fn clamp64<const SAT: bool>(x: f64) -> f64 {
    if SAT {
        if x > 0.0 { x.min(1.0) } else { 0.0 }
    } else {
        x
    }
}

/// `add`, `sub`, `mul`, `div` in single precision.
fn binary32(name: &str, style: Style) -> Option<Alu> {
    macro_rules! nearest {
        ($op:tt) => {
            by_flags!(style.ftz, F, style.saturate, S =>
                alu2!(f32, f32 => f32, |a, b| output::<F, S>(input::<F>(a) $op input::<F>(b))))
        };
    }
    macro_rules! directed {
        ($operation:ident, $($rounding:ident),*) => {
            match style.rounding {
                $(Rounding::$rounding => by_flags!(style.ftz, F, style.saturate, S =>
                    plain!(two<f32, f32, f32>, |a, b| output::<F, S>(round::single(
                        Operation::$operation, Rounding::$rounding, input::<F>(a), input::<F>(b))))),)*
                Rounding::Nearest => return None,
            }
        };
    }
    Some(match (name, style.rounding) {
        ("add", Rounding::Nearest) => nearest!(+),
        ("sub", Rounding::Nearest) => nearest!(-),
        ("mul", Rounding::Nearest) => nearest!(*),
        ("div", Rounding::Nearest) => nearest!(/),
        ("add", _) => directed!(Add, Zero, Down, Up),
        ("sub", _) => directed!(Sub, Zero, Down, Up),
        ("mul", _) => directed!(Mul, Zero, Down, Up),
        ("div", _) => directed!(Div, Zero, Down, Up),
        _ => return None,
    })
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

#[inline(always)]
fn short<T: Short, const SAT: bool>(value: f64) -> T {
    if value.is_nan() && !SAT {
        T::NAN
    } else {
        T::narrow(clamp64::<SAT>(value), Rounding::Nearest)
    }
}

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

/// Applies a function of doubles to one or both 16-bit lanes.
macro_rules! short2 {
    ($ty:expr, $sat:expr, $f:expr) => {
        by_flags!($sat, S => by_short!($ty, T =>
            plain!(two<T, T, T>, |a, b| short::<T, S>($f(a.wide(), b.wide()))),
            plain!(two<Pair<T>, Pair<T>, Pair<T>>, |a, b| Pair(
                short::<T, S>($f(a.0.wide(), b.0.wide())), short::<T, S>($f(a.1.wide(), b.1.wide()))))))
    };
}
macro_rules! short1 {
    ($ty:expr, $f:expr) => {
        by_short!($ty, T =>
            plain!(one<T, T>, |a| short::<T, false>($f(a.wide()))),
            plain!(one<Pair<T>, Pair<T>>, |a| Pair(short::<T, false>($f(a.0.wide())), short::<T, false>($f(a.1.wide())))))
    };
}

/// `add`, `sub`, `mul` and `div`.
pub(crate) fn binary(name: &str, ty: Type, style: Style) -> Option<Alu> {
    match ty {
        Type::F32 => binary32(name, style),
        Type::F64 => binary64(name, style),
        _ => Some(match name {
            "add" => short2!(ty, style.saturate, |a: f64, b: f64| a + b),
            "sub" => short2!(ty, style.saturate, |a: f64, b: f64| a - b),
            "mul" => short2!(ty, style.saturate, |a: f64, b: f64| a * b),
            _ => return None,
        }),
    }
}

/// `fma` and `mad`; `relu` clamps negative results to zero (16-bit types).
pub(crate) fn fused(ty: Type, style: Style, relu: bool) -> Option<Alu> {
    macro_rules! single {
        ($($rounding:ident),*) => {
            match style.rounding {
                Rounding::Nearest => by_flags!(style.ftz, F, style.saturate, S =>
                    alu3!(f32, f32, f32 => f32, |a, b, c|
                        output::<F, S>(input::<F>(a).mul_add(input::<F>(b), input::<F>(c))))),
                $(Rounding::$rounding => by_flags!(style.ftz, F, style.saturate, S =>
                    plain!(three<f32, f32, f32, f32>, |a, b, c| output::<F, S>(round::fma_single(
                        Rounding::$rounding, input::<F>(a), input::<F>(b), input::<F>(c))))),)*
            }
        };
    }
    macro_rules! half {
        ($f:expr) => {
            by_flags!(style.saturate, S => by_short!(ty, T =>
                plain!(three<T, T, T, T>, |a, b, c| short::<T, S>($f(a.wide(), b.wide(), c.wide()))),
                plain!(three<Pair<T>, Pair<T>, Pair<T>, Pair<T>>, |a, b, c| Pair(
                    short::<T, S>($f(a.0.wide(), b.0.wide(), c.0.wide())),
                    short::<T, S>($f(a.1.wide(), b.1.wide(), c.1.wide()))))))
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
        _ if relu => half!(|a: f64, b: f64, c: f64| {
            let r = a.mul_add(b, c);
            if r < 0.0 { 0.0 } else { r }
        }),
        _ => half!(|a: f64, b: f64, c: f64| a.mul_add(b, c)),
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

/// `min` and `max`, where `nan` passes NaNs on and `xorsign` takes magnitudes and the product's sign.
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
    if xorsign {
        return None;
    }
    Some(match (ty, max, nan) {
        (Type::F64, false, false) => alu2!(f64, f64 => f64, least),
        (Type::F64, true, false) => alu2!(f64, f64 => f64, greatest),
        (Type::F64, ..) => return None,
        (_, false, false) => short2!(ty, false, |a: f64, b: f64| least(a, b)),
        (_, true, false) => short2!(ty, false, |a: f64, b: f64| greatest(a, b)),
        (_, false, true) => short2!(ty, false, |a: f64, b: f64| if a.is_nan() {
            a
        } else if b.is_nan() {
            b
        } else {
            least(a, b)
        }),
        (_, true, true) => short2!(ty, false, |a: f64, b: f64| if a.is_nan() {
            a
        } else if b.is_nan() {
            b
        } else {
            greatest(a, b)
        }),
    })
}

/// `neg` and `abs`.
pub(crate) fn sign(name: &str, ty: Type, ftz: bool) -> Option<Alu> {
    Some(match (name, ty) {
        ("neg", Type::F32) => by_flags!(ftz, F => alu1!(f32 => f32, |a| -input::<F>(a))),
        ("abs", Type::F32) => by_flags!(ftz, F => alu1!(f32 => f32, |a| input::<F>(a).abs())),
        ("neg", Type::F64) => alu1!(f64 => f64, |a| -a),
        ("abs", Type::F64) => alu1!(f64 => f64, |a| a.abs()),
        ("neg", Type::F16 | Type::Bf16) => alu1!(u16 => u16, |a| a ^ 0x8000),
        ("abs", Type::F16 | Type::Bf16) => alu1!(u16 => u16, |a| a & 0x7fff),
        ("neg", Type::F16x2 | Type::Bf16x2) => alu1!(u32 => u32, |a| a ^ 0x8000_8000),
        ("abs", Type::F16x2 | Type::Bf16x2) => alu1!(u32 => u32, |a| a & 0x7fff_7fff),
        _ => return None,
    })
}

/// `copysign`: the magnitude of the second operand with the sign of the first.
pub(crate) fn copy_sign(ty: Type) -> Option<Alu> {
    Some(match ty {
        Type::F32 => alu2!(f32, f32 => f32, |a, b| b.copysign(a)),
        Type::F64 => alu2!(f64, f64 => f64, |a, b| b.copysign(a)),
        _ => return None,
    })
}

/// `rcp`, `sqrt`, `rsqrt`, `sin`, `cos`, `lg2`, `ex2` and `tanh`.
///
/// The approximate forms are computed to within half a unit in the last place,
/// which is inside every error bound that PTX gives for them.
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
        ("rcp", Type::F64, Rounding::Nearest) => alu1!(f64 => f64, |a| 1.0 / a),
        ("rcp", ..) => directed!(
            |mode, x| round::single(Operation::Div, mode, 1.0, x),
            |mode, x| round::double(Operation::Div, mode, 1.0, x),
            Zero,
            Down,
            Up
        ),
        ("sqrt", Type::F32, Rounding::Nearest) => nearest!(|x: f32| x.sqrt()),
        ("sqrt", Type::F64, Rounding::Nearest) => alu1!(f64 => f64, |a| a.sqrt()),
        ("sqrt", ..) => directed!(
            |mode, x| round::single(Operation::Sqrt, mode, x, x),
            |mode, x| round::double(Operation::Sqrt, mode, x, x),
            Zero,
            Down,
            Up
        ),
        ("rsqrt", Type::F32, _) => nearest!(|x: f32| (1.0 / f64::from(x).sqrt()) as f32),
        ("rsqrt", Type::F64, _) => alu1!(f64 => f64, |a| 1.0 / a.sqrt()),
        ("sin", Type::F32, _) => library!(|x: f32| x.sin()),
        ("cos", Type::F32, _) => library!(|x: f32| x.cos()),
        ("lg2", Type::F32, _) => library!(|x: f32| x.log2()),
        ("ex2", Type::F32, _) => library!(|x: f32| x.exp2()),
        ("tanh", Type::F32, _) => library!(|x: f32| x.tanh()),
        ("ex2", Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2, _) => {
            short1!(ty, |x: f64| x.exp2())
        }
        ("tanh", Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2, _) => {
            short1!(ty, |x: f64| x.tanh())
        }
        _ => return None,
    })
}
