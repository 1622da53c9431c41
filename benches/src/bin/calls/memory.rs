//! Allocations, mappings and registrations. Each call is measured for itself.

use std::time::Duration;

use wormhole_benches::driver::{ACCESS, DriverError, MEMORY};

use crate::{Program, size, timed};

/// Allocations that live at once, so that a call finds others.
const LIVE: u32 = 16;

pub fn measure(program: &mut Program) -> Result<(), DriverError> {
    for bytes in [4 << 10, 256 << 10, 1 << 20, 20 << 20, 256 << 20] {
        allocations(program, bytes)?;
    }
    for bytes in [4 << 10, 1 << 20, 20 << 20] {
        from_pool(program, bytes)?;
    }
    mappings(program, 20 << 20)?;
    for bytes in [4 << 10, 1 << 20, 64 << 20] {
        pinned(program, bytes)?;
    }
    for bytes in [4 << 10, 1 << 20, 64 << 20] {
        registrations(program, bytes)?;
    }
    Ok(())
}

/// Number of rounds for memory of a size.
fn rounds(program: &Program, bytes: usize) -> u32 {
    let dear = u32::try_from(bytes >> 20).unwrap_or(1).max(1);
    (program.samples / LIVE / dear).clamp(1, 100)
}

fn allocations(program: &mut Program, bytes: usize) -> Result<(), DriverError> {
    let live = (LIVE as usize).min((1 << 30) / bytes).max(1);
    let (mut allocations, mut frees) = (Vec::new(), Vec::new());
    for _ in 0..rounds(program, bytes) {
        let mut addresses = vec![0; live];
        for address in &mut addresses {
            allocations.push(timed(|| program.driver.cuMemAlloc_v2(address, bytes))?);
        }
        for address in addresses {
            frees.push(timed(|| program.driver.cuMemFree_v2(address))?);
        }
    }
    program.row("cuMemAlloc", size(bytes), allocations, 1);
    program.row("cuMemFree", size(bytes), frees, 1);
    Ok(())
}

fn from_pool(program: &mut Program, bytes: usize) -> Result<(), DriverError> {
    let mut times: [Vec<Duration>; 4] = Default::default();
    for _ in 0..rounds(program, bytes) * 4 {
        let [first, again, freed, until] = &mut times;
        let mut address = 0;
        // Each wait empties the pool, whose release threshold is 0.
        first.push(timed(|| {
            program
                .driver
                .cuMemAllocAsync(&mut address, bytes, program.stream)
        })?);
        freed.push(timed(|| {
            program.driver.cuMemFreeAsync(address, program.stream)
        })?);
        again.push(timed(|| {
            program
                .driver
                .cuMemAllocAsync(&mut address, bytes, program.stream)
        })?);
        program.driver.cuMemFreeAsync(address, program.stream)?;
        until.push(timed(|| program.wait())?);
    }
    let [first, again, freed, until] = times;
    program.row(
        "cuMemAllocAsync",
        format!("{}, empty pool", size(bytes)),
        first,
        1,
    );
    program.row(
        "cuMemAllocAsync",
        format!("{}, filled pool", size(bytes)),
        again,
        1,
    );
    program.row("cuMemFreeAsync", size(bytes), freed, 1);
    program.row(
        "cuStreamSynchronize",
        format!("{} of a pool are freed", size(bytes)),
        until,
        1,
    );
    Ok(())
}

fn mappings(program: &mut Program, bytes: usize) -> Result<(), DriverError> {
    let names = [
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemAddressFree",
    ];
    let mut times: [Vec<Duration>; 7] = Default::default();
    for _ in 0..rounds(program, bytes) * 4 {
        let (driver, mut address, mut memory) = (&program.driver, 0, 0);
        let took = [
            timed(|| driver.cuMemAddressReserve(&mut address, bytes, 0, 0, 0))?,
            timed(|| driver.cuMemCreate(&mut memory, bytes, &MEMORY, 0))?,
            timed(|| driver.cuMemMap(address, bytes, 0, memory, 0))?,
            timed(|| driver.cuMemSetAccess(address, bytes, &ACCESS, 1))?,
            timed(|| driver.cuMemUnmap(address, bytes))?,
            timed(|| driver.cuMemRelease(memory))?,
            timed(|| driver.cuMemAddressFree(address, bytes))?,
        ];
        for (times, took) in times.iter_mut().zip(took) {
            times.push(took);
        }
    }
    for (name, times) in names.into_iter().zip(times) {
        program.row(name, size(bytes), times, 1);
    }
    Ok(())
}

fn pinned(program: &mut Program, bytes: usize) -> Result<(), DriverError> {
    let (mut allocations, mut frees) = (Vec::new(), Vec::new());
    for _ in 0..rounds(program, bytes) {
        let mut address = 0;
        allocations.push(timed(|| {
            program.driver.cuMemHostAlloc(&mut address, bytes, 0)
        })?);
        frees.push(timed(|| program.driver.cuMemFreeHost(address))?);
    }
    program.row("cuMemHostAlloc", size(bytes), allocations, 1);
    program.row("cuMemFreeHost", size(bytes), frees, 1);
    Ok(())
}

fn registrations(program: &mut Program, bytes: usize) -> Result<(), DriverError> {
    let memory = vec![1_u8; bytes + 4096];
    let address = memory.as_ptr().expose_provenance().next_multiple_of(4096);
    let (mut registered, mut unregistered) = (Vec::new(), Vec::new());
    for _ in 0..rounds(program, bytes) {
        registered.push(timed(|| {
            program.driver.cuMemHostRegister_v2(address, bytes, 0)
        })?);
        unregistered.push(timed(|| program.driver.cuMemHostUnregister(address))?);
    }
    program.row(
        "cuMemHostRegister",
        format!("{}, private memory", size(bytes)),
        registered,
        1,
    );
    program.row("cuMemHostUnregister", size(bytes), unregistered, 1);
    Ok(())
}
