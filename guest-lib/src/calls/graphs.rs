//! Graphs: their nodes, edges and user objects.

use std::ffi::CStr;

use wormhole_api::constants::graph_memory_attribute::{
    RESERVED_MEM_CURRENT, RESERVED_MEM_HIGH, USED_MEM_CURRENT, USED_MEM_HIGH,
};
use wormhole_api::constants::graph_user_object_flags::MOVE;
use wormhole_api::constants::user_object_flags::NO_DESTRUCTOR_SYNC;

use crate::error::{CuError, Result};
use crate::graph::user_object::{self, release, retain};
use crate::graph::work::Work;
use crate::graph::{Edge, Model, NodeHandle, dot, graph_handle, node_handle, usage, with};
use crate::handle::to_pointer;
use crate::object::context;
use crate::parameter::{In, InOut, Out, Pointer, Room, Text};
use crate::session::session;
use crate::types::{
    CUdevice, CUgraph, CUgraphEdgeData, CUgraphMem_attribute, CUgraphNode, CUgraphNodeType,
    CUhostFn, CUuserObject, c_void,
};
use std::sync::atomic::Ordering;

/// Reads an array of nodes with their edge data, if given.
pub fn nodes_with_data(
    nodes: In<'_, [CUgraphNode]>,
    data: In<'_, [CUgraphEdgeData]>,
) -> Result<Vec<Edge>> {
    let edge = |(index, node)| {
        Ok(Edge {
            node: node_handle(node)?,
            data: match data.is_null() {
                true => CUgraphEdgeData::default(),
                false => data.get(index)?,
            },
        })
    };
    nodes.values()?.enumerate().map(edge).collect()
}

/// Reads an array of edges.
fn edges_of(
    from: In<'_, [CUgraphNode]>,
    to: In<'_, [CUgraphNode]>,
    data: In<'_, [CUgraphEdgeData]>,
) -> Result<Vec<(NodeHandle, Edge)>> {
    let from = from.values()?;
    from.zip(nodes_with_data(to, data)?)
        .map(|(from, to)| Ok((node_handle(from)?, to)))
        .collect()
}

/// Writes as much of a list as fits, and fills the remaining entries with `rest`.
fn put_padded<T: Copy>(place: Out<'_, [T]>, list: Vec<T>, rest: T) -> Result {
    if place.is_null() {
        return Ok(());
    }
    let padded = list.into_iter().chain(std::iter::repeat(rest));
    place.put_all(padded.take(place.len()))
}

/// Writes the length of a list, or the number of entries written to the program's array.
fn put_count(count: InOut<'_, usize>, has_list: bool, length: usize) -> Result {
    count.put(match has_list {
        true => length.min(count.get()?),
        false => length,
    })
}

fn pointers(nodes: impl IntoIterator<Item = NodeHandle>) -> Vec<CUgraphNode> {
    nodes.into_iter().map(to_pointer).collect()
}

pub fn cuGraphCreate(phGraph: Out<'_, CUgraph>, flags: u32) -> Result {
    session()?.alive()?;
    if phGraph.is_null() || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let graph = with(Model::create)?;
    phGraph.put(to_pointer(graph))
}

pub fn cuGraphDestroy(hGraph: CUgraph) -> Result {
    session()?;
    let graph = graph_handle(hGraph)?;
    with(|model| model.destroy(graph))
}

pub fn cuGraphClone(phGraphClone: Out<'_, CUgraph>, originalGraph: CUgraph) -> Result {
    session()?.alive()?;
    let graph = graph_handle(originalGraph)?;
    phGraphClone.not_null()?;
    let clone = with(|model| model.clone_graph(graph))?;
    phGraphClone.put(to_pointer(clone))
}

pub fn cuGraphNodeFindInClone(
    phNode: Out<'_, CUgraphNode>,
    hOriginalNode: CUgraphNode,
    hClonedGraph: CUgraph,
) -> Result {
    session()?;
    let (node, clone) = (node_handle(hOriginalNode)?, graph_handle(hClonedGraph)?);
    let found = with(|model| model.find_in_clone(node, clone))?;
    phNode.put(to_pointer(found))
}

pub fn cuGraphNodeGetType(hNode: CUgraphNode, kind: Out<'_, CUgraphNodeType>) -> Result {
    session()?;
    let node = node_handle(hNode)?;
    let found = with(|model| Ok(model.node(node)?.work.kind()))?;
    kind.put(found)
}

pub fn cuGraphChildGraphNodeGetGraph(hNode: CUgraphNode, phGraph: Out<'_, CUgraph>) -> Result {
    session()?;
    let node = node_handle(hNode)?;
    let child = with(|model| match model.node(node)?.work {
        Work::Child(child) => Ok(child),
        _ => Err(CuError::INVALID_VALUE),
    })?;
    phGraph.put(to_pointer(child))
}

/// Writes a list of nodes.
fn put_nodes(
    place: Room<'_, CUgraphNode, usize>,
    count: InOut<'_, usize>,
    list: impl FnOnce(&mut Model) -> Result<Vec<NodeHandle>>,
) -> Result {
    session()?;
    let nodes = pointers(with(list)?);
    let (room, length) = (place.list()?, nodes.len());
    put_padded(room, nodes, std::ptr::null_mut())?;
    put_count(count, !place.is_null(), length)
}

pub fn cuGraphGetNodes(
    hGraph: CUgraph,
    nodes: Room<'_, CUgraphNode, usize>,
    numNodes: InOut<'_, usize>,
) -> Result {
    session()?;
    let graph = graph_handle(hGraph)?;
    put_nodes(nodes, numNodes, |model| {
        Ok(model.graph(graph)?.nodes.clone())
    })
}

pub fn cuGraphGetRootNodes(
    hGraph: CUgraph,
    rootNodes: Room<'_, CUgraphNode, usize>,
    numRootNodes: InOut<'_, usize>,
) -> Result {
    let graph = graph_handle(hGraph)?;
    put_nodes(rootNodes, numRootNodes, |model| model.roots(graph))
}

/// Writes one end of edges, and their data. Fails if the caller passes no array for data that is not the default.
fn put_edges(
    place: Room<'_, CUgraphNode, usize>,
    data: Room<'_, CUgraphEdgeData, usize>,
    count: InOut<'_, usize>,
    list: impl FnOnce(&mut Model) -> Result<Vec<Edge>>,
) -> Result {
    session()?;
    let edges = with(list)?;
    let nodes = pointers(edges.iter().map(|edge| edge.node));
    let kinds: Vec<_> = edges.iter().map(|edge| edge.data).collect();
    lossless(place.is_null(), data.is_null(), &kinds)?;
    let (node_room, kind_room) = (place.list()?, data.list()?);
    put_padded(node_room, nodes, std::ptr::null_mut())?;
    put_padded(kind_room, kinds, CUgraphEdgeData::default())?;
    put_count(count, !place.is_null(), edges.len())
}

fn lossless(without_nodes: bool, without_kinds: bool, kinds: &[CUgraphEdgeData]) -> Result {
    let plain = |data: &CUgraphEdgeData| data.from_port == 0 && data.r#type == 0;
    if !without_nodes && without_kinds && !kinds.iter().all(plain) {
        return Err(CuError::LOSSY_QUERY);
    }
    Ok(())
}

pub fn cuGraphGetEdges_v2(
    hGraph: CUgraph,
    from: Room<'_, CUgraphNode, usize>,
    to: Room<'_, CUgraphNode, usize>,
    edgeData: Room<'_, CUgraphEdgeData, usize>,
    numEdges: InOut<'_, usize>,
) -> Result {
    session()?;
    let graph = graph_handle(hGraph)?;
    if from.is_null() != to.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let edges = with(|model| model.edges(graph))?;
    let first = pointers(edges.iter().map(|(from, _)| *from));
    let second = pointers(edges.iter().map(|(_, to)| to.node));
    let kinds: Vec<_> = edges.iter().map(|(_, to)| to.data).collect();
    lossless(from.is_null(), edgeData.is_null(), &kinds)?;
    let (first_room, second_room, kind_room) = (from.list()?, to.list()?, edgeData.list()?);
    put_padded(first_room, first, std::ptr::null_mut())?;
    put_padded(second_room, second, std::ptr::null_mut())?;
    put_padded(kind_room, kinds, CUgraphEdgeData::default())?;
    put_count(numEdges, !from.is_null(), edges.len())
}

pub fn cuGraphNodeGetDependencies_v2(
    hNode: CUgraphNode,
    dependencies: Room<'_, CUgraphNode, usize>,
    edgeData: Room<'_, CUgraphEdgeData, usize>,
    numDependencies: InOut<'_, usize>,
) -> Result {
    let node = node_handle(hNode)?;
    let before = |model: &mut Model| Ok(model.node(node)?.before.to_vec());
    put_edges(dependencies, edgeData, numDependencies, before)
}

pub fn cuGraphNodeGetDependentNodes_v2(
    hNode: CUgraphNode,
    dependentNodes: Room<'_, CUgraphNode, usize>,
    edgeData: Room<'_, CUgraphEdgeData, usize>,
    numDependentNodes: InOut<'_, usize>,
) -> Result {
    let node = node_handle(hNode)?;
    let after = |model: &mut Model| Ok(model.node(node)?.after.to_vec());
    put_edges(dependentNodes, edgeData, numDependentNodes, after)
}

pub fn cuGraphAddDependencies_v2(
    hGraph: CUgraph,
    from: In<'_, [CUgraphNode]>,
    to: In<'_, [CUgraphNode]>,
    edgeData: In<'_, [CUgraphEdgeData]>,
    _numDependencies: usize,
) -> Result {
    session()?;
    let graph = graph_handle(hGraph)?;
    let edges = edges_of(from, to, edgeData)?;
    with(|model| model.connect(graph, &edges))
}

pub fn cuGraphRemoveDependencies_v2(
    hGraph: CUgraph,
    from: In<'_, [CUgraphNode]>,
    to: In<'_, [CUgraphNode]>,
    edgeData: In<'_, [CUgraphEdgeData]>,
    _numDependencies: usize,
) -> Result {
    session()?;
    let graph = graph_handle(hGraph)?;
    let edges = edges_of(from, to, edgeData)?;
    with(|model| model.disconnect(graph, &edges))
}

pub fn cuGraphDestroyNode(hNode: CUgraphNode) -> Result {
    session()?;
    let node = node_handle(hNode)?;
    with(|model| model.destroy_node(node))
}

pub fn cuGraphDebugDotPrint(hGraph: CUgraph, path: Text<'_>, flags: u32) -> Result {
    session()?;
    let graph = graph_handle(hGraph)?;
    let path: &CStr = path.get()?;
    let text = with(|model| dot::print(model, graph, flags))?;
    dot::write(path, &text)
}

pub fn cuUserObjectCreate(
    object_out: Out<'_, CUuserObject>,
    ptr: Pointer<'_, c_void>,
    destroy: CUhostFn,
    initialRefcount: u32,
    flags: u32,
) -> Result {
    session()?.alive()?;
    let valid = flags == NO_DESTRUCTOR_SYNC && initialRefcount != 0 && destroy.is_some();
    if object_out.is_null() || !valid || i32::try_from(initialRefcount).is_err() {
        return Err(CuError::INVALID_VALUE);
    }
    let object = user_object::create(ptr.as_ptr(), destroy, initialRefcount)?;
    object_out.put(to_pointer(object))
}

/// Checks a count of references.
fn references(count: u32) -> Result<u64> {
    match i32::try_from(count) {
        Ok(1..) => Ok(count.into()),
        _ => Err(CuError::INVALID_VALUE),
    }
}

pub fn cuUserObjectRetain(object: CUuserObject, count: u32) -> Result {
    session()?;
    retain(user_object::handle(object)?, references(count)?)
}

pub fn cuUserObjectRelease(object: CUuserObject, count: u32) -> Result {
    session()?;
    release(user_object::handle(object)?, references(count)?)
}

pub fn cuGraphRetainUserObject(
    graph: CUgraph,
    object: CUuserObject,
    count: u32,
    flags: u32,
) -> Result {
    session()?;
    let (graph, object) = (graph_handle(graph)?, user_object::handle(object)?);
    let count = references(count)?;
    if flags & !MOVE != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    with(|model| {
        let graph = model.graph_mut(graph)?;
        if flags & MOVE == 0 {
            retain(object, count)?;
        }
        graph.held.take(object, count);
        Ok(())
    })
}

pub fn cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: u32) -> Result {
    session()?;
    let (graph, object) = (graph_handle(graph)?, user_object::handle(object)?);
    let count = references(count)?;
    with(|model| model.graph_mut(graph)?.held.give(object, count))?;
    release(object, count)
}

/// Writes how much memory graphs use or reserve. The two are equal here.
pub fn cuDeviceGetGraphMemAttribute(
    device: CUdevice,
    attr: CUgraphMem_attribute,
    value: Pointer<'_, c_void>,
) -> Result {
    super::devices::device(device)?;
    let (now, most) = usage();
    let bytes = match attr {
        USED_MEM_CURRENT | RESERVED_MEM_CURRENT => now,
        USED_MEM_HIGH | RESERVED_MEM_HIGH => most,
        _ => return Err(CuError::INVALID_VALUE),
    };
    // SAFETY: the attributes are words of 64 bits (CUDA driver API, `CUgraphMem_attribute`).
    let value = unsafe { value.of::<u64>() };
    value.put(bytes.load(Ordering::Relaxed))
}

pub fn cuDeviceSetGraphMemAttribute(
    device: CUdevice,
    attr: CUgraphMem_attribute,
    value: Pointer<'_, c_void>,
) -> Result {
    super::devices::device(device)?;
    // SAFETY: as above.
    let value = unsafe { value.of::<u64>() };
    if !matches!(attr, USED_MEM_HIGH | RESERVED_MEM_HIGH) || value.get()? != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let (now, most) = usage();
    most.store(now.load(Ordering::Relaxed), Ordering::Relaxed);
    Ok(())
}

/// Succeeds without effect: graphs retain no unused memory.
pub fn cuDeviceGraphMemTrim(device: CUdevice) -> Result {
    super::devices::device(device)?;
    context::scope_or_primary()?.session.alive()
}
