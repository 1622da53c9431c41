//! `cargo xtask foreign`: builds programs of a checkout that others wrote, or takes their Python tests, runs each one
//! natively and forwarded, and prints where these runs end differently. Fetches nothing.

mod hecbench;
mod outcome;
mod pytest;
mod samples;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use clap::{Args, Subcommand, ValueEnum};
use wormhole_lock::Mutex;

use crate::command::{Failure, Run, step};
use crate::stage::{self, Stage};
use crate::toolchain::{self, Toolkit};
use outcome::Outcome;

/// Texts of programs and tests that are not run: a fault in a multicast object can take the GPUs of a shared machine
/// down.
const BARRED: &str = include_str!("../../pytest/barred.txt");
/// Programs that are not run because they fill a GPU with managed memory, by name.
const LARGE_MANAGED: [&str; 4] = [
    "UnifiedMemoryPerf",
    "mallocFree-cuda",
    "prefetch-cuda",
    "streamUM-cuda",
];

/// A suite that this command can run.
#[derive(Debug, Subcommand)]
pub enum Suite {
    /// NVIDIA's cuda-samples.
    Samples(Options),
    /// HeCBench, its folders `src/*-cuda`.
    Hecbench(Options),
    /// Tests that pytest runs.
    Pytest(pytest::Options),
}

/// A suite of programs whose checkouts this command can build.
#[derive(Clone, Copy, Debug)]
enum Checkout {
    Samples,
    Hecbench,
}

/// Other runs with which the forwarded ones are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Reference {
    /// Runs on this machine's own driver.
    Native,
}

/// Ways to run a suite.
#[derive(Debug, Args)]
struct Ways {
    /// Devices on which the forwarded programs run, as `wormhole run --device` takes them; `cpu` if not given.
    #[arg(long)]
    device: Vec<String>,
    /// Compare with runs on this machine's own driver. Otherwise every end but success is listed.
    #[arg(long, value_enum)]
    against: Option<Reference>,
}

impl Ways {
    /// Returns the ways, the reference first.
    fn all(&self) -> Vec<Way> {
        let mut ways = Vec::new();
        ways.extend(self.against.map(|Reference::Native| Way::Native));
        ways.extend(self.device.iter().cloned().map(Way::Forwarded));
        if self.device.is_empty() {
            ways.push(Way::Forwarded("cpu".to_owned()));
        }
        ways
    }
}

#[derive(Debug, Args)]
pub struct Options {
    /// The checkout.
    path: PathBuf,
    #[command(flatten)]
    ways: Ways,
    /// Run only programs whose name contains this text.
    #[arg(long, default_value = "")]
    filter: String,
    /// Build the programs of cuda-samples in this folder instead of `target/foreign`.
    #[arg(long)]
    output: Option<PathBuf>,
    /// Seconds that each run of a program may take.
    #[arg(long, default_value_t = 90)]
    seconds: u64,
}

/// A program of a suite.
#[derive(Debug)]
struct Program {
    name: String,
    /// Folder with its sources.
    sources: PathBuf,
}

/// A built program: the folder in which it runs, and its command.
#[derive(Debug)]
struct Built {
    folder: PathBuf,
    command: Vec<PathBuf>,
}

/// Way to run a program.
#[derive(Debug)]
enum Way {
    Native,
    Forwarded(String),
}

impl Way {
    fn name(&self) -> &str {
        match self {
            Self::Native => "native",
            Self::Forwarded(device) => device,
        }
    }

    /// Runs a built program. `timeout` ends it, so that the launcher ends as with any other program.
    fn run(&self, built: &Built, stage: &Stage, seconds: u64) -> Result<Outcome, Failure> {
        let mut words: Vec<PathBuf> = match self {
            Self::Native => Vec::new(),
            Self::Forwarded(device) => [
                &stage.wormhole(),
                Path::new("run"),
                Path::new("--placement"),
                Path::new("process"),
                Path::new("--quiet"),
                Path::new("--device"),
                Path::new(device),
                Path::new("--"),
            ]
            .map(PathBuf::from)
            .into(),
        };
        words.extend(["timeout", "--kill-after=5"].map(PathBuf::from));
        words.push(seconds.to_string().into());
        words.extend(built.command.iter().cloned());
        let (status, output) = Run::new(&words[0])
            .args(&words[1..])
            .dir(&built.folder)
            .ended()?;
        Ok(Outcome::of(status, &output))
    }
}

/// Runs a suite, and returns whether no program or test ends differently. Uses the installation in `WORMHOLE_STAGE`, if
/// it is set.
pub fn foreign(root: &Path, suite: &Suite) -> Result<bool, Failure> {
    match suite {
        Suite::Samples(options) => programs(root, Checkout::Samples, options),
        Suite::Hecbench(options) => programs(root, Checkout::Hecbench, options),
        Suite::Pytest(options) => pytest::run(root, options),
    }
}

/// Builds and runs the programs, and prints a table of those that end differently. Returns whether there are none. Uses
/// the toolkit in `CUDA_HOME`, if it is set.
fn programs(root: &Path, suite: Checkout, options: &Options) -> Result<bool, Failure> {
    let stage = stage::given_or_built(root)?;
    let toolkit = match std::env::var_os("CUDA_HOME") {
        Some(folder) => Toolkit::at(folder.into()),
        None => toolchain::ensure(root)?,
    };
    let checkout = fs::canonicalize(&options.path).map_err(|error| {
        Failure::new(format!("cannot open {}: {error}", options.path.display()))
    })?;
    let programs = match suite {
        Checkout::Samples => samples::programs(&checkout)?,
        Checkout::Hecbench => hecbench::programs(&checkout)?,
    };
    let programs: Vec<Program> = programs
        .into_iter()
        .filter(|program| program.name.contains(&options.filter))
        .collect();
    let ways = options.ways.all();
    let (allowed, barred): (Vec<_>, Vec<_>) = programs.into_iter().partition(may_run);
    for program in &barred {
        println!("{}: not run, for the sake of shared GPUs", program.name);
    }
    let output = (options.output.clone()).unwrap_or_else(|| root.join("target/foreign/samples"));
    let built = build(&output, suite, &toolkit, &stage, &allowed);
    let mut table = Table::new(&ways);
    for (program, built) in allowed.iter().zip(built) {
        let built = match built {
            Ok(built) => built,
            Err(why) => {
                println!("{}: not built: {why}", program.name);
                table.unbuilt += 1;
                continue;
            }
        };
        step(&format!("running {}", program.name));
        let outcomes = ways
            .iter()
            .map(|way| way.run(&built, &stage, options.seconds))
            .collect::<Result<Vec<_>, Failure>>()?;
        table.add(&program.name, outcomes, options.ways.against.is_some());
    }
    Ok(table.print())
}

/// Returns whether a program spares what others use of this machine.
fn may_run(program: &Program) -> bool {
    let texts = files(&program.sources);
    let names = |text: &[u8]| {
        BARRED
            .lines()
            .any(|name| memchr::memmem::find(text, name.as_bytes()).is_some())
    };
    !LARGE_MANAGED.contains(&program.name.as_str())
        && !texts
            .iter()
            .filter_map(|file| fs::read(file).ok())
            .any(|text| names(&text))
}

/// Builds all programs, as many at a time as there are processors.
fn build(
    output: &Path,
    suite: Checkout,
    toolkit: &Toolkit,
    stage: &Stage,
    programs: &[Program],
) -> Vec<Result<Built, Failure>> {
    let queue = Mutex::new(programs.iter().enumerate());
    let next = || queue.lock().next();
    let make = || {
        let mut made = Vec::new();
        while let Some((place, program)) = next() {
            step(&format!("building {}", program.name));
            let built = match suite {
                Checkout::Samples => samples::build(program, toolkit, stage, output),
                Checkout::Hecbench => hecbench::build(program, toolkit),
            };
            made.push((place, built));
        }
        made
    };
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let mut made: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(make)).collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap_or_default())
            .collect()
    });
    made.sort_by_key(|(place, _)| *place);
    made.into_iter().map(|(_, built)| built).collect()
}

/// Returns a compiler's command with the toolkit's own libraries, which it does not find by itself in every layout.
fn with_toolkit(run: Run, toolkit: &Toolkit) -> Run {
    let path = std::env::var("PATH").unwrap_or_default();
    let compilers = toolkit.nvcc();
    let folder = compilers.parent().unwrap_or(Path::new("."));
    run.env("PATH", format!("{}:{path}", folder.display()))
        .env("LIBRARY_PATH", toolkit.libraries())
}

/// Returns the files of a folder, in order.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    files
}

/// Runs a compiler. The error has the first line that names one.
fn compile(run: Run) -> Result<(), Failure> {
    let (succeeded, output, errors) = run.behind()?;
    if succeeded {
        return Ok(());
    }
    let text = format!("{errors}\n{output}");
    let line = text.lines().find(|line| {
        ["rror", "cannot find", "undefined reference"]
            .iter()
            .any(|word| line.contains(word))
    });
    Err(Failure::new(line.unwrap_or("the compiler says nothing")))
}

/// Outcomes of the programs, by way.
#[derive(Debug)]
struct Table {
    ways: Vec<String>,
    rows: Vec<(String, Vec<Outcome>)>,
    alike: usize,
    unbuilt: usize,
}

impl Table {
    fn new(ways: &[Way]) -> Self {
        Self {
            ways: ways.iter().map(|way| way.name().to_owned()).collect(),
            rows: Vec::new(),
            alike: 0,
            unbuilt: 0,
        }
    }

    /// Adds a program. With a reference, which is the first outcome, a program is listed if another outcome differs.
    fn add(&mut self, name: &str, outcomes: Vec<Outcome>, has_reference: bool) {
        let wanted = match outcomes.first() {
            Some(first) if has_reference => first.clone(),
            _ => Outcome::Passed,
        };
        if outcomes.iter().all(|outcome| outcome.is_like(&wanted)) {
            self.alike += 1;
        } else {
            self.rows.push((name.to_owned(), outcomes));
        }
    }

    fn print(&self) -> bool {
        println!(
            "{} programs end alike, {} differ, {} were not built",
            self.alike,
            self.rows.len(),
            self.unbuilt
        );
        if self.rows.is_empty() {
            return true;
        }
        println!("\n| program | {} |", self.ways.join(" | "));
        println!("|---{}|", "|---".repeat(self.ways.len()));
        for (name, outcomes) in &self.rows {
            let outcomes: Vec<String> = outcomes.iter().map(Outcome::to_string).collect();
            println!("| {name} | {} |", outcomes.join(" | "));
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_end_unlike_the_reference_are_listed() {
        let ways = [Way::Native, Way::Forwarded("cpu".to_owned())];
        let failed = || Outcome::Failed(1);
        let mut table = Table::new(&ways);
        table.add("same", vec![failed(), failed()], true);
        table.add("worse", vec![Outcome::Passed, failed()], true);
        assert_eq!(table.alike, 1);
        assert_eq!(table.rows.len(), 1);
        assert_eq!(table.rows[0].0, "worse");
        table.add("alone", vec![failed()], false);
        assert_eq!(table.rows.len(), 2);
    }

    #[test]
    fn programs_that_could_harm_a_shared_gpu_are_not_run() {
        let folder = std::env::temp_dir().join(format!("foreign-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let program = |name: &str| Program {
            name: name.to_owned(),
            sources: folder.clone(),
        };
        fs::write(folder.join("a.cu"), "int main() {}").unwrap();
        assert!(may_run(&program("a")));
        assert!(!may_run(&program("UnifiedMemoryPerf")));
        fs::write(
            folder.join("b.cpp"),
            "r = cuMulticastCreate(&handle, &prop);",
        )
        .unwrap();
        assert!(!may_run(&program("a")));
        fs::remove_dir_all(&folder).unwrap();
    }
}
