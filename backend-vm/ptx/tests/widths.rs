//! Compares integer arithmetic and conversions of every width, sign and rounding with references
//! that compute in 128 bits.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "bit patterns of every width"
)]

mod common;

use common::eval::eval;

/// Integer type.
#[derive(Clone, Copy)]
struct Int {
    name: &'static str,
    bits: u32,
    signed: bool,
}

const fn int(name: &'static str, bits: u32, signed: bool) -> Int {
    Int { name, bits, signed }
}

const BYTES: [Int; 2] = [int("u8", 8, false), int("s8", 8, true)];
const INTS: [Int; 6] = [
    int("u16", 16, false),
    int("s16", 16, true),
    int("u32", 32, false),
    int("s32", 32, true),
    int("u64", 64, false),
    int("s64", 64, true),
];

impl Int {
    /// Returns the class of registers for the type.
    fn class(self) -> &'static str {
        match self.bits {
            8 | 16 => "%h",
            32 => "%r",
            _ => "%rd",
        }
    }

    fn mask(self) -> u64 {
        u64::MAX >> (64 - self.bits)
    }

    /// Returns the value of a register's low bits.
    fn value(self, bits: u64) -> i128 {
        let bits = bits & self.mask();
        if self.signed && bits >> (self.bits - 1) == 1 {
            i128::from(bits) - (1_i128 << self.bits)
        } else {
            i128::from(bits)
        }
    }

    fn bits(self, value: i128) -> u64 {
        value as u64 & self.mask()
    }

    fn least(self) -> i128 {
        if self.signed {
            -(1 << (self.bits - 1))
        } else {
            0
        }
    }

    fn greatest(self) -> i128 {
        self.least() + (1_i128 << self.bits) - 1
    }

    /// Returns the instruction that moves the result register to `%out`.
    fn finish(self) -> String {
        let (class, bits) = (self.class(), if self.bits == 8 { 16 } else { self.bits });
        if bits == 64 {
            "mov.b64 %out, %rd10;".to_owned()
        } else {
            format!("cvt.u64.u{bits} %out, {class}10;")
        }
    }
}

/// Values of every kind and every width.
const SAMPLES: [u64; 14] = [
    0,
    1,
    2,
    7,
    0x7f,
    0x80,
    0x7fff,
    0x8000,
    0x7fff_ffff,
    0x8000_0000,
    0x1234_5678_9abc_def0,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

fn run(op: &str, ty: Int, inputs: &[u64]) -> u64 {
    let class = ty.class();
    let sources: Vec<String> = (0..inputs.len()).map(|i| format!("{class}{i}")).collect();
    let body = format!("{op} {class}10, {}; {}", sources.join(", "), ty.finish());
    eval(&body, inputs) & ty.mask()
}

/// Definition of an operation on two integers.
type Definition<'a> = &'a dyn Fn(i128, i128) -> i128;

#[test]
fn integer_arithmetic_of_every_width() {
    for ty in INTS {
        let high = |value: i128| value >> ty.bits;
        let operations: [(&str, Definition<'_>); 8] = [
            ("add", &|a, b| a + b),
            ("sub", &|a, b| a - b),
            ("mul.lo", &|a, b| a.wrapping_mul(b)),
            ("mul.hi", &|a, b| {
                // The product of two 64-bit integers fits 128 bits if one sign is known.
                if ty.bits == 64 && !ty.signed {
                    ((a as u128 * b as u128) >> 64) as i128
                } else {
                    high(a * b)
                }
            }),
            ("div", &|a, b| if b == 0 { -1 } else { a / b }),
            ("rem", &|a, b| if b == 0 { a } else { a % b }),
            ("min", &|a, b| a.min(b)),
            ("max", &|a, b| a.max(b)),
        ];
        for (name, f) in operations {
            let op = format!("{name}.{}", ty.name);
            for a in SAMPLES {
                for b in SAMPLES {
                    // The result of a division by zero is not specified.
                    if matches!(name, "div" | "rem") && ty.value(b) == 0 {
                        continue;
                    }
                    let expected = ty.bits(f(ty.value(a), ty.value(b)));
                    assert_eq!(run(&op, ty, &[a, b]), expected, "{op} {a:x} {b:x}");
                }
            }
        }
    }
}

#[test]
fn integer_arithmetic_of_three_operands() {
    for ty in INTS {
        for a in SAMPLES {
            for b in SAMPLES.into_iter().step_by(3) {
                let c = a.rotate_left(17) ^ b;
                let (x, y, z) = (ty.value(a), ty.value(b), ty.value(c));
                let op = format!("mad.lo.{}", ty.name);
                let expected = ty.bits(x.wrapping_mul(y).wrapping_add(z));
                assert_eq!(run(&op, ty, &[a, b, c]), expected, "{op} {a:x} {b:x} {c:x}");
                let op = format!("sad.{}", ty.name);
                let expected = ty.bits((x - y).abs() + z);
                assert_eq!(run(&op, ty, &[a, b, c]), expected, "{op} {a:x} {b:x} {c:x}");
            }
        }
    }
}

#[test]
fn shifts_and_fields_of_every_width() {
    for ty in INTS {
        let class = ty.class();
        for a in SAMPLES {
            for distance in [0, 1, 7, 15, 16, 31, 32, 33, 63, 64, 200] {
                let shift = |op: &str| {
                    let body = format!("{op} {class}10, {class}0, %r1; {}", ty.finish());
                    eval(&body, &[a, distance]) & ty.mask()
                };
                let far = distance.min(64) as u32;
                let right = ty.bits(ty.value(a) >> far);
                assert_eq!(
                    shift(&format!("shr.{}", ty.name)),
                    right,
                    "{} {a:x} {far}",
                    ty.name
                );
                let left = ty.bits(((u128::from(a)) << far) as i128);
                assert_eq!(
                    shift(&format!("shl.b{}", ty.bits)),
                    left,
                    "{} {a:x} {far}",
                    ty.name
                );
            }
        }
        if ty.bits == 16 {
            continue;
        }
        for a in SAMPLES {
            for at in [0_u32, 3, 8, 31, 40, 63, 70] {
                for length in [0_u32, 1, 5, 32, 64, 200] {
                    // Bit by bit, as the ISA defines it.
                    let last = ty.bits - 1;
                    let sign = match length {
                        0 => 0,
                        _ if !ty.signed => 0,
                        _ => a >> (at + length - 1).min(last) & 1,
                    };
                    let expected = (0..ty.bits).fold(0, |out, bit| {
                        let inside = bit < length && at + bit <= last;
                        out | if inside { a >> (at + bit) & 1 } else { sign } << bit
                    });
                    let body = format!(
                        "bfe.{} {class}10, {class}0, {at}, {length}; {}",
                        ty.name,
                        ty.finish()
                    );
                    assert_eq!(eval(&body, &[a]) & ty.mask(), expected, "{body} {a:x}");
                }
            }
        }
    }
}

#[test]
fn integers_become_integers() {
    for from in INTS {
        for to in INTS.into_iter().chain(BYTES) {
            for a in SAMPLES {
                let (source, dest) = (from.class(), to.class());
                let value = from.value(a);
                for (saturate, wanted) in [
                    ("", value),
                    (".sat", value.clamp(to.least(), to.greatest())),
                ] {
                    let body = format!(
                        "cvt{saturate}.{}.{} {dest}10, {source}0; {}",
                        to.name,
                        from.name,
                        to.finish()
                    );
                    let got = eval(&body, &[a]) & to.mask();
                    assert_eq!(got, to.bits(wanted), "{body} {a:x}");
                }
            }
        }
    }
}

const ROUNDINGS: [&str; 4] = ["rn", "rz", "rm", "rp"];

/// Picks the directed result of an exact value: `near` is the nearest, `below` and `above` are its
/// neighbours, and `order` compares it with the exact value.
fn pick<T: Copy>(
    rounding: &str,
    negative: bool,
    order: std::cmp::Ordering,
    near: T,
    below: T,
    above: T,
) -> T {
    use std::cmp::Ordering::{Greater, Less};
    match (rounding, order) {
        ("rm", Greater) => below,
        ("rp", Less) => above,
        ("rz", Greater) if !negative => below,
        ("rz", Less) if negative => above,
        _ => near,
    }
}

#[test]
fn integers_become_floats() {
    for from in INTS {
        for a in SAMPLES
            .into_iter()
            .chain([0x0100_0001, 0x0020_0000_0000_0001, 0x7fff_ff7f])
        {
            let value = from.value(a);
            for rounding in ROUNDINGS {
                let source = from.class();
                let near = value as f32;
                let order = (near as i128).cmp(&value);
                let single = pick(
                    rounding,
                    value < 0,
                    order,
                    near,
                    near.next_down(),
                    near.next_up(),
                );
                let body = format!(
                    "cvt.{rounding}.f32.{} %f10, {source}0; mov.b32 %r10, %f10; cvt.u64.u32 %out, %r10;",
                    from.name
                );
                assert_eq!(
                    eval(&body, &[a]),
                    u64::from(single.to_bits()),
                    "{body} {a:x}"
                );
                let near = value as f64;
                let order = (near as i128).cmp(&value);
                let double = pick(
                    rounding,
                    value < 0,
                    order,
                    near,
                    near.next_down(),
                    near.next_up(),
                );
                let body = format!(
                    "cvt.{rounding}.f64.{} %d10, {source}0; mov.b64 %out, %d10;",
                    from.name
                );
                assert_eq!(eval(&body, &[a]), double.to_bits(), "{body} {a:x}");
            }
        }
    }
}

const FLOATS: [f64; 22] = [
    0.0,
    -0.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    -1.25,
    3.75,
    127.5,
    -128.75,
    255.5,
    32_767.5,
    65_535.75,
    2_147_483_647.5,
    -2_147_483_649.0,
    4_294_967_296.0,
    9.3e18,
    -9.3e18,
    1.9e19,
    f64::INFINITY,
    f64::NEG_INFINITY,
];

#[test]
fn floats_become_integers() {
    for to in INTS.into_iter().chain(BYTES) {
        for x in FLOATS {
            for (rounding, f) in [
                ("rni", f64::round_ties_even as fn(f64) -> f64),
                ("rzi", f64::trunc),
                ("rmi", f64::floor),
                ("rpi", f64::ceil),
            ] {
                let dest = to.class();
                let clamp = |x: f64| {
                    // Conversions to 128 bits clamp infinities themselves.
                    to.bits((f(x) as i128).clamp(to.least(), to.greatest()))
                };
                let single = x as f32;
                let body = format!(
                    "cvt.{rounding}.{}.f32 {dest}10, %f0; {}",
                    to.name,
                    to.finish()
                );
                let got = eval(&body, &[u64::from(single.to_bits())]) & to.mask();
                assert_eq!(got, clamp(f64::from(single)), "{body} {single}");
                let body = format!(
                    "cvt.{rounding}.{}.f64 {dest}10, %d0; {}",
                    to.name,
                    to.finish()
                );
                let got = eval(&body, &[x.to_bits()]) & to.mask();
                assert_eq!(got, clamp(x), "{body} {x}");
            }
        }
    }
}

#[test]
fn doubles_become_singles() {
    let values = [
        1.0 / 3.0,
        -1.0 / 3.0,
        1e-42,
        -1e-46,
        3.5e38,
        -1e300,
        0.1,
        16_777_217.0,
    ];
    for x in values {
        for rounding in ROUNDINGS {
            let near = x as f32;
            let order = f64::from(near).partial_cmp(&x).unwrap();
            let expected = pick(
                rounding,
                x < 0.0,
                order,
                near,
                near.next_down(),
                near.next_up(),
            );
            let body = format!(
                "cvt.{rounding}.f32.f64 %f10, %d0; mov.b32 %r10, %f10; cvt.u64.u32 %out, %r10;"
            );
            let got = eval(&body, &[x.to_bits()]);
            assert_eq!(got, u64::from(expected.to_bits()), "{body} {x}");
        }
    }
}

/// Checks that a directed result is next to the nearest one, on the side of the exact one.
#[test]
fn arithmetic_rounds_in_every_direction() {
    let values = [1.0_f32, 3.0, -7.0, 1e-3, 1e10, 1.000_000_1, -0.3];
    for a in values {
        for b in values {
            for (name, exact) in [
                ("add", f64::from(a) + f64::from(b)),
                ("sub", f64::from(a) - f64::from(b)),
                ("mul", f64::from(a) * f64::from(b)),
                ("div", f64::from(a) / f64::from(b)),
            ] {
                for rounding in ROUNDINGS {
                    let near = exact as f32;
                    // A sum or quotient that is not a double is not a single either.
                    let order = f64::from(near).partial_cmp(&exact).unwrap();
                    let expected = if exact == 0.0 {
                        if rounding == "rm" { -0.0 } else { 0.0 }
                    } else {
                        pick(
                            rounding,
                            exact < 0.0,
                            order,
                            near,
                            near.next_down(),
                            near.next_up(),
                        )
                    };
                    let body = format!(
                        "{name}.{rounding}.f32 %f10, %f0, %f1; mov.b32 %r10, %f10; cvt.u64.u32 %out, %r10;"
                    );
                    let inputs = [a, b].map(|x| u64::from(x.to_bits()));
                    let got = f32::from_bits(eval(&body, &inputs) as u32);
                    assert_eq!(
                        got.to_bits(),
                        expected.to_bits(),
                        "{body} {a} {b}: {got} {expected}"
                    );
                }
            }
        }
    }
}
