//! An executor in the test's process, and a device that logs its calls.

#![allow(dead_code, reason = "each test uses its part")]
#![allow(
    clippy::cast_possible_truncation,
    reason = "test data is cut to bytes on purpose"
)]

pub mod lanes;
pub mod recorder;
pub mod served;
pub mod whole;
