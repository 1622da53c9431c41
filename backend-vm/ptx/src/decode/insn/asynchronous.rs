//! Copies, and the barriers that tell when they are complete.

use super::{Place, Pred, PredSource, Reg};

/// A copy from global to shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copy {
    pub dest: Place,
    pub source: Place,
    /// 4, 8 or 16.
    pub bytes: u32,
    /// Bytes to read; the rest is zeros.
    pub source_bytes: Option<Reg>,
    /// Where it holds, nothing is read.
    pub ignore: Option<PredSource>,
}

/// A copy of any size between global and shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BulkCopy {
    pub dest: Place,
    pub source: Place,
    pub bytes: Reg,
    /// The barrier that learns of the bytes.
    pub barrier: Option<Place>,
}

/// What is said of groups of copies. They are made at once: only the checker has groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyGroup {
    /// Those since the last group are one.
    Commit,
    /// Waits for all groups but so many, or for all copies.
    Wait { but: Option<u32> },
}

/// What an `mbarrier` instruction does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MbarrierAction {
    Init,
    Invalidate,
    ExpectBytes,
    CompleteBytes,
    Arrive,
    ArriveExpectingBytes,
    Drop,
    DropExpectingBytes,
    /// Whether a phase, given by its state or its parity, is complete.
    Test {
        parity: bool,
        suspends: bool,
    },
}

/// An operation on an `mbarrier`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MbarrierArgs {
    pub action: MbarrierAction,
    pub place: Place,
    /// Where the state before an arrival goes.
    pub dest: Option<Reg>,
    /// Where the answer of a test goes.
    pub dest_pred: Option<Pred>,
    /// A count of arrivals or bytes, a state or a parity.
    pub operand: Reg,
}
