//! What the benchmarks share: a window of their own, payload runs, and figures with their conditions.
//!
//! A benchmark prints ratios of things measured in one run, with the machine and the versions, since
//! absolute times move between runs.

pub mod machine;
pub mod payload;
pub mod samples;
