//! Executable graphs.

use crate::{
    Fill, GraphBranch, Launch, LaunchAttribute, MemCopy3d, MemoryOperation, RawEvent, RawFunction,
    RawStream, Result,
};

/// Handle of an executable graph of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawGraph(pub u64);

/// Kernel node of a graph.
#[derive(Clone, Debug)]
pub struct GraphKernel {
    pub function: RawFunction,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    pub attributes: Vec<LaunchAttribute>,
    /// Packed parameter buffer.
    pub parameters: Vec<u8>,
}

impl From<&Launch<'_>> for GraphKernel {
    /// Copies a launch without its events.
    fn from(launch: &Launch<'_>) -> Self {
        Self {
            function: launch.function,
            grid: launch.grid,
            block: launch.block,
            shared: launch.shared,
            attributes: launch.attributes.to_vec(),
            parameters: launch.parameters.to_vec(),
        }
    }
}

/// Node of a graph. All its handles and addresses have been checked.
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

/// Node that executes one of its bodies, or none, depending on a value that kernels of the graph set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conditional {
    /// Index of the condition. No other node uses it.
    pub condition: u32,
    pub branch: GraphBranch,
    /// Number of the first body; the others follow.
    pub first: u32,
    pub bodies: u32,
}

impl Conditional {
    /// Returns the body that a value of the condition selects.
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

/// Condition of a graph. Kernels of the graph number conditions from 1 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    pub default: u32,
    /// True if each launch assigns the default.
    pub assigned: bool,
}

/// Dependency between two nodes of one body, by their indices; `from` is less than `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphEdge {
    pub from: u32,
    pub to: u32,
    /// `CUgraphEdgeData`: from port, to port and type.
    pub data: [u8; 3],
}

/// Description of a graph, to be instantiated.
#[derive(Clone, Debug, Default)]
pub struct GraphDescription {
    pub nodes: Vec<GraphNode>,
    pub edges: Vec<GraphEdge>,
    pub conditions: Vec<Condition>,
    /// Body of each node; an earlier node owns that body. Nodes beyond the list belong to the graph itself, which is
    /// body 0.
    pub bodies: Vec<u32>,
}

impl GraphDescription {
    /// Returns the body of a node.
    #[must_use]
    pub fn body(&self, node: usize) -> u32 {
        self.bodies.get(node).copied().unwrap_or(0)
    }
}

/// Operations on executable graphs. Callers do not use a graph while it is updated or destroyed.
pub trait Graphs {
    /// Instantiates a graph (`cuGraphInstantiateWithFlags`).
    fn instantiate(&self, graph: &GraphDescription, flags: u64) -> Result<RawGraph>;
    /// Updates an executable graph to a description of the same shape (`cuGraphExecUpdate`).
    fn update_graph(&self, executable: RawGraph, graph: &GraphDescription) -> Result<()>;
    /// Launches a graph. Asynchronous. Launches of one graph run one after the other.
    fn launch_graph(&self, executable: RawGraph, stream: RawStream) -> Result<()>;
    /// Prepares a launch (`cuGraphUpload`).
    fn upload_graph(&self, executable: RawGraph, stream: RawStream) -> Result<()>;
    /// Destroys an executable graph. Its launches still run.
    fn destroy_graph(&self, executable: RawGraph) -> Result<()>;
    /// Enables or disables a kernel, copy or fill node. A disabled node does nothing.
    fn enable_node(&self, executable: RawGraph, node: u32, enabled: bool) -> Result<()>;
}
