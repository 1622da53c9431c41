//! Shared parts of the benchmarks: windows, payload runs, and results with their conditions.
//!
//! A benchmark prints ratios of values measured in one run, with the machine and the versions, since
//! absolute times vary between runs.

use std::error::Error;
use std::process::ExitCode;

pub mod driver;
pub mod payload;
pub mod processor_time;
pub mod samples;
pub mod transports;
pub mod turns;

/// Prints the error with which a benchmark failed and its causes.
pub fn failure(benchmark: &str, error: &dyn Error) -> ExitCode {
    let mut cause = Some(error);
    while let Some(error) = cause {
        eprintln!("{benchmark}: {error}");
        cause = error.source();
    }
    ExitCode::FAILURE
}
