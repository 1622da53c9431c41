//! The messages of the API table, each handed to what executes it.

use wormhole_api::{
    ArrayCreate, ArrayDestroy, Attribute, AvailableShared, AvailableSharedReply, BoxCopy,
    ClusterOccupancy, ClusterOccupancyReply, ContextGetLimit, ContextGetLimitReply, ContextReset,
    ContextSetLimit, ContextSetLimitReply, DeviceDescribe, DeviceDescribeReply, EventCreate,
    EventDestroy, EventElapsed, EventElapsedReply, EventQuery, EventRecord, EventSynchronize,
    FenceWrite, FunctionGetAttribute, FunctionGetAttributeReply, FunctionSetAttribute,
    FunctionSetCacheConfig, Items, LaunchKernel, LibraryGetGlobal, LibraryGetGlobalReply,
    LibraryGetKernel, LibraryGetKernelReply, LibraryGetModule, LibraryKernels, LibraryKernelsReply,
    LibraryLoad, LibraryLoadReply, LibraryUnload, Link, LinkReply, MemAlloc, MemAllocReply,
    MemCopy, MemFree, MemGetInfo, MemGetInfoReply, MemSet, MemWrite, MipmapCreate, MipmapDestroy,
    MipmapGetLevel, ModuleGetFunction, ModuleGetFunctionReply, ModuleGetGlobal,
    ModuleGetGlobalReply, ModuleKernels, ModuleKernelsReply, ModuleLoad, ModuleLoadReply,
    ModuleUnload, Occupancy, OccupancyReply, Outcome, ResetPersistingL2, Service, StreamCreate,
    StreamDestroy, StreamMemory, StreamQuery, StreamSetAttribute, StreamWaitEvent, SurfaceCreate,
    SurfaceCreateReply, SurfaceDestroy, Synchronize, SynchronizeReply, TakeOutput, TakeOutputReply,
    TensorMapEncode, TensorMapEncodeReply, TensorMapReplace, TensorMapReplaceReply, TextureCreate,
    TextureCreateReply, TextureDestroy,
};
// Several devices.
use wormhole_api::{PeerAttribute, PeerAttributeReply, PeerDisable, PeerEnable, PoolSetAccess};
// Pools and virtual memory.
use wormhole_api::{
    AddressFree, AddressReserve, AddressReserveReply, MemCreate, MemGranularity,
    MemGranularityReply, MemMap, MemRelease, MemSetAccess, MemUnmap, PoolAlloc, PoolAllocReply,
    PoolCreate, PoolDefault, PoolDestroy, PoolFree, PoolGetAttribute, PoolGetAttributeReply,
    PoolSetAttribute, PoolTrim,
};
use wormhole_api::{
    CloseAllocation, FileMap, FileUnmap, OpenAllocation, OpenAllocationReply, OpenEvent,
    OpenMemory, OpenMemoryReply, OpenPointer, OpenPointerReply, OpenPool, ShareAddress,
    ShareAddressReply, ShareEvent, ShareEventReply, ShareMemory, ShareMemoryReply, SharePool,
    SharePoolReply, SharedEventCreate,
};
use wormhole_api::{
    GraphBegin, GraphBody, GraphCondition, GraphConditional, GraphCopy, GraphDestroy, GraphEdges,
    GraphEmpty, GraphEnable, GraphEvent, GraphFill, GraphInstantiate, GraphKernel, GraphLaunch,
    GraphMemory, GraphUpdate, GraphUpload,
};
use wormhole_api::{
    GreenCreate, GreenCreateReply, GreenDescribe, GreenDescribeReply, GreenDestroy, GreenSplit,
    GreenSplitReply, GreenStream,
};
use wormhole_api::{ReferenceBindSurface, ReferenceBindTexture, ReferenceFind};
use wormhole_device::{CuError, Description, ManagedPlace};

use super::images::{ImageHandle, Incoming};
use super::{Answer, Call, Session, to_result};

/// The device's description, as it goes into an answer.
#[derive(Debug)]
pub(super) struct Described {
    reply: DeviceDescribeReply<'static>,
    name: Vec<u8>,
    attributes: Vec<Attribute>,
}

impl Described {
    pub fn new(description: &Description) -> Self {
        let mut name = description.name.clone().into_bytes();
        name.truncate(255);
        Self {
            reply: DeviceDescribeReply {
                devices: 1,
                driver_version: description.driver_version,
                total_memory: description.total_memory,
                uuid: description.uuid,
                least_priority: description.stream_priorities.0,
                greatest_priority: description.stream_priorities.1,
                name: &[],
                attributes: Items::new(&[]),
            },
            name,
            attributes: description
                .attributes
                .iter()
                .take(256)
                .map(|&(id, value)| Attribute { id, value })
                .collect(),
        }
    }

    pub fn total_memory(&self) -> u64 {
        self.reply.total_memory
    }
}

impl Service for Session {
    type Call = Call;

    fn device_describe<'s>(
        &'s mut self,
        _: &Call,
        message: &DeviceDescribe,
    ) -> Outcome<DeviceDescribeReply<'s>> {
        let devices = u32::try_from(self.descriptions.len()).unwrap_or(u32::MAX);
        let found = usize::try_from(message.ordinal);
        let Some(found) = found.ok().and_then(|at| self.descriptions.get(at)) else {
            return Outcome::Failed(to_result(CuError::INVALID_DEVICE));
        };
        Outcome::Done(DeviceDescribeReply {
            devices,
            name: &found.name,
            attributes: Items::new(&found.attributes),
            ..found.reply
        })
    }

    fn mem_get_info(&mut self, call: &Call, _: &MemGetInfo) -> Outcome<MemGetInfoReply> {
        let on = self.on;
        self.ask(
            call,
            |device| device.memory_info(),
            move |session, (free, total)| {
                // What the device has left would tell what the neighbours allocate, and when.
                let free = if session.counters.has_neighbours() {
                    total.saturating_sub(session.held_on(on))
                } else {
                    free
                };
                Answer::reply(&MemGetInfoReply { free, total })
            },
        )
    }

    fn mem_alloc(&mut self, call: &Call, message: &MemAlloc) -> Outcome<MemAllocReply> {
        self.allocate(call, message.bytes)
    }

    fn mem_free(&mut self, call: &Call, message: &MemFree) -> Outcome<()> {
        self.free(call, message.address.0)
    }

    fn mem_write(&mut self, _: &Call, message: &MemWrite<'_>) -> Outcome<()> {
        self.write(message).into()
    }

    fn mem_copy(&mut self, _: &Call, message: &MemCopy) -> Outcome<()> {
        self.copy(message).into()
    }

    fn mem_set(&mut self, _: &Call, message: &MemSet) -> Outcome<()> {
        self.fill(message).into()
    }

    fn pool_create(&mut self, call: &Call, message: &PoolCreate) -> Outcome<()> {
        self.create_pool(call, message)
    }

    fn pool_default(&mut self, call: &Call, message: &PoolDefault) -> Outcome<()> {
        self.default_pool(call, message)
    }

    fn pool_destroy(&mut self, call: &Call, message: &PoolDestroy) -> Outcome<()> {
        self.destroy_pool(call, message.pool)
    }

    fn pool_trim(&mut self, call: &Call, message: &PoolTrim) -> Outcome<()> {
        self.trim_pool(call, message.pool, message.keep)
    }

    fn pool_get_attribute(
        &mut self,
        call: &Call,
        message: &PoolGetAttribute,
    ) -> Outcome<PoolGetAttributeReply> {
        self.pool_attribute(call, message.pool, message.attribute)
    }

    fn pool_set_attribute(&mut self, call: &Call, message: &PoolSetAttribute) -> Outcome<()> {
        self.set_pool_attribute(call, message.pool, message.attribute, message.value)
    }

    fn pool_alloc(&mut self, call: &Call, message: &PoolAlloc) -> Outcome<PoolAllocReply> {
        self.allocate_async(call, message)
    }

    fn pool_free(&mut self, _: &Call, message: &PoolFree) -> Outcome<()> {
        self.free_async(message).into()
    }

    fn peer_attribute(
        &mut self,
        call: &Call,
        message: &PeerAttribute,
    ) -> Outcome<PeerAttributeReply> {
        Session::peer_attribute(self, call, message.peer, message.attribute)
    }

    fn peer_enable(&mut self, call: &Call, message: &PeerEnable) -> Outcome<()> {
        self.enable_peer(call, message.peer)
    }

    fn peer_disable(&mut self, call: &Call, message: &PeerDisable) -> Outcome<()> {
        self.disable_peer(call, message.peer)
    }

    fn pool_set_access(&mut self, call: &Call, message: &PoolSetAccess) -> Outcome<()> {
        self.set_pool_access(call, message)
    }

    fn mem_granularity(&mut self, call: &Call, _: &MemGranularity) -> Outcome<MemGranularityReply> {
        self.granularity(call)
    }

    fn address_reserve(
        &mut self,
        call: &Call,
        message: &AddressReserve,
    ) -> Outcome<AddressReserveReply> {
        self.reserve(call, message)
    }

    fn address_free(&mut self, call: &Call, message: &AddressFree) -> Outcome<()> {
        self.unreserve(call, message.address.0, message.bytes)
    }

    fn share_address(&mut self, call: &Call, message: &ShareAddress) -> Outcome<ShareAddressReply> {
        Self::share_address(self, call, message)
    }

    fn open_allocation(
        &mut self,
        call: &Call,
        message: &OpenAllocation,
    ) -> Outcome<OpenAllocationReply> {
        Self::open_allocation(self, call, message.token)
    }

    fn close_allocation(&mut self, call: &Call, message: &CloseAllocation) -> Outcome<()> {
        Self::close_allocation(self, call, message.address.0)
    }

    fn file_map(&mut self, call: &Call, message: &FileMap) -> Outcome<()> {
        self.map_file(call, message)
    }

    fn file_unmap(&mut self, call: &Call, message: &FileUnmap) -> Outcome<()> {
        self.unmap_file(call, message.address.0)
    }

    fn share_event(&mut self, call: &Call, message: &ShareEvent) -> Outcome<ShareEventReply> {
        Self::share_event(self, call, message.event)
    }

    fn shared_event_create(&mut self, call: &Call, message: &SharedEventCreate) -> Outcome<()> {
        self.create_shared_event(call, message.new)
    }

    fn open_event(&mut self, call: &Call, message: &OpenEvent) -> Outcome<()> {
        Self::open_event(self, call, message.new, message.token)
    }

    fn share_memory(&mut self, call: &Call, message: &ShareMemory) -> Outcome<ShareMemoryReply> {
        Self::share_memory(self, call, message.memory)
    }

    fn open_memory(&mut self, call: &Call, message: &OpenMemory) -> Outcome<OpenMemoryReply> {
        Self::open_memory(self, call, message.new, message.token)
    }

    fn share_pool(&mut self, call: &Call, message: &SharePool) -> Outcome<SharePoolReply> {
        Self::share_pool(self, call, message.pool)
    }

    fn open_pool(&mut self, call: &Call, message: &OpenPool) -> Outcome<()> {
        Self::open_pool(self, call, message.new, message.token)
    }

    fn open_pointer(&mut self, call: &Call, message: &OpenPointer) -> Outcome<OpenPointerReply> {
        Self::open_pointer(self, call, message)
    }

    fn mem_create(&mut self, call: &Call, message: &MemCreate) -> Outcome<()> {
        self.create_memory(call, message)
    }

    fn mem_release(&mut self, call: &Call, message: &MemRelease) -> Outcome<()> {
        self.release_memory(call, message.memory)
    }

    fn mem_map(&mut self, call: &Call, message: &MemMap) -> Outcome<()> {
        self.map(call, message.address.0, message.memory)
    }

    fn mem_unmap(&mut self, call: &Call, message: &MemUnmap) -> Outcome<()> {
        self.unmap(call, message.address.0, message.bytes)
    }

    fn mem_set_access(&mut self, call: &Call, message: &MemSetAccess) -> Outcome<()> {
        self.set_access(call, message)
    }

    fn stream_create(&mut self, _: &Call, message: &StreamCreate) -> Outcome<()> {
        self.create_stream(message.new, message.flags, message.priority)
            .into()
    }

    fn stream_destroy(&mut self, _: &Call, message: &StreamDestroy) -> Outcome<()> {
        self.destroy_stream(message.stream).into()
    }

    fn stream_query(&mut self, _: &Call, message: &StreamQuery) -> Outcome<()> {
        self.query_stream(message.stream).into()
    }

    fn stream_wait_event(&mut self, _: &Call, message: &StreamWaitEvent) -> Outcome<()> {
        self.wait_event(message).into()
    }

    fn stream_memory(&mut self, _: &Call, message: &StreamMemory<'_>) -> Outcome<()> {
        self.memory_operations(message).into()
    }

    fn stream_set_attribute(&mut self, _: &Call, message: &StreamSetAttribute) -> Outcome<()> {
        self.set_stream_attribute(message).into()
    }

    fn fence_write(&mut self, _: &Call, message: &FenceWrite) -> Outcome<()> {
        self.write_fence(message.stream, message.fence, message.value)
            .into()
    }

    fn synchronize<'s>(
        &'s mut self,
        call: &Call,
        message: &Synchronize,
    ) -> Outcome<SynchronizeReply<'s>> {
        Session::synchronize(self, call, message.stream)
    }

    fn event_create(&mut self, _: &Call, message: &EventCreate) -> Outcome<()> {
        self.create_event(message.new, message.flags).into()
    }

    fn event_record(&mut self, _: &Call, message: &EventRecord) -> Outcome<()> {
        self.record_event(message).into()
    }

    fn event_query(&mut self, _: &Call, message: &EventQuery) -> Outcome<()> {
        self.query_event(message.event).into()
    }

    fn event_synchronize(&mut self, call: &Call, message: &EventSynchronize) -> Outcome<()> {
        self.synchronize_event(call, message.event)
    }

    fn event_elapsed(&mut self, _: &Call, message: &EventElapsed) -> Outcome<EventElapsedReply> {
        self.elapsed(message).into()
    }

    fn event_destroy(&mut self, _: &Call, message: &EventDestroy) -> Outcome<()> {
        self.destroy_event(message.event).into()
    }

    fn module_load(&mut self, call: &Call, message: &ModuleLoad<'_>) -> Outcome<ModuleLoadReply> {
        let image = Incoming {
            address: message.image.0,
            bytes: message.bytes,
            log: message.log.0,
            log_bytes: message.log_bytes,
            place: ManagedPlace {
                address: message.place.0,
                bytes: message.place_bytes,
            },
            keep: message.keep != 0,
            options: &message.options,
        };
        self.load(call, ImageHandle::Module(message.new), &image)
    }

    fn module_unload(&mut self, call: &Call, message: &ModuleUnload) -> Outcome<()> {
        self.unload(call, ImageHandle::Module(message.module))
    }

    fn module_get_function<'s>(
        &'s mut self,
        call: &Call,
        message: &ModuleGetFunction<'_>,
    ) -> Outcome<ModuleGetFunctionReply<'s>> {
        let image = ImageHandle::Module(message.module);
        self.find_function(call, image, message.new, message.name)
    }

    fn module_get_global(
        &mut self,
        call: &Call,
        message: &ModuleGetGlobal<'_>,
    ) -> Outcome<ModuleGetGlobalReply> {
        self.find_global(call, ImageHandle::Module(message.module), message.name)
    }

    fn link(&mut self, call: &Call, message: &Link<'_>) -> Outcome<LinkReply> {
        Session::link(self, call, message)
    }

    fn library_load(
        &mut self,
        call: &Call,
        message: &LibraryLoad<'_>,
    ) -> Outcome<LibraryLoadReply> {
        let image = Incoming {
            address: message.image.0,
            bytes: message.bytes,
            log: message.log.0,
            log_bytes: message.log_bytes,
            place: ManagedPlace {
                address: message.place.0,
                bytes: message.place_bytes,
            },
            keep: message.keep != 0,
            options: &message.options,
        };
        self.load(call, ImageHandle::Library(message.new), &image)
    }

    fn library_unload(&mut self, call: &Call, message: &LibraryUnload) -> Outcome<()> {
        self.unload(call, ImageHandle::Library(message.library))
    }

    fn library_get_kernel<'s>(
        &'s mut self,
        call: &Call,
        message: &LibraryGetKernel<'_>,
    ) -> Outcome<LibraryGetKernelReply<'s>> {
        let image = ImageHandle::Library(message.library);
        self.find_function(call, image, message.new, message.name)
    }

    fn library_get_global(
        &mut self,
        call: &Call,
        message: &LibraryGetGlobal<'_>,
    ) -> Outcome<LibraryGetGlobalReply> {
        self.find_global(call, ImageHandle::Library(message.library), message.name)
    }

    fn library_get_module(&mut self, _: &Call, message: &LibraryGetModule) -> Outcome<()> {
        self.alias_library(message.library, message.new).into()
    }

    fn function_get_attribute(
        &mut self,
        call: &Call,
        message: &FunctionGetAttribute,
    ) -> Outcome<FunctionGetAttributeReply> {
        let attribute = message.attribute;
        self.ask_function(
            call,
            message.function,
            move |device, function| device.function_attribute(function, attribute),
            |value| Answer::reply(&FunctionGetAttributeReply { value }),
        )
    }

    fn function_set_attribute(
        &mut self,
        call: &Call,
        message: &FunctionSetAttribute,
    ) -> Outcome<()> {
        let (attribute, value) = (message.attribute, message.value);
        self.ask_function(
            call,
            message.function,
            move |device, function| device.set_function_attribute(function, attribute, value),
            |()| Answer::done(),
        )
    }

    fn occupancy(&mut self, call: &Call, message: &Occupancy) -> Outcome<OccupancyReply> {
        let (block, shared, flags) = (message.block, message.shared, message.flags);
        self.ask_function(
            call,
            message.function,
            move |device, function| device.occupancy(function, block, shared, flags),
            |blocks| Answer::reply(&OccupancyReply { blocks }),
        )
    }

    fn module_kernels(
        &mut self,
        call: &Call,
        message: &ModuleKernels,
    ) -> Outcome<ModuleKernelsReply> {
        let image = ImageHandle::Module(message.module);
        self.kernel_names(call, image, message.names.0, message.room)
    }

    fn library_kernels(
        &mut self,
        call: &Call,
        message: &LibraryKernels,
    ) -> Outcome<LibraryKernelsReply> {
        let image = ImageHandle::Library(message.library);
        self.kernel_names(call, image, message.names.0, message.room)
    }

    fn cluster_occupancy(
        &mut self,
        call: &Call,
        message: &ClusterOccupancy<'_>,
    ) -> Outcome<ClusterOccupancyReply> {
        Session::cluster_occupancy(self, call, message)
    }

    fn available_shared(
        &mut self,
        call: &Call,
        message: &AvailableShared,
    ) -> Outcome<AvailableSharedReply> {
        Session::available_shared(self, call, message)
    }

    fn tensor_map_encode(
        &mut self,
        call: &Call,
        message: &TensorMapEncode,
    ) -> Outcome<TensorMapEncodeReply> {
        self.encode_tensor_map(call, message)
    }

    fn tensor_map_replace(
        &mut self,
        call: &Call,
        message: &TensorMapReplace,
    ) -> Outcome<TensorMapReplaceReply> {
        self.replace_tensor_address(call, message)
    }

    fn reset_persisting_l2(&mut self, call: &Call, _: &ResetPersistingL2) -> Outcome<()> {
        Session::reset_persisting_l2(self, call)
    }

    fn launch_kernel(&mut self, call: &Call, message: &LaunchKernel<'_>) -> Outcome<()> {
        self.launch(call, message)
    }

    fn graph_begin(&mut self, _: &Call, message: &GraphBegin) -> Outcome<()> {
        self.begin_graph(message.new).into()
    }

    fn graph_kernel(&mut self, _: &Call, message: &GraphKernel<'_>) -> Outcome<()> {
        let added = self.add_kernel_node(message);
        self.part_of_graph(message.graph, added)
    }

    fn graph_copy(&mut self, _: &Call, message: &GraphCopy) -> Outcome<()> {
        let added = self.add_copy_node(message);
        self.part_of_graph(message.graph, added)
    }

    fn graph_fill(&mut self, _: &Call, message: &GraphFill) -> Outcome<()> {
        let added = self.add_fill_node(message);
        self.part_of_graph(message.graph, added)
    }

    fn graph_memory(&mut self, _: &Call, message: &GraphMemory<'_>) -> Outcome<()> {
        let added = self.add_memory_node(message);
        self.part_of_graph(message.graph, added)
    }

    fn graph_event(&mut self, _: &Call, message: &GraphEvent) -> Outcome<()> {
        let added = self.add_event_node(message);
        self.part_of_graph(message.graph, added)
    }

    fn graph_empty(&mut self, _: &Call, message: &GraphEmpty) -> Outcome<()> {
        let added = self.add_empty_node(message.graph);
        self.part_of_graph(message.graph, added)
    }

    fn graph_condition(&mut self, _: &Call, message: &GraphCondition) -> Outcome<()> {
        let added = self.add_condition(message);
        self.part_of_graph(message.graph, added)
    }

    fn graph_conditional(&mut self, _: &Call, message: &GraphConditional) -> Outcome<()> {
        let added = self.add_conditional_node(message);
        self.part_of_graph(message.graph, added)
    }

    fn graph_body(&mut self, _: &Call, message: &GraphBody) -> Outcome<()> {
        let begun = self.begin_body(message);
        self.part_of_graph(message.graph, begun)
    }

    fn graph_edges(&mut self, _: &Call, message: &GraphEdges<'_>) -> Outcome<()> {
        let added = self.add_edges(message);
        self.part_of_graph(message.graph, added)
    }

    fn graph_instantiate(&mut self, call: &Call, message: &GraphInstantiate) -> Outcome<()> {
        self.instantiate(call, message.graph, message.flags)
    }

    fn graph_update(&mut self, call: &Call, message: &GraphUpdate) -> Outcome<()> {
        self.update_graph(call, message.graph, message.from)
    }

    fn graph_launch(&mut self, _: &Call, message: &GraphLaunch) -> Outcome<()> {
        self.launch_graph(message.graph, message.stream).into()
    }

    fn graph_upload(&mut self, _: &Call, message: &GraphUpload) -> Outcome<()> {
        self.upload_graph(message.graph, message.stream).into()
    }

    fn graph_destroy(&mut self, _: &Call, message: &GraphDestroy) -> Outcome<()> {
        self.destroy_graph(message.graph).into()
    }

    fn graph_enable(&mut self, _: &Call, message: &GraphEnable) -> Outcome<()> {
        self.enable_node(message.graph, message.node, message.enabled)
            .into()
    }

    fn context_reset(&mut self, call: &Call, _: &ContextReset) -> Outcome<()> {
        self.reset(call)
    }

    fn context_get_limit(
        &mut self,
        call: &Call,
        message: &ContextGetLimit,
    ) -> Outcome<ContextGetLimitReply> {
        self.limit(call, message.limit)
    }

    fn context_set_limit(
        &mut self,
        call: &Call,
        message: &ContextSetLimit,
    ) -> Outcome<ContextSetLimitReply> {
        self.set_limit(call, message.limit, message.value)
    }

    fn function_set_cache_config(
        &mut self,
        call: &Call,
        message: &FunctionSetCacheConfig,
    ) -> Outcome<()> {
        let config = message.config;
        self.ask_function(
            call,
            message.function,
            move |device, function| device.set_cache_config(function, config),
            |()| Answer::done(),
        )
    }

    fn array_create(&mut self, call: &Call, message: &ArrayCreate) -> Outcome<()> {
        self.create_array(call, message)
    }

    fn array_destroy(&mut self, call: &Call, message: &ArrayDestroy) -> Outcome<()> {
        self.destroy_array(call, message.array)
    }

    fn mipmap_create(&mut self, call: &Call, message: &MipmapCreate) -> Outcome<()> {
        self.create_mipmap(call, message)
    }

    fn mipmap_destroy(&mut self, call: &Call, message: &MipmapDestroy) -> Outcome<()> {
        self.destroy_mipmap(call, message.mipmap)
    }

    fn mipmap_get_level(&mut self, _: &Call, message: &MipmapGetLevel) -> Outcome<()> {
        self.get_level(message).into()
    }

    fn green_describe(
        &mut self,
        call: &Call,
        message: &GreenDescribe,
    ) -> Outcome<GreenDescribeReply> {
        self.describe_green(call, message.green)
    }

    fn green_split<'s>(
        &'s mut self,
        call: &Call,
        message: &GreenSplit,
    ) -> Outcome<GreenSplitReply<'s>> {
        self.split_green(call, message)
    }

    fn green_create(
        &mut self,
        call: &Call,
        message: &GreenCreate<'_>,
    ) -> Outcome<GreenCreateReply> {
        self.create_green(call, message)
    }

    fn green_destroy(&mut self, call: &Call, message: &GreenDestroy) -> Outcome<()> {
        self.destroy_green(call, message.green)
    }

    fn green_stream(&mut self, call: &Call, message: &GreenStream) -> Outcome<()> {
        self.create_green_stream(call, message)
    }

    fn reference_find(&mut self, call: &Call, message: &ReferenceFind<'_>) -> Outcome<()> {
        self.find_reference(call, message)
    }

    fn reference_bind_texture(
        &mut self,
        call: &Call,
        message: &ReferenceBindTexture<'_>,
    ) -> Outcome<()> {
        self.bind_texture(call, message)
    }

    fn reference_bind_surface(
        &mut self,
        call: &Call,
        message: &ReferenceBindSurface<'_>,
    ) -> Outcome<()> {
        self.bind_surface(call, message)
    }

    fn texture_create(
        &mut self,
        call: &Call,
        message: &TextureCreate,
    ) -> Outcome<TextureCreateReply> {
        self.create_texture(call, message)
    }

    fn texture_destroy(&mut self, _: &Call, message: &TextureDestroy) -> Outcome<()> {
        self.destroy_texture(message.texture).into()
    }

    fn surface_create(
        &mut self,
        call: &Call,
        message: &SurfaceCreate,
    ) -> Outcome<SurfaceCreateReply> {
        self.create_surface(call, message.array)
    }

    fn surface_destroy(&mut self, _: &Call, message: &SurfaceDestroy) -> Outcome<()> {
        self.destroy_surface(message.surface).into()
    }

    fn box_copy(&mut self, _: &Call, message: &BoxCopy) -> Outcome<()> {
        self.copy_box(message).into()
    }

    fn take_output<'s>(&'s mut self, call: &Call, _: &TakeOutput) -> Outcome<TakeOutputReply<'s>> {
        if self.output.is_empty() {
            return self.ask(
                call,
                |device| Ok(device.take_output()),
                |session, text| {
                    session.output.append(&text);
                    Answer::reply(&session.next_output())
                },
            );
        }
        Outcome::Done(self.next_output())
    }
}

impl Session {
    fn next_output(&mut self) -> TakeOutputReply<'_> {
        let (remaining, stdout, stderr) = self.output.next_part();
        TakeOutputReply {
            remaining,
            stdout,
            stderr,
        }
    }
}
