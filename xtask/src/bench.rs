//! `cargo xtask bench`: builds a benchmark with the release profile and runs it.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use wormhole_figures::ways::Comparison;

use crate::command::{Failure, Run, cargo};
use crate::{bench_monitors, programs, stage, toolchain};

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
    /// The demo's programs, from their start to their end.
    Programs(Programs),
    /// Wormhole's monitor beside QEMU's: boots, memory, disk and network.
    Monitors(bench_monitors::Options),
    /// Kernel launches by a VM through the window.
    Launch {
        /// The device: `cpu` or `cuda:N`.
        #[arg(long, default_value = "cpu")]
        device: String,
        /// The transport: `poll`, `doorbell` or `socket`.
        #[arg(long, default_value = "poll")]
        transport: String,
        /// Number of launches. Only the default measures.
        #[arg(long)]
        launches: Option<u64>,
        /// Write the figures as JSON to this file.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Single calls of the driver API, forwarded.
    Calls(Calls),
    /// Copies of 4 bytes to 256 MiB.
    Copies(Calls),
    /// Allocations, mappings and registrations.
    Memory(Calls),
    /// Launches by 1 to 8 threads.
    Threads(Calls),
    /// Starts of 1 and of 8 processes, until their first kernels.
    Start(Calls),
    /// Programs with whole jobs: the runtime API's calls, training, and PyTorch's models on a GPU.
    Workloads(Workloads),
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
        /// Write the figures as JSON to this file.
        #[arg(long)]
        json: Option<PathBuf>,
    },
}

/// Options of the benchmarks that measure calls of the driver API.
#[derive(Debug, Args)]
pub struct Calls {
    #[command(flatten)]
    comparison: Comparison,
    /// Number of samples of a cheap call. Only the default measures.
    #[arg(long)]
    samples: Option<u64>,
}

/// Options of the benchmark of programs with whole jobs.
#[derive(Debug, Args)]
pub struct Workloads {
    /// Measure these workloads alone.
    names: Vec<String>,
    /// A Python with PyTorch, which measures its models as well.
    #[arg(long)]
    python: Option<PathBuf>,
    #[command(flatten)]
    calls: Calls,
}

/// Options of the benchmark of the demo's programs.
#[derive(Debug, Args)]
pub struct Programs {
    /// Measure these programs alone.
    names: Vec<String>,
    #[command(flatten)]
    comparison: Comparison,
}

pub fn bench(root: &Path, bench: &Bench) -> Result<(), Failure> {
    match bench {
        Bench::Ring { json, calls } => {
            let payloads = payloads(root)?;
            Run::new(release(root, "ring")?)
                .args([Path::new("--payloads"), &payloads])
                .args(count("--calls", *calls))
                .args(file(json.as_deref()))
                .check()
        }
        Bench::Launch {
            device,
            transport,
            launches,
            json,
        } => {
            let payloads = payloads(root)?;
            Run::new(stage::stage(root)?.wormhole())
                .args(["run", "--placement", "process", "--device", device])
                .args(["--transport", transport, "--"])
                .args([
                    &release(root, "launch")?,
                    Path::new("--payloads"),
                    &payloads,
                ])
                .args(count("--launches", *launches))
                .args(file(json.as_deref()))
                .check()
        }
        Bench::Neighbours {
            rounds,
            slice,
            json,
        } => {
            let package = ["--package", "wormhole-backend-tests", "--bins"];
            cargo(root)
                .args(["build", "--release"])
                .args(package)
                .check()?;
            Run::new(release(root, "neighbours")?)
                .args(count("--rounds", *rounds))
                .args(count("--slice", *slice))
                .args(file(json.as_deref()))
                .check()
        }
        Bench::Calls(options) => calls(root, "calls", options),
        Bench::Copies(options) => calls(root, "copies", options),
        Bench::Memory(options) => calls(root, "memory", options),
        Bench::Threads(options) => calls(root, "threads", options),
        Bench::Start(options) => calls(root, "start", options),
        Bench::Waits(options) => calls(root, "waits", options),
        Bench::Workloads(options) => workloads(root, options),
        Bench::Monitors(options) => bench_monitors::measure(root, options),
        Bench::Programs(options) => demo(root, options),
    }
}

/// Runs one group of the benchmark of calls.
fn calls(root: &Path, group: &str, options: &Calls) -> Result<(), Failure> {
    let wormhole = stage::stage(root)?.wormhole();
    Run::new(release(root, "calls")?)
        .args([group])
        .args([Path::new("--wormhole"), &wormhole])
        .args(options.comparison.words())
        .args(count("--samples", options.samples))
        .check()
}

/// Builds and runs programs with whole jobs.
fn workloads(root: &Path, options: &Workloads) -> Result<(), Failure> {
    let python = options.python.iter();
    built_programs(root, "workloads", "shared")?
        .args([Path::new("--scripts"), &root.join("benches/workloads")])
        .args(python.flat_map(|path| [Path::new("--python"), path]))
        .args(options.calls.comparison.words())
        .args(count("--samples", options.calls.samples))
        .args(&options.names)
        .check()
}

/// Builds and runs the demo's programs.
fn demo(root: &Path, options: &Programs) -> Result<(), Failure> {
    built_programs(root, "programs", "static")?
        .args(options.comparison.words())
        .args(&options.names)
        .check()
}

/// Builds the CUDA programs and starts the command of a benchmark that runs those with this linkage.
fn built_programs(root: &Path, benchmark: &str, linkage: &str) -> Result<Run, Failure> {
    programs::build(&toolchain::ensure(root)?, root)?;
    let wormhole = stage::stage(root)?.wormhole();
    let folder = root.join("target/programs").join(linkage);
    Ok(Run::new(release(root, benchmark)?)
        .args([Path::new("--wormhole"), &wormhole])
        .args([Path::new("--programs"), &folder]))
}

/// Returns the words of a count that is given.
fn count(option: &str, given: Option<u64>) -> Vec<String> {
    given.map_or(Vec::new(), |count| {
        vec![option.to_owned(), count.to_string()]
    })
}

/// Returns the words of a file for the figures.
fn file(given: Option<&Path>) -> impl Iterator<Item = &Path> {
    given
        .into_iter()
        .flat_map(|path| [Path::new("--json"), path])
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
