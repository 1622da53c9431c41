//! Measures kernel launches of a payload in a VM, which waits on fences that the device writes.
//!
//! This program is an ordinary CUDA driver program, started with `wormhole run --placement process`. It
//! loads a kernel and launches it once. Then a payload in a VM uses the program's session to launch the
//! kernel repeatedly without a system call or a VM exit. The kernel increments a counter, which is checked
//! at the end.
//!
//! With `wormhole run --transport doorbell` the payload rings for each record and waits in the host, whose thread wakes the
//! backend and sleeps until the fence is written. With `--transport socket` each launch is three messages, which the host's
//! thread passes to the stream's server.

use std::ffi::CStr;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::ptr::null_mut;
use std::time::Duration;

use clap::Parser;
use wormhole_api::ctypes::c_void;
use wormhole_benches::driver::{Driver, DriverError};
use wormhole_benches::failure;
use wormhole_benches::payload::{BenchError, Window, guest_address, run, run_rung};
use wormhole_benches::samples::{nanoseconds, timestamp_period};
use wormhole_benches::transports::{Bell, carry, exits};
use wormhole_figures::{Report, ReportError, Unit};
use wormhole_ring::fence::{FenceIndex, Fences};
use wormhole_ring::layout::{FENCES, HANDLE_BASE, SEGMENT_BYTES, WINDOW_BASE};
use wormhole_ring::ring::{Producer, Sleep};
use wormhole_ring::transport::{self, Transport};
use wormhole_ring::waits::{Wait, Waits};

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
    /// Write the figures as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
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
    #[error(transparent)]
    Report(#[from] ReportError),
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
    let text = std::env::var(transport::VARIABLE).unwrap_or_default();
    let transport = Transport::parse(&text).unwrap_or(Transport::Poll);
    let way = match transport {
        Transport::Poll => "poll",
        Transport::Doorbell => "doorbell",
        Transport::Socket(_) => "socket",
    };
    let mut report = Report::new("launch", &[way], &[], 1);
    let kernel = Kernel::prepare()?;
    report.conditions.device = kernel.driver.device()?;
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
    let round = Round {
        options,
        window: &window,
        kernel: &kernel,
        session,
        fence,
        samples,
    };
    let exits = match transport {
        Transport::Poll => round.poll(warm)?,
        Transport::Doorbell => round.doorbell()?,
        Transport::Socket(path) => round.socket(path)?,
    };
    let counted = kernel.counted()?;
    let expected = launches + 1;
    if counted != expected {
        return Err(LaunchError::Count { counted, expected });
    }
    let took = nanoseconds(&window.words(samples, launches), timestamp_period(), 1.0);
    report.add_once(
        "launch and fence from a VM",
        &format!("{launches} launches"),
        Unit::Nanoseconds,
        vec![took],
    );
    report.add_once("exits per launch", "", Unit::Exits, vec![vec![exits]]);
    Ok(report.finish(options.json.as_deref())?)
}

/// Launches of a payload, and the place of its samples.
struct Round<'a> {
    options: &'a Options,
    window: &'a Window,
    kernel: &'a Kernel,
    /// Offset of the session in the window's file.
    session: usize,
    /// Number of the fence.
    fence: u64,
    /// Offset of the samples.
    samples: usize,
}

impl Round<'_> {
    /// Returns the parameters of the payload `launch`.
    fn parameters(&self, rings: bool) -> Vec<u64> {
        vec![
            guest_address(self.session),
            self.kernel.function as u64 - HANDLE_BASE,
            self.kernel.stream as u64 - HANDLE_BASE,
            self.fence,
            0,
            self.options.launches,
            self.kernel.counter,
            guest_address(self.samples),
            0,
            0,
            rings.into(),
        ]
    }

    /// Launches through the window, and returns the exits for each launch but the first `warm`.
    fn poll(&self, warm: u64) -> Result<f64, BenchError> {
        let launches = self.options.launches;
        let folder = &self.options.payloads;
        let parameters = self.parameters(false);
        let exits = run(folder, "launch", parameters, self.window, |beside| {
            let mut rung = 0;
            let mut reached = |count: u64| -> Result<u64, BenchError> {
                while beside.parameters.load(8).unwrap_or(0) < count {
                    beside.goes_on()?;
                    let asked = beside.parameters.load(9).unwrap_or(0);
                    if asked != rung {
                        rung = asked;
                        self.kernel
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
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
        Ok(exits as f64 / (launches - warm) as f64)
    }

    /// Launches by the doorbell, twice for each launch: for the kernel and for the fence.
    fn doorbell(&self) -> Result<f64, BenchError> {
        let launches = self.options.launches;
        let (bell, doorbell) = Bell::new()?;
        let session = || self.window.session(self.session / SEGMENT_BYTES);
        // SAFETY: it only wakes the backend; the guest library's producer is a value of the same crate.
        let producer = unsafe { Producer::new(session()?) };
        let (waits, fences) = (Waits::new(session()?), Fences::new(session()?));
        let number = u32::try_from(self.fence).unwrap_or(u32::MAX);
        let fence = FenceIndex::new(number).ok_or(BenchError::Missing("fence"))?;
        let (mut value, folder) = (0, &self.options.payloads);
        let parameters = self.parameters(true);
        let window = self.window;
        run_rung(
            folder,
            "launch",
            parameters,
            window,
            Some(doorbell),
            |beside| {
                std::thread::scope(|scope| {
                    // Ends with the payload.
                    scope.spawn(|| {
                        while bell.wait(beside).is_ok() {
                            if producer.must_ring() == Some(Sleep::OnWord) {
                                producer.wake_consumer();
                            }
                        }
                    });
                    exits(beside, launches, || {
                        value += 1;
                        let note = waits.note(1, Wait::Fence(fence, value));
                        let note = note.ok_or(BenchError::Missing("note of a wait"))?;
                        while fences.load(fence) < value {
                            beside.goes_on()?;
                            note.announce();
                            if fences.load(fence) < value {
                                note.sleep(LOOK);
                            }
                        }
                        bell.answer()
                    })
                })
            },
        )
    }

    /// Launches by messages.
    fn socket(&self, path: &str) -> Result<f64, BenchError> {
        let launches = self.options.launches;
        let (bell, doorbell) = Bell::new()?;
        // The arena lies behind the session; no session uses the last segment but one.
        let buffer = self.samples - SEGMENT_BYTES;
        let parameters = vec![
            guest_address(buffer),
            launches,
            guest_address(self.samples),
            0,
            self.kernel.function as u64 - HANDLE_BASE,
            self.kernel.stream as u64 - HANDLE_BASE,
            self.fence,
            self.kernel.counter,
        ];
        let stream = UnixStream::connect(path).map_err(BenchError::File)?;
        self.window
            .introduce(&stream, self.session as u64)
            .map_err(BenchError::File)?;
        let mut data = Vec::new();
        let folder = &self.options.payloads;
        run_rung(
            folder,
            "messages",
            parameters,
            self.window,
            Some(doorbell),
            |beside| {
                exits(beside, launches, || {
                    // The launch, its fence, and the wait for the fence.
                    for _ in 0..3 {
                        bell.wait(beside)?;
                        carry(self.window, buffer, &stream, &mut data)?;
                        bell.answer()?;
                    }
                    Ok(())
                })
            },
        )
    }
}

/// Longest sleep for a fence before the session is looked after.
const LOOK: Duration = Duration::from_millis(100);

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
