//! Graphs as programs build them: nodes, their work and their dependencies.
//!
//! Only this library has the graphs. When a graph is instantiated ([`executable`]), the backend gets its steps, in the
//! order that [`plan`] computes. [`capture`] adds nodes for the work of streams.
//!
//! One lock guards the whole model. A launch locks it only if the guest has a part in the graph besides the launch
//! itself.

mod accepted;
pub mod capture;
pub mod conditional;
pub mod dot;
mod edges;
pub mod executable;
mod memory;
pub mod order;
pub mod plan;
pub mod submit;
pub mod user_object;
pub mod work;

use std::collections::HashSet;
use std::sync::{Arc, LazyLock};

use wormhole_api::Handle;
use wormhole_api::constants::graph_dependency_type::PROGRAMMATIC;
use wormhole_api::constants::kernel_node_port::LAUNCH_ORDER;
use wormhole_api::handle::{Graph as ExecutableKind, GraphNode, GraphTemplate};
use wormhole_lock::Mutex;

use self::conditional::Condition;
pub use self::edges::Edges;
pub use self::memory::{GraphMemory, free, usage};
use self::user_object::Held;
use self::work::Work;
use crate::error::{CuError, Result};
use crate::graph::capture::Captures;
use crate::handle::{HandleMap, HandleSet, Table, from_pointer};
use crate::types::{CUgraph, CUgraphEdgeData, CUgraphNode};

pub type GraphHandle = Handle<GraphTemplate>;
pub type NodeHandle = Handle<GraphNode>;
pub type ExecutableHandle = Handle<ExecutableKind>;

/// Handles without facts: the model has the graphs and nodes themselves.
static GRAPHS: Table<GraphTemplate, ()> = Table::new();
static NODES: Table<GraphNode, ()> = Table::new();

/// One end of a dependency, and the kind of the dependency.
#[derive(Clone, Copy, Debug)]
pub struct Edge {
    pub node: NodeHandle,
    pub data: CUgraphEdgeData,
}

#[derive(Debug)]
pub struct Node {
    pub graph: GraphHandle,
    pub work: Work,
    pub before: Edges,
    pub after: Edges,
    /// Node that this node was cloned from.
    original: Option<NodeHandle>,
}

#[derive(Debug, Default)]
pub struct Graph {
    /// Nodes in the order in which they were added.
    pub nodes: Vec<NodeHandle>,
    /// Node whose child or body the graph is.
    parent: Option<NodeHandle>,
    pub held: Held,
    /// Conditions of the graph and of the bodies in it; a body has none of its own.
    pub conditions: Vec<Condition>,
    /// Number of graphs that were created before.
    pub number: u64,
    /// True if the graph was ever instantiated.
    pub instantiated: bool,
}

/// All graphs of the process.
#[derive(Debug, Default)]
pub struct Model {
    graphs: HandleMap<GraphHandle, Graph>,
    nodes: HandleMap<NodeHandle, Node>,
    pub executables: HandleMap<ExecutableHandle, executable::Executable>,
    pub captures: Captures,
    /// Memory that launches have allocated and that is not freed yet, by address.
    pub live: HandleMap<u64, Arc<GraphMemory>>,
    gone: Gone,
    made: u64,
}

/// Objects and memory of destroyed graphs. They are released without the model's lock, because that may call the
/// program, or wait.
#[derive(Debug, Default)]
struct Gone {
    held: Vec<Held>,
    memory: Vec<Arc<GraphMemory>>,
}

static MODEL: LazyLock<Mutex<Model>> = LazyLock::new(Mutex::default);

/// Calls `work` with the locked model, and then releases the remains of destroyed graphs.
pub fn with<R>(work: impl FnOnce(&mut Model) -> Result<R>) -> Result<R> {
    let mut model = MODEL.lock();
    let result = work(&mut model);
    let gone = std::mem::take(&mut model.gone);
    drop(model);
    gone.held.into_iter().for_each(Held::release);
    gone.memory.into_iter().for_each(GraphMemory::let_go);
    result
}

/// Returns the handle of the graph that a program names.
pub fn graph_handle(graph: CUgraph) -> Result<GraphHandle> {
    from_pointer(graph).ok_or(CuError::INVALID_VALUE)
}

/// Returns the handle of the node that a program names.
pub fn node_handle(node: CUgraphNode) -> Result<NodeHandle> {
    from_pointer(node).ok_or(CuError::INVALID_VALUE)
}

fn same(one: CUgraphEdgeData, other: CUgraphEdgeData) -> bool {
    (one.from_port, one.to_port, one.r#type) == (other.from_port, other.to_port, other.r#type)
}

impl Model {
    pub fn graph(&self, graph: GraphHandle) -> Result<&Graph> {
        self.graphs.get(&graph).ok_or(CuError::INVALID_VALUE)
    }

    pub fn graph_mut(&mut self, graph: GraphHandle) -> Result<&mut Graph> {
        self.graphs.get_mut(&graph).ok_or(CuError::INVALID_VALUE)
    }

    pub fn node(&self, node: NodeHandle) -> Result<&Node> {
        self.nodes.get(&node).ok_or(CuError::INVALID_VALUE)
    }

    pub fn node_mut(&mut self, node: NodeHandle) -> Result<&mut Node> {
        self.nodes.get_mut(&node).ok_or(CuError::INVALID_VALUE)
    }

    pub fn create(&mut self) -> Result<GraphHandle> {
        let handle = GRAPHS.mint(|()| {})?;
        let graph = Graph {
            number: self.made,
            ..Graph::default()
        };
        self.made += 1;
        self.graphs.insert(handle, graph);
        Ok(handle)
    }

    /// Implements `cuGraphDestroy`. Executable graphs of it stay valid.
    pub fn destroy(&mut self, handle: GraphHandle) -> Result {
        if self.graph(handle)?.parent.is_some() {
            return Err(CuError::INVALID_VALUE);
        }
        self.remove_graph(handle);
        Ok(())
    }

    fn remove_graph(&mut self, handle: GraphHandle) {
        let Some(graph) = self.graphs.remove(&handle) else {
            return;
        };
        for node in graph.nodes {
            self.remove_node(node);
        }
        self.gone.held.push(graph.held);
        GRAPHS.forget(handle);
    }

    fn remove_node(&mut self, handle: NodeHandle) {
        let Some(node) = self.nodes.remove(&handle) else {
            return;
        };
        match node.work {
            Work::Child(child) => self.remove_graph(child),
            Work::Conditional(conditional) => {
                for body in &conditional.bodies {
                    self.remove_graph(*body);
                }
            }
            Work::Alloc(memory) => self.gone.memory.push(memory),
            _ => {}
        }
        NODES.forget(handle);
    }

    /// Refuses dependencies that are no nodes of the graph, or that are repeated.
    pub fn check_dependencies(&self, graph: GraphHandle, before: &[Edge]) -> Result {
        self.graph(graph)?;
        let mut seen = HandleSet::default();
        for edge in before {
            let node = self.node(edge.node)?;
            // A single dependency is not repeated.
            let is_repeated = before.len() > 1 && !seen.insert(edge.node);
            if node.graph != graph || is_repeated {
                return Err(CuError::INVALID_VALUE);
            }
            check_data(node, edge.data)?;
        }
        Ok(())
    }

    pub fn add(&mut self, graph: GraphHandle, before: Edges, work: Work) -> Result<NodeHandle> {
        self.check_dependencies(graph, &before)?;
        if let Work::Free(address) = work {
            let freed = |work: &Work| matches!(work, Work::Free(other) if *other == address);
            // A graph that was instantiated with an allocation cannot become one that frees it.
            let own = |work: &Work| matches!(work, Work::Alloc(own) if own.address == address);
            let allocates = self.graph(graph)?.instantiated && self.has(graph, &own)?;
            if allocates || self.has(graph, &freed)? {
                return Err(CuError::INVALID_VALUE);
            }
        }
        if let Work::Child(child) = work {
            if self.graph(child)?.parent.is_some() || self.lies_in(graph, child)? {
                return Err(CuError::INVALID_VALUE);
            }
            self.check_has_no_conditions(child)?;
        }
        let handle = NODES.mint(|()| {})?;
        for edge in &before {
            let after = Edge {
                node: handle,
                data: edge.data,
            };
            self.node_mut(edge.node)?.after.push(after);
        }
        if let Work::Child(child) = work {
            self.graph_mut(child)?.parent = Some(handle);
        }
        if let Work::Conditional(conditional) = &work {
            self.take_bodies(graph, handle, conditional)?;
        }
        let node = Node {
            graph,
            work,
            before,
            after: Edges::default(),
            original: None,
        };
        self.nodes.insert(handle, node);
        self.graph_mut(graph)?.nodes.push(handle);
        Ok(handle)
    }

    /// Returns `NOT_SUPPORTED` for a graph that allocates or frees memory.
    fn check_has_no_memory(&self, graph: GraphHandle) -> Result {
        match self.has(graph, &|work| {
            matches!(work, Work::Alloc(_) | Work::Free(_))
        })? {
            true => Err(CuError::NOT_SUPPORTED),
            false => Ok(()),
        }
    }

    /// Returns true if a graph is `outer` itself, or lies in it at any depth.
    fn lies_in(&self, graph: GraphHandle, outer: GraphHandle) -> Result<bool> {
        let mut next = Some(graph);
        while let Some(graph) = next {
            if graph == outer {
                return Ok(true);
            }
            let parent = self.graph(graph)?.parent;
            next = parent
                .map(|node| self.node(node).map(|node| node.graph))
                .transpose()?;
        }
        Ok(false)
    }

    /// Implements `cuGraphDestroyNode`.
    pub fn destroy_node(&mut self, handle: NodeHandle) -> Result {
        let node = self.node(handle)?;
        let (before, after) = (node.before.clone(), node.after.clone());
        let graph = node.graph;
        self.check_has_no_memory(graph)?;
        for edge in &before {
            self.node_mut(edge.node)?
                .after
                .retain(|other| other.node != handle);
        }
        for edge in &after {
            self.node_mut(edge.node)?
                .before
                .retain(|other| other.node != handle);
        }
        self.graph_mut(graph)?.nodes.retain(|node| *node != handle);
        self.remove_node(handle);
        Ok(())
    }

    /// Implements `cuGraphAddDependencies`: adds all edges, or none. A cycle is found when the graph is instantiated.
    pub fn connect(&mut self, graph: GraphHandle, edges: &[(NodeHandle, Edge)]) -> Result {
        self.graph(graph)?;
        let mut seen = HashSet::new();
        for (from, to) in edges {
            let (first, second) = (self.node(*from)?, self.node(to.node)?);
            let known = first.after.iter().any(|edge| edge.node == to.node);
            let foreign = first.graph != graph || second.graph != graph;
            if known || foreign || *from == to.node || !seen.insert((*from, to.node)) {
                return Err(CuError::INVALID_VALUE);
            }
            check_data(first, to.data)?;
        }
        for (from, to) in edges {
            self.node_mut(*from)?.after.push(*to);
            let before = Edge {
                node: *from,
                data: to.data,
            };
            self.node_mut(to.node)?.before.push(before);
        }
        Ok(())
    }

    /// Implements `cuGraphRemoveDependencies`: removes all edges, or none.
    pub fn disconnect(&mut self, graph: GraphHandle, edges: &[(NodeHandle, Edge)]) -> Result {
        self.graph(graph)?;
        for (from, to) in edges {
            let first = self.node(*from)?;
            let known = |edge: &Edge| edge.node == to.node && same(edge.data, to.data);
            if first.graph != graph || !first.after.iter().any(known) {
                return Err(CuError::INVALID_VALUE);
            }
        }
        self.check_has_no_memory(graph)?;
        for (from, to) in edges {
            self.node_mut(*from)?
                .after
                .retain(|edge| edge.node != to.node);
            self.node_mut(to.node)?
                .before
                .retain(|edge| edge.node != *from);
        }
        Ok(())
    }

    /// Returns every dependency of a graph, from node to node.
    pub fn edges(&self, graph: GraphHandle) -> Result<Vec<(NodeHandle, Edge)>> {
        let mut edges = Vec::new();
        for node in &self.graph(graph)?.nodes {
            edges.extend(self.node(*node)?.after.iter().map(|edge| (*node, *edge)));
        }
        Ok(edges)
    }

    pub fn roots(&self, graph: GraphHandle) -> Result<Vec<NodeHandle>> {
        let is_root = |node: &NodeHandle| {
            self.nodes
                .get(node)
                .is_some_and(|node| node.before.is_empty())
        };
        let nodes = self.graph(graph)?.nodes.iter().copied();
        Ok(nodes.filter(is_root).collect())
    }

    /// Returns true if work of this kind is in a graph, in one of its children or in a body.
    pub fn has(&self, graph: GraphHandle, kind: &impl Fn(&Work) -> bool) -> Result<bool> {
        for node in &self.graph(graph)?.nodes {
            let work = &self.node(*node)?.work;
            let inside = match work {
                Work::Child(child) => self.has(*child, kind)?,
                Work::Conditional(conditional) => {
                    let mut bodies = conditional.bodies.iter();
                    bodies.try_fold(false, |found, body| {
                        Ok::<_, CuError>(found || self.has(*body, kind)?)
                    })?
                }
                _ => false,
            };
            if inside || kind(work) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Implements `cuGraphClone`. A graph with memory or conditions cannot be cloned, since these belong to one graph.
    pub fn clone_graph(&mut self, graph: GraphHandle) -> Result<GraphHandle> {
        self.check_has_no_memory(graph)?;
        self.check_has_no_conditions(graph)?;
        let clone = self.create()?;
        let mut copies: HandleMap<NodeHandle, NodeHandle> = HandleMap::default();
        let nodes = self.graph(graph)?.nodes.clone();
        for original in &nodes {
            let work = match self.node(*original)?.work.clone() {
                Work::Child(child) => Work::Child(self.clone_graph(child)?),
                work => work,
            };
            let copy = self.add(clone, Edges::default(), work)?;
            self.node_mut(copy)?.original = Some(*original);
            copies.insert(*original, copy);
        }
        for original in &nodes {
            let node = self.node(*original)?;
            let copied = |edges: &[Edge]| {
                let pairs = edges.iter();
                pairs
                    .filter_map(|edge| {
                        let node = *copies.get(&edge.node)?;
                        Some(Edge { node, ..*edge })
                    })
                    .collect::<Edges>()
            };
            let (before, after) = (copied(&node.before), copied(&node.after));
            if let Some(copy) = copies.get(original) {
                let copy = self.node_mut(*copy)?;
                (copy.before, copy.after) = (before, after);
            }
        }
        let held = self.graph(graph)?.held.share();
        self.graph_mut(clone)?.held = held;
        Ok(clone)
    }

    /// Implements `cuGraphNodeFindInClone`.
    pub fn find_in_clone(&self, original: NodeHandle, clone: GraphHandle) -> Result<NodeHandle> {
        for node in &self.graph(clone)?.nodes {
            let candidate = self.node(*node)?;
            if candidate.original == Some(original) {
                return Ok(*node);
            }
            if let Work::Child(child) = candidate.work
                && let Ok(found) = self.find_in_clone(original, child)
            {
                return Ok(found);
            }
        }
        Err(CuError::INVALID_VALUE)
    }

    /// Returns true if every node of `nodes` precedes one of `last`, or is one of them.
    pub fn all_before(&self, nodes: &[NodeHandle], last: &[Edge]) -> bool {
        let mut wanted: HandleSet<NodeHandle> = nodes.iter().copied().collect();
        let mut seen = HandleSet::default();
        let mut next: Vec<NodeHandle> = last.iter().map(|edge| edge.node).collect();
        while let Some(node) = next.pop() {
            if wanted.is_empty() {
                break;
            }
            if seen.insert(node) {
                wanted.remove(&node);
                let before = self.nodes.get(&node).map(|node| &node.before);
                next.extend(before.into_iter().flatten().map(|edge| edge.node));
            }
        }
        wanted.is_empty()
    }
}

/// Refuses invalid kinds of dependencies: only kernels have ports, and only their dependents may begin early.
fn check_data(from: &Node, data: CUgraphEdgeData) -> Result {
    let plain = data.from_port == 0 && data.r#type == 0;
    let kernel = matches!(from.work, Work::Kernel(_));
    let known = data.from_port <= LAUNCH_ORDER && data.r#type <= PROGRAMMATIC;
    if data.to_port != 0 || data.reserved != [0; 5] || !(plain || (kernel && known)) {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(())
}
