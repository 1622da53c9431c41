//! Arithmetic of halves and bfloats, single and in pairs.

use crate::form::{Approximation, Check, Form, Format};
use crate::operands::Class::{self, Float, Pair};

/// Returns both shapes of a format: type, operand, bits.
fn shapes(format: Format) -> [(&'static str, Class, u32); 2] {
    match format {
        Format::F16 => [("f16", Float(format), 16), ("f16x2", Pair(format), 32)],
        _ => [("bf16", Float(format), 16), ("bf16x2", Pair(format), 32)],
    }
}

pub fn halves() -> Vec<Form> {
    let mut forms = Vec::new();
    for (ty, class, bits) in shapes(Format::F16) {
        for ftz in ["", ".ftz"] {
            for sat in ["", ".sat"] {
                for op in ["add", "sub", "mul"] {
                    for rounding in ["", ".rn"] {
                        let name = format!("{op}{rounding}{ftz}{sat}.{ty}");
                        forms.push(Form::plain(&name, &[class; 2], bits));
                    }
                }
                let name = format!("fma.rn{ftz}{sat}.{ty}");
                forms.push(Form::plain(&name, &[class; 3], bits));
            }
            forms.push(Form::plain(
                &format!("fma.rn{ftz}.relu.{ty}"),
                &[class; 3],
                bits,
            ));
            extremes(&mut forms, ftz, ty, class, bits);
        }
        for (op, error) in [
            (
                "tanh.approx",
                (|_, _| (-10.987_f64).exp2()) as fn(&[f64], f64) -> f64,
            ),
            ("ex2.approx", |_, exact| {
                (exact * (-9.9_f64).exp2()).max((-24.0_f64).exp2())
            }),
        ] {
            forms.push(approximate(op, ty, class, bits, Format::F16, error));
        }
    }
    forms
}

pub fn brains() -> Vec<Form> {
    let mut forms = Vec::new();
    for (ty, class, bits) in shapes(Format::Bf16) {
        for op in ["add", "sub", "mul"] {
            for rounding in ["", ".rn"] {
                forms.push(Form::plain(
                    &format!("{op}{rounding}.{ty}"),
                    &[class; 2],
                    bits,
                ));
            }
        }
        for relu in ["", ".relu"] {
            forms.push(Form::plain(
                &format!("fma.rn{relu}.{ty}"),
                &[class; 3],
                bits,
            ));
        }
        extremes(&mut forms, "", ty, class, bits);
        for (op, error) in [
            (
                "tanh.approx",
                (|_, exact| exact.abs() * (-8.0_f64).exp2()) as fn(&[f64], f64) -> f64,
            ),
            ("ex2.approx.ftz", |_, exact| exact * (-7.0_f64).exp2()),
        ] {
            forms.push(approximate(op, ty, class, bits, Format::Bf16, error));
        }
    }
    forms
}

fn approximate(
    op: &str,
    ty: &str,
    class: Class,
    bits: u32,
    format: Format,
    error: fn(&[f64], f64) -> f64,
) -> Form {
    let exact: fn(&[f64]) -> f64 = if op.starts_with("tanh") {
        |x| x[0].tanh()
    } else {
        |x| x[0].exp2()
    };
    Form::plain(&format!("{op}.{ty}"), &[class], bits).checked(Check::Approximate(Approximation {
        format,
        flush: op.ends_with("ftz"),
        exact,
        error,
    }))
}

/// Adds signs, minima and maxima.
fn extremes(forms: &mut Vec<Form>, ftz: &str, ty: &str, class: Class, bits: u32) {
    for op in ["neg", "abs"] {
        forms.push(Form::plain(&format!("{op}{ftz}.{ty}"), &[class], bits));
    }
    for op in ["min", "max"] {
        for nan in ["", ".NaN"] {
            for sign in ["", ".xorsign.abs"] {
                let name = format!("{op}{ftz}{nan}{sign}.{ty}");
                forms.push(Form::plain(&name, &[class; 2], bits));
            }
        }
    }
}
