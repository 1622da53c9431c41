//! Kernel launches.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use super::body;
use crate::context::Scope;
use crate::error::{CuError, Result};
use crate::function;
use crate::launch::{Arguments, Attributes, Shape, launch};
use crate::peer;
use crate::session::session;
use crate::stream::{Target, target};
use crate::types::{
    CUDA_LAUNCH_PARAMS, CUfunction, CUlaunchConfig, CUresult, CUstream, DefaultStream,
    STREAM_PER_THREAD,
};

#[inline]
pub unsafe fn cuLaunchKernel(
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
    kernelParams: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        let shape = Shape {
            grid: [gridDimX, gridDimY, gridDimZ],
            block: [blockDimX, blockDimY, blockDimZ],
            shared: sharedMemBytes,
        };
        let arguments = Arguments { values: kernelParams, extra };
        // SAFETY: as the caller promises.
        unsafe { launch(scope, target, f, shape, Attributes::NONE, arguments) }
    }
}

pub unsafe fn cuLaunchCooperativeKernel(
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
    kernelParams: *mut *mut c_void,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        let shape = Shape {
            grid: [gridDimX, gridDimY, gridDimZ],
            block: [blockDimX, blockDimY, blockDimZ],
            shared: sharedMemBytes,
        };
        let arguments = Arguments { values: kernelParams, extra: std::ptr::null_mut() };
        // SAFETY: as the caller promises.
        unsafe { launch(scope, target, f, shape, &Attributes::cooperative(), arguments) }
    }
}

/// One launch for each of several devices, on a stream of each. They begin when the work before all of them is
/// complete, and the work behind any begins when all are, unless the program says that it sees to that itself.
pub unsafe fn cuLaunchCooperativeKernelMultiDevice(
    launchParamsList: *const CUDA_LAUNCH_PARAMS,
    numDevices: u32,
    flags: u32,
) -> CUresult {
    const NO_PRE_LAUNCH_SYNC: u32 = 1;
    const NO_POST_LAUNCH_SYNC: u32 = 2;
    body! {
        let devices = session()?.devices().len();
        let known = flags & !(NO_PRE_LAUNCH_SYNC | NO_POST_LAUNCH_SYNC) == 0;
        let count = usize::try_from(numDevices).unwrap_or(usize::MAX);
        if launchParamsList.is_null() || !(1..=devices).contains(&count) || !known {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so as many launches.
        let launches = unsafe { std::slice::from_raw_parts(launchParamsList, count) };
        let targets = launches.iter().map(stream_of).collect::<Result<Vec<_>>>()?;
        let on = |(scope, target): &(Scope, Target)| target.device(*scope);
        for (index, target) in targets.iter().enumerate() {
            if targets[..index].iter().any(|other| on(other) == on(target)) {
                return Err(CuError::INVALID_VALUE);
            }
        }
        if flags & NO_PRE_LAUNCH_SYNC == 0 {
            peer::meet(&targets)?;
        }
        for (one, (scope, target)) in launches.iter().zip(&targets) {
            let shape = Shape {
                grid: [one.gridDimX, one.gridDimY, one.gridDimZ],
                block: [one.blockDimX, one.blockDimY, one.blockDimZ],
                shared: one.sharedMemBytes,
            };
            let arguments = Arguments { values: one.kernelParams, extra: std::ptr::null_mut() };
            let attributes = Attributes::cooperative();
            // SAFETY: as the caller promises.
            unsafe { launch(*scope, *target, one.function, shape, &attributes, arguments) }?;
        }
        if flags & NO_POST_LAUNCH_SYNC == 0 {
            peer::meet(&targets)?;
        }
        Ok(())
    }
}

/// The stream of one of several launches, which is no default one, with its device's scope.
fn stream_of(one: &CUDA_LAUNCH_PARAMS) -> Result<(Scope, Target)> {
    function::find(one.function)?;
    // A default stream would be that of one device.
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

pub unsafe fn cuLaunchKernelEx(
    default: DefaultStream,
    config: *const CUlaunchConfig,
    f: CUfunction,
    kernelParams: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    body! {
        if config.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so a configuration.
        let config = unsafe { config.read() };
        let (scope, target) = target(default, config.hStream)?;
        let shape = Shape {
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            block: [config.blockDimX, config.blockDimY, config.blockDimZ],
            shared: config.sharedMemBytes,
        };
        let arguments = Arguments { values: kernelParams, extra };
        if config.numAttrs == 0 {
            // SAFETY: as the caller promises.
            return unsafe { launch(scope, target, f, shape, Attributes::NONE, arguments) };
        }
        if config.attrs.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: the caller vouches for that many attributes.
        let list = unsafe { std::slice::from_raw_parts(config.attrs, config.numAttrs as usize) };
        // SAFETY: as the caller promises.
        unsafe { launch(scope, target, f, shape, &Attributes::read(list)?, arguments) }
    }
}
