//! Developer commands: `cargo xtask …`. CI runs the same commands.

mod bench;
mod bench_monitors;
mod checks;
mod command;
mod cuda_python;
mod delays;
mod demo;
mod fixtures;
mod foreign;
mod linker;
mod machine;
mod mutants;
mod nccl;
mod numba;
mod nvcc;
mod older_cuda;
#[cfg(test)]
mod pages;
mod performance;
mod programs;
mod pytest;
mod python;
mod setup;
mod soak;
mod stage;
mod structure;
mod test;
mod test_executables;
mod test_results;
mod toolchain;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Wormhole's developer commands")]
struct Command {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Install packages from Debian and PyPI, and build programs and images.
    Setup {
        /// Also install and build the parts that only the tests need.
        #[arg(long)]
        tests: bool,
    },
    /// Build Wormhole and lay it out in target/wormhole.
    Stage,
    /// Run CUDA programs in guest VMs and verify their results: the given ones, or the standard set.
    Demo {
        /// Placement of the backend.
        #[arg(long, value_enum, default_value = "vm")]
        backend: demo::Backend,
        programs: Vec<PathBuf>,
    },
    /// Compile the images again that tests of the PTX engine and of the CUDA device read.
    Fixtures {
        /// Write them to folders below this one instead of beside their sources.
        #[arg(long)]
        into: Option<PathBuf>,
    },
    /// Run all checks and tests.
    Test,
    /// Run the tests of programs under load, with random delays on both sides of the window.
    Delays(delays::Options),
    /// Check the rules between crates, and print the size of each.
    Structure,
    /// Check the form of commits.
    History,
    /// Look for paths of this machine in sources and in the staged installation.
    Paths,
    /// Check which glibc the staged installation needs.
    Glibc,
    /// Look for comments, pages and messages of errors that make their reader guess.
    Prose,
    /// Run Numba's own CUDA tests on the CPU device.
    Numba(numba::Options),
    /// Run the Python programs that use NumPy, Numba and CuPy, at `process` placement or also in a guest.
    Python(python::Options),
    /// Run the tests of NVIDIA's Python bindings on the CPU device.
    CudaPython(cuda_python::Options),
    /// Run NCCL between two processes on the CPU device.
    Nccl,
    /// Run programs or Python tests that others wrote, natively and forwarded, and print where they end differently.
    #[command(subcommand)]
    Foreign(foreign::Suite),
    /// Run programs in lanes under load, beside a heartbeat, and look for wrong results, stalls and growing memory.
    Soak(soak::Options),
    /// For each function of the driver API, find a test that fails if the function does nothing.
    Mutants {
        /// Check all functions whose names contain this text. Without it, check the functions that have no test (any
        /// more).
        filter: Option<String>,
    },
    /// Run a benchmark and print the ratios of one run.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Write the tables and plots of docs/performance.md from the figures in benches/results.
    Performance,
}

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map(Path::to_path_buf)
        .unwrap_or_default();
    let outcome = match Command::parse().action {
        Action::Setup { tests } => setup::setup(&root, tests).map(|()| true),
        Action::Stage => stage::stage(&root).map(|_| true),
        Action::Demo { backend, programs } => demo::demo(&root, backend, &programs),
        Action::Fixtures { into } => fixtures::fixtures(&root, into.as_deref()).map(|()| true),
        Action::Test => test::test(&root),
        Action::Delays(options) => delays::delays(&root, &options),
        Action::Structure => structure::structure(&root),
        Action::History => checks::history(&root).map(|found| checks::holds(&found)),
        Action::Paths => checks::paths(&root).map(|found| checks::holds(&found)),
        Action::Glibc => checks::glibc(&root).map(|found| checks::holds(&found)),
        Action::Prose => checks::prose(&root).map(|found| checks::holds(&found)),
        Action::Numba(options) => numba::numba(&root, &options),
        Action::Python(options) => python::python(&root, &options),
        Action::CudaPython(options) => cuda_python::cuda_python(&root, &options),
        Action::Nccl => nccl::nccl(&root),
        Action::Foreign(suite) => foreign::foreign(&root, &suite),
        Action::Soak(options) => soak::soak(&root, &options),
        Action::Mutants { filter } => mutants::mutants(&root, filter.as_deref()),
        Action::Performance => performance::performance(&root).map(|()| true),
        Action::Bench(bench) => bench::bench(&root, &bench).map(|()| true),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}
