//! `cargo xtask bench programs`: times the demo's programs on the CPU device, on one processor and on all.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use clap::builder::PossibleValuesParser;
use serde::Serialize;

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
    /// Number of runs of each program. The best one counts, because noise only adds time. Only the default measures.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Write the figures as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Seconds from the program's start to its end, including its check of the results and the start of the backend.
#[derive(Debug, Serialize)]
struct Row {
    program: &'static str,
    size: u32,
    one_processor: f64,
    all_processors: f64,
}

#[derive(Debug, Serialize)]
struct Table {
    processors: usize,
    rows: Vec<Row>,
}

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
    let seconds = |name: &str, size: u32, processors: &str| -> Result<f64, Failure> {
        let mut best = f64::INFINITY;
        for _ in 0..runs {
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
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    };
    let all = format!("0-{}", processors - 1);
    let mut rows = Vec::with_capacity(SIZES.len());
    step(&format!("programs on the CPU device, best of {runs} runs"));
    println!(
        "{:<16}{:>10}  one processor  {processors} processors  ratio",
        "program", "size"
    );
    let chosen = |name: &str| {
        let named = options.programs.iter().any(|program| program == name);
        named || options.programs.is_empty()
    };
    for &(program, size) in SIZES.iter().filter(|(name, _)| chosen(name)) {
        let row = Row {
            program,
            size,
            one_processor: seconds(program, size, "0")?,
            all_processors: seconds(program, size, &all)?,
        };
        println!(
            "{program:<16}{size:>10}  {:>11.3} s  {:>10.3} s  {:>5.2}",
            row.one_processor,
            row.all_processors,
            row.one_processor / row.all_processors
        );
        rows.push(row);
    }
    let Some(path) = &options.json else {
        return Ok(());
    };
    let text = serde_json::to_string_pretty(&Table { processors, rows }).unwrap_or_default();
    std::fs::write(path, text)
        .map_err(|error| Failure::new(format!("cannot write {}: {error}", path.display())))
}
