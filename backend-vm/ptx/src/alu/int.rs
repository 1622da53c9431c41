//! Integer and bit operations (PTX ISA 9.7.1, 9.7.2, 9.7.8).
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::cast_lossless,
    reason = "arithmetic on bit patterns of fixed width"
)]
#![allow(clippy::unnecessary_cast, reason = "one expression serves every width")]

use super::{Alu, alu1, alu2, alu3, alu4, by_bits, by_int};
use crate::parse::ast::Type;

/// Part of a product that an instruction stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The low half.
    Low,
    /// The high half.
    High,
    /// The whole product, in a register twice as wide.
    Wide,
}

/// Returns the handler of a one-operand instruction without modifiers.
pub(crate) fn unary(name: &str, ty: Type) -> Option<Alu> {
    match name {
        "neg" => by_int!(ty, T => alu1!(T => T, |a| a.wrapping_neg())),
        "abs" => match ty {
            Type::S16 => Some(alu1!(i16 => i16, |a| a.wrapping_abs())),
            Type::S32 => Some(alu1!(i32 => i32, |a| a.wrapping_abs())),
            Type::S64 => Some(alu1!(i64 => i64, |a| a.wrapping_abs())),
            _ => None,
        },
        "not" => by_bits!(ty, T => alu1!(T => T, |a| !a)),
        "cnot" => by_bits!(ty, T => alu1!(T => T, |a| (a == 0) as T)),
        "popc" => by_bits!(ty, T => alu1!(T => u32, |a| a.count_ones())),
        "clz" => by_bits!(ty, T => alu1!(T => u32, |a| a.leading_zeros())),
        "brev" => by_bits!(ty, T => alu1!(T => T, |a| a.reverse_bits())),
        "mov" => by_bits!(ty, T => alu1!(T => T, |a| a)),
        _ => None,
    }
}

/// Returns the handler of `bfind`: the position of the most significant bit that differs from the
/// sign.
pub(crate) fn find_bit(ty: Type, shift_amount: bool) -> Option<Alu> {
    macro_rules! find {
        ($u:ty, $s:ty, $signed:expr, $shift:expr) => {
            alu1!($s => u32, |a| {
                let bits = if $signed && (a as i64) < 0 { !a } else { a } as $u;
                if bits == 0 { u32::MAX } else if $shift { bits.leading_zeros() } else { <$u>::BITS - 1 - bits.leading_zeros() }
            })
        };
    }
    Some(match (ty, shift_amount) {
        (Type::U32, false) => find!(u32, u32, false, false),
        (Type::U32, true) => find!(u32, u32, false, true),
        (Type::S32, false) => find!(u32, i32, true, false),
        (Type::S32, true) => find!(u32, i32, true, true),
        (Type::U64, false) => find!(u64, u64, false, false),
        (Type::U64, true) => find!(u64, u64, false, true),
        (Type::S64, false) => find!(u64, i64, true, false),
        (Type::S64, true) => find!(u64, i64, true, true),
        _ => return None,
    })
}

/// Returns the handler of a two-operand instruction without modifiers.
pub(crate) fn binary(name: &str, ty: Type) -> Option<Alu> {
    match name {
        "add" => by_int!(ty, T => alu2!(T, T => T, |a, b| a.wrapping_add(b))),
        "sub" => by_int!(ty, T => alu2!(T, T => T, |a, b| a.wrapping_sub(b))),
        "div" => {
            by_int!(ty, T => alu2!(T, T => T, |a, b| if b == 0 { !0 } else { a.wrapping_div(b) }))
        }
        "rem" => {
            by_int!(ty, T => alu2!(T, T => T, |a, b| if b == 0 { a } else { a.wrapping_rem(b) }))
        }
        "min" => by_int!(ty, T => alu2!(T, T => T, |a, b| a.min(b))),
        "max" => by_int!(ty, T => alu2!(T, T => T, |a, b| a.max(b))),
        "and" => by_bits!(ty, T => alu2!(T, T => T, |a, b| a & b)),
        "or" => by_bits!(ty, T => alu2!(T, T => T, |a, b| a | b)),
        "xor" => by_bits!(ty, T => alu2!(T, T => T, |a, b| a ^ b)),
        "shl" => by_bits!(ty, T => alu2!(T, u32 => T, |a, b| if b < T::BITS { a << b } else { 0 })),
        "shr" => by_int!(ty, T => alu2!(T, u32 => T, |a, b| {
            if b < T::BITS { a >> b } else if T::MIN == 0 { 0 } else { a >> (T::BITS - 1) }
        })),
        _ => None,
    }
}

/// Returns the handler of `add.sat.s32`, `sub.sat.s32`, and `min` or `max` with `.relu`.
pub(crate) fn saturating(name: &str, relu: bool) -> Option<Alu> {
    match (name, relu) {
        ("add", false) => Some(alu2!(i32, i32 => i32, |a, b| a.saturating_add(b))),
        ("sub", false) => Some(alu2!(i32, i32 => i32, |a, b| a.saturating_sub(b))),
        ("min", true) => Some(alu2!(i32, i32 => i32, |a, b| a.min(b).max(0))),
        ("max", true) => Some(alu2!(i32, i32 => i32, |a, b| a.max(b).max(0))),
        _ => None,
    }
}

/// Returns the handler of `add`, `min` or `max` on two 16-bit lanes.
pub(crate) fn packed(name: &str, ty: &str, relu: bool) -> Option<Alu> {
    macro_rules! pair {
        ($t:ty, $f:expr) => {
            alu2!(u32, u32 => u32, |a, b| {
                let f: fn($t, $t) -> $t = $f;
                let low = f(a as $t, b as $t) as u16;
                let high = f((a >> 16) as $t, (b >> 16) as $t) as u16;
                u32::from(high) << 16 | u32::from(low)
            })
        };
    }
    Some(match (name, ty, relu) {
        ("add", "u16x2" | "s16x2", false) => pair!(u16, |a, b| a.wrapping_add(b)),
        ("min", "u16x2", false) => pair!(u16, |a, b| a.min(b)),
        ("max", "u16x2", false) => pair!(u16, |a, b| a.max(b)),
        ("min", "s16x2", false) => pair!(i16, |a, b| a.min(b)),
        ("max", "s16x2", false) => pair!(i16, |a, b| a.max(b)),
        ("min", "s16x2", true) => pair!(i16, |a, b| a.min(b).max(0)),
        ("max", "s16x2", true) => pair!(i16, |a, b| a.max(b).max(0)),
        _ => return None,
    })
}

/// Returns the handler of `mul`.
pub(crate) fn multiply(part: Part, ty: Type) -> Option<Alu> {
    match (part, ty) {
        (Part::Low, _) => by_int!(ty, T => alu2!(T, T => T, |a, b| a.wrapping_mul(b))),
        (Part::High, Type::U64) => {
            Some(alu2!(u64, u64 => u64, |a, b| ((a as u128 * b as u128) >> 64) as u64))
        }
        (Part::High, Type::S64) => {
            Some(alu2!(i64, i64 => i64, |a, b| ((a as i128 * b as i128) >> 64) as i64))
        }
        (Part::High, Type::U32) => {
            Some(alu2!(u32, u32 => u32, |a, b| ((a as u64 * b as u64) >> 32) as u32))
        }
        (Part::High, Type::S32) => {
            Some(alu2!(i32, i32 => i32, |a, b| ((a as i64 * b as i64) >> 32) as i32))
        }
        (Part::High, Type::U16) => {
            Some(alu2!(u16, u16 => u16, |a, b| ((a as u32 * b as u32) >> 16) as u16))
        }
        (Part::High, Type::S16) => {
            Some(alu2!(i16, i16 => i16, |a, b| ((a as i32 * b as i32) >> 16) as i16))
        }
        (Part::High, _) => None,
        (Part::Wide, Type::U16) => Some(alu2!(u16, u16 => u32, |a, b| a as u32 * b as u32)),
        (Part::Wide, Type::S16) => Some(alu2!(i16, i16 => i32, |a, b| a as i32 * b as i32)),
        (Part::Wide, Type::U32) => Some(alu2!(u32, u32 => u64, |a, b| a as u64 * b as u64)),
        (Part::Wide, Type::S32) => Some(alu2!(i32, i32 => i64, |a, b| a as i64 * b as i64)),
        (Part::Wide, _) => None,
    }
}

/// Returns the handler of `mad`.
pub(crate) fn multiply_add(part: Part, ty: Type, saturate: bool) -> Option<Alu> {
    if saturate {
        return (part == Part::High && ty == Type::S32).then(
            || alu3!(i32, i32, i32 => i32, |a, b, c| (((a as i64 * b as i64) >> 32) as i32).saturating_add(c)),
        );
    }
    match (part, ty) {
        (Part::Low, _) => {
            by_int!(ty, T => alu3!(T, T, T => T, |a, b, c| a.wrapping_mul(b).wrapping_add(c)))
        }
        (Part::High, Type::U16) => Some(
            alu3!(u16, u16, u16 => u16, |a, b, c| (((a as u32 * b as u32) >> 16) as u16).wrapping_add(c)),
        ),
        (Part::High, Type::S16) => Some(
            alu3!(i16, i16, i16 => i16, |a, b, c| (((a as i32 * b as i32) >> 16) as i16).wrapping_add(c)),
        ),
        (Part::High, Type::U32) => Some(
            alu3!(u32, u32, u32 => u32, |a, b, c| (((a as u64 * b as u64) >> 32) as u32).wrapping_add(c)),
        ),
        (Part::High, Type::S32) => Some(
            alu3!(i32, i32, i32 => i32, |a, b, c| (((a as i64 * b as i64) >> 32) as i32).wrapping_add(c)),
        ),
        (Part::High, Type::U64) => Some(
            alu3!(u64, u64, u64 => u64, |a, b, c| (((a as u128 * b as u128) >> 64) as u64).wrapping_add(c)),
        ),
        (Part::High, Type::S64) => Some(
            alu3!(i64, i64, i64 => i64, |a, b, c| (((a as i128 * b as i128) >> 64) as i64).wrapping_add(c)),
        ),
        (Part::High, _) => None,
        (Part::Wide, Type::U16) => {
            Some(alu3!(u16, u16, u32 => u32, |a, b, c| (a as u32 * b as u32).wrapping_add(c)))
        }
        (Part::Wide, Type::S16) => {
            Some(alu3!(i16, i16, i32 => i32, |a, b, c| (a as i32 * b as i32).wrapping_add(c)))
        }
        (Part::Wide, Type::U32) => {
            Some(alu3!(u32, u32, u64 => u64, |a, b, c| (a as u64 * b as u64).wrapping_add(c)))
        }
        (Part::Wide, Type::S32) => {
            Some(alu3!(i32, i32, i64 => i64, |a, b, c| (a as i64 * b as i64).wrapping_add(c)))
        }
        (Part::Wide, _) => None,
    }
}

fn low24(a: u32) -> u64 {
    u64::from(a & 0xff_ffff)
}

fn signed24(a: u32) -> i64 {
    i64::from((a << 8) as i32 >> 8)
}

/// Returns the handler of `mul24` and `mad24` (the third operand is a zero row for `mul24`).
pub(crate) fn multiply_add24(part: Part, ty: Type, saturate: bool) -> Option<Alu> {
    Some(match (part, ty) {
        (Part::High, Type::S32) if saturate => {
            alu3!(u32, u32, u32 => i32, |a, b, c| (((signed24(a) * signed24(b)) >> 16) as i32).saturating_add(c as i32))
        }
        _ if saturate => return None,
        (Part::Low, Type::U32) => {
            alu3!(u32, u32, u32 => u32, |a, b, c| ((low24(a) * low24(b)) as u32).wrapping_add(c))
        }
        (Part::Low, Type::S32) => {
            alu3!(u32, u32, u32 => i32, |a, b, c| ((signed24(a) * signed24(b)) as i32).wrapping_add(c as i32))
        }
        (Part::High, Type::U32) => {
            alu3!(u32, u32, u32 => u32, |a, b, c| (((low24(a) * low24(b)) >> 16) as u32).wrapping_add(c))
        }
        (Part::High, Type::S32) => {
            alu3!(u32, u32, u32 => i32, |a, b, c| (((signed24(a) * signed24(b)) >> 16) as i32).wrapping_add(c as i32))
        }
        _ => return None,
    })
}

/// Returns the handler of `sad`.
pub(crate) fn sum_of_differences(ty: Type) -> Option<Alu> {
    by_int!(ty, T => alu3!(T, T, T => T, |a, b, c| c.wrapping_add(if a < b { b.wrapping_sub(a) } else { a.wrapping_sub(b) })))
}

/// Returns the handler of `bfe`.
pub(crate) fn extract(ty: Type) -> Option<Alu> {
    fn field(value: u64, bits: u32, signed: bool, pos: u32, len: u32) -> u64 {
        let (pos, len) = (pos & 0xff, len & 0xff);
        if len == 0 {
            return 0;
        }
        let end = (pos + len - 1).min(bits - 1);
        let negative = signed && value >> end & 1 == 1;
        let body = if pos < bits { value >> pos } else { 0 };
        let kept = if pos < bits { len.min(bits - pos) } else { 0 };
        let mask = if kept >= 64 {
            u64::MAX
        } else {
            (1 << kept) - 1
        };
        (body & mask) | if negative { !mask } else { 0 }
    }
    Some(match ty {
        Type::U32 => alu3!(u32, u32, u32 => u32, |a, b, c| field(a as u64, 32, false, b, c) as u32),
        Type::S32 => alu3!(u32, u32, u32 => i32, |a, b, c| field(a as u64, 32, true, b, c) as i32),
        Type::U64 => alu3!(u64, u32, u32 => u64, |a, b, c| field(a, 64, false, b, c)),
        Type::S64 => alu3!(u64, u32, u32 => u64, |a, b, c| field(a, 64, true, b, c)),
        _ => return None,
    })
}

/// Returns the handler of `bfi`, which inserts the first operand into the second.
pub(crate) fn insert(ty: Type) -> Option<Alu> {
    fn put(a: u64, b: u64, bits: u32, pos: u32, len: u32) -> u64 {
        let (pos, len) = (pos & 0xff, len & 0xff);
        if len == 0 || pos >= bits {
            return b;
        }
        let len = len.min(bits - pos);
        let mask = if len >= 64 { u64::MAX } else { (1 << len) - 1 } << pos;
        (b & !mask) | (a << pos & mask)
    }
    match ty {
        Type::B32 => Some(
            alu4!(u32, u32, u32, u32 => u32, |a, b, c, d| put(a as u64, b as u64, 32, c, d) as u32),
        ),
        Type::B64 => Some(alu4!(u64, u64, u32, u32 => u64, |a, b, c, d| put(a, b, 64, c, d))),
        _ => None,
    }
}

/// Returns the handler of `bmsk` or `szext`.
pub(crate) fn mask_or_extend(name: &str, wrap: bool, ty: Type) -> Option<Alu> {
    fn ones(pos: u32, len: u32) -> u32 {
        let above = if len >= 32 { u32::MAX } else { (1 << len) - 1 };
        if pos >= 32 { 0 } else { above << pos }
    }
    fn extend(a: u32, bits: u32, signed: bool) -> u32 {
        if bits >= 32 {
            return a;
        }
        if bits == 0 {
            return 0;
        }
        let shift = 32 - bits;
        if signed {
            ((a << shift) as i32 >> shift) as u32
        } else {
            a << shift >> shift
        }
    }
    Some(match (name, wrap, ty) {
        ("bmsk", false, Type::B32) => alu2!(u32, u32 => u32, ones),
        ("bmsk", true, Type::B32) => alu2!(u32, u32 => u32, |a, b| ones(a & 31, b & 31)),
        ("szext", false, Type::U32) => alu2!(u32, u32 => u32, |a, b| extend(a, b, false)),
        ("szext", true, Type::U32) => alu2!(u32, u32 => u32, |a, b| extend(a, b & 31, false)),
        ("szext", false, Type::S32) => alu2!(u32, u32 => u32, |a, b| extend(a, b, true)),
        ("szext", true, Type::S32) => alu2!(u32, u32 => u32, |a, b| extend(a, b & 31, true)),
        _ => return None,
    })
}

/// Returns the handler of `shf`, a funnel shift of the pair `(b, a)`.
pub(crate) fn funnel(left: bool, wrap: bool) -> Alu {
    fn pair(a: u32, b: u32) -> u64 {
        u64::from(b) << 32 | u64::from(a)
    }
    match (left, wrap) {
        (true, true) => {
            alu3!(u32, u32, u32 => u32, |a, b, c| ((pair(a, b) << (c & 31)) >> 32) as u32)
        }
        (true, false) => {
            alu3!(u32, u32, u32 => u32, |a, b, c| ((pair(a, b) << c.min(32)) >> 32) as u32)
        }
        (false, true) => alu3!(u32, u32, u32 => u32, |a, b, c| (pair(a, b) >> (c & 31)) as u32),
        (false, false) => alu3!(u32, u32, u32 => u32, |a, b, c| (pair(a, b) >> c.min(32)) as u32),
    }
}

/// Returns the handler of `lop3`: any function of three bits, given as its truth table in the
/// fourth operand.
pub(crate) fn logic3() -> Alu {
    alu4!(u32, u32, u32, u32 => u32, |a, b, c, table| {
        let mut out = 0;
        for row in 0..8_u32 {
            let a = if row & 4 == 0 { !a } else { a };
            let b = if row & 2 == 0 { !b } else { b };
            let c = if row & 1 == 0 { !c } else { c };
            out |= a & b & c & (table >> row & 1).wrapping_neg();
        }
        out
    })
}

/// Returns the handler of `prmt` in its default mode or one of its six special ones.
pub(crate) fn permute(mode: Option<&str>) -> Option<Alu> {
    fn pick(pair: u64, selector: u32) -> u32 {
        let byte = (pair >> (8 * (selector & 7))) as u8;
        u32::from(if selector & 8 == 0 {
            byte
        } else {
            ((byte as i8) >> 7) as u8
        })
    }
    fn pair(a: u32, b: u32) -> u64 {
        u64::from(b) << 32 | u64::from(a)
    }
    fn select(a: u32, b: u32, selectors: [u32; 4]) -> u32 {
        let pair = pair(a, b);
        selectors
            .iter()
            .rev()
            .fold(0, |out, &selector| out << 8 | pick(pair, selector))
    }
    Some(match mode {
        None => {
            alu3!(u32, u32, u32 => u32, |a, b, c| select(a, b, [c & 15, c >> 4 & 15, c >> 8 & 15, c >> 12 & 15]))
        }
        Some("f4e") => {
            alu3!(u32, u32, u32 => u32, |a, b, c| { let c = c & 3; select(a, b, [c, c + 1, c + 2, c + 3]) })
        }
        Some("b4e") => alu3!(u32, u32, u32 => u32, |a, b, c| {
            let c = c & 3;
            select(a, b, [c, (c + 7) & 7, (c + 6) & 7, (c + 5) & 7])
        }),
        Some("rc8") => alu3!(u32, u32, u32 => u32, |a, b, c| select(a, b, [c & 3; 4])),
        Some("ecl") => alu3!(u32, u32, u32 => u32, |a, b, c| {
            let c = c & 3;
            select(a, b, [c, 1.max(c), 2.max(c), 3])
        }),
        Some("ecr") => alu3!(u32, u32, u32 => u32, |a, b, c| {
            let c = c & 3;
            select(a, b, [0, 1.min(c), 2.min(c), c])
        }),
        Some("rc16") => {
            alu3!(u32, u32, u32 => u32, |a, b, c| { let c = c << 1 & 2; select(a, b, [c, c + 1, c, c + 1]) })
        }
        Some(_) => return None,
    })
}

/// Returns the handler of `dp4a` or `dp2a`: sums of products of bytes.
pub(crate) fn dot(name: &str, high: bool, a_signed: bool, b_signed: bool) -> Option<Alu> {
    fn byte(value: u32, index: u32, signed: bool) -> i32 {
        let byte = (value >> (8 * index)) as u8;
        if signed {
            i32::from(byte as i8)
        } else {
            i32::from(byte)
        }
    }
    fn half(value: u32, index: u32, signed: bool) -> i32 {
        let half = (value >> (16 * index)) as u16;
        if signed {
            i32::from(half as i16)
        } else {
            i32::from(half)
        }
    }
    macro_rules! dp4a {
        ($x:expr, $y:expr) => {
            alu3!(u32, u32, u32 => u32, |a, b, c| {
                (0..4).fold(c, |sum, i| sum.wrapping_add((byte(a, i, $x) * byte(b, i, $y)) as u32))
            })
        };
    }
    macro_rules! dp2a {
        ($x:expr, $y:expr, $base:expr) => {
            alu3!(u32, u32, u32 => u32, |a, b, c| {
                (0..2).fold(c, |sum, i| sum.wrapping_add((half(a, i, $x) * byte(b, i + $base, $y)) as u32))
            })
        };
    }
    Some(match (name, high, a_signed, b_signed) {
        ("dp4a", _, false, false) => dp4a!(false, false),
        ("dp4a", _, false, true) => dp4a!(false, true),
        ("dp4a", _, true, false) => dp4a!(true, false),
        ("dp4a", _, true, true) => dp4a!(true, true),
        ("dp2a", false, false, false) => dp2a!(false, false, 0),
        ("dp2a", false, false, true) => dp2a!(false, true, 0),
        ("dp2a", false, true, false) => dp2a!(true, false, 0),
        ("dp2a", false, true, true) => dp2a!(true, true, 0),
        ("dp2a", true, false, false) => dp2a!(false, false, 2),
        ("dp2a", true, false, true) => dp2a!(false, true, 2),
        ("dp2a", true, true, false) => dp2a!(true, false, 2),
        ("dp2a", true, true, true) => dp2a!(true, true, 2),
        _ => return None,
    })
}

/// Returns the handler of `fns`: the position of the n-th set bit from a base.
pub(crate) fn nth_set() -> Alu {
    fn find(mask: u32, base: u32, offset: i32) -> u32 {
        if base >= 32 {
            return u32::MAX;
        }
        if offset == 0 {
            return if mask >> base & 1 == 1 {
                base
            } else {
                u32::MAX
            };
        }
        let step = offset.signum();
        let mut left = offset.unsigned_abs();
        let mut at = base as i32;
        while (0..32).contains(&at) {
            if mask >> at & 1 == 1 {
                left -= 1;
                if left == 0 {
                    return at as u32;
                }
            }
            at += step;
        }
        u32::MAX
    }
    alu3!(u32, u32, i32 => u32, find)
}
