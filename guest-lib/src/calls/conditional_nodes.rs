//! Conditional nodes of graphs.

use std::mem::offset_of;
use std::sync::Arc;

use wormhole_api::constants::graph_condition_flags::ASSIGN_DEFAULT;

use super::graph_nodes::Member as _;

use crate::error::{CuError, Result};
use crate::graph::work::Work;
use crate::graph::{Model, graph_handle, with};
use crate::object::context;
use crate::parameter::Out;
use crate::types::{
    CUDA_CONDITIONAL_NODE_PARAMS, CUcontext, CUgraph, CUgraphConditionalHandle, CUgraphNodeParams,
};

pub fn cuGraphConditionalHandleCreate(
    pHandle_out: Out<'_, CUgraphConditionalHandle>,
    hGraph: CUgraph,
    ctx: CUcontext,
    defaultLaunchValue: u32,
    flags: u32,
) -> Result {
    let scope = context::scope()?;
    scope.session.alive()?;
    if pHandle_out.is_null() || flags & !ASSIGN_DEFAULT != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let graph = graph_handle(hGraph)?;
    context::find_active(ctx)?;
    let assigned = flags == ASSIGN_DEFAULT;
    let handle = with(|model| model.create_condition(graph, defaultLaunchValue, assigned))?;
    pHandle_out.put(handle)
}

/// Creates the work of a new conditional node, and writes the address of its body graphs to the parameters.
pub(super) fn conditional(
    model: &mut Model,
    graph: CUgraph,
    wanted: &mut CUgraphNodeParams,
) -> Result<Work> {
    if wanted.reserved0 != [0; 3] || wanted.reserved2 != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let parameters = CUDA_CONDITIONAL_NODE_PARAMS::of(wanted);
    context::find_active(parameters.ctx)?;
    let made = Arc::new(model.conditional(graph_handle(graph)?, &parameters)?);
    let place = offset_of!(CUDA_CONDITIONAL_NODE_PARAMS, phGraph_out) / size_of::<u64>();
    wanted.words[place] = made.body_handles().expose_provenance() as u64;
    Ok(Work::Conditional(made))
}
