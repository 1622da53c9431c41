//! `cargo xtask bench programs`: times the demo's programs on the CPU device, on one processor and on all.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use clap::builder::PossibleValuesParser;
use wormhole_figures::{Quantiles, Report, Unit, progress};

use crate::command::{Failure, Run, step};
use crate::{programs, stage, toolchain};

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

#[derive(Debug, Args)]
pub struct Options {
    /// Time these programs alone.
    #[arg(value_parser = PossibleValuesParser::new(SIZES.iter().map(|(name, _)| *name)))]
    programs: Vec<String>,
    /// Number of runs of each program. Only the default measures.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Write the figures as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Ways to run a program, the measured one first.
const WAYS: [&str; 2] = ["all processors", "one processor"];

/// Times the programs, prints a table, and writes it to a file if one is given. Uses the installation in `WORMHOLE_STAGE`,
/// if it is set.
pub fn measure(root: &Path, options: &Options) -> Result<(), Failure> {
    programs::build(&toolchain::ensure(root)?, root)?;
    let stage = stage::given_or_built(root)?;
    let runs = options.runs;
    let processors = std::thread::available_parallelism()
        .map_err(|error| Failure::new(format!("cannot count the processors: {error}")))?
        .get();
    let folder = root.join("target/programs/static");
    // Nanoseconds from the program's start to its end, with its check of the results and the start of the backend.
    let run = |name: &str, size: u32, processors: &str| -> Result<f64, Failure> {
        let start = Instant::now();
        let (status, output) = Run::new("taskset")
            .args(["--cpu-list", processors])
            .args([stage.wormhole()])
            .args([
                "run",
                "--placement",
                "process",
                "--window",
                "1G",
                "--quiet",
                "--",
            ])
            .args([folder.join(name)])
            .args([size.to_string()])
            .output()?;
        if !status.success() || !output.contains("PASS ") {
            return Err(Failure::new(format!("{name} {size} failed: {output}")));
        }
        Ok(start.elapsed().as_secs_f64() * 1e9)
    };
    let all = format!("0-{}", processors - 1);
    let mut report = Report::new("programs", &WAYS, &WAYS[1..], runs as usize);
    step(&format!("programs on the CPU device, {runs} runs"));
    let chosen = |name: &str| {
        let named = options.programs.iter().any(|program| program == name);
        named || options.programs.is_empty()
    };
    let chosen: Vec<_> = SIZES.iter().filter(|(name, _)| chosen(name)).collect();
    let bar = progress(chosen.len());
    for &(program, size) in chosen {
        bar.set_message(program);
        let mut measured = [BTreeMap::new(), BTreeMap::new()];
        for turn in 0..report.turns {
            for (turns, processors) in measured.iter_mut().zip([&*all, "0"]) {
                let took = run(program, size, processors)?;
                turns.extend(Quantiles::of(vec![took]).map(|quantiles| (turn, quantiles)));
            }
        }
        bar.inc(1);
        report.add(program, &size.to_string(), Unit::Nanoseconds, &measured);
    }
    bar.finish_and_clear();
    report
        .finish(options.json.as_deref())
        .map_err(|error| Failure::new(error.to_string()))
}
