//! [`DeviceSet`].

mod sharing;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_api::array::ArrayShape;
use wormhole_api::constants::event_flags::DISABLE_TIMING;
use wormhole_api::constants::stream_flags::NON_BLOCKING;

use crate::{
    Access, Arrays, BoxCopy, BoxEnd, ClusterLaunch, CuError, Description, Device, DeviceOutput,
    EncodedTensorMap, Fill, Granularity, GraphDescription, GraphNode, Graphs, GreenContexts,
    ImageKind, Jit, Kernels, Launch, LaunchAttribute, LaunchEvents, LinkInput, LoadedFunction,
    Loading, ManagedPlace, MemoryOperation, Multiprocessors, Peer, Peers, PoolProperties, Pools,
    RawArray, RawEvent, RawFunction, RawGraph, RawGreen, RawMemory, RawMipmap, RawModule, RawPool,
    RawStream, ReferenceTo, References, Resource, Result, Sampling, Split, StreamMemory, TensorMap,
    View, VirtualMemory,
};

/// Where a handle of a set says which device it is of. No device has handles that reach up there.
const NUMBER_SHIFT: u32 = 56;
const RAW: u64 = (1 << NUMBER_SHIFT) - 1;

thread_local! {
    /// The set that the calling thread selected a device of, and the device's number.
    static CURRENT: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
}

/// Several devices of one kind behind one object. Handles say which device they are of; what names none is done
/// on the thread's current device. What is handed to a stream must be of the stream's device, memory excepted.
#[derive(Debug)]
pub struct DeviceSet {
    members: Vec<Arc<dyn Device>>,
    identity: u64,
}

/// Handles of a set: of which device, and the device's own.
trait Tagged: Copy {
    fn number(self) -> usize;
    fn of(self, number: usize) -> Result<Self>;
    fn raw(self) -> Self;
}

macro_rules! tagged {
    ($($name:ident)*) => {$(
        impl Tagged for $name {
            fn number(self) -> usize {
                usize::try_from(self.0 >> NUMBER_SHIFT).unwrap_or(usize::MAX)
            }

            fn of(self, number: usize) -> Result<Self> {
                if self.0 & !RAW != 0 {
                    return Err(CuError::NOT_SUPPORTED);
                }
                Ok(Self(self.0 | (number as u64) << NUMBER_SHIFT))
            }

            fn raw(self) -> Self {
                Self(self.0 & RAW)
            }
        }
    )*};
}

tagged!(RawStream RawEvent RawModule RawFunction RawArray RawMipmap RawGraph RawGreen RawPool
    RawMemory);

impl RawStream {
    /// The legacy default stream of one of several devices.
    #[must_use]
    pub const fn legacy_of(number: u8) -> Self {
        Self(Self::LEGACY.0 | (number as u64) << NUMBER_SHIFT)
    }
}

/// An identity that nothing else has, never 0.
fn fresh() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The device's own handle, if it is of that device.
fn own<T: Tagged>(handle: T, number: usize) -> Result<T> {
    if handle.number() == number {
        Ok(handle.raw())
    } else {
        Err(CuError::INVALID_HANDLE)
    }
}

/// What a texture of that device reads, if all of it is the device's own.
fn own_resource(resource: &Resource, number: usize) -> Result<Resource> {
    Ok(match *resource {
        Resource::Array(array) => Resource::Array(own(array, number)?),
        Resource::Mipmap(mipmap) => Resource::Mipmap(own(mipmap, number)?),
        memory => memory,
    })
}

impl DeviceSet {
    /// Most devices of a set: their numbers fit into handles.
    pub const MOST: usize = 64;

    /// A set of devices of one kind.
    ///
    /// # Panics
    /// There are none, or more than [`DeviceSet::MOST`].
    #[must_use]
    pub fn new(members: Vec<Arc<dyn Device>>) -> Self {
        assert!((1..=Self::MOST).contains(&members.len()));
        Self {
            members,
            identity: fresh(),
        }
    }

    fn current(&self) -> usize {
        match CURRENT.get() {
            (identity, number) if identity == self.identity => number,
            _ => 0,
        }
    }

    fn on(&self, number: usize) -> Result<&dyn Device> {
        let device = self.members.get(number).ok_or(CuError::INVALID_DEVICE)?;
        Ok(device.as_ref())
    }

    fn here(&self) -> Result<&dyn Device> {
        self.on(self.current())
    }

    /// The device that a handle is of, and its own handle.
    fn of<T: Tagged>(&self, handle: T) -> Result<(&dyn Device, T)> {
        Ok((self.on(handle.number())?, handle.raw()))
    }

    /// The same, with the device's number.
    fn at<T: Tagged>(&self, handle: T) -> Result<(usize, &dyn Device, T)> {
        let (device, raw) = self.of(handle)?;
        Ok((handle.number(), device, raw))
    }

    /// The device whose memory an address is of: `first`, unless that is not so.
    fn holder(&self, address: u64, first: usize) -> usize {
        let holds = |number: &usize| {
            let device = self.members.get(*number);
            device.is_some_and(|device| device.holds(address))
        };
        if holds(&first) {
            return first;
        }
        (0..self.members.len()).find(holds).unwrap_or(first)
    }

    /// Waits for all work of the devices but the first.
    fn synchronize_others(&self) -> Result<()> {
        (1..self.members.len()).try_for_each(|number| self.on(number)?.synchronize())
    }

    /// An end of a copy in its device's own terms, and the device's number: `here` for memory.
    fn end(end: BoxEnd, here: usize) -> (BoxEnd, usize) {
        match end {
            BoxEnd::Array { array, origin } => {
                let own = BoxEnd::Array {
                    array: RawArray::raw(array),
                    origin,
                };
                (own, array.number())
            }
            memory @ BoxEnd::Memory { .. } => (memory, here),
        }
    }

    /// The copy in the devices' own terms, and the devices that its ends are of.
    fn box_copy(copy: &BoxCopy, here: usize) -> (BoxCopy, [usize; 2]) {
        let (to, to_device) = Self::end(copy.to, here);
        let (from, from_device) = Self::end(copy.from, here);
        let extent = copy.extent;
        (BoxCopy { to, from, extent }, [to_device, from_device])
    }

    /// Work of one device in the place of a stream of another: `work` is handed the stream that stands for it.
    fn in_place_of(
        &self,
        stream: RawStream,
        number: usize,
        work: impl FnOnce(&dyn Device, RawStream) -> Result<()>,
    ) -> Result<()> {
        let (waiting, _, own) = self.at(stream)?;
        self.with_event(waiting, |before| {
            self.on(waiting)?.record_event(before, own, 0)?;
            self.with_event(number, |after| {
                let device = self.on(number)?;
                let there = device.create_stream(NON_BLOCKING, 0)?;
                let done = device
                    .wait_event(there, before, 0)
                    .and_then(|()| work(device, there))
                    .and_then(|()| device.record_event(after, there, 0));
                let gone = device.destroy_stream(there);
                done.and(gone)?;
                self.on(waiting)?.wait_event(own, after, 0)
            })
        })
    }

    /// A device has an event for as long as `work` lasts.
    fn with_event(&self, number: usize, work: impl FnOnce(RawEvent) -> Result<()>) -> Result<()> {
        let event = self.on(number)?.create_event(DISABLE_TIMING)?;
        let done = work(event);
        let gone = self
            .on(number)
            .and_then(|device| device.destroy_event(event));
        done.and(gone)
    }

    /// The graph in the terms of the device that it is of: that of its first kernel. What is of others is not
    /// supported.
    fn graph(&self, graph: &GraphDescription) -> Result<(usize, GraphDescription)> {
        let first = graph.nodes.iter().find_map(|node| match node {
            GraphNode::Kernel(kernel) => Some(kernel.function.number()),
            _ => None,
        });
        let number = first.unwrap_or_else(|| self.current());
        let nodes = graph.nodes.iter().map(|node| {
            Ok(match node {
                GraphNode::Kernel(kernel) => {
                    let mut kernel = kernel.clone();
                    kernel.function =
                        own(kernel.function, number).map_err(|_| CuError::NOT_SUPPORTED)?;
                    GraphNode::Kernel(kernel)
                }
                GraphNode::Copy(copy) => {
                    let (copy, devices) = Self::box_copy(copy, number);
                    if devices != [number; 2] {
                        return Err(CuError::NOT_SUPPORTED);
                    }
                    GraphNode::Copy(copy)
                }
                GraphNode::RecordEvent(event) => {
                    GraphNode::RecordEvent(own(*event, number).map_err(|_| CuError::NOT_SUPPORTED)?)
                }
                GraphNode::WaitEvent(event) => {
                    GraphNode::WaitEvent(own(*event, number).map_err(|_| CuError::NOT_SUPPORTED)?)
                }
                other => other.clone(),
            })
        });
        let description = GraphDescription {
            nodes: nodes.collect::<Result<_>>()?,
            edges: graph.edges.clone(),
            conditions: graph.conditions.clone(),
            bodies: graph.bodies.clone(),
        };
        Ok((number, description))
    }

    fn peer(&self, peer: Peer) -> Result<Peer> {
        let number = usize::try_from(peer.ordinal).map_err(|_| CuError::INVALID_DEVICE)?;
        let peer = self.members.get(number).ok_or(CuError::INVALID_DEVICE)?;
        Ok(peer.as_peer())
    }
}

/// A set's peers are its members, by their numbers.
impl Peers for DeviceSet {
    fn members(&self) -> &[Arc<dyn Device>] {
        &self.members
    }

    fn select(&self, number: usize) -> Result<()> {
        if number >= self.members.len() {
            return Err(CuError::INVALID_DEVICE);
        }
        CURRENT.set((self.identity, number));
        Ok(())
    }

    fn as_peer(&self) -> Peer {
        Peer {
            ordinal: i32::try_from(self.current()).unwrap_or(0),
            context: 0,
        }
    }

    fn peer_attribute(&self, peer: Peer, attribute: u32) -> Result<i32> {
        let peer = self.peer(peer)?;
        self.here()?.peer_attribute(peer, attribute)
    }

    fn enable_peer(&self, peer: Peer) -> Result<()> {
        let peer = self.peer(peer)?;
        self.here()?.enable_peer(peer)
    }

    fn disable_peer(&self, peer: Peer) -> Result<()> {
        let peer = self.peer(peer)?;
        self.here()?.disable_peer(peer)
    }

    /// A set's copies know of what device each array is.
    fn copy_between(&self, copy: &BoxCopy, _: Peer, _: Peer, stream: RawStream) -> Result<()> {
        self.copy_box(copy, stream)
    }

    fn set_pool_access(&self, pool: RawPool, peer: Peer, access: Access) -> Result<()> {
        let peer = self.peer(peer)?;
        let (device, pool) = self.of(pool)?;
        device.set_pool_access(pool, peer, access)
    }
}

impl Device for DeviceSet {
    fn describe(&self) -> &Description {
        self.members[0].describe()
    }

    fn health(&self, probe: &[RawStream]) -> Option<CuError> {
        self.members
            .iter()
            .enumerate()
            .find_map(|(number, device)| {
                let own = probe.iter().filter(|stream| stream.number() == number);
                let own: Vec<RawStream> = own.map(|stream| stream.raw()).collect();
                device.health(&own)
            })
    }

    fn queues(&self) -> Vec<String> {
        let members = self.members.iter().enumerate();
        let lines = members.flat_map(|(number, device)| {
            let lines = device.queues().into_iter();
            lines.map(move |line| format!("device {number}: {line}"))
        });
        lines.collect()
    }

    fn take_output(&self) -> DeviceOutput {
        let mut all = DeviceOutput::default();
        for device in &self.members {
            let text = device.take_output();
            all.stdout.extend(text.stdout);
            all.stderr.extend(text.stderr);
        }
        all
    }

    fn memory_info(&self) -> Result<(u64, u64)> {
        self.here()?.memory_info()
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        self.here()?.allocate(bytes)
    }

    fn free(&self, address: u64) -> Result<()> {
        self.on(self.holder(address, self.current()))?.free(address)
    }

    /// What the first device registers every device reaches.
    unsafe fn register(&self, address: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.on(0)?.register(address, bytes) }
    }

    /// The others may reach the range until they are found idle, and may have begun to before its registration
    /// ended.
    fn unregister(&self, address: u64) -> Result<()> {
        let idle = self.synchronize_others();
        self.on(0)?.unregister(address)?;
        idle.and_then(|()| self.synchronize_others())
    }

    fn copy(&self, destination: u64, source: u64, bytes: u64, stream: RawStream) -> Result<()> {
        let (device, stream) = self.of(stream)?;
        device.copy(destination, source, bytes, stream)
    }

    fn write(&self, destination: u64, data: &[u8], stream: RawStream) -> Result<()> {
        let (device, stream) = self.of(stream)?;
        device.write(destination, data, stream)
    }

    fn fill(&self, fill: Fill, stream: RawStream) -> Result<()> {
        let (device, stream) = self.of(stream)?;
        device.fill(fill, stream)
    }

    fn create_stream(&self, flags: u32, priority: i32) -> Result<RawStream> {
        self.here()?
            .create_stream(flags, priority)?
            .of(self.current())
    }

    fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        let (device, stream) = self.of(stream)?;
        device.destroy_stream(stream)
    }

    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        let (device, stream) = self.of(stream)?;
        device.query_stream(stream)
    }

    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        let (device, stream) = self.of(stream)?;
        device.synchronize_stream(stream)
    }

    fn synchronize(&self) -> Result<()> {
        self.here()?.synchronize()
    }

    /// The event may be of another device.
    fn wait_event(&self, stream: RawStream, event: RawEvent, flags: u32) -> Result<()> {
        let (device, stream) = self.of(stream)?;
        device.wait_event(stream, event.raw(), flags)
    }

    fn write_fence(&self, stream: RawStream, address: u64, value: u64) -> Result<()> {
        let (device, stream) = self.of(stream)?;
        device.write_fence(stream, address, value)
    }

    fn create_event(&self, flags: u32) -> Result<RawEvent> {
        self.here()?.create_event(flags)?.of(self.current())
    }

    fn destroy_event(&self, event: RawEvent) -> Result<()> {
        let (device, event) = self.of(event)?;
        device.destroy_event(event)
    }

    fn record_event(&self, event: RawEvent, stream: RawStream, flags: u32) -> Result<()> {
        let (number, device, stream) = self.at(stream)?;
        device.record_event(own(event, number)?, stream, flags)
    }

    fn query_event(&self, event: RawEvent) -> Result<bool> {
        let (device, event) = self.of(event)?;
        device.query_event(event)
    }

    fn synchronize_event(&self, event: RawEvent) -> Result<()> {
        let (device, event) = self.of(event)?;
        device.synchronize_event(event)
    }

    fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<f32> {
        let (number, device, start) = self.at(start)?;
        device.elapsed(start, own(end, number)?)
    }

    fn try_link(&self, inputs: &[LinkInput<'_>], jit: &mut Jit) -> Result<()> {
        self.here()?.try_link(inputs, jit)
    }

    fn link(&self, inputs: &[LinkInput<'_>], jit: &mut Jit) -> Result<Vec<u8>> {
        self.here()?.link(inputs, jit)
    }

    fn load(
        &self,
        image: &[u8],
        kind: ImageKind,
        jit: &mut Jit,
        place: Option<ManagedPlace>,
    ) -> Result<Loading> {
        let mut loading = self.here()?.load(image, kind, jit, place)?;
        if let Loading::Done(loaded) = &mut loading {
            loaded.module = loaded.module.of(self.current())?;
        }
        Ok(loading)
    }

    fn unload(&self, module: RawModule) -> Result<()> {
        let (device, module) = self.of(module)?;
        device.unload(module)
    }

    fn function(&self, module: RawModule, name: &str) -> Result<LoadedFunction> {
        let (number, device, module) = self.at(module)?;
        let mut found = device.function(module, name)?;
        found.function = found.function.of(number)?;
        Ok(found)
    }

    fn global(&self, module: RawModule, name: &str) -> Result<(u64, u64)> {
        let (device, module) = self.of(module)?;
        device.global(module, name)
    }

    fn function_attribute(&self, function: RawFunction, attribute: i32) -> Result<i32> {
        let (device, function) = self.of(function)?;
        device.function_attribute(function, attribute)
    }

    fn set_function_attribute(
        &self,
        function: RawFunction,
        attribute: i32,
        value: i32,
    ) -> Result<()> {
        let (device, function) = self.of(function)?;
        device.set_function_attribute(function, attribute, value)
    }

    fn set_cache_config(&self, function: RawFunction, config: u32) -> Result<()> {
        let (device, function) = self.of(function)?;
        device.set_cache_config(function, config)
    }

    fn occupancy(&self, function: RawFunction, block: u32, shared: u64, flags: u32) -> Result<i32> {
        let (device, function) = self.of(function)?;
        device.occupancy(function, block, shared, flags)
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        let (number, device, stream) = self.at(launch.stream)?;
        let own_event = |event: Option<RawEvent>| event.map(|event| own(event, number)).transpose();
        device.launch(&Launch {
            function: own(launch.function, number)?,
            events: LaunchEvents {
                programmatic: own_event(launch.events.programmatic)?,
                begun: own_event(launch.events.begun)?,
                ..launch.events
            },
            stream,
            ..*launch
        })
    }

    fn limit(&self, limit: u32) -> Result<u64> {
        self.here()?.limit(limit)
    }

    fn set_limit(&self, limit: u32, value: u64) -> Result<()> {
        self.here()?.set_limit(limit, value)
    }

    /// Every device's context.
    fn reset(&self) -> Result<()> {
        self.on(0)?.synchronize()?;
        self.synchronize_others()?;
        self.members.iter().try_for_each(|device| device.reset())
    }
}

impl StreamMemory for DeviceSet {
    fn memory_operations(&self, stream: RawStream, operations: &[MemoryOperation]) -> Result<()> {
        let (device, stream) = self.of(stream)?;
        device.memory_operations(stream, operations)
    }

    fn set_stream_attribute(&self, stream: RawStream, attribute: &LaunchAttribute) -> Result<()> {
        let (device, stream) = self.of(stream)?;
        device.set_stream_attribute(stream, attribute)
    }
}

impl Kernels for DeviceSet {
    fn kernel_names(&self, module: RawModule) -> Result<Vec<String>> {
        let (device, module) = self.of(module)?;
        device.kernel_names(module)
    }

    fn available_shared(&self, function: RawFunction, blocks: i32, block: i32) -> Result<u64> {
        let (device, function) = self.of(function)?;
        device.available_shared(function, blocks, block)
    }

    fn greatest_cluster(&self, launch: &ClusterLaunch<'_>) -> Result<i32> {
        let (device, function) = self.of(launch.function)?;
        device.greatest_cluster(&ClusterLaunch {
            function,
            ..*launch
        })
    }

    fn active_clusters(&self, launch: &ClusterLaunch<'_>) -> Result<i32> {
        let (device, function) = self.of(launch.function)?;
        device.active_clusters(&ClusterLaunch {
            function,
            ..*launch
        })
    }

    fn encode_tensor_map(&self, map: &TensorMap) -> Result<EncodedTensorMap> {
        self.here()?.encode_tensor_map(map)
    }

    fn replace_tensor_address(
        &self,
        map: EncodedTensorMap,
        address: u64,
    ) -> Result<EncodedTensorMap> {
        self.here()?.replace_tensor_address(map, address)
    }

    fn reset_persisting_l2(&self) -> Result<()> {
        self.here()?.reset_persisting_l2()
    }
}

impl Pools for DeviceSet {
    fn default_pool(&self) -> Result<RawPool> {
        self.here()?.default_pool()?.of(self.current())
    }

    fn create_pool(&self, properties: &PoolProperties) -> Result<RawPool> {
        self.here()?.create_pool(properties)?.of(self.current())
    }

    fn destroy_pool(&self, pool: RawPool) -> Result<()> {
        let (device, pool) = self.of(pool)?;
        device.destroy_pool(pool)
    }

    fn trim_pool(&self, pool: RawPool, keep: u64) -> Result<()> {
        let (device, pool) = self.of(pool)?;
        device.trim_pool(pool, keep)
    }

    fn pool_attribute(&self, pool: RawPool, attribute: u32) -> Result<u64> {
        let (device, pool) = self.of(pool)?;
        device.pool_attribute(pool, attribute)
    }

    fn set_pool_attribute(&self, pool: RawPool, attribute: u32, value: u64) -> Result<()> {
        let (device, pool) = self.of(pool)?;
        device.set_pool_attribute(pool, attribute, value)
    }

    /// For a stream of another device the pool's own gets the memory first.
    fn allocate_async(&self, pool: RawPool, bytes: u64, stream: RawStream) -> Result<u64> {
        let (number, device, pool) = self.at(pool)?;
        if let Ok(stream) = own(stream, number) {
            return device.allocate_async(pool, bytes, stream);
        }
        let address = device.allocate_async(pool, bytes, RawStream::LEGACY)?;
        device.synchronize_stream(RawStream::LEGACY)?;
        Ok(address)
    }

    /// Memory of another device is freed there, behind the work of the stream.
    fn free_async(&self, address: u64, whole: RawStream) -> Result<()> {
        let (number, device, stream) = self.at(whole)?;
        let holder = self.holder(address, number);
        if holder == number {
            return device.free_async(address, stream);
        }
        self.in_place_of(whole, holder, |device, stream| {
            device.free_async(address, stream)
        })
    }
}

impl VirtualMemory for DeviceSet {
    fn granularity(&self) -> Result<Granularity> {
        self.here()?.granularity()
    }

    fn reserve(&self, bytes: u64, alignment: u64, hint: u64) -> Result<u64> {
        self.here()?.reserve(bytes, alignment, hint)
    }

    fn unreserve(&self, address: u64, bytes: u64) -> Result<()> {
        self.here()?.unreserve(address, bytes)
    }

    fn create_memory(&self, bytes: u64, handle_types: u32) -> Result<RawMemory> {
        self.here()?
            .create_memory(bytes, handle_types)?
            .of(self.current())
    }

    fn release_memory(&self, memory: RawMemory) -> Result<()> {
        let (device, memory) = self.of(memory)?;
        device.release_memory(memory)
    }

    fn map(&self, address: u64, bytes: u64, memory: RawMemory) -> Result<()> {
        let (device, memory) = self.of(memory)?;
        device.map(address, bytes, memory)
    }

    fn unmap(&self, address: u64, bytes: u64) -> Result<()> {
        self.here()?.unmap(address, bytes)
    }

    /// What the current device may do with memory of whichever device is mapped there.
    fn set_access(&self, address: u64, bytes: u64, access: Access) -> Result<()> {
        self.here()?.set_access(address, bytes, access)
    }
}

impl Graphs for DeviceSet {
    fn instantiate(&self, graph: &GraphDescription, flags: u64) -> Result<RawGraph> {
        let (number, graph) = self.graph(graph)?;
        self.on(number)?.instantiate(&graph, flags)?.of(number)
    }

    fn update_graph(&self, executable: RawGraph, graph: &GraphDescription) -> Result<()> {
        let (number, graph) = self.graph(graph)?;
        self.on(number)?
            .update_graph(own(executable, number)?, &graph)
    }

    /// The stream may be of another device.
    fn launch_graph(&self, executable: RawGraph, whole: RawStream) -> Result<()> {
        let (number, device, stream) = self.at(whole)?;
        let raw = executable.raw();
        if number == executable.number() {
            return device.launch_graph(raw, stream);
        }
        self.in_place_of(whole, executable.number(), |device, stream| {
            device.launch_graph(raw, stream)
        })
    }

    fn upload_graph(&self, executable: RawGraph, whole: RawStream) -> Result<()> {
        let (number, device, stream) = self.at(whole)?;
        let raw = executable.raw();
        if number == executable.number() {
            return device.upload_graph(raw, stream);
        }
        self.in_place_of(whole, executable.number(), |device, stream| {
            device.upload_graph(raw, stream)
        })
    }

    fn destroy_graph(&self, executable: RawGraph) -> Result<()> {
        let (device, executable) = self.of(executable)?;
        device.destroy_graph(executable)
    }

    fn enable_node(&self, executable: RawGraph, node: u32, enabled: bool) -> Result<()> {
        let (device, executable) = self.of(executable)?;
        device.enable_node(executable, node, enabled)
    }
}

impl Arrays for DeviceSet {
    fn create_array(&self, shape: &ArrayShape) -> Result<RawArray> {
        self.here()?.create_array(shape)?.of(self.current())
    }

    fn destroy_array(&self, array: RawArray) -> Result<()> {
        let (device, array) = self.of(array)?;
        device.destroy_array(array)
    }

    fn create_mipmap(&self, shape: &ArrayShape, levels: u32) -> Result<RawMipmap> {
        self.here()?
            .create_mipmap(shape, levels)?
            .of(self.current())
    }

    fn destroy_mipmap(&self, mipmap: RawMipmap) -> Result<()> {
        let (device, mipmap) = self.of(mipmap)?;
        device.destroy_mipmap(mipmap)
    }

    fn mipmap_level(&self, mipmap: RawMipmap, level: u32) -> Result<RawArray> {
        let (number, device, mipmap) = self.at(mipmap)?;
        device.mipmap_level(mipmap, level)?.of(number)
    }

    /// On the current device.
    fn create_texture(
        &self,
        resource: &Resource,
        sampling: &Sampling,
        view: Option<&View>,
    ) -> Result<u64> {
        let resource = own_resource(resource, self.current())?;
        self.here()?.create_texture(&resource, sampling, view)
    }

    fn destroy_texture(&self, texture: u64) -> Result<()> {
        self.here()?.destroy_texture(texture)
    }

    /// On the current device.
    fn create_surface(&self, array: RawArray) -> Result<u64> {
        let array = own(array, self.current())?;
        self.here()?.create_surface(array)
    }

    fn destroy_surface(&self, surface: u64) -> Result<()> {
        self.here()?.destroy_surface(surface)
    }

    fn copy_box(&self, copy: &BoxCopy, stream: RawStream) -> Result<()> {
        let (number, device, stream) = self.at(stream)?;
        let (copy, devices) = Self::box_copy(copy, number);
        if devices == [number; 2] {
            return device.copy_box(&copy, stream);
        }
        let of = |number: usize| self.members.get(number).map(|member| member.as_peer());
        let [to, from] = devices.map(|number| of(number).ok_or(CuError::INVALID_HANDLE));
        device.copy_between(&copy, to?, from?, stream)
    }
}

impl References for DeviceSet {
    fn find_reference(&self, module: RawModule, name: &str, kind: ReferenceTo) -> Result<()> {
        let (device, module) = self.of(module)?;
        device.find_reference(module, name, kind)
    }

    fn bind_texture(
        &self,
        module: RawModule,
        name: &str,
        resource: Option<&Resource>,
        sampling: &Sampling,
    ) -> Result<()> {
        let (number, device, module) = self.at(module)?;
        let resource = resource
            .map(|resource| own_resource(resource, number))
            .transpose()?;
        device.bind_texture(module, name, resource.as_ref(), sampling)
    }

    fn bind_surface(&self, module: RawModule, name: &str, array: RawArray) -> Result<()> {
        let (number, device, module) = self.at(module)?;
        device.bind_surface(module, name, own(array, number)?)
    }
}

impl GreenContexts for DeviceSet {
    /// Of the current device, if none is named.
    fn multiprocessors(&self, green: Option<RawGreen>) -> Result<Multiprocessors> {
        match green {
            Some(green) => {
                let (device, green) = self.of(green)?;
                device.multiprocessors(Some(green))
            }
            None => self.here()?.multiprocessors(None),
        }
    }

    fn split(&self, from: &Multiprocessors, flags: u32, least: u32, groups: u32) -> Result<Split> {
        self.here()?.split(from, flags, least, groups)
    }

    fn create_green(&self, parts: &[Multiprocessors]) -> Result<RawGreen> {
        self.here()?.create_green(parts)?.of(self.current())
    }

    fn destroy_green(&self, green: RawGreen) -> Result<()> {
        let (device, green) = self.of(green)?;
        device.destroy_green(green)
    }

    fn green_stream(&self, green: RawGreen, flags: u32, priority: i32) -> Result<RawStream> {
        let (number, device, green) = self.at(green)?;
        device.green_stream(green, flags, priority)?.of(number)
    }
}
