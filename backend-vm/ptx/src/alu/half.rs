//! Half precision and bfloat16: values are computed in a wider format and rounded once.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::cast_lossless,
    reason = "bit fields of fixed width"
)]

use super::Slot;

/// Rounding mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// To the nearest, ties to even.
    Nearest,
    /// Toward zero.
    Zero,
    /// Toward negative infinity.
    Down,
    /// Toward positive infinity.
    Up,
}

/// IEEE half-precision number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct F16(pub u16);

/// Bfloat16 number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bf16(pub u16);

/// Pair of 16-bit floats, the first in the low half.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pair<T>(pub T, pub T);

impl Slot for F16 {
    #[inline(always)]
    fn get(slot: u64) -> Self {
        Self(slot as u16)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.0 as u64
    }
}

impl Slot for Bf16 {
    #[inline(always)]
    fn get(slot: u64) -> Self {
        Self(slot as u16)
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.0 as u64
    }
}

impl<T: Slot> Slot for Pair<T> {
    #[inline(always)]
    fn get(slot: u64) -> Self {
        Self(T::get(slot), T::get(slot >> 16))
    }
    #[inline(always)]
    fn put(self) -> u64 {
        self.1.put() << 16 | self.0.put()
    }
}

/// 16-bit float.
pub(crate) trait Short: Slot + PartialEq {
    /// Canonical NaN.
    const NAN: Self;
    /// Mask of the exponent.
    const EXPONENT: u16;
    /// Bits of the least positive normal number: the lowest bit of the exponent.
    const LEAST_NORMAL: u16 = Self::EXPONENT & Self::EXPONENT.wrapping_neg();
    /// Converts to single precision, exactly.
    fn wide(self) -> f32;
    /// Rounds to the nearest value.
    fn nearest(value: f32) -> Self;
    /// Rounds `value` in the given mode.
    fn narrow(value: f64, rounding: Rounding) -> Self;
    /// Returns the bits.
    fn bits(self) -> u16;
    /// Makes a value from its bits.
    fn of(bits: u16) -> Self;
    /// Replaces a subnormal by a zero of its sign.
    #[inline(always)]
    fn flush(self) -> Self {
        if self.bits() & Self::EXPONENT == 0 {
            Self::of(self.bits() & 0x8000)
        } else {
            self
        }
    }
}

/// Rounds a double to a single, to odd: if a single cannot hold the value, the last bit is set. A
/// further rounding to a narrower type then gives the same result as rounding the double once.
#[inline(always)]
pub(crate) fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    let back = f64::from(near);
    let bits = near.to_bits();
    if back == value || value.is_nan() || bits & 1 == 1 {
        near
    } else if back.abs() > value.abs() {
        f32::from_bits(bits - 1)
    } else {
        f32::from_bits(bits + 1)
    }
}

/// Returns the code, without its sign, to which the magnitude of a finite double rounds in a format
/// with `mantissa` explicit bits. The codes continue beyond the greatest finite one.
pub(crate) fn magnitude(value: f64, mantissa: u32, bias: i32, rounding: Rounding) -> u64 {
    let bits = value.to_bits();
    if value == 0.0 {
        return 0;
    }
    let exponent = ((bits >> 52 & 0x7ff) as i32) - 1023;
    let significand = bits & ((1 << 52) - 1) | (u64::from(bits >> 52 & 0x7ff != 0) << 52);
    let least = 1 - bias;
    // Bits of the double's significand that the result cannot hold.
    let dropped = (52 - mantissa as i32 + (least - exponent).max(0)).min(54) as u32;
    let kept = if dropped >= 54 {
        0
    } else {
        significand >> dropped
    };
    let rest = if dropped >= 54 {
        u64::from(significand != 0)
    } else {
        significand & ((1 << dropped) - 1)
    };
    let half = 1_u64 << (dropped - 1);
    let away = match rounding {
        Rounding::Nearest if dropped >= 54 => false,
        Rounding::Nearest => rest > half || (rest == half && kept & 1 == 1),
        Rounding::Zero => false,
        Rounding::Down => value.is_sign_negative() && rest != 0,
        Rounding::Up => value.is_sign_positive() && rest != 0,
    };
    let field = if exponent < least {
        0
    } else {
        (exponent + bias - 1) as i64
    };
    ((field << mantissa) as u64).saturating_add(kept + u64::from(away))
}

/// Rounds a double to a 16-bit float.
fn narrow(value: f64, mantissa: u32, exponent_bits: u32, rounding: Rounding) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    let sign = u16::from(value.is_sign_negative()) << 15;
    let infinity = ((1_u16 << exponent_bits) - 1) << mantissa;
    if value.is_infinite() {
        return infinity | sign;
    }
    let bias = (1_i32 << (exponent_bits - 1)) - 1;
    let magnitude = magnitude(value, mantissa, bias, rounding);
    if magnitude < u64::from(infinity) {
        return magnitude as u16 | sign;
    }
    let overflow = match rounding {
        Rounding::Nearest => true,
        Rounding::Zero => false,
        Rounding::Down => sign != 0,
        Rounding::Up => sign == 0,
    };
    sign | if overflow { infinity } else { infinity - 1 }
}

impl Short for F16 {
    const NAN: Self = Self(0x7fff);
    const EXPONENT: u16 = 0x7c00;
    #[inline(always)]
    fn wide(self) -> f32 {
        let (sign, magnitude) = (u32::from(self.0 & 0x8000) << 16, u32::from(self.0 & 0x7fff));
        // The exponent's bias is 112 less than that of a single; the product is exact.
        let scaled = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
        let infinite = if magnitude >= 0x7c00 { 0x7f80_0000 } else { 0 };
        f32::from_bits(scaled.to_bits() | infinite | sign)
    }
    #[inline(always)]
    fn nearest(value: f32) -> Self {
        let bits = value.to_bits();
        let (sign, a) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
        let normal = (a.wrapping_add(0xfff + (a >> 13 & 1)) >> 13).wrapping_sub(112 << 10);
        // Adding 0.5 aligns the last place of the single with that of a half's subnormals (2^-24).
        let subnormal = (f32::from_bits(a) + 0.5)
            .to_bits()
            .wrapping_sub(0x3f00_0000);
        let finite = if a < 0x3880_0000 { subnormal } else { normal };
        let magnitude = if a >= 0x4780_0000 { 0x7c00 } else { finite };
        Self(if a > 0x7f80_0000 {
            0x7fff
        } else {
            (magnitude | sign) as u16
        })
    }
    fn narrow(value: f64, rounding: Rounding) -> Self {
        Self(narrow(value, 10, 5, rounding))
    }
    #[inline(always)]
    fn bits(self) -> u16 {
        self.0
    }
    #[inline(always)]
    fn of(bits: u16) -> Self {
        Self(bits)
    }
}

impl Short for Bf16 {
    const NAN: Self = Self(0x7fff);
    const EXPONENT: u16 = 0x7f80;
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    #[inline(always)]
    fn nearest(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        Self(if value.is_nan() {
            0x7fff
        } else {
            rounded as u16
        })
    }
    fn narrow(value: f64, rounding: Rounding) -> Self {
        Self(narrow(value, 7, 8, rounding))
    }
    #[inline(always)]
    fn bits(self) -> u16 {
        self.0
    }
    #[inline(always)]
    fn of(bits: u16) -> Self {
        Self(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the value of a half from the definition of the format.
    fn by_definition(bits: u16) -> f64 {
        let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
        let fraction = f64::from(bits & 0x3ff) / 1024.0;
        match bits >> 10 & 31 {
            0 => sign * fraction * 2.0_f64.powi(-14),
            31 if fraction == 0.0 => sign * f64::INFINITY,
            31 => f64::NAN,
            exponent => sign * (1.0 + fraction) * 2.0_f64.powi(i32::from(exponent) - 15),
        }
    }

    #[test]
    fn every_half_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let value = F16(bits).wide();
            let wide = f64::from(value);
            if value.is_nan() {
                assert!(by_definition(bits).is_nan());
                assert_eq!(F16::nearest(value), F16::NAN);
                assert_eq!(F16::narrow(wide, Rounding::Nearest), F16::NAN);
            } else {
                assert_eq!(wide, by_definition(bits));
                assert_eq!(F16::nearest(value).0, bits, "{value}");
                assert_eq!(F16::narrow(wide, Rounding::Nearest).0, bits, "{value}");
                assert_eq!(F16::narrow(wide, Rounding::Up).0, bits, "{value}");
            }
        }
    }

    #[test]
    fn every_bfloat_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let value = Bf16(bits).wide();
            if !value.is_nan() {
                let wide = f64::from(value);
                assert_eq!(Bf16::nearest(value).0, bits, "{value}");
                assert_eq!(Bf16::narrow(wide, Rounding::Nearest).0, bits, "{value}");
            }
        }
    }

    #[test]
    fn both_ways_to_the_nearest_agree() {
        // Every 251st single: these include ties, subnormals, overflow and NaNs.
        for bits in (0..=u32::MAX).step_by(251) {
            let value = f32::from_bits(bits);
            let wide = f64::from(value);
            assert_eq!(F16::nearest(value), F16::narrow(wide, Rounding::Nearest));
            assert_eq!(Bf16::nearest(value), Bf16::narrow(wide, Rounding::Nearest));
        }
        for low in [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x7fff, 0x8000, 0x8001] {
            for high in 0..=u16::MAX {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                let wide = f64::from(value);
                assert_eq!(F16::nearest(value), F16::narrow(wide, Rounding::Nearest));
                assert_eq!(Bf16::nearest(value), Bf16::narrow(wide, Rounding::Nearest));
            }
        }
    }

    #[test]
    fn rounding_to_odd_keeps_what_a_second_rounding_needs() {
        // A tie of bfloat16 and a little more: rounding twice to the nearest would round it down.
        let above = 1.0 + 2.0_f64.powi(-8) + 2.0_f64.powi(-40);
        assert_eq!(Bf16::nearest(to_odd(above)).0, 0x3f81);
        assert_eq!(Bf16::nearest(to_odd(-above)).0, 0xbf81);
        let below = 1.0 + 3.0 * 2.0_f64.powi(-8) - 2.0_f64.powi(-40);
        assert_eq!(Bf16::nearest(to_odd(below)).0, 0x3f81);
    }

    #[test]
    fn ties_overflow_and_direction() {
        assert_eq!(F16::narrow(65519.0, Rounding::Nearest).0, 0x7bff);
        assert_eq!(F16::narrow(65520.0, Rounding::Nearest).0, 0x7c00);
        assert_eq!(F16::narrow(1e9, Rounding::Zero).0, 0x7bff);
        assert_eq!(
            F16::narrow(1.0 + 2.0_f64.powi(-11), Rounding::Nearest).0,
            0x3c00
        );
        assert_eq!(F16::narrow(1.0 + 2.0_f64.powi(-11), Rounding::Up).0, 0x3c01);
        assert_eq!(
            F16::narrow(-1.0 - 2.0_f64.powi(-11), Rounding::Down).0,
            0xbc01
        );
        assert_eq!(F16::narrow(2.0_f64.powi(-25), Rounding::Nearest).0, 0);
        assert_eq!(F16::narrow(2.0_f64.powi(-25) * 1.5, Rounding::Nearest).0, 1);
    }
}
