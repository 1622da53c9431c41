//! Conditional nodes: their conditions, which kernels of the graph set, and their bodies, which are graphs.

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

/// Most bodies of one node.
const MOST_BODIES: u32 = 1 << 16;

/// A condition of a graph and of all bodies in it, which kernels name by its number there, from 1 on.
#[derive(Clone, Copy, Debug)]
pub struct Condition {
    pub default: u32,
    /// Whether each launch sets it to its default.
    pub assigned: bool,
    /// The node that it decides for, which may be gone.
    node: Option<NodeHandle>,
}

/// A conditional node.
#[derive(Debug)]
pub struct Conditional {
    /// The number of its condition.
    pub condition: u32,
    pub branch: GraphBranch,
    pub bodies: Box<[GraphHandle]>,
    /// The same, as the program is shown them.
    shown: Box<[CUgraph]>,
}

// SAFETY: the pointers are handles of the program's.
unsafe impl Send for Conditional {}
// SAFETY: nothing in it is changed after it was made.
unsafe impl Sync for Conditional {}

impl Conditional {
    /// The list of its bodies, which lives as long as the node.
    pub fn shown(&self) -> *mut CUgraph {
        self.shown.as_ptr().cast_mut()
    }

    pub fn size(&self) -> u32 {
        u32::try_from(self.bodies.len()).unwrap_or(u32::MAX)
    }

    /// Whether it decides by the same condition in the same way.
    pub fn is_like(&self, other: &Self) -> bool {
        (self.condition, self.branch, self.size()) == (other.condition, other.branch, other.size())
    }
}

/// `CUgraphConditionalNodeType`, with that many bodies.
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

/// Whether a node may lie in a body (CUDA driver API, `CUDA_CONDITIONAL_NODE_PARAMS`).
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
    /// The graph that is no node's, with which all of a graph is executed.
    fn root(&self, graph: GraphHandle) -> Result<GraphHandle> {
        let mut root = graph;
        while let Some(parent) = self.graph(root)?.parent {
            root = self.node(parent)?.graph;
        }
        Ok(root)
    }

    /// `cuGraphConditionalHandleCreate`.
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

    /// The condition that a program names, if no node has it.
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

    /// What a conditional node of a graph is to do: its bodies are made for it.
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
            shown: bodies.iter().map(|body| to_pointer(*body)).collect(),
            bodies,
        })
    }

    /// Gives a new node its condition and its bodies.
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

    /// Refuses what cannot be done with graphs that have conditions, nor with their bodies.
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

    /// Refuses a body where a graph is asked for that could be executable.
    pub(super) fn check_is_no_body(&self, graph: GraphHandle) -> Result {
        match self.is_body(graph)? {
            true => Err(CuError::INVALID_VALUE),
            false => Ok(()),
        }
    }

    /// Refuses to make a body executable by itself, or a graph that has conditional nodes once more.
    pub(super) fn check_can_be_executable(&self, graph: GraphHandle) -> Result {
        let holder = |executable: &Executable| executable.graph == graph;
        let again = self.executables.values().any(holder) && self.has(graph, &is_conditional)?;
        match self.is_body(graph)? || again {
            true => Err(CuError::NOT_SUPPORTED),
            false => Ok(()),
        }
    }

    /// Whether every condition of a graph has a node.
    pub(super) fn all_conditions_used(&self, graph: GraphHandle) -> Result<bool> {
        let conditions = &self.graph(graph)?.conditions;
        Ok(conditions.iter().all(|condition| self.is_used(condition)))
    }
}

impl Step {
    /// Whether work can be where the step is.
    pub fn may_hold(&self, work: &Work) -> bool {
        self.body == 0 || may_lie_in_body(work)
    }
}

impl Plan {
    /// A step in a body that cannot be there.
    pub fn misplaced(&self) -> Option<NodeHandle> {
        let misplaced = |step: &&Step| !step.may_hold(&step.work);
        self.steps.iter().find(misplaced).map(|step| step.node)
    }
}
