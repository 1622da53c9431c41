//! `cargo xtask delays`: runs the tests of programs under load, with random delays on both sides of the window.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use clap::Args;

use crate::command::Failure;
use crate::test::{has_gpu, prepared};
use crate::{setup, stage, test_executables};

/// Tests of `runs` whose programs verify themselves at `process` placement.
const OF_PROGRAMS: [&str; 4] = ["process::", "transports::", "waiters::", "execution::"];

#[derive(Debug, Args)]
pub struct Options {
    /// Run the tests of `runs` whose names contain one of these texts. Without one, run those of programs at `process`
    /// placement, and on a machine with a GPU those of the GPU.
    filters: Vec<String>,
}

/// Runs the tests. Returns whether all passed.
pub fn delays(root: &Path, options: &Options) -> Result<bool, Failure> {
    setup::setup(root, true)?;
    let stage = stage::with_delays(root)?;
    let executables = test_executables::build(root, &["runs"])?;
    let of_gpu = has_gpu().then_some("gpu::");
    let usual = OF_PROGRAMS.into_iter().chain(of_gpu).map(str::to_owned);
    let filters = match options.filters.is_empty() {
        true => usual.collect(),
        false => options.filters.clone(),
    };
    let total = under_load(|| {
        test_executables::run(&executables, |run| {
            prepared(run, root, &stage).args(&filters)
        })
    })?;
    for failure in &total.failures {
        eprintln!("xtask: FAILED: {}", failure.trim_end());
    }
    println!("{} passed, {} failed", total.passed, total.failed);
    Ok(total.failed == 0)
}

/// Keeps each processor busy with a thread while `work` runs.
fn under_load<T>(work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let result = work();
        done.store(true, Ordering::Relaxed);
        result
    })
}
