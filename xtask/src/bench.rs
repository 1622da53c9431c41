//! `cargo xtask bench`: builds a benchmark with the release profile and runs it.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};

use crate::command::{Failure, Run, cargo};
use crate::{bench_monitors, bench_programs, stage};

#[derive(Debug, Subcommand)]
pub enum Bench {
    /// The ring between a VM and a process, on this machine's /dev/kvm.
    Ring {
        /// Write the figures as JSON to this file.
        #[arg(long)]
        json: Option<PathBuf>,
        /// Number of calls. Only the default measures.
        #[arg(long)]
        calls: Option<u64>,
    },
    /// The demo's programs on the CPU device, on one processor and on all.
    Programs(bench_programs::Options),
    /// Wormhole's monitor beside QEMU's: boots, memory, disk and network.
    Monitors(bench_monitors::Options),
    /// Kernel launches by a VM through the window.
    Launch {
        /// The device: `cpu` or `cuda:N`.
        #[arg(long, default_value = "cpu")]
        device: String,
        /// Number of launches. Only the default measures.
        #[arg(long)]
        launches: Option<u64>,
    },
    /// Single calls of the driver API, forwarded.
    Calls(Calls),
    /// Copies of 4 bytes to 256 MiB.
    Copies(Calls),
    /// Allocations, mappings and registrations.
    Memory(Calls),
    /// Launches by 1 to 8 threads.
    Threads(Calls),
    /// Waits for kernels of 0 to 10 ms, by each schedule flag of a context.
    Waits(Calls),
    /// A tenant beside hostile ones on the CPU device; one and a half minutes.
    Neighbours {
        /// Number of slices of each attack. Only the default measures.
        #[arg(long)]
        rounds: Option<u64>,
        /// Milliseconds of a slice. Only the default measures.
        #[arg(long)]
        slice: Option<u64>,
    },
}

/// Options of the benchmarks that measure calls of the driver API.
#[derive(Debug, Args)]
pub struct Calls {
    /// The device: `cpu` or `cuda:N`.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Compare with the machine's own driver, by turns.
    #[arg(long)]
    against: Option<Against>,
    /// Number of turns.
    #[arg(long, default_value_t = 5)]
    turns: u32,
    /// Number of samples of a cheap call. Only the default measures.
    #[arg(long)]
    samples: Option<u64>,
    /// Write the figures as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Another way for the same program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Against {
    Native,
}

pub fn bench(root: &Path, bench: &Bench) -> Result<(), Failure> {
    match bench {
        Bench::Ring { json, calls } => {
            let payloads = payloads(root)?;
            let mut run =
                Run::new(release(root, "ring")?).args([Path::new("--payloads"), &payloads]);
            if let Some(path) = json {
                run = run.args([Path::new("--json"), path]);
            }
            run.args(count("--calls", *calls)).check()
        }
        Bench::Launch { device, launches } => {
            let payloads = payloads(root)?;
            Run::new(stage::stage(root)?.wormhole())
                .args(["run", "--placement", "process", "--device", device, "--"])
                .args([
                    &release(root, "launch")?,
                    Path::new("--payloads"),
                    &payloads,
                ])
                .args(count("--launches", *launches))
                .check()
        }
        Bench::Neighbours { rounds, slice } => {
            let package = ["--package", "wormhole-backend-tests", "--bins"];
            cargo(root)
                .args(["build", "--release"])
                .args(package)
                .check()?;
            Run::new(release(root, "neighbours")?)
                .args(count("--rounds", *rounds))
                .args(count("--slice", *slice))
                .check()
        }
        Bench::Calls(options) => calls(root, "calls", options),
        Bench::Copies(options) => calls(root, "copies", options),
        Bench::Memory(options) => calls(root, "memory", options),
        Bench::Threads(options) => calls(root, "threads", options),
        Bench::Waits(options) => calls(root, "waits", options),
        Bench::Monitors(options) => bench_monitors::measure(root, options),
        Bench::Programs(options) => bench_programs::measure(root, options),
    }
}

/// Runs one group of the benchmark of calls.
fn calls(root: &Path, group: &str, options: &Calls) -> Result<(), Failure> {
    let wormhole = stage::stage(root)?.wormhole();
    let mut run = Run::new(release(root, "calls")?)
        .args([group])
        .args([Path::new("--wormhole"), &wormhole])
        .args(["--device", &options.device])
        .args(["--turns", &options.turns.to_string()])
        .args(count("--samples", options.samples));
    if options.against == Some(Against::Native) {
        run = run.args(["--native"]);
    }
    if let Some(path) = &options.json {
        run = run.args([Path::new("--json"), path]);
    }
    run.check()
}

/// Returns the words of a count that is given.
fn count(option: &str, given: Option<u64>) -> Vec<String> {
    given.map_or(Vec::new(), |count| {
        vec![option.to_owned(), count.to_string()]
    })
}

/// Builds a benchmark and returns its path.
fn release(root: &Path, name: &str) -> Result<PathBuf, Failure> {
    cargo(root)
        .args(["build", "--release", "--package", "wormhole-benches"])
        .check()?;
    Ok(root.join("target/release").join(name))
}

/// Builds the programs that run in a VM without a kernel and returns their folder.
fn payloads(root: &Path) -> Result<PathBuf, Failure> {
    let target = root.join("target/payload");
    cargo(&root.join("hypervisor/payload"))
        .args(["build", "--release"])
        .env("CARGO_TARGET_DIR", &target)
        .check()?;
    Ok(target.join("release"))
}
