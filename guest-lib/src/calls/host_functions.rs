//! Functions of the program that streams call.

use std::ffi::c_void;

use super::body;
use crate::error::CuError;
use crate::host_function::{Function, launch};
use crate::stream::target;
use crate::types::{CUhostFn, CUresult, CUstream, CUstreamCallback, DefaultStream};

pub unsafe fn cuLaunchHostFunc(
    default: DefaultStream,
    hStream: CUstream,
    function: CUhostFn,
    userData: *mut c_void,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        if function.is_none() {
            return Err(CuError::INVALID_VALUE);
        }
        launch(scope, target, Function::Plain { function, data: userData })
    }
}

pub unsafe fn cuStreamAddCallback(
    default: DefaultStream,
    hStream: CUstream,
    callback: CUstreamCallback,
    userData: *mut c_void,
    flags: u32,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        if callback.is_none() || flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let function = Function::Callback { function: callback, stream: hStream, data: userData };
        launch(scope, target, function)
    }
}
