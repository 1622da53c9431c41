//! Questions whose answers a program's own side of the driver may know.

use wormhole_api::constants::device_attribute::MULTIPROCESSOR_COUNT;
use wormhole_api::constants::pointer_attribute::DEVICE_POINTER;
use wormhole_benches::driver::DriverError;

use crate::{IMAGE, Program};

/// Calls that one sample of a cheap call covers.
const PARTS: u32 = 100;

pub fn measure(program: &mut Program) -> Result<(), DriverError> {
    let cheap = (program.samples / 10 + 1, PARTS);
    let mut address = 0;
    program.driver.cuMemAlloc_v2(&mut address, 4096)?;
    program.measure("cuCtxGetCurrent", "", cheap, |program| {
        program.driver.cuCtxGetCurrent(&mut 0)
    })?;
    program.measure("cuDeviceGetAttribute", "", cheap, |program| {
        program
            .driver
            .cuDeviceGetAttribute(&mut 0, MULTIPROCESSOR_COUNT, 0)
    })?;
    program.measure(
        "cuPointerGetAttribute",
        "device pointer",
        cheap,
        |program| {
            let mut found = 0_u64;
            let found = (&raw mut found).expose_provenance();
            program
                .driver
                .cuPointerGetAttribute(found, DEVICE_POINTER, address)
        },
    )?;
    program.measure("cuModuleGetFunction", "again", cheap, |program| {
        let module = program.module;
        program
            .driver
            .cuModuleGetFunction(&mut 0, module, c"nothing")
    })?;
    let dear = (program.samples, 1);
    program.measure("cuMemGetInfo", "", dear, |program| {
        program.driver.cuMemGetInfo_v2(&mut 0, &mut 0)
    })?;
    program.driver.cuMemFree_v2(address)?;

    let (mut loads, mut unloads) = (Vec::new(), Vec::new());
    for _ in 0..program.samples / 20 + 1 {
        let mut module = 0;
        loads.push(crate::timed(|| {
            program.driver.cuModuleLoadData(&mut module, IMAGE)
        })?);
        unloads.push(crate::timed(|| program.driver.cuModuleUnload(module))?);
    }
    program.row("cuModuleLoadData", "PTX of one kernel, again", loads, 1);
    program.row("cuModuleUnload", "", unloads, 1);
    Ok(())
}
