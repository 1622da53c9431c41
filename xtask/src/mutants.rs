//! `cargo xtask mutants`: finds, for each served function of the driver API, a test that fails if the function returns
//! success and does nothing.
//!
//! The command first runs the tests unchanged and records the functions that each of them calls. Then, for each function, it
//! runs the tests that call it with the function disabled, until one fails that passes otherwise. It writes each result
//! to `shared-ring/api/tested.txt` at once, so that an interrupted run can be continued. `docs/api-coverage.md` lists
//! the results.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use wormhole_lock::Mutex;

use crate::command::{Failure, Run, cargo, step};
use crate::setup;
use crate::stage::{self, Stage};

/// Prefixes of tests that are not run: they test no single functions, or need the whole machine.
const LEFT_OUT: [&str; 3] = ["guest::", "guest_kill::", "gpu::"];
/// Factor by which a test may be slower than unchanged before it counts as failed.
const SLOWER: u32 = 5;
/// Least time limit of a test.
const LEAST: Duration = Duration::from_secs(15);
/// Parts of the names of tests that are tried last, because they test least of a function's purpose.
const LAST: [&str; 2] = ["bad_input", "before_it_is_initialised"];
/// Number of tests that run at the same time.
const LANES: usize = 2;

/// A libtest test.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Test {
    /// Name of the test on the coverage page.
    label: String,
    binary: PathBuf,
    name: String,
}

/// Result of a test that ran unchanged and passed.
#[derive(Clone, Debug)]
struct Record {
    test: Test,
    took: Duration,
    calls: BTreeSet<String>,
}

/// Finds tests for the functions whose names contain `filter`, or for those that have none (any more). Returns whether
/// each of them has one.
pub fn mutants(root: &Path, filter: Option<&str>) -> Result<bool, Failure> {
    let folder = root.join("target/mutants");
    let lanes = stages(root, &folder)?;
    let table = wormhole_idl::load(&root.join("shared-ring/api"))
        .map_err(|error| Failure::new(error.to_string()))?;
    let names: Vec<String> = table
        .functions
        .iter()
        .map(|function| function.name.clone())
        .collect();
    let tests = tests(root, &folder)?;
    step(&format!("seeing what each of {} tests calls", tests.len()));
    let records = recorded(&tests, &names, &lanes, root, &folder)?;

    let path = root.join("shared-ring/api/tested.txt");
    let known =
        wormhole_idl::Tested::load(&path).map_err(|error| Failure::new(error.to_string()))?;
    let wanted: Vec<&str> = match filter {
        Some(filter) => table
            .functions
            .iter()
            .filter(|function| table.forwarded(function).is_some())
            .map(|function| function.name.as_str())
            .filter(|name| name.contains(filter))
            .collect(),
        None => {
            let labels: BTreeSet<&str> = tests.iter().map(|test| test.label.as_str()).collect();
            known.missing(&table, &labels).collect()
        }
    };
    step(&format!(
        "{} functions do nothing, one by one",
        wanted.len()
    ));
    let known = Mutex::new(known);
    let next = Mutex::new(wanted.into_iter());
    let uncaught = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for lane in &lanes {
            scope.spawn(|| {
                while let Some(name) = taken(&next) {
                    let test = known.lock().by(name).map(str::to_owned);
                    let Some(test) = catcher(name, test.as_deref(), &records, lane, root) else {
                        eprintln!("xtask: no test notices that {name} does nothing");
                        uncaught.lock().push(name);
                        continue;
                    };
                    println!("{name}: {}", test.label);
                    let mut known = known.lock();
                    known.set(name, &test.label);
                    if let Err(error) = fs::write(&path, known.text(&table)) {
                        eprintln!("xtask: cannot write {}: {error}", path.display());
                    }
                }
            });
        }
    });
    let uncaught = uncaught.into_inner();
    println!(
        "mutants: {} functions are noticed by no test",
        uncaught.len()
    );
    Ok(uncaught.is_empty())
}

fn taken<'a>(next: &Mutex<impl Iterator<Item = &'a str>>) -> Option<&'a str> {
    next.lock().next()
}

/// Creates one installation for each lane, with a library whose functions can be disabled.
fn stages(root: &Path, folder: &Path) -> Result<Vec<Stage>, Failure> {
    let stage = stage::stage(root)?;
    cargo(root)
        .args(["build", "--release", "--package", "wormhole-guest"])
        .args(["--features", "mutants"])
        .env("CARGO_TARGET_DIR", folder)
        .check()?;
    (0..LANES)
        .map(|lane| {
            let copy = stage::copy(&stage, &folder.join(format!("stage-{lane}")))?;
            for name in ["libcuda.so", "libcuda.so.1"] {
                let library = copy.prefix.join("lib/wormhole").join(name);
                stage::place(&folder.join("release/libcuda.so"), &library)?;
            }
            Ok(copy)
        })
        .collect()
}

/// Builds the tests and lists them.
fn tests(root: &Path, folder: &Path) -> Result<Vec<Test>, Failure> {
    let whole = cargo(root).args(["test", "--no-run", "--message-format=json"]);
    let whole = whole.args(["--package", "wormhole", "--test", "runs"]);
    let library = cargo(root)
        .args(["test", "--no-run", "--message-format=json"])
        .args(["--package", "wormhole-guest", "--features", "mutants"])
        .env("CARGO_TARGET_DIR", folder);
    let mut tests = Vec::new();
    for (run, prefix) in [(whole, "hypervisor/tests"), (library, "guest-lib/tests")] {
        let (status, output) = run.output()?;
        if !status.success() {
            return Err(Failure::new("the tests cannot be built"));
        }
        for (target, binary) in executables(&output) {
            let (_, list) = Run::new(&binary).args(["--list"]).output()?;
            let names = list.lines().filter_map(|line| line.strip_suffix(": test"));
            tests.extend(
                names
                    .filter(|name| !LEFT_OUT.iter().any(|start| name.starts_with(start)))
                    .map(|name| Test {
                        label: format!("{prefix}/{target} {name}"),
                        binary: binary.clone(),
                        name: name.to_owned(),
                    }),
            );
        }
    }
    Ok(tests)
}

/// Returns the names and paths of the test executables in cargo's JSON messages.
fn executables(messages: &str) -> Vec<(String, PathBuf)> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| {
            let path = message.get("executable")?.as_str()?;
            let name = message.get("target")?.get("name")?.as_str()?;
            Some((name.to_owned(), path.into()))
        })
        .collect()
}

/// Runs every test unchanged and records the functions that it calls.
fn recorded(
    tests: &[Test],
    names: &[String],
    lanes: &[Stage],
    root: &Path,
    folder: &Path,
) -> Result<Vec<Record>, Failure> {
    let next = Mutex::new(tests.iter());
    let records = Mutex::new(Vec::new());
    let failure = Mutex::new(None);
    std::thread::scope(|scope| {
        for (index, lane) in lanes.iter().enumerate() {
            let calls = folder.join(format!("called-{index}"));
            let (next, records, failure) = (&next, &records, &failure);
            scope.spawn(move || {
                loop {
                    let Some(test) = next.lock().next() else {
                        return;
                    };
                    match record(test, names, lane, root, &calls) {
                        Ok(Some(record)) => records.lock().push(record),
                        Ok(None) => {
                            let said = fs::read_to_string(said_to(&calls)).unwrap_or_default();
                            eprintln!("xtask: {} fails as it is: {said}", test.label);
                        }
                        Err(failed) => *failure.lock() = Some(failed),
                    }
                }
            });
        }
    });
    if let Some(failed) = failure.into_inner() {
        return Err(failed);
    }
    Ok(records.into_inner())
}

/// Runs a test unchanged. Returns `None` if it fails.
fn record(
    test: &Test,
    names: &[String],
    lane: &Stage,
    root: &Path,
    calls: &Path,
) -> Result<Option<Record>, Failure> {
    let unusable =
        |error: std::io::Error| Failure::new(format!("cannot use {}: {error}", calls.display()));
    fs::write(calls, vec![0; names.len()]).map_err(unusable)?;
    let start = Instant::now();
    let environment = ("WORMHOLE_CALLED", calls.as_os_str().to_owned());
    let said = fs::File::create(said_to(calls)).map_err(unusable)?;
    let limit = Duration::from_secs(200);
    let passed = passes(test, lane, root, environment, limit, said.into())?;
    let bytes = fs::read(calls).map_err(unusable)?;
    let called = names.iter().zip(bytes).filter(|(_, byte)| *byte == 1);
    let record = Record {
        test: test.clone(),
        took: start.elapsed(),
        calls: called.map(|(name, _)| name.clone()).collect(),
    };
    Ok(passed.then_some(record))
}

/// Returns the path of the output of a recorded test, beside the file of its calls.
fn said_to(calls: &Path) -> PathBuf {
    calls.with_extension("said")
}

/// Returns the first test that fails with the function disabled and passes with it enabled. Tries the known test first,
/// then quick ones.
fn catcher<'a>(
    name: &str,
    known: Option<&str>,
    records: &'a [Record],
    lane: &Stage,
    root: &Path,
) -> Option<&'a Test> {
    let mut candidates: Vec<&Record> = records
        .iter()
        .filter(|record| record.calls.contains(name))
        .collect();
    candidates.sort_by_key(|record| {
        let last = LAST.iter().position(|name| record.test.name.contains(name));
        let other = known != Some(record.test.label.as_str());
        (last, other, record.took)
    });
    candidates
        .into_iter()
        .find(|record| {
            let limit = LEAST.max(record.took * SLOWER);
            let outcome = |mutant: &str| {
                let environment = ("WORMHOLE_MUTANT", mutant.into());
                passes(&record.test, lane, root, environment, limit, Stdio::null()).ok()
            };
            outcome(name) == Some(false) && outcome("") == Some(true)
        })
        .map(|record| &record.test)
}

/// Runs one test and returns whether it passed. A test that takes longer than `limit` has failed. Its standard output
/// goes to `output`.
fn passes(
    test: &Test,
    lane: &Stage,
    root: &Path,
    environment: (&str, std::ffi::OsString),
    limit: Duration,
    output: Stdio,
) -> Result<bool, Failure> {
    let seconds = limit.as_secs().to_string();
    let status = Command::new("timeout")
        .args(["--kill-after=5", &seconds])
        .arg(&test.binary)
        .args(["--exact", &test.name])
        .env("WORMHOLE_STAGE", &lane.prefix)
        .env("WORMHOLE_PROGRAMS", root.join("target/programs"))
        .env("WORMHOLE_IMAGES", setup::images(root))
        .env(environment.0, environment.1)
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(Stdio::null())
        .status();
    let status =
        status.map_err(|error| Failure::new(format!("cannot run {}: {error}", test.label)))?;
    Ok(status.success())
}
