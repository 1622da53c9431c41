//! Arithmetic with directed rounding, in single and double precision.
//!
//! The processor rounds: an operation runs with its rounding mode set in MXCSR, inside one block of
//! assembly that restores the old mode before it ends.

use super::half::Rounding;

/// Arithmetic operation that rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Add,
    Sub,
    Mul,
    Div,
    Sqrt,
}

/// Returns the MXCSR value that masks every exception and sets the rounding mode.
fn control(rounding: Rounding) -> u32 {
    0x1f80
        | match rounding {
            Rounding::Nearest => 0,
            Rounding::Down => 0x2000,
            Rounding::Up => 0x4000,
            Rounding::Zero => 0x6000,
        }
}

macro_rules! rounded {
    ($instruction:literal, $mode:expr, $a:expr, $b:expr) => {{
        let (mut value, old, new) = ($a, 0_u32, control($mode));
        // SAFETY: stores and loads only the two words whose addresses are given, and
        // leaves MXCSR as it found it, so that no other code sees the rounding mode.
        unsafe {
            std::arch::asm!(
                "stmxcsr [{old}]",
                "ldmxcsr [{new}]",
                $instruction,
                "ldmxcsr [{old}]",
                old = in(reg) &raw const old,
                new = in(reg) &raw const new,
                a = inout(xmm_reg) value,
                b = in(xmm_reg) $b,
                options(nostack, preserves_flags),
            );
        }
        value
    }};
}

/// Computes `a op b` in single precision; `Sqrt` ignores `b`.
pub(crate) fn single(operation: Operation, rounding: Rounding, a: f32, b: f32) -> f32 {
    match operation {
        Operation::Add => rounded!("addss {a}, {b}", rounding, a, b),
        Operation::Sub => rounded!("subss {a}, {b}", rounding, a, b),
        Operation::Mul => rounded!("mulss {a}, {b}", rounding, a, b),
        Operation::Div => rounded!("divss {a}, {b}", rounding, a, b),
        Operation::Sqrt => rounded!("sqrtss {a}, {b}", rounding, a, a),
    }
}

/// Computes `a op b` in double precision; `Sqrt` ignores `b`.
pub(crate) fn double(operation: Operation, rounding: Rounding, a: f64, b: f64) -> f64 {
    match operation {
        Operation::Add => rounded!("addsd {a}, {b}", rounding, a, b),
        Operation::Sub => rounded!("subsd {a}, {b}", rounding, a, b),
        Operation::Mul => rounded!("mulsd {a}, {b}", rounding, a, b),
        Operation::Div => rounded!("divsd {a}, {b}", rounding, a, b),
        Operation::Sqrt => rounded!("sqrtsd {a}, {b}", rounding, a, a),
    }
}

/// Rounds a double to a single.
pub(crate) fn narrow(value: f64, rounding: Rounding) -> f32 {
    let out: f64 = rounded!("cvtsd2ss {a}, {b}", rounding, value, value);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the single is in the low half"
    )]
    let bits = out.to_bits() as u32;
    f32::from_bits(bits)
}

/// Moves the nearest result `r` to the directed one. `error` is the exact result minus `r`; only its
/// sign counts.
fn toward(rounding: Rounding, r: f64, error: f64) -> f64 {
    match rounding {
        Rounding::Up if error > 0.0 => r.next_up(),
        Rounding::Down if error < 0.0 => r.next_down(),
        Rounding::Zero if r > 0.0 && error < 0.0 => r.next_down(),
        Rounding::Zero if r < 0.0 && error > 0.0 => r.next_up(),
        _ => r,
    }
}

/// Computes `a + b`, rounded to odd: if a double cannot hold the sum, the last bit is set.
#[inline(always)]
pub(crate) fn sum_to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let t = sum - a;
    let error = (a - (sum - t)) + (b - t);
    let bits = sum.to_bits();
    // The error of an infinite sum is a NaN.
    if error == 0.0 || error.is_nan() || bits & 1 == 1 {
        sum
    } else if (error > 0.0) == (sum > 0.0) {
        f64::from_bits(bits + 1)
    } else {
        f64::from_bits(bits - 1)
    }
}

/// Computes `a * b + c` in single precision, rounded once.
pub(crate) fn fma_single(rounding: Rounding, a: f32, b: f32, c: f32) -> f32 {
    // The product of two singles is exact in double precision; the sum is rounded to
    // odd, so that rounding it again to a single gives what one rounding would.
    let (product, wide) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = sum_to_odd(product, wide);
    if !sum.is_finite() || rounding == Rounding::Nearest {
        return a.mul_add(b, c);
    }
    if sum == 0.0 {
        let same = product.is_sign_negative() == wide.is_sign_negative();
        return if product == 0.0 && wide == 0.0 && same {
            a.mul_add(b, c)
        } else if rounding == Rounding::Down {
            -0.0
        } else {
            0.0
        };
    }
    narrow(sum, rounding)
}

/// Computes `a * b + c` in double precision by one FMA instruction.
///
/// # Safety
///
/// The processor has the FMA instructions.
unsafe fn fma_by_processor(rounding: Rounding, a: f64, b: f64, c: f64) -> f64 {
    let (mut value, old, new) = (c, 0_u32, control(rounding));
    // SAFETY: stores and loads only the two words whose addresses are given, and leaves MXCSR as
    // it found it; the caller vouches for the instruction.
    unsafe {
        std::arch::asm!(
            "stmxcsr [{old}]",
            "ldmxcsr [{new}]",
            "vfmadd231sd {c}, {a}, {b}",
            "ldmxcsr [{old}]",
            old = in(reg) &raw const old,
            new = in(reg) &raw const new,
            c = inout(xmm_reg) value,
            a = in(xmm_reg) a,
            b = in(xmm_reg) b,
            options(nostack, preserves_flags),
        );
    }
    value
}

/// Computes `a * b + c` in double precision, rounded once.
pub(crate) fn fma_double(rounding: Rounding, a: f64, b: f64, c: f64) -> f64 {
    if rounding != Rounding::Nearest && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has the instruction.
        return unsafe { fma_by_processor(rounding, a, b, c) };
    }
    let nearest = a.mul_add(b, c);
    if rounding == Rounding::Nearest || !nearest.is_finite() {
        return nearest;
    }
    // The error of the nearest result, from the exact product and an exact sum.
    let product = a * b;
    let low = a.mul_add(b, -product);
    let sum = product + c;
    let t = sum - product;
    let rest = (product - (sum - t)) + (c - t);
    toward(rounding, nearest, (sum - nearest) + (rest + low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_is_enclosed() {
        let down = single(Operation::Div, Rounding::Down, 1.0, 3.0);
        let up = single(Operation::Div, Rounding::Up, 1.0, 3.0);
        assert_eq!(down.next_up(), up);
        assert_eq!(single(Operation::Div, Rounding::Zero, -1.0, 3.0), -down);
        let down = double(Operation::Sqrt, Rounding::Down, 2.0, 0.0);
        assert_eq!(
            down.next_up(),
            double(Operation::Sqrt, Rounding::Up, 2.0, 0.0)
        );
    }

    #[test]
    fn fma_rounds_once() {
        let tiny = f32::MIN_POSITIVE;
        assert_eq!(fma_single(Rounding::Up, 1.0, 1.0, tiny), 1.0_f32.next_up());
        assert_eq!(fma_single(Rounding::Down, 1.0, 1.0, tiny), 1.0);
        assert_eq!(
            fma_single(Rounding::Zero, 1.0, 1.0, -tiny),
            1.0_f32.next_down()
        );
        assert_eq!(
            fma_double(Rounding::Up, 1.0, 1.0, 1e-300),
            1.0_f64.next_up()
        );
        assert_eq!(
            fma_double(Rounding::Down, 1.0, 1.0, -1e-300),
            1.0_f64.next_down()
        );
        // The product alone is no double: it is too large, or too small.
        assert_eq!(
            fma_double(Rounding::Zero, 1e200, 1e200, f64::NEG_INFINITY),
            f64::NEG_INFINITY
        );
        assert_eq!(
            fma_double(Rounding::Up, 1e-200, 1e-200, 0.0),
            f64::from_bits(1)
        );
        assert_eq!(fma_double(Rounding::Zero, -1e-200, 1e-200, 0.0), -0.0);
    }

    #[test]
    fn the_mode_does_not_leak() {
        single(Operation::Div, Rounding::Up, 1.0, 3.0);
        assert_eq!(1.0_f32 / std::hint::black_box(3.0), 0.333_333_34);
    }
}
