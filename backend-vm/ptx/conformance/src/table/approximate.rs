//! Approximate functions of singles and doubles, with the bounds that the PTX ISA documents
//! (9.7.3).

use crate::form::{Approximation, Check, Form, Format};
use crate::operands::Class::Float;

type Exact = fn(&[f64]) -> f64;
type Error = fn(&[f64], f64) -> f64;

/// Returns the spacing of singles at a number.
fn ulp(exact: f64) -> f64 {
    exact.abs().log2().floor().max(-126.0).exp2() * (-23.0_f64).exp2()
}

fn relative(exact: f64, exponent: f64) -> f64 {
    // Results below the normal range have fewer digits.
    (exact.abs() * exponent.exp2()).max((-149.0_f64).exp2())
}

/// Returns the bound of a sine or cosine, which depends on the range of the operand; beyond it, any
/// sine is accepted.
fn circular(x: &[f64], _: f64) -> f64 {
    let x = x[0].abs();
    if x <= std::f64::consts::PI {
        (-20.5_f64).exp2()
    } else if x <= 100.0 * std::f64::consts::PI {
        (-14.7_f64).exp2()
    } else {
        2.0
    }
}

pub fn forms() -> Vec<Form> {
    let single: [(&str, Exact, Error); 8] = [
        ("rcp", |x| 1.0 / x[0], |_, e| ulp(e)),
        ("sqrt", |x| x[0].sqrt(), |_, e| relative(e, -23.0)),
        ("rsqrt", |x| 1.0 / x[0].sqrt(), |_, e| relative(e, -22.9)),
        ("ex2", |x| x[0].exp2(), |_, e| relative(e, -22.0)),
        (
            "lg2",
            |x| x[0].log2(),
            |x, e| {
                if (0.5..=2.0).contains(&x[0]) {
                    (-22.0_f64).exp2()
                } else {
                    relative(e, -22.0)
                }
            },
        ),
        ("sin", |x| x[0].sin(), circular),
        ("cos", |x| x[0].cos(), circular),
        ("tanh", |x| x[0].tanh(), |_, e| relative(e, -11.0)),
    ];
    let mut forms = Vec::new();
    let bound = |format, flush, exact, error| {
        Check::Approximate(Approximation {
            format,
            flush,
            exact,
            error,
        })
    };
    for ftz in ["", ".ftz"] {
        let flush = !ftz.is_empty();
        for (op, exact, error) in single {
            if op == "tanh" && flush {
                continue;
            }
            forms.push(
                Form::plain(&format!("{op}.approx{ftz}.f32"), &[Float(Format::F32)], 32)
                    .checked(bound(Format::F32, flush, exact, error)),
            );
        }
        for op in ["approx", "full"] {
            let quotient: Exact = |x| x[0] / x[1];
            forms.push(
                Form::plain(&format!("div.{op}{ftz}.f32"), &[Float(Format::F32); 2], 32)
                    .checked(bound(Format::F32, flush, quotient, |_, e| 2.0 * ulp(e))),
            );
        }
    }
    let double: [(&str, Exact); 2] = [("rcp", |x| 1.0 / x[0]), ("rsqrt", |x| 1.0 / x[0].sqrt())];
    for (op, exact) in double {
        // The bound is twenty bits of the fraction.
        let error: Error = |_, e| e.abs() * (-20.0_f64).exp2();
        forms.push(
            Form::plain(&format!("{op}.approx.ftz.f64"), &[Float(Format::F64)], 64).checked(bound(
                Format::F64,
                true,
                exact,
                error,
            )),
        );
    }
    forms
}
