//! Differences from the kept answers that the CPU device is still to be rid of. An entry that accounts
//! for nothing any more must go.

use crate::compare::Difference;
use crate::form::{Form, Format};
use crate::latitude::{Covers, Known};

const fn refused(group: &'static str, forms: &'static str) -> Known {
    Known {
        group,
        forms,
        covers: Covers::Refusal,
        reason: "the CPU device does not know this form",
    }
}

const fn rows(
    group: &'static str,
    forms: &'static str,
    covers: fn(&Form, &Difference) -> bool,
    reason: &'static str,
) -> Known {
    Known {
        group,
        forms,
        covers: Covers::Rows(covers),
        reason,
    }
}

const TINY: &str = "with .ftz a result that is subnormal before it is rounded is a zero";
const LARGE_DIVISOR: &str = "a quotient by more than 2^126 is a zero";

/// What is to be mended.
pub const FAULTS: &[Known] = &[
    refused("integer", "mad24.hi.sat.s32"),
    refused("atomic", "atom.global.v4.bf16.max.noftz"),
    refused("atomic", "atom.global.v2.bf16.add.noftz"),
    refused("video", "vmad."),
    rows("f32", "fma.rn.ftz.f32", flushed_single, TINY),
    rows("f32", "div.rp.ftz.f32", flushed_single, TINY),
    rows("f16", "mul.", flushed_half, TINY),
    rows("approximate", "div.approx.", large_divisor, LARGE_DIVISOR),
];

/// Whether results differ only where the kept one is a zero and the other is subnormal or next to it.
fn flushed(format: Format, difference: &Difference) -> bool {
    let bits = format.bits();
    let magnitude = u64::MAX >> (65 - bits);
    let normal = 1 << format.fraction();
    difference
        .kept
        .iter()
        .zip(&difference.found)
        .all(|(&kept, &found)| {
            (0..64 / bits).all(|part| {
                let (kept, found) = (kept >> (part * bits), found >> (part * bits));
                let same = (kept ^ found) & (u64::MAX >> (64 - bits)) == 0;
                same || kept & magnitude == 0 && found & magnitude <= normal
            })
        })
}

fn flushed_single(form: &Form, difference: &Difference) -> bool {
    form.name.contains(".ftz") && flushed(Format::F32, difference)
}

fn flushed_half(form: &Form, difference: &Difference) -> bool {
    form.name.contains(".ftz") && flushed(Format::F16, difference)
}

fn large_divisor(_: &Form, difference: &Difference) -> bool {
    let divisor = Format::F32.value(difference.operands[1]).abs();
    divisor > 126.0_f64.exp2() && divisor.is_finite() && difference.kept[0] << 33 == 0
}
