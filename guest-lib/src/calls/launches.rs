//! Kernel launches.

use std::ffi::c_void;

use super::body;
use crate::error::CuError;
use crate::launch::{Arguments, Attributes, Shape, launch};
use crate::stream::target;
use crate::types::{CUfunction, CUlaunchConfig, CUresult, CUstream, DefaultStream};

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
