//! Executable graphs: records describe them node by node, then a job instantiates them.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use wormhole_api::array::span;
use wormhole_api::handle::Graph;
use wormhole_api::{
    CuResult, GraphBegin, GraphCopy, GraphDestroy, GraphEdges, GraphEmpty, GraphEnable, GraphEvent,
    GraphEventKind, GraphFill, GraphInstantiate, GraphKernel, GraphLaunch, GraphMemory,
    GraphUpdate, GraphUpload, Handle, Outcome, Serve, Served,
};
use wormhole_device::{
    Copy3dEnd, Device, GraphDescription, GraphEdge, GraphNode, LaunchAttribute, MemCopy3d,
    MemoryOperation, RawGraph,
};
use wormhole_link::counters::Counters;
use wormhole_link::device::MOST;

use super::addresses::Addresses;
use super::attributes::Scope;
use super::closed;
use super::conditional_graphs::Nesting;
use super::handles::Table;
use super::{Answer, Call, Finish, Session};
use crate::devices::SessionDevice;
use crate::objects::{ArrayObject, EndingGraph, EventObject, Loaded, Used};
use crate::peers;
use crate::ranges::Found;

/// Limit on the bytes of a session's descriptions that are not instantiated yet.
const MOST_BYTES: usize = 512 << 20;
/// Bytes that are counted for a range of memory that a node names. One node may name as many as there are mappings.
const RANGE: usize = 32;

/// Objects that a graph uses.
#[derive(Debug, Default)]
pub(super) struct Uses {
    /// Images of its kernels. Unloading one destroys the executable graph first.
    images: Vec<Weak<Loaded>>,
    events: Vec<Arc<EventObject>>,
    arrays: Vec<Arc<ArrayObject>>,
    /// Arena extents and files that its nodes name. A graph is not launched once one is returned, also if another one lies
    /// in the same place afterwards: the device knows the one that is gone.
    host: Vec<Found>,
    /// Start and bytes of all memory that the nodes of its description name. No graph is made once one is freed: the
    /// device would look for host memory at its address, and find the worker's own.
    memory: BTreeSet<(u64, u64)>,
    /// Device of its first kernel.
    device: Option<SessionDevice>,
    /// Devices of the objects that its nodes name, one bit each.
    named: u64,
    /// Bytes counted for its description.
    bytes: usize,
    nodes: usize,
}

impl Uses {
    /// Notes that a node names an object of a device.
    fn name(&mut self, device: &SessionDevice) {
        const { assert!(MOST <= u64::BITS as usize) };
        self.named |= 1 << device.number();
    }

    /// Returns the graph's device: that of its first kernel, or else `here`.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED`: a node names an object of another device.
    fn device(&self, here: SessionDevice) -> Result<SessionDevice, CuResult> {
        let device = self.device.clone().unwrap_or(here);
        match self.named & !(1 << device.number()) {
            0 => Ok(device),
            _ => Err(CuResult::NOT_SUPPORTED),
        }
    }

    /// Whether all images, arena extents and files exist that its nodes name.
    fn exist(&self, addresses: &Addresses) -> bool {
        let exists = |range: &Found| addresses.host_range(range.start) == Some(*range);
        !self.is_of_ended_image() && self.host.iter().all(exists)
    }

    /// Adds what a failed update named: the device may have set some nodes.
    fn keep_failed(&mut self, update: &mut Self) {
        self.images.append(&mut update.images);
        self.images.sort_unstable_by_key(Weak::as_ptr);
        self.images.dedup_by(|one, other| one.ptr_eq(other));
        self.events.append(&mut update.events);
        self.events.sort_unstable_by_key(Arc::as_ptr);
        self.events.dedup_by(|one, other| Arc::ptr_eq(one, other));
        self.arrays.append(&mut update.arrays);
        self.arrays.sort_unstable_by_key(Arc::as_ptr);
        self.arrays.dedup_by(|one, other| Arc::ptr_eq(one, other));
        self.host.append(&mut update.host);
        self.host.sort_unstable();
        self.host.dedup();
    }

    /// Whether an image of its kernels is to be unloaded, and neither a job nor a handle holds it.
    fn is_of_ended_image(&self) -> bool {
        self.images.iter().any(|image| image.strong_count() == 0)
    }

    /// Whether all memory exists that the nodes of its description name.
    fn memory_exists(&self, addresses: &Addresses) -> bool {
        let exists = |&range: &(u64, u64)| addresses.around(range.0) == Some(range);
        self.memory.iter().all(exists)
    }

    /// Returns the images if all are still loaded. The references keep them loaded.
    fn images(&self) -> Option<Vec<Arc<Loaded>>> {
        self.images.iter().map(Weak::upgrade).collect()
    }
}

/// Returns the addresses and bytes that an admitted node names, except for a kernel's parameters.
fn named_by(node: &GraphNode) -> Vec<(u64, u64)> {
    match node {
        GraphNode::Copy(MemCopy3d { to, from, extent }) => [to, from]
            .into_iter()
            .filter_map(|end| match *end {
                Copy3dEnd::Memory {
                    address,
                    pitch,
                    rows,
                } => Some((address, span(*extent, pitch, rows)?)),
                Copy3dEnd::Array { .. } => None,
            })
            .collect(),
        GraphNode::Fill(fill) => {
            let row = fill.width * u64::from(fill.element);
            vec![(fill.destination, (fill.height - 1) * fill.pitch + row)]
        }
        GraphNode::Memory(operations) => {
            let named = operations.iter().map(|one| (one.address, one.width()));
            named.filter(|(_, width)| *width > 0).collect()
        }
        _ => Vec::new(),
    }
}

/// A graph under a handle.
#[derive(Debug)]
pub enum GraphObject {
    Described {
        description: GraphDescription,
        nesting: Nesting,
        uses: GraphUses,
        /// Error of the first refused part, if any. The description cannot be instantiated then.
        refused: Option<CuResult>,
    },
    Executable {
        device: SessionDevice,
        raw: RawGraph,
        uses: GraphUses,
    },
    /// A job holds the description or the executable graph.
    Taken(GraphUses),
    /// An image of its kernels is to be unloaded. The executable graph is destroyed with the image.
    Ended,
}

/// Objects that a graph uses, opaque outside this module.
#[derive(Debug, Default)]
pub struct GraphUses(Uses);

/// Takes an executable graph for a job, with references to the images of its kernels, if all are
/// still loaded.
fn take_executable(place: &mut GraphObject) -> Option<(SessionDevice, RawGraph, Vec<Arc<Loaded>>)> {
    let GraphObject::Executable { device, raw, uses } = place else {
        return None;
    };
    let taken = (device.clone(), *raw, uses.0.images()?);
    *place = GraphObject::Taken(std::mem::take(uses));
    Some(taken)
}

/// The graphs of a session.
#[derive(Debug)]
pub(super) struct Graphs {
    table: Table<Graph, GraphObject>,
    /// Bytes that all descriptions take.
    bytes: usize,
}

impl Graphs {
    pub fn new(counters: &Arc<Counters>) -> Self {
        Self {
            table: Table::new(counters),
            bytes: 0,
        }
    }

    /// Takes the executable graphs of images that no job or handle holds any more, which no graph can be made or launched of.
    pub fn take_ended(&mut self) -> Vec<EndingGraph> {
        let ended = |place: &mut GraphObject| match place {
            GraphObject::Executable { raw, uses, .. } if uses.0.is_of_ended_image() => {
                let (raw, uses) = (*raw, std::mem::take(&mut uses.0));
                *place = GraphObject::Ended;
                Some(EndingGraph {
                    raw,
                    events: uses.events,
                    arrays: uses.arrays,
                })
            }
            _ => None,
        };
        self.table.values_mut().filter_map(ended).collect()
    }

    /// Forgets all graphs, because their context is going to be reset.
    pub fn clear(&mut self) {
        self.table.drain().for_each(drop);
        self.bytes = 0;
    }

    /// Returns a description after counting `bytes` more for it.
    pub fn described(
        &mut self,
        graph: Handle<Graph>,
        bytes: usize,
    ) -> Result<(&mut GraphDescription, &mut Nesting, &mut GraphUses), CuResult> {
        if bytes > MOST_BYTES - self.bytes.min(MOST_BYTES) {
            return Err(CuResult::OUT_OF_MEMORY);
        }
        let Some(GraphObject::Described {
            description,
            nesting,
            uses,
            ..
        }) = self.table.find_mut(graph)
        else {
            return Err(CuResult::INVALID_HANDLE);
        };
        self.bytes += bytes;
        uses.0.bytes += bytes;
        Ok((description, nesting, uses))
    }

    /// Notes that a node of a description names memory.
    fn name_memory(&mut self, graph: Handle<Graph>, range: (u64, u64)) -> Result<(), CuResult> {
        let (.., uses) = self.described(graph, 0)?;
        if !uses.0.memory.contains(&range) {
            let (.., uses) = self.described(graph, RANGE)?;
            uses.0.memory.insert(range);
        }
        Ok(())
    }

    /// Subtracts the bytes of a description that is gone.
    fn uncount(&mut self, uses: &mut GraphUses) {
        self.bytes -= std::mem::take(&mut uses.0.bytes);
    }

    /// Stores the executable graph under the handle that a job held.
    fn becomes_executable(
        &mut self,
        graph: Handle<Graph>,
        device: SessionDevice,
        raw: RawGraph,
        mut uses: GraphUses,
    ) {
        self.uncount(&mut uses);
        uses.0.memory.clear();
        if let Some(place) = self.table.find_mut(graph) {
            *place = GraphObject::Executable { device, raw, uses };
        }
    }

    /// Takes the uses of a graph that a job holds. No other thread removes it meanwhile, and a
    /// reset waits for jobs.
    fn uses_of_taken(&mut self, graph: Handle<Graph>) -> GraphUses {
        match self.table.find_mut(graph) {
            Some(GraphObject::Taken(uses)) => std::mem::take(uses),
            _ => GraphUses::default(),
        }
    }

    /// Returns the executable graph behind a handle, if the images of its kernels are still loaded.
    fn executable(
        &self,
        graph: Handle<Graph>,
        addresses: &Addresses,
    ) -> Result<(&SessionDevice, RawGraph, usize), CuResult> {
        match self.table.find(graph) {
            Some(GraphObject::Executable { device, raw, uses }) if uses.0.exist(addresses) => {
                Ok((device, *raw, uses.0.nodes))
            }
            _ => self.table.refused(CuResult::INVALID_HANDLE),
        }
    }
}

impl Serve<GraphBegin> for Session {
    fn serve(&mut self, _: &Call, message: &GraphBegin) -> Outcome<()> {
        let new = message.new;
        let object = GraphObject::Described {
            description: GraphDescription::default(),
            nesting: Nesting::default(),
            uses: GraphUses::default(),
            refused: None,
        };
        let graphs = &mut self.objects.graphs.table;
        graphs.enter(new, object).map(Served::Done)
    }
}

impl Session {
    /// Adds a node to a description and counts `bytes` more for it.
    pub(super) fn add_node(
        &mut self,
        graph: Handle<Graph>,
        node: GraphNode,
        bytes: usize,
    ) -> Result<&mut Uses, CuResult> {
        let graphs = &mut self.objects.graphs;
        let (_, nesting, uses) = graphs.described(graph, bytes + size_of::<GraphNode>())?;
        nesting.check(&node)?;
        let named = named_by(&node);
        for &(address, _) in &named {
            if let Some(range) = self.addresses.host_range(address)
                && !uses.0.host.contains(&range)
            {
                uses.0.host.push(range);
            }
        }
        for (address, bytes) in named {
            // Several mappings can hold it.
            let mut at = address;
            while at - address < bytes
                && let Some((start, length)) = self.addresses.around(at)
            {
                graphs.name_memory(graph, (start, length))?;
                at = start + length;
            }
        }
        let (description, nesting, uses) = graphs.described(graph, 0)?;
        uses.0.nodes += 1;
        description.nodes.push(node);
        description.bodies.push(nesting.current());
        Ok(&mut uses.0)
    }

    /// Adds a part to a description. Notes the error if it is refused: instantiation then fails
    /// with it.
    pub(super) fn part_of_graph(
        &mut self,
        graph: Handle<Graph>,
        add: impl FnOnce(&mut Self) -> Result<(), CuResult>,
    ) -> Outcome<()> {
        let added = add(self);
        if let Err(error) = added
            && let Some(GraphObject::Described { refused, .. }) =
                self.objects.graphs.table.find_mut(graph)
        {
            refused.get_or_insert(error);
            return Ok(Served::Done(()));
        }
        added.map(Served::Done)
    }
}

impl Serve<GraphKernel<'_>> for Session {
    fn serve(&mut self, _: &Call, message: &GraphKernel<'_>) -> Outcome<()> {
        self.part_of_graph(message.graph, |session| {
            let mut attributes = Vec::new();
            let (function, _) = session.admit_launch(
                Scope::Node,
                message.function,
                &message.attributes,
                message.parameters,
                &mut attributes,
            )?;
            let image = Arc::downgrade(&function.image);
            let device = function.image.device.clone();
            let bytes = message.parameters.len() + attributes.len() * size_of::<LaunchAttribute>();
            let node = GraphNode::Kernel(wormhole_device::GraphKernel {
                function: function.raw,
                grid: message.grid,
                block: message.block,
                shared: message.shared,
                attributes,
                parameters: message.parameters.to_vec(),
            });
            let uses = session.add_node(message.graph, node, bytes)?;
            uses.name(&device);
            uses.device.get_or_insert(device);
            if !uses.images.iter().any(|known| known.ptr_eq(&image)) {
                uses.images.push(image);
            }
            Ok(())
        })
    }
}

impl Serve<GraphCopy> for Session {
    fn serve(&mut self, _: &Call, message: &GraphCopy) -> Outcome<()> {
        self.part_of_graph(message.graph, |session| {
            let extent = message.extent;
            if extent.contains(&0) {
                return Err(CuResult::INVALID_VALUE);
            }
            let checked = session.copy3d(
                extent,
                (
                    message.to_array,
                    message.to_origin,
                    (message.to_memory, message.to_pitch, message.to_rows),
                ),
                (
                    message.from_array,
                    message.from_origin,
                    (message.from_memory, message.from_pitch, message.from_rows),
                ),
            )?;
            let arrays = checked.arrays.map(|array| array.cloned());
            let node = GraphNode::Copy(checked.copy);
            let uses = session.add_node(message.graph, node, 0)?;
            for array in arrays.into_iter().flatten() {
                uses.name(&array.device);
                uses.arrays.push(array);
            }
            Ok(())
        })
    }
}

impl Serve<GraphFill> for Session {
    fn serve(&mut self, _: &Call, message: &GraphFill) -> Outcome<()> {
        self.part_of_graph(message.graph, |session| {
            let (place, pitch) = (message.destination, message.pitch);
            let size = [message.width, message.height];
            let fill = session.fill(place, pitch, size, message.value, message.element)?;
            let fill = fill.ok_or(CuResult::INVALID_VALUE)?;
            session.add_node(message.graph, GraphNode::Fill(fill), 0)?;
            Ok(())
        })
    }
}

impl Serve<GraphMemory<'_>> for Session {
    fn serve(&mut self, _: &Call, message: &GraphMemory<'_>) -> Outcome<()> {
        self.part_of_graph(message.graph, |session| {
            let mut operations = Vec::new();
            session.read_memory_operations(message.operations, &mut operations)?;
            let bytes = operations.len() * size_of::<MemoryOperation>();
            session.add_node(message.graph, GraphNode::Memory(operations), bytes)?;
            Ok(())
        })
    }
}

impl Serve<GraphEvent> for Session {
    fn serve(&mut self, _: &Call, message: &GraphEvent) -> Outcome<()> {
        self.part_of_graph(message.graph, |session| {
            let event = Arc::clone(session.objects.events.get(message.event)?);
            let node = match message.kind {
                GraphEventKind::Record => GraphNode::RecordEvent(event.raw),
                GraphEventKind::Wait => GraphNode::WaitEvent(event.raw),
            };
            let uses = session.add_node(message.graph, node, 0)?;
            uses.name(&event.device);
            uses.events.push(event);
            Ok(())
        })
    }
}

impl Serve<GraphEmpty> for Session {
    fn serve(&mut self, _: &Call, message: &GraphEmpty) -> Outcome<()> {
        self.part_of_graph(message.graph, |session| {
            session
                .add_node(message.graph, GraphNode::Empty, 0)
                .map(drop)
        })
    }
}

/// Every edge leads from an earlier node to a later one of the same body, so no graph has a cycle.
impl Serve<GraphEdges<'_>> for Session {
    fn serve(&mut self, _: &Call, message: &GraphEdges<'_>) -> Outcome<()> {
        self.part_of_graph(message.graph, |session| {
            let bytes = message.edges.len() * size_of::<GraphEdge>();
            let (description, ..) = session.objects.graphs.described(message.graph, bytes)?;
            for edge in message.edges.iter() {
                let count = description.nodes.len();
                let body = |node: u32| description.body(node as usize);
                if edge.from >= edge.to
                    || edge.to as usize >= count
                    || body(edge.from) != body(edge.to)
                {
                    return Err(CuResult::INVALID_VALUE);
                }
                let [from, to, kind, _] = edge.data.to_le_bytes();
                closed::FROM_PORT.check(from)?;
                closed::TO_PORT.check(to)?;
                closed::DEPENDENCY.check(kind)?;
                description.edges.push(GraphEdge {
                    from: edge.from,
                    to: edge.to,
                    data: [from, to, kind],
                });
            }
            Ok(())
        })
    }
}

/// References that a job holds while it gives a description to the device: the images of its kernels, which stay loaded,
/// and the guard of the addresses that its nodes name. The executor drops them once the graph is entered: an image that is
/// unloaded then takes the graph along.
type Held = (Vec<Arc<Loaded>>, Arc<()>);

impl Session {
    /// Takes the description under a handle for a job.
    fn take_description(
        &mut self,
        graph: Handle<Graph>,
    ) -> Result<(GraphDescription, Held), CuResult> {
        let graphs = &mut self.objects.graphs;
        let place = graphs.table.get_mut(graph)?;
        match std::mem::replace(place, GraphObject::Taken(GraphUses::default())) {
            GraphObject::Described {
                description,
                uses,
                refused,
                ..
            } => match (refused, uses.0.images()) {
                (None, Some(images)) if uses.0.memory_exists(&self.addresses) => {
                    *place = GraphObject::Taken(uses);
                    Ok((description, (images, self.addresses.user())))
                }
                (refused, _) => {
                    // The handle was found above, so this succeeds.
                    let _ = graphs.table.remove(graph);
                    let error = match refused {
                        Some(error) => Err(error),
                        None => graphs.table.refused(CuResult::INVALID_HANDLE),
                    };
                    self.let_go_of_uses(uses);
                    error
                }
            },
            other => {
                *place = other;
                Err(CuResult::INVALID_HANDLE)
            }
        }
    }

    /// Releases the objects that a destroyed graph used. Arrays whose last user it was are
    /// destroyed on the registrar, because that may block.
    fn let_go_of_uses(&mut self, mut uses: GraphUses) {
        self.objects.graphs.uncount(&mut uses);
        if !uses.0.arrays.is_empty() {
            self.let_go_quietly(uses.0.arrays.into_iter().map(Used::Array));
        }
    }

    /// Returns the device of the description that a job is going to hold, or else that of the
    /// message.
    fn device_of_taken(
        &self,
        call: &Call,
        graph: Handle<Graph>,
    ) -> Result<SessionDevice, CuResult> {
        match self.objects.graphs.table.get(graph)? {
            GraphObject::Taken(uses) => self.done(uses.0.device(self.here(call))),
            _ => Err(CuResult::INVALID_HANDLE),
        }
    }

    /// Removes a graph that a job held.
    fn end_taken(&mut self, graph: Handle<Graph>) {
        let uses = self.objects.graphs.uses_of_taken(graph);
        // The entry exists: no other thread removes it meanwhile.
        let _ = self.objects.graphs.table.remove(graph);
        self.let_go_of_uses(uses);
    }
}

/// A graph that the device must accept is a record, so that the records behind it find the executable graph. Any other
/// is a request, and a job. On failure the handle names no graph.
impl Serve<GraphInstantiate> for Session {
    fn serve(&mut self, call: &Call, message: &GraphInstantiate) -> Outcome<()> {
        let (graph, flags) = (message.graph, message.flags);
        let (description, held) = self.take_description(graph)?;
        let checked = closed::GRAPH_INSTANTIATE.check(flags);
        let owner = match checked.and_then(|()| self.device_of_taken(call, graph)) {
            Ok(owner) => owner,
            Err(error) => {
                self.end_taken(graph);
                return Err(error);
            }
        };
        if call.slot.is_none() {
            let result = owner.instantiate(&description, flags);
            let entered = self.instantiated(graph, owner, result);
            drop(held);
            return entered.map(Served::Done);
        }
        let outcome = self.defer(call, owner.clone(), move |device: &dyn Device| {
            let result = device.instantiate(&description, flags);
            drop(description);
            Box::new(move |session: &mut Session| {
                let entered = session.instantiated(graph, owner, result);
                drop(held);
                Answer::of(entered)
            }) as Finish
        });
        if outcome.is_err() {
            self.end_taken(graph);
        }
        outcome
    }
}

impl Session {
    /// Stores the executable graph of a description that was taken, or removes its handle.
    fn instantiated(
        &mut self,
        graph: Handle<Graph>,
        owner: SessionDevice,
        result: wormhole_device::Result<RawGraph>,
    ) -> Result<(), CuResult> {
        match result {
            Ok(raw) => {
                let graphs = &mut self.objects.graphs;
                let uses = graphs.uses_of_taken(graph);
                graphs.becomes_executable(graph, owner, raw, uses);
                Ok(())
            }
            Err(error) => {
                self.end_taken(graph);
                Err(self.failed(error))
            }
        }
    }
}

/// Effect of an update on an executable graph.
#[derive(Clone, Copy, Debug)]
enum Update {
    /// The device was not called.
    None,
    /// The device has failed, and may have set some nodes.
    Failed,
    Done,
}

/// Removes `from`. Afterwards `graph` executes the description, or, after a failure, the same as
/// before.
impl Serve<GraphUpdate> for Session {
    fn serve(&mut self, call: &Call, message: &GraphUpdate) -> Outcome<()> {
        let (graph, from) = (message.graph, message.from);
        let (description, held) = self.take_description(from)?;
        let graphs = &mut self.objects.graphs.table;
        let taken = graphs.find_mut(graph).and_then(take_executable);
        let Some((owner, raw, old_images)) = taken else {
            self.end_taken(from);
            return self.objects.graphs.table.refused(CuResult::INVALID_HANDLE);
        };
        let described = self.device_of_taken(call, from);
        let own = described.and_then(|described| self.done(described.own(&owner, ())));
        if let Err(error) = own {
            self.end_update(graph, owner, raw, from, Update::None);
            return Err(error);
        }
        let after = owner.clone();
        let outcome = self.defer(call, owner.clone(), move |device: &dyn Device| {
            let result = device.update_graph(raw, &description);
            drop(description);
            Box::new(move |session: &mut Session| {
                let update = match result {
                    Ok(()) => Update::Done,
                    Err(_) => Update::Failed,
                };
                session.end_update(graph, after, raw, from, update);
                drop((held, old_images));
                Answer::of(session.done(result))
            }) as Finish
        });
        if outcome.is_err() {
            self.end_update(graph, owner, raw, from, Update::None);
        }
        outcome
    }
}

impl Session {
    fn end_update(
        &mut self,
        graph: Handle<Graph>,
        device: SessionDevice,
        raw: RawGraph,
        from: Handle<Graph>,
        update: Update,
    ) {
        let graphs = &mut self.objects.graphs;
        let mut uses = graphs.uses_of_taken(graph);
        let mut new = graphs.uses_of_taken(from);
        match update {
            Update::None => {}
            Update::Failed => uses.0.keep_failed(&mut new.0),
            Update::Done => std::mem::swap(&mut uses, &mut new),
        }
        self.let_go_of_uses(new);
        self.end_taken(from);
        let graphs = &mut self.objects.graphs;
        graphs.becomes_executable(graph, device, raw, uses);
    }
}

impl Serve<GraphLaunch> for Session {
    fn serve(&mut self, call: &Call, message: &GraphLaunch) -> Outcome<()> {
        let stream = self.objects.stream(call, message.stream)?;
        let (device, raw, _) = self
            .objects
            .graphs
            .executable(message.graph, &self.addresses)?;
        self.done(peers::launch_graph(device, raw, stream))
            .map(Served::Done)
    }
}

impl Serve<GraphUpload> for Session {
    fn serve(&mut self, call: &Call, message: &GraphUpload) -> Outcome<()> {
        let stream = self.objects.stream(call, message.stream)?;
        let (device, raw, _) = self
            .objects
            .graphs
            .executable(message.graph, &self.addresses)?;
        self.done(peers::upload_graph(device, raw, stream))
            .map(Served::Done)
    }
}

impl Serve<GraphEnable> for Session {
    fn serve(&mut self, _: &Call, message: &GraphEnable) -> Outcome<()> {
        let (graph, node, enabled) = (message.graph, message.node, message.enabled);
        let (device, raw, nodes) = self.objects.graphs.executable(graph, &self.addresses)?;
        if node as usize >= nodes || enabled > 1 {
            return Err(CuResult::INVALID_VALUE);
        }
        self.done(device.enable_node(raw, node, enabled == 1))
            .map(Served::Done)
    }
}

impl Serve<GraphDestroy> for Session {
    fn serve(&mut self, _: &Call, message: &GraphDestroy) -> Outcome<()> {
        let graph = message.graph;
        let graphs = &mut self.objects.graphs.table;
        if let Some(GraphObject::Taken(_)) = graphs.find(graph) {
            return graphs.refused(CuResult::INVALID_HANDLE);
        }
        match graphs.remove(graph)? {
            GraphObject::Executable { device, raw, uses } => {
                let destroyed = device.destroy_graph(raw);
                self.let_go_of_uses(uses);
                self.done(destroyed)?;
            }
            GraphObject::Described { uses, .. } => self.let_go_of_uses(uses),
            GraphObject::Taken(_) | GraphObject::Ended => {}
        }
        Ok(Served::Done(()))
    }
}
