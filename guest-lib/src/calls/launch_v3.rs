//! Launch functions before CUDA 4.

use std::ffi::c_void;

use super::launches::launch;
use crate::error::{CuError, Result};
use crate::object::function;
use crate::object::stream::target;
use crate::parameter::{In, Pointer};
use crate::types::{CUfunction, CUstream, DefaultStream};
use crate::work::launch::{Arguments, Attributes, Shape};

pub fn cuFuncSetBlockShape(hfunc: CUfunction, x: i32, y: i32, z: i32) -> Result {
    crate::object::context::scope()?;
    let (_, facts) = function::find(hfunc)?;
    let size = |size: i32| u32::try_from(size).ok().filter(|size| *size > 0);
    let (Some(x), Some(y), Some(z)) = (size(x), size(y), size(z)) else {
        return Err(CuError::INVALID_VALUE);
    };
    facts.legacy.lock().block = [x, y, z];
    Ok(())
}

pub fn cuFuncSetSharedSize(hfunc: CUfunction, bytes: u32) -> Result {
    crate::object::context::scope()?;
    let (_, facts) = function::find(hfunc)?;
    facts.legacy.lock().shared = bytes;
    Ok(())
}

pub fn cuParamSetSize(hfunc: CUfunction, numbytes: u32) -> Result {
    crate::object::context::scope()?;
    function::find(hfunc)?.1.legacy.lock().set_size(numbytes)
}

fn set(function: CUfunction, offset: i32, bytes: impl ExactSizeIterator<Item = u8>) -> Result {
    crate::object::context::scope()?;
    function::find(function)?.1.legacy.lock().set(offset, bytes)
}

pub fn cuParamSeti(hfunc: CUfunction, offset: i32, value: u32) -> Result {
    set(hfunc, offset, value.to_ne_bytes().into_iter())
}

pub fn cuParamSetf(hfunc: CUfunction, offset: i32, value: f32) -> Result {
    set(hfunc, offset, value.to_ne_bytes().into_iter())
}

pub fn cuParamSetv(hfunc: CUfunction, offset: i32, ptr: In<'_, [u8]>, _numbytes: u32) -> Result {
    ptr.not_null()?;
    set(hfunc, offset, ptr.values()?)
}

pub fn cuLaunch(f: CUfunction) -> Result {
    cuLaunchGrid(f, 1, 1)
}

pub fn cuLaunchGrid(f: CUfunction, grid_width: i32, grid_height: i32) -> Result {
    cuLaunchGridAsync(f, grid_width, grid_height, std::ptr::null_mut())
}

pub fn cuLaunchGridAsync(
    f: CUfunction,
    grid_width: i32,
    grid_height: i32,
    hStream: CUstream,
) -> Result {
    let (scope, target) = target(DefaultStream::Legacy, hStream)?;
    let (_, facts) = function::find(f)?;
    let size = |size: i32| u32::try_from(size).map_err(|_| CuError::INVALID_VALUE);
    let grid = [size(grid_width)?, size(grid_height)?, 1];
    let settings = facts.legacy.lock();
    let shape = Shape {
        grid,
        block: settings.block,
        shared: settings.shared,
    };
    let mut parameters = settings.parameters();
    drop(settings);
    let mut bytes = parameters.len();
    // CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END.
    let mut extra: [*mut c_void; 5] = [
        std::ptr::without_provenance_mut(1),
        parameters.as_mut_ptr().cast(),
        std::ptr::without_provenance_mut(2),
        (&raw mut bytes).cast(),
        std::ptr::null_mut(),
    ];
    let arguments = Arguments {
        values: Pointer::null(),
        // SAFETY: a list as `cuLaunchKernel` documents it, with a buffer as long as it says.
        extra: unsafe { Pointer::new(extra.as_mut_ptr()) },
    };
    launch(scope, target, f, shape, Attributes::NONE, arguments)
}
