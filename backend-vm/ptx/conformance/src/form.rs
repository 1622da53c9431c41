//! Instruction forms.

use crate::object::Object;
use crate::operands::Class;

/// Default number of rows of a form: four warps.
const ROWS: usize = 128;

/// Criterion by which a result matches the recorded answer.
#[derive(Clone, Copy, Debug)]
pub enum Check {
    /// Both answers are equal bit for bit.
    Exact,
    /// Both answers lie within a bound of the mathematical result. If either is zero, infinite or a NaN,
    /// they are equal.
    Approximate(Approximation),
    /// Both answers differ by no more than this: sums whose order is not specified.
    Near(Format, f64),
}

/// Approximate function, and its documented bound.
#[derive(Clone, Copy, Debug)]
pub struct Approximation {
    pub format: Format,
    /// Whether subnormal operands count as zeros.
    pub flush: bool,
    /// Returns the mathematical result.
    pub exact: fn(&[f64]) -> f64,
    /// Returns the greatest documented error, absolute, for the operands and the mathematical result.
    pub error: fn(&[f64], f64) -> f64,
}

/// Floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    F16,
    Bf16,
    F32,
    F64,
}

impl Format {
    #[must_use]
    pub fn bits(self) -> u32 {
        match self {
            Self::F16 | Self::Bf16 => 16,
            Self::F32 => 32,
            Self::F64 => 64,
        }
    }

    /// Returns the number of bits of the fraction.
    #[must_use]
    pub fn fraction(self) -> u32 {
        match self {
            Self::F16 => 10,
            Self::Bf16 => 7,
            Self::F32 => 23,
            Self::F64 => 52,
        }
    }

    /// Returns the number of bits of the exponent.
    #[must_use]
    pub fn exponent(self) -> u32 {
        self.bits() - 1 - self.fraction()
    }

    /// Returns the value of an encoding.
    #[must_use]
    pub fn value(self, bits: u64) -> f64 {
        let fraction = self.fraction();
        let exponents = (1_u64 << self.exponent()) - 1;
        let sign = bits >> (self.bits() - 1) & 1;
        let exponent = bits >> fraction & exponents;
        let field = bits & ((1 << fraction) - 1);
        let magnitude = if exponent == exponents {
            if field == 0 { f64::INFINITY } else { f64::NAN }
        } else if self == Self::F64 {
            f64::from_bits(bits & (u64::MAX >> 1))
        } else {
            let normal = exponent != 0;
            // At most 24 bits, with an exponent inside the range of a double.
            let integer = field | u64::from(normal) << fraction;
            let integer = f64::from(u32::try_from(integer).unwrap_or(u32::MAX));
            let scale = i32::try_from(exponent.max(1)).unwrap_or(i32::MAX)
                - i32::try_from(exponents >> 1).unwrap_or(i32::MAX)
                - i32::try_from(fraction).unwrap_or(0);
            integer * f64::from(scale).exp2()
        };
        if sign == 1 { -magnitude } else { magnitude }
    }

    /// Returns whether an encoding is subnormal.
    #[must_use]
    pub fn is_subnormal(self, bits: u64) -> bool {
        let exponents = (1_u64 << self.exponent()) - 1;
        bits >> self.fraction() & exponents == 0 && bits & ((1 << self.fraction()) - 1) != 0
    }
}

/// Instruction form: a few instructions from operands `%i0`, `%i1`… to results `%o0`, `%o1`….
#[derive(Clone, Debug)]
pub struct Form {
    pub name: String,
    pub inputs: Vec<Class>,
    /// Number of bits of each result; 1 is a predicate.
    pub outputs: Vec<u32>,
    /// Additional declarations, and the instructions. `%t` is the thread's index, `%m` 32 bytes of
    /// global memory for each thread, `%w` 8 KiB for each warp, `%s` 32 bytes of shared memory for each
    /// thread, `%b` shared memory of the block.
    pub body: String,
    pub rows: usize,
    pub check: Check,
    /// Texture or surface of the handle `%h`.
    pub object: Option<Object>,
}

impl Form {
    #[must_use]
    pub fn new(name: &str, inputs: &[Class], outputs: &[u32], body: String) -> Self {
        Self {
            name: name.to_owned(),
            inputs: inputs.to_vec(),
            outputs: outputs.to_vec(),
            body,
            rows: ROWS,
            check: Check::Exact,
            object: None,
        }
    }

    /// Makes a form of one instruction with one result and its operands in order.
    #[must_use]
    pub fn plain(op: &str, inputs: &[Class], output: u32) -> Self {
        let operands: String = (0..inputs.len()).map(|i| format!(", %i{i}")).collect();
        Self::new(op, inputs, &[output], format!("{op} %o0{operands};"))
    }

    #[must_use]
    pub fn rows(self, rows: usize) -> Self {
        Self { rows, ..self }
    }

    #[must_use]
    pub fn with(self, object: Object) -> Self {
        Self {
            object: Some(object),
            ..self
        }
    }

    #[must_use]
    pub fn checked(self, check: Check) -> Self {
        Self { check, ..self }
    }
}

/// Forms whose answers share a file.
#[derive(Debug)]
pub struct Group {
    pub name: &'static str,
    pub forms: Vec<Form>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_have_the_values_of_their_formats() {
        for bits in [
            0,
            1,
            0x007f_ffff,
            0x0080_0000,
            0x3f80_0001,
            0x7f7f_ffff,
            0x7f80_0000,
        ] {
            for bits in [bits, bits | 1 << 31] {
                let value = f64::from(f32::from_bits(bits));
                assert_eq!(
                    Format::F32.value(u64::from(bits)).to_bits(),
                    value.to_bits()
                );
            }
        }
        assert_eq!(
            Format::F64.value(0xbff8_0000_0000_0000).to_bits(),
            (-1.5_f64).to_bits()
        );
        assert_eq!(Format::F16.value(0x7bff).to_bits(), 65504.0_f64.to_bits());
        assert_eq!(Format::F16.value(1).to_bits(), (-24.0_f64).exp2().to_bits());
        assert_eq!(Format::Bf16.value(0xc040).to_bits(), (-3.0_f64).to_bits());
        assert!(Format::F16.value(0x7c01).is_nan());
    }
}
