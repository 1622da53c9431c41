//! What the benchmarks share: a window of their own, payload runs, and figures with their conditions.
//!
//! A benchmark prints ratios of things measured in one run, with the machine and the versions, since
//! absolute times move between runs.

use std::error::Error;
use std::process::ExitCode;

pub mod machine;
pub mod payload;
pub mod samples;

/// Says why a benchmark failed, cause by cause.
pub fn failure(benchmark: &str, error: &dyn Error) -> ExitCode {
    let mut cause = Some(error);
    while let Some(error) = cause {
        eprintln!("{benchmark}: {error}");
        cause = error.source();
    }
    ExitCode::FAILURE
}
