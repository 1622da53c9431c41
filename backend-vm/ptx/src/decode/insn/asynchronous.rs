//! Asynchronous copies, and the barriers that track their completion.

use super::{Place, Pred, PredSource, Reg};

/// Copy from global to shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Copy {
    pub dest: Place,
    pub source: Place,
    /// Size of the copy: 4, 8 or 16 bytes.
    pub bytes: u32,
    /// Number of bytes to read; the rest of the destination is filled with zeros.
    pub source_bytes: Option<Reg>,
    /// Predicate that, where it holds, replaces the source by zeros.
    pub ignore: Option<PredSource>,
}

/// Copy of any size between global and shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BulkCopy {
    pub dest: Place,
    pub source: Place,
    pub bytes: Reg,
    /// Barrier that counts the copied bytes.
    pub barrier: Option<Place>,
}

/// Operation on groups of copies. Copies complete when they are executed: only the checker tracks
/// groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyGroup {
    /// Makes a group of the copies since the last group.
    Commit,
    /// Waits for all groups but the latest `but`, or for all copies.
    Wait { but: Option<u32> },
}

/// Operation of an `mbarrier` instruction.
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
    /// Tests whether a phase, given by its state or its parity, is complete.
    Test {
        parity: bool,
        suspends: bool,
    },
}

/// Operation on an `mbarrier`, with its operands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MbarrierArgs {
    pub action: MbarrierAction,
    pub place: Place,
    /// Destination of the state before an arrival.
    pub dest: Option<Reg>,
    /// Destination of a test's result.
    pub dest_pred: Option<Pred>,
    /// Count of arrivals or bytes, a state or a parity.
    pub operand: Reg,
}
