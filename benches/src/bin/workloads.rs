//! Measures programs with whole jobs: steps of training, inference, and the runtime API's calls.
//!
//! The programs in C++ use the shared CUDA runtime, so that others can forward them too. Those in Python need PyTorch and
//! a GPU. Each checks that its results are the same in each way.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use clap::builder::PossibleValuesParser;
use wormhole_benches::failure;
use wormhole_benches::turns::{Job, Samples, by_turns};
use wormhole_figures::ways::Comparison;

/// Programs of `programs/workloads`.
const PROGRAMS: [&str; 3] = ["runtime_calls", "mlp_training", "managed_patterns"];
/// Scripts of `benches/workloads`.
const SCRIPTS: [&str; 7] = [
    "mlp_step",
    "lenet_step",
    "resnet152",
    "managed_training",
    "gpt2_decode",
    "matmuls",
    "serving",
];

#[derive(Debug, Parser)]
struct Options {
    /// Measure these workloads alone.
    #[arg(value_parser = PossibleValuesParser::new(PROGRAMS.iter().chain(&SCRIPTS)))]
    workloads: Vec<String>,
    /// The `wormhole` that forwards.
    #[arg(long)]
    wormhole: PathBuf,
    /// The folder of the built programs.
    #[arg(long, default_value = "target/programs/shared")]
    programs: PathBuf,
    /// A Python with PyTorch, which runs the scripts as well.
    #[arg(long)]
    python: Option<PathBuf>,
    /// The folder of the scripts.
    #[arg(long, default_value = "benches/workloads")]
    scripts: PathBuf,
    /// Number of samples of a step or a cheap call. Only the default measures.
    #[arg(long)]
    samples: Option<u32>,
    #[command(flatten)]
    comparison: Comparison,
}

impl Options {
    /// Returns the chosen workloads.
    fn jobs(&self) -> Vec<Job> {
        let chosen = |name: &&str| {
            self.workloads.is_empty() || self.workloads.iter().any(|chosen| chosen == name)
        };
        let job = |name: &str, mut command: Vec<_>| {
            command.extend(self.samples.map(|samples| samples.to_string().into()));
            Job {
                name: name.to_owned(),
                command,
                samples: Samples::Printed,
            }
        };
        let programs = PROGRAMS
            .into_iter()
            .filter(chosen)
            .map(|name| job(name, vec![self.programs.join(name).into()]));
        let scripts = self.python.iter().flat_map(|python| {
            let script = move |name| {
                let script = self.scripts.join(name).with_extension("py");
                job(name, vec![python.into(), script.into()])
            };
            SCRIPTS.into_iter().filter(chosen).map(script)
        });
        programs.chain(scripts).collect()
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let jobs = options.jobs();
    match by_turns("workloads", &options.comparison, &options.wormhole, &jobs) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure("workloads", &error),
    }
}
