//! Compares arithmetic of 16-bit floats and conversions of narrow formats with references that
//! compute in double precision from the definitions of the formats.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "bit fields of fixed width"
)]

mod common;

use common::Device;
use common::eval::{eval, words};

/// 16-bit format: explicit bits of its significand, and its bias.
#[derive(Clone, Copy)]
struct Format {
    name: &'static str,
    mantissa: i32,
    bias: i32,
}

const F16: Format = Format {
    name: "f16",
    mantissa: 10,
    bias: 15,
};
const BF16: Format = Format {
    name: "bf16",
    mantissa: 7,
    bias: 127,
};

impl Format {
    fn infinity(self) -> u16 {
        0x7fff >> self.mantissa << self.mantissa
    }

    fn value(self, bits: u16) -> f64 {
        let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
        let magnitude = bits & 0x7fff;
        if magnitude >= self.infinity() {
            return if magnitude == self.infinity() {
                sign * f64::INFINITY
            } else {
                f64::NAN
            };
        }
        let fraction = f64::from(magnitude & ((1 << self.mantissa) - 1));
        let exponent = i32::from(magnitude >> self.mantissa);
        let hidden = if exponent == 0 {
            0.0
        } else {
            2.0_f64.powi(self.mantissa)
        };
        sign * (fraction + hidden) * 2.0_f64.powi(exponent.max(1) - self.bias - self.mantissa)
    }

    /// Returns the code nearest to a value, found by comparing its neighbours. `rest` has the sign
    /// of the exact result minus the value.
    fn nearest(self, value: f64, rest: f64) -> u16 {
        if value.is_nan() {
            return 0x7fff;
        }
        let sign = u16::from(value.is_sign_negative()) << 15;
        let (value, rest) = (value.abs(), if sign == 0 { rest } else { -rest });
        let (mut low, mut high) = (0_u16, self.infinity());
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.value(middle) <= value {
                low = middle;
            } else {
                high = middle;
            }
        }
        if value == self.value(low) && rest == 0.0 {
            return low | sign;
        }
        // The code after the greatest finite one represents a value one step above it.
        let step = self.value(self.infinity() - 1) - self.value(self.infinity() - 2);
        let above = if high == self.infinity() {
            self.value(self.infinity() - 1) + step
        } else {
            self.value(high)
        };
        let (down, up) = (value - self.value(low), above - value);
        let rounds_up = match down.partial_cmp(&up) {
            Some(std::cmp::Ordering::Less) => false,
            Some(std::cmp::Ordering::Equal) => rest > 0.0 || rest == 0.0 && low & 1 == 1,
            _ => true,
        };
        sign | if rounds_up { high } else { low }
    }
}

/// Returns values of every kind: zeros, subnormals, ties, the greatest, infinities, NaNs.
fn samples(format: Format) -> Vec<u16> {
    let one = (format.bias << format.mantissa) as u16;
    let magnitudes = [
        0,
        1,
        (1 << format.mantissa) - 1,
        1 << format.mantissa,
        one,
        one + 1,
        one + 3,
        one + 0x55,
        one - 1,
        format.infinity() - 1,
        format.infinity(),
        format.infinity() + 1,
    ];
    magnitudes
        .into_iter()
        .flat_map(|bits| [bits, bits | 0x8000])
        .collect()
}

fn half(op: &str, inputs: &[u16]) -> u16 {
    let names: Vec<String> = (0..inputs.len()).map(|i| format!("%h{i}")).collect();
    let body = format!("{op} %h10, {}; cvt.u64.u16 %out, %h10;", names.join(", "));
    let inputs: Vec<u64> = inputs.iter().map(|&bits| u64::from(bits)).collect();
    eval(&body, &inputs) as u16
}

#[test]
fn sums_and_products_are_rounded_once() {
    for format in [F16, BF16] {
        let values = samples(format);
        for (name, f) in [
            ("add", (|a, b| a + b) as fn(f64, f64) -> f64),
            ("sub", |a, b| a - b),
            ("mul", |a, b| a * b),
        ] {
            let op = format!("{name}.rn.{}", format.name);
            for &a in &values {
                for &b in values.iter().step_by(3) {
                    let (x, y) = (format.value(a), format.value(b));
                    let exact = f(x, y);
                    // The rounding error of a double sum of two values far apart.
                    let rest = match name {
                        "add" if exact.is_finite() => two_sum_rest(x, y),
                        "sub" if exact.is_finite() => two_sum_rest(x, -y),
                        _ => 0.0,
                    };
                    let expected = format.nearest(exact, rest);
                    assert_eq!(half(&op, &[a, b]), expected, "{op} {a:x} {b:x}");
                }
            }
        }
    }
}

fn two_sum_rest(a: f64, b: f64) -> f64 {
    let (big, small) = if a.abs() > b.abs() { (a, b) } else { (b, a) };
    small - ((big + small) - big)
}

#[test]
fn fused_products_are_rounded_once() {
    for format in [F16, BF16] {
        let op = format!("fma.rn.{}", format.name);
        let values = samples(format);
        for &a in values.iter().step_by(2) {
            for &b in values.iter().step_by(3) {
                for &c in values.iter().step_by(5) {
                    let product = format.value(a) * format.value(b);
                    let exact = product + format.value(c);
                    let rest = if exact.is_finite() {
                        two_sum_rest(product, format.value(c))
                    } else {
                        0.0
                    };
                    let expected = format.nearest(exact, rest);
                    assert_eq!(half(&op, &[a, b, c]), expected, "{op} {a:x} {b:x} {c:x}");
                }
            }
        }
    }
    // A product halfway between two values, and a summand that a double sum would lose.
    let (tie, tiny) = (BF16.nearest(1.0 + 1.0 / 128.0, 0.0), 0x0080);
    let half_way = BF16.nearest(1.5, 0.0);
    let product = BF16.value(tie) * BF16.value(half_way);
    assert_eq!(
        half("fma.rn.bf16", &[tie, half_way, tiny]),
        BF16.nearest(product, 1.0)
    );
    assert_eq!(
        half("fma.rn.bf16", &[tie, half_way, tiny | 0x8000]),
        BF16.nearest(product, -1.0)
    );
}

#[test]
fn modifiers_of_halves() {
    assert_eq!(half("add.ftz.f16", &[0x0001, 0x0000]), 0);
    assert_eq!(half("add.f16", &[0x0001, 0x0000]), 1);
    assert_eq!(half("mul.ftz.f16", &[0x0400, 0x3800]), 0);
    assert_eq!(half("add.sat.f16", &[0x4000, 0x4000]), 0x3c00);
    assert_eq!(half("add.sat.f16", &[0x7e00, 0x4000]), 0);
    assert_eq!(half("sub.sat.f16", &[0x3c00, 0x4000]), 0);
    assert_eq!(half("fma.rn.relu.f16", &[0x3c00, 0xc000, 0x3c00]), 0);
    assert_eq!(half("fma.rn.relu.bf16", &[0x3f80, 0xc000, 0x4040]), 0x3f80);
    assert_eq!(
        half("fma.rn.ftz.sat.f16", &[0x3c00, 0x4000, 0x3c00]),
        0x3c00
    );
    assert_eq!(half("neg.ftz.f16", &[0x0001]), 0x8000);
    assert_eq!(half("abs.bf16", &[0xbf80]), 0x3f80);
    words("neg.f16x2", &[0x3c00_bc00], 0xbc00_3c00);
    words("sub.sat.f16x2", &[0x4400_3c00, 0x3c00_4000], 0x3c00_0000);
    words("mul.bf16x2", &[0x4000_4040, 0x4040_c000], 0x40c0_c0c0);
}

#[test]
fn extremes_of_halves() {
    assert_eq!(half("min.f16", &[0x7e00, 0x4000]), 0x4000);
    assert_eq!(half("max.NaN.f16", &[0x7e00, 0x4000]), 0x7fff);
    assert_eq!(half("min.f16", &[0x7e00, 0xfe00]), 0x7fff);
    assert_eq!(half("min.f16", &[0x0000, 0x8000]), 0x8000);
    assert_eq!(half("max.bf16", &[0x8000, 0x0000]), 0x0000);
    assert_eq!(half("max.xorsign.abs.f16", &[0xc400, 0x4000]), 0xc400);
    assert_eq!(half("min.xorsign.abs.bf16", &[0xc080, 0xc000]), 0x4000);
    assert_eq!(half("min.ftz.f16", &[0x0001, 0x4000]), 0);
    words("max.f16x2", &[0x3c00_c000, 0xbc00_4000], 0x3c00_4000);
    words("min.NaN.bf16x2", &[0x7fc0_4000, 0x3f80_3f80], 0x7fff_3f80);
}

#[test]
fn functions_of_halves() {
    assert_eq!(half("ex2.approx.f16", &[0x4200]), 0x4800);
    assert_eq!(half("ex2.approx.ftz.bf16", &[0x4040]), 0x4100);
    assert_eq!(half("tanh.approx.f16", &[0x7c00]), 0x3c00);
    words("ex2.approx.f16x2", &[0x0000_3c00], 0x3c00_4000);
    words("tanh.approx.bf16x2", &[0xff80_0000], 0xbf80_0000);
}

#[test]
fn comparisons_of_halves() {
    words(
        "set.lt.f16x2.f16x2",
        &[0x3c00_4000, 0x4000_3c00],
        0x3c00_0000,
    );
    words(
        "set.geu.u32.f16x2",
        &[0x7e00_0000, 0x4000_3c00],
        0xffff_0000,
    );
    words(
        "set.ne.bf16x2.bf16x2",
        &[0x3f80_4000, 0x3f80_3f80],
        0x0000_3f80,
    );
    words(
        "set.eq.ftz.f16x2.f16x2",
        &[0x0001_0001, 0x0000_3c00],
        0x3c00_0000,
    );
    assert_eq!(half("set.eq.f16.f16", &[0x3c00, 0x3c00]), 0x3c00);
    assert_eq!(half("set.gt.bf16.bf16", &[0x4000, 0x3f80]), 0x3f80);
    let both =
        "setp.lt.f16x2 %p1|%p2, %r0, %r1; selp.u64 %out, 1, 0, %p1; @%p2 add.u64 %out, %out, 2;";
    assert_eq!(eval(both, &[0x3c00_4000, 0x4000_3c00]), 2);
    assert_eq!(eval(both, &[0x4000_3c00, 0x3c00_4000]), 1);
    let combined = "setp.eq.u32 %p1, %r2, 1; setp.lt.and.f16x2 %p1|%p2, %r0, %r1, %p1;
                    selp.u64 %out, 1, 0, %p1; @%p2 add.u64 %out, %out, 2;";
    assert_eq!(eval(combined, &[0x3c00_3c00, 0x4000_4000, 1]), 3);
    assert_eq!(eval(combined, &[0x3c00_3c00, 0x4000_4000, 0]), 0);
}

#[test]
fn conversions_to_halves_round_as_they_say() {
    let convert = |op: &str, value: f32| {
        let body = format!("cvt.{op} %h10, %f0; cvt.u64.u16 %out, %h10;");
        eval(&body, &[u64::from(value.to_bits())]) as u16
    };
    for format in [F16, BF16] {
        let name = format.name;
        for bits in samples(format)
            .into_iter()
            .filter(|bits| bits & 0x7fff < format.infinity() - 1)
        {
            let (value, next) = (format.value(bits), format.value(bits + 1));
            let value = (value + (next - value) / 4.0) as f32;
            if f64::from(value) == format.value(bits) {
                continue;
            }
            // Codes grow with the magnitude.
            let (toward, away) = (bits, bits + 1);
            let (down, up) = if bits >> 15 == 0 {
                (toward, away)
            } else {
                (away, toward)
            };
            assert_eq!(convert(&format!("rz.{name}.f32"), value), toward);
            assert_eq!(convert(&format!("rn.{name}.f32"), value), toward);
            if name == "f16" {
                assert_eq!(convert("rm.f16.f32", value), down);
                assert_eq!(convert("rp.f16.f32", value), up);
            }
        }
        assert_eq!(convert(&format!("rn.{name}.f32"), f32::NAN), 0x7fff);
        assert_eq!(convert(&format!("rn.relu.{name}.f32"), -3.0), 0);
        let greatest = format.infinity() - 1;
        let finite = format!("rn.satfinite.{name}.f32");
        assert_eq!(convert(&finite, f32::INFINITY), greatest);
        assert_eq!(convert(&finite, -f32::MAX), greatest | 0x8000);
        assert_eq!(convert(&finite, 1.0), format.nearest(1.0, 0.0));
    }
}

#[test]
fn narrow_formats() {
    let bits = |value: f32| u64::from(value.to_bits());
    let pair = |op: &str, a: f32, b: f32| {
        let body = format!("cvt.{op} %h10, %f0, %f1; cvt.u64.u16 %out, %h10;");
        eval(&body, &[bits(a), bits(b)])
    };
    assert_eq!(pair("rn.satfinite.e4m3x2.f32", 1.0, -2.0), 0x38c0);
    assert_eq!(pair("rn.satfinite.e4m3x2.f32", 1e6, f32::NAN), 0x7e7f);
    assert_eq!(pair("rn.satfinite.relu.e5m2x2.f32", -1.0, 1.0), 0x003c);
    let halves = "cvt.rn.f16x2.e5m2x2 %r10, %h0; cvt.u64.u32 %out, %r10;";
    assert_eq!(eval(halves, &[0x3cc0]), 0x3c00_c000);
    let back = "cvt.rn.f16x2.e4m3x2 %r10, %h0; cvt.rn.satfinite.e4m3x2.f16x2 %h10, %r10; cvt.u64.u16 %out, %h10;";
    assert_eq!(eval(back, &[0x3801]), 0x3801);
    let single = |op: &str, value: u32| {
        let body = format!("cvt.{op} %r10, %f0; cvt.u64.u32 %out, %r10;");
        eval(&body, &[u64::from(value)])
    };
    assert_eq!(single("rna.tf32.f32", 0x3f80_1000), 0x3f80_2000);
    assert_eq!(single("rn.tf32.f32", 0x3f80_1000), 0x3f80_0000);
    assert_eq!(single("rn.tf32.f32", 0x3f80_3000), 0x3f80_4000);
    assert_eq!(single("rz.tf32.f32", 0x3f80_1fff), 0x3f80_0000);
    assert_eq!(single("rn.relu.tf32.f32", 0xbf80_0000), 0);
    assert_eq!(single("rna.satfinite.tf32.f32", 0x7f7f_ffff), 0x7f7f_e000);
}

#[test]
fn integers_are_packed_with_saturation() {
    words("cvt.pack.sat.u16.s32", &[70_000, 5], 0xffff_0005);
    words(
        "cvt.pack.sat.s16.s32",
        &[0xffff_0000, 0xffff_ffff],
        0x8000_ffff,
    );
    words(
        "cvt.pack.sat.u8.s32.b32",
        &[300, 0xffff_ffff, 0x1122_3344],
        0x3344_ff00,
    );
    words(
        "cvt.pack.sat.s4.s32.b32",
        &[7, 0xffff_fff0, 0x1234],
        0x0012_3478,
    );
}

/// Checks that results differ from the exact ones by at most one in the last place of the format.
fn check_functions(format: Format, kernel: &str) {
    let device = Device::of("halves");
    let inputs: Vec<u16> = (0..64)
        .map(|i| format.nearest((f64::from(i) - 31.5) * 0.17, 0.0))
        .collect();
    let (input, out) = (device.memory.upload(&inputs), device.memory.alloc(32 * 32));
    device.launch(kernel, 1, 32, &[input, out]).unwrap();
    let got = device.memory.read::<u16>(out, 32 * 16);
    for (pair, got) in inputs.chunks_exact(2).zip(got.chunks_exact(16)) {
        let (x, y) = (format.value(pair[0]), format.value(pair[1]));
        let expected = [
            x / y,
            x.abs().sqrt(),
            1.0 / y.abs().sqrt(),
            1.0 / y,
            x.exp(),
            x.exp2(),
            10.0_f64.powf(x),
            y.abs().ln(),
            y.abs().log2(),
            y.abs().log10(),
            x.sin(),
            x.cos(),
            x.floor(),
            x.round_ties_even(),
            x.trunc(),
            x.ceil(),
        ];
        for (index, (&bits, expected)) in got.iter().zip(expected).enumerate() {
            let exact = format.nearest(expected, 0.0);
            // Codes of one sign are consecutive numbers.
            let apart = bits.abs_diff(exact);
            let tiny = expected.abs() < 1e-6 && format.value(bits).abs() < 1e-6;
            assert!(
                apart <= 1 || tiny,
                "{kernel} {index} of {x} {y}: {bits:x} {exact:x}"
            );
        }
    }
}

#[test]
fn functions_that_nvcc_compiled() {
    check_functions(F16, "half_functions");
    check_functions(BF16, "bfloat_functions");
}

#[test]
fn a_dot_product_of_pairs() {
    let device = Device::of("halves");
    let a: Vec<u16> = (0..512)
        .map(|i| F16.nearest(f64::from(i % 7 - 3), 0.0))
        .collect();
    let b: Vec<u16> = (0..512)
        .map(|i| F16.nearest(f64::from(i % 5 - 2), 0.0))
        .collect();
    let (da, db) = (device.memory.upload(&a), device.memory.upload(&b));
    let (out, counts) = (device.memory.alloc(128), device.memory.alloc(128));
    device.launch("dot", 1, 32, &[da, db, out, counts]).unwrap();
    let sum: f64 = a
        .iter()
        .zip(&b)
        .map(|(&a, &b)| F16.value(a) * F16.value(b))
        .sum();
    assert_eq!(device.memory.read::<f32>(out, 32), vec![sum as f32; 32]);
    let expected: Vec<u32> = (0..32)
        .map(|lane| {
            let pairs = (lane..256).step_by(32).map(|pair| [2 * pair, 2 * pair + 1]);
            pairs
                .map(|pair| {
                    let below = pair
                        .iter()
                        .filter(|&&i| F16.value(a[i]) < F16.value(b[i]))
                        .count();
                    let above = pair.iter().all(|&i| F16.value(a[i]) > F16.value(b[i]));
                    below as u32 + if above { 1000 } else { 0 }
                })
                .sum()
        })
        .collect();
    assert_eq!(device.memory.read::<u32>(counts, 32), expected);
}
