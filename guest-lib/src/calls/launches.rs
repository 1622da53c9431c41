//! Kernel launches.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use wormhole_api::constants::multi_device_launch_flags::{NO_POST_LAUNCH_SYNC, NO_PRE_LAUNCH_SYNC};

use crate::error::{CuError, Result};
use crate::graph::order::join_streams;
use crate::graph::submit::{Operation, submit};
use crate::object::context::Scope;
use crate::object::function;
use crate::object::stream::{Target, target, target_here};
use crate::parameter::{In, Pointer};
use crate::session::session;
use crate::types::{
    CUDA_LAUNCH_PARAMS, CUfunction, CUlaunchConfig, CUstream, DefaultStream, STREAM_PER_THREAD,
};
use crate::work::launch::{Arguments, Attributes, Launch, Shape, with_launch};

/// Launches a kernel.
#[inline(always)]
pub(super) fn launch(
    scope: Scope,
    target: Target,
    function: CUfunction,
    shape: Shape,
    attributes: &Attributes,
    arguments: Arguments<'_>,
) -> Result {
    let take = |launch: Launch<'_>| submit(scope, target, Operation::Kernel(launch));
    with_launch(scope, target, function, shape, attributes, arguments, take)
}

/// Reads the launch attributes of a configuration from an [`In`].
pub(super) fn attributes_of(config: &CUlaunchConfig) -> Result<Attributes> {
    // SAFETY: `numAttrs` is the length of `attrs` (`CUlaunchConfig`).
    let list = unsafe { In::list(config.attrs.cast_const(), config.numAttrs as usize) };
    Attributes::read(list.values()?)
}

#[inline(always)]
pub fn cuLaunchKernel(
    default: DefaultStream,
    f: CUfunction,
    gridDimX: u32,
    gridDimY: u32,
    gridDimZ: u32,
    blockDimX: u32,
    blockDimY: u32,
    blockDimZ: u32,
    sharedMemBytes: u32,
    hStream: CUstream,
    kernelParams: Pointer<'_, *mut c_void>,
    extra: Pointer<'_, *mut c_void>,
) -> Result {
    let (scope, target) = target_here(default, hStream)?;
    let shape = Shape {
        grid: [gridDimX, gridDimY, gridDimZ],
        block: [blockDimX, blockDimY, blockDimZ],
        shared: sharedMemBytes,
    };
    let arguments = Arguments {
        values: kernelParams,
        extra,
    };
    launch(scope, target, f, shape, Attributes::NONE, arguments)
}

pub fn cuLaunchCooperativeKernel(
    default: DefaultStream,
    f: CUfunction,
    gridDimX: u32,
    gridDimY: u32,
    gridDimZ: u32,
    blockDimX: u32,
    blockDimY: u32,
    blockDimZ: u32,
    sharedMemBytes: u32,
    hStream: CUstream,
    kernelParams: Pointer<'_, *mut c_void>,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    let shape = Shape {
        grid: [gridDimX, gridDimY, gridDimZ],
        block: [blockDimX, blockDimY, blockDimZ],
        shared: sharedMemBytes,
    };
    let arguments = Arguments {
        values: kernelParams,
        extra: Pointer::null(),
    };
    let attributes = Attributes::cooperative();
    launch(scope, target, f, shape, &attributes, arguments)
}

/// Launches one kernel on each of several devices, each on its own stream. The launches begin when the earlier work
/// of all streams is complete, and later work begins when all launches are complete, unless flags disable this.
pub fn cuLaunchCooperativeKernelMultiDevice(
    launchParamsList: In<'_, [CUDA_LAUNCH_PARAMS]>,
    numDevices: u32,
    flags: u32,
) -> Result {
    let devices = session()?.devices().len();
    let known = flags & !(NO_PRE_LAUNCH_SYNC | NO_POST_LAUNCH_SYNC) == 0;
    let count = usize::try_from(numDevices).unwrap_or(usize::MAX);
    if launchParamsList.is_null() || !(1..=devices).contains(&count) || !known {
        return Err(CuError::INVALID_VALUE);
    }
    let launches = launchParamsList.to_vec()?;
    let targets = launches.iter().map(stream_of).collect::<Result<Vec<_>>>()?;
    let on = |(scope, target): &(Scope, Target)| target.device(*scope);
    for (index, target) in targets.iter().enumerate() {
        if targets[..index].iter().any(|other| on(other) == on(target)) {
            return Err(CuError::INVALID_VALUE);
        }
    }
    if flags & NO_PRE_LAUNCH_SYNC == 0 {
        join_streams(&targets)?;
    }
    for (one, (scope, target)) in launches.iter().zip(&targets) {
        let shape = Shape {
            grid: [one.gridDimX, one.gridDimY, one.gridDimZ],
            block: [one.blockDimX, one.blockDimY, one.blockDimZ],
            shared: one.sharedMemBytes,
        };
        let arguments = Arguments {
            // SAFETY: as in `cuLaunchKernel` (`CUDA_LAUNCH_PARAMS`).
            values: unsafe { Pointer::new(one.kernelParams) },
            extra: Pointer::null(),
        };
        let attributes = Attributes::cooperative();
        launch(*scope, *target, one.function, shape, &attributes, arguments)?;
    }
    if flags & NO_POST_LAUNCH_SYNC == 0 {
        join_streams(&targets)?;
    }
    Ok(())
}

/// Returns the stream of one of the launches, which must not be a default stream, with the scope of its device.
fn stream_of(one: &CUDA_LAUNCH_PARAMS) -> Result<(Scope, Target)> {
    function::find(one.function)?;
    // A default stream would be the current device's.
    if one.hStream.addr() as u64 <= STREAM_PER_THREAD {
        return Err(CuError::INVALID_VALUE);
    }
    let (scope, target) = target(DefaultStream::Legacy, one.hStream)?;
    let scope = Scope {
        session: scope.session.session().on(target.device(scope)),
        context: target.stream.context.load(Ordering::Relaxed),
    };
    Ok((scope, target))
}

pub fn cuLaunchKernelEx(
    default: DefaultStream,
    config: In<'_, CUlaunchConfig>,
    f: CUfunction,
    kernelParams: Pointer<'_, *mut c_void>,
    extra: Pointer<'_, *mut c_void>,
) -> Result {
    let config = config.get()?;
    let (scope, target) = target(default, config.hStream)?;
    let shape = Shape {
        grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
        block: [config.blockDimX, config.blockDimY, config.blockDimZ],
        shared: config.sharedMemBytes,
    };
    let arguments = Arguments {
        values: kernelParams,
        extra,
    };
    if config.numAttrs == 0 {
        return launch(scope, target, f, shape, Attributes::NONE, arguments);
    }
    let attributes = attributes_of(&config)?;
    launch(scope, target, f, shape, &attributes, arguments)
}
