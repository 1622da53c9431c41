//! Compares video instructions with their definitions, part by part.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "parts of registers"
)]

mod common;

use common::eval::{eval, words};

const SAMPLES: [u32; 6] = [
    0,
    0xffff_ffff,
    0x8000_7fff,
    0x807f_01ff,
    0x1234_fedc,
    0x7f80_0081,
];

/// Computes each part of `bits` bits separately, clamped to its width.
fn parts(a: u32, b: u32, bits: u32, signed: bool, f: impl Fn(i64, i64) -> i64) -> u32 {
    let cut = |word: u32, at: u32| {
        let value = i64::from(word >> at & (u32::MAX >> (32 - bits)));
        if signed && value >> (bits - 1) == 1 {
            value - (1 << bits)
        } else {
            value
        }
    };
    let (least, greatest) = if signed {
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    } else {
        (0, (1 << bits) - 1)
    };
    (0..32 / bits).fold(0, |out, part| {
        let value = f(cut(a, part * bits), cut(b, part * bits)).clamp(least, greatest);
        out | (value as u32 & (u32::MAX >> (32 - bits))) << (part * bits)
    })
}

#[test]
fn two_and_four_parts_at_once() {
    let check = |op: &str, bits, signed, f: fn(i64, i64) -> i64| {
        for a in SAMPLES {
            for b in SAMPLES {
                words(op, &[a, b, 0xdead_beef], parts(a, b, bits, signed, f));
            }
        }
    };
    check("vadd2.s32.s32.s32.sat", 16, true, |a, b| a + b);
    check("vadd4.u32.u32.u32.sat", 8, false, |a, b| a + b);
    check("vsub4.s32.s32.s32.sat", 8, true, |a, b| a - b);
    check("vabsdiff2.u32.u32.u32", 16, false, |a, b| (a - b).abs());
    check("vabsdiff4.u32.u32.u32", 8, false, |a, b| (a - b).abs());
    check("vmin4.s32.s32.s32", 8, true, i64::min);
    check("vmax2.u32.u32.u32", 16, false, i64::max);
    check("vavrg4.u32.u32.u32", 8, false, |a, b| (a + b + 1) >> 1);
    check("vset2.s32.s32.lt", 16, true, |a, b| i64::from(a < b));
    check("vset4.u32.u32.ge", 8, false, |a, b| i64::from(a >= b));
    words(
        "vadd4.u32.u32.u32",
        &[0xff01_ff01, 0x0101_0101, 9],
        0x0002_0002,
    );
    words(
        "vabsdiff4.u32.u32.u32.add",
        &[0x0501_0009, 0x0103_0002, 100],
        100 + 4 + 2 + 7,
    );
    words("vset4.u32.u32.eq.add", &[0x0501_0009, 0x0501_0109, 10], 13);
}

#[test]
fn parts_of_one_register() {
    let one = |op: &str, d: &str, a: &str, b: &str, inputs: [u64; 3]| {
        eval(
            &format!("{op} %r10{d}, %r0{a}, %r1{b}, %r2; cvt.u64.u32 %out, %r10;"),
            &inputs,
        )
    };
    words("vadd.s32.s32.s32.sat", &[0x7fff_ffff, 1], 0x7fff_ffff);
    words("vsub.u32.u32.u32.sat", &[1, 2], 0);
    words("vabsdiff.u32.s32.s32.add", &[5, 0xffff_fffe, 100], 107);
    words("vmax.s32.s32.s32.min", &[5, 9, 7], 7);
    words("vshl.u32.u32.u32.clamp", &[1, 40], 0);
    words("vshl.u32.u32.u32.wrap", &[1, 33], 2);
    words("vshr.s32.s32.u32.clamp", &[0x8000_0000, 40], 0xffff_ffff);
    words("vset.s32.u32.lt", &[0xffff_ffff, 0], 1);
    let signed = one(
        "vadd.s32.s32.s32",
        ".b1",
        ".b3",
        ".h0",
        [0xff00_0000, 3, 0x1122_3344],
    );
    assert_eq!(signed, 0x1122_0244);
    let clamped = one(
        "vadd.u32.u32.u32.sat",
        ".h1",
        ".h1",
        ".b0",
        [0xfff0_0000, 0x99, 0x5555_7777],
    );
    assert_eq!(clamped, 0xffff_7777);
    let added = one(
        "vadd.u32.u32.u32.add",
        "",
        ".b0",
        ".b1",
        [0x1ff, 0x0200, 1000],
    );
    assert_eq!(added, 1000 + 0xff + 2);
}
