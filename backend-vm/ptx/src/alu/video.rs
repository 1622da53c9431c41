//! Video instructions: operations on parts of registers, on one, two or four at once (PTX ISA
//! 9.7.17 and 9.7.18).
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "parts of registers are cut out and put together"
)]

use super::Alu;

/// Operation on two parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Operation {
    Add,
    Subtract,
    Difference,
    Average,
    Min,
    Max,
    ShiftLeft,
    ShiftRight,
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

const OPERATIONS: [Operation; 14] = [
    Operation::Add,
    Operation::Subtract,
    Operation::Difference,
    Operation::Average,
    Operation::Min,
    Operation::Max,
    Operation::ShiftLeft,
    Operation::ShiftRight,
    Operation::Equal,
    Operation::NotEqual,
    Operation::Less,
    Operation::LessOrEqual,
    Operation::Greater,
    Operation::GreaterOrEqual,
];

/// Secondary operation, which combines the result with the third source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Merge {
    /// Inserts the result into the third source.
    Insert,
    Add,
    Min,
    Max,
}

const MERGES: [Merge; 4] = [Merge::Insert, Merge::Add, Merge::Min, Merge::Max];

/// Part of a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub bits: u32,
    pub shift: u32,
}

impl Part {
    /// Whole register.
    pub(crate) const WHOLE: Self = Self { bits: 32, shift: 0 };

    /// Parses `b0` to `b3`, `h0` and `h1`.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let (bits, shift) = match name {
            "b0" => (8, 0),
            "b1" => (8, 8),
            "b2" => (8, 16),
            "b3" => (8, 24),
            "h0" => (16, 0),
            "h1" => (16, 16),
            _ => return None,
        };
        Some(Self { bits, shift })
    }

    /// Encodes the part in five bits.
    fn encode(self) -> u32 {
        ((self.bits / 16) << 3) | (self.shift / 8)
    }

    fn decode(word: u32) -> Self {
        let bits = match word >> 3 & 3 {
            0 => 8,
            1 => 16,
            _ => 32,
        };
        Self {
            bits,
            shift: (word & 7) * 8,
        }
    }

    fn mask(self) -> u32 {
        u32::MAX >> (32 - self.bits)
    }

    fn extract(self, word: u32, signed: bool) -> i64 {
        let value = word >> self.shift & self.mask();
        if signed {
            let unused = 32 - self.bits;
            i64::from((value << unused).cast_signed() >> unused)
        } else {
            i64::from(value)
        }
    }

    fn insert(self, word: u32, value: i64) -> u32 {
        let mask = self.mask() << self.shift;
        word & !mask | (value as u32) << self.shift & mask
    }

    fn clamp(self, value: i64, signed: bool) -> i64 {
        let greatest = i64::from(self.mask() >> u32::from(signed));
        value.clamp(if signed { -greatest - 1 } else { 0 }, greatest)
    }
}

/// Decoded opcode and selectors of a video instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Video {
    pub operation: Operation,
    pub merge: Merge,
    pub a: Part,
    pub b: Part,
    pub dest: Part,
    /// Whether the sources and the result are signed.
    pub signed: [bool; 3],
    pub saturate: bool,
    /// Whether shifts wrap around instead of stopping at 32.
    pub wrap: bool,
    /// Base-2 logarithm of the number of parts computed alike.
    pub lanes: u32,
}

impl Video {
    /// Encodes the instruction in one word, a handler's last operand.
    pub(crate) fn encode(self) -> u32 {
        let flag = |set: bool, bit: u32| u32::from(set) << bit;
        self.operation as u32
            | (self.merge as u32) << 4
            | self.a.encode() << 6
            | self.b.encode() << 11
            | self.dest.encode() << 16
            | flag(self.signed[0], 21)
            | flag(self.signed[1], 22)
            | flag(self.signed[2], 23)
            | flag(self.saturate, 24)
            | flag(self.wrap, 25)
            | self.lanes << 26
    }

    fn decode(word: u32) -> Self {
        let flag = |bit: u32| word >> bit & 1 == 1;
        Self {
            operation: OPERATIONS[(word & 15) as usize % OPERATIONS.len()],
            merge: MERGES[(word >> 4 & 3) as usize],
            a: Part::decode(word >> 6),
            b: Part::decode(word >> 11),
            dest: Part::decode(word >> 16),
            signed: [flag(21), flag(22), flag(23)],
            saturate: flag(24),
            wrap: flag(25),
            lanes: word >> 26 & 3,
        }
    }

    fn compute(self, a: i64, b: i64) -> i64 {
        let distance = if self.wrap { b & 31 } else { b.clamp(0, 32) };
        match self.operation {
            Operation::Add => a + b,
            Operation::Subtract => a - b,
            Operation::Difference => (a - b).abs(),
            Operation::Average => (a + b + i64::from(a + b >= 0)) >> 1,
            Operation::Min => a.min(b),
            Operation::Max => a.max(b),
            Operation::ShiftLeft => a << distance,
            Operation::ShiftRight => a >> distance,
            Operation::Equal => i64::from(a == b),
            Operation::NotEqual => i64::from(a != b),
            Operation::Less => i64::from(a < b),
            Operation::LessOrEqual => i64::from(a <= b),
            Operation::Greater => i64::from(a > b),
            Operation::GreaterOrEqual => i64::from(a >= b),
        }
    }

    fn apply(self, a: u32, b: u32, c: u32) -> u32 {
        let [a_signed, b_signed, signed] = self.signed;
        let mut out = c;
        for lane in 0..1 << self.lanes {
            let shifted = |part: Part| Part {
                shift: (part.shift + lane * part.bits) & 31,
                ..part
            };
            let dest = shifted(self.dest);
            let (x, y) = (
                shifted(self.a).extract(a, a_signed),
                shifted(self.b).extract(b, b_signed),
            );
            let value = self.compute(x, y);
            let value = if self.saturate {
                dest.clamp(value, signed)
            } else {
                value
            };
            let whole = Part::WHOLE.extract(out, signed);
            let result = Part::WHOLE.extract(value as u32, signed);
            out = match self.merge {
                Merge::Insert => dest.insert(out, value),
                Merge::Add => out.wrapping_add(value as u32),
                Merge::Min => whole.min(result) as u32,
                Merge::Max => whole.max(result) as u32,
            };
        }
        out
    }
}

/// Decoded `vmad`: a product of two parts, plus the third source, shifted right by `scale`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Multiply {
    pub a: Part,
    pub b: Part,
    /// Whether the first two sources are signed.
    pub signed: [bool; 2],
    /// Whether the product is negated.
    pub negate_product: bool,
    /// Whether the third source is negated.
    pub negate_sum: bool,
    /// Whether 1 is added to the sum (`.po`).
    pub plus_one: bool,
    pub saturate: bool,
    /// Number of low bits of the sum that are dropped.
    pub scale: u32,
}

impl Multiply {
    /// Encodes the instruction in one word, a handler's last operand.
    pub(crate) fn encode(self) -> u32 {
        let flag = |set: bool, bit: u32| u32::from(set) << bit;
        self.a.encode()
            | self.b.encode() << 5
            | flag(self.signed[0], 10)
            | flag(self.signed[1], 11)
            | flag(self.negate_product, 12)
            | flag(self.negate_sum, 13)
            | flag(self.plus_one, 14)
            | flag(self.saturate, 15)
            | self.scale << 16
    }

    fn decode(word: u32) -> Self {
        let flag = |bit: u32| word >> bit & 1 == 1;
        Self {
            a: Part::decode(word),
            b: Part::decode(word >> 5),
            signed: [flag(10), flag(11)],
            negate_product: flag(12),
            negate_sum: flag(13),
            plus_one: flag(14),
            saturate: flag(15),
            scale: word >> 16 & 31,
        }
    }

    fn apply(self, a: u32, b: u32, c: u32) -> u32 {
        let [a_signed, b_signed] = self.signed;
        let signed = a_signed || b_signed || self.negate_product || self.negate_sum;
        let product =
            i128::from(self.a.extract(a, a_signed)) * i128::from(self.b.extract(b, b_signed));
        let addend = i128::from(Part::WHOLE.extract(c, signed));
        let product = if self.negate_product {
            -product
        } else {
            product
        };
        let addend = if self.negate_sum { -addend } else { addend };
        let sum = (product + addend + i128::from(self.plus_one)) >> self.scale;
        match (self.saturate, signed) {
            (false, _) => sum as u32,
            (true, false) => sum.clamp(0, u32::MAX.into()) as u32,
            (true, true) => sum.clamp(i32::MIN.into(), i32::MAX.into()) as u32,
        }
    }
}

/// Returns the handler of `vmad`, which reads its [`Multiply`], encoded, from its last operand.
pub(crate) fn multiplier() -> Alu {
    |rows, mask, ops| {
        let multiply = Multiply::decode(ops[4]);
        super::three::<u32, u32, u32, u32>(rows, mask, ops, |a, b, c| multiply.apply(a, b, c));
    }
}

/// Returns the handler of all other video instructions, which reads its [`Video`], encoded, from
/// its last operand.
pub(crate) fn handler() -> Alu {
    |rows, mask, ops| {
        let video = Video::decode(ops[4]);
        super::three::<u32, u32, u32, u32>(rows, mask, ops, |a, b, c| video.apply(a, b, c));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_survives_its_word() {
        for (index, operation) in OPERATIONS.into_iter().enumerate() {
            let video = Video {
                operation,
                merge: MERGES[index % 4],
                a: Part { bits: 8, shift: 24 },
                b: Part {
                    bits: 16,
                    shift: 16,
                },
                dest: Part::WHOLE,
                signed: [index % 2 == 0, index % 3 == 0, index % 5 == 0],
                saturate: index % 2 == 1,
                wrap: index % 3 == 1,
                lanes: 0,
            };
            assert_eq!(Video::decode(video.encode()), video);
        }
        for index in 0..6 {
            let multiply = Multiply {
                a: Part { bits: 8, shift: 8 },
                b: Part::WHOLE,
                signed: [index == 0, index == 1],
                negate_product: index == 2,
                negate_sum: index == 3,
                plus_one: index == 4,
                saturate: index == 5,
                scale: [0, 7, 15][index % 3],
            };
            assert_eq!(Multiply::decode(multiply.encode()), multiply);
        }
    }

    #[test]
    fn a_negated_product_or_sum_is_signed() {
        let plain = Multiply {
            a: Part::WHOLE,
            b: Part::WHOLE,
            signed: [false; 2],
            negate_product: false,
            negate_sum: false,
            plus_one: false,
            saturate: true,
            scale: 0,
        };
        let product = Multiply {
            negate_product: true,
            ..plain
        };
        assert_eq!(product.apply(u32::MAX, 2, 5), 1 << 31);
        assert_eq!(product.apply(3, 2, u32::MAX), (-7_i32).cast_unsigned());
        let sum = Multiply {
            negate_sum: true,
            ..plain
        };
        assert_eq!(sum.apply(3, 2, 7), u32::MAX);
        let average = Multiply {
            plus_one: true,
            scale: 7,
            ..plain
        };
        assert_eq!(average.apply(1, 100, 27), 1);
    }
}
