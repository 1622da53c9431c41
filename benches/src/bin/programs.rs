//! Measures the demo's programs from their start to their end, with their check of the results and the start of the backend.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use clap::builder::PossibleValuesParser;
use wormhole_benches::failure;
use wormhole_benches::turns::{Job, Samples, by_turns};
use wormhole_figures::ways::Comparison;

/// Programs and their size arguments. The sizes make a run much longer than the start of a process.
const SIZES: &[(&str, u32)] = &[
    ("bitonic_sort", 1 << 19),
    ("black_scholes", 2_000_000),
    ("convolution", 3000),
    ("grid_sync", 512),
    ("half_gemm", 24),
    ("histogram", 16_000_000),
    ("mandelbrot", 2048),
    ("matrix_mul", 512),
    ("nbody", 4096),
    ("prefix_scan", 8_000_000),
    ("reduction", 16_000_000),
    ("spin_lock", 200),
    ("streams_events", 1_000_000),
    ("textures", 3000),
    ("transpose", 4000),
    ("vector_add", 8_000_000),
];

#[derive(Debug, Parser)]
struct Options {
    /// Measure these programs alone.
    #[arg(value_parser = PossibleValuesParser::new(SIZES.iter().map(|(name, _)| *name)))]
    names: Vec<String>,
    /// The `wormhole` that forwards.
    #[arg(long)]
    wormhole: PathBuf,
    /// The folder of the built programs.
    #[arg(long, default_value = "target/programs/static")]
    programs: PathBuf,
    #[command(flatten)]
    comparison: Comparison,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let chosen = |name: &str| options.names.is_empty() || options.names.iter().any(|it| it == name);
    let jobs = SIZES.iter().filter(|(name, _)| chosen(name));
    let jobs = jobs.map(|(name, size)| Job {
        name: (*name).to_owned(),
        command: vec![options.programs.join(name).into(), size.to_string().into()],
        samples: Samples::Whole(size.to_string()),
    });
    let jobs: Vec<Job> = jobs.collect();
    match by_turns("programs", &options.comparison, &options.wormhole, &jobs) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure("programs", &error),
    }
}
