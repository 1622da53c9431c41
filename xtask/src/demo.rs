//! `cargo xtask demo`: runs CUDA programs in guest VMs and verifies their results.

mod vms;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::ValueEnum;
use serde::Deserialize;

use crate::command::{Failure, Run, step};
use crate::{programs, setup, toolchain};

/// Placement of the demo's backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// A process of the host, with one guest.
    Process,
    /// A VM of its own, with two guests.
    Vm,
}

/// VM exits by the activity that the program reported, as [`Summary::exit_accounts`].
type Accounts = Vec<u64>;

/// Fields of the summary of `wormhole run --json` that the demo reports.
#[derive(Debug, Deserialize)]
struct Summary {
    guest: String,
    records: u64,
    requests: u64,
    vm: Option<String>,
    exit_accounts: Option<Accounts>,
    backend_vm: Option<BackendVm>,
}

/// The backend's own VM.
#[derive(Debug, Deserialize)]
struct BackendVm {
    vm: String,
    boot_id: String,
    exit_accounts: Accounts,
}

/// Seconds after which the guest counts as hung: many times the duration of its programs on an emulated host.
const PATIENCE: u32 = 150;
/// Most attempts to run the guest, because an emulated host sometimes fails it.
const ATTEMPTS: u32 = 3;

/// Launches during which VM exits are counted.
const LAUNCHES: u32 = 102_400;

/// Returns the VM exits for each launch, of the VM `whose`: those while [`LAUNCHES`] kernels were launched, less those
/// while the same thread spun on private memory for as long. `programs/exits/steady.cu` enters these accounts.
fn exits_per_call(accounts: &[u64], whose: &str) -> Result<f64, Failure> {
    let &[_, launching, spinning, ..] = accounts else {
        return Err(Failure::new("the summary tells no VM exits"));
    };
    eprintln!(
        "xtask: {launching} VM exits of {whose} in {LAUNCHES} launches, {spinning} while their thread spun for as long"
    );
    // A negative difference is noise.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    let exits = launching.saturating_sub(spinning) as f64 / f64::from(LAUNCHES);
    Ok(exits)
}

/// Sets up, builds, boots guests and runs the chosen programs in them, or the standard set. Returns whether all passed.
pub fn demo(root: &Path, backend: Backend, chosen: &[PathBuf]) -> Result<bool, Failure> {
    let start = Instant::now();
    let stage = setup::setup_and_stage(root, false)?;
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
        "set up in {} s; booting {} for {} programs",
        start.elapsed().as_secs(),
        match backend {
            Backend::Process => "a guest",
            Backend::Vm => "two guests and a backend VM",
        },
        programs.len()
    ));
    let steady = programs::steady(root);
    if backend == Backend::Vm {
        let passed = vms::run(root, &stage, &programs, &steady);
        eprintln!("xtask: all of it took {} s", start.elapsed().as_secs());
        return passed;
    }

    let json = root.join("target/demo.json");
    let run = Run::new(stage.wormhole())
        .args(["run", "--placement", "host"])
        .args(["--device", "cpu", "--json"])
        .args([&json])
        .args(["--timeout", &PATIENCE.to_string()]);
    let last = launching(&steady);
    let mut run = run.args(["--", "/bin/sh", "-c", &commands(&programs, &last)]);
    let (mut status, mut output) = run.tee_once()?;
    // Runs the guest again if it ended early or hung and no program failed: an emulated host causes that now and then.
    for _ in 1..ATTEMPTS {
        if status.success() || output.lines().any(|line| line.starts_with("FAIL")) {
            break;
        }
        step("the guest failed, and no program did: once more");
        (status, output) = run.tee_once()?;
    }
    let read = || {
        std::fs::read_to_string(&json)
            .map_err(|error| Failure::new(format!("cannot read {}: {error}", json.display())))
    };
    let passed = judge(&output, status.success(), programs.len(), read)?;
    eprintln!("xtask: all of it took {} s", start.elapsed().as_secs());
    Ok(passed)
}

/// Prints the demo's line for a run of `count` programs in one guest. `read` returns the run's summary. Returns whether the
/// programs passed.
fn judge(
    output: &str,
    success: bool,
    count: usize,
    read: impl FnOnce() -> Result<String, Failure>,
) -> Result<bool, Failure> {
    let passed = passes(output);
    if !success || passed != count {
        println!(
            "demo: FAIL {passed} of {count} programs passed; {}",
            if success {
                "the run itself ended well"
            } else {
                "the run ended with an error"
            }
        );
        return Ok(false);
    }
    let summary: Summary = serde_json::from_str(&read()?)
        .map_err(|error| Failure::new(format!("the run's summary is none: {error}")))?;
    if summary.requests == 0 || summary.records == 0 {
        println!("demo: FAIL the programs passed, but the worker executed nothing for them");
        return Ok(false);
    }
    let exits = exits_per_call(
        summary.exit_accounts.as_deref().unwrap_or_default(),
        "the guest",
    )?;
    if exits > MOST_EXITS {
        println!("demo: FAIL launching adds {exits:.5} VM exits to each launch");
        return Ok(false);
    }
    println!(
        "demo: PASS programs={passed} guest={} requests={} records={} exits_per_call={exits:.5}",
        summary.guest, summary.requests, summary.records
    );
    Ok(true)
}

/// VM exits per launch above which the demo fails. The limit lies far above the noise of a loaded machine.
const MOST_EXITS: f64 = 0.05;

/// Last line of the program whose exits are counted.
const STEADY: &str = "PASS steady";

/// Identity of a kernel's boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Builds the shell commands of a guest, which runs every program and then these `last` commands. Their status is 0 if all
/// of them succeeded.
fn commands(programs: &[PathBuf], last: &str) -> String {
    let mut text = format!("failed=0\nread -r id <{BOOT_ID}\necho \"boot $id\"\n");
    for program in programs {
        text.push_str(&format!("'{}' || failed=1\n", program.display()));
    }
    text.push_str(last);
    text.push_str("exit $failed\n");
    text
}

/// Returns the shell command of the program whose exits are counted.
fn launching(steady: &Path) -> String {
    format!("'{}' {LAUNCHES} || failed=1\n", steady.display())
}

/// Counts the programs that printed PASS, without the one whose exits are counted.
fn passes(output: &str) -> usize {
    let lines = || output.lines().filter(|line| line.starts_with("PASS "));
    lines().count() - lines().filter(|line| *line == STEADY).count().min(1)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_demo_with_one_guest_passes_if_its_programs_do_and_launches_make_no_exits() {
        let summary = |records: u64, exits: u64| {
            json!({
                "guest": "kvm", "records": records, "requests": 1, "exit_accounts": [0, exits, 9, 0],
            })
        };
        let said = format!("PASS one\nPASS other\n{STEADY}\n");
        let judged = |said: &str, success, summary: serde_json::Value| {
            judge(said, success, 2, || Ok(summary.to_string())).expect("a summary")
        };
        assert!(judged(&said, true, summary(1, 9)));
        assert!(!judged(&said, false, summary(1, 9)), "the run failed");
        assert!(!judged("PASS one\nFAIL other\n", true, summary(1, 9)));
        assert!(!judged(&said, true, summary(0, 9)), "no record");
        assert!(!judged(&said, true, summary(1, u64::from(LAUNCHES))));
        let broken = judge(&said, true, 2, || Ok("nothing".to_owned()));
        assert!(broken.is_err());
    }
}
