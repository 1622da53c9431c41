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

const LARGE_DIVISOR: &str = "a quotient by more than 2^126 is a zero";

/// What is to be mended.
pub const FAULTS: &[Known] = &[
    refused("integer", "mad24.hi.sat.s32"),
    refused("atomic", "atom.global.v4.bf16.max.noftz"),
    refused("atomic", "atom.global.v2.bf16.add.noftz"),
    refused("video", "vmad."),
    rows("approximate", "div.approx.", large_divisor, LARGE_DIVISOR),
];

fn large_divisor(_: &Form, difference: &Difference) -> bool {
    let divisor = Format::F32.value(difference.operands[1]).abs();
    divisor > 126.0_f64.exp2() && divisor.is_finite() && difference.kept[0] << 33 == 0
}
