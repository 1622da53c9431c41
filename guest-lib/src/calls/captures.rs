//! Stream capture.

use super::graphs::nodes_with_data;
use super::{body, put, put_if_wanted};
use crate::capture::{self, ACTIVE, exchange_mode};
use crate::error::{CuError, Result};
use crate::graph::{Model, graph_handle, with};
use crate::handle::to_pointer;
use crate::session::session;
use crate::stream::target;
use crate::types::{
    CUgraph, CUgraphEdgeData, CUgraphNode, CUresult, CUstream, CUstreamCaptureMode,
    CUstreamCaptureStatus, DefaultStream,
};

/// `CU_STREAM_ADD_CAPTURE_DEPENDENCIES`, `_SET_`.
const ADD: u32 = 0;
const SET: u32 = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: CUstreamCaptureMode = 2;

/// The version of CUDA 10.0, before there were modes, forbids nothing.
pub unsafe fn cuStreamBeginCapture(default: DefaultStream, hStream: CUstream) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuStreamBeginCapture_v2(default, hStream, RELAXED) }
}

pub unsafe fn cuStreamBeginCapture_v2(
    default: DefaultStream,
    hStream: CUstream,
    mode: CUstreamCaptureMode,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        scope.session.alive()?;
        with(|model| model.begin_capture(target, None, mode))
    }
}

pub unsafe fn cuStreamBeginCaptureToGraph(
    default: DefaultStream,
    hStream: CUstream,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    dependencyData: *const CUgraphEdgeData,
    numDependencies: usize,
    mode: CUstreamCaptureMode,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        scope.session.alive()?;
        let graph = graph_handle(hGraph)?;
        // SAFETY: as the caller promises.
        let before = unsafe { nodes_with_data(dependencies, dependencyData, numDependencies) }?;
        with(|model| model.begin_capture(target, Some((graph, before)), mode))
    }
}

pub unsafe fn cuStreamEndCapture(
    default: DefaultStream,
    hStream: CUstream,
    phGraph: *mut CUgraph,
) -> CUresult {
    body! {
        let (scope, target) = target(default, hStream)?;
        scope.session.alive()?;
        let ended = with(|model| model.end_capture(target, !phGraph.is_null()));
        let graph = ended.map_or(std::ptr::null_mut(), to_pointer);
        // SAFETY: as the caller promises.
        unsafe { put_if_wanted(phGraph, graph) };
        ended.map(drop)
    }
}

pub unsafe fn cuStreamIsCapturing(
    default: DefaultStream,
    hStream: CUstream,
    captureStatus: *mut CUstreamCaptureStatus,
) -> CUresult {
    body! {
        if captureStatus.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let (scope, target) = target(default, hStream)?;
        scope.session.alive()?;
        let status = match target.is_captured() {
            true => with(|model| model.capture_status(target))?,
            false => capture::NONE,
        };
        // SAFETY: as the caller promises.
        unsafe { put(captureStatus, status) }
    }
}

/// Where `cuStreamGetCaptureInfo` puts its answers.
struct Places {
    status: *mut CUstreamCaptureStatus,
    id: *mut u64,
    graph: *mut CUgraph,
    nodes: *mut *const CUgraphNode,
    /// Without a place for it, dependencies that are not plain are an error.
    data: *mut *const CUgraphEdgeData,
    count: *mut usize,
    wants_nodes: bool,
}

/// Everything but the status is left as it is while no capture is under way.
///
/// # Safety
/// Each place is null or writable.
unsafe fn info(default: DefaultStream, stream: CUstream, places: &Places) -> Result {
    if places.status.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let (scope, target) = target(default, stream)?;
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
        false => (capture::NONE, None),
    };
    // SAFETY: as the caller promises.
    unsafe {
        put(places.status, status)?;
        if let Some(info) = info {
            put_if_wanted(places.id, info.id);
            put_if_wanted(places.graph, to_pointer(info.graph));
            put_if_wanted(places.count, info.count);
            if places.data.is_null() && places.wants_nodes && !info.plain {
                return Err(CuError::LOSSY_QUERY);
            }
            put_if_wanted(places.nodes, info.nodes);
            put_if_wanted(places.data, info.data);
        }
    }
    Ok(())
}

pub unsafe fn cuStreamGetCaptureInfo(
    default: DefaultStream,
    hStream: CUstream,
    captureStatus_out: *mut CUstreamCaptureStatus,
    id_out: *mut u64,
) -> CUresult {
    let places = Places {
        status: captureStatus_out,
        id: id_out,
        graph: std::ptr::null_mut(),
        nodes: std::ptr::null_mut(),
        data: std::ptr::null_mut(),
        count: std::ptr::null_mut(),
        wants_nodes: false,
    };
    // SAFETY: as the caller promises.
    body! { unsafe { info(default, hStream, &places) } }
}

pub unsafe fn cuStreamGetCaptureInfo_v2(
    default: DefaultStream,
    hStream: CUstream,
    captureStatus_out: *mut CUstreamCaptureStatus,
    id_out: *mut u64,
    graph_out: *mut CUgraph,
    dependencies_out: *mut *const CUgraphNode,
    numDependencies_out: *mut usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe {
        cuStreamGetCaptureInfo_v3(
            default,
            hStream,
            captureStatus_out,
            id_out,
            graph_out,
            dependencies_out,
            std::ptr::null_mut(),
            numDependencies_out,
        )
    }
}

pub unsafe fn cuStreamGetCaptureInfo_v3(
    default: DefaultStream,
    hStream: CUstream,
    captureStatus_out: *mut CUstreamCaptureStatus,
    id_out: *mut u64,
    graph_out: *mut CUgraph,
    dependencies_out: *mut *const CUgraphNode,
    edgeData_out: *mut *const CUgraphEdgeData,
    numDependencies_out: *mut usize,
) -> CUresult {
    let places = Places {
        status: captureStatus_out,
        id: id_out,
        graph: graph_out,
        nodes: dependencies_out,
        data: edgeData_out,
        count: numDependencies_out,
        wants_nodes: !dependencies_out.is_null(),
    };
    // SAFETY: as the caller promises.
    body! { unsafe { info(default, hStream, &places) } }
}

pub unsafe fn cuStreamUpdateCaptureDependencies(
    default: DefaultStream,
    hStream: CUstream,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    flags: u32,
) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe {
        cuStreamUpdateCaptureDependencies_v2(
            default,
            hStream,
            dependencies,
            std::ptr::null(),
            numDependencies,
            flags,
        )
    }
}

pub unsafe fn cuStreamUpdateCaptureDependencies_v2(
    default: DefaultStream,
    hStream: CUstream,
    dependencies: *const CUgraphNode,
    dependencyData: *const CUgraphEdgeData,
    numDependencies: usize,
    flags: u32,
) -> CUresult {
    body! {
        let (_, target) = target(default, hStream)?;
        if flags != ADD && flags != SET {
            return Err(CuError::INVALID_VALUE);
        }
        if !target.is_captured() {
            return Err(CuError::ILLEGAL_STATE);
        }
        // SAFETY: as the caller promises.
        let before = unsafe { nodes_with_data(dependencies, dependencyData, numDependencies) }?;
        with(|model| model.set_capture_dependencies(target, before, flags == ADD))
    }
}

pub unsafe fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) -> CUresult {
    body! {
        session()?;
        if mode.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        // SAFETY: not null, so readable and writable.
        unsafe { mode.write(exchange_mode(mode.read())) };
        Ok(())
    }
}
