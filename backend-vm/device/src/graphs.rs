//! Executable graphs.

use crate::{
    Fill, GraphBranch, LaunchAttribute, MemCopy3d, MemoryOperation, RawEvent, RawFunction,
    RawStream, Result,
};

/// An executable graph of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawGraph(pub u64);

/// A kernel of a graph.
#[derive(Clone, Debug)]
pub struct GraphKernel {
    pub function: RawFunction,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared: u32,
    pub attributes: Vec<LaunchAttribute>,
    /// The packed parameter buffer.
    pub parameters: Vec<u8>,
}

/// What a node does. Everything it names has been checked.
#[derive(Clone, Debug)]
pub enum GraphNode {
    Kernel(GraphKernel),
    Copy(MemCopy3d),
    Fill(Fill),
    Memory(Vec<MemoryOperation>),
    RecordEvent(RawEvent),
    WaitEvent(RawEvent),
    Empty,
    Conditional(Conditional),
}

/// A node that executes one of its bodies, or none, as a value says that kernels of the graph set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conditional {
    /// The place of its condition. No other node has the same.
    pub condition: u32,
    pub branch: GraphBranch,
    /// Its bodies are numbered from this one on.
    pub first: u32,
    pub bodies: u32,
}

impl Conditional {
    /// The body that a value of the condition stands for.
    #[must_use]
    pub const fn body(&self, value: u32) -> Option<u32> {
        let chosen = match self.branch {
            GraphBranch::If if value == 0 => 1,
            GraphBranch::While if value == 0 => return None,
            GraphBranch::If | GraphBranch::While => 0,
            GraphBranch::Switch => value,
        };
        if chosen < self.bodies {
            Some(self.first + chosen)
        } else {
            None
        }
    }
}

/// A condition of a graph. Kernels of the graph name the first one 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    pub default: u32,
    /// Whether each launch sets it to its default.
    pub assigned: bool,
}

/// A dependency between two nodes of one body, by their places; `from` lies before `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphEdge {
    pub from: u32,
    pub to: u32,
    /// `CUgraphEdgeData`: from port, to port and type.
    pub data: [u8; 3],
}

/// A graph to be made executable.
#[derive(Clone, Debug, Default)]
pub struct GraphDescription {
    pub nodes: Vec<GraphNode>,
    pub edges: Vec<GraphEdge>,
    pub conditions: Vec<Condition>,
    /// Of each node, the body that it lies in, which a node before it has; those beyond the list lie in the graph
    /// itself, which is body 0.
    pub bodies: Vec<u32>,
}

impl GraphDescription {
    /// The body that a node lies in.
    #[must_use]
    pub fn body(&self, node: usize) -> u32 {
        self.bodies.get(node).copied().unwrap_or(0)
    }
}

/// Executable graphs. Nobody uses one while it is being updated or destroyed.
pub trait Graphs {
    /// `cuGraphInstantiateWithFlags`.
    fn instantiate(&self, graph: &GraphDescription, flags: u64) -> Result<RawGraph>;
    /// Makes a graph execute something else of the same shape (`cuGraphExecUpdate`).
    fn update_graph(&self, executable: RawGraph, graph: &GraphDescription) -> Result<()>;
    /// Asynchronous. Launches of one graph come one after the other.
    fn launch_graph(&self, executable: RawGraph, stream: RawStream) -> Result<()>;
    /// Prepares a launch (`cuGraphUpload`).
    fn upload_graph(&self, executable: RawGraph, stream: RawStream) -> Result<()>;
    /// What was launched still runs.
    fn destroy_graph(&self, executable: RawGraph) -> Result<()>;
    /// Whether a kernel, a copy or a fill is executed, or nothing in its place.
    fn enable_node(&self, executable: RawGraph, node: u32, enabled: bool) -> Result<()>;
}
