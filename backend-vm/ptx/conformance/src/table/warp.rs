//! Collective operations of a warp's lanes, all of them or some.

use crate::form::Form;
use crate::operands::Class::{Clustered, Int, Lane, Pred};

/// Member masks of a warp: all, fours, ends, a half, one.
const MASKS: [u32; 5] = [
    0xffff_ffff,
    0x0f0f_0f0f,
    0x8000_0001,
    0x0000_ffff,
    0x0002_0000,
];

/// Restricts the instructions to the members; the results of the other lanes stay 0.
fn among(mask: u32, body: &str) -> String {
    if mask == u32::MAX {
        return body.to_owned();
    }
    format!(
        ".reg .pred %in_; .reg .b32 %bit;
and.b32 %bit, %t, 31; shr.u32 %bit, {mask:#x}, %bit; and.b32 %bit, %bit, 1;
setp.ne.u32 %in_, %bit, 0;
@!%in_ bra OUT;
{body}
OUT:"
    )
}

pub fn forms() -> Vec<Form> {
    let mut forms = Vec::new();
    for mask in MASKS {
        let mut push = |op: &str, inputs: &[_], outputs: &[u32], operands: &str| {
            let body = among(mask, &format!("{op} {operands}, {mask:#x};"));
            forms.push(Form::new(&format!("{op} {mask:#x}"), inputs, outputs, body));
        };
        for kind in ["all", "any", "uni"] {
            push(&format!("vote.sync.{kind}.pred"), &[Pred], &[1], "%o0, %i0");
        }
        push("vote.sync.ballot.b32", &[Pred], &[32], "%o0, %i0");
        for bits in [32, 64] {
            push(
                &format!("match.any.sync.b{bits}"),
                &[Clustered(bits)],
                &[32],
                "%o0, %i0",
            );
            let op = format!("match.all.sync.b{bits}");
            push(&op, &[Clustered(bits)], &[32, 1], "%o0|%o1, %i0");
        }
        for op in ["add", "min", "max"] {
            for ty in ["u32", "s32"] {
                push(
                    &format!("redux.sync.{op}.{ty}"),
                    &[Int(32)],
                    &[32],
                    "%o0, %i0",
                );
            }
        }
        for op in ["and", "or", "xor"] {
            push(
                &format!("redux.sync.{op}.b32"),
                &[Int(32)],
                &[32],
                "%o0, %i0",
            );
        }
    }
    for mode in ["up", "down", "bfly", "idx"] {
        // The lowest and highest lanes that clamp, and the number of lanes of a segment.
        for (clamp, what) in [
            (0x1f, 32),
            (0, 32),
            (0x101f, 16),
            (0x1800, 8),
            (0x1c03, 4),
            (0x1f00, 1),
        ] {
            let op = format!("shfl.sync.{mode}.b32");
            let body = format!("{op} %o0|%o1, %i0, %i1, {clamp:#x}, 0xffffffff;");
            let name = format!("{op} {clamp:#x} by {what}");
            forms.push(Form::new(&name, &[Int(32), Lane], &[32, 1], body));
        }
        // Segments of four lanes with some lanes missing: no lane reads a missing one.
        let op = format!("shfl.sync.{mode}.b32");
        let clamp = if mode == "up" { 0x1c00 } else { 0x1c03 };
        let body = among(
            0xf0f0_f00f,
            &format!("{op} %o0|%o1, %i0, %i1, {clamp:#x}, 0xf0f0f00f;"),
        );
        let name = format!("{op} {clamp:#x} among 0xf0f0f00f");
        forms.push(Form::new(&name, &[Int(32), Lane], &[32, 1], body));
    }
    forms.push(Form::new(
        "activemask.b32",
        &[Int(32)],
        &[32],
        "activemask.b32 %o0;".to_owned(),
    ));
    let body = "elect.sync %o0|%o1, 0xffffffff;".to_owned();
    forms.push(Form::new("elect.sync", &[Int(32)], &[32, 1], body));
    let body = among(0x0f0f_0f00, "elect.sync %o0|%o1, 0x0f0f0f00;");
    forms.push(Form::new(
        "elect.sync 0x0f0f0f00",
        &[Int(32)],
        &[32, 1],
        body,
    ));
    for (op, output, operand) in [
        ("barrier.cta.red.popc.aligned.u32", 32, "%i0"),
        ("barrier.cta.red.and.aligned.pred", 1, "%i0"),
        ("barrier.cta.red.or.aligned.pred", 1, "!%i0"),
    ] {
        let body = format!("{op} %o0, 0, {operand};");
        forms.push(Form::new(op, &[Pred], &[output], body));
    }
    for register in [
        "tid.x",
        "ntid.x",
        "ctaid.x",
        "nctaid.x",
        "laneid",
        "lanemask_eq",
        "lanemask_le",
        "lanemask_lt",
        "lanemask_ge",
        "lanemask_gt",
    ] {
        let body = format!("mov.u32 %o0, %{register};");
        forms.push(Form::new(
            &format!("mov.u32 %{register}"),
            &[Int(32)],
            &[32],
            body,
        ));
    }
    forms
}
