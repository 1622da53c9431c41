//! Code that the launcher, the supervisor and its workers share.
//!
//! The supervisor accepts tenants' windows and guest processes' control streams, grants sessions, starts and reaps
//! workers; a worker executes one guest process's calls. They exchange messages over a [`channel`], agree on a
//! [`device`], and count in pages that the worker maps ([`counters`], [`progress`]). This crate contains no code for any
//! device, because the launcher and the supervisor are built without it.

pub mod arguments;
pub mod channel;
pub mod counters;
pub mod device;
pub mod memory;
pub mod neighbours;
pub mod operator;
pub mod process;
pub mod progress;
pub mod report;
pub mod tasks;
pub mod usage;

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Replaces control characters, which could move the cursor or change the terminal's state, by dots. Line ends and tabs
/// stay.
pub fn harmless(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => c,
        c if c.is_control() => '.',
        c => c,
    };
    text.chars().map(shown).collect()
}

/// Raises the number of descriptors that this process may have to its hard limit, and returns that; none if there is none.
///
/// # Errors
/// Same as `setrlimit`.
pub fn raise_descriptor_limit() -> io::Result<Option<u64>> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    setrlimit(Resource::Nofile, raised)?;
    Ok(maximum)
}

/// Formats an error and its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        // A transparent error has the text of its cause.
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = error.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::harmless;

    #[test]
    fn what_a_guest_says_does_not_reach_the_terminal_as_commands() {
        assert_eq!(
            harmless("its last lines:\n\x1b[2J\x1b]0;title\x07\r\u{9b}31m\tend"),
            "its last lines:\n.[2J.]0;title...31m\tend"
        );
    }
}
