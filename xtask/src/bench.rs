//! `cargo xtask bench`: builds a benchmark with the release profile and runs it.

use std::path::{Path, PathBuf};

use clap::Subcommand;

use crate::command::{Failure, Run, cargo};
use crate::{bench_programs, stage};

#[derive(Debug, Subcommand)]
pub enum Bench {
    /// The ring between a VM and a process, on this machine's /dev/kvm.
    Ring {
        /// Write the figures as JSON to this file.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// The demo's programs on the CPU device, on one processor and on all.
    Programs {
        /// Write the figures as JSON to this file.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Kernel launches by a VM through the window.
    Launch {
        /// The device: `cpu` or `cuda:N`.
        #[arg(long, default_value = "cpu")]
        device: String,
    },
    /// A tenant beside hostile ones on the CPU device; a minute.
    Neighbours,
}

pub fn bench(root: &Path, bench: &Bench) -> Result<(), Failure> {
    match bench {
        Bench::Ring { json } => {
            let payloads = payloads(root)?;
            let mut run =
                Run::new(release(root, "ring")?).args([Path::new("--payloads"), &payloads]);
            if let Some(path) = json {
                run = run.args([Path::new("--json"), path]);
            }
            run.check()
        }
        Bench::Launch { device } => {
            let payloads = payloads(root)?;
            Run::new(stage::stage(root)?.wormhole())
                .args(["run", "--placement", "process", "--device", device, "--"])
                .args([
                    &release(root, "launch")?,
                    Path::new("--payloads"),
                    &payloads,
                ])
                .check()
        }
        Bench::Neighbours => {
            let package = ["--package", "wormhole-backend-tests", "--bins"];
            cargo(root)
                .args(["build", "--release"])
                .args(package)
                .check()?;
            Run::new(release(root, "neighbours")?).check()
        }
        Bench::Programs { json } => bench_programs::measure(root, json.as_deref()),
    }
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
