//! The supervisor's view of sessions: their states and the owner of each segment.
//!
//! Both are private to the supervisor; values in the window are only hints.

#[cfg(feature = "alloc")]
mod runs;
#[cfg(feature = "alloc")]
mod segments;
mod state;

#[cfg(feature = "alloc")]
pub use segments::{GrantError, Owner, Run, SegmentTable, TakeBackError};
pub use state::{SessionState, State, TransitionError};

/// One use of a session number. Each reuse of a number increments its generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId {
    /// The session's number in its tenant.
    pub index: u32,
    /// The generation of that number.
    pub generation: u32,
}

impl core::fmt::Display for SessionId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "session {}.{}", self.index, self.generation)
    }
}
