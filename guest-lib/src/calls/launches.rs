//! Kernel launches.

use std::ffi::c_void;

use super::body;
use crate::error::CuError;
use crate::function;
use crate::launch::{Arguments, Attributes, Shape, launch};
use crate::session::session;
use crate::stream::target;
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

/// One launch for each device, of which there is one.
pub unsafe fn cuLaunchCooperativeKernelMultiDevice(
    launchParamsList: *const CUDA_LAUNCH_PARAMS,
    numDevices: u32,
    flags: u32,
) -> CUresult {
    // CU_COOPERATIVE_LAUNCH_MULTI_DEVICE_NO_PRE_LAUNCH_SYNC and _NO_POST_LAUNCH_SYNC.
    const FLAGS: u32 = 3;
    body! {
        session()?;
        if launchParamsList.is_null() || numDevices != 1 || flags & !FLAGS != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so one launch.
        let one = unsafe { launchParamsList.read() };
        function::find(one.function)?;
        // A default stream would be that of one device.
        if one.hStream.addr() as u64 <= STREAM_PER_THREAD {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: as the caller promises.
        let code = unsafe {
            cuLaunchCooperativeKernel(
                DefaultStream::Legacy,
                one.function,
                one.gridDimX,
                one.gridDimY,
                one.gridDimZ,
                one.blockDimX,
                one.blockDimY,
                one.blockDimZ,
                one.sharedMemBytes,
                one.hStream,
                one.kernelParams,
            )
        };
        if code == 0 { Ok(()) } else { Err(CuError(code)) }
    }
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
