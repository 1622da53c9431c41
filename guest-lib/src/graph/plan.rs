//! Orders the steps of a graph for execution, and describes them to the backend.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::atomic::Ordering;

use wormhole_api::handle::Event;
use wormhole_api::{
    DevicePtr, GraphBegin, GraphBody, GraphCondition, GraphConditional, GraphCopy, GraphEdge,
    GraphEdges, GraphEmpty, GraphEvent, GraphEventKind, GraphFill, GraphKernel,
    GraphMemory as GraphMemoryOperations, Handle, Items, Message,
};
use wormhole_ring::arena::PAGE;

use super::conditional::Condition;
use super::work::{Work, check_fill, copied, may_become};
use super::{ExecutableHandle, GraphHandle, Model, NodeHandle};
use crate::error::{CuError, Result};
use crate::handle::{HandleMap, to_pointer};
use crate::memory::end::End;
use crate::memory::residence;
use crate::object::context::Scope;
use crate::object::event;
use crate::object::function;
use crate::object::stream::output;
use crate::types::CUgraphEdgeData;
use crate::work::copy3d::{Ends, Place, staged};
use crate::work::host_function::{Function, NodeWords};
use crate::work::mem_ops;

/// Greatest number of edges of one message.
const EDGES: usize = 1024;

pub use wormhole_api::constants::graph_update_result as update;

/// One step. A child graph has two steps, before and after its own.
#[derive(Clone, Debug)]
pub struct Step {
    pub node: NodeHandle,
    pub work: Work,
    pub before: Vec<(usize, CUgraphEdgeData)>,
    pub enabled: bool,
    /// Body that contains the step; the graph itself is body 0.
    pub body: u32,
}

#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Steps of each node.
    pub places: HandleMap<NodeHandle, Range<usize>>,
    conditions: Vec<Condition>,
    /// Number of bodies of conditional steps. Bodies are numbered from 1, in the order of these steps.
    bodies: u32,
}

/// A node that lies on a cycle.
#[derive(Clone, Copy, Debug)]
pub struct Cycle(pub NodeHandle);

/// Resources of the guest for an executable graph.
#[derive(Debug, Default)]
pub struct Served {
    /// Words of the steps that the guest performs.
    pub words: HandleMap<usize, NodeWords>,
    /// Arena through which copies of pageable memory go.
    pub staging: Vec<u64>,
}

/// Function that the guest calls when a step is due.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    pub step: usize,
    pub words: NodeWords,
    pub function: Function,
}

/// Result of describing a plan to the backend.
#[derive(Debug, Default)]
pub struct Described {
    pub tasks: Vec<Task>,
    /// For each step, the number of the backend's node that can be disabled.
    pub nodes: Vec<u32>,
    /// Arena of this description.
    pub staging: Vec<u64>,
}

impl Described {
    /// Value in place of a node's number for a step that the guest performs alone.
    pub const DONE_HERE: u32 = u32::MAX;
}

impl Plan {
    /// Orders the steps of a graph by its dependencies; of independent nodes, the one that was added first comes first.
    pub fn of(model: &Model, graph: GraphHandle) -> Result<std::result::Result<Self, Cycle>> {
        let mut plan = Self {
            conditions: model.graph(graph)?.conditions.clone(),
            ..Self::default()
        };
        let done = plan.lay(model, graph, None, 0)?;
        Ok(done.map(|_| plan))
    }

    /// Adds the steps of a graph behind `first`, in a body; returns the last steps.
    fn lay(
        &mut self,
        model: &Model,
        graph: GraphHandle,
        first: Option<usize>,
        body: u32,
    ) -> Result<std::result::Result<Vec<usize>, Cycle>> {
        let nodes = &model.graph(graph)?.nodes;
        let numbers: HandleMap<NodeHandle, usize> = nodes
            .iter()
            .enumerate()
            .map(|(n, node)| (*node, n))
            .collect();
        let mut missing = Vec::with_capacity(nodes.len());
        let mut ready = BinaryHeap::new();
        for (number, node) in nodes.iter().enumerate() {
            missing.push(model.node(*node)?.before.len());
            if missing[number] == 0 {
                ready.push(Reverse(number));
            }
        }
        // Last step of each node.
        let mut ends: Vec<Option<usize>> = vec![None; nodes.len()];
        let mut last = Vec::new();
        while let Some(Reverse(number)) = ready.pop() {
            let handle = nodes[number];
            let node = model.node(handle)?;
            let known = node.before.iter().filter_map(|edge| {
                let number = *numbers.get(&edge.node)?;
                Some((ends[number]?, edge.data))
            });
            let mut before: Vec<_> = known.collect();
            if before.is_empty() {
                before.extend(first.map(|first| (first, CUgraphEdgeData::default())));
            }
            let begin = self.steps.len();
            self.steps.push(Step {
                node: handle,
                work: node.work.clone(),
                before,
                enabled: true,
                body,
            });
            if let Work::Child(child) = node.work {
                let inner = match self.lay(model, child, Some(begin), body)? {
                    Ok(inner) if inner.is_empty() => vec![begin],
                    Ok(inner) => inner,
                    Err(cycle) => return Ok(Err(cycle)),
                };
                self.steps.push(Step {
                    node: handle,
                    work: node.work.clone(),
                    before: inner
                        .into_iter()
                        .map(|step| (step, CUgraphEdgeData::default()))
                        .collect(),
                    enabled: true,
                    body,
                });
            }
            let end = self.steps.len() - 1;
            if let Work::Conditional(conditional) = &node.work {
                let first = self.bodies + 1;
                self.bodies += conditional.size();
                for (number, body) in (first..).zip(&conditional.bodies) {
                    if let Err(cycle) = self.lay(model, *body, None, number)? {
                        return Ok(Err(cycle));
                    }
                }
            }
            self.places.insert(handle, begin..end + 1);
            ends[number] = Some(end);
            if node.after.is_empty() {
                last.push(end);
            }
            for edge in &node.after {
                if let Some(&number) = numbers.get(&edge.node) {
                    missing[number] -= 1;
                    if missing[number] == 0 {
                        ready.push(Reverse(number));
                    }
                }
            }
        }
        let left = ends.iter().position(Option::is_none);
        Ok(left.map_or(Ok(last), |number| Err(Cycle(nodes[number]))))
    }

    /// Returns why another plan cannot replace this one: the result of the update, the node at fault, and the other end
    /// of the dependency at fault.
    pub fn refuses(&self, other: &Self) -> Option<(u32, Option<NodeHandle>, Option<NodeHandle>)> {
        if self.steps.len() != other.steps.len() {
            return Some((update::ERROR_TOPOLOGY_CHANGED, None, None));
        }
        for (old, new) in self.steps.iter().zip(&other.steps) {
            let ends = |step: &Step| -> Vec<_> {
                let mut ends: Vec<_> = step
                    .before
                    .iter()
                    .map(|(from, data)| (*from, data.from_port, data.r#type))
                    .collect();
                ends.sort_unstable();
                ends
            };
            let (was, is) = (ends(old), ends(new));
            if was != is || old.body != new.body {
                let extra = is.iter().find(|end| !was.contains(end));
                let from = extra.map(|end| other.steps[end.0].node);
                return Some((update::ERROR_TOPOLOGY_CHANGED, Some(new.node), from));
            }
            if old.work.kind() != new.work.kind() {
                return Some((update::ERROR_NODE_TYPE_CHANGED, Some(new.node), None));
            }
            if !may_become(&old.work, &new.work) {
                let result = match new.work {
                    Work::Conditional(_) => update::ERROR_NOT_SUPPORTED,
                    _ => update::ERROR_PARAMETERS_CHANGED,
                };
                return Some((result, Some(new.node), None));
            }
        }
        None
    }

    /// Describes the plan to the backend, under a new handle. If a step fails, the caller must destroy the partial
    /// description.
    pub fn describe(
        &self,
        scope: Scope,
        graph: ExecutableHandle,
        served: &mut Served,
    ) -> (Described, Result) {
        let mut description = Description {
            scope,
            graph,
            count: 0,
            body: 0,
            edges: Vec::new(),
            described: Described::default(),
            served,
        };
        let result = description.all(&self.conditions, &self.steps);
        (description.described, result)
    }
}

/// A description under way.
struct Description<'a> {
    scope: Scope,
    graph: ExecutableHandle,
    count: u32,
    /// Body to which nodes are added.
    body: u32,
    edges: Vec<GraphEdge>,
    described: Described,
    served: &'a mut Served,
}

impl Description<'_> {
    fn all(&mut self, conditions: &[Condition], steps: &[Step]) -> Result {
        self.scope.session.record(&GraphBegin { new: self.graph })?;
        for condition in conditions {
            self.scope.session.record(&GraphCondition {
                graph: self.graph,
                default: condition.default,
                assigned: condition.assigned.into(),
            })?;
        }
        let mut ends = Vec::with_capacity(steps.len());
        for (index, step) in steps.iter().enumerate() {
            let begin = self.count;
            self.enter(step.body)?;
            let main = self.step(index, &step.work)?;
            self.described.nodes.push(main);
            for (from, data) in &step.before {
                let from = ends.get(*from).copied().ok_or(CuError::UNKNOWN)?;
                self.edge(from, begin, *data);
            }
            ends.push(self.count - 1);
        }
        for edges in self.edges.chunks(EDGES) {
            self.scope.session.record(&GraphEdges {
                graph: self.graph,
                edges: Items::new(edges),
            })?;
        }
        Ok(())
    }

    /// Makes the backend add the nodes that follow to a body.
    fn enter(&mut self, body: u32) -> Result {
        if self.body != body {
            self.scope.session.record(&GraphBody {
                graph: self.graph,
                body,
            })?;
            self.body = body;
        }
        Ok(())
    }

    fn edge(&mut self, from: u32, to: u32, data: CUgraphEdgeData) {
        let data = u32::from_le_bytes([data.from_port, data.to_port, data.r#type, 0]);
        self.edges.push(GraphEdge { from, to, data });
    }

    /// Sends one node; returns its number.
    fn node<M: Message>(&mut self, message: &M) -> Result<u32> {
        self.scope.session.record(message)?;
        self.count += 1;
        Ok(self.count - 1)
    }

    fn step(&mut self, index: usize, work: &Work) -> Result<u32> {
        let graph = self.graph;
        match work {
            Work::Kernel(kernel) => {
                let (function, facts) = function::find(kernel.function)?;
                facts.in_graph.store(true, Ordering::Relaxed);
                if facts.prints {
                    // No launch of the graph says which kernels it contains.
                    output::expect_always();
                }
                self.node(&GraphKernel {
                    graph,
                    function,
                    grid: kernel.shape.grid,
                    block: kernel.shape.block,
                    shared: kernel.shape.shared,
                    attributes: Items::new(&kernel.attributes),
                    parameters: &kernel.parameters,
                })
            }
            Work::Copy(wanted) => match copied(wanted)? {
                Some(copy) => self.copy(index, copy),
                None => self.node(&GraphEmpty { graph }),
            },
            Work::Fill(fill) => {
                let element = check_fill(fill)?;
                residence::keep_home(fill.dst);
                self.node(&GraphFill {
                    graph,
                    destination: DevicePtr(End::of(fill.dst, 1)?.1),
                    pitch: if fill.height > 1 {
                        fill.pitch as u64
                    } else {
                        0
                    },
                    width: fill.width as u64,
                    height: fill.height as u64,
                    value: fill.value,
                    element,
                })
            }
            Work::Host(call) => self.host(
                index,
                Function::Plain {
                    function: call.function,
                    data: call.data,
                },
            ),
            Work::WaitEvent(event) => self.event(*event, GraphEventKind::Wait),
            Work::RecordEvent(event) => self.event(*event, GraphEventKind::Record),
            Work::Memory(operations) => {
                let given = operations.given.iter().map(mem_ops::read);
                let operations = given.collect::<Result<Vec<_>>>()?;
                self.node(&GraphMemoryOperations {
                    graph,
                    operations: Items::new(&operations),
                })
            }
            Work::Conditional(conditional) => self.node(&GraphConditional {
                graph,
                condition: conditional.condition,
                branch: conditional.branch,
                bodies: conditional.size(),
            }),
            Work::Child(_) | Work::Empty | Work::Alloc(_) | Work::Free(_) => {
                self.node(&GraphEmpty { graph })
            }
        }
    }

    /// Adds an event node. Refuses an event that was destroyed since the node was added.
    fn event(&mut self, event: Handle<Event>, kind: GraphEventKind) -> Result<u32> {
        event::exists(to_pointer(event)).map_err(|_| CuError::INVALID_VALUE)?;
        self.node(&GraphEvent {
            graph: self.graph,
            event,
            kind,
        })
    }

    /// Adds a node that the guest performs.
    fn host(&mut self, step: usize, function: Function) -> Result<u32> {
        let words = match self.served.words.get(&step) {
            Some(words) => *words,
            None => {
                let words = NodeWords::take(self.scope)?;
                self.served.words.insert(step, words);
                words
            }
        };
        self.described.tasks.push(Task {
            step,
            words,
            function,
        });
        self.node(&GraphMemoryOperations {
            graph: self.graph,
            operations: Items::new(&words.operations()),
        })
    }

    /// Adds a copy. Pageable memory goes through the arena, to or from which the guest copies it.
    fn copy(&mut self, step: usize, copy: Ends) -> Result<u32> {
        let Ends {
            to: (to_end, to),
            from: (from_end, from),
            extent,
        } = copy;
        let then = CUgraphEdgeData::default();
        for place in [&to, &from] {
            let (_, _, memory, ..) = place.fields();
            residence::keep_home(memory.0);
        }
        match (to_end, from_end) {
            (End::Pageable, End::Device) => {
                let buffer = staged(self.stage(extent)?, extent);
                let copied = self.mem_copy_3d(&buffer, &from, extent)?;
                let from = buffer;
                let host = self.host(step, Function::Rows { to, from, extent })?;
                self.edge(copied, host, then);
                Ok(copied)
            }
            (End::Device, End::Pageable) => {
                let buffer = staged(self.stage(extent)?, extent);
                let function = Function::Rows {
                    to: buffer,
                    from,
                    extent,
                };
                let host = self.host(step, function)?;
                let copied = self.mem_copy_3d(&to, &buffer, extent)?;
                self.edge(host, copied, then);
                Ok(copied)
            }
            (End::Pageable, _) | (_, End::Pageable) => {
                self.host(step, Function::Rows { to, from, extent })?;
                Ok(Described::DONE_HERE)
            }
            _ => self.mem_copy_3d(&to, &from, extent),
        }
    }

    fn stage(&mut self, extent: [u64; 3]) -> Result<u64> {
        let bytes = extent
            .iter()
            .try_fold(1_u64, |all, side| all.checked_mul(*side))
            .ok_or(CuError::INVALID_VALUE)?;
        let address = self.scope.session.allocate_arena(bytes, PAGE)?;
        self.described.staging.push(address);
        Ok(address)
    }

    fn mem_copy_3d(&mut self, to: &Place, from: &Place, extent: [u64; 3]) -> Result<u32> {
        let (to_array, to_origin, to_memory, to_pitch, to_rows) = to.fields();
        let (from_array, from_origin, from_memory, from_pitch, from_rows) = from.fields();
        self.node(&GraphCopy {
            graph: self.graph,
            extent,
            to_array,
            to_origin,
            to_memory,
            to_pitch,
            to_rows,
            from_array,
            from_origin,
            from_memory,
            from_pitch,
            from_rows,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::graph::Edge;

    fn edge(node: NodeHandle) -> Edge {
        Edge {
            node,
            data: CUgraphEdgeData::default(),
        }
    }

    fn empty(model: &mut Model, graph: GraphHandle, before: &[NodeHandle]) -> NodeHandle {
        let before = before.iter().copied().map(edge).collect();
        model.add(graph, before, Work::Empty).unwrap()
    }

    fn plan(model: &Model, graph: GraphHandle) -> Plan {
        Plan::of(model, graph).unwrap().unwrap()
    }

    proptest! {
        #[test]
        fn steps_follow_all_they_depend_on_and_each_node_is_one(
            count in 1..12_usize, pairs in prop::collection::vec((0..12_usize, 0..12_usize), 0..30)
        ) {
            let mut model = Model::default();
            let graph = model.create().unwrap();
            let nodes: Vec<_> = (0..count).map(|_| empty(&mut model, graph, &[])).collect();
            // An edge against the order in which the nodes were added.
            for (one, other) in pairs {
                let (from, to) = (one.max(other), one.min(other));
                if from < count {
                    let _ = model.connect(graph, &[(nodes[from], edge(nodes[to]))]);
                }
            }
            let plan = plan(&model, graph);
            prop_assert_eq!(plan.steps.len(), count);
            for (from, to) in model.edges(graph).unwrap() {
                let (from, to) = (&plan.places[&from], &plan.places[&to.node]);
                prop_assert!(from.end <= to.start);
                let before = &plan.steps[to.start].before;
                prop_assert!(before.iter().any(|(step, _)| *step == from.start));
            }
            prop_assert!(plan.refuses(&plan).is_none());
            // One dependency back makes a cycle.
            if let Some((from, to)) = model.edges(graph).unwrap().first().copied() {
                model.connect(graph, &[(to.node, edge(from))]).unwrap();
                prop_assert!(Plan::of(&model, graph).unwrap().is_err());
            }
        }
    }

    #[test]
    fn a_child_lies_between_what_comes_before_and_after_it() {
        let mut model = Model::default();
        let inner = model.create().unwrap();
        let first = empty(&mut model, inner, &[]);
        empty(&mut model, inner, &[first]);
        empty(&mut model, inner, &[first]);
        let graph = model.create().unwrap();
        let before = empty(&mut model, graph, &[]);
        let copy = model.clone_graph(inner).unwrap();
        let child = model
            .add(graph, vec![edge(before)].into(), Work::Child(copy))
            .unwrap();
        let after = empty(&mut model, graph, &[child]);
        let plan = plan(&model, graph);
        let from = |step: usize| -> Vec<usize> {
            plan.steps[step]
                .before
                .iter()
                .map(|(from, _)| *from)
                .collect()
        };
        assert_eq!(plan.places[&child], 1..6);
        let wanted: [&[usize]; 7] = [&[], &[0], &[1], &[2], &[2], &[3, 4], &[5]];
        for (step, wanted) in wanted.iter().enumerate() {
            assert_eq!(from(step), *wanted, "step {step}");
        }
        assert_eq!(plan.places[&after], 6..7);
        // The child cannot be destroyed by itself, only with its parent.
        assert!(model.destroy(copy).is_err());
        model.destroy(graph).unwrap();
        assert!(model.graph(copy).is_err() && model.graph(inner).is_ok());
    }

    #[test]
    fn a_refused_update_returns_its_reason() {
        let mut model = Model::default();
        let graphs: Vec<_> = (0..3).map(|_| model.create().unwrap()).collect();
        for graph in &graphs {
            empty(&mut model, *graph, &[]);
        }
        let old = plan(&model, graphs[0]);
        empty(&mut model, graphs[1], &[]);
        let longer = old.refuses(&plan(&model, graphs[1]));
        assert_eq!(longer, Some((update::ERROR_TOPOLOGY_CHANGED, None, None)));
        let first = model.graph(graphs[2]).unwrap().nodes[0];
        model.node_mut(first).unwrap().work = Work::Free(1);
        let other = old.refuses(&plan(&model, graphs[2]));
        assert_eq!(
            other,
            Some((update::ERROR_NODE_TYPE_CHANGED, Some(first), None))
        );
    }
}
