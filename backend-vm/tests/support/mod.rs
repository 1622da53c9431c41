//! What the tests stand on: a launcher and guests that speak to a real supervisor and its real workers.

#![allow(dead_code, reason = "each test uses its part")]
#![allow(
    clippy::cast_possible_truncation,
    reason = "test data is cut to bytes on purpose"
)]

pub mod attack;
pub mod backend;
pub mod grammar;
mod grammar_code;
mod grammar_graphs;
mod grammar_sharing;
pub mod guest;
pub mod messages;
pub mod random;
pub mod recorded_arrays;
pub mod recorded_green_contexts;
pub mod recorded_references;
pub mod recorder;
pub mod served;
pub mod stub;
