//! Test harness that plays the launcher and the guests of a real supervisor and its real workers.

#![allow(missing_debug_implementations, reason = "tests print none of this")]
#![allow(
    clippy::cast_possible_truncation,
    reason = "test data is cut to bytes on purpose"
)]

pub mod attack;
pub mod backend;
pub mod grammar;
mod grammar_graphs;
pub mod guest;
pub mod messages;
pub mod random;
pub mod stub;
