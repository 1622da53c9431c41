//! Faults: the error is sticky, health queries report it, and later work of the stream does not run.

use std::sync::atomic::Ordering;

use super::{
    Check, HostMemory, ONE_THREAD, Outcome, eventually, function, holds, kernels, launch, load,
    same, worked,
};
use crate::{CuError, Device, RawStream};

pub const CHECKS: &[Check] = &[
    Check {
        name: "an illegal address kills the context",
        run: illegal_address,
    },
    Check {
        name: "a misaligned address kills the context",
        run: misaligned,
    },
    Check {
        name: "a trap kills the context",
        run: trap,
    },
    Check {
        name: "a failed assertion kills the context and says why",
        run: assertion,
    },
    Check {
        name: "a healthy context reports nothing",
        run: healthy,
    },
];

const LEGACY: RawStream = RawStream::LEGACY;

/// Runs a kernel that faults. The fence after it is never written and every later call fails. `values` makes the
/// kernel's parameters from the address of an allocation.
fn faults(
    device: &dyn Device,
    text: &str,
    name: &str,
    values: fn(u64) -> Vec<u64>,
    error: CuError,
) -> Outcome {
    let host = HostMemory::new(device, 1)?;
    let module = load(device, text)?;
    let kernel = function(device, &module, name)?;
    let stream = worked("stream", device.stream_create(super::NON_BLOCKING, 0))?;
    let values = values(worked("allocate", device.mem_alloc(4096))?);
    worked(
        "launch",
        launch(device, stream, &kernel, ONE_THREAD, &values),
    )?;
    // The device may detect the fault before the fence is queued.
    let queued = device.write_fence(stream, host.address(0), 1);
    holds(
        "the fence was queued or the fault seen",
        queued.is_ok() || queued == Err(error),
    )?;
    let mut health = None;
    eventually("the context's health says so", || {
        health = device.health(&[stream]);
        health.is_some()
    })?;
    same("the health", health, Some(error))?;
    same(
        "synchronizing the stream",
        device.synchronize_stream(stream),
        Err(error),
    )?;
    same(
        "synchronizing the context",
        device.synchronize(),
        Err(error),
    )?;
    same("allocating", device.mem_alloc(16), Err(error))?;
    same(
        "another stream",
        device.stream_create(0, 0).err(),
        Some(error),
    )?;
    same(
        "a launch",
        launch(device, LEGACY, &kernel, ONE_THREAD, &values),
        Err(error),
    )?;
    same("the health, again", device.health(&[]), Some(error))?;
    same("the fence", host.word(0).load(Ordering::Acquire), 0)
}

fn illegal_address(device: &dyn Device) -> Outcome {
    faults(
        device,
        kernels::PLAIN,
        "store",
        |_| vec![16, 0],
        CuError::ILLEGAL_ADDRESS,
    )
}

fn misaligned(device: &dyn Device) -> Outcome {
    faults(
        device,
        kernels::PLAIN,
        "store",
        |address| vec![address + 1, 0],
        CuError::MISALIGNED_ADDRESS,
    )
}

fn trap(device: &dyn Device) -> Outcome {
    faults(
        device,
        kernels::PLAIN,
        "fall",
        |_| Vec::new(),
        CuError::LAUNCH_FAILED,
    )
}

fn assertion(device: &dyn Device) -> Outcome {
    faults(
        device,
        kernels::TALKING,
        "refuse",
        |_| Vec::new(),
        CuError::ASSERT,
    )?;
    let text = String::from_utf8_lossy(&device.take_output().stderr).into_owned();
    same(
        "the text",
        text,
        "check.cu:12: refuse: block: [0,0,0], thread: [0,0,0] Assertion `false` failed.\n"
            .to_owned(),
    )
}

fn healthy(device: &dyn Device) -> Outcome {
    let stream = worked("stream", device.stream_create(0, 0))?;
    same("idle", device.health(&[stream, LEGACY]), None)?;
    worked("fill", {
        let destination = worked("allocate", device.mem_alloc(64 << 20))?;
        device.fill(
            crate::Fill {
                destination,
                pitch: 0,
                width: 16 << 20,
                height: 1,
                value: 1,
                element: 4,
            },
            stream,
        )
    })?;
    same("busy", device.health(&[stream, LEGACY]), None)?;
    worked("synchronize", device.synchronize())?;
    same("after work", device.health(&[stream]), None)
}
