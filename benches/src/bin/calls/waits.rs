//! Waits for kernels of known lengths, in each manner of waiting that CUDA has.

use std::ffi::CStr;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use wormhole_api::constants::context_flags::{SCHED_BLOCKING_SYNC, SCHED_SPIN, SCHED_YIELD};
use wormhole_api::ctypes::c_void;
use wormhole_benches::driver::{DriverError, Handle};

use crate::{Program, timed};

/// A kernel that ends as many nanoseconds after its start as its parameter says.
const BUSY: &CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry busy(.param .u64 length) {
    .reg .u64 %start, %now, %length;
    .reg .pred %again;
    ld.param.u64 %length, [length];
    mov.u64 %start, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %again, %now, %length;
    @%again bra again;
    ret;
}
";

/// Lengths of the kernels, and the number of waits for each at most; the last ones are lengths of pauses as well.
const LENGTHS: [(Duration, u32); 5] = [
    (Duration::ZERO, 2000),
    (Duration::from_micros(100), 1000),
    (Duration::from_micros(500), 400),
    (Duration::from_millis(2), 120),
    (Duration::from_millis(10), 40),
];

/// Flags of the context, with their names. 0 leaves the choice to CUDA.
const MANNERS: [(u32, &str); 4] = [
    (0, "AUTO"),
    (SCHED_SPIN, "SPIN"),
    (SCHED_YIELD, "YIELD"),
    (SCHED_BLOCKING_SYNC, "BLOCKING_SYNC"),
];

pub fn measure(program: &mut Program) -> Result<(), DriverError> {
    let (mut module, mut busy) = (0, 0);
    program.driver.cuModuleLoadData(&mut module, BUSY)?;
    program
        .driver
        .cuModuleGetFunction(&mut busy, module, c"busy")?;
    for (flags, manner) in MANNERS {
        program.driver.cuCtxSetFlags(flags)?;
        for (length, waits) in LENGTHS {
            beyond(program, busy, length, waits.min(program.samples), manner)?;
        }
    }
    program.driver.cuCtxSetFlags(0)?;
    for (length, waits) in LENGTHS.into_iter().skip(3) {
        let times = (0..=waits.min(program.samples)).map(|_| {
            std::thread::sleep(length);
            timed(|| {
                program.launch(program.stream)?;
                program.wait()
            })
        });
        let times = times.collect::<Result<_, _>>()?;
        let with = format!("AUTO, after a pause of {} µs", length.as_micros());
        program.row("cuLaunchKernel, cuStreamSynchronize", with, times, 1);
    }
    program.driver.cuModuleUnload(module)
}

/// Adds a row for the time that launch and wait take beyond the kernel's own.
fn beyond(
    program: &mut Program,
    busy: Handle,
    length: Duration,
    waits: u32,
    manner: &str,
) -> Result<(), DriverError> {
    let mut nanoseconds = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
    let mut times = Vec::new();
    for _ in 0..=waits {
        let mut parameters = [(&raw mut nanoseconds).cast::<c_void>()];
        let start = Instant::now();
        program.driver.cuLaunchKernel(
            busy,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            program.stream,
            parameters.as_mut_ptr(),
            null_mut::<*mut c_void>(),
        )?;
        program.wait()?;
        times.push(start.elapsed().saturating_sub(length));
    }
    // The first launch of a function loads it.
    times.remove(0);
    let with = format!("{manner}, beyond a kernel of {} µs", length.as_micros());
    program.row("cuLaunchKernel, cuStreamSynchronize", with, times, 1);
    Ok(())
}
