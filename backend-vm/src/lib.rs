//! The service that owns the device: a supervisor, and one confined worker process per guest process.
//!
//! The [`supervisor`] accepts tenants' windows and guest processes' control streams, grants sessions,
//! starts and reaps workers. A [`worker`] executes one guest process's calls on its device. The
//! [`sandbox`] is what keeps a worker, even a hostile one, to its own session.
//!
//! Invariants:
//! - The supervisor never waits for a guest, a worker or a launcher, and believes none of them.
//! - Only the supervisor decides who owns which part of a window, and when it may be used again.
//! - Unsafe code is in the modules that map memory, pass descriptors and start processes; what reads guest
//!   bytes has none.

pub mod channel;
pub mod counters;
pub mod device;
mod host_nvml;
pub mod memory;
pub mod report;
pub mod sandbox;
pub mod supervisor;
pub mod worker;

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
