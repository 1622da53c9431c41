//! Conditional nodes of graphs: conditions, bodies, and the nesting of bodies.

use wormhole_api::{CuResult, GraphBody, GraphCondition, GraphConditional, Outcome, Serve};
use wormhole_device::{Condition, Conditional, GraphNode};

use super::{Call, Session};

/// Largest number of bodies of one graph.
const MOST_BODIES: usize = 1 << 16;
/// Largest nesting depth of bodies.
const MOST_DEPTH: u8 = 128;
/// Bytes counted for a condition, and below for a body, beyond their size here: devices allocate
/// more for them.
const CONDITION_BYTES: usize = 64;
const BODY_BYTES: usize = 1024;

/// Nesting of a graph's bodies while the graph is described.
#[derive(Debug, Default)]
pub struct Nesting {
    /// Index of the body to which nodes are added.
    current: u32,
    /// Nesting depth of each body but the graph itself.
    depths: Vec<u8>,
    /// Whether each condition has a node.
    taken: Vec<bool>,
}

impl Nesting {
    pub(super) const fn current(&self) -> u32 {
        self.current
    }

    /// Refuses node kinds that a conditional body may not contain (CUDA driver API,
    /// `CUDA_CONDITIONAL_NODE_PARAMS`).
    pub(super) fn check(&self, node: &GraphNode) -> Result<(), CuResult> {
        let anywhere = matches!(
            node,
            GraphNode::Kernel(_)
                | GraphNode::Copy(_)
                | GraphNode::Fill(_)
                | GraphNode::Empty
                | GraphNode::Conditional(_)
        );
        match anywhere || self.current == 0 {
            true => Ok(()),
            false => Err(CuResult::INVALID_VALUE),
        }
    }

    /// Returns the nesting depth of the current body.
    fn depth(&self) -> u8 {
        let place = (self.current as usize).checked_sub(1);
        place.map_or(0, |place| self.depths[place])
    }

    /// Returns whether the body exists.
    fn has(&self, body: u32) -> bool {
        body as usize <= self.depths.len()
    }

    /// Assigns a new node its condition and its bodies.
    fn take(&mut self, message: &GraphConditional) -> Result<Conditional, CuResult> {
        let branch = message.branch;
        let condition = message.condition.wrapping_sub(1);
        let free = self.taken.get(condition as usize) == Some(&false);
        if !free || !branch.allows(message.bodies) {
            return Err(CuResult::INVALID_VALUE);
        }
        let bodies = message.bodies as usize;
        if bodies > MOST_BODIES - self.depths.len() {
            return Err(CuResult::OUT_OF_MEMORY);
        }
        let depth = self.depth() + 1;
        if depth > MOST_DEPTH {
            return Err(CuResult::NOT_SUPPORTED);
        }
        let first = u32::try_from(self.depths.len() + 1);
        let first = first.map_err(|_| CuResult::OUT_OF_MEMORY)?;
        self.taken[condition as usize] = true;
        self.depths.extend(std::iter::repeat_n(depth, bodies));
        Ok(Conditional {
            condition,
            branch,
            first,
            bodies: message.bodies,
        })
    }
}

impl Serve<GraphCondition> for Session {
    fn serve(&mut self, _: &Call, message: &GraphCondition) -> Outcome<()> {
        self.part_of_graph(message.graph, |session| {
            if message.assigned > 1 {
                return Err(CuResult::INVALID_VALUE);
            }
            let (description, nesting, _) = session
                .objects
                .graphs
                .described(message.graph, CONDITION_BYTES)?;
            nesting.taken.push(false);
            description.conditions.push(Condition {
                default: message.default,
                assigned: message.assigned == 1,
            });
            Ok(())
        })
    }
}

impl Serve<GraphConditional> for Session {
    fn serve(&mut self, _: &Call, message: &GraphConditional) -> Outcome<()> {
        self.part_of_graph(message.graph, |session| {
            let bytes = (message.bodies as usize).saturating_mul(BODY_BYTES);
            let (_, nesting, _) = session.objects.graphs.described(message.graph, bytes)?;
            let node = nesting.take(message)?;
            session
                .add_node(message.graph, GraphNode::Conditional(node), 0)
                .map(drop)
        })
    }
}

impl Serve<GraphBody> for Session {
    fn serve(&mut self, _: &Call, message: &GraphBody) -> Outcome<()> {
        self.part_of_graph(message.graph, |session| {
            let (_, nesting, _) = session.objects.graphs.described(message.graph, 0)?;
            if !nesting.has(message.body) {
                return Err(CuResult::INVALID_VALUE);
            }
            nesting.current = message.body;
            Ok(())
        })
    }
}
