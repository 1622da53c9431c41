//! Integer arithmetic, bits and carries.

use super::bits as width;
use crate::form::Form;
use crate::operands::Class::{Count, Int, SmallInt};

const TYPES: [&str; 6] = ["u16", "s16", "u32", "s32", "u64", "s64"];
const WORDS: [&str; 4] = ["u32", "s32", "u64", "s64"];

pub fn arithmetic() -> Vec<Form> {
    let mut forms = Vec::new();
    for ty in TYPES {
        let bits = width(ty);
        let int = Int(bits);
        for op in ["add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"] {
            forms.push(defined(op, ty));
        }
        for op in ["mad.lo", "mad.hi", "sad"] {
            forms.push(Form::plain(&format!("{op}.{ty}"), &[int; 3], bits));
        }
        if ty.starts_with('s') {
            for op in ["neg", "abs"] {
                forms.push(Form::plain(&format!("{op}.{ty}"), &[int], bits));
            }
        }
        if bits < 64 {
            forms.push(Form::plain(&format!("mul.wide.{ty}"), &[int; 2], 2 * bits));
            let inputs = [int, int, Int(2 * bits)];
            forms.push(Form::plain(&format!("mad.wide.{ty}"), &inputs, 2 * bits));
        }
    }
    for op in ["add.sat.s32", "sub.sat.s32"] {
        forms.push(Form::plain(op, &[Int(32); 2], 32));
    }
    forms.push(Form::plain("mad.hi.sat.s32", &[Int(32); 3], 32));
    for op in ["add", "min", "max"] {
        for ty in ["u16x2", "s16x2"] {
            forms.push(Form::plain(&format!("{op}.{ty}"), &[Int(32); 2], 32));
        }
    }
    for op in [
        "min.relu.s32",
        "max.relu.s32",
        "min.relu.s16x2",
        "max.relu.s16x2",
    ] {
        forms.push(Form::plain(op, &[Int(32); 2], 32));
    }
    for ty in ["u32", "s32"] {
        for part in ["lo", "hi"] {
            forms.push(Form::plain(
                &format!("mul24.{part}.{ty}"),
                &[Int(32); 2],
                32,
            ));
            forms.push(Form::plain(
                &format!("mad24.{part}.{ty}"),
                &[Int(32); 3],
                32,
            ));
        }
    }
    forms.push(Form::plain("mad24.hi.sat.s32", &[Int(32); 3], 32));
    forms
}

/// Returns the form of an operation on two operands. Divisors are made nonzero: division by zero is
/// not specified.
fn defined(op: &str, ty: &str) -> Form {
    let bits = width(ty);
    let name = format!("{op}.{ty}");
    if !matches!(op, "div" | "rem") {
        return Form::plain(&name, &[Int(bits); 2], bits);
    }
    let body = format!(
        ".reg .pred %p; .reg .b{bits} %z;
setp.eq.{ty} %p, %i1, 0; selp.b{bits} %z, 3, %i1, %p; {name} %o0, %i0, %z;"
    );
    Form::new(&name, &[Int(bits); 2], &[bits], body)
}

pub fn bits() -> Vec<Form> {
    let mut forms = Vec::new();
    for bits in [16, 32, 64] {
        for op in ["and", "or", "xor"] {
            forms.push(Form::plain(&format!("{op}.b{bits}"), &[Int(bits); 2], bits));
        }
        for op in ["not", "cnot"] {
            forms.push(Form::plain(&format!("{op}.b{bits}"), &[Int(bits)], bits));
        }
        for op in ["shl.b", "shr.u", "shr.s", "shr.b"] {
            forms.push(Form::plain(
                &format!("{op}{bits}"),
                &[Int(bits), Count],
                bits,
            ));
        }
    }
    for bits in [32, 64] {
        for op in ["popc", "clz"] {
            forms.push(Form::plain(&format!("{op}.b{bits}"), &[Int(bits)], 32));
        }
        forms.push(Form::plain(&format!("brev.b{bits}"), &[Int(bits)], bits));
        let inputs = [Int(bits), Int(bits), Count, Count];
        forms.push(Form::plain(&format!("bfi.b{bits}"), &inputs, bits));
    }
    for ty in WORDS {
        let bits = width(ty);
        let inputs = [Int(bits), Count, Count];
        forms.push(Form::plain(&format!("bfe.{ty}"), &inputs, bits));
        for op in ["bfind", "bfind.shiftamt"] {
            forms.push(Form::plain(&format!("{op}.{ty}"), &[Int(bits)], 32));
        }
    }
    forms.push(Form::plain("fns.b32", &[Int(32), SmallInt, SmallInt], 32));
    forms.extend(["clamp", "wrap"].into_iter().flat_map(|mode| {
        ["bmsk.MODE.b32", "szext.MODE.u32", "szext.MODE.s32"].map(|op| {
            let a = if op.starts_with('b') { Count } else { Int(32) };
            Form::plain(&op.replace("MODE", mode), &[a, Count], 32)
        })
    }));
    for side in ["l", "r"] {
        for mode in ["clamp", "wrap"] {
            let inputs = [Int(32), Int(32), Count];
            forms.push(Form::plain(&format!("shf.{side}.{mode}.b32"), &inputs, 32));
        }
    }
    for table in [0x00, 0x17, 0x3c, 0x80, 0x96, 0xca, 0xe8, 0xfe, 0xff] {
        let body = format!("lop3.b32 %o0, %i0, %i1, %i2, {table};");
        forms.push(Form::new(
            &format!("lop3.b32 {table:#04x}"),
            &[Int(32); 3],
            &[32],
            body,
        ));
    }
    for logic in ["or", "and"] {
        let op = format!("lop3.{logic}.b32");
        let body = format!(
            ".reg .pred %q; setp.gt.u32 %q, %i0, %i1; {op} %o0|%o1, %i0, %i1, %i2, 0x28, %q;"
        );
        forms.push(Form::new(&op, &[Int(32); 3], &[32, 1], body));
    }
    for mode in ["", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"] {
        forms.push(Form::plain(&format!("prmt.b32{mode}"), &[Int(32); 3], 32));
    }
    for a in ["u32", "s32"] {
        for b in ["u32", "s32"] {
            for op in ["dp4a", "dp2a.lo", "dp2a.hi"] {
                forms.push(Form::plain(&format!("{op}.{a}.{b}"), &[Int(32); 3], 32));
            }
        }
    }
    forms
}

/// Returns the forms of carry chains.
pub fn carry() -> Vec<Form> {
    let mut forms = Vec::new();
    for ty in WORDS {
        let bits = width(ty);
        for op in ["add", "sub"] {
            let body = format!(
                "{op}.cc.{ty} %o0, %i0, %i1; {op}c.cc.{ty} %o1, %i2, %i3; {op}c.{ty} %o2, %i0, %i2;"
            );
            forms.push(
                Form::new(
                    &format!("{op}.cc, {op}c.{ty}"),
                    &[Int(bits); 4],
                    &[bits; 3],
                    body,
                )
                .rows(64),
            );
        }
        // A borrow of a subtraction and a carry of an addition use the same flag, and either may
        // read it.
        for (first, second) in [("add.cc", "subc"), ("sub.cc", "addc")] {
            let body = format!("{first}.{ty} %o0, %i0, %i1; {second}.{ty} %o1, %i2, %i3;");
            let name = format!("{first}, {second}.{ty}");
            forms.push(Form::new(&name, &[Int(bits); 4], &[bits; 2], body).rows(64));
        }
        for part in ["lo", "hi"] {
            let body = format!(
                "mad.{part}.cc.{ty} %o0, %i0, %i1, %i2; madc.{part}.cc.{ty} %o1, %i1, %i2, %i3;
madc.{part}.{ty} %o2, %i2, %i3, %i0; "
            );
            let name = format!("mad.{part}.cc, madc.{part}.{ty}");
            forms.push(Form::new(&name, &[Int(bits); 4], &[bits; 3], body).rows(64));
        }
    }
    forms
}
