//! Stream capture.

use wormhole_api::constants::capture_mode::RELAXED;
use wormhole_api::constants::capture_status::{ACTIVE, NONE};
use wormhole_api::constants::capture_update::{ADD_CAPTURE_DEPENDENCIES, SET_CAPTURE_DEPENDENCIES};

use super::graphs::nodes_with_data;
use crate::error::{CuError, Result};
use crate::graph::{Model, graph_handle, with};
use crate::handle::to_pointer;
use crate::object::capture_mode::exchange_mode;
use crate::object::stream::target;
use crate::parameter::{In, InOut, Out};
use crate::session::session;
use crate::types::{
    CUgraph, CUgraphEdgeData, CUgraphNode, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
    DefaultStream,
};

/// Begins a capture that forbids no calls: this version, of CUDA 10.0, predates the capture modes.
pub fn cuStreamBeginCapture(default: DefaultStream, hStream: CUstream) -> Result {
    cuStreamBeginCapture_v2(default, hStream, RELAXED)
}

pub fn cuStreamBeginCapture_v2(
    default: DefaultStream,
    hStream: CUstream,
    mode: CUstreamCaptureMode,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    scope.session.alive()?;
    with(|model| model.begin_capture(target, None, mode))
}

pub fn cuStreamBeginCaptureToGraph(
    default: DefaultStream,
    hStream: CUstream,
    hGraph: CUgraph,
    dependencies: In<'_, [CUgraphNode]>,
    dependencyData: In<'_, [CUgraphEdgeData]>,
    _numDependencies: usize,
    mode: CUstreamCaptureMode,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    scope.session.alive()?;
    let graph = graph_handle(hGraph)?;
    let before = nodes_with_data(dependencies, dependencyData)?;
    with(|model| model.begin_capture(target, Some((graph, before)), mode))
}

pub fn cuStreamEndCapture(
    default: DefaultStream,
    hStream: CUstream,
    phGraph: Out<'_, CUgraph>,
) -> Result {
    let (scope, target) = target(default, hStream)?;
    scope.session.alive()?;
    let ended = with(|model| model.end_capture(target, !phGraph.is_null()));
    let graph = ended.map_or(std::ptr::null_mut(), to_pointer);
    phGraph.put_if_wanted(graph);
    ended.map(drop)
}

pub fn cuStreamIsCapturing(
    default: DefaultStream,
    hStream: CUstream,
    captureStatus: Out<'_, CUstreamCaptureStatus>,
) -> Result {
    captureStatus.not_null()?;
    let (scope, target) = target(default, hStream)?;
    scope.session.alive()?;
    let status = match target.is_captured() {
        true => with(|model| model.capture_status(target))?,
        false => NONE,
    };
    captureStatus.put(status)
}

/// Writes the capture's information. Without an active capture, only the status is written. If `edgeData_out` is null,
/// edges with data other than the default make the call fail.
pub fn cuStreamGetCaptureInfo_v3(
    default: DefaultStream,
    hStream: CUstream,
    captureStatus_out: Out<'_, CUstreamCaptureStatus>,
    id_out: Out<'_, u64>,
    graph_out: Out<'_, CUgraph>,
    dependencies_out: Out<'_, *const CUgraphNode>,
    edgeData_out: Out<'_, *const CUgraphEdgeData>,
    numDependencies_out: Out<'_, usize>,
) -> Result {
    captureStatus_out.not_null()?;
    let (scope, target) = target(default, hStream)?;
    scope.session.alive()?;
    let answer = |model: &mut Model| {
        let status = model.capture_status(target)?;
        let info = match status {
            ACTIVE => Some(model.capture_info(target)?),
            _ => None,
        };
        Ok((status, info))
    };
    let (status, info) = match target.is_captured() {
        true => with(answer)?,
        false => (NONE, None),
    };
    captureStatus_out.put(status)?;
    if let Some(info) = info {
        id_out.put_if_wanted(info.id);
        graph_out.put_if_wanted(to_pointer(info.graph));
        numDependencies_out.put_if_wanted(info.count);
        if edgeData_out.is_null() && !dependencies_out.is_null() && !info.plain {
            return Err(CuError::LOSSY_QUERY);
        }
        dependencies_out.put_if_wanted(info.nodes);
        edgeData_out.put_if_wanted(info.data);
    }
    Ok(())
}

pub fn cuStreamUpdateCaptureDependencies_v2(
    default: DefaultStream,
    hStream: CUstream,
    dependencies: In<'_, [CUgraphNode]>,
    dependencyData: In<'_, [CUgraphEdgeData]>,
    _numDependencies: usize,
    flags: u32,
) -> Result {
    let (_, target) = target(default, hStream)?;
    if flags != ADD_CAPTURE_DEPENDENCIES && flags != SET_CAPTURE_DEPENDENCIES {
        return Err(CuError::INVALID_VALUE);
    }
    if !target.is_captured() {
        return Err(CuError::ILLEGAL_STATE);
    }
    let before = nodes_with_data(dependencies, dependencyData)?;
    with(|model| model.set_capture_dependencies(target, before, flags == ADD_CAPTURE_DEPENDENCIES))
}

pub fn cuThreadExchangeStreamCaptureMode(mode: InOut<'_, CUstreamCaptureMode>) -> Result {
    session()?;
    mode.put(exchange_mode(mode.get()?))
}
