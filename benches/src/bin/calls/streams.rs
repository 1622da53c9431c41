//! Launches, events, graphs and waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use wormhole_api::CuResult;
use wormhole_api::constants::capture_mode::RELAXED;
use wormhole_api::ctypes::{CUhostFn, c_void};
use wormhole_benches::driver::{DriverError, Handle};

use crate::{Program, timed};

/// Launches between two waits.
const BURST: u32 = 200;
/// Kernels of the graphs.
const KERNELS: [u32; 2] = [1, 100];

pub fn measure(program: &mut Program) -> Result<(), DriverError> {
    launches(program)?;
    events(program)?;
    waits(program)?;
    let mut sizes = KERNELS.into_iter();
    sizes.try_for_each(|kernels| graphs_of(program, kernels))
}

fn launches(program: &mut Program) -> Result<(), DriverError> {
    let mut times = Vec::new();
    for _ in 0..program.samples / 20 + 1 {
        times.push(timed(|| {
            (0..BURST).try_for_each(|_| program.launch(program.stream))
        })?);
        program.wait()?;
    }
    program.row(
        "cuLaunchKernel",
        "to the caller, bursts of 200",
        times,
        BURST,
    );

    let many = program.samples * 50;
    let mut times = Vec::new();
    for _ in 0..3 {
        times.push(timed(|| {
            (0..many).try_for_each(|_| program.launch(program.stream))?;
            program.wait()
        })?);
    }
    program.row("cuLaunchKernel", "back to back until done", times, many);

    let samples = (program.samples, 1);
    program.measure(
        "cuLaunchKernel, cuStreamSynchronize",
        "",
        samples,
        |program| {
            program.launch(program.stream)?;
            program.wait()
        },
    )?;
    program.measure("cuLaunchKernel, cuCtxSynchronize", "", samples, |program| {
        program.launch(program.stream)?;
        program.driver.cuCtxSynchronize()
    })?;
    program.measure("cuLaunchHostFunc", "until it has run", samples, |program| {
        static RUN: AtomicBool = AtomicBool::new(false);
        unsafe extern "C" fn run(_: *mut c_void) {
            RUN.store(true, Ordering::Release);
        }
        let run: CUhostFn = Some(run);
        program.driver.cuLaunchHostFunc(program.stream, run, 0)?;
        while !RUN.swap(false, Ordering::Acquire) {
            std::hint::spin_loop();
        }
        Ok(())
    })
}

fn events(program: &mut Program) -> Result<(), DriverError> {
    for (flags, with) in [(0, "with time"), (2, "without time")] {
        let mut event: Handle = 0;
        program.driver.cuEventCreate(&mut event, flags)?;
        let (mut records, mut queries, mut again) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..program.samples {
            records.push(timed(|| {
                program.driver.cuEventRecord(event, program.stream)
            })?);
            // The record is reached while the program is busy elsewhere.
            let start = std::time::Instant::now();
            while start.elapsed() < Duration::from_micros(100) {
                std::hint::spin_loop();
            }
            for times in [&mut queries, &mut again] {
                let mut late = false;
                let time = timed(|| match program.driver.cuEventQuery(event) {
                    Err(DriverError::Cuda { result, .. }) if result == CuResult::NOT_READY.0 => {
                        late = true;
                        Ok(())
                    }
                    done => done,
                })?;
                if !late {
                    times.push(time);
                }
            }
            program.wait()?;
        }
        program.driver.cuEventDestroy_v2(event)?;
        program.row("cuEventRecord", with, records, 1);
        for (times, which) in [(queries, "first after completion"), (again, "second")] {
            if !times.is_empty() {
                program.row("cuEventQuery", format!("{with}, {which}"), times, 1);
            }
        }
    }
    let samples = (program.samples, 1);
    program.measure("cuEventCreate, cuEventDestroy", "", samples, |program| {
        let mut event = 0;
        program.driver.cuEventCreate(&mut event, 2)?;
        program.driver.cuEventDestroy_v2(event)
    })?;
    program.measure(
        "cuStreamCreate, cuStreamDestroy",
        "",
        (program.samples / 20 + 1, 1),
        |program| {
            let mut stream = 0;
            program.driver.cuStreamCreate(&mut stream, 1)?;
            program.driver.cuStreamDestroy_v2(stream)
        },
    )
}

fn waits(program: &mut Program) -> Result<(), DriverError> {
    let cheap = (program.samples / 10 + 1, 20);
    program.measure("cuStreamQuery", "idle", cheap, |program| {
        program.driver.cuStreamQuery(program.stream)
    })?;
    program.measure("cuStreamSynchronize", "idle", cheap, Program::wait)?;
    program.measure("cuCtxSynchronize", "idle", cheap, |program| {
        program.driver.cuCtxSynchronize()
    })?;
    let (mut word, mut device) = (0, 0_u64);
    program.driver.cuMemHostAlloc(&mut word, 4096, 0)?;
    program.driver.cuMemAlloc_v2(&mut device, 4096)?;
    let samples = (program.samples, 1);
    program.measure(
        "cuStreamWriteValue64, cuStreamWaitValue64, cuStreamSynchronize",
        "",
        samples,
        |program| {
            program
                .driver
                .cuStreamWriteValue64_v2(program.stream, device, 7, 0)?;
            program
                .driver
                .cuStreamWaitValue64_v2(program.stream, device, 7, 1)?;
            program.wait()
        },
    )?;
    program.driver.cuMemFree_v2(device)?;
    program.driver.cuMemFreeHost(word)
}

/// Measures graphs of a number of kernels in a row.
fn graphs_of(program: &mut Program, kernels: u32) -> Result<(), DriverError> {
    let with = format!("{kernels} kernel{}", if kernels == 1 { "" } else { "s" });
    let (mut graph, mut executable) = (0, 0);
    let mut times: [Vec<Duration>; 4] = Default::default();
    for _ in 0..program.samples / 100 + 1 {
        let [captured, new, again, destroyed] = &mut times;
        captured.push(timed(|| capture(program, kernels, &mut graph))?);
        for times in [new, again] {
            times.push(timed(|| {
                program
                    .driver
                    .cuGraphInstantiateWithFlags(&mut executable, graph, 0)
            })?);
            program.driver.cuGraphLaunch(executable, program.stream)?;
            program.wait()?;
            destroyed.push(timed(|| program.driver.cuGraphExecDestroy(executable))?);
        }
        program.driver.cuGraphDestroy(graph)?;
    }
    let [captured, new, again, destroyed] = times;
    let capturing = "cuStreamBeginCapture, cuLaunchKernel, cuStreamEndCapture";
    program.row(capturing, &with, captured, 1);
    program.row("cuGraphInstantiate", &with, new, 1);
    program.row("cuGraphInstantiate", format!("{with}, again"), again, 1);
    program.row("cuGraphExecDestroy", &with, destroyed, 1);

    capture(program, kernels, &mut graph)?;
    program
        .driver
        .cuGraphInstantiateWithFlags(&mut executable, graph, 0)?;
    program.measure(
        "cuGraphLaunch, cuStreamSynchronize",
        &with,
        (program.samples / 4 + 1, 1),
        |program| {
            program.driver.cuGraphLaunch(executable, program.stream)?;
            program.wait()
        },
    )?;
    program.driver.cuGraphExecDestroy(executable)?;
    program.driver.cuGraphDestroy(graph)
}

/// Captures launches of the kernel that does nothing.
fn capture(program: &Program, kernels: u32, graph: &mut Handle) -> Result<(), DriverError> {
    let (driver, stream) = (&program.driver, program.stream);
    driver.cuStreamBeginCapture_v2(stream, RELAXED)?;
    (0..kernels).try_for_each(|_| program.launch(stream))?;
    driver.cuStreamEndCapture(stream, graph)
}
