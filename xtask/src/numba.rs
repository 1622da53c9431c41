//! `cargo xtask numba`: runs Numba's own unmodified CUDA tests on the CPU device, or programs that use it in a guest.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;

use crate::command::{Failure, Run, step};
use crate::pytest::{Outcomes, PLUGIN, compiling_into, install, package};
use crate::stage::{self, Stage};

/// Part of the applicable tests that must pass, in percent.
const LEAST: usize = 80;
/// Seconds after which a test counts as failed.
const TIMEOUT: u32 = 300;
/// Window size with room for the managed memory of one test, which allocates a tenth of the device's memory.
const WINDOW: &str = "4G";
const TESTS: &str = "numba.cuda.tests";

/// Memory of a guest. The libraries that the programs load take 300 MB.
const MEMORY: &str = "1G";

/// Installs Numba under `target/numba`, and returns that folder.
fn environment(root: &Path) -> Result<PathBuf, Failure> {
    let folder = root.join("target/numba");
    install(
        "Numba and its tests' needs (about 300 MB)",
        &root.join("xtask/numba/requirements.txt"),
        &folder,
    )?;
    Ok(folder)
}

/// Runs each program of `programs/python` in a guest on the CPU device, and returns whether all pass.
fn guest(root: &Path, stage: &Stage) -> Result<bool, Failure> {
    let environment = environment(root)?;
    let python = environment.join("bin/python");
    step("compiling the packages' modules, which an emulated processor would take long for");
    Run::new(&python)
        .args(["-m", "compileall", "-qq", "-j", "0"])
        .args([package(&environment, "")?])
        .check()?;
    let folder = root.join("programs/python");
    let failed = |error| Failure::new(format!("cannot list {}: {error}", folder.display()));
    let entries = fs::read_dir(&folder).map_err(failed)?;
    let mut programs = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(failed)?;
    programs.sort();
    let mut all_pass = true;
    for program in programs {
        let start = Instant::now();
        let (status, text) = Run::new(stage.wormhole())
            .args(["run", "--memory", MEMORY, "--quiet"])
            .args([python.as_path()])
            .args(["-W", "ignore"])
            .args([&program])
            .output()?;
        let passes = status.success() && text.starts_with("PASS ");
        let seconds = start.elapsed().as_secs();
        println!(
            "{}: {status}, {seconds} s: {}",
            program.display(),
            text.trim()
        );
        all_pass &= passes;
    }
    Ok(all_pass)
}

#[derive(Debug, Args)]
pub struct Options {
    /// Run only tests that match this expression, as pytest's `-k` does.
    filter: Option<String>,
    /// Run the tests of this module alone, as in `cudapy.test_vectorize`.
    #[arg(long)]
    module: Option<String>,
    /// Run the programs of `programs/python` in a guest instead.
    #[arg(long, conflicts_with_all = ["filter", "module"])]
    guest: bool,
}

/// Runs Numba's tests, or with `--guest` the programs in a guest, and returns whether enough of them pass.
/// `WORMHOLE_STAGE` names the installation; without it the sources are staged first.
pub fn numba(root: &Path, options: &Options) -> Result<bool, Failure> {
    let stage = stage::given_or_built(root)?;
    if options.guest {
        guest(root, &stage)
    } else {
        tests(root, &stage, options)
    }
}

/// Installs Numba under `target/numba`, runs its tests or the chosen ones, and returns whether enough of them pass.
/// Writes the outcome of each test to `target/numba.txt`.
fn tests(root: &Path, stage: &Stage, options: &Options) -> Result<bool, Failure> {
    let source = root.join("xtask/numba");
    let folder = environment(root)?;

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
        .args(["--window", WINDOW, "--quiet", "--"])
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
