//! Measures kernel launches of a payload in a VM, which waits on fences that the device writes.
//!
//! This program is an ordinary CUDA driver program, started with `wormhole run --placement process`. It
//! loads a kernel and launches it once. Then a payload in a VM uses the program's session to launch the
//! kernel repeatedly without a system call or a VM exit. The kernel increments a counter, which is checked
//! at the end.

use std::ffi::CStr;
use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::ptr::null_mut;
use std::time::Duration;

use clap::Parser;
use wormhole_api::ctypes::c_void;
use wormhole_benches::driver::{Driver, DriverError};
use wormhole_benches::failure;
use wormhole_benches::machine::{Machine, timestamp_period};
use wormhole_benches::payload::{BenchError, Window, guest_address, run};
use wormhole_benches::samples::Quantiles;
use wormhole_ring::layout::{FENCES, HANDLE_BASE, SEGMENT_BYTES, WINDOW_BASE};

/// `*counter += 1`.
const KERNEL: &CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry count(.param .u64 counter) {
    .reg .b64 %address, %value;
    ld.param.u64 %address, [counter];
    ld.global.u64 %value, [%address];
    add.u64 %value, %value, 1;
    st.global.u64 [%address], %value;
    ret;
}
";

#[derive(Debug, Parser)]
struct Options {
    /// The folder of the built payloads.
    #[arg(long)]
    payloads: PathBuf,
    /// Number of launches by the payload. Only the default measures.
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(5..=50_000))]
    launches: u64,
}

/// Error from preparing or measuring launches.
#[derive(Debug, thiserror::Error)]
enum LaunchError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("this process has no window; run it by `wormhole run --placement process`")]
    NoWindow,
    #[error("the window cannot be opened")]
    Window(#[from] std::io::Error),
    #[error(transparent)]
    Bench(#[from] BenchError),
    #[error("the kernel counted {counted} launches of {expected}")]
    Count { counted: u64, expected: u64 },
}

fn main() -> ExitCode {
    match measure(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure("launch", &error),
    }
}

fn measure(options: &Options) -> Result<(), LaunchError> {
    let kernel = Kernel::prepare()?;
    let launches = options.launches;
    // Launches before exits are counted. By then each page of the ring has been accessed once; first accesses are page
    // faults.
    let warm = launches / 5;
    let window = window()?;
    // The session of this process is the first of its window.
    let session = SEGMENT_BYTES;
    let fence = FENCES as u64 - 1;
    // Samples go to the file's last segment, which no session uses.
    let samples = window.bytes() - SEGMENT_BYTES;
    let parameters = vec![
        guest_address(session),
        kernel.function as u64 - HANDLE_BASE,
        kernel.stream as u64 - HANDLE_BASE,
        fence,
        0,
        launches,
        kernel.counter,
        guest_address(samples),
    ];
    let exits = run(&options.payloads, "launch", parameters, &window, |beside| {
        let mut rung = 0;
        let mut reached = |count: u64| -> Result<u64, BenchError> {
            while beside.parameters.load(8).unwrap_or(0) < count {
                beside.goes_on()?;
                let asked = beside.parameters.load(9).unwrap_or(0);
                if asked != rung {
                    rung = asked;
                    kernel
                        .wake_backend()
                        .map_err(|_| BenchError::Missing("backend"))?;
                }
                // Leaves the processor to the backend.
                std::thread::sleep(Duration::from_micros(200));
            }
            beside.exits()
        };
        let before = reached(warm)?;
        Ok(reached(launches)? - before)
    })?;
    let counted = kernel.counted()?;
    let expected = launches + 1;
    if counted != expected {
        return Err(LaunchError::Count { counted, expected });
    }
    let found = Quantiles::of(window.words(samples, launches), timestamp_period(), 1.0);
    let machine = Machine::read();
    println!(
        "{}, {} processors, Linux {}",
        machine.processor, machine.processors, machine.kernel
    );
    println!(
        "launch and fence from a VM: {launches} launches, median {:.2} µs, p99 {:.2} µs; {exits} exits in {} launches",
        found.median_ns / 1e3,
        found.p99_ns / 1e3,
        launches - warm
    );
    Ok(())
}

/// Opens the session's file, which the guest library has mapped, as a window.
fn window() -> Result<Window, LaunchError> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let range = maps
        .lines()
        .filter(|line| line.contains("memfd:wormhole-session"))
        .filter_map(|line| line.split_whitespace().next())
        .find(|range| {
            let start = range
                .split('-')
                .next()
                .and_then(|start| u64::from_str_radix(start, 16).ok());
            start.is_some_and(|start| start >= WINDOW_BASE)
        })
        .ok_or(LaunchError::NoWindow)?;
    let file = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/self/map_files/{range}"))?;
    Ok(Window::of(file)?)
}

/// The kernel, loaded and launched once, so that further launches need no response.
#[derive(Debug)]
struct Kernel {
    driver: Driver,
    /// Values of the handles. They are never dereferenced.
    context: usize,
    function: usize,
    stream: usize,
    /// Device address of the counter.
    counter: u64,
}

impl Kernel {
    fn prepare() -> Result<Self, DriverError> {
        let driver = Driver::open()?;
        let (mut context, mut module, mut function, mut stream) = (0, 0, 0, 0);
        let mut counter = 0u64;
        driver.cuInit(0)?;
        driver.cuDevicePrimaryCtxRetain(&mut context, 0)?;
        driver.cuCtxSetCurrent(context)?;
        driver.cuModuleLoadData(&mut module, KERNEL)?;
        driver.cuModuleGetFunction(&mut function, module, c"count")?;
        driver.cuStreamCreate(&mut stream, 1)?;
        driver.cuMemAlloc_v2(&mut counter, 8)?;
        driver.cuMemsetD8Async(counter, 0, 8, stream)?;
        let mut parameters = [(&raw mut counter).cast::<c_void>()];
        let (parameters, extra) = (parameters.as_mut_ptr(), null_mut::<*mut c_void>());
        driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, extra)?;
        driver.cuStreamSynchronize(stream)?;
        Ok(Self {
            driver,
            context,
            function,
            stream,
            counter,
        })
    }

    /// Sends a request, which rings the doorbell if the backend is parked. A payload cannot ring it.
    fn wake_backend(&self) -> Result<(), DriverError> {
        self.driver.cuCtxSetCurrent(self.context)?;
        self.driver.cuMemGetInfo_v2(&mut 0, &mut 0)
    }

    /// Reads the counter: the number of times that the kernel ran.
    fn counted(&self) -> Result<u64, DriverError> {
        let mut counted = 0u64;
        let address = (&raw mut counted).expose_provenance();
        self.driver.cuMemcpyDtoH_v2(address, self.counter, 8)?;
        Ok(counted)
    }
}
