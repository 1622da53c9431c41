//! `cargo xtask numba`: runs Numba's own unmodified CUDA tests on the CPU device.

use std::fs;
use std::path::Path;

use clap::Args;

use crate::command::{Failure, Run, step};
use crate::pytest::{Outcomes, PLUGIN, compiling_into};
use crate::python;
use crate::stage;

/// Part of the applicable tests that must pass, in percent.
const LEAST: usize = 80;
/// Seconds after which a test counts as failed.
const TIMEOUT: u32 = 300;
/// Window size with room for the managed memory of one test, which allocates a tenth of the device's memory.
const WINDOW: &str = "4G";
const TESTS: &str = "numba.cuda.tests";

#[derive(Debug, Args)]
pub struct Options {
    /// Run only tests that match this expression, as pytest's `-k` does.
    filter: Option<String>,
    /// Run the tests of this module alone, as in `cudapy.test_vectorize`.
    #[arg(long)]
    module: Option<String>,
}

/// Runs Numba's tests or the chosen ones, and returns whether enough of them pass. Writes the outcome of each test to
/// `target/numba.txt`. `WORMHOLE_STAGE` names the installation; without it the sources are staged first.
pub fn numba(root: &Path, options: &Options) -> Result<bool, Failure> {
    let stage = stage::given_or_built(root)?;
    let source = root.join("xtask/numba");
    let folder = python::environment(root)?;

    let report = root.join("target/numba.txt");
    // Removes the report of an earlier run.
    let _ = fs::remove_file(&report);
    let plugins = format!("{}:{}", source.display(), root.join(PLUGIN).display());
    let module = options
        .module
        .iter()
        .fold(TESTS.to_owned(), |all, module| format!("{all}.{module}"));
    step("running Numba's tests");
    let mut run = Run::new(stage.wormhole())
        .args(["run", "--placement", "process", "--device", "cpu"])
        .args(["--window", WINDOW, "--quiet"])
        .args(python::CUPY_WITH_PTX)
        .args(["--"])
        .args([folder.join("bin/python").as_path()])
        .args(["-m", "pytest", "--quiet", "--import-mode=importlib"])
        .args(["-p", "wormhole_numba", "-p", "wormhole_outcomes"])
        .args(["-p", "no:cacheprovider"])
        .args([
            format!("--timeout={TIMEOUT}"),
            format!("--outcomes={}", report.display()),
        ])
        .args([
            "--tb=no",
            "--no-summary",
            "-W",
            "ignore",
            "--pyargs",
            &module,
        ])
        .env("PYTHONPATH", plugins)
        .dir(&folder);
    run = compiling_into(run, &folder);
    if let Some(filter) = &options.filter {
        run = run.args(["-k", filter]);
    }
    // pytest exits with an error if tests fail; the report holds their number.
    let (_, _) = run.tee()?;
    let text = fs::read_to_string(&report)
        .map_err(|error| Failure::new(format!("cannot read {}: {error}", report.display())))?;
    let outcomes = Outcomes::read(&text)
        .ok_or_else(|| Failure::new(format!("{} is not a report", report.display())))?;
    outcomes.print("numba");
    Ok(outcomes.percent() >= LEAST)
}
