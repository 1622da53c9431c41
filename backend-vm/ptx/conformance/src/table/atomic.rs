//! Atomic operations: on a word of each thread, so that every result is determined, and on a shared
//! word where the order does not matter.

use super::bits;
use crate::form::{Form, Format};
use crate::operands::Class::{self, Float, Int, Pair};

const OPERATIONS: &[(&str, &[&str])] = &[
    ("add", &["u32", "s32", "u64", "f32", "f64"]),
    ("min", &["u32", "s32", "u64", "s64"]),
    ("max", &["u32", "s32", "u64", "s64"]),
    ("and", &["b32", "b64"]),
    ("or", &["b32", "b64"]),
    ("xor", &["b32", "b64"]),
    ("exch", &["b32", "b64"]),
    ("inc", &["u32"]),
    ("dec", &["u32"]),
    ("add.noftz", &["f16", "f16x2", "bf16", "bf16x2"]),
];
/// Space, the thread's address in it, and the block's.
const SPACES: [(&str, &str); 2] = [("global", "%m"), ("shared", "%s")];

fn class(ty: &str) -> Class {
    match ty {
        "f16" => Float(Format::F16),
        "bf16" => Float(Format::Bf16),
        "f32" => Float(Format::F32),
        "f64" => Float(Format::F64),
        "f16x2" => Pair(Format::F16),
        "bf16x2" => Pair(Format::Bf16),
        _ => Int(bits(ty)),
    }
}

pub fn forms() -> Vec<Form> {
    let mut forms = Vec::new();
    for (space, own) in SPACES {
        for (op, types) in OPERATIONS {
            for ty in *types {
                let width = bits(ty);
                let inputs = [class(ty); 2];
                let atom = format!("atom.{space}.{op}.{ty}");
                let body = format!(
                    "st.{space}.b{width} [{own}], %i0; {atom} %o0, [{own}], %i1;
ld.{space}.b{width} %o1, [{own}];"
                );
                forms.push(Form::new(&atom, &inputs, &[width; 2], body).rows(48));
                if *op == "exch" {
                    continue;
                }
                let red = format!("red.{space}.{op}.{ty}");
                let body = format!(
                    "st.{space}.b{width} [{own}], %i0; {red} [{own}], %i1;
ld.{space}.b{width} %o0, [{own}];"
                );
                forms.push(Form::new(&red, &inputs, &[width], body).rows(48));
            }
        }
        for width in [16, 32, 64] {
            // In every other row the operand of the comparison is the stored value.
            let atom = format!("atom.{space}.cas.b{width}");
            let body = format!(
                ".reg .pred %p; .reg .b32 %odd; .reg .b{width} %x;
and.b32 %odd, %t, 1; setp.eq.u32 %p, %odd, 0; selp.b{width} %x, %i0, %i1, %p;
st.{space}.b{width} [{own}], %i0; {atom} %o0, [{own}], %x, %i2; ld.{space}.b{width} %o1, [{own}];"
            );
            forms.push(Form::new(&atom, &[Int(width); 3], &[width; 2], body).rows(48));
        }
    }
    vectors(&mut forms);
    contended(&mut forms);
    forms
}

/// Adds atomic operations on several elements of global memory.
fn vectors(forms: &mut Vec<Form>) {
    for (op, ty, count) in [
        ("add", "f32", 2),
        ("add", "f32", 4),
        ("add.noftz", "f16", 2),
        ("add.noftz", "f16", 4),
        ("min.noftz", "f16", 2),
        ("max.noftz", "bf16", 4),
        ("add.noftz", "bf16", 2),
        ("add.noftz", "f16x2", 2),
        ("max.noftz", "f16x2", 4),
        ("min.noftz", "bf16x2", 2),
    ] {
        let width = bits(ty);
        let list = |kind: char, from: usize| -> String {
            let names: Vec<_> = (from..from + count)
                .map(|i| format!("%{kind}{i}"))
                .collect();
            format!("{{{}}}", names.join(", "))
        };
        let atom = if ty == "bf16" {
            // The modifiers may stand in any order.
            format!("atom.global.v{count}.{ty}.{op}")
        } else {
            format!("atom.global.{op}.v{count}.{ty}")
        };
        let body = format!(
            "st.global.v{count}.b{width} [%m], {}; {atom} {}, [%m], {};
ld.global.v{count}.b{width} {}, [%m];",
            list('i', 0),
            list('o', 0),
            list('i', count),
            list('o', count)
        );
        let inputs = vec![class(ty); 2 * count];
        forms.push(Form::new(&atom, &inputs, &vec![width; 2 * count], body).rows(32));
    }
}

/// Adds operations of all threads of the block on one word.
fn contended(forms: &mut Vec<Form>) {
    for (space, word) in [("global", "%first"), ("shared", "%b")] {
        for (op, types) in OPERATIONS {
            for ty in types.iter().filter(|ty| !ty.contains('f')) {
                if *op == "exch" {
                    continue;
                }
                let width = bits(ty);
                // Scratch memory of the first thread.
                let first = if space == "global" {
                    ".reg .b64 %first; ld.param.u64 %first, [scratch];"
                } else {
                    ""
                };
                let red = format!("red.{space}.{op}.{ty}");
                let body = format!(
                    "{first} .reg .pred %p; setp.eq.u32 %p, %t, 0;
@%p st.{space}.b{width} [{word}], %i0; bar.sync 0;
{red} [{word}], %i1; bar.sync 0; ld.{space}.b{width} %o0, [{word}];"
                );
                // The result of counting to a bound depends on the order unless all threads count to
                // the same bound.
                let body = if matches!(*op, "inc" | "dec") {
                    body.replace("%i1;", "77;")
                } else {
                    body
                };
                let name = format!("{red} by a block");
                forms.push(Form::new(&name, &[Int(width); 2], &[width], body).rows(48));
            }
        }
    }
}
