//! `cargo xtask test`: runs all checks and tests.

use std::path::Path;
use std::time::Instant;

use crate::command::{Failure, Run, at_once, cargo, step};
use crate::stage::{self, Stage};
use crate::test_executables::{self, Executable};
use crate::test_results::TestResults;
use crate::{checks, older_cuda, setup, structure};

/// Tests that run the staged installation. Some look for what a run left among all processes that were started from it, so
/// that these are executed one executable after another.
const LOOK_AT_ALL_PROCESSES: [&str; 3] = ["runs", "soak", "demo"];

/// Package and name of tests that run a copy of the installation, and are thus executed beside those that look at all
/// processes of the installation itself.
const RUN_A_COPY: (&str, &str) = ("xtask", "commands");

/// Tests of the PTX engine with kernels compiled by nvcc.
const KERNEL_TESTS: [&str; 6] = [
    "halves",
    "library",
    "matrices",
    "programs",
    "synchronization",
    "textures",
];

/// Runs all checks and tests, prints the closing line, and returns whether all passed.
pub fn test(root: &Path) -> Result<bool, Failure> {
    let start = Instant::now();
    let stage = setup::setup_and_stage(root, true)?;
    setup::build_disk_for_tests(root, &stage.prefix)?;

    // Tests of virtual machines leave processors idle. Computations fill these, at the lowest priority.
    let (computations, tests) = at_once(|| computations(root), || tests(root, &stage));
    let mut total = tests?;
    total += computations?;

    eprintln!(
        "xtask: all of it took {} s, and {} s of processors",
        start.elapsed().as_secs(),
        processor_seconds()
    );
    if !rustix::process::geteuid().is_root() {
        eprintln!(
            "xtask: not root: tests of users, namespaces and cgroups that only root can make return early, and count as passed"
        );
    }
    eprintln!(
        "xtask: {} tests were skipped: they need what this machine lacks",
        total.skipped
    );
    // Printed last, so that the failures stand at the end of a long log.
    for failure in &total.failures {
        eprintln!("xtask: FAILED: {}", failure.trim_end());
    }
    println!("{} passed, {} failed", total.passed, total.failed);
    Ok(total.failed == 0)
}

/// Returns the processor time of all processes that have ended below this one (proc_pid_stat(5), `cutime` and `cstime`).
fn processor_seconds() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let behind_name = stat.rsplit(')').next().unwrap_or_default();
    let fields = behind_name.split_whitespace();
    let ticks: u64 = fields.skip(13).take(2).flat_map(str::parse::<u64>).sum();
    ticks / rustix::param::clock_ticks_per_second()
}

/// Runs the checks of sources and the workspace's tests. Tests of VMs take the longest, and leave processors idle: they
/// begin as soon as they are built, and all else is built and executed beside them.
fn tests(root: &Path, stage: &Stage) -> Result<TestResults, Failure> {
    let mut total = TestResults::default();
    total += single("formatting", cargo(root).args(["fmt", "--all", "--check"]))?;
    step("rules between crates");
    total += TestResults::of("rules between crates", structure::structure(root)?);
    total += check("the form of commits", &checks::history(root)?);
    total += check("paths of this machine", &checks::paths(root)?);
    total += check("the glibc of the installation", &checks::glibc(root)?);
    total += check("prose", &checks::prose(root)?);

    if !has_gpu() {
        eprintln!("xtask: skipping the tests that need an NVIDIA GPU: this machine has none");
    }
    let installed = test_executables::build(root, &LOOK_AT_ALL_PROCESSES)?;
    let (beside, here) = at_once(
        || others(root, stage),
        || test_executables::run(&installed, |run| prepared(run, root, stage)),
    );
    total += beside?;
    total += here?;
    Ok(total)
}

/// Builds and runs clippy and all tests but those that look at all processes.
fn others(root: &Path, stage: &Stage) -> Result<TestResults, Failure> {
    let mut executables = test_executables::build(root, &[])?;
    executables.retain(|executable| !LOOK_AT_ALL_PROCESSES.contains(&&*executable.target));
    let (with_copy, others): (Vec<_>, Vec<_>) = executables
        .into_iter()
        .partition(|executable| (&*executable.package, &*executable.target) == RUN_A_COPY);
    let kernels = older_cuda::build_kernels(root)?;
    let of_kernels: Vec<Executable> = others
        .iter()
        .filter(|executable| KERNEL_TESTS.contains(&&*executable.target))
        .cloned()
        .collect();
    let mut total = lints(root)?;
    total += test_executables::run(&others, |run| prepared(run, root, stage))?;
    step("the PTX engine on kernels of CUDA 12");
    total += test_executables::run(&of_kernels, |run| {
        prepared(run, root, stage).env("WORMHOLE_KERNELS", &kernels)
    })?;
    let copy = stage::copy(stage, &root.join("target/wormhole-copy"))?;
    total += test_executables::run(&with_copy, |run| prepared(run, root, &copy))?;
    Ok(total)
}

pub fn has_gpu() -> bool {
    Path::new("/dev/nvidiactl").exists()
}

/// Names the installation and the built programs to a test executable.
pub fn prepared(run: Run, root: &Path, stage: &Stage) -> Run {
    run.args(has_gpu().then_some("--include-ignored"))
        .env("WORMHOLE_STAGE", &stage.prefix)
        .env("WORMHOLE_PROGRAMS", root.join("target/programs"))
        .env("WORMHOLE_IMAGES", setup::images(root))
}

/// Runs clippy.
fn lints(root: &Path) -> Result<TestResults, Failure> {
    single(
        "lints",
        cargo(root).args([
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "--deny",
            "warnings",
        ]),
    )
}

/// Runs loom, and the tests under miri, which need a nightly toolchain. Prints the output of those that fail.
fn computations(root: &Path) -> Result<TestResults, Failure> {
    let mut total = suite_behind(
        "ring models under loom",
        cargo(root)
            .args(["test", "--package", "wormhole-ring", "--test", "loom"])
            .env("RUSTFLAGS", "--cfg loom")
            .env("CARGO_TARGET_DIR", root.join("target/loom")),
    )?;
    total += suite_behind(
        "ring tests under miri",
        miri(root, "wormhole-ring").args(["--test", "ring"]),
    )?;
    total += suite_behind(
        "tests of the exports' parameters under miri",
        miri(root, "wormhole-guest").args(["parameter::"]),
    )?;
    Ok(total)
}

/// Starts a package's unit tests under miri.
fn miri(root: &Path, package: &str) -> Run {
    Run::new("cargo")
        .dir(root)
        .args(["+nightly", "miri", "test", "--package", package, "--lib"])
        .env("CARGO_TARGET_DIR", root.join("target/miri"))
        .env("MIRIFLAGS", "-Zmiri-permissive-provenance")
}

/// Tallies one of the project's own checks, by its complaints.
fn check(what: &str, complaints: &[String]) -> TestResults {
    step(what);
    TestResults::of(what, checks::holds(complaints))
}

/// Runs a step that passes or fails as a whole.
fn single(what: &str, run: Run) -> Result<TestResults, Failure> {
    step(what);
    let (success, _) = run.tee()?;
    Ok(TestResults::of(what, success))
}

/// Runs a step whose output is libtest's, behind the others.
fn suite_behind(what: &str, run: Run) -> Result<TestResults, Failure> {
    step(&format!("{what}, behind the others"));
    let (success, output, errors) = run.behind()?;
    if !success {
        eprintln!("{errors}");
        println!("{output}");
    }
    step(&format!(
        "{what}: {}",
        if success { "passed" } else { "FAILED" }
    ));
    Ok(TestResults::of_libtest(what, &output, success))
}
