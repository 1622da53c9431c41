//! Executable graphs.

use crate::{
    BoxCopy, Fill, LaunchAttribute, MemoryOperation, RawEvent, RawFunction, RawStream, Result,
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
    Copy(BoxCopy),
    Fill(Fill),
    Memory(Vec<MemoryOperation>),
    RecordEvent(RawEvent),
    WaitEvent(RawEvent),
    Empty,
}

/// A dependency between two nodes, by their places; `from` lies before `to`.
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
