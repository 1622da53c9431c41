//! Single and double precision arithmetic whose results IEEE 754 determines.

use crate::form::{Form, Format};
use crate::operands::Class::{Float, Pred};

const ROUNDINGS: [&str; 4] = ["rn", "rz", "rm", "rp"];

pub fn singles() -> Vec<Form> {
    let mut forms = Vec::new();
    let single = Float(Format::F32);
    for rounding in ROUNDINGS {
        for ftz in ["", ".ftz"] {
            for sat in ["", ".sat"] {
                for op in ["add", "sub", "mul"] {
                    let name = format!("{op}.{rounding}{ftz}{sat}.f32");
                    forms.push(Form::plain(&name, &[single; 2], 32));
                }
                let name = format!("fma.{rounding}{ftz}{sat}.f32");
                forms.push(Form::plain(&name, &[single; 3], 32));
            }
            let name = format!("mad.{rounding}{ftz}.f32");
            forms.push(Form::plain(&name, &[single; 3], 32));
            forms.push(Form::plain(
                &format!("div.{rounding}{ftz}.f32"),
                &[single; 2],
                32,
            ));
            for op in ["rcp", "sqrt"] {
                forms.push(Form::plain(
                    &format!("{op}.{rounding}{ftz}.f32"),
                    &[single],
                    32,
                ));
            }
        }
    }
    for ftz in ["", ".ftz"] {
        for op in ["abs", "neg"] {
            forms.push(Form::plain(&format!("{op}{ftz}.f32"), &[single], 32));
        }
        for op in ["min", "max"] {
            for nan in ["", ".NaN"] {
                for sign in ["", ".xorsign.abs"] {
                    let name = format!("{op}{ftz}{nan}{sign}.f32");
                    forms.push(Form::plain(&name, &[single; 2], 32));
                }
            }
        }
    }
    // Without a rounding mode a product and a sum may be contracted. Apart, with a branch between them
    // in another block, they are the plain instructions.
    for op in ["add", "sub", "mul"] {
        for sat in ["", ".sat"] {
            let name = format!("{op}{sat}.f32");
            forms.push(Form::plain(&name, &[single; 2], 32));
        }
    }
    let body = "@%i2 add.rn.f32 %o0, %i0, %i1; @!%i2 mul.rn.f32 %o0, %i0, %i1;".to_owned();
    forms.push(Form::new(
        "predicated add, mul",
        &[single, single, Pred],
        &[32],
        body,
    ));
    forms
}

pub fn doubles() -> Vec<Form> {
    let mut forms = Vec::new();
    let double = Float(Format::F64);
    for rounding in ROUNDINGS {
        for op in ["add", "sub", "mul", "div"] {
            forms.push(Form::plain(
                &format!("{op}.{rounding}.f64"),
                &[double; 2],
                64,
            ));
        }
        for op in ["fma", "mad"] {
            forms.push(Form::plain(
                &format!("{op}.{rounding}.f64"),
                &[double; 3],
                64,
            ));
        }
        for op in ["rcp", "sqrt"] {
            forms.push(Form::plain(&format!("{op}.{rounding}.f64"), &[double], 64));
        }
    }
    for op in ["abs", "neg"] {
        forms.push(Form::plain(&format!("{op}.f64"), &[double], 64));
    }
    for op in ["min", "max", "add", "sub", "mul"] {
        forms.push(Form::plain(&format!("{op}.f64"), &[double; 2], 64));
    }
    forms
}
