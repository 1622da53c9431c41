//! Conditional nodes: their conditions, which kernels of the graph set, and their body graphs.

use wormhole_api::GraphBranch;
use wormhole_api::constants::graph_conditional_type;

use super::executable::Executable;
use super::plan::{Plan, Step};
use super::work::{Work, copied};
use super::{GraphHandle, Model, NodeHandle};
use crate::error::{CuError, Result};
use crate::handle::to_pointer;
use crate::memory::end::End;
use crate::types::{CUDA_CONDITIONAL_NODE_PARAMS, CUgraph};

/// Greatest number of bodies of one node.
const MOST_BODIES: u32 = 1 << 16;

/// A condition of a graph and of all bodies in it. Kernels name it by its number in the graph, from 1 on.
#[derive(Clone, Copy, Debug)]
pub struct Condition {
    pub default: u32,
    /// True if each launch sets the condition to its default.
    pub assigned: bool,
    /// Node that the condition controls, which may be destroyed.
    node: Option<NodeHandle>,
}

/// A conditional node.
#[derive(Debug)]
pub struct Conditional {
    /// Number of the node's condition.
    pub condition: u32,
    pub branch: GraphBranch,
    pub bodies: Box<[GraphHandle]>,
    /// Handles of the bodies, as the program sees them.
    body_handles: Box<[CUgraph]>,
}

// SAFETY: the pointers are handles, which are never dereferenced.
unsafe impl Send for Conditional {}
// SAFETY: the value is never changed after its creation.
unsafe impl Sync for Conditional {}

impl Conditional {
    /// Returns the list of the node's bodies, which lives as long as the node.
    pub fn body_handles(&self) -> *mut CUgraph {
        self.body_handles.as_ptr().cast_mut()
    }

    pub fn size(&self) -> u32 {
        u32::try_from(self.bodies.len()).unwrap_or(u32::MAX)
    }

    /// Returns true if both nodes have the same condition, kind and number of bodies.
    pub fn is_like(&self, other: &Self) -> bool {
        (self.condition, self.branch, self.size()) == (other.condition, other.branch, other.size())
    }
}

/// Converts a `CUgraphConditionalNodeType`; refuses a number of bodies that it does not allow.
fn branch(kind: u32, bodies: u32) -> Result<GraphBranch> {
    let branch = match kind {
        graph_conditional_type::IF => GraphBranch::If,
        graph_conditional_type::WHILE => GraphBranch::While,
        graph_conditional_type::SWITCH => GraphBranch::Switch,
        _ => return Err(CuError::INVALID_VALUE),
    };
    if branch.allows(bodies) {
        Ok(branch)
    } else {
        Err(CuError::INVALID_VALUE)
    }
}

/// Returns true if a node may lie in a body (CUDA driver API, `CUDA_CONDITIONAL_NODE_PARAMS`).
fn may_lie_in_body(work: &Work) -> bool {
    match work {
        Work::Kernel(_) | Work::Fill(_) | Work::Empty | Work::Child(_) | Work::Conditional(_) => {
            true
        }
        Work::Copy(copy) => match copied(copy) {
            Ok(Some(copy)) => ![copy.to.0, copy.from.0].contains(&End::Pageable),
            Ok(None) => true,
            Err(_) => false,
        },
        Work::Host(_)
        | Work::WaitEvent(_)
        | Work::RecordEvent(_)
        | Work::Alloc(_)
        | Work::Free(_)
        | Work::Memory(_) => false,
    }
}

fn is_conditional(work: &Work) -> bool {
    matches!(work, Work::Conditional(_))
}

impl Model {
    /// Returns the outermost graph that contains a graph.
    fn root(&self, graph: GraphHandle) -> Result<GraphHandle> {
        let mut root = graph;
        while let Some(parent) = self.graph(root)?.parent {
            root = self.node(parent)?.graph;
        }
        Ok(root)
    }

    /// Implements `cuGraphConditionalHandleCreate`.
    pub fn create_condition(
        &mut self,
        graph: GraphHandle,
        default: u32,
        assigned: bool,
    ) -> Result<u64> {
        let root = self.root(graph)?;
        let conditions = &mut self.graph_mut(root)?.conditions;
        conditions.push(Condition {
            default,
            assigned,
            node: None,
        });
        Ok(conditions.len() as u64)
    }

    /// Returns the number of the condition that a program names, if no node uses it.
    fn free_condition(&self, graph: GraphHandle, handle: u64) -> Result<u32> {
        let conditions = &self.graph(self.root(graph)?)?.conditions;
        let number = u32::try_from(handle).map_err(|_| CuError::INVALID_VALUE)?;
        let place = number.checked_sub(1).ok_or(CuError::INVALID_VALUE)?;
        let condition = conditions.get(place as usize);
        match condition {
            Some(condition) if !self.is_used(condition) => Ok(number),
            _ => Err(CuError::INVALID_VALUE),
        }
    }

    fn is_used(&self, condition: &Condition) -> bool {
        condition
            .node
            .is_some_and(|node| self.nodes.contains_key(&node))
    }

    /// Makes the work of a conditional node, with new empty bodies.
    pub fn conditional(
        &mut self,
        graph: GraphHandle,
        wanted: &CUDA_CONDITIONAL_NODE_PARAMS,
    ) -> Result<Conditional> {
        let condition = self.free_condition(graph, wanted.handle)?;
        let branch = branch(wanted.r#type, wanted.size)?;
        if wanted.size > MOST_BODIES {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let bodies: Result<Box<[GraphHandle]>> = (0..wanted.size).map(|_| self.create()).collect();
        let bodies = bodies?;
        Ok(Conditional {
            condition,
            branch,
            body_handles: bodies.iter().map(|body| to_pointer(*body)).collect(),
            bodies,
        })
    }

    /// Attaches the condition and the bodies to their new node.
    pub(super) fn take_bodies(
        &mut self,
        graph: GraphHandle,
        node: NodeHandle,
        conditional: &Conditional,
    ) -> Result {
        let root = self.root(graph)?;
        let conditions = &mut self.graph_mut(root)?.conditions;
        let place = conditional.condition as usize - 1;
        conditions.get_mut(place).ok_or(CuError::UNKNOWN)?.node = Some(node);
        for body in &conditional.bodies {
            self.graph_mut(*body)?.parent = Some(node);
        }
        Ok(())
    }

    /// Returns `NOT_SUPPORTED` for a graph that has conditions, and for a body.
    pub(super) fn check_has_no_conditions(&self, graph: GraphHandle) -> Result {
        let none = self.graph(graph)?.conditions.is_empty() && !self.has(graph, &is_conditional)?;
        match none && !self.is_body(graph)? {
            true => Ok(()),
            false => Err(CuError::NOT_SUPPORTED),
        }
    }

    fn is_body(&self, graph: GraphHandle) -> Result<bool> {
        let parent = self.graph(graph)?.parent;
        let parent = parent.map(|node| self.node(node)).transpose()?;
        Ok(parent.is_some_and(|node| is_conditional(&node.work)))
    }

    /// Returns `INVALID_VALUE` for a body.
    pub(super) fn check_is_no_body(&self, graph: GraphHandle) -> Result {
        match self.is_body(graph)? {
            true => Err(CuError::INVALID_VALUE),
            false => Ok(()),
        }
    }

    /// Returns `NOT_SUPPORTED` for a body, and for a graph with conditional nodes that already has an executable graph.
    pub(super) fn check_can_be_executable(&self, graph: GraphHandle) -> Result {
        let holder = |executable: &Executable| executable.graph == graph;
        let again = self.executables.values().any(holder) && self.has(graph, &is_conditional)?;
        match self.is_body(graph)? || again {
            true => Err(CuError::NOT_SUPPORTED),
            false => Ok(()),
        }
    }

    /// Returns true if every condition of a graph has a node.
    pub(super) fn all_conditions_used(&self, graph: GraphHandle) -> Result<bool> {
        let conditions = &self.graph(graph)?.conditions;
        Ok(conditions.iter().all(|condition| self.is_used(condition)))
    }
}

impl Step {
    /// Returns true if work may lie in the step's body.
    pub fn may_hold(&self, work: &Work) -> bool {
        self.body == 0 || may_lie_in_body(work)
    }
}

impl Plan {
    /// Returns the node of a step that may not lie in its body, if there is one.
    pub fn misplaced(&self) -> Option<NodeHandle> {
        let misplaced = |step: &&Step| !step.may_hold(&step.work);
        self.steps.iter().find(misplaced).map(|step| step.node)
    }
}
