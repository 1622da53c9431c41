//! Differences from the kept answers that the CPU device is still to be rid of. An entry that accounts
//! for nothing any more must go.

use crate::latitude::{Covers, Known};

const fn refused(group: &'static str, forms: &'static str) -> Known {
    Known {
        group,
        forms,
        covers: Covers::Refusal,
        reason: "the CPU device does not know this form",
    }
}

/// What is to be mended.
pub const FAULTS: &[Known] = &[refused("video", "vmad.")];
