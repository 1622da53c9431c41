//! Half precision and bfloat16: values are computed wider and rounded once.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::cast_lossless,
    reason = "bit fields of fixed width"
)]

use super::Slot;

/// How to round.
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

/// An IEEE half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct F16(pub u16);

/// A bfloat16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bf16(pub u16);

/// A pair of 16-bit floats, the first in the low half.
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

/// A 16-bit float.
pub(crate) trait Short: Slot + PartialEq {
    /// The canonical NaN.
    const NAN: Self;
    /// Its value, exactly.
    fn wide(self) -> f64;
    /// The nearest value.
    fn narrow(value: f64, rounding: Rounding) -> Self;
    /// Its bits.
    fn bits(self) -> u16;
    /// From bits.
    fn of(bits: u16) -> Self;
}

/// Rounds a double to a float of `mantissa` explicit bits and minimum exponent `least`.
fn narrow(value: f64, mantissa: u32, exponent_bits: u32, rounding: Rounding) -> u16 {
    let bits = value.to_bits();
    let sign = ((bits >> 63) as u16) << 15;
    let bias = (1_i32 << (exponent_bits - 1)) - 1;
    let infinity = (((1_u16 << exponent_bits) - 1) << mantissa) | sign;
    if value.is_nan() {
        return 0x7fff;
    }
    if value.is_infinite() {
        return infinity;
    }
    if value == 0.0 {
        return sign;
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
        Rounding::Down => sign != 0 && rest != 0,
        Rounding::Up => sign == 0 && rest != 0,
    };
    let kept = kept + u64::from(away);
    let field = if exponent < least {
        0
    } else {
        (exponent + bias - 1) as i64
    };
    let magnitude = ((field << mantissa) as u64).saturating_add(kept);
    let limit = u64::from(infinity & 0x7fff);
    if magnitude >= limit {
        let overflow = match rounding {
            Rounding::Nearest => true,
            Rounding::Zero => false,
            Rounding::Down => sign != 0,
            Rounding::Up => sign == 0,
        };
        return if overflow { infinity } else { infinity - 1 };
    }
    magnitude as u16 | sign
}

impl Short for F16 {
    const NAN: Self = Self(0x7fff);
    fn wide(self) -> f64 {
        let sign = if self.0 >> 15 == 1 { -1.0 } else { 1.0 };
        let mantissa = (self.0 & 0x3ff) as f64;
        match self.0 >> 10 & 31 {
            0 => sign * mantissa * 2.0_f64.powi(-24),
            31 if self.0 & 0x3ff == 0 => sign * f64::INFINITY,
            31 => f64::NAN,
            exponent => {
                sign * (mantissa + 1024.0) * f64::from_bits(u64::from(exponent + 1023 - 25) << 52)
            }
        }
    }
    fn narrow(value: f64, rounding: Rounding) -> Self {
        Self(narrow(value, 10, 5, rounding))
    }
    fn bits(self) -> u16 {
        self.0
    }
    fn of(bits: u16) -> Self {
        Self(bits)
    }
}

impl Short for Bf16 {
    const NAN: Self = Self(0x7fff);
    fn wide(self) -> f64 {
        f64::from(f32::from_bits(u32::from(self.0) << 16))
    }
    fn narrow(value: f64, rounding: Rounding) -> Self {
        Self(narrow(value, 7, 8, rounding))
    }
    fn bits(self) -> u16 {
        self.0
    }
    fn of(bits: u16) -> Self {
        Self(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let value = F16(bits).wide();
            if value.is_nan() {
                assert_eq!(F16::narrow(value, Rounding::Nearest), F16::NAN);
            } else {
                assert_eq!(F16::narrow(value, Rounding::Nearest).0, bits, "{value}");
                assert_eq!(F16::narrow(value, Rounding::Up).0, bits, "{value}");
            }
        }
    }

    #[test]
    fn every_bfloat_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let value = Bf16(bits).wide();
            if !value.is_nan() {
                assert_eq!(Bf16::narrow(value, Rounding::Nearest).0, bits, "{value}");
            }
        }
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
