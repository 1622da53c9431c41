//! Conditional nodes of graphs.

use std::sync::Arc;

use super::body;
use crate::context;
use crate::error::{CuError, Result};
use crate::graph::work::Work;
use crate::graph::{Model, graph_handle, with};
use crate::types::{
    CUDA_CONDITIONAL_NODE_PARAMS, CUcontext, CUgraph, CUgraphConditionalHandle, CUgraphNodeParams,
    CUresult,
};

/// `CU_GRAPH_COND_ASSIGN_DEFAULT`.
const ASSIGN_DEFAULT: u32 = 1;

pub unsafe fn cuGraphConditionalHandleCreate(
    pHandle_out: *mut CUgraphConditionalHandle,
    hGraph: CUgraph,
    ctx: CUcontext,
    defaultLaunchValue: u32,
    flags: u32,
) -> CUresult {
    body! {
        let scope = context::scope()?;
        scope.session.alive()?;
        if pHandle_out.is_null() || flags & !ASSIGN_DEFAULT != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let graph = graph_handle(hGraph)?;
        context::find_active(ctx)?;
        let assigned = flags == ASSIGN_DEFAULT;
        let handle = with(|model| model.create_condition(graph, defaultLaunchValue, assigned))?;
        // SAFETY: not null, so writable.
        unsafe { pHandle_out.write(handle) };
        Ok(())
    }
}

/// What a new conditional node is to do. The program is told its bodies.
pub(super) fn conditional(
    model: &mut Model,
    graph: CUgraph,
    wanted: &mut CUgraphNodeParams,
) -> Result<Work> {
    if wanted.reserved0 != [0; 3] || wanted.reserved2 != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let place = wanted
        .words
        .as_mut_ptr()
        .cast::<CUDA_CONDITIONAL_NODE_PARAMS>();
    // SAFETY: the union has room and alignment for each kind of parameters, all plain data.
    let mut parameters = unsafe { place.read() };
    context::find_active(parameters.ctx)?;
    let made = Arc::new(model.conditional(graph_handle(graph)?, &parameters)?);
    parameters.phGraph_out = made.shown();
    // SAFETY: as for reading.
    unsafe { place.write(parameters) };
    Ok(Work::Conditional(made))
}
