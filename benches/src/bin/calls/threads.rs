//! Launches by several threads.

use std::sync::Barrier;
use std::time::Instant;

use wormhole_benches::driver::DriverError;

use crate::Program;

pub fn measure(program: &mut Program) -> Result<(), DriverError> {
    let each = program.samples * 10;
    for threads in [1, 2, 4, 8] {
        for (own, with) in [(true, "each on its own stream"), (false, "on one stream")] {
            let mut times = Vec::new();
            for _ in 0..5 {
                times.push(together(program, threads, each, own)?);
            }
            let with = format!("{threads} threads, {with}, until done");
            program.row("cuLaunchKernel", with, times, threads * each);
        }
    }
    Ok(())
}

/// Returns the time in which so many threads launch so many kernels each.
fn together(
    program: &Program,
    threads: u32,
    each: u32,
    own: bool,
) -> Result<std::time::Duration, DriverError> {
    let ready = Barrier::new(threads as usize + 1);
    std::thread::scope(|scope| {
        let launching: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut stream = program.stream;
                    let prepared = program
                        .driver
                        .cuCtxSetCurrent(program.context)
                        .and_then(|()| {
                            if own {
                                program.driver.cuStreamCreate(&mut stream, 1)?;
                            }
                            program.launch(stream)?;
                            program.driver.cuStreamSynchronize(stream)
                        });
                    ready.wait();
                    prepared?;
                    (0..each).try_for_each(|_| program.launch(stream))?;
                    program.driver.cuStreamSynchronize(stream)?;
                    if own {
                        program.driver.cuStreamDestroy_v2(stream)
                    } else {
                        Ok(())
                    }
                })
            })
            .collect();
        ready.wait();
        let start = Instant::now();
        for thread in launching {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(start.elapsed())
    })
}
