//! Conversions.

use super::bits;
use crate::form::{Form, Format};
use crate::operands::Class::{self, Float, Int, Pair};

const INTEGERS: [&str; 8] = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"];
const FLOATS: [(&str, Format); 4] = [
    ("f16", Format::F16),
    ("bf16", Format::Bf16),
    ("f32", Format::F32),
    ("f64", Format::F64),
];
const ROUNDINGS: [&str; 4] = ["rn", "rz", "rm", "rp"];
const INTEGRAL: [&str; 4] = ["rni", "rzi", "rmi", "rpi"];

/// Returns the register width of an integer; bytes are extended to a word.
fn word(ty: &str) -> u32 {
    if bits(ty) == 8 { 32 } else { bits(ty) }
}

/// Returns whether every value of `from` is a value of `to`.
fn contains(to: &str, from: &str) -> bool {
    match (to.starts_with('s'), from.starts_with('s')) {
        (false, true) => false,
        (true, false) => bits(to) > bits(from),
        _ => bits(to) >= bits(from),
    }
}

pub fn integers() -> Vec<Form> {
    let mut forms = Vec::new();
    for from in INTEGERS {
        for to in INTEGERS {
            for sat in ["", ".sat"] {
                if !sat.is_empty() && contains(to, from) {
                    continue;
                }
                let name = format!("cvt{sat}.{to}.{from}");
                forms.push(Form::plain(&name, &[Int(word(from))], word(to)).rows(48));
            }
        }
    }
    for to in ["u16", "s16"] {
        forms.push(Form::plain(
            &format!("cvt.pack.sat.{to}.s32"),
            &[Int(32); 2],
            32,
        ));
    }
    for to in ["u8", "s8", "u4", "s4", "u2", "s2"] {
        let name = format!("cvt.pack.sat.{to}.s32.b32");
        forms.push(Form::plain(&name, &[Int(32); 3], 32));
    }
    forms
}

pub fn to_floats() -> Vec<Form> {
    let mut forms = Vec::new();
    for from in INTEGERS {
        for (to, _) in FLOATS {
            if to == "bf16" && bits(from) == 8 {
                continue;
            }
            for rounding in ROUNDINGS {
                let name = format!("cvt.{rounding}.{to}.{from}");
                forms.push(Form::plain(&name, &[Int(word(from))], bits(to)).rows(64));
            }
        }
        for to in ["f16", "f32", "f64"] {
            let name = format!("cvt.rn.sat.{to}.{from}");
            forms.push(Form::plain(&name, &[Int(word(from))], bits(to)).rows(32));
        }
    }
    forms
}

pub fn to_integers() -> Vec<Form> {
    let mut forms = Vec::new();
    for to in INTEGERS {
        for (from, format) in FLOATS {
            if from == "bf16" && bits(to) == 8 {
                continue;
            }
            for rounding in INTEGRAL {
                let name = format!("cvt.{rounding}.{to}.{from}");
                forms.push(Form::plain(&name, &[Float(format)], word(to)).rows(96));
            }
            if from != "bf16" {
                let name = format!("cvt.rzi.sat.{to}.{from}");
                forms.push(Form::plain(&name, &[Float(format)], word(to)).rows(64));
            }
        }
        for rounding in ["rni", "rpi"] {
            let name = format!("cvt.{rounding}.ftz.{to}.f32");
            forms.push(Form::plain(&name, &[Float(Format::F32)], word(to)).rows(64));
        }
    }
    forms
}

pub fn floats() -> Vec<Form> {
    let mut forms = Vec::new();
    let mut push =
        |name: String, class: Class, bits| forms.push(Form::plain(&name, &[class], bits).rows(96));
    let modes = ["", ".sat"];
    // Narrowing rounds and widening is exact; a conversion to the same format rounds to an integer.
    for (from, class) in FLOATS.map(|(ty, format)| (ty, Float(format))) {
        for (to, _) in FLOATS {
            let ftz: &[&str] = match (from, to) {
                ("f32", _) | (_, "f32") => &["", ".ftz"],
                _ => &[""],
            };
            for flush in ftz {
                for sat in modes {
                    if !sat.is_empty() && (from == "bf16" || to == "bf16") {
                        continue;
                    }
                    let narrows = match to {
                        "f16" => matches!(from, "f32" | "f64"),
                        "bf16" => from != "bf16",
                        "f32" => from == "f64",
                        _ => false,
                    };
                    if narrows || from == "f16" && to == "bf16" {
                        for rounding in ROUNDINGS {
                            push(
                                format!("cvt.{rounding}{flush}{sat}.{to}.{from}"),
                                class,
                                bits(to),
                            );
                        }
                    } else if from == to {
                        for rounding in INTEGRAL {
                            push(
                                format!("cvt.{rounding}{flush}{sat}.{to}.{from}"),
                                class,
                                bits(to),
                            );
                        }
                        push(format!("cvt{flush}{sat}.{to}.{from}"), class, bits(to));
                    } else {
                        push(format!("cvt{flush}{sat}.{to}.{from}"), class, bits(to));
                    }
                }
            }
        }
    }
    let single = Float(Format::F32);
    for to in ["f16", "bf16", "f16x2", "bf16x2"] {
        for rounding in ["rn", "rz"] {
            for tail in ["", ".relu", ".satfinite", ".relu.satfinite"] {
                let pair = to.ends_with("x2");
                if !pair && tail.is_empty() {
                    continue;
                }
                let inputs = &[single; 2][..1 + usize::from(pair)];
                let name = format!("cvt.{rounding}{tail}.{to}.f32");
                forms.push(Form::plain(&name, inputs, bits(to)));
            }
        }
    }
    for rounding in ["rna", "rn", "rz", "rna.satfinite", "rn.relu", "rz.relu"] {
        forms.push(Form::plain(
            &format!("cvt.{rounding}.tf32.f32"),
            &[single],
            32,
        ));
    }
    for to in ["e4m3x2", "e5m2x2"] {
        for relu in ["", ".relu"] {
            let tail = format!("{relu}.{to}");
            forms.push(Form::plain(
                &format!("cvt.rn.satfinite{tail}.f32"),
                &[single; 2],
                16,
            ));
            let halves = [Pair(Format::F16)];
            forms.push(Form::plain(
                &format!("cvt.rn.satfinite{tail}.f16x2"),
                &halves,
                16,
            ));
            forms.push(Form::plain(
                &format!("cvt.rn{relu}.f16x2.{to}"),
                &[Int(16)],
                32,
            ));
        }
    }
    forms
}
