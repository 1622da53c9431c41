//! Video instructions, on whole words, on parts, and on two and four parts at once.

use crate::form::Form;
use crate::operands::Class::{Count, Int};

const TYPES: [&str; 2] = ["u32", "s32"];

pub fn forms() -> Vec<Form> {
    let mut forms = Vec::new();
    let int = Int(32);
    for op in ["vadd", "vsub", "vabsdiff", "vmin", "vmax"] {
        for d in TYPES {
            for a in TYPES {
                for b in TYPES {
                    for sat in ["", ".sat"] {
                        let name = format!("{op}.{d}.{a}.{b}{sat}");
                        forms.push(Form::plain(&name, &[int; 2], 32).rows(32));
                    }
                }
            }
        }
        let name = format!("{op}.s32.s32.u32 h1, b3");
        let body = format!("{op}.s32.s32.u32 %o0, %i0.h1, %i1.b3;");
        forms.push(Form::new(&name, &[int; 2], &[32], body).rows(32));
        let name = format!("{op}.s32.s32.s32.sat b2, h0, b1, %c");
        let body = format!("{op}.s32.s32.s32.sat %o0.b2, %i0.h0, %i1.b1, %i2;");
        forms.push(Form::new(&name, &[int; 3], &[32], body).rows(32));
        for second in ["add", "min", "max"] {
            let name = format!("{op}.s32.u32.s32.sat.{second}");
            forms.push(Form::plain(&name, &[int; 3], 32).rows(32));
        }
    }
    for op in ["vshl", "vshr"] {
        for a in TYPES {
            for mode in ["clamp", "wrap"] {
                let name = format!("{op}.{a}.{a}.u32.{mode}");
                forms.push(Form::plain(&name, &[int, Count], 32).rows(32));
                let name = format!("{op}.{a}.{a}.u32.sat.{mode}.add");
                forms.push(Form::plain(&name, &[int, Count, int], 32).rows(32));
            }
        }
    }
    for (d, a, b) in [
        ("u32", "u32", "u32"),
        ("s32", "s32", "s32"),
        ("s32", "u32", "s32"),
    ] {
        for tail in ["", ".sat", ".shr7", ".sat.shr15"] {
            let name = format!("vmad.{d}.{a}.{b}{tail}");
            forms.push(Form::plain(&name, &[int; 3], 32).rows(32));
            let name = format!("{name} b1, h1");
            let body = format!("vmad.{d}.{a}.{b}{tail} %o0, %i0.b1, %i1.h1, %i2;");
            forms.push(Form::new(&name, &[int; 3], &[32], body).rows(32));
        }
    }
    for compare in ["eq", "ne", "lt", "le", "gt", "ge"] {
        for (a, b) in [("u32", "u32"), ("s32", "s32"), ("u32", "s32")] {
            forms.push(Form::plain(&format!("vset.{a}.{b}.{compare}"), &[int; 2], 32).rows(32));
        }
        for parts in [2, 4] {
            let name = format!("vset{parts}.s32.u32.{compare}");
            forms.push(Form::plain(&name, &[int; 3], 32).rows(32));
            forms.push(Form::plain(&format!("{name}.add"), &[int; 3], 32).rows(32));
        }
    }
    for op in ["vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax"] {
        for parts in [2, 4] {
            for types in ["u32.u32.u32", "s32.s32.s32", "s32.u32.s32"] {
                for tail in ["", ".sat", ".add"] {
                    let name = format!("{op}{parts}.{types}{tail}");
                    forms.push(Form::plain(&name, &[int; 3], 32).rows(32));
                }
            }
        }
    }
    forms
}
