//! `cargo xtask demo`: runs CUDA programs in a guest VM and verifies their results.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Deserialize;

use crate::command::{Failure, Run, step};
use crate::{programs, setup, stage, toolchain};

/// Fields of the summary of `wormhole run --json` that the demo reports.
#[derive(Debug, Deserialize)]
struct Summary {
    guest: String,
    records: u64,
    requests: u64,
    exit_accounts: Option<Vec<u64>>,
}

/// Seconds after which the guest counts as hung: many times the duration of its programs on an emulated host.
const PATIENCE: u32 = 150;
/// Most attempts to run the guest, because an emulated host sometimes fails it.
const ATTEMPTS: u32 = 3;

/// Launches during which VM exits are counted.
const LAUNCHES: u32 = 102_400;

impl Summary {
    /// Returns the VM exits while [`LAUNCHES`] kernels were launched, and while the same thread spun on private memory
    /// for as long. `programs/exits/steady.cu` enters these accounts.
    fn exits(&self) -> Option<(u64, u64)> {
        match self.exit_accounts.as_deref() {
            Some(&[_, launching, spinning, ..]) => Some((launching, spinning)),
            _ => None,
        }
    }
}

/// Sets up, builds, boots a guest and runs the chosen programs in it, or the standard set. Returns whether all passed.
pub fn demo(root: &Path, chosen: &[PathBuf]) -> Result<bool, Failure> {
    let start = Instant::now();
    setup::setup(root, false)?;
    let stage = stage::stage(root)?;
    let programs: Vec<PathBuf> = if chosen.is_empty() {
        programs::build(&toolchain::ensure(root)?, root)?
            .into_iter()
            .filter(|program| program.demo)
            .map(|program| program.path)
            .collect()
    } else {
        chosen.to_vec()
    };
    step(&format!(
        "set up in {} s; booting a guest for {} programs",
        start.elapsed().as_secs(),
        programs.len()
    ));

    let json = root.join("target/demo.json");
    let mut run = Run::new(stage.wormhole())
        .args(["run", "--placement", "host", "--device", "cpu", "--json"])
        .args([&json])
        .args(["--timeout", &PATIENCE.to_string()]);
    let steady = programs::steady(root);
    for program in programs.iter().chain([&steady]) {
        run = run.args([Path::new("--take"), program]);
    }
    let mut run = run.args(["--", "/bin/sh", "-c", &script(&programs, &steady)]);
    let (mut status, mut output) = run.tee_once()?;
    // Runs the guest again if it ended early or hung and no program failed: an emulated host causes that now and then.
    for _ in 1..ATTEMPTS {
        if status.success() || output.lines().any(|line| line.starts_with("FAIL")) {
            break;
        }
        step("the guest failed, and no program did: once more");
        (status, output) = run.tee_once()?;
    }
    let success = status.success();

    let passed = passes(&output);
    if !success || passed != programs.len() {
        println!(
            "demo: FAIL {passed} of {} programs passed; {}",
            programs.len(),
            if success {
                "the run itself ended well"
            } else {
                "the run ended with an error"
            }
        );
        return Ok(false);
    }
    let text = std::fs::read_to_string(&json)
        .map_err(|error| Failure::new(format!("cannot read {}: {error}", json.display())))?;
    let summary: Summary = serde_json::from_str(&text)
        .map_err(|error| Failure::new(format!("{} is not a summary: {error}", json.display())))?;
    if summary.requests == 0 || summary.records == 0 {
        println!("demo: FAIL the programs passed, but the worker executed nothing for them");
        return Ok(false);
    }
    let (launching, spinning) = summary
        .exits()
        .ok_or_else(|| Failure::new("the summary tells no VM exits"))?;
    eprintln!(
        "xtask: {launching} VM exits in {LAUNCHES} launches, {spinning} while their thread spun for as long"
    );
    // A negative difference is noise.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    let exits = launching.saturating_sub(spinning) as f64 / f64::from(LAUNCHES);
    if exits > MOST_EXITS {
        println!("demo: FAIL launching adds {exits:.5} VM exits to each launch");
        return Ok(false);
    }
    println!(
        "demo: PASS programs={passed} guest={} requests={} records={} exits_per_call={exits:.5}",
        summary.guest, summary.requests, summary.records
    );
    eprintln!("xtask: all of it took {} s", start.elapsed().as_secs());
    Ok(true)
}

/// VM exits per launch above which the demo fails. The limit lies far above the noise of a loaded machine.
const MOST_EXITS: f64 = 0.05;

/// Last line of the program whose exits are counted.
const STEADY: &str = "PASS steady";

/// Builds the shell script that runs every program and then counts exits. Its status is 0 if all of them succeeded.
fn script(programs: &[PathBuf], steady: &Path) -> String {
    let mut text = String::from("failed=0\n");
    for program in programs {
        text.push_str(&format!("'{}' || failed=1\n", program.display()));
    }
    text.push_str(&format!(
        "'{}' {LAUNCHES} || failed=1\nexit $failed\n",
        steady.display()
    ));
    text
}

/// Counts the programs that printed PASS, without the one whose exits are counted.
fn passes(output: &str) -> usize {
    let lines = || output.lines().filter(|line| line.starts_with("PASS "));
    lines().count() - lines().filter(|line| *line == STEADY).count().min(1)
}
