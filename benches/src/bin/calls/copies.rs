//! Copies between host and device, from pinned and from pageable memory.

use wormhole_benches::driver::DriverError;

use crate::{Program, size};

const SIZES: [usize; 7] = [4, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 256 << 20];

pub fn measure(program: &mut Program) -> Result<(), DriverError> {
    let most = SIZES[SIZES.len() - 1];
    let (mut device, mut other, mut pinned) = (0, 0, 0);
    program.driver.cuMemAlloc_v2(&mut device, most)?;
    program.driver.cuMemAlloc_v2(&mut other, most)?;
    program.driver.cuMemHostAlloc(&mut pinned, most, 0)?;
    let pageable = vec![1_u8; most];
    for bytes in SIZES {
        let samples = u32::try_from((64 << 20) / bytes.max(64 << 10)).unwrap_or(1);
        let samples = (samples.max(5).min(program.samples), 1);
        for (host, kind) in [
            (pinned, "pinned"),
            (pageable.as_ptr().expose_provenance(), "pageable"),
        ] {
            let with = format!("{}, {kind}", size(bytes));
            program.measure(
                "cuMemcpyHtoDAsync, cuStreamSynchronize",
                &with,
                samples,
                |program| {
                    program
                        .driver
                        .cuMemcpyHtoDAsync_v2(device, host, bytes, program.stream)?;
                    program.wait()
                },
            )?;
            program.measure(
                "cuMemcpyDtoHAsync, cuStreamSynchronize",
                &with,
                samples,
                |program| {
                    program
                        .driver
                        .cuMemcpyDtoHAsync_v2(host, device, bytes, program.stream)?;
                    program.wait()
                },
            )?;
            program.measure("cuMemcpyHtoD", &with, samples, |program| {
                program.driver.cuMemcpyHtoD_v2(device, host, bytes)
            })?;
            program.measure("cuMemcpyDtoH", &with, samples, |program| {
                program.driver.cuMemcpyDtoH_v2(host, device, bytes)
            })?;
        }
        program.measure(
            "cuMemcpyDtoDAsync, cuStreamSynchronize",
            size(bytes),
            samples,
            |program| {
                program
                    .driver
                    .cuMemcpyDtoDAsync_v2(other, device, bytes, program.stream)?;
                program.wait()
            },
        )?;
        program.measure(
            "cuMemsetD8Async, cuStreamSynchronize",
            size(bytes),
            samples,
            |program| {
                program
                    .driver
                    .cuMemsetD8Async(device, 3, bytes, program.stream)?;
                program.wait()
            },
        )?;
    }
    let block = 4 << 20;
    program.measure(
        "cuMemcpyHtoDAsync",
        "10 copies of 4 MiB, pinned, until done",
        (20, 1),
        |program| {
            for copy in 0..10 {
                let at = copy * block;
                program.driver.cuMemcpyHtoDAsync_v2(
                    device + at as u64,
                    pinned + at,
                    block,
                    program.stream,
                )?;
            }
            program.wait()
        },
    )?;
    program.driver.cuMemFree_v2(device)?;
    program.driver.cuMemFree_v2(other)?;
    program.driver.cuMemFreeHost(pinned)
}
