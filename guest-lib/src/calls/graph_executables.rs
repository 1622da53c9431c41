//! Executable graphs.

use std::ffi::c_char;

use super::{body, put, put_if_wanted};
use crate::capture;
use crate::context::{self, Scope};
use crate::error::{CuError, Result};
use crate::graph::executable::{self, INSTANTIATED, Refused, UPLOAD};
use crate::graph::{graph_handle, node_handle, with};
use crate::handle::to_pointer;
use crate::stream::target;
use crate::types::{
    CUDA_GRAPH_INSTANTIATE_PARAMS, CUgraph, CUgraphExec, CUgraphExecUpdateResultInfo, CUgraphNode,
    CUresult, CUstream, DefaultStream,
};

fn refused(code: CuError) -> Refused {
    code.into()
}

/// Makes a graph executable.
///
/// # Safety
/// `place` is null or writable.
unsafe fn instantiate(
    place: *mut CUgraphExec,
    graph: CUgraph,
    flags: u64,
) -> std::result::Result<Scope, Refused> {
    let scope = context::scope().map_err(refused)?;
    if place.is_null() {
        return Err(refused(CuError::INVALID_VALUE));
    }
    let graph = graph_handle(graph).map_err(refused)?;
    capture::check_call().map_err(refused)?;
    let mut why = None;
    let made = with(|model| {
        executable::instantiate(scope, model, graph, flags).map_err(|refused| {
            why = Some(refused);
            refused.code
        })
    });
    match (made, why) {
        (Ok(executable), _) => {
            // SAFETY: as the caller promises.
            unsafe { put(place, to_pointer(executable)) }.map_err(refused)?;
            Ok(scope)
        }
        (Err(_), Some(why)) => Err(why),
        (Err(code), None) => Err(refused(code)),
    }
}

pub unsafe fn cuGraphInstantiate(
    phGraphExec: *mut CUgraphExec,
    hGraph: CUgraph,
    phErrorNode: *mut CUgraphNode,
    logBuffer: *mut c_char,
    bufferSize: usize,
) -> CUresult {
    body! {
        // SAFETY: as the caller promises.
        unsafe {
            if bufferSize > 0 {
                put_if_wanted(logBuffer, 0);
            }
            match instantiate(phGraphExec, hGraph, 0) {
                Ok(_) => Ok(()),
                Err(why) => {
                    let node = why.node.map_or(std::ptr::null_mut(), to_pointer);
                    put_if_wanted(phErrorNode, node);
                    Err(why.code)
                }
            }
        }
    }
}

pub unsafe fn cuGraphInstantiateWithFlags(
    phGraphExec: *mut CUgraphExec,
    hGraph: CUgraph,
    flags: u64,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe { instantiate(phGraphExec, hGraph, flags) }.map(drop).map_err(|why| why.code) }
}

pub unsafe fn cuGraphInstantiateWithParams(
    default: DefaultStream,
    phGraphExec: *mut CUgraphExec,
    hGraph: CUgraph,
    instantiateParams: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
) -> CUresult {
    body! {
        if instantiateParams.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so parameters.
        let mut wanted = unsafe { instantiateParams.read() };
        // SAFETY: as the caller promises.
        let made = unsafe { instantiate(phGraphExec, hGraph, wanted.flags) };
        (wanted.result_out, wanted.hErrNode_out) = match made {
            Ok(_) => (INSTANTIATED, std::ptr::null_mut()),
            Err(why) => (why.result, why.node.map_or(std::ptr::null_mut(), to_pointer)),
        };
        // SAFETY: not null, so writable.
        unsafe { instantiateParams.write(wanted) };
        made.map_err(|why| why.code)?;
        if wanted.flags & UPLOAD != 0 {
            let (scope, target) = target(default, wanted.hUploadStream)?;
            // SAFETY: written above.
            executable::upload(scope, target, unsafe { phGraphExec.read() })?;
        }
        Ok(())
    }
}

#[inline]
pub unsafe fn cuGraphLaunch(
    default: DefaultStream,
    hGraphExec: CUgraphExec,
    hStream: CUstream,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        executable::launch(scope, target, hGraphExec)
    }
}

pub unsafe fn cuGraphUpload(
    default: DefaultStream,
    hGraphExec: CUgraphExec,
    hStream: CUstream,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        executable::upload(scope, target, hGraphExec)
    }
}

pub unsafe fn cuGraphExecDestroy(hGraphExec: CUgraphExec) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        let executable = executable::handle(hGraphExec)?;
        with(|model| model.destroy_executable(scope, executable))
    }
}

pub unsafe fn cuGraphExecGetFlags(hGraphExec: CUgraphExec, flags: *mut u64) -> CUresult {
    body! {
        let executable = executable::handle(hGraphExec)?;
        let told = with(|model| model.flags(executable))?;
        // SAFETY: as the caller promises.
        unsafe { put(flags, told) }
    }
}

/// Updates a graph; the answer says what was wrong beside the code.
fn update(executable: CUgraphExec, graph: CUgraph) -> (Result, CUgraphExecUpdateResultInfo) {
    let mut info = CUgraphExecUpdateResultInfo {
        result: 1,
        errorNode: std::ptr::null_mut(),
        errorFromNode: std::ptr::null_mut(),
    };
    let mut done = || {
        let scope = context::scope_or_primary()?;
        scope.session.alive()?;
        let (executable, graph) = (executable::handle(executable)?, graph_handle(graph)?);
        with(|model| {
            let (code, result, node, from) = model.update(scope, executable, graph);
            let pointer = |node: Option<_>| node.map_or(std::ptr::null_mut(), to_pointer);
            info = CUgraphExecUpdateResultInfo {
                result,
                errorNode: pointer(node),
                errorFromNode: pointer(from),
            };
            code
        })
    };
    let result = done();
    (result, info)
}

pub unsafe fn cuGraphExecUpdate(
    hGraphExec: CUgraphExec,
    hGraph: CUgraph,
    hErrorNode_out: *mut CUgraphNode,
    updateResult_out: *mut u32,
) -> CUresult {
    body! {
        let (result, info) = update(hGraphExec, hGraph);
        // SAFETY: as the caller promises.
        unsafe {
            put_if_wanted(hErrorNode_out, info.errorNode);
            put_if_wanted(updateResult_out, info.result);
        }
        result
    }
}

pub unsafe fn cuGraphExecUpdate_v2(
    hGraphExec: CUgraphExec,
    hGraph: CUgraph,
    resultInfo: *mut CUgraphExecUpdateResultInfo,
) -> CUresult {
    body! {
        let (result, info) = update(hGraphExec, hGraph);
        // SAFETY: as the caller promises.
        unsafe { put_if_wanted(resultInfo, info) };
        result
    }
}

pub unsafe fn cuGraphNodeSetEnabled(
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    isEnabled: u32,
) -> CUresult {
    body! {
        let scope = context::scope_or_primary()?;
        let (executable, node) = (executable::handle(hGraphExec)?, node_handle(hNode)?);
        with(|model| model.enable(scope, executable, node, isEnabled != 0))
    }
}

pub unsafe fn cuGraphNodeGetEnabled(
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    isEnabled: *mut u32,
) -> CUresult {
    body! {
        let (executable, node) = (executable::handle(hGraphExec)?, node_handle(hNode)?);
        let enabled = with(|model| model.is_enabled(executable, node))?;
        // SAFETY: as the caller promises.
        unsafe { put(isEnabled, enabled.into()) }
    }
}
