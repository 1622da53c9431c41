//! Conditional nodes of graphs.

use std::ptr;

use wormhole_api::constants::graph_condition_flags::ASSIGN_DEFAULT;
use wormhole_api::constants::graph_conditional_type;
use wormhole_api::constants::graph_node_type::CONDITIONAL;
use wormhole_api::ctypes::{CUDA_CONDITIONAL_NODE_PARAMS, CUgraphNodeParams};
use wormhole_api::ctypes::{CUgraph, CUgraphNode};
use wormhole_device::{Condition, Conditional, CuError, GraphBranch, Result};

use crate::device::CudaDevice;

/// `CUgraphConditionalNodeType`.
const fn kind(branch: GraphBranch) -> u32 {
    match branch {
        GraphBranch::If => graph_conditional_type::IF,
        GraphBranch::While => graph_conditional_type::WHILE,
        GraphBranch::Switch => graph_conditional_type::SWITCH,
    }
}

/// Handle of a condition. The driver numbers the conditions of a graph from 1 on, as the guest does: kernel parameters
/// contain these numbers.
fn handle(place: usize) -> u64 {
    place as u64 + 1
}

impl CudaDevice {
    /// Creates the conditions of a new graph.
    pub(crate) fn add_conditions(&self, graph: CUgraph, conditions: &[Condition]) -> Result<()> {
        for (place, condition) in conditions.iter().enumerate() {
            let flags = if condition.assigned {
                ASSIGN_DEFAULT
            } else {
                0
            };
            let mut made = 0;
            // SAFETY: the graph is live, the place is writable.
            unsafe {
                self.driver().cuGraphConditionalHandleCreate(
                    &raw mut made,
                    graph,
                    self.handle(),
                    condition.default,
                    flags,
                )
            }?;
            if made != handle(place) {
                tracing::error!(made, place, "the driver numbers conditions in another way");
                return Err(CuError::NOT_SUPPORTED);
            }
        }
        Ok(())
    }

    /// Adds a conditional node, and appends its bodies to `bodies`.
    pub(crate) fn add_conditional(
        &self,
        graph: CUgraph,
        node: &Conditional,
        bodies: &mut Vec<CUgraph>,
    ) -> Result<CUgraphNode> {
        if node.first as usize != bodies.len() {
            return Err(CuError::INVALID_VALUE);
        }
        let mut parameters = CUgraphNodeParams {
            r#type: CONDITIONAL,
            reserved0: [0; 3],
            words: [0; 29],
            reserved2: 0,
        };
        let place = parameters
            .words
            .as_mut_ptr()
            .cast::<CUDA_CONDITIONAL_NODE_PARAMS>();
        let wanted = CUDA_CONDITIONAL_NODE_PARAMS {
            handle: handle(node.condition as usize),
            r#type: kind(node.branch),
            size: node.bodies,
            phGraph_out: ptr::null_mut(),
            ctx: self.handle(),
        };
        let mut made = ptr::null_mut();
        // SAFETY: the words have room and alignment for the parameters, which begin them; the graph is live, there are
        // no dependencies yet, and the driver writes the node and a pointer to its own list of the bodies, which lives
        // as long as the node and has the requested length.
        unsafe {
            place.write(wanted);
            self.driver().cuGraphAddNode_v2(
                &raw mut made,
                graph,
                ptr::null(),
                ptr::null(),
                0,
                &raw mut parameters,
            )?;
            let list = place.read().phGraph_out;
            if list.is_null() {
                return Err(CuError::NOT_SUPPORTED);
            }
            bodies.extend_from_slice(std::slice::from_raw_parts(list, node.bodies as usize));
        }
        Ok(made)
    }
}
