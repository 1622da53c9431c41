//! Graphs: their nodes and edges.

use std::ffi::{CStr, c_char};

use super::{body, put, string};
use crate::context;
use crate::error::{CuError, Result};
use crate::graph::user_object::{self, release, retain};
use crate::graph::work::Work;
use crate::graph::{Edge, Model, NodeHandle, dot, graph_handle, node_handle, usage, with};
use crate::handle::to_pointer;
use crate::session::session;
use crate::types::{
    CUdevice, CUgraph, CUgraphEdgeData, CUgraphMem_attribute, CUgraphNode, CUgraphNodeType,
    CUhostFn, CUresult, CUuserObject, c_void,
};
use std::sync::atomic::Ordering;

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, which must be given; `CU_GRAPH_USER_OBJECT_MOVE`.
const NO_DESTRUCTOR_SYNC: u32 = 1;
const MOVE: u32 = 1;

/// A list that a program gives.
///
/// # Safety
/// `list` has that many entries, unless there are none.
pub unsafe fn listed<'a, T>(list: *const T, count: usize) -> Result<&'a [T]> {
    match count {
        0 => Ok(&[]),
        _ if list.is_null() => Err(CuError::INVALID_VALUE),
        // SAFETY: not null, so as long as the caller says.
        _ => Ok(unsafe { std::slice::from_raw_parts(list, count) }),
    }
}

/// Nodes that a program gives, with the kind of each dependency if it says one.
///
/// # Safety
/// Each list has that many entries, or is null; the first is not unless there are none.
pub unsafe fn nodes_with_data(
    nodes: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
) -> Result<Vec<Edge>> {
    // SAFETY: as the caller promises.
    let nodes = unsafe { listed(nodes, count) }?;
    let data = match data.is_null() {
        true => None,
        // SAFETY: as the caller promises.
        false => Some(unsafe { listed(data, count) }?),
    };
    let edge = |(index, node): (usize, &CUgraphNode)| {
        Ok(Edge {
            node: node_handle(*node)?,
            data: data.map_or_else(CUgraphEdgeData::default, |data| data[index]),
        })
    };
    nodes.iter().enumerate().map(edge).collect()
}

/// Dependencies that a program gives.
///
/// # Safety
/// As [`nodes_with_data`].
unsafe fn edges_of(
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
) -> Result<Vec<(NodeHandle, Edge)>> {
    // SAFETY: as the caller promises.
    let (from, to) = unsafe { (listed(from, count)?, nodes_with_data(to, data, count)?) };
    let pairs = from.iter().zip(to);
    pairs
        .map(|(from, to)| Ok((node_handle(*from)?, to)))
        .collect()
}

/// Answers with a list: how long it is, and as much of it as there is room for. Room that is left over is nulled.
///
/// # Safety
/// `count` is null or writable; `place` is null or has as many entries as `count` says.
unsafe fn tell<T: Copy>(place: *mut T, count: *mut usize, list: &[T], rest: T) -> Result {
    if count.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    if !place.is_null() {
        // SAFETY: not null, so as the caller promises.
        let room = unsafe { std::slice::from_raw_parts_mut(place, count.read()) };
        let told = list.len().min(room.len());
        room[..told].copy_from_slice(&list[..told]);
        room[told..].fill(rest);
    }
    Ok(())
}

/// The same for a count that several lists share: it is said last.
///
/// # Safety
/// `count` is writable.
unsafe fn tell_count(count: *mut usize, has_list: bool, length: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        let told = if has_list {
            length.min(count.read())
        } else {
            length
        };
        count.write(told);
    }
}

fn pointers(nodes: impl IntoIterator<Item = NodeHandle>) -> Vec<CUgraphNode> {
    nodes.into_iter().map(to_pointer).collect()
}

pub unsafe fn cuGraphCreate(phGraph: *mut CUgraph, flags: u32) -> CUresult {
    body! {
        session()?.alive()?;
        if phGraph.is_null() || flags != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let graph = with(Model::create)?;
        // SAFETY: as the caller promises.
        unsafe { put(phGraph, to_pointer(graph)) }
    }
}

pub unsafe fn cuGraphDestroy(hGraph: CUgraph) -> CUresult {
    body! {
        session()?;
        let graph = graph_handle(hGraph)?;
        with(|model| model.destroy(graph))
    }
}

pub unsafe fn cuGraphClone(phGraphClone: *mut CUgraph, originalGraph: CUgraph) -> CUresult {
    body! {
        session()?.alive()?;
        let graph = graph_handle(originalGraph)?;
        if phGraphClone.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let clone = with(|model| model.clone_graph(graph))?;
        // SAFETY: as the caller promises.
        unsafe { put(phGraphClone, to_pointer(clone)) }
    }
}

pub unsafe fn cuGraphNodeFindInClone(
    phNode: *mut CUgraphNode,
    hOriginalNode: CUgraphNode,
    hClonedGraph: CUgraph,
) -> CUresult {
    body! {
        session()?;
        let (node, clone) = (node_handle(hOriginalNode)?, graph_handle(hClonedGraph)?);
        let found = with(|model| model.find_in_clone(node, clone))?;
        // SAFETY: as the caller promises.
        unsafe { put(phNode, to_pointer(found)) }
    }
}

pub unsafe fn cuGraphNodeGetType(hNode: CUgraphNode, kind: *mut CUgraphNodeType) -> CUresult {
    body! {
        session()?;
        let node = node_handle(hNode)?;
        let found = with(|model| Ok(model.node(node)?.work.kind()))?;
        // SAFETY: as the caller promises.
        unsafe { put(kind, found) }
    }
}

pub unsafe fn cuGraphChildGraphNodeGetGraph(hNode: CUgraphNode, phGraph: *mut CUgraph) -> CUresult {
    body! {
        session()?;
        let node = node_handle(hNode)?;
        let child = with(|model| match model.node(node)?.work {
            Work::Child(child) => Ok(child),
            _ => Err(CuError::INVALID_VALUE),
        })?;
        // SAFETY: as the caller promises.
        unsafe { put(phGraph, to_pointer(child)) }
    }
}

/// Tells a list of nodes.
///
/// # Safety
/// As [`tell`].
unsafe fn tell_nodes(
    place: *mut CUgraphNode,
    count: *mut usize,
    list: impl FnOnce(&mut Model) -> Result<Vec<NodeHandle>>,
) -> Result {
    session()?;
    let nodes = pointers(with(list)?);
    // SAFETY: as the caller promises.
    unsafe {
        tell(place, count, &nodes, std::ptr::null_mut())?;
        tell_count(count, !place.is_null(), nodes.len());
    }
    Ok(())
}

pub unsafe fn cuGraphGetNodes(
    hGraph: CUgraph,
    nodes: *mut CUgraphNode,
    numNodes: *mut usize,
) -> CUresult {
    body! {
        session()?;
        let graph = graph_handle(hGraph)?;
        // SAFETY: as the caller promises.
        unsafe { tell_nodes(nodes, numNodes, |model| Ok(model.graph(graph)?.nodes.clone())) }
    }
}

pub unsafe fn cuGraphGetRootNodes(
    hGraph: CUgraph,
    rootNodes: *mut CUgraphNode,
    numRootNodes: *mut usize,
) -> CUresult {
    body! {
        let graph = graph_handle(hGraph)?;
        // SAFETY: as the caller promises.
        unsafe { tell_nodes(rootNodes, numRootNodes, |model| model.roots(graph)) }
    }
}

/// Tells one end of dependencies, and their kinds. Who does not ask for kinds must not miss any.
///
/// # Safety
/// As [`tell`].
unsafe fn tell_edges(
    place: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    count: *mut usize,
    list: impl FnOnce(&mut Model) -> Result<Vec<Edge>>,
) -> Result {
    session()?;
    let edges = with(list)?;
    let nodes = pointers(edges.iter().map(|edge| edge.node));
    let kinds: Vec<_> = edges.iter().map(|edge| edge.data).collect();
    lossless(place, data, &kinds)?;
    // SAFETY: as the caller promises.
    unsafe {
        tell(place, count, &nodes, std::ptr::null_mut())?;
        tell(data, count, &kinds, CUgraphEdgeData::default())?;
        tell_count(count, !place.is_null(), nodes.len());
    }
    Ok(())
}

fn lossless(
    place: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    kinds: &[CUgraphEdgeData],
) -> Result {
    let plain = |data: &CUgraphEdgeData| data.from_port == 0 && data.r#type == 0;
    if !place.is_null() && data.is_null() && !kinds.iter().all(plain) {
        return Err(CuError::LOSSY_QUERY);
    }
    Ok(())
}

pub unsafe fn cuGraphGetEdges(
    hGraph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    numEdges: *mut usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuGraphGetEdges_v2(hGraph, from, to, std::ptr::null_mut(), numEdges) }
}

pub unsafe fn cuGraphGetEdges_v2(
    hGraph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    edgeData: *mut CUgraphEdgeData,
    numEdges: *mut usize,
) -> CUresult {
    body! {
        session()?;
        let graph = graph_handle(hGraph)?;
        if from.is_null() != to.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let edges = with(|model| model.edges(graph))?;
        let first = pointers(edges.iter().map(|(from, _)| *from));
        let second = pointers(edges.iter().map(|(_, to)| to.node));
        let kinds: Vec<_> = edges.iter().map(|(_, to)| to.data).collect();
        lossless(from, edgeData, &kinds)?;
        // SAFETY: as the caller promises.
        unsafe {
            tell(from, numEdges, &first, std::ptr::null_mut())?;
            tell(to, numEdges, &second, std::ptr::null_mut())?;
            tell(edgeData, numEdges, &kinds, CUgraphEdgeData::default())?;
            tell_count(numEdges, !from.is_null(), edges.len());
        }
        Ok(())
    }
}

pub unsafe fn cuGraphNodeGetDependencies(
    hNode: CUgraphNode,
    dependencies: *mut CUgraphNode,
    numDependencies: *mut usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe {
        cuGraphNodeGetDependencies_v2(hNode, dependencies, std::ptr::null_mut(), numDependencies)
    }
}

pub unsafe fn cuGraphNodeGetDependencies_v2(
    hNode: CUgraphNode,
    dependencies: *mut CUgraphNode,
    edgeData: *mut CUgraphEdgeData,
    numDependencies: *mut usize,
) -> CUresult {
    body! {
        let node = node_handle(hNode)?;
        let before = |model: &mut Model| Ok(model.node(node)?.before.clone());
        // SAFETY: as the caller promises.
        unsafe { tell_edges(dependencies, edgeData, numDependencies, before) }
    }
}

pub unsafe fn cuGraphNodeGetDependentNodes(
    hNode: CUgraphNode,
    dependentNodes: *mut CUgraphNode,
    numDependentNodes: *mut usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe {
        cuGraphNodeGetDependentNodes_v2(
            hNode,
            dependentNodes,
            std::ptr::null_mut(),
            numDependentNodes,
        )
    }
}

pub unsafe fn cuGraphNodeGetDependentNodes_v2(
    hNode: CUgraphNode,
    dependentNodes: *mut CUgraphNode,
    edgeData: *mut CUgraphEdgeData,
    numDependentNodes: *mut usize,
) -> CUresult {
    body! {
        let node = node_handle(hNode)?;
        let after = |model: &mut Model| Ok(model.node(node)?.after.clone());
        // SAFETY: as the caller promises.
        unsafe { tell_edges(dependentNodes, edgeData, numDependentNodes, after) }
    }
}

pub unsafe fn cuGraphAddDependencies(
    hGraph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    numDependencies: usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuGraphAddDependencies_v2(hGraph, from, to, std::ptr::null(), numDependencies) }
}

pub unsafe fn cuGraphAddDependencies_v2(
    hGraph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    edgeData: *const CUgraphEdgeData,
    numDependencies: usize,
) -> CUresult {
    body! {
        session()?;
        let graph = graph_handle(hGraph)?;
        // SAFETY: as the caller promises.
        let edges = unsafe { edges_of(from, to, edgeData, numDependencies) }?;
        with(|model| model.connect(graph, &edges))
    }
}

pub unsafe fn cuGraphRemoveDependencies(
    hGraph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    numDependencies: usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe { cuGraphRemoveDependencies_v2(hGraph, from, to, std::ptr::null(), numDependencies) }
}

pub unsafe fn cuGraphRemoveDependencies_v2(
    hGraph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    edgeData: *const CUgraphEdgeData,
    numDependencies: usize,
) -> CUresult {
    body! {
        session()?;
        let graph = graph_handle(hGraph)?;
        // SAFETY: as the caller promises.
        let edges = unsafe { edges_of(from, to, edgeData, numDependencies) }?;
        with(|model| model.disconnect(graph, &edges))
    }
}

pub unsafe fn cuGraphDestroyNode(hNode: CUgraphNode) -> CUresult {
    body! {
        session()?;
        let node = node_handle(hNode)?;
        with(|model| model.destroy_node(node))
    }
}

pub unsafe fn cuGraphDebugDotPrint(hGraph: CUgraph, path: *const c_char, flags: u32) -> CUresult {
    body! {
        session()?;
        let graph = graph_handle(hGraph)?;
        // SAFETY: as the caller promises.
        let path: &CStr = unsafe { string(path) }?;
        let text = with(|model| dot::print(model, graph, flags))?;
        dot::write(path, &text)
    }
}

pub unsafe fn cuUserObjectCreate(
    object_out: *mut CUuserObject,
    ptr: *mut c_void,
    destroy: CUhostFn,
    initialRefcount: u32,
    flags: u32,
) -> CUresult {
    body! {
        session()?.alive()?;
        let valid = flags == NO_DESTRUCTOR_SYNC && initialRefcount != 0 && destroy.is_some();
        if object_out.is_null() || !valid || i32::try_from(initialRefcount).is_err() {
            return Err(CuError::INVALID_VALUE);
        }
        let object = user_object::create(ptr, destroy, initialRefcount)?;
        // SAFETY: as the caller promises.
        unsafe { put(object_out, to_pointer(object)) }
    }
}

/// A count of references that a call may name.
fn references(count: u32) -> Result<u64> {
    match i32::try_from(count) {
        Ok(1..) => Ok(count.into()),
        _ => Err(CuError::INVALID_VALUE),
    }
}

pub unsafe fn cuUserObjectRetain(object: CUuserObject, count: u32) -> CUresult {
    body! {
        session()?;
        retain(user_object::handle(object)?, references(count)?)
    }
}

pub unsafe fn cuUserObjectRelease(object: CUuserObject, count: u32) -> CUresult {
    body! {
        session()?;
        release(user_object::handle(object)?, references(count)?)
    }
}

pub unsafe fn cuGraphRetainUserObject(
    graph: CUgraph,
    object: CUuserObject,
    count: u32,
    flags: u32,
) -> CUresult {
    body! {
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
}

pub unsafe fn cuGraphReleaseUserObject(
    graph: CUgraph,
    object: CUuserObject,
    count: u32,
) -> CUresult {
    body! {
        session()?;
        let (graph, object) = (graph_handle(graph)?, user_object::handle(object)?);
        let count = references(count)?;
        with(|model| model.graph_mut(graph)?.held.give(object, count))?;
        release(object, count)
    }
}

/// `CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT`, `_USED_MEM_HIGH`, `_RESERVED_MEM_CURRENT`, `_RESERVED_MEM_HIGH`. What is
/// used is what is reserved.
const CURRENT: [CUgraphMem_attribute; 2] = [0, 2];
const HIGH: [CUgraphMem_attribute; 2] = [1, 3];

pub unsafe fn cuDeviceGetGraphMemAttribute(
    device: CUdevice,
    attr: CUgraphMem_attribute,
    value: *mut c_void,
) -> CUresult {
    body! {
        super::devices::device(device)?;
        let (now, most) = usage();
        let bytes = match attr {
            attr if CURRENT.contains(&attr) => now,
            attr if HIGH.contains(&attr) => most,
            _ => return Err(CuError::INVALID_VALUE),
        };
        // SAFETY: as the caller promises: the attributes are words of 64 bits.
        unsafe { put(value.cast::<u64>(), bytes.load(Ordering::Relaxed)) }
    }
}

pub unsafe fn cuDeviceSetGraphMemAttribute(
    device: CUdevice,
    attr: CUgraphMem_attribute,
    value: *mut c_void,
) -> CUresult {
    body! {
        super::devices::device(device)?;
        let value = value.cast::<u64>();
        // SAFETY: as the caller promises: the attributes are words of 64 bits.
        if !HIGH.contains(&attr) || value.is_null() || unsafe { value.read() } != 0 {
            return Err(CuError::INVALID_VALUE);
        }
        let (now, most) = usage();
        most.store(now.load(Ordering::Relaxed), Ordering::Relaxed);
        Ok(())
    }
}

/// Graphs keep no memory that they do not use.
pub unsafe fn cuDeviceGraphMemTrim(device: CUdevice) -> CUresult {
    body! {
        super::devices::device(device)?;
        context::scope_or_primary()?.session.alive()
    }
}
