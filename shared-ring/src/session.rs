//! The supervisor's view of sessions: the order of their states, and who owns which segment.
//!
//! Both are private to the supervisor; what stands in the window is a hint.

#[cfg(feature = "alloc")]
mod segments;
mod state;

#[cfg(feature = "alloc")]
pub use segments::{GrantError, Owner, Run, SegmentTable, TakeBackError};
pub use state::{SessionState, State, TransitionError};

/// One use of a session number. A number is used again with the next generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId {
    /// The session's number in its tenant.
    pub index: u32,
    /// Which use of that number this is.
    pub generation: u32,
}

impl core::fmt::Display for SessionId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "session {}.{}", self.index, self.generation)
    }
}
