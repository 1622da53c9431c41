//! Measures kernel launches of a payload in a VM, which waits on fences that the device writes.
//!
//! This program is an ordinary CUDA driver program, started with `wormhole run --placement process`. It
//! loads a kernel and launches it once. Then a payload in a VM uses the program's session to launch the
//! kernel repeatedly without a system call or a VM exit. The kernel increments a counter, which is checked
//! at the end.

use std::ffi::{CStr, c_char, c_void};
use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::ptr::null_mut;
use std::time::Duration;

use clap::Parser;
use libloading::Library;
use wormhole_benches::failure;
use wormhole_benches::machine::{Machine, timestamp_period};
use wormhole_benches::payload::{BenchError, Window, guest_address, run};
use wormhole_benches::samples::Quantiles;
use wormhole_ring::layout::{FENCES, HANDLE_BASE, SEGMENT_BYTES, WINDOW_BASE};

/// Number of launches by the payload.
const LAUNCHES: u64 = 50_000;
/// Launches before exits are counted. By then each page of the ring has been accessed once; first accesses
/// are page faults.
const WARM: u64 = 10_000;

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
}

/// Error from preparing or measuring launches.
#[derive(Debug, thiserror::Error)]
enum LaunchError {
    #[error(
        "the CUDA driver library cannot be opened; run this by `wormhole run --placement process`"
    )]
    Library(#[from] libloading::Error),
    #[error("{call} failed with CUresult {result}")]
    Cuda { call: &'static str, result: u32 },
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
        LAUNCHES,
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
        let before = reached(WARM)?;
        Ok(reached(LAUNCHES)? - before)
    })?;
    let counted = kernel.counted()?;
    let expected = LAUNCHES + 1;
    if counted != expected {
        return Err(LaunchError::Count { counted, expected });
    }
    let found = Quantiles::of(window.words(samples, LAUNCHES), timestamp_period(), 1.0);
    let machine = Machine::read();
    println!(
        "{}, {} processors, Linux {}",
        machine.processor, machine.processors, machine.kernel
    );
    println!(
        "launch and fence from a VM: {LAUNCHES} launches, median {:.2} µs, p99 {:.2} µs; {exits} exits in {} launches",
        found.median_ns / 1e3,
        found.p99_ns / 1e3,
        LAUNCHES - WARM
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

/// Calls a function of the driver library. Returns an error with its name unless it returns `CUDA_SUCCESS`.
macro_rules! cuda {
    ($library:expr, $name:ident($($argument:expr => $type:ty),*)) => {{
        let symbol = concat!(stringify!($name), "\0").as_bytes();
        // SAFETY: the types match the function's C declaration (CUDA driver API), and every pointer
        // refers to a live variable of the type that the function reads or writes.
        let result = unsafe {
            let function = $library.get::<unsafe extern "C" fn($($type),*) -> u32>(symbol)?;
            function($($argument),*)
        };
        if result != 0 {
            return Err(LaunchError::Cuda { call: stringify!($name), result });
        }
    }};
}

/// The kernel, loaded and launched once, so that further launches need no response.
#[derive(Debug)]
struct Kernel {
    library: Library,
    /// Values of the handles. They are never dereferenced.
    context: usize,
    function: usize,
    stream: usize,
    /// Device address of the counter.
    counter: u64,
}

impl Kernel {
    fn prepare() -> Result<Self, LaunchError> {
        // SAFETY: the library's initialisers are those of a CUDA driver library.
        let library = unsafe { Library::new("libcuda.so.1") }?;
        let (mut context, mut module, mut function, mut stream) = (
            null_mut::<c_void>(),
            null_mut::<c_void>(),
            null_mut::<c_void>(),
            null_mut::<c_void>(),
        );
        let mut counter = 0u64;
        cuda!(library, cuInit(0 => u32));
        cuda!(library, cuDevicePrimaryCtxRetain(&raw mut context => *mut *mut c_void, 0 => i32));
        cuda!(library, cuCtxSetCurrent(context => *mut c_void));
        cuda!(library, cuModuleLoadData(&raw mut module => *mut *mut c_void, KERNEL.as_ptr() => *const c_char));
        cuda!(library, cuModuleGetFunction(
            &raw mut function => *mut *mut c_void, module => *mut c_void, c"count".as_ptr() => *const c_char
        ));
        cuda!(library, cuStreamCreate(&raw mut stream => *mut *mut c_void, 1 => u32));
        cuda!(library, cuMemAlloc_v2(&raw mut counter => *mut u64, 8 => usize));
        cuda!(library, cuMemsetD8Async(counter => u64, 0 => u8, 8 => usize, stream => *mut c_void));
        let mut parameters = [(&raw mut counter).cast::<c_void>()];
        cuda!(library, cuLaunchKernel(
            function => *mut c_void,
            1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 1 => u32, 0 => u32,
            stream => *mut c_void,
            parameters.as_mut_ptr() => *mut *mut c_void, null_mut() => *mut *mut c_void
        ));
        cuda!(library, cuStreamSynchronize(stream => *mut c_void));
        Ok(Self {
            library,
            context: context.addr(),
            function: function.addr(),
            stream: stream.addr(),
            counter,
        })
    }

    /// Sends a request, which rings the doorbell if the backend is parked. A payload cannot ring it.
    fn wake_backend(&self) -> Result<(), LaunchError> {
        let (mut free, mut total) = (0usize, 0usize);
        cuda!(self.library, cuCtxSetCurrent(self.context => usize));
        cuda!(self.library, cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize));
        Ok(())
    }

    /// Reads the counter: the number of times that the kernel ran.
    fn counted(&self) -> Result<u64, LaunchError> {
        let mut counted = 0u64;
        cuda!(self.library, cuMemcpyDtoH_v2(
            (&raw mut counted).cast() => *mut c_void, self.counter => u64, 8 => usize
        ));
        Ok(counted)
    }
}
