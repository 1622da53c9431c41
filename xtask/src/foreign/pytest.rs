//! Test suites that pytest runs. `xtask/pytest/suite` runs them, on machines without this command too.

use std::path::{Path, PathBuf};

use clap::Args;

use super::Ways;
use crate::command::{Failure, Run, step};
use crate::pytest::PLUGIN;
use crate::stage;

#[derive(Debug, Args)]
pub struct Options {
    /// Files and folders of tests.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    ways: Ways,
    /// Interpreter that has pytest and the packages of the suite.
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// Processes that share the tests.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Seconds that each test may take.
    #[arg(long, default_value_t = 90)]
    seconds: u64,
    /// Seconds that all of it may take.
    #[arg(long)]
    limit: Option<u64>,
    /// Run this many tests at most, spread over the suite.
    #[arg(long)]
    most: Option<usize>,
    /// File of tests that do not run, a line for each pattern: `PATTERN: reason`.
    #[arg(long)]
    deselect: Option<PathBuf>,
    /// Write results and logs to this folder instead of `target/foreign/pytest`.
    #[arg(long)]
    output: Option<PathBuf>,
    /// Arguments of pytest.
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Runs the tests in each way, and returns whether they end alike, or pass if there is one way.
pub fn run(root: &Path, options: &Options) -> Result<bool, Failure> {
    let stage = stage::given_or_built(root)?;
    let output = options.output.clone();
    let output = output.unwrap_or_else(|| root.join("target/foreign/pytest"));
    let ways = options.ways.all();
    step(&format!("results and logs go to {}", output.display()));
    let mut run = Run::new("python3")
        .args([root.join(PLUGIN).join("suite")])
        .args(ways.iter().flat_map(|way| ["--way", way.name()]))
        .args([Path::new("--wormhole"), &stage.wormhole()])
        .args([Path::new("--python"), &options.python])
        .args([Path::new("--output"), &output])
        .args(["--jobs".to_owned(), options.jobs.to_string()])
        .args(["--seconds".to_owned(), options.seconds.to_string()]);
    if let Some(limit) = options.limit {
        run = run.args(["--limit".to_owned(), limit.to_string()]);
    }
    if let Some(most) = options.most {
        run = run.args(["--most".to_owned(), most.to_string()]);
    }
    if let Some(tests) = &options.deselect {
        run = run.args([Path::new("--deselect"), tests]);
    }
    let run = run
        .args(&options.paths)
        .args(["--"])
        .args(&options.arguments);
    let (succeeded, _) = run.tee()?;
    Ok(succeeded)
}
