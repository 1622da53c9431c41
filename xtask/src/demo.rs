//! `cargo xtask demo`: runs CUDA programs in a guest VM and verifies their results.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::ValueEnum;
use serde::Deserialize;

use crate::command::{Failure, Run, step};
use crate::{programs, setup, toolchain};

/// Placement of the demo's backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// A process of the host.
    Process,
    /// A VM of its own.
    Vm,
}

impl Backend {
    /// Returns the value of `wormhole run --placement`.
    fn placement(self) -> &'static str {
        match self {
            Self::Process => "host",
            Self::Vm => "vm",
        }
    }
}

/// VM exits by the activity that the program reported, as [`Summary::exit_accounts`].
type Accounts = Vec<u64>;

/// Fields of the summary of `wormhole run --json` that the demo reports.
#[derive(Debug, Deserialize)]
struct Summary {
    guest: String,
    records: u64,
    requests: u64,
    exit_accounts: Option<Accounts>,
    backend_vm: Option<BackendVm>,
}

/// The backend's own VM.
#[derive(Debug, Deserialize)]
struct BackendVm {
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

/// Sets up, builds, boots a guest and runs the chosen programs in it, or the standard set. Returns whether all passed.
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
        "set up in {} s; booting a guest for {} programs",
        start.elapsed().as_secs(),
        programs.len()
    ));

    let json = root.join("target/demo.json");
    let run = Run::new(stage.wormhole())
        .args(["run", "--placement", backend.placement()])
        .args(["--device", "cpu", "--json"])
        .args([&json])
        .args(["--timeout", &PATIENCE.to_string()]);
    let steady = programs::steady(root);
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
    let exits = exits_per_call(
        summary.exit_accounts.as_deref().unwrap_or_default(),
        "the guest",
    )?;
    let (mut kind, mut backend_exits, mut most) = (String::new(), String::new(), exits);
    if let Some(vm) = &summary.backend_vm {
        let exits = exits_per_call(&vm.exit_accounts, "the backend VM")?;
        let guest = output.lines().find_map(|line| line.strip_prefix(BOOT));
        eprintln!(
            "xtask: the guest's boot is {}, the backend VM's {}",
            guest.unwrap_or("unknown"),
            vm.boot_id
        );
        if guest.is_none_or(|guest| guest == vm.boot_id) {
            println!("demo: FAIL guest and backend VM are not known to be two VMs");
            return Ok(false);
        }
        kind = " backend=vm vms=2".to_owned();
        backend_exits = format!(" backend_exits_per_call={exits:.5}");
        most = most.max(exits);
    }
    if most > MOST_EXITS {
        println!("demo: FAIL launching adds {most:.5} VM exits to each launch");
        return Ok(false);
    }
    println!(
        "demo: PASS programs={passed} guest={}{kind} requests={} records={} exits_per_call={exits:.5}{backend_exits}",
        summary.guest, summary.requests, summary.records
    );
    eprintln!("xtask: all of it took {} s", start.elapsed().as_secs());
    Ok(true)
}

/// VM exits per launch above which the demo fails. The limit lies far above the noise of a loaded machine.
const MOST_EXITS: f64 = 0.05;

/// Last line of the program whose exits are counted.
const STEADY: &str = "PASS steady";

/// Beginning of the line with the identity of the guest's boot.
const BOOT: &str = "boot ";

/// Builds the shell script that runs every program and then counts exits. Its status is 0 if all of them succeeded.
fn script(programs: &[PathBuf], steady: &Path) -> String {
    let mut text = format!("failed=0\necho \"{BOOT}$(cat /proc/sys/kernel/random/boot_id)\"\n");
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
