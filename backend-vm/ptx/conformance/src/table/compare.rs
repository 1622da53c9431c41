//! Comparisons and selections.

use super::bits;
use crate::form::{Form, Format};
use crate::operands::Class::{self, Float, Int, Pair, Pred};

const SIGNED: [&str; 6] = ["eq", "ne", "lt", "le", "gt", "ge"];
const UNSIGNED: [&str; 10] = ["eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"];
const FLOAT: [&str; 14] = [
    "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
];

/// Returns the types, the class of their operands and their comparisons.
fn types() -> Vec<(&'static str, Class, &'static [&'static str])> {
    let mut types: Vec<(&str, Class, &[&str])> = Vec::new();
    for ty in ["b16", "b32", "b64"] {
        types.push((ty, Int(bits(ty)), &SIGNED[..2]));
    }
    for ty in ["s16", "s32", "s64"] {
        types.push((ty, Int(bits(ty)), &SIGNED));
    }
    for ty in ["u16", "u32", "u64"] {
        types.push((ty, Int(bits(ty)), &UNSIGNED));
    }
    types.extend([
        ("f32", Float(Format::F32), &FLOAT[..]),
        ("f64", Float(Format::F64), &FLOAT[..]),
        ("f16", Float(Format::F16), &FLOAT[..]),
        ("bf16", Float(Format::Bf16), &FLOAT[..]),
        ("f16x2", Pair(Format::F16), &FLOAT[..]),
        ("bf16x2", Pair(Format::Bf16), &FLOAT[..]),
    ]);
    types
}

/// Returns whether a type has `.ftz`.
fn flushes(ty: &str) -> bool {
    matches!(ty, "f32" | "f16" | "f16x2")
}

pub fn predicates() -> Vec<Form> {
    let mut forms = Vec::new();
    for (ty, class, comparisons) in types() {
        let pair = ty.ends_with("x2");
        for ftz in ["", ".ftz"] {
            if !ftz.is_empty() && !flushes(ty) {
                continue;
            }
            for compare in comparisons {
                let op = format!("setp.{compare}{ftz}.{ty}");
                if pair {
                    let body = format!("{op} %o0|%o1, %i0, %i1;");
                    forms.push(Form::new(&op, &[class; 2], &[1, 1], body));
                } else {
                    forms.push(Form::plain(&op, &[class; 2], 1));
                }
            }
        }
        for logic in ["and", "or", "xor"] {
            let op = format!("setp.{}.{logic}.{ty}", comparisons[1]);
            let inputs = [class, class, Pred];
            // Only a single half has no second result.
            let (dest, outputs) = match ty {
                "f16" | "bf16" => ("%o0", &[1][..]),
                _ => ("%o0|%o1", &[1, 1][..]),
            };
            let body = format!("{op} {dest}, %i0, %i1, %i2;");
            forms.push(Form::new(&op, &inputs, outputs, body).rows(64));
            let body = format!("{op} {dest}, %i0, %i1, !%i2;");
            forms.push(Form::new(&format!("{op} negated"), &inputs, outputs, body).rows(64));
        }
    }
    forms
}

pub fn values() -> Vec<Form> {
    let mut forms = Vec::new();
    for (ty, class, comparisons) in types() {
        // Types that `set` can store.
        let results: &[&str] = match ty {
            "f16" => &["u16", "s32", "f16"],
            "bf16" => &["u16", "s32", "bf16"],
            "f16x2" => &["f16x2"],
            "bf16x2" => &["bf16x2"],
            _ => &["u32", "s32", "f32"],
        };
        for ftz in ["", ".ftz"] {
            if !ftz.is_empty() && !flushes(ty) {
                continue;
            }
            for (index, compare) in comparisons.iter().enumerate() {
                let result = results[index % results.len()];
                let op = format!("set.{compare}{ftz}.{result}.{ty}");
                forms.push(Form::plain(&op, &[class; 2], bits(result)).rows(32));
            }
        }
        for logic in ["and", "or", "xor"] {
            for result in results {
                let op = format!("set.{}.{logic}.{result}.{ty}", comparisons[1]);
                let inputs = [class, class, Pred];
                forms.push(Form::plain(&op, &inputs, bits(result)).rows(32));
            }
        }
    }
    forms
}

pub fn selections() -> Vec<Form> {
    let mut forms = Vec::new();
    for ty in [
        "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64",
    ] {
        let int = Int(bits(ty));
        forms.push(Form::plain(&format!("selp.{ty}"), &[int, int, Pred], bits(ty)).rows(32));
        let inputs = [int, int, Int(32)];
        forms.push(Form::plain(&format!("slct.{ty}.s32"), &inputs, bits(ty)).rows(32));
        for ftz in ["", ".ftz"] {
            let inputs = [int, int, Float(Format::F32)];
            forms.push(Form::plain(
                &format!("slct{ftz}.{ty}.f32"),
                &inputs,
                bits(ty),
            ));
        }
    }
    for (ty, format) in [("f32", Format::F32), ("f64", Format::F64)] {
        for kind in [
            "finite",
            "infinite",
            "number",
            "notanumber",
            "normal",
            "subnormal",
        ] {
            forms.push(Form::plain(
                &format!("testp.{kind}.{ty}"),
                &[Float(format)],
                1,
            ));
        }
        let inputs = [Float(format); 2];
        forms.push(Form::plain(&format!("copysign.{ty}"), &inputs, bits(ty)));
    }
    forms
}
