//! Compares single instructions with their definitions in the PTX ISA.

mod common;

use common::eval::{NAN, doubles, eval, longs, neg, singles, words};

#[test]
fn integer_arithmetic() {
    words("add.u32", &[u32::MAX, 2], 1);
    words("sub.s32", &[3, 5], neg(-2));
    words("add.sat.s32", &[0x7fff_ffff, 1], 0x7fff_ffff);
    words("sub.sat.s32", &[0x8000_0000, 1], 0x8000_0000);
    words("mul.lo.u32", &[0x10001, 0x10001], 0x20001);
    words("mul.hi.u32", &[u32::MAX, u32::MAX], u32::MAX - 1);
    words("mul.hi.s32", &[neg(-1), 5], neg(-1));
    words("mad.lo.s32", &[neg(-3), 7, 100], 79);
    words("mad.hi.u32", &[1 << 31, 4, 5], 7);
    words("mul24.lo.s32", &[0xff_ffff, 2], neg(-2));
    words("mad24.lo.u32", &[0xff00_0003, 2, 1], 7);
    words("sad.s32", &[neg(-5), 7, 100], 112);
    words("sad.u32", &[5, 7, 100], 102);
    words("div.u32", &[100, 7], 14);
    words("div.s32", &[neg(-100), 7], neg(-14));
    words("div.s32", &[1 << 31, neg(-1)], 1 << 31);
    words("rem.s32", &[neg(-100), 7], neg(-2));
    words("abs.s32", &[neg(-9)], 9);
    words("neg.s32", &[9], neg(-9));
    words("min.s32", &[neg(-1), 1], neg(-1));
    words("min.u32", &[neg(-1), 1], 1);
    words("max.s32.relu", &[neg(-1), neg(-2)], 0);
    words("min.s16x2", &[0xffff_0003, 0x0001_ffff], 0xffff_ffff);
    words("add.u16x2", &[0xffff_0001, 0x0001_ffff], 0);
    words(
        "dp4a.s32.u32",
        &[0xff01_02fe, 0x0102_0304, 10],
        neg(10 - 1 + 2 + 6 - 8),
    );
    words(
        "dp2a.lo.u32.u32",
        &[0x0003_0002, 0x0000_0504, 1],
        1 + 8 + 15,
    );
    longs("add.s64", &[u64::MAX, 3], 2);
    longs("mul.lo.s64", &[u64::MAX, 5], 5_u64.wrapping_neg());
    longs("mul.hi.u64", &[u64::MAX, 2], 1);
    longs("mul.hi.s64", &[u64::MAX, 2], u64::MAX);
    longs("div.s64", &[7_u64.wrapping_neg(), 2], 3_u64.wrapping_neg());
    longs("rem.u64", &[100, 7], 2);
    assert_eq!(
        eval("mul.wide.s32 %out, %r0, %r1;", &[0xffff_ffff, 3]),
        3_u64.wrapping_neg()
    );
    assert_eq!(
        eval("mul.wide.u32 %out, %r0, %r1;", &[0xffff_ffff, 3]),
        0xffff_ffff * 3
    );
    assert_eq!(
        eval("mad.wide.s32 %out, %r0, %r1, %rd2;", &[0xffff_ffff, 3, 10]),
        7
    );
    assert_eq!(
        eval(
            "mul.wide.u16 %r10, %h0, %h1; cvt.u64.u32 %out, %r10;",
            &[0xffff, 0xffff]
        ),
        0xfffe_0001
    );
}

#[test]
fn carry_chains() {
    // 128-bit addition and subtraction of 64-bit halves.
    let add = "add.cc.u64 %rd10, %rd0, %rd1; addc.u64 %out, %rd2, %rd3;";
    assert_eq!(eval(add, &[u64::MAX, 1, 5, 6]), 12);
    let sub = "sub.cc.u64 %rd10, %rd0, %rd1; subc.u64 %out, %rd2, %rd3;";
    assert_eq!(eval(sub, &[0, 1, 9, 4]), 4);
    let mad =
        "mad.lo.cc.u32 %r10, %r0, %r1, %r2; madc.hi.u32 %r11, %r0, %r1, 0; cvt.u64.u32 %out, %r11;";
    assert_eq!(eval(mad, &[u64::from(u32::MAX), 2, 2]), 2);
}

#[test]
fn bits() {
    words("and.b32", &[0xff00, 0x0ff0], 0x0f00);
    words("or.b32", &[0xff00, 0x0ff0], 0xfff0);
    words("xor.b32", &[0xff00, 0x0ff0], 0xf0f0);
    words("not.b32", &[0], u32::MAX);
    words("cnot.b32", &[0], 1);
    words("shl.b32", &[1, 31], 1 << 31);
    words("shl.b32", &[1, 32], 0);
    words("shr.u32", &[1 << 31, 40], 0);
    words("shr.s32", &[1 << 31, 40], u32::MAX);
    words("popc.b32", &[0xf0f0], 8);
    words("clz.b32", &[1], 31);
    words("brev.b32", &[1], 1 << 31);
    words("bfind.u32", &[0x1000], 12);
    words("bfind.s32", &[neg(-1)], u32::MAX);
    words("bfind.shiftamt.u32", &[1], 31);
    words("bfe.u32", &[0xabcd_1234, 8, 8], 0x12);
    words("bfe.s32", &[0x0000_8000, 8, 8], 0xffff_ff80);
    words("bfe.s32", &[0x8000_0000, 31, 8], u32::MAX);
    words("bfe.u32", &[0xff, 40, 8], 0);
    words("bfi.b32", &[0xff, 0, 4, 8], 0xff0);
    words("bfi.b32", &[0xff, 7, 4, 0], 7);
    words("shf.l.wrap.b32", &[0x8000_0000, 1, 1], 3);
    words("shf.r.clamp.b32", &[0, 0x1234, 40], 0x1234);
    words("shf.r.wrap.b32", &[0x10, 1, 4], 0x1000_0001);
    words("prmt.b32", &[0x3322_1100, 0x7766_5544, 0x0527], 0x0055_2277);
    words("prmt.b32", &[0x0000_0080, 0, 0x8888], 0xffff_ffff);
    words("prmt.b32.rc8", &[0x3322_1100, 0, 2], 0x2222_2222);
    words("prmt.b32.f4e", &[0x3322_1100, 0x7766_5544, 1], 0x4433_2211);
    words("szext.wrap.s32", &[0xff, 8], u32::MAX);
    words("bmsk.clamp.b32", &[4, 8], 0xff0);
    words("fns.b32", &[0b1011_0100, 2, 2], 4);
    assert_eq!(
        eval("popc.b64 %r10, %rd0; cvt.u64.u32 %out, %r10;", &[u64::MAX]),
        64
    );
    assert_eq!(
        eval("bfe.u64 %out, %rd0, 32, 16;", &[0x1234_5678_9abc_def0]),
        0x5678
    );
    for (table, expected) in [
        (0x96, 0xf0 ^ 0xcc ^ 0xaa),
        (0xe8, 0xe8),
        (0x80, 0x80),
        (0xfe, 0xfe),
    ] {
        let body = format!("lop3.b32 %r10, %r0, %r1, %r2, {table}; cvt.u64.u32 %out, %r10;");
        assert_eq!(
            eval(&body, &[0xf0, 0xcc, 0xaa]) & 0xff,
            expected,
            "{table:x}"
        );
    }
}

#[test]
fn single_precision() {
    singles("add.f32", &[1.5, 2.25], 3.75);
    singles("add.rn.ftz.f32", &[1e-40, 0.0], 0.0);
    singles("add.f32", &[1e-40, 0.0], 1e-40);
    singles("add.sat.f32", &[1.5, 2.25], 1.0);
    singles("mul.sat.f32", &[f32::NAN, 2.25], 0.0);
    singles("add.f32", &[f32::INFINITY, f32::NEG_INFINITY], NAN);
    singles("sub.rz.f32", &[1.0, 1e-10], 1.0_f32.next_down());
    singles("add.rp.f32", &[1.0, 1e-10], 1.0_f32.next_up());
    singles(
        "mul.rm.f32",
        &[1.0_f32.next_up(), 1.0_f32.next_up()],
        1.0_f32.next_up().next_up(),
    );
    singles("fma.rn.f32", &[3.0, 4.0, 5.0], 17.0);
    singles("fma.rz.f32", &[1.0, 1.0, 1e-10], 1.0);
    singles("mad.rn.f32", &[3.0, 4.0, 5.0], 17.0);
    singles("div.rn.f32", &[1.0, 3.0], 1.0 / 3.0);
    singles("div.full.f32", &[6.0, 3.0], 2.0);
    singles("div.approx.ftz.f32", &[6.0, 3.0], 2.0);
    singles("rcp.approx.ftz.f32", &[4.0], 0.25);
    singles("rcp.rn.f32", &[3.0], 1.0 / 3.0);
    singles("sqrt.rn.f32", &[2.0], 2.0_f32.sqrt());
    singles("sqrt.approx.f32", &[16.0], 4.0);
    singles("rsqrt.approx.f32", &[16.0], 0.25);
    singles("ex2.approx.f32", &[3.0], 8.0);
    singles("lg2.approx.f32", &[8.0], 3.0);
    singles("sin.approx.f32", &[0.0], 0.0);
    singles("cos.approx.f32", &[0.0], 1.0);
    singles("tanh.approx.f32", &[0.0], 0.0);
    singles("abs.f32", &[-2.0], 2.0);
    singles("neg.f32", &[2.0], -2.0);
    singles("min.f32", &[f32::NAN, 2.0], 2.0);
    singles("min.NaN.f32", &[f32::NAN, 2.0], NAN);
    singles("min.f32", &[0.0, -0.0], -0.0);
    singles("max.f32", &[-0.0, 0.0], 0.0);
    singles("max.xorsign.abs.f32", &[-3.0, 2.0], -3.0);
    singles("copysign.f32", &[-1.0, 2.0], -2.0);
}

#[test]
fn double_precision() {
    doubles("add.f64", &[1.5, 2.25], 3.75);
    doubles("fma.rn.f64", &[3.0, 4.0, 5.0], 17.0);
    doubles("fma.rp.f64", &[1.0, 1.0, 1e-300], 1.0_f64.next_up());
    doubles("div.rn.f64", &[1.0, 3.0], 1.0 / 3.0);
    doubles("div.rp.f64", &[1.0, 3.0], (1.0_f64 / 3.0).next_up());
    doubles("sqrt.rn.f64", &[2.0], 2.0_f64.sqrt());
    doubles("rcp.rn.f64", &[3.0], 1.0 / 3.0);
    doubles("min.f64", &[f64::NAN, 2.0], 2.0);
    doubles("max.f64", &[-1.0, 2.0], 2.0);
    doubles("abs.f64", &[-2.0], 2.0);
}

#[test]
fn half_precision() {
    let half = |op: &str, a: u16, b: u16| {
        eval(
            &format!("{op} %h10, %h0, %h1; cvt.u64.u16 %out, %h10;"),
            &[u64::from(a), u64::from(b)],
        )
    };
    assert_eq!(half("add.f16", 0x3c00, 0x4000), 0x4200);
    assert_eq!(half("mul.rn.f16", 0x4000, 0x4200), 0x4600);
    assert_eq!(half("max.f16", 0x3c00, 0x4000), 0x4000);
    assert_eq!(half("add.bf16", 0x3f80, 0x4000), 0x4040);
    words("add.f16x2", &[0x3c00_4000, 0x3c00_3c00], 0x4000_4200);
    words(
        "fma.rn.f16x2",
        &[0x4000_3c00, 0x4000_3c00, 0x3c00_3c00],
        0x4500_4000,
    );
    words(
        "fma.rn.bf16x2",
        &[0x4000_3f80, 0x4000_3f80, 0x3f80_3f80],
        0x40a0_4000,
    );
}

#[test]
fn conversions() {
    let cvt = |ty: &str, from: &str, to: &str, input: u64| {
        eval(&format!("cvt.{ty} {to}, {from}; {}", finish(to)), &[input])
    };
    fn finish(to: &str) -> String {
        match &to[..2] {
            "%h" => format!("cvt.u64.u16 %out, {to};"),
            "%r" if to.starts_with("%rd") => format!("mov.b64 %out, {to};"),
            "%r" => format!("cvt.u64.u32 %out, {to};"),
            "%f" => format!("mov.b32 %r11, {to}; cvt.u64.u32 %out, %r11;"),
            _ => format!("mov.b64 %out, {to};"),
        }
    }
    let single = |value: f32| u64::from(value.to_bits());
    assert_eq!(
        cvt("s64.s32", "%r0", "%rd10", 0xffff_fffe),
        2_u64.wrapping_neg()
    );
    assert_eq!(cvt("u64.u32", "%r0", "%rd10", 0xffff_fffe), 0xffff_fffe);
    assert_eq!(cvt("u32.s8", "%r0", "%r10", 0xff), 0xffff_ffff);
    assert_eq!(cvt("s32.s8", "%r0", "%r10", 0x1ff), 0xffff_ffff);
    assert_eq!(cvt("u8.u32", "%r0", "%r10", 0x1ff), 0xff);
    assert_eq!(cvt("sat.u8.s32", "%r0", "%r10", 0xffff_fff0), 0);
    assert_eq!(cvt("sat.s16.s32", "%r0", "%h10", 100_000), 0x7fff);
    assert_eq!(cvt("rn.f32.s32", "%r0", "%f10", 0xffff_ffff), single(-1.0));
    assert_eq!(
        cvt("rz.f32.u32", "%r0", "%f10", 0xffff_ffff),
        single(4_294_967_040.0)
    );
    assert_eq!(
        cvt("rp.f32.u32", "%r0", "%f10", 0x0100_0001),
        single(16_777_218.0)
    );
    assert_eq!(
        cvt("rn.f64.u64", "%rd0", "%d10", u64::MAX),
        18_446_744_073_709_551_615_f64.to_bits()
    );
    assert_eq!(
        cvt("rzi.s32.f32", "%f0", "%r10", single(-2.9)),
        u64::from(neg(-2))
    );
    assert_eq!(cvt("rni.s32.f32", "%f0", "%r10", single(2.5)), 2);
    assert_eq!(cvt("rpi.u32.f32", "%f0", "%r10", single(2.1)), 3);
    assert_eq!(
        cvt("rmi.s32.f32", "%f0", "%r10", single(-2.1)),
        u64::from(neg(-3))
    );
    assert_eq!(cvt("rzi.s32.f32", "%f0", "%r10", single(1e20)), 0x7fff_ffff);
    assert_eq!(cvt("rzi.u32.f32", "%f0", "%r10", single(-1.0)), 0);
    assert_eq!(cvt("rzi.s32.f32", "%f0", "%r10", single(f32::NAN)), 0);
    assert_eq!(
        cvt("rzi.s64.f32", "%f0", "%rd10", single(f32::NAN)),
        1 << 63
    );
    assert_eq!(
        cvt("rzi.s32.f64", "%d0", "%r10", f64::NAN.to_bits()),
        1 << 31
    );
    assert_eq!(
        cvt("rzi.u64.f64", "%d0", "%rd10", 1e10_f64.to_bits()),
        10_000_000_000
    );
    assert_eq!(cvt("rni.f32.f32", "%f0", "%f10", single(2.5)), single(2.0));
    assert_eq!(
        cvt("rmi.f64.f64", "%d0", "%d10", (-2.5_f64).to_bits()),
        (-3.0_f64).to_bits()
    );
    assert_eq!(cvt("sat.f32.f32", "%f0", "%f10", single(7.0)), single(1.0));
    assert_eq!(
        cvt("f64.f32", "%f0", "%d10", single(0.1)),
        f64::from(0.1_f32).to_bits()
    );
    assert_eq!(
        cvt("rn.f32.f64", "%d0", "%f10", 0.1_f64.to_bits()),
        single(0.1)
    );
    assert_eq!(
        cvt("rz.f32.f64", "%d0", "%f10", 0.1_f64.to_bits()),
        single(0.1_f32.next_down())
    );
    assert_eq!(cvt("rn.f16.f32", "%f0", "%h10", single(1.5)), 0x3e00);
    assert_eq!(cvt("f32.f16", "%h0", "%f10", 0x3e00), single(1.5));
    assert_eq!(cvt("rn.bf16.f32", "%f0", "%h10", single(1.5)), 0x3fc0);
    assert_eq!(
        cvt("rzi.s32.f16", "%h0", "%r10", 0xc200),
        u64::from(neg(-3))
    );
    assert_eq!(cvt("rn.f16.s32", "%r0", "%h10", 3), 0x4200);
    words(
        "mov.b32 %f0, %r0; mov.b32 %f1, %r1; cvt.rn.f16x2.f32 %r10, %f0, %f1; add.u32",
        &[0, 0],
        0,
    );
    let pack = "cvt.rn.f16x2.f32 %r10, %f0, %f1; cvt.u64.u32 %out, %r10;";
    assert_eq!(eval(pack, &[single(1.0), single(2.0)]), 0x3c00_4000);
}

#[test]
fn comparison_and_selection() {
    let holds = |op: &str, a: u64, b: u64| {
        let names = match op.rsplit('.').next().unwrap() {
            "f32" => ("%f0", "%f1"),
            "f64" => ("%d0", "%d1"),
            "u64" | "s64" | "b64" => ("%rd0", "%rd1"),
            "u16" | "s16" | "f16" => ("%h0", "%h1"),
            _ => ("%r0", "%r1"),
        };
        eval(
            &format!(
                "setp.{op} %p1, {}, {}; selp.u64 %out, 1, 0, %p1;",
                names.0, names.1
            ),
            &[a, b],
        ) == 1
    };
    assert!(holds("lt.s32", 0xffff_ffff, 1) && !holds("lt.u32", 0xffff_ffff, 1));
    assert!(
        holds("hi.u32", 0xffff_ffff, 1)
            && holds("ls.u32", 1, 1)
            && holds("hs.u32", 1, 1)
            && holds("lo.u32", 0, 1)
    );
    assert!(holds("ge.s16", 1, 0xffff) && holds("ne.b64", 1, 2) && holds("gt.s64", 5, u64::MAX));
    let (one, nan) = (u64::from(1.0_f32.to_bits()), u64::from(f32::NAN.to_bits()));
    assert!(holds("eq.f32", one, one) && !holds("ne.f32", one, nan) && holds("neu.f32", one, nan));
    assert!(holds("ltu.f32", one, nan) && !holds("lt.f32", one, nan) && holds("nan.f32", one, nan));
    assert!(
        holds("num.f32", one, one) && holds("geu.f64", 0, 0) && holds("lt.f16", 0x3c00, 0x4000)
    );
    let both = "setp.lt.s32 %p0, %r0, %r1; setp.eq.and.s32 %p1|%p2, %r0, %r1, %p0;
                selp.u64 %out, 1, 0, %p1; @%p2 add.u64 %out, %out, 2; @!%p2 add.u64 %out, %out, 4;";
    assert_eq!(eval(both, &[1, 2]), 2);
    assert_eq!(eval(both, &[2, 2]), 4);
    words("set.lt.u32.s32", &[neg(-1), 1], u32::MAX);
    words("set.lt.f32.s32", &[neg(-1), 1], 1.0_f32.to_bits());
    words("slct.b32.s32", &[10, 20, 0], 10);
    words("slct.b32.s32", &[10, 20, neg(-1)], 20);
    let logic = "setp.eq.s32 %p0, %r0, 1; setp.eq.s32 %p1, %r1, 1; xor.pred %p2, %p0, %p1; not.pred %p3, %p2;
                 and.pred %p4, %p3, %p0; or.pred %p5, %p4, %p2; mov.pred %p6, %p5; selp.u64 %out, 1, 0, %p6;";
    assert_eq!(
        (
            eval(logic, &[1, 1]),
            eval(logic, &[1, 0]),
            eval(logic, &[0, 0])
        ),
        (1, 1, 0)
    );
    assert_eq!(
        eval(
            "testp.notanumber.f32 %p1, %f0; selp.u64 %out, 1, 0, %p1;",
            &[nan]
        ),
        1
    );
}

#[test]
fn packing_and_addresses() {
    assert_eq!(eval("mov.b64 %out, {%r0, %r1};", &[1, 2]), 2 << 32 | 1);
    assert_eq!(
        eval(
            "mov.b64 {%r10, %r11}, %rd0; mov.b64 %out, {%r11, %r10};",
            &[2 << 32 | 1]
        ),
        1 << 32 | 2
    );
    assert_eq!(
        eval(
            "mov.b64 {_, %r11}, %rd0; cvt.u64.u32 %out, %r11;",
            &[2 << 32 | 1]
        ),
        2
    );
    assert_eq!(
        eval(
            "mov.b32 {%h10, %h11}, %r0; mov.b32 %r10, {%h11, %h10}; cvt.u64.u32 %out, %r10;",
            &[0x1234_5678]
        ),
        0x5678_1234
    );
    let spaces = "mov.u64 %rd10, s; cvta.shared.u64 %rd10, %rd10; mov.u64 %rd11, l; cvta.local.u64 %rd11, %rd11;
                  isspacep.shared %p1, %rd10; isspacep.local %p2, %rd11; isspacep.global %p3, %rd11;
                  selp.u64 %out, 1, 0, %p1; @%p2 add.u64 %out, %out, 2; @%p3 add.u64 %out, %out, 4;";
    assert_eq!(eval(spaces, &[]), 3);
    for space in ["shared", "local", "global"] {
        let name = &space[..1];
        let body = format!(
            "mov.u64 %rd10, {name}; st.{space}.v2.u32 [%rd10+8], {{%r0, %r1}};
             cvta.{space}.u64 %rd11, %rd10; ld.u64 %rd12, [%rd11+8]; ld.{space}.s8 %r10, [{name}+8];
             st.u16 [%rd11+14], %h2; ld.{space}.u64 %rd13, [{name}+8]; cvt.s64.s32 %rd14, %r10;
             add.u64 %out, %rd13, %rd14;"
        );
        assert_eq!(eval(&body, &[0xff, 7, 9]), 0x0009_0007_0000_00fe, "{space}");
    }
    assert_eq!(
        eval(
            "ld.param.v2.u64 {%rd10, %rd11}, [in+0]; sub.u64 %out, %rd11, %rd10;",
            &[5, 12]
        ),
        7
    );
}

#[test]
fn atomics() {
    for (space, name) in [("global", "g"), ("shared", "s")] {
        let atom = |op: &str, old: u64, a: u64, b: u64| {
            let wide = op.ends_with("64");
            let (r, word) = if wide { ("rd", "u64") } else { ("r", "u32") };
            let cas = if op.starts_with("cas") {
                format!(", %{r}2")
            } else {
                String::new()
            };
            let body = format!(
                "st.{space}.u64 [{name}], %rd0; atom.{space}.{op} %{r}10, [{name}], %{r}1{cas};
                 ld.{space}.u64 %rd12, [{name}]; cvt.u64.{word} %rd11, %{r}10;
                 shl.b64 %rd13, %rd11, 32; xor.b64 %out, %rd12, %rd13;"
            );
            let got = eval(&body, &[old, a, b]);
            let new = got ^ (old << 32);
            if wide { new } else { new & 0xffff_ffff }
        };
        assert_eq!(atom("add.u32", 5, 7, 0), 12);
        assert_eq!(atom("add.u64", 5, 7, 0), 12);
        assert_eq!(atom("exch.b32", 5, 7, 0), 7);
        assert_eq!(atom("cas.b32", 5, 5, 9), 9);
        assert_eq!(atom("cas.b64", 5, 6, 9), 5);
        assert_eq!(atom("min.s32", 5, 0xffff_ffff, 0), 0xffff_ffff);
        assert_eq!(atom("min.u32", 5, 0xffff_ffff, 0), 5);
        assert_eq!(atom("max.u64", 5, 6, 0), 6);
        assert_eq!(atom("inc.u32", 5, 5, 0), 0);
        assert_eq!(atom("dec.u32", 0, 5, 0), 5);
        assert_eq!(atom("and.b32", 6, 3, 0), 2);
        assert_eq!(atom("or.b32", 6, 3, 0), 7);
        assert_eq!(atom("xor.b32", 6, 3, 0), 5);
    }
    let float = "st.global.f64 [g], %d0; red.global.add.f64 [g], %d1; ld.global.f64 %d2, [g]; mov.b64 %out, %d2;";
    assert_eq!(
        eval(float, &[1.5_f64.to_bits(), 2.0_f64.to_bits()]),
        3.5_f64.to_bits()
    );
    let packed = "st.global.u32 [g], %r0; red.global.add.noftz.f16x2 [g], %r1; ld.global.u32 %r2, [g]; cvt.u64.u32 %out, %r2;";
    assert_eq!(eval(packed, &[0x3c00_3c00, 0x4000_3c00]), 0x4200_4000);
}

#[test]
fn asynchronous_copies_are_complete_when_waited_for() {
    let body = "st.global.v2.u64 [g], {%rd0, %rd1}; cp.async.cg.shared.global [s], [g], 16; cp.async.commit_group;
                cp.async.wait_group 0; ld.shared.u64 %rd2, [s+8];
                cp.async.ca.shared.global [s], [g], 8, 4; cp.async.wait_all; ld.shared.u64 %rd3, [s];
                add.u64 %out, %rd2, %rd3;";
    assert_eq!(eval(body, &[0xffff_ffff_0000_0005, 70]), 75);
}

#[test]
fn branches_scopes_and_special_registers() {
    let table = "ts: .branchtargets A, B, C; brx.idx %r0, ts; A: mov.u64 %out, 10; bra D;
                 B: mov.u64 %out, 20; bra D; C: mov.u64 %out, 30; D:";
    assert_eq!(
        (eval(table, &[0]), eval(table, &[1]), eval(table, &[2])),
        (10, 20, 30)
    );
    let scopes = "{ .reg .u64 %x; mov.u64 %x, 3; L: add.u64 %out, %out, %x; bra E; E: }
                  { .reg .u64 %x; mov.u64 %x, 4; bra L; add.u64 %out, 1000, 0; L: add.u64 %out, %out, %x; }";
    assert_eq!(eval(scopes, &[]), 7);
    assert_eq!(
        eval(
            "mov.u32 %r1, %ntid.x; mov.u32 %r2, %nctaid.y; add.u32 %r1, %r1, %r2; cvt.u64.u32 %out, %r1;",
            &[]
        ),
        2
    );
    assert_eq!(
        eval(
            "mov.u32 %r1, %lanemask_le; mov.u32 %r2, %laneid; add.u32 %r1, %r1, %r2; cvt.u64.u32 %out, %r1;",
            &[]
        ),
        1
    );
}
