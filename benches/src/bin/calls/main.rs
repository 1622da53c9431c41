//! Measures single calls of the driver API, as a program waits for them.
//!
//! This program is an ordinary CUDA driver program: it runs natively and by `wormhole run`. `cargo xtask bench calls` runs
//! it both ways by turns and prints ratios.

mod copies;
mod local;
mod managed;
mod memory;
mod start;
mod streams;
mod threads;
mod waits;

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use clap::builder::PossibleValue;
use clap::{Parser, ValueEnum};
use wormhole_api::ctypes::c_void;
use wormhole_benches::driver::{Driver, DriverError, Handle};
use wormhole_benches::failure;
use wormhole_benches::turns::{self, Job, Line, Samples};
use wormhole_figures::ways::Comparison;

/// A kernel that does nothing, for any processor of the last years.
const IMAGE: &CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry nothing(.param .u64 unused) { ret; }
";

/// Group of rows.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Group {
    /// Launches, events, streams, modules and questions.
    Calls,
    /// Copies of 4 bytes to 256 MiB.
    Copies,
    /// Allocations, mappings, registrations and managed memory.
    Memory,
    /// Launches by 1 to 8 threads.
    Threads,
    /// Starts of 1 and of 8 processes, until their first kernels.
    Start,
    /// One of these processes.
    #[value(hide = true)]
    First,
    /// Waits for kernels of 0 to 10 ms, in each manner.
    Waits,
}

impl Group {
    /// Measures the group's rows in this process.
    fn measure(self, program: &mut Program) -> Result<(), DriverError> {
        match self {
            Self::Calls => {
                streams::measure(program)?;
                local::measure(program)
            }
            Self::Copies => copies::measure(program),
            Self::Memory => {
                memory::measure(program)?;
                managed::measure(program)
            }
            Self::Threads => threads::measure(program),
            Self::Waits => waits::measure(program),
            // No rows of this process.
            Self::Start | Self::First => Ok(()),
        }
    }
}

#[derive(Debug, Parser)]
struct Options {
    /// Group of rows.
    group: Group,
    /// Number of samples of a cheap call. Only the default measures.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,
    /// Run this benchmark by turns by this `wormhole`, instead of once by the driver library of this process.
    #[arg(long)]
    wormhole: Option<PathBuf>,
    #[command(flatten)]
    comparison: Comparison,
}

/// The program, with a context and what most rows need.
struct Program {
    driver: Driver,
    context: Handle,
    stream: Handle,
    module: Handle,
    function: Handle,
    samples: u32,
    /// Samples, printed at the end.
    rows: Vec<Line>,
}

impl Program {
    fn start(samples: u32) -> Result<Self, DriverError> {
        let driver = Driver::open()?;
        let (mut device, mut context, mut stream) = (0, 0, 0);
        let (mut module, mut function) = (0, 0);
        driver.cuInit(0)?;
        driver.cuDeviceGet(&mut device, 0)?;
        driver.cuDevicePrimaryCtxRetain(&mut context, device)?;
        driver.cuCtxSetCurrent(context)?;
        driver.cuStreamCreate(&mut stream, 1)?;
        driver.cuModuleLoadData(&mut module, IMAGE)?;
        driver.cuModuleGetFunction(&mut function, module, c"nothing")?;
        Ok(Self {
            driver,
            context,
            stream,
            module,
            function,
            samples,
            rows: Vec::new(),
        })
    }

    /// Launches the kernel that does nothing.
    fn launch(&self, stream: Handle) -> Result<(), DriverError> {
        let mut unused = 0_u64;
        let mut parameters = [(&raw mut unused).cast::<c_void>()];
        self.driver.cuLaunchKernel(
            self.function,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            stream,
            parameters.as_mut_ptr(),
            null_mut::<*mut c_void>(),
        )
    }

    /// Waits for the stream.
    fn wait(&self) -> Result<(), DriverError> {
        self.driver.cuStreamSynchronize(self.stream)
    }

    /// Adds a row for samples of `parts` calls each.
    fn row(
        &mut self,
        function: &'static str,
        with: impl Into<String>,
        times: Vec<Duration>,
        parts: u32,
    ) {
        let one = |time: Duration| time.as_secs_f64() * 1e9 / f64::from(parts);
        self.rows.push(Line::Samples {
            name: function.to_owned(),
            with: with.into(),
            values: times.into_iter().map(one).collect(),
            steps: None,
        });
    }

    /// Measures an operation, `parts` times a sample.
    fn measure(
        &mut self,
        function: &'static str,
        with: impl Into<String>,
        (samples, parts): (u32, u32),
        once: impl Fn(&Self) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        once(self)?;
        let mut times = Vec::new();
        for _ in 0..samples {
            times.push(timed(|| (0..parts).try_for_each(|_| once(self)))?);
        }
        self.row(function, with, times, parts);
        Ok(())
    }
}

/// Returns the time that an operation takes.
fn timed(once: impl FnOnce() -> Result<(), DriverError>) -> Result<Duration, DriverError> {
    let start = Instant::now();
    once()?;
    Ok(start.elapsed())
}

/// Writes a size as people do.
fn size(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} bytes"),
        1024..0x10_0000 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure("calls", &*error),
    }
}

fn run(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    if let Some(wormhole) = &options.wormhole {
        return by_turns(options, wormhole);
    }
    let (rows, device) = match options.group {
        Group::First => return Ok(start::first()?),
        Group::Start => {
            let rows = start::measure(options.samples)?;
            (rows, Program::start(1)?.driver.device()?)
        }
        _ => {
            let mut program = Program::start(options.samples)?;
            options.group.measure(&mut program)?;
            (program.rows, program.driver.device()?)
        }
    };
    for line in std::iter::once(&Line::Device(device)).chain(&rows) {
        println!("{}", serde_json::to_string(line)?);
    }
    Ok(())
}

/// Runs this program by turns.
fn by_turns(options: &Options, wormhole: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let group = options.group.to_possible_value();
    let group = group.as_ref().map_or("", PossibleValue::get_name);
    let count = options.samples.to_string();
    let mut command = vec![std::env::current_exe()?.into()];
    command.extend([group, "--samples", &count].map(Into::into));
    let name = group.to_owned();
    let samples = Samples::Printed;
    let job = Job {
        name,
        command,
        samples,
    };
    Ok(turns::by_turns(
        group,
        &options.comparison,
        wormhole,
        &[job],
    )?)
}
