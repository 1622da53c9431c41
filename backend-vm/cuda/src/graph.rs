//! Executable graphs of the driver's own nodes.

use std::collections::HashSet;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::Ordering;

use wormhole_api::constants::event_flags::DISABLE_TIMING;
use wormhole_api::constants::graph_update_result::{
    ERROR_NODE_TYPE_CHANGED, ERROR_TOPOLOGY_CHANGED,
};
use wormhole_api::constants::launch_attribute::PROGRAMMATIC_STREAM_SERIALIZATION;
use wormhole_api::constants::launch_param;
use wormhole_api::ctypes::{
    CUDA_BATCH_MEM_OP_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS, CUDA_KERNEL_NODE_PARAMS_v1,
    CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUgraph, CUgraphEdgeData, CUgraphExec,
    CUgraphExecUpdateResultInfo, CUgraphNode,
};
use wormhole_device::{
    Conditional, CuError, Device, GraphDescription, GraphEdge, GraphKernel, GraphNode, Graphs,
    MemCopy3d, MemoryOperation, RawEvent, RawFunction, RawGraph, RawStream, Result,
};

use crate::arrays::described;
use crate::device::{CudaDevice, function, size, stream};
use crate::mem_ops::parameters;
use crate::shared_events;

/// Executable graph, with the template whose nodes name those of the executable.
#[derive(Debug)]
pub struct Executable {
    executable: CUgraphExec,
    template: Template,
    flags: u64,
    disabled: HashSet<u32>,
    /// Stream of the last launch, while that stream lives.
    last: Option<RawStream>,
    /// Event that the next launch waits for: the last launch of the executable that this one replaced.
    after: Option<RawEvent>,
}

/// Graph of the driver, and its nodes by their indices.
#[derive(Debug)]
pub(crate) struct Template {
    pub graph: CUgraph,
    pub nodes: Vec<CUgraphNode>,
    /// Functions of the nodes that are kernels, by their indices.
    pub functions: Vec<Option<RawFunction>>,
    /// Conditional nodes, which no update changes.
    pub conditionals: Vec<Conditional>,
}

// SAFETY: the driver's handles may be used from any thread; callers use one graph from one thread at a time.
unsafe impl Send for Executable {}

impl CudaDevice {
    /// Builds the driver's graph. Destroys it again when the driver refuses a node.
    fn template(&self, graph: &GraphDescription) -> Result<Template> {
        let mut made = ptr::null_mut();
        // SAFETY: the place is writable.
        unsafe { self.driver().cuGraphCreate(&raw mut made, 0) }?;
        let mut template = Template {
            graph: made,
            nodes: Vec::with_capacity(graph.nodes.len()),
            functions: functions(graph),
            conditionals: conditionals(graph),
        };
        let filled = self.fill_template(&mut template, graph);
        match filled {
            Ok(()) => Ok(template),
            Err(error) => {
                self.destroy_template(&template);
                Err(error)
            }
        }
    }

    fn destroy_template(&self, template: &Template) {
        // SAFETY: the graph is live, and its nodes are not used any more.
        let _ = unsafe { self.driver().cuGraphDestroy(template.graph) };
    }

    fn fill_template(&self, template: &mut Template, graph: &GraphDescription) -> Result<()> {
        self.add_conditions(template.graph, &graph.conditions)?;
        let mut bodies = vec![template.graph];
        for (place, node) in graph.nodes.iter().enumerate() {
            let body = bodies.get(graph.body(place) as usize).copied();
            let body = body.ok_or(CuError::INVALID_VALUE)?;
            let made = match node {
                GraphNode::Conditional(node) => self.add_conditional(body, node, &mut bodies)?,
                node => self.add_node(body, node)?,
            };
            template.nodes.push(made);
        }
        let mut edges: Vec<Vec<&GraphEdge>> = vec![Vec::new(); bodies.len()];
        for edge in &graph.edges {
            let body = edges.get_mut(graph.body(edge.from as usize) as usize);
            body.ok_or(CuError::INVALID_VALUE)?.push(edge);
        }
        for (body, edges) in bodies.into_iter().zip(edges) {
            self.connect(body, &template.nodes, &edges)?;
        }
        Ok(())
    }

    /// Adds edges between nodes of one graph. `cuGraphAddDependencies_v2` gives every edge of a call the first edge's
    /// data (driver 580), so each call adds edges with equal data.
    fn connect(&self, graph: CUgraph, nodes: &[CUgraphNode], edges: &[&GraphEdge]) -> Result<()> {
        for alike in edges.chunk_by(|one, next| one.data == next.data) {
            let mut ends = (Vec::new(), Vec::new(), Vec::new());
            for GraphEdge { from, to, data } in alike {
                let node = |place: &u32| nodes.get(*place as usize).copied();
                let (from, to) = node(from).zip(node(to)).ok_or(CuError::INVALID_VALUE)?;
                ends.0.push(from);
                ends.1.push(to);
                ends.2.push(CUgraphEdgeData {
                    from_port: data[0],
                    to_port: data[1],
                    r#type: data[2],
                    reserved: [0; 5],
                });
            }
            // SAFETY: three lists of one length, of nodes of this graph.
            unsafe {
                self.driver().cuGraphAddDependencies_v2(
                    graph,
                    ends.0.as_ptr(),
                    ends.1.as_ptr(),
                    ends.2.as_ptr(),
                    ends.0.len(),
                )
            }?;
        }
        Ok(())
    }

    fn add_node(&self, graph: CUgraph, node: &GraphNode) -> Result<CUgraphNode> {
        let mut made = ptr::null_mut();
        let (place, none) = (&raw mut made, ptr::null());
        let driver = self.driver();
        // SAFETY: the graph is live, there are no dependencies yet, the place is writable, events are live.
        unsafe {
            match node {
                GraphNode::Kernel(kernel) => self.add_kernel(graph, place, kernel)?,
                GraphNode::Copy(copy) => {
                    let copy = line_or_box(copy);
                    let context = self.handle();
                    driver.cuGraphAddMemcpyNode(place, graph, none, 0, &raw const copy, context)?;
                }
                GraphNode::Fill(fill) => {
                    let fill = CUDA_MEMSET_NODE_PARAMS {
                        dst: fill.destination,
                        pitch: size(fill.pitch),
                        value: fill.value,
                        elementSize: fill.element,
                        width: size(fill.width),
                        height: size(fill.height),
                    };
                    let context = self.handle();
                    driver.cuGraphAddMemsetNode(place, graph, none, 0, &raw const fill, context)?;
                }
                GraphNode::Memory(operations) => self.add_memory(graph, place, operations)?,
                GraphNode::RecordEvent(raw) => {
                    let event = shared_events::unshared(*raw)?;
                    driver.cuGraphAddEventRecordNode(place, graph, none, 0, event)?;
                }
                GraphNode::WaitEvent(raw) => {
                    let event = shared_events::unshared(*raw)?;
                    driver.cuGraphAddEventWaitNode(place, graph, none, 0, event)?;
                }
                GraphNode::Empty => driver.cuGraphAddEmptyNode(place, graph, none, 0)?,
                // `add_conditional` creates these with their bodies.
                GraphNode::Conditional(_) => return Err(CuError::INVALID_VALUE),
            }
        }
        Ok(made)
    }

    fn add_kernel(
        &self,
        graph: CUgraph,
        place: *mut CUgraphNode,
        kernel: &GraphKernel,
    ) -> Result<()> {
        let mut bytes = kernel.parameters.len();
        let mut list = parameter_list(&kernel.parameters, &mut bytes);
        let node = kernel_node(
            kernel.function,
            (kernel.grid, kernel.block, kernel.shared),
            extra(&kernel.parameters, &mut list),
        );
        // SAFETY: the driver copies the parameters during the call; the node that it writes is live after.
        unsafe {
            self.driver()
                .cuGraphAddKernelNode_v2(place, graph, ptr::null(), 0, &raw const node)?;
            for attribute in &kernel.attributes {
                // Valid for streams only: the capture has turned the order into edges.
                if attribute.id == PROGRAMMATIC_STREAM_SERIALIZATION {
                    continue;
                }
                self.driver().cuGraphKernelNodeSetAttribute(
                    *place,
                    attribute.id,
                    (&raw const attribute.value).cast(),
                )?;
            }
        }
        Ok(())
    }

    fn add_memory(
        &self,
        graph: CUgraph,
        place: *mut CUgraphNode,
        operations: &[MemoryOperation],
    ) -> Result<()> {
        let mut list: Vec<_> = operations.iter().map(parameters).collect();
        let node = CUDA_BATCH_MEM_OP_NODE_PARAMS {
            ctx: self.handle(),
            count: u32::try_from(list.len()).map_err(|_| CuError::INVALID_VALUE)?,
            paramArray: list.as_mut_ptr(),
            flags: 0,
        };
        // SAFETY: the list has that many entries, which the driver copies during the call.
        unsafe {
            self.driver()
                .cuGraphAddBatchMemOpNode(place, graph, ptr::null(), 0, &raw const node)
        }
    }

    /// Instantiates the driver's executable graph.
    fn made_executable(&self, template: &Template, flags: u64) -> Result<CUgraphExec> {
        let mut executable = ptr::null_mut();
        // SAFETY: the template is live, the place is writable.
        unsafe {
            self.driver()
                .cuGraphInstantiateWithFlags(&raw mut executable, template.graph, flags)
        }?;
        Ok(executable)
    }

    /// Makes the driver's graph and instantiates it.
    pub(crate) fn made(
        &self,
        graph: &GraphDescription,
        flags: u64,
    ) -> Result<(CUgraphExec, Template)> {
        let template = self.template(graph)?;
        match self.made_executable(&template, flags) {
            Ok(executable) => Ok((executable, template)),
            Err(error) => {
                self.destroy_template(&template);
                Err(error)
            }
        }
    }

    /// Replaces an executable graph that the driver cannot update.
    fn replace(&self, raw: RawGraph, template: Template) -> Result<()> {
        let flags = self
            .graphs
            .lock()
            .get(&raw.0)
            .map_or(0, |place| place.flags);
        let executable = match self.made_executable(&template, flags) {
            Ok(executable) => executable,
            Err(error) => {
                self.destroy_template(&template);
                return Err(error);
            }
        };
        let mut new = Executable {
            executable,
            template,
            flags,
            disabled: HashSet::new(),
            last: None,
            after: None,
        };
        let replaced = self.put_in_place(raw, &mut new);
        // Destroys the old executable, or the new one if it could not replace the old one.
        let gone = self.destroy_executable(&new);
        replaced.and(gone)
    }

    /// Sets the kernels of an executable graph's template to those of an update. The template stays as long as the executable
    /// graph, and must not name functions of modules that may be unloaded before.
    ///
    /// # Errors
    /// The driver refuses a kernel, or the kernels are not the same nodes as before.
    fn follow_update(&self, raw: RawGraph, graph: &GraphDescription) -> Result<()> {
        let new = functions(graph);
        let nodes = {
            let graphs = self.graphs.lock();
            let template = &graphs.get(&raw.0).ok_or(CuError::INVALID_HANDLE)?.template;
            if template.functions == new {
                return Ok(());
            }
            let alike = |(old, new): (&Option<_>, &Option<_>)| old.is_some() == new.is_some();
            if !template.functions.iter().zip(&new).all(alike) {
                return Err(CuError::GRAPH_EXEC_UPDATE_FAILURE);
            }
            template.nodes.clone()
        };
        for (node, place) in graph.nodes.iter().zip(nodes) {
            if let GraphNode::Kernel(kernel) = node {
                let mut bytes = kernel.parameters.len();
                let mut list = parameter_list(&kernel.parameters, &mut bytes);
                let sizes = (kernel.grid, kernel.block, kernel.shared);
                let extra = extra(&kernel.parameters, &mut list);
                let described = kernel_node(kernel.function, sizes, extra);
                // SAFETY: the node is a kernel of a live template, the function is live, and the driver copies the
                // parameters during the call.
                unsafe {
                    self.driver()
                        .cuGraphKernelNodeSetParams_v2(place, &raw const described)
                }?;
            }
        }
        if let Some(place) = self.graphs.lock().get_mut(&raw.0) {
            place.template.functions = new;
        }
        Ok(())
    }

    /// Exchanges an executable graph with a new one, which inherits the disabled nodes and the last launch.
    fn put_in_place(&self, raw: RawGraph, new: &mut Executable) -> Result<()> {
        // Locked throughout: a stream in the table is not destroyed meanwhile.
        let mut graphs = self.graphs.lock();
        let place = graphs.get_mut(&raw.0).ok_or(CuError::INVALID_HANDLE)?;
        for node in &place.disabled {
            if let Some(node) = new.template.nodes.get(*node as usize) {
                // SAFETY: both are live, and the node is one of the template that the graph was made from.
                unsafe {
                    self.driver()
                        .cuGraphNodeSetEnabled(new.executable, *node, 0)
                }?;
            }
        }
        if let Some(last) = place.last {
            let event = self.create_event(DISABLE_TIMING)?;
            new.after = Some(event);
            self.record_event(event, last, 0)?;
        }
        new.last = place.last;
        new.disabled = std::mem::take(&mut place.disabled);
        std::mem::swap(place, new);
        Ok(())
    }

    /// Destroys an executable graph; its launches go on.
    fn destroy_executable(&self, place: &Executable) -> Result<()> {
        let destroyed = self.destroy_made(place.executable, &place.template);
        if let Some(event) = place.after {
            let _ = self.destroy_event(event);
        }
        destroyed
    }

    /// Destroys the driver's executable graph and its template.
    pub(crate) fn destroy_made(&self, executable: CUgraphExec, template: &Template) -> Result<()> {
        // SAFETY: the graph is live and destroyed once.
        let destroyed = unsafe { self.driver().cuGraphExecDestroy(executable) };
        self.destroy_template(template);
        destroyed
    }

    /// Removes a stream that is about to be destroyed.
    pub(crate) fn forget_stream(&self, stream: RawStream) {
        for place in self.graphs.lock().values_mut() {
            place.last = place.last.filter(|last| *last != stream);
        }
    }

    /// Returns whether an executable graph has the same conditional nodes as `graph`.
    fn chooses_like(&self, raw: RawGraph, graph: &GraphDescription) -> bool {
        let graphs = self.graphs.lock();
        let place = graphs.get(&raw.0);
        place.is_some_and(|place| place.template.conditionals == conditionals(graph))
    }

    pub(crate) fn launch_made(&self, executable: CUgraphExec, on: RawStream) -> Result<()> {
        // SAFETY: the caller passes a live stream; the graph is live.
        unsafe { self.driver().cuGraphLaunch(executable, stream(on)) }
    }

    /// Returns the driver's executable graph. The table is not locked during the caller's driver call.
    fn executable(&self, raw: RawGraph) -> Result<CUgraphExec> {
        let graphs = self.graphs.lock();
        let place = graphs.get(&raw.0).ok_or(CuError::INVALID_HANDLE)?;
        Ok(place.executable)
    }

    /// Destroys every graph, because their context is going to be reset.
    pub(crate) fn end_graphs(&self) {
        let graphs = std::mem::take(&mut *self.graphs.lock());
        for place in graphs.values() {
            if let Err(error) = self.destroy_executable(place) {
                tracing::debug!("destroying a graph before a reset: {error}");
            }
        }
    }
}

/// Returns the list by which the driver finds packed parameters. `bytes` is their number.
pub(crate) fn parameter_list(parameters: &[u8], bytes: &mut usize) -> [*mut c_void; 5] {
    [
        ptr::without_provenance_mut(launch_param::BUFFER_POINTER),
        parameters.as_ptr().cast_mut().cast(),
        ptr::without_provenance_mut(launch_param::BUFFER_SIZE),
        ptr::from_mut(bytes).cast(),
        ptr::without_provenance_mut(launch_param::END),
    ]
}

/// Returns the pointer by which the driver finds the list; none for a kernel without parameters.
pub(crate) fn extra(parameters: &[u8], list: &mut [*mut c_void; 5]) -> *mut *mut c_void {
    if parameters.is_empty() {
        ptr::null_mut()
    } else {
        list.as_mut_ptr()
    }
}

/// Describes a kernel node of the calling thread's context.
pub(crate) fn kernel_node(
    raw: RawFunction,
    (grid, block, shared): ([u32; 3], [u32; 3], u32),
    extra: *mut *mut c_void,
) -> CUDA_KERNEL_NODE_PARAMS {
    CUDA_KERNEL_NODE_PARAMS {
        first: CUDA_KERNEL_NODE_PARAMS_v1 {
            func: function(raw),
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: shared,
            kernelParams: ptr::null_mut(),
            extra,
        },
        kern: ptr::null_mut(),
        ctx: ptr::null_mut(),
    }
}

/// Returns the function of each node that is a kernel.
fn functions(graph: &GraphDescription) -> Vec<Option<RawFunction>> {
    let nodes = graph.nodes.iter();
    nodes
        .map(|node| match node {
            GraphNode::Kernel(kernel) => Some(kernel.function),
            _ => None,
        })
        .collect()
}

fn conditionals(graph: &GraphDescription) -> Vec<Conditional> {
    let nodes = graph.nodes.iter();
    nodes
        .filter_map(|node| match node {
            GraphNode::Conditional(node) => Some(*node),
            _ => None,
        })
        .collect()
}

/// Results of an update that depend on the nodes and edges alone, not on the nodes' parameters.
const SHAPE_CHANGED: [u32; 2] = [ERROR_TOPOLOGY_CHANGED, ERROR_NODE_TYPE_CHANGED];

/// Describes a copy of one row without a pitch, as captured graphs do; a pitch would limit its length.
fn line_or_box(copy: &MemCopy3d) -> CUDA_MEMCPY3D {
    let mut description = described(copy);
    if copy.extent[1..] == [1, 1] {
        (description.srcPitch, description.srcHeight) = (0, 0);
        (description.dstPitch, description.dstHeight) = (0, 0);
    }
    description
}

impl Graphs for CudaDevice {
    fn instantiate(&self, graph: &GraphDescription, flags: u64) -> Result<RawGraph> {
        let (executable, template) = self.made(graph, flags)?;
        // Unique number: the driver may reuse its own handle once a graph was replaced.
        let raw = RawGraph(self.next_graph.fetch_add(1, Ordering::Relaxed));
        let entry = Executable {
            executable,
            template,
            flags,
            disabled: HashSet::new(),
            last: None,
            after: None,
        };
        self.graphs.lock().insert(raw.0, entry);
        Ok(raw)
    }

    fn update_graph(&self, raw: RawGraph, graph: &GraphDescription) -> Result<()> {
        let executable = self.executable(raw)?;
        if !self.chooses_like(raw, graph) {
            return Err(CuError::GRAPH_EXEC_UPDATE_FAILURE);
        }
        let template = self.template(graph)?;
        let mut info = CUgraphExecUpdateResultInfo {
            result: 0,
            errorNode: ptr::null_mut(),
            errorFromNode: ptr::null_mut(),
        };
        // SAFETY: both graphs are live; the driver writes its findings to a place of their size.
        let updated = unsafe {
            self.driver()
                .cuGraphExecUpdate_v2(executable, template.graph, &raw mut info)
        };
        if updated == Err(CuError::GRAPH_EXEC_UPDATE_FAILURE)
            && !SHAPE_CHANGED.contains(&info.result)
        {
            // For example the driver does not change the addresses of a copy of several rows.
            return self.replace(raw, template);
        }
        // The nodes of the first template still name those of the executable graph.
        if updated.is_ok() && self.follow_update(raw, graph).is_err() {
            return self.replace(raw, template);
        }
        self.destroy_template(&template);
        updated
    }

    fn launch_graph(&self, raw: RawGraph, on: RawStream) -> Result<()> {
        let (executable, after) = {
            let mut graphs = self.graphs.lock();
            let place = graphs.get_mut(&raw.0).ok_or(CuError::INVALID_HANDLE)?;
            place.last = Some(on);
            (place.executable, place.after.take())
        };
        if let Some(event) = after {
            self.wait_event(on, event, 0)?;
            self.destroy_event(event)?;
        }
        self.launch_made(executable, on)
    }

    fn upload_graph(&self, raw: RawGraph, on: RawStream) -> Result<()> {
        let executable = self.executable(raw)?;
        // SAFETY: as above.
        unsafe { self.driver().cuGraphUpload(executable, stream(on)) }
    }

    fn destroy_graph(&self, raw: RawGraph) -> Result<()> {
        let removed = self.graphs.lock().remove(&raw.0);
        self.destroy_executable(&removed.ok_or(CuError::INVALID_HANDLE)?)
    }

    fn enable_node(&self, raw: RawGraph, node: u32, enabled: bool) -> Result<()> {
        let (executable, handle) = {
            let graphs = self.graphs.lock();
            let place = graphs.get(&raw.0).ok_or(CuError::INVALID_HANDLE)?;
            let node = place.template.nodes.get(node as usize);
            (place.executable, *node.ok_or(CuError::INVALID_VALUE)?)
        };
        // SAFETY: the node is one of the template that the graph was made from.
        unsafe {
            self.driver()
                .cuGraphNodeSetEnabled(executable, handle, u32::from(enabled))
        }?;
        if let Some(place) = self.graphs.lock().get_mut(&raw.0) {
            if enabled {
                place.disabled.remove(&node);
            } else {
                place.disabled.insert(node);
            }
        }
        Ok(())
    }
}
