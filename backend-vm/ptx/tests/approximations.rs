//! Compares approximate functions with the bounds that the PTX ISA documents.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "samples of ranges"
)]

mod common;

use common::Device;

/// Returns the largest error of a function of a single on samples of a range, by `error(got,
/// exact)`.
fn worst(
    op: &str,
    range: (f64, f64),
    exact: impl Fn(f64) -> f64,
    error: impl Fn(f64, f64) -> f64,
) -> f64 {
    let text = format!(
        ".version 8.7\n.target sm_90\n.address_size 64\n
         .visible .entry k(.param .u64 data) {{ .reg .b32 %r<3>; .reg .b64 %rd<3>; .reg .f32 %f<3>;
         ld.param.u64 %rd1, [data]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x;
         mad.lo.u32 %r1, %r1, 256, %r2; mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2;
         ld.global.f32 %f1, [%rd1]; {op} %f2, %f1; st.global.f32 [%rd1], %f2; ret; }}"
    );
    let device = Device::load(text.as_bytes());
    let count = 256 * 16;
    let inputs: Vec<f32> = (0..count)
        .map(|i| (range.0 + (range.1 - range.0) * (i as f64 + 0.5) / count as f64) as f32)
        .collect();
    let data = device.memory.upload(&inputs);
    device.launch("k", 16, 256, &[data]).unwrap();
    let got = device.memory.read::<f32>(data, count);
    inputs
        .iter()
        .zip(got)
        .map(|(&x, got)| error(f64::from(got), exact(f64::from(x))))
        .fold(0.0, f64::max)
}

fn relative(got: f64, exact: f64) -> f64 {
    ((got - exact) / exact).abs()
}

fn absolute(got: f64, exact: f64) -> f64 {
    (got - exact).abs()
}

#[test]
fn errors_stay_inside_their_bounds() {
    let two = |exponent: f64| exponent.exp2();
    for (op, range, exact, bound) in [
        (
            "rcp.approx.f32",
            (0.1, 9.0),
            (|x| 1.0 / x) as fn(f64) -> f64,
            two(-23.0),
        ),
        (
            "rcp.approx.ftz.f32",
            (-900.0, -1.0),
            |x| 1.0 / x,
            two(-23.0),
        ),
        ("sqrt.approx.f32", (1e-3, 1e6), f64::sqrt, two(-23.0)),
        (
            "rsqrt.approx.f32",
            (1e-3, 1e6),
            |x| 1.0 / x.sqrt(),
            two(-22.9),
        ),
        ("ex2.approx.f32", (-20.0, 20.0), f64::exp2, two(-22.0)),
        ("ex2.approx.ftz.f32", (0.0, 1.0), f64::exp2, two(-22.0)),
        ("lg2.approx.f32", (4.0, 1e9), f64::log2, two(-22.0)),
        ("tanh.approx.f32", (-4.0, -0.01), f64::tanh, two(-11.0)),
    ] {
        let found = worst(op, range, exact, relative);
        assert!(found <= bound, "{op}: {found:e} {bound:e}");
    }
    for (op, range, exact, bound) in [
        (
            "lg2.approx.f32",
            (0.5, 2.0),
            f64::log2 as fn(f64) -> f64,
            two(-22.0),
        ),
        ("sin.approx.f32", (-3.1, 3.1), f64::sin, two(-20.5)),
        ("cos.approx.f32", (-3.1, 3.1), f64::cos, two(-20.5)),
        ("sin.approx.ftz.f32", (-100.0, 100.0), f64::sin, two(-14.7)),
    ] {
        let found = worst(op, range, exact, absolute);
        assert!(found <= bound, "{op}: {found:e} {bound:e}");
    }
}
