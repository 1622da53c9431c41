//! Host functions and stream callbacks.

use std::ffi::c_void;

use crate::error::{CuError, Result};
use crate::graph::submit::{Operation, submit};
use crate::object::stream::target;
use crate::parameter::Pointer;
use crate::types::{CUhostFn, CUstream, CUstreamCallback, DefaultStream};
use crate::work::host_function::Function;

pub fn cuLaunchHostFunc(
    default: DefaultStream,
    hStream: CUstream,
    function: CUhostFn,
    userData: Pointer<'_, c_void>,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    if function.is_none() {
        return Err(CuError::INVALID_VALUE);
    }
    scope.session.alive()?;
    let function = Function::Plain {
        function,
        data: userData.as_ptr(),
    };
    submit(scope, target, Operation::Host(function))
}

pub fn cuStreamAddCallback(
    default: DefaultStream,
    hStream: CUstream,
    callback: CUstreamCallback,
    userData: Pointer<'_, c_void>,
    flags: u32,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    if callback.is_none() || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    scope.session.alive()?;
    let function = Function::Callback {
        function: callback,
        stream: hStream,
        data: userData.as_ptr(),
    };
    submit(scope, target, Operation::Host(function))
}
