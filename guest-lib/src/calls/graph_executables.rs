//! Executable graphs.

use wormhole_api::constants::graph_instantiate_flags::UPLOAD;
use wormhole_api::constants::graph_instantiate_result::SUCCESS;

use crate::error::{CuError, Result};
use crate::graph::executable::{self, Refused};
use crate::graph::{graph_handle, node_handle, with};
use crate::handle::to_pointer;
use crate::memory::with_room;
use crate::object::capture_mode::check_call;
use crate::object::context;
use crate::object::stream::target;
use crate::parameter::{InOut, Out};
use crate::types::{
    CUDA_GRAPH_INSTANTIATE_PARAMS, CUgraph, CUgraphExec, CUgraphExecUpdateResultInfo, CUgraphNode,
    CUstream, DefaultStream,
};

fn refused(code: CuError) -> Refused {
    code.into()
}

/// Instantiates a graph.
fn instantiate(
    place: Out<'_, CUgraphExec>,
    graph: CUgraph,
    flags: u64,
) -> std::result::Result<CUgraphExec, Refused> {
    let scope = context::scope().map_err(refused)?;
    if place.is_null() {
        return Err(refused(CuError::INVALID_VALUE));
    }
    let graph = graph_handle(graph).map_err(refused)?;
    check_call().map_err(refused)?;
    let mut why = None;
    let made = with_room(|| {
        with(|model| {
            executable::instantiate(scope, model, graph, flags).map_err(|refused| {
                why = Some(refused);
                refused.code
            })
        })
    });
    match (made, why) {
        (Ok(executable), _) => {
            let executable = to_pointer(executable);
            place.put(executable).map_err(refused)?;
            Ok(executable)
        }
        (Err(_), Some(why)) => Err(why),
        (Err(code), None) => Err(refused(code)),
    }
}

pub fn cuGraphInstantiate(
    phGraphExec: Out<'_, CUgraphExec>,
    hGraph: CUgraph,
    phErrorNode: Out<'_, CUgraphNode>,
    logBuffer: Out<'_, [u8]>,
    bufferSize: usize,
) -> Result {
    if bufferSize > 0 && !logBuffer.is_null() {
        logBuffer.put(0, 0)?;
    }
    match instantiate(phGraphExec, hGraph, 0) {
        Ok(_) => Ok(()),
        Err(why) => {
            let node = why.node.map_or(std::ptr::null_mut(), to_pointer);
            phErrorNode.put_if_wanted(node);
            Err(why.code)
        }
    }
}

pub fn cuGraphInstantiateWithFlags(
    phGraphExec: Out<'_, CUgraphExec>,
    hGraph: CUgraph,
    flags: u64,
) -> Result {
    instantiate(phGraphExec, hGraph, flags)
        .map(drop)
        .map_err(|why| why.code)
}

pub fn cuGraphInstantiateWithParams(
    default: DefaultStream,
    phGraphExec: Out<'_, CUgraphExec>,
    hGraph: CUgraph,
    instantiateParams: InOut<'_, CUDA_GRAPH_INSTANTIATE_PARAMS>,
) -> Result {
    let mut wanted = instantiateParams.get()?;
    let made = instantiate(phGraphExec, hGraph, wanted.flags);
    (wanted.result_out, wanted.hErrNode_out) = match made {
        Ok(_) => (SUCCESS, std::ptr::null_mut()),
        Err(why) => (
            why.result,
            why.node.map_or(std::ptr::null_mut(), to_pointer),
        ),
    };
    instantiateParams.put(wanted)?;
    let executable = made.map_err(|why| why.code)?;
    if wanted.flags & UPLOAD != 0 {
        let (scope, target) = target(default, wanted.hUploadStream)?;
        executable::upload(scope, target, executable)?;
    }
    Ok(())
}

#[inline]
pub fn cuGraphLaunch(default: DefaultStream, hGraphExec: CUgraphExec, hStream: CUstream) -> Result {
    let (scope, target) = target(default, hStream)?;
    executable::launch(scope, target, hGraphExec)
}

pub fn cuGraphUpload(default: DefaultStream, hGraphExec: CUgraphExec, hStream: CUstream) -> Result {
    let (scope, target) = target(default, hStream)?;
    executable::upload(scope, target, hGraphExec)
}

pub fn cuGraphExecDestroy(hGraphExec: CUgraphExec) -> Result {
    let scope = context::scope_or_primary()?;
    let executable = executable::handle(hGraphExec)?;
    with(|model| model.destroy_executable(scope, executable))
}

pub fn cuGraphExecGetFlags(hGraphExec: CUgraphExec, flags: Out<'_, u64>) -> Result {
    let executable = executable::handle(hGraphExec)?;
    let told = with(|model| model.flags(executable))?;
    flags.put(told)
}

/// Updates an executable graph. Returns the result, and the reason of a failure.
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

pub fn cuGraphExecUpdate(
    hGraphExec: CUgraphExec,
    hGraph: CUgraph,
    hErrorNode_out: Out<'_, CUgraphNode>,
    updateResult_out: Out<'_, u32>,
) -> Result {
    let (result, info) = update(hGraphExec, hGraph);
    hErrorNode_out.put_if_wanted(info.errorNode);
    updateResult_out.put_if_wanted(info.result);
    result
}

pub fn cuGraphExecUpdate_v2(
    hGraphExec: CUgraphExec,
    hGraph: CUgraph,
    resultInfo: Out<'_, CUgraphExecUpdateResultInfo>,
) -> Result {
    let (result, info) = update(hGraphExec, hGraph);
    resultInfo.put_if_wanted(info);
    result
}

pub fn cuGraphNodeSetEnabled(
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    isEnabled: u32,
) -> Result {
    let scope = context::scope_or_primary()?;
    let (executable, node) = (executable::handle(hGraphExec)?, node_handle(hNode)?);
    with(|model| model.enable(scope, executable, node, isEnabled != 0))
}

pub fn cuGraphNodeGetEnabled(
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    isEnabled: Out<'_, u32>,
) -> Result {
    let (executable, node) = (executable::handle(hGraphExec)?, node_handle(hNode)?);
    let enabled = with(|model| model.is_enabled(executable, node))?;
    isEnabled.put(enabled.into())
}
