//! What the launcher, the supervisor and its workers share.
//!
//! The supervisor accepts tenants' windows and guest processes' control streams, grants sessions, starts and
//! reaps workers; a worker executes one guest process's calls. They speak over a [`channel`], agree on a
//! [`device`], and count in pages that both map ([`counters`], [`progress`]). No code for any device is in here:
//! the launcher and the supervisor are built without it.

pub mod arguments;
pub mod channel;
pub mod counters;
pub mod device;
pub mod memory;
pub mod process;
pub mod progress;
pub mod report;
pub mod tasks;

/// An error and its causes, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        // Errors that pass their cause through say the same thing twice.
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = error.source();
    }
    line
}
