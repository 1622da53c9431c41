//! Graph nodes and their parameters.

use std::mem::offset_of;
use std::sync::Arc;

use wormhole_api::constants::child_graph_ownership::{CLONE, MOVE};
use wormhole_api::handle::Event;
use wormhole_api::{Handle, LaunchAttribute};

use super::conditional_nodes::conditional;
use super::graphs::nodes_with_data;
use crate::error::{CuError, Result};
use crate::graph::work::{HostCall, Kernel, Operations, Work, check_fill, copied, kind};
use crate::graph::{
    Edge, GraphMemory, Model, NodeHandle, executable, graph_handle, node_handle, with,
};
use crate::handle::to_pointer;
use crate::object::context::{self, Scope};
use crate::object::event;
use crate::parameter::{In, InOut, Out, Pointer};
use crate::session::session;
use crate::types::{
    CUDA_BATCH_MEM_OP_NODE_PARAMS, CUDA_CHILD_GRAPH_NODE_PARAMS, CUDA_CONDITIONAL_NODE_PARAMS,
    CUDA_EVENT_NODE_PARAMS, CUDA_HOST_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS,
    CUDA_KERNEL_NODE_PARAMS_v1, CUDA_MEM_ALLOC_NODE_PARAMS, CUDA_MEMCPY_NODE_PARAMS, CUDA_MEMCPY3D,
    CUDA_MEMSET_NODE_PARAMS, CUcontext, CUdeviceptr, CUevent, CUgraph, CUgraphEdgeData,
    CUgraphExec, CUgraphNode, CUgraphNodeParams, CUkernelNodeAttrID, CUlaunchAttribute,
    CUmemPoolProps, CUstreamAttrValue, LOCATION_DEVICE, MEMORY_PINNED,
};
use crate::work::launch::{Arguments, Attributes, kernel_attribute};

/// Place of a new node.
struct Place<'a> {
    node: Out<'a, CUgraphNode>,
    graph: CUgraph,
    before: Result<Vec<Edge>>,
}

impl<'a> Place<'a> {
    fn new(node: Out<'a, CUgraphNode>, graph: CUgraph, before: In<'_, [CUgraphNode]>) -> Self {
        Self {
            node,
            graph,
            before: nodes_with_data(before, In::none()),
        }
    }

    /// Adds a node with the work that `work` creates.
    fn add(self, work: impl FnOnce(Scope, &mut Model) -> Result<Work>) -> Result {
        let scope = context::scope()?;
        scope.session.alive()?;
        self.node.not_null()?;
        let (graph, before) = (graph_handle(self.graph)?, self.before?);
        let node = with(|model| {
            model.check_dependencies(graph, &before)?;
            let work = work(scope, model)?;
            model.add(graph, before.into(), work)
        })?;
        self.node.put(to_pointer(node))
    }
}

/// Creates the work of a kernel node from a description that came by an [`In`] or an [`InOut`].
fn kernel(
    scope: Scope,
    wanted: &CUDA_KERNEL_NODE_PARAMS,
    attributes: &[LaunchAttribute],
) -> Result<Work> {
    // SAFETY: both are as those of `cuLaunchKernel` (`CUDA_KERNEL_NODE_PARAMS`).
    let arguments = unsafe {
        Arguments {
            values: Pointer::new(wanted.first.kernelParams),
            extra: Pointer::new(wanted.first.extra),
        }
    };
    let kernel = Kernel::read(scope, wanted, arguments, attributes)?;
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
    copied(&wanted)?;
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

fn operations(wanted: CUDA_BATCH_MEM_OP_NODE_PARAMS) -> Result<Work> {
    if wanted.flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the memory behind a description is as documented, by the contract of `In`.
    let list = unsafe { In::list(wanted.paramArray.cast_const(), wanted.count as usize) };
    let operations = Operations::new(list.values()?, wanted.ctx)?;
    Ok(Work::Memory(Arc::new(operations)))
}

/// Creates the work of a child graph node: a clone of the graph.
fn child(model: &mut Model, graph: CUgraph) -> Result<Work> {
    let graph = graph_handle(graph)?;
    Ok(Work::Child(model.clone_graph(graph)?))
}

fn an_event(event: CUevent) -> Result<Handle<Event>> {
    event::exists(event).map_err(|_| CuError::INVALID_VALUE)
}

/// Allocates memory for a graph. The program may use the address from now on.
fn allocation(scope: Scope, wanted: &CUDA_MEM_ALLOC_NODE_PARAMS) -> Result<Arc<GraphMemory>> {
    let pool = &wanted.poolProps;
    let here = pool.location.r#type == LOCATION_DEVICE && pool.location.id == 0;
    if pool.allocType != MEMORY_PINNED || pool.handleTypes != 0 || !here {
        return Err(CuError::INVALID_VALUE);
    }
    GraphMemory::allocate(scope, wanted.bytesize as u64)
}

/// Parameters of one kind of node.
///
/// # Safety
/// The type is plain data, valid for any bits.
pub(super) unsafe trait Member: Copy {
    /// Reads the parameters out of the union of all kinds.
    fn of(wanted: &CUgraphNodeParams) -> Self {
        const {
            assert!(size_of::<Self>() <= size_of::<[u64; 29]>());
            assert!(align_of::<Self>() <= align_of::<u64>());
        };
        // SAFETY: the union has room and alignment, as asserted, and all bits are valid by the contract of the trait.
        unsafe { wanted.words.as_ptr().cast::<Self>().read() }
    }
}

macro_rules! members {
    ($($name:ident)*) => {$(
        // SAFETY: the type consists of numbers, pointers, and nullable function pointers.
        unsafe impl Member for $name {}
    )*};
}

members! {
    CUDA_KERNEL_NODE_PARAMS CUDA_MEMCPY_NODE_PARAMS CUDA_MEMSET_NODE_PARAMS CUDA_HOST_NODE_PARAMS
    CUDA_CHILD_GRAPH_NODE_PARAMS CUDA_EVENT_NODE_PARAMS CUDA_MEM_ALLOC_NODE_PARAMS CUDA_BATCH_MEM_OP_NODE_PARAMS
    CUDA_CONDITIONAL_NODE_PARAMS CUdeviceptr
}

/// Creates the work of a node of any kind. `old` is the node's previous work, if it exists already.
fn any(
    scope: Scope,
    model: &mut Model,
    wanted: &mut CUgraphNodeParams,
    old: Option<&Work>,
) -> Result<Work> {
    if wanted.reserved0 != [0; 3] || wanted.reserved2 != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    match wanted.r#type {
        kind::KERNEL => {
            let attributes = match old {
                Some(Work::Kernel(kernel)) => kernel.attributes.as_slice(),
                _ => &[],
            };
            kernel(scope, &Member::of(wanted), attributes)
        }
        kind::MEMCPY => {
            let wanted = CUDA_MEMCPY_NODE_PARAMS::of(wanted);
            if wanted.flags != 0 || wanted.reserved != 0 {
                return Err(CuError::INVALID_VALUE);
            }
            copy(wanted.copyParams)
        }
        kind::MEMSET => fill(Member::of(wanted)),
        kind::HOST => host(Member::of(wanted)),
        kind::GRAPH => {
            let given = CUDA_CHILD_GRAPH_NODE_PARAMS::of(wanted);
            let own = match given.ownership {
                CLONE => model.clone_graph(graph_handle(given.graph)?)?,
                // The child graph node takes ownership of the graph itself.
                MOVE => graph_handle(given.graph)?,
                _ => return Err(CuError::INVALID_VALUE),
            };
            let place = offset_of!(CUDA_CHILD_GRAPH_NODE_PARAMS, graph) / size_of::<u64>();
            wanted.words[place] = to_pointer(own).addr() as u64;
            Ok(Work::Child(own))
        }
        kind::EMPTY => Ok(Work::Empty),
        kind::WAIT_EVENT => an_event(CUDA_EVENT_NODE_PARAMS::of(wanted).event).map(Work::WaitEvent),
        kind::EVENT_RECORD => {
            an_event(CUDA_EVENT_NODE_PARAMS::of(wanted).event).map(Work::RecordEvent)
        }
        kind::MEM_ALLOC if old.is_none() => {
            let memory = allocation(scope, &Member::of(wanted))?;
            let place = offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS, dptr) / size_of::<u64>();
            wanted.words[place] = memory.address;
            Ok(Work::Alloc(memory))
        }
        kind::MEM_FREE if old.is_none() => Work::free(Member::of(wanted)),
        kind::BATCH_MEM_OP => operations(Member::of(wanted)),
        // The work of a conditional node is set once, when the node is created.
        kind::CONDITIONAL => Err(CuError::NOT_SUPPORTED),
        _ => Err(CuError::INVALID_VALUE),
    }
}

/// Defines the functions that add a node of one kind, by their parameters that describe its work.
macro_rules! adders {
    ($($name:ident($($wanted:ident: $kind:ty),*): $work:expr;)*) => {$(
        pub fn $name(
            phGraphNode: Out<'_, CUgraphNode>,
            hGraph: CUgraph,
            dependencies: In<'_, [CUgraphNode]>,
            _numDependencies: usize,
            $($wanted: $kind),*
        ) -> Result {
            Place::new(phGraphNode, hGraph, dependencies).add($work)
        }
    )*};
}

adders! {
    cuGraphAddKernelNode(nodeParams: In<'_, CUDA_KERNEL_NODE_PARAMS_v1>):
        |scope, _| kernel(scope, &with_context(nodeParams.get()?), &[]);
    cuGraphAddKernelNode_v2(nodeParams: In<'_, CUDA_KERNEL_NODE_PARAMS>): |scope, _| kernel(scope, &nodeParams.get()?, &[]);
    cuGraphAddHostNode(nodeParams: In<'_, CUDA_HOST_NODE_PARAMS>): |_, _| host(nodeParams.get()?);
    cuGraphAddBatchMemOpNode(nodeParams: In<'_, CUDA_BATCH_MEM_OP_NODE_PARAMS>): |_, _| operations(nodeParams.get()?);
    cuGraphAddMemcpyNode(copyParams: In<'_, CUDA_MEMCPY3D>, ctx: CUcontext): |_, _| {
        context::find_active(ctx)?;
        copy(copyParams.get()?)
    };
    cuGraphAddMemsetNode(memsetParams: In<'_, CUDA_MEMSET_NODE_PARAMS>, ctx: CUcontext): |_, _| {
        context::find_active(ctx)?;
        fill(memsetParams.get()?)
    };
    cuGraphAddEmptyNode(): |_, _| Ok(Work::Empty);
    cuGraphAddChildGraphNode(childGraph: CUgraph): |_, model| child(model, childGraph);
    cuGraphAddEventRecordNode(event: CUevent): |_, _| an_event(event).map(Work::RecordEvent);
    cuGraphAddEventWaitNode(event: CUevent): |_, _| an_event(event).map(Work::WaitEvent);
    cuGraphAddMemFreeNode(dptr: CUdeviceptr): |_, _| Work::free(dptr);
}

pub fn cuGraphAddMemAllocNode(
    phGraphNode: Out<'_, CUgraphNode>,
    hGraph: CUgraph,
    dependencies: In<'_, [CUgraphNode]>,
    _numDependencies: usize,
    nodeParams: InOut<'_, CUDA_MEM_ALLOC_NODE_PARAMS>,
) -> Result {
    let mut wanted = nodeParams.get()?;
    Place::new(phGraphNode, hGraph, dependencies).add(|scope, _| {
        let memory = allocation(scope, &wanted)?;
        wanted.dptr = memory.address;
        Ok(Work::Alloc(memory))
    })?;
    nodeParams.put(wanted)
}

pub fn cuGraphAddNode_v2(
    phGraphNode: Out<'_, CUgraphNode>,
    hGraph: CUgraph,
    dependencies: In<'_, [CUgraphNode]>,
    dependencyData: In<'_, [CUgraphEdgeData]>,
    _numDependencies: usize,
    nodeParams: InOut<'_, CUgraphNodeParams>,
) -> Result {
    let mut wanted = nodeParams.get()?;
    let place = Place {
        node: phGraphNode,
        graph: hGraph,
        before: nodes_with_data(dependencies, dependencyData),
    };
    place.add(|scope, model| match wanted.r#type {
        kind::CONDITIONAL => conditional(model, hGraph, &mut wanted),
        _ => any(scope, model, &mut wanted, None),
    })?;
    nodeParams.put(wanted)
}

/// Writes a value read from a node's work.
fn put_value<T: Copy>(
    node: CUgraphNode,
    place: Out<'_, T>,
    read: impl FnOnce(&Work) -> Option<T>,
) -> Result {
    session()?;
    let node = node_handle(node)?;
    let value = with(|model| read(&model.node(node)?.work).ok_or(CuError::INVALID_VALUE))?;
    place.put(value)
}

/// Replaces a node's work with work of the same kind.
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

/// Replaces the work of a node of an executable graph.
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

/// Creates a kernel's work with the attributes of the old kernel.
fn kernel_like(scope: Scope, wanted: &CUDA_KERNEL_NODE_PARAMS, old: &Work) -> Result<Work> {
    let Work::Kernel(old) = old else {
        return Err(CuError::INVALID_VALUE);
    };
    kernel(scope, wanted, &old.attributes)
}

/// Defines the functions that set one parameter structure, of a node and of a node of an executable graph.
macro_rules! setters {
    ($($set:ident, $set_executed:ident($wanted:ident: $kind:ty): $work:expr;)*) => {$(
        pub fn $set(hNode: CUgraphNode, $wanted: In<'_, $kind>) -> Result {
            set(hNode, |scope, _, old| $work(scope, $wanted.get()?, old))
        }

        pub fn $set_executed(
            hGraphExec: CUgraphExec,
            hNode: CUgraphNode,
            $wanted: In<'_, $kind>,
        ) -> Result {
            set_executed(hGraphExec, hNode, |scope, _, old| $work(scope, $wanted.get()?, old))
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

/// Defines the same functions for calls whose second variant passes a context.
macro_rules! setters_with_context {
    ($($set:ident($wanted:ident), $set_executed:ident($executed:ident): $kind:ty, $work:expr;)*) => {$(
        pub fn $set(hNode: CUgraphNode, $wanted: In<'_, $kind>) -> Result {
            set(hNode, |_, _, _| $work($wanted.get()?))
        }

        pub fn $set_executed(
            hGraphExec: CUgraphExec,
            hNode: CUgraphNode,
            $executed: In<'_, $kind>,
            ctx: CUcontext,
        ) -> Result {
            set_executed(hGraphExec, hNode, |_, _, _| {
                    context::find_active(ctx)?;
                    $work($executed.get()?)
                })
        }
    )*};
}

setters_with_context! {
    cuGraphMemcpyNodeSetParams(nodeParams), cuGraphExecMemcpyNodeSetParams(copyParams): CUDA_MEMCPY3D, copy;
    cuGraphMemsetNodeSetParams(nodeParams), cuGraphExecMemsetNodeSetParams(memsetParams): CUDA_MEMSET_NODE_PARAMS, fill;
}

/// Defines the functions that read and replace the event of a node.
macro_rules! event_nodes {
    ($($work:ident: $get:ident, $set:ident, $set_executed:ident;)*) => {$(
        pub fn $get(hNode: CUgraphNode, event_out: Out<'_, CUevent>) -> Result {
            let read = |work: &Work| match work {
                Work::$work(event) => Some(to_pointer(*event)),
                _ => None,
            };
            put_value(hNode, event_out, read)
        }

        pub fn $set(hNode: CUgraphNode, event: CUevent) -> Result {
            set(hNode, |_, _, _| an_event(event).map(Work::$work))
        }

        pub fn $set_executed(
            hGraphExec: CUgraphExec,
            hNode: CUgraphNode,
            event: CUevent,
        ) -> Result {
            set_executed(hGraphExec, hNode, |_, _, _| an_event(event).map(Work::$work))
        }
    )*};
}

event_nodes! {
    RecordEvent: cuGraphEventRecordNodeGetEvent, cuGraphEventRecordNodeSetEvent, cuGraphExecEventRecordNodeSetEvent;
    WaitEvent: cuGraphEventWaitNodeGetEvent, cuGraphEventWaitNodeSetEvent, cuGraphExecEventWaitNodeSetEvent;
}

pub fn cuGraphExecChildGraphNodeSetParams(
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    childGraph: CUgraph,
) -> Result {
    let child = graph_handle(childGraph)?;
    set_executed(hGraphExec, hNode, |_, _, _| Ok(Work::Child(child)))
}

pub fn cuGraphNodeSetParams(
    hNode: CUgraphNode,
    nodeParams: InOut<'_, CUgraphNodeParams>,
) -> Result {
    let mut wanted = nodeParams.get()?;
    no_child(&wanted)?;
    set(hNode, |scope, model, old| {
        any(scope, model, &mut wanted, Some(old))
    })
}

pub fn cuGraphExecNodeSetParams(
    hGraphExec: CUgraphExec,
    hNode: CUgraphNode,
    nodeParams: InOut<'_, CUgraphNodeParams>,
) -> Result {
    let mut wanted = nodeParams.get()?;
    if wanted.r#type == kind::GRAPH {
        let child = graph_handle(CUDA_CHILD_GRAPH_NODE_PARAMS::of(&wanted).graph)?;
        return set_executed(hGraphExec, hNode, |_, _, _| Ok(Work::Child(child)));
    }
    set_executed(hGraphExec, hNode, |scope, model, old| {
        any(scope, model, &mut wanted, Some(old))
    })
}

/// Fails for a child graph node, whose graph is changed directly.
fn no_child(wanted: &CUgraphNodeParams) -> Result {
    match wanted.r#type {
        kind::GRAPH => Err(CuError::NOT_SUPPORTED),
        _ => Ok(()),
    }
}

/// Defines the functions that write the parameters of one kind of node.
macro_rules! getters {
    ($($name:ident($place:ident: $kind:ty): $work:pat => $value:expr;)*) => {$(
        pub fn $name(hNode: CUgraphNode, $place: Out<'_, $kind>) -> Result {
            let read = |work: &Work| match work {
                $work => Some($value),
                _ => None,
            };
            put_value(hNode, $place, read)
        }
    )*};
}

getters! {
    cuGraphKernelNodeGetParams(nodeParams: CUDA_KERNEL_NODE_PARAMS_v1): Work::Kernel(kernel) => kernel.described();
    cuGraphKernelNodeGetParams_v2(nodeParams: CUDA_KERNEL_NODE_PARAMS): Work::Kernel(kernel) => CUDA_KERNEL_NODE_PARAMS {
        kern: kernel.of_library(),
        ctx: context::current(),
        first: kernel.described(),
    };
    cuGraphMemcpyNodeGetParams(nodeParams: CUDA_MEMCPY3D): Work::Copy(copy) => **copy;
    cuGraphMemsetNodeGetParams(nodeParams: CUDA_MEMSET_NODE_PARAMS): Work::Fill(fill) => *fill;
    cuGraphHostNodeGetParams(nodeParams: CUDA_HOST_NODE_PARAMS): Work::Host(call) => CUDA_HOST_NODE_PARAMS {
        r#fn: call.function,
        userData: call.data,
    };
    cuGraphMemFreeNodeGetParams(dptr_out: CUdeviceptr): Work::Free(address) => *address;
}

/// Writes the parameters. The list of operations belongs to the node.
pub fn cuGraphBatchMemOpNodeGetParams(
    hNode: CUgraphNode,
    nodeParams_out: Out<'_, CUDA_BATCH_MEM_OP_NODE_PARAMS>,
) -> Result {
    let read = |work: &Work| match work {
        Work::Memory(operations) => Some(CUDA_BATCH_MEM_OP_NODE_PARAMS {
            ctx: operations.context,
            count: u32::try_from(operations.given.len()).ok()?,
            paramArray: operations.given.as_ptr().cast_mut(),
            flags: 0,
        }),
        _ => None,
    };
    put_value(hNode, nodeParams_out, read)
}

pub fn cuGraphMemAllocNodeGetParams(
    hNode: CUgraphNode,
    params_out: Out<'_, CUDA_MEM_ALLOC_NODE_PARAMS>,
) -> Result {
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
    put_value(hNode, params_out, read)
}

pub fn cuGraphKernelNodeGetAttribute(
    hNode: CUgraphNode,
    attr: CUkernelNodeAttrID,
    value_out: Out<'_, CUstreamAttrValue>,
) -> Result {
    let read = |work: &Work| match work {
        Work::Kernel(kernel) => kernel_attribute(attr, &kernel.attributes),
        _ => None,
    };
    put_value(hNode, value_out, read)
}

pub fn cuGraphKernelNodeSetAttribute(
    hNode: CUgraphNode,
    attr: CUkernelNodeAttrID,
    value: In<'_, CUstreamAttrValue>,
) -> Result {
    let value = value.get()?;
    set(hNode, |_, _, old| match old {
        Work::Kernel(kernel) if kernel_attribute(attr, &[]).is_some() => {
            let list = [CUlaunchAttribute {
                id: attr,
                pad: [0; 4],
                value,
            }];
            let set = Attributes::read(list)?;
            let set = set.items().iter().next().ok_or(CuError::INVALID_VALUE)?;
            Ok(Work::Kernel(Arc::new(
                kernel.with_attribute(set.id, set.value)?,
            )))
        }
        _ => Err(CuError::INVALID_VALUE),
    })
}

pub fn cuGraphKernelNodeCopyAttributes(dst: CUgraphNode, src: CUgraphNode) -> Result {
    let from = node_handle(src)?;
    set(dst, |_, model, old| match (&model.node(from)?.work, old) {
        (Work::Kernel(from), Work::Kernel(to)) => Ok(Work::Kernel(Arc::new(
            to.with_attributes(from.attributes.clone())?,
        ))),
        _ => Err(CuError::INVALID_VALUE),
    })
}
