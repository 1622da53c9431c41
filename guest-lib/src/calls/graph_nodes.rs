//! Nodes of graphs: what each does.

use std::sync::Arc;

use wormhole_api::Handle;
use wormhole_api::handle::Event;

use super::conditional_nodes::conditional;
use super::graphs::{listed, nodes_with_data};
use super::{body, put};
use crate::context::{self, Scope};
use crate::error::{CuError, Result};
use crate::event;
use crate::graph::work::{Copy, HostCall, Kernel, Operations, Work, check_fill, kind};
use crate::graph::{
    Edge, GraphMemory, Model, NodeHandle, executable, graph_handle, node_handle, with,
};
use crate::handle::to_pointer;
use crate::launch::{Attributes, kernel_attribute};
use crate::memory::memory_map;
use crate::memory_map::Origin;
use crate::session::session;
use crate::types::{
    CUDA_BATCH_MEM_OP_NODE_PARAMS, CUDA_CHILD_GRAPH_NODE_PARAMS, CUDA_EVENT_NODE_PARAMS,
    CUDA_HOST_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS_v1,
    CUDA_MEM_ALLOC_NODE_PARAMS, CUDA_MEMCPY_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS,
    CUcontext, CUdeviceptr, CUevent, CUgraph, CUgraphEdgeData, CUgraphExec, CUgraphNode,
    CUgraphNodeParams, CUkernelNodeAttrID, CUlaunchAttribute, CUmemPoolProps, CUresult,
    CUstreamAttrValue, LOCATION_DEVICE, MEMORY_PINNED,
};

/// `CU_GRAPH_CHILD_GRAPH_OWNERSHIP_CLONE`, `_MOVE`.
const CLONE: u32 = 0;
const MOVE: u32 = 1;

/// What a program points to.
///
/// # Safety
/// `place` is null or readable.
unsafe fn given<T: Clone + std::marker::Copy>(place: *const T) -> Result<T> {
    if place.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: not null, so readable.
    Ok(unsafe { place.read() })
}

/// Where a node is to be added.
struct Place {
    node: *mut CUgraphNode,
    graph: CUgraph,
    before: Result<Vec<Edge>>,
}

impl Place {
    /// # Safety
    /// The lists have that many entries, or are null.
    unsafe fn new(
        node: *mut CUgraphNode,
        graph: CUgraph,
        before: *const CUgraphNode,
        count: usize,
    ) -> Self {
        Self {
            node,
            graph,
            // SAFETY: as the caller promises.
            before: unsafe { nodes_with_data(before, std::ptr::null(), count) },
        }
    }

    /// Adds the node.
    ///
    /// # Safety
    /// The place for it is null or writable.
    unsafe fn add(self, work: impl FnOnce(Scope, &mut Model) -> Result<Work>) -> Result {
        let scope = context::scope()?;
        scope.session.alive()?;
        if self.node.is_null() {
            return Err(CuError::INVALID_VALUE);
        }
        let (graph, before) = (graph_handle(self.graph)?, self.before?);
        let node = with(|model| {
            model.check_dependencies(graph, &before)?;
            let work = work(scope, model)?;
            model.add(graph, &before, work)
        })?;
        // SAFETY: as the caller promises.
        unsafe { put(self.node, to_pointer(node)) }
    }
}

/// # Safety
/// The parameters fit the kernel.
unsafe fn kernel(scope: Scope, wanted: &CUDA_KERNEL_NODE_PARAMS) -> Result<Work> {
    // SAFETY: as the caller promises.
    let kernel = unsafe { Kernel::read(scope, wanted, &[]) }?;
    Ok(Work::Kernel(Arc::new(kernel)))
}

fn with_context(first: CUDA_KERNEL_NODE_PARAMS_v1) -> CUDA_KERNEL_NODE_PARAMS {
    CUDA_KERNEL_NODE_PARAMS {
        first,
        kern: std::ptr::null_mut(),
        ctx: std::ptr::null_mut(),
    }
}

fn copy(wanted: CUDA_MEMCPY3D) -> Result<Work> {
    Copy::read(&wanted)?;
    Ok(Work::Copy(Box::new(wanted)))
}

fn fill(mut wanted: CUDA_MEMSET_NODE_PARAMS) -> Result<Work> {
    check_fill(&wanted)?;
    if wanted.height == 1 {
        wanted.pitch = 0;
    }
    Ok(Work::Fill(wanted))
}

fn host(wanted: CUDA_HOST_NODE_PARAMS) -> Result<Work> {
    if wanted.r#fn.is_none() {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(Work::Host(HostCall {
        function: wanted.r#fn,
        data: wanted.userData,
    }))
}

/// # Safety
/// The list of operations is as long as it says.
unsafe fn operations(wanted: CUDA_BATCH_MEM_OP_NODE_PARAMS) -> Result<Work> {
    if wanted.flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: as the caller promises.
    let list = unsafe { listed(wanted.paramArray.cast_const(), wanted.count as usize) }?;
    let operations = Operations::new(list, wanted.ctx)?;
    Ok(Work::Memory(Arc::new(operations)))
}

/// A child graph: a copy of a graph.
fn child(model: &mut Model, graph: CUgraph) -> Result<Work> {
    let graph = graph_handle(graph)?;
    Ok(Work::Child(model.clone_graph(graph)?))
}

fn an_event(event: CUevent) -> Result<Handle<Event>> {
    event::exists(event).map_err(|_| CuError::INVALID_VALUE)
}

/// Memory for a graph. The address is the program's to use from now on.
fn allocation(scope: Scope, wanted: &mut CUDA_MEM_ALLOC_NODE_PARAMS) -> Result<Work> {
    let pool = &wanted.poolProps;
    let here = pool.location.r#type == LOCATION_DEVICE && pool.location.id == 0;
    if pool.allocType != MEMORY_PINNED || pool.handleTypes != 0 || !here {
        return Err(CuError::INVALID_VALUE);
    }
    let memory = GraphMemory::allocate(scope, wanted.bytesize as u64)?;
    wanted.dptr = memory.address;
    Ok(Work::Alloc(memory))
}

fn free(address: CUdeviceptr) -> Result<Work> {
    let found = memory_map().find(address);
    let owned = found.is_some_and(|found| found.origin == Origin::Graph && found.base == address);
    owned
        .then_some(Work::Free(address))
        .ok_or(CuError::INVALID_VALUE)
}

/// What a node of any kind is to do. `old` is what it did before, if it is not new.
///
/// # Safety
/// The parameters are as `cuGraphAddNode` documents them.
unsafe fn any(
    scope: Scope,
    model: &mut Model,
    wanted: &mut CUgraphNodeParams,
    old: Option<&Work>,
) -> Result<Work> {
    if wanted.reserved0 != [0; 3] || wanted.reserved2 != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let words = wanted.words.as_mut_ptr();
    macro_rules! read {
        ($kind:ty) => {
            // SAFETY: the union has room and alignment for each kind of parameters, all plain data.
            unsafe { words.cast::<$kind>().read() }
        };
    }
    match wanted.r#type {
        kind::KERNEL => {
            let attributes = match old {
                Some(Work::Kernel(kernel)) => kernel.attributes.as_slice(),
                _ => &[],
            };
            let wanted = read!(CUDA_KERNEL_NODE_PARAMS);
            // SAFETY: as the caller promises.
            let kernel = unsafe { Kernel::read(scope, &wanted, attributes) }?;
            Ok(Work::Kernel(Arc::new(kernel)))
        }
        kind::MEMCPY => {
            let wanted = read!(CUDA_MEMCPY_NODE_PARAMS);
            if wanted.flags != 0 || wanted.reserved != 0 {
                return Err(CuError::INVALID_VALUE);
            }
            copy(wanted.copyParams)
        }
        kind::MEMSET => fill(read!(CUDA_MEMSET_NODE_PARAMS)),
        kind::HOST => host(read!(CUDA_HOST_NODE_PARAMS)),
        kind::GRAPH => {
            let mut wanted = read!(CUDA_CHILD_GRAPH_NODE_PARAMS);
            let work = match wanted.ownership {
                CLONE => child(model, wanted.graph)?,
                // The graph itself, which is the node's from now on.
                MOVE => Work::Child(graph_handle(wanted.graph)?),
                _ => return Err(CuError::INVALID_VALUE),
            };
            if let Work::Child(copy) = work {
                wanted.graph = to_pointer(copy);
            }
            // SAFETY: as for reading.
            unsafe { words.cast::<CUDA_CHILD_GRAPH_NODE_PARAMS>().write(wanted) };
            Ok(work)
        }
        kind::EMPTY => Ok(Work::Empty),
        kind::WAIT_EVENT => an_event(read!(CUDA_EVENT_NODE_PARAMS).event).map(Work::WaitEvent),
        kind::EVENT_RECORD => an_event(read!(CUDA_EVENT_NODE_PARAMS).event).map(Work::RecordEvent),
        kind::MEM_ALLOC if old.is_none() => {
            let mut wanted = read!(CUDA_MEM_ALLOC_NODE_PARAMS);
            let work = allocation(scope, &mut wanted)?;
            // SAFETY: as for reading.
            unsafe { words.cast::<CUDA_MEM_ALLOC_NODE_PARAMS>().write(wanted) };
            Ok(work)
        }
        kind::MEM_FREE if old.is_none() => free(read!(CUdeviceptr)),
        kind::BATCH_MEM_OP => {
            let wanted = read!(CUDA_BATCH_MEM_OP_NODE_PARAMS);
            // SAFETY: as the caller promises.
            unsafe { operations(wanted) }
        }
        // What it does is said once, when it is made.
        kind::CONDITIONAL => Err(CuError::NOT_SUPPORTED),
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// The functions that add a node whose parameters are one structure.
macro_rules! adders {
    ($($name:ident($wanted:ident: $kind:ty): $work:expr;)*) => {$(
        pub unsafe fn $name(
            phGraphNode: *mut CUgraphNode,
            hGraph: CUgraph,
            dependencies: *const CUgraphNode,
            numDependencies: usize,
            $wanted: *const $kind,
        ) -> CUresult {
            // SAFETY: as the caller promises.
            body! { unsafe {
                Place::new(phGraphNode, hGraph, dependencies, numDependencies)
                    .add(|scope, _| $work(scope, given($wanted)?))
            } }
        }
    )*};
}

adders! {
    cuGraphAddKernelNode(nodeParams: CUDA_KERNEL_NODE_PARAMS_v1): |scope, wanted| kernel(scope, &with_context(wanted));
    cuGraphAddKernelNode_v2(nodeParams: CUDA_KERNEL_NODE_PARAMS): |scope, wanted| kernel(scope, &wanted);
    cuGraphAddHostNode(nodeParams: CUDA_HOST_NODE_PARAMS): |_, wanted| host(wanted);
    cuGraphAddBatchMemOpNode(nodeParams: CUDA_BATCH_MEM_OP_NODE_PARAMS): |_, wanted| operations(wanted);
}

/// The same for parameters that come with the context that they are for.
macro_rules! adders_with_context {
    ($($name:ident($wanted:ident: $kind:ty): $work:expr;)*) => {$(
        pub unsafe fn $name(
            phGraphNode: *mut CUgraphNode,
            hGraph: CUgraph,
            dependencies: *const CUgraphNode,
            numDependencies: usize,
            $wanted: *const $kind,
            ctx: CUcontext,
        ) -> CUresult {
            // SAFETY: as the caller promises.
            body! { unsafe {
                Place::new(phGraphNode, hGraph, dependencies, numDependencies).add(|_, _| {
                    context::find_active(ctx)?;
                    $work(given($wanted)?)
                })
            } }
        }
    )*};
}

adders_with_context! {
    cuGraphAddMemcpyNode(copyParams: CUDA_MEMCPY3D): copy;
    cuGraphAddMemsetNode(memsetParams: CUDA_MEMSET_NODE_PARAMS): fill;
}

pub unsafe fn cuGraphAddEmptyNode(
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe {
        Place::new(phGraphNode, hGraph, dependencies, numDependencies).add(|_, _| Ok(Work::Empty))
    } }
}

pub unsafe fn cuGraphAddChildGraphNode(
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    childGraph: CUgraph,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe {
        Place::new(phGraphNode, hGraph, dependencies, numDependencies)
            .add(|_, model| child(model, childGraph))
    } }
}

pub unsafe fn cuGraphAddEventRecordNode(
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    event: CUevent,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe {
        Place::new(phGraphNode, hGraph, dependencies, numDependencies)
            .add(|_, _| an_event(event).map(Work::RecordEvent))
    } }
}

pub unsafe fn cuGraphAddEventWaitNode(
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    event: CUevent,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe {
        Place::new(phGraphNode, hGraph, dependencies, numDependencies)
            .add(|_, _| an_event(event).map(Work::WaitEvent))
    } }
}

pub unsafe fn cuGraphAddMemAllocNode(
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    nodeParams: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe {
        let mut wanted = given(nodeParams.cast_const())?;
        Place::new(phGraphNode, hGraph, dependencies, numDependencies)
            .add(|scope, _| allocation(scope, &mut wanted))?;
        put(nodeParams, wanted)
    } }
}

pub unsafe fn cuGraphAddMemFreeNode(
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    dptr: CUdeviceptr,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe {
        Place::new(phGraphNode, hGraph, dependencies, numDependencies).add(|_, _| free(dptr))
    } }
}

pub unsafe fn cuGraphAddNode(
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    numDependencies: usize,
    nodeParams: *mut CUgraphNodeParams,
) -> CUresult {
    // SAFETY: as the caller promises.
    unsafe {
        cuGraphAddNode_v2(
            phGraphNode,
            hGraph,
            dependencies,
            std::ptr::null(),
            numDependencies,
            nodeParams,
        )
    }
}

pub unsafe fn cuGraphAddNode_v2(
    phGraphNode: *mut CUgraphNode,
    hGraph: CUgraph,
    dependencies: *const CUgraphNode,
    dependencyData: *const CUgraphEdgeData,
    numDependencies: usize,
    nodeParams: *mut CUgraphNodeParams,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe {
        let mut wanted = given(nodeParams.cast_const())?;
        let place = Place {
            node: phGraphNode,
            graph: hGraph,
            before: nodes_with_data(dependencies, dependencyData, numDependencies),
        };
        place.add(|scope, model| match wanted.r#type {
            kind::CONDITIONAL => conditional(model, hGraph, &mut wanted),
            _ => any(scope, model, &mut wanted, None),
        })?;
        put(nodeParams, wanted)
    } }
}

/// Tells something of what a node does.
///
/// # Safety
/// The place is null or writable.
unsafe fn told<T>(
    node: CUgraphNode,
    place: *mut T,
    read: impl FnOnce(&Work) -> Option<T>,
) -> Result {
    session()?;
    let node = node_handle(node)?;
    let value = with(|model| read(&model.node(node)?.work).ok_or(CuError::INVALID_VALUE))?;
    // SAFETY: as the caller promises.
    unsafe { put(place, value) }
}

/// Sets what a node does, which stays the same kind of work.
fn set(node: CUgraphNode, work: impl FnOnce(Scope, &mut Model, &Work) -> Result<Work>) -> Result {
    let scope = context::scope()?;
    let node = node_handle(node)?;
    with(|model| {
        let old = model.node(node)?.work.clone();
        let work = work(scope, model, &old)?;
        if work.kind() != old.kind() {
            return Err(CuError::INVALID_VALUE);
        }
        model.node_mut(node)?.work = work;
        Ok(())
    })
}

/// The same for a node of an executable graph.
fn set_executed(
    executable: CUgraphExec,
    node: CUgraphNode,
    work: impl FnOnce(Scope, &mut Model, &Work) -> Result<Work>,
) -> Result {
    let scope = context::scope()?;
    scope.session.alive()?;
    let (executable, node): (_, NodeHandle) = (executable::handle(executable)?, node_handle(node)?);
    with(|model| {
        let old = model.executed(executable, node)?.clone();
        let work = work(scope, model, &old)?;
        model.set_executed(executable, node, work)
    })
}

/// A kernel in the place of another, whose attributes it keeps.
///
/// # Safety
/// The parameters fit the kernel.
unsafe fn kernel_like(scope: Scope, wanted: &CUDA_KERNEL_NODE_PARAMS, old: &Work) -> Result<Work> {
    let Work::Kernel(old) = old else {
        return Err(CuError::INVALID_VALUE);
    };
    // SAFETY: as the caller promises.
    let kernel = unsafe { Kernel::read(scope, wanted, &old.attributes) }?;
    Ok(Work::Kernel(Arc::new(kernel)))
}

/// The functions that set parameters which are one structure: of a node, and of a node of an executable graph.
macro_rules! setters {
    ($($set:ident, $set_executed:ident($wanted:ident: $kind:ty): $work:expr;)*) => {$(
        pub unsafe fn $set(hNode: CUgraphNode, $wanted: *const $kind) -> CUresult {
            // SAFETY: as the caller promises.
            body! { unsafe {
                set(hNode, |scope, _, old| $work(scope, given($wanted)?, old))
            } }
        }

        pub unsafe fn $set_executed(
            hGraphExec: CUgraphExec,
            hNode: CUgraphNode,
            $wanted: *const $kind,
        ) -> CUresult {
            // SAFETY: as the caller promises.
            body! { unsafe {
                set_executed(hGraphExec, hNode, |scope, _, old| $work(scope, given($wanted)?, old))
            } }
        }
    )*};
}

setters! {
    cuGraphKernelNodeSetParams, cuGraphExecKernelNodeSetParams(nodeParams: CUDA_KERNEL_NODE_PARAMS_v1):
        |scope, wanted, old: &Work| kernel_like(scope, &with_context(wanted), old);
    cuGraphKernelNodeSetParams_v2, cuGraphExecKernelNodeSetParams_v2(nodeParams: CUDA_KERNEL_NODE_PARAMS):
        |scope, wanted, old: &Work| kernel_like(scope, &wanted, old);
    cuGraphHostNodeSetParams, cuGraphExecHostNodeSetParams(nodeParams: CUDA_HOST_NODE_PARAMS):
        |_, wanted, _: &Work| host(wanted);
    cuGraphBatchMemOpNodeSetParams, cuGraphExecBatchMemOpNodeSetParams(nodeParams: CUDA_BATCH_MEM_OP_NODE_PARAMS):
        |_, wanted, _: &Work| operations(wanted);
}

/// The same where the second comes with a context.
macro_rules! setters_with_context {
    ($($set:ident($wanted:ident), $set_executed:ident($executed:ident): $kind:ty, $work:expr;)*) => {$(
        pub unsafe fn $set(hNode: CUgraphNode, $wanted: *const $kind) -> CUresult {
            // SAFETY: as the caller promises.
            body! { unsafe { set(hNode, |_, _, _| $work(given($wanted)?)) } }
        }

        pub unsafe fn $set_executed(
            hGraphExec: CUgraphExec,
            hNode: CUgraphNode,
            $executed: *const $kind,
            ctx: CUcontext,
        ) -> CUresult {
            // SAFETY: as the caller promises.
            body! { unsafe {
                set_executed(hGraphExec, hNode, |_, _, _| {
                    context::find_active(ctx)?;
                    $work(given($executed)?)
                })
            } }
        }
    )*};
}

setters_with_context! {
    cuGraphMemcpyNodeSetParams(nodeParams), cuGraphExecMemcpyNodeSetParams(copyParams): CUDA_MEMCPY3D, copy;
    cuGraphMemsetNodeSetParams(nodeParams), cuGraphExecMemsetNodeSetParams(memsetParams): CUDA_MEMSET_NODE_PARAMS, fill;
}

/// The functions of event nodes: which event, and another one.
macro_rules! event_nodes {
    ($($work:ident: $get:ident, $set:ident, $set_executed:ident;)*) => {$(
        pub unsafe fn $get(hNode: CUgraphNode, event_out: *mut CUevent) -> CUresult {
            let read = |work: &Work| match work {
                Work::$work(event) => Some(to_pointer(*event)),
                _ => None,
            };
            // SAFETY: as the caller promises.
            body! { unsafe { told(hNode, event_out, read) } }
        }

        pub unsafe fn $set(hNode: CUgraphNode, event: CUevent) -> CUresult {
            body! { set(hNode, |_, _, _| an_event(event).map(Work::$work)) }
        }

        pub unsafe fn $set_executed(
            hGraphExec: CUgraphExec,
            hNode: CUgraphNode,
            event: CUevent,
        ) -> CUresult {
            body! { set_executed(hGraphExec, hNode, |_, _, _| an_event(event).map(Work::$work)) }
        }
    )*};
}

event_nodes! {
    RecordEvent: cuGraphEventRecordNodeGetEvent, cuGraphEventRecordNodeSetEvent, cuGraphExecEventRecordNodeSetEvent;
    WaitEvent: cuGraphEventWaitNodeGetEvent, cuGraphEventWaitNodeSetEvent, cuGraphExecEventWaitNodeSetEvent;
}

pub unsafe fn cuGraphExecChildGraphNodeSetParams(
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    childGraph: CUgraph,
) -> CUresult {
    body! {
        let child = graph_handle(childGraph)?;
        set_executed(hGraphExec, hNode, |_, _, _| Ok(Work::Child(child)))
    }
}

pub unsafe fn cuGraphNodeSetParams(
    hNode: CUgraphNode,
    nodeParams: *mut CUgraphNodeParams,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe {
        let mut wanted = given(nodeParams.cast_const())?;
        no_child(&wanted)?;
        set(hNode, |scope, model, old| any(scope, model, &mut wanted, Some(old)))
    } }
}

pub unsafe fn cuGraphExecNodeSetParams(
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    nodeParams: *mut CUgraphNodeParams,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe {
        let mut wanted = given(nodeParams.cast_const())?;
        if wanted.r#type == kind::GRAPH {
            let child = wanted.words.as_ptr().cast::<CUDA_CHILD_GRAPH_NODE_PARAMS>().read();
            let child = graph_handle(child.graph)?;
            return set_executed(hGraphExec, hNode, |_, _, _| Ok(Work::Child(child)));
        }
        set_executed(hGraphExec, hNode, |scope, model, old| {
            any(scope, model, &mut wanted, Some(old))
        })
    } }
}

/// The graph of a child graph node is changed itself.
fn no_child(wanted: &CUgraphNodeParams) -> Result {
    match wanted.r#type {
        kind::GRAPH => Err(CuError::NOT_SUPPORTED),
        _ => Ok(()),
    }
}

pub unsafe fn cuGraphKernelNodeGetParams(
    hNode: CUgraphNode,
    nodeParams: *mut CUDA_KERNEL_NODE_PARAMS_v1,
) -> CUresult {
    let read = |work: &Work| match work {
        Work::Kernel(kernel) => Some(kernel.described()),
        _ => None,
    };
    // SAFETY: as the caller promises.
    body! { unsafe { told(hNode, nodeParams, read) } }
}

pub unsafe fn cuGraphKernelNodeGetParams_v2(
    hNode: CUgraphNode,
    nodeParams: *mut CUDA_KERNEL_NODE_PARAMS,
) -> CUresult {
    let read = |work: &Work| match work {
        Work::Kernel(kernel) => Some(CUDA_KERNEL_NODE_PARAMS {
            kern: kernel.of_library(),
            ctx: context::current(),
            first: kernel.described(),
        }),
        _ => None,
    };
    // SAFETY: as the caller promises.
    body! { unsafe { told(hNode, nodeParams, read) } }
}

pub unsafe fn cuGraphMemcpyNodeGetParams(
    hNode: CUgraphNode,
    nodeParams: *mut CUDA_MEMCPY3D,
) -> CUresult {
    let read = |work: &Work| match work {
        Work::Copy(copy) => Some(**copy),
        _ => None,
    };
    // SAFETY: as the caller promises.
    body! { unsafe { told(hNode, nodeParams, read) } }
}

pub unsafe fn cuGraphMemsetNodeGetParams(
    hNode: CUgraphNode,
    nodeParams: *mut CUDA_MEMSET_NODE_PARAMS,
) -> CUresult {
    let read = |work: &Work| match work {
        Work::Fill(fill) => Some(*fill),
        _ => None,
    };
    // SAFETY: as the caller promises.
    body! { unsafe { told(hNode, nodeParams, read) } }
}

pub unsafe fn cuGraphHostNodeGetParams(
    hNode: CUgraphNode,
    nodeParams: *mut CUDA_HOST_NODE_PARAMS,
) -> CUresult {
    let read = |work: &Work| match work {
        Work::Host(call) => Some(CUDA_HOST_NODE_PARAMS {
            r#fn: call.function,
            userData: call.data,
        }),
        _ => None,
    };
    // SAFETY: as the caller promises.
    body! { unsafe { told(hNode, nodeParams, read) } }
}

/// The list is the node's own.
pub unsafe fn cuGraphBatchMemOpNodeGetParams(
    hNode: CUgraphNode,
    nodeParams_out: *mut CUDA_BATCH_MEM_OP_NODE_PARAMS,
) -> CUresult {
    let read = |work: &Work| match work {
        Work::Memory(operations) => Some(CUDA_BATCH_MEM_OP_NODE_PARAMS {
            ctx: operations.context,
            count: u32::try_from(operations.given.len()).ok()?,
            paramArray: operations.given.as_ptr().cast_mut(),
            flags: 0,
        }),
        _ => None,
    };
    // SAFETY: as the caller promises.
    body! { unsafe { told(hNode, nodeParams_out, read) } }
}

pub unsafe fn cuGraphMemAllocNodeGetParams(
    hNode: CUgraphNode,
    params_out: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
) -> CUresult {
    let read = |work: &Work| match work {
        Work::Alloc(memory) => Some(CUDA_MEM_ALLOC_NODE_PARAMS {
            poolProps: CUmemPoolProps {
                allocType: MEMORY_PINNED,
                handleTypes: 0,
                location: crate::types::CUmemLocation {
                    r#type: LOCATION_DEVICE,
                    id: 0,
                },
                win32SecurityAttributes: std::ptr::null_mut(),
                maxSize: 0,
                usage: 0,
                reserved: [0; 54],
            },
            accessDescs: std::ptr::null(),
            accessDescCount: 0,
            bytesize: usize::try_from(memory.bytes).ok()?,
            dptr: memory.address,
        }),
        _ => None,
    };
    // SAFETY: as the caller promises.
    body! { unsafe { told(hNode, params_out, read) } }
}

pub unsafe fn cuGraphMemFreeNodeGetParams(
    hNode: CUgraphNode,
    dptr_out: *mut CUdeviceptr,
) -> CUresult {
    let read = |work: &Work| match work {
        Work::Free(address) => Some(*address),
        _ => None,
    };
    // SAFETY: as the caller promises.
    body! { unsafe { told(hNode, dptr_out, read) } }
}

pub unsafe fn cuGraphKernelNodeGetAttribute(
    hNode: CUgraphNode,
    attr: CUkernelNodeAttrID,
    value_out: *mut CUstreamAttrValue,
) -> CUresult {
    let read = |work: &Work| match work {
        Work::Kernel(kernel) => kernel_attribute(attr, &kernel.attributes),
        _ => None,
    };
    // SAFETY: as the caller promises.
    body! { unsafe { told(hNode, value_out, read) } }
}

pub unsafe fn cuGraphKernelNodeSetAttribute(
    hNode: CUgraphNode,
    attr: CUkernelNodeAttrID,
    value: *const CUstreamAttrValue,
) -> CUresult {
    // SAFETY: as the caller promises.
    body! { unsafe {
        let value = given(value)?;
        set(hNode, |_, _, old| match old {
            Work::Kernel(kernel) if kernel_attribute(attr, &[]).is_some() => {
                let list = [CUlaunchAttribute { id: attr, pad: [0; 4], value }];
                let set = Attributes::read(&list)?;
                let set = set.items().iter().next().ok_or(CuError::INVALID_VALUE)?;
                Ok(Work::Kernel(Arc::new(kernel.with_attribute(set.id, set.value)?)))
            }
            _ => Err(CuError::INVALID_VALUE),
        })
    } }
}

pub unsafe fn cuGraphKernelNodeCopyAttributes(dst: CUgraphNode, src: CUgraphNode) -> CUresult {
    body! {
        let from = node_handle(src)?;
        set(dst, |_, model, old| match (&model.node(from)?.work, old) {
            (Work::Kernel(from), Work::Kernel(to)) => {
                Ok(Work::Kernel(Arc::new(to.with_attributes(from.attributes.clone())?)))
            }
            _ => Err(CuError::INVALID_VALUE),
        })
    }
}
