//! The messages of the API table, each handed to what executes it.

use wormhole_api::{
    Attribute, ContextGetLimit, ContextGetLimitReply, ContextReset, ContextSetLimit,
    ContextSetLimitReply, DeviceDescribe, DeviceDescribeReply, EventCreate, EventDestroy,
    EventElapsed, EventElapsedReply, EventQuery, EventRecord, EventSynchronize, FenceWrite,
    FunctionGetAttribute, FunctionGetAttributeReply, FunctionSetAttribute, FunctionSetCacheConfig,
    Items, LaunchKernel, LibraryGetGlobal, LibraryGetGlobalReply, LibraryGetKernel,
    LibraryGetKernelReply, LibraryGetModule, LibraryLoad, LibraryLoadReply, LibraryUnload,
    MemAlloc, MemAllocReply, MemCopy, MemFree, MemGetInfo, MemGetInfoReply, MemSet, MemWrite,
    ModuleGetFunction, ModuleGetFunctionReply, ModuleGetGlobal, ModuleGetGlobalReply, ModuleLoad,
    ModuleLoadReply, ModuleUnload, Occupancy, OccupancyReply, Outcome, Service, StreamCreate,
    StreamDestroy, StreamQuery, StreamWaitEvent, Synchronize, SynchronizeReply, TakeOutput,
    TakeOutputReply,
};
use wormhole_device::{CuError, Description};

use super::images::{FunctionDescription, ImageHandle};
use super::{Call, Session, to_result};

/// The device's description, as it goes into an answer.
#[derive(Debug)]
pub(super) struct Described {
    reply: DeviceDescribeReply<'static>,
    name: Vec<u8>,
    attributes: Vec<Attribute>,
    /// The kernel that was described last.
    function: FunctionDescription,
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
            function: FunctionDescription::default(),
        }
    }
}

impl Service for Session {
    type Call = Call;

    fn device_describe<'s>(
        &'s mut self,
        _: &Call,
        message: &DeviceDescribe,
    ) -> Outcome<DeviceDescribeReply<'s>> {
        if message.ordinal >= self.description.reply.devices {
            return Outcome::Failed(to_result(CuError::INVALID_DEVICE));
        }
        Outcome::Done(DeviceDescribeReply {
            name: &self.description.name,
            attributes: Items::new(&self.description.attributes),
            ..self.description.reply
        })
    }

    fn mem_get_info(&mut self, _: &Call, _: &MemGetInfo) -> Outcome<MemGetInfoReply> {
        self.done(self.device.memory_info())
            .map(|(free, total)| MemGetInfoReply { free, total })
            .into()
    }

    fn mem_alloc(&mut self, _: &Call, message: &MemAlloc) -> Outcome<MemAllocReply> {
        self.allocate(message.bytes).into()
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

    fn module_load<'s>(
        &'s mut self,
        call: &Call,
        message: &ModuleLoad,
    ) -> Outcome<ModuleLoadReply<'s>> {
        let new = ImageHandle::Module(message.new);
        self.load(call, new, message.image.0, message.bytes)
    }

    fn module_unload(&mut self, call: &Call, message: &ModuleUnload) -> Outcome<()> {
        self.unload(call, ImageHandle::Module(message.module))
    }

    fn module_get_function<'s>(
        &'s mut self,
        _: &Call,
        message: &ModuleGetFunction<'_>,
    ) -> Outcome<ModuleGetFunctionReply<'s>> {
        let image = ImageHandle::Module(message.module);
        match self.find_function(image, message.new, message.name) {
            Ok(found) => {
                self.description.function = found;
                let found = &self.description.function;
                Outcome::Done(ModuleGetFunctionReply {
                    flags: 0,
                    parameters: Items::new(&found.parameters),
                    attributes: Items::new(&found.attributes),
                })
            }
            Err(error) => Outcome::Failed(error),
        }
    }

    fn module_get_global(
        &mut self,
        _: &Call,
        message: &ModuleGetGlobal<'_>,
    ) -> Outcome<ModuleGetGlobalReply> {
        self.find_global(ImageHandle::Module(message.module), message.name)
            .into()
    }

    fn library_load<'s>(
        &'s mut self,
        call: &Call,
        message: &LibraryLoad,
    ) -> Outcome<LibraryLoadReply<'s>> {
        let new = ImageHandle::Library(message.new);
        self.load(call, new, message.image.0, message.bytes)
    }

    fn library_unload(&mut self, call: &Call, message: &LibraryUnload) -> Outcome<()> {
        self.unload(call, ImageHandle::Library(message.library))
    }

    fn library_get_kernel<'s>(
        &'s mut self,
        _: &Call,
        message: &LibraryGetKernel<'_>,
    ) -> Outcome<LibraryGetKernelReply<'s>> {
        let image = ImageHandle::Library(message.library);
        match self.find_function(image, message.new, message.name) {
            Ok(found) => {
                self.description.function = found;
                let found = &self.description.function;
                Outcome::Done(LibraryGetKernelReply {
                    flags: 0,
                    parameters: Items::new(&found.parameters),
                    attributes: Items::new(&found.attributes),
                })
            }
            Err(error) => Outcome::Failed(error),
        }
    }

    fn library_get_global(
        &mut self,
        _: &Call,
        message: &LibraryGetGlobal<'_>,
    ) -> Outcome<LibraryGetGlobalReply> {
        self.find_global(ImageHandle::Library(message.library), message.name)
            .map(|found| LibraryGetGlobalReply {
                address: found.address,
                bytes: found.bytes,
            })
            .into()
    }

    fn library_get_module(&mut self, _: &Call, message: &LibraryGetModule) -> Outcome<()> {
        self.alias_library(message.library, message.new).into()
    }

    fn function_get_attribute(
        &mut self,
        _: &Call,
        message: &FunctionGetAttribute,
    ) -> Outcome<FunctionGetAttributeReply> {
        self.function(message.function)
            .and_then(|function| {
                self.done(
                    self.device
                        .function_attribute(function.raw, message.attribute),
                )
            })
            .map(|value| FunctionGetAttributeReply { value })
            .into()
    }

    fn function_set_attribute(&mut self, _: &Call, message: &FunctionSetAttribute) -> Outcome<()> {
        self.function(message.function)
            .and_then(|function| {
                self.done(self.device.set_function_attribute(
                    function.raw,
                    message.attribute,
                    message.value,
                ))
            })
            .into()
    }

    fn occupancy(&mut self, _: &Call, message: &Occupancy) -> Outcome<OccupancyReply> {
        self.function(message.function)
            .and_then(|function| {
                self.done(self.device.occupancy(
                    function.raw,
                    message.block,
                    message.shared,
                    message.flags,
                ))
            })
            .map(|blocks| OccupancyReply { blocks })
            .into()
    }

    fn launch_kernel(&mut self, _: &Call, message: &LaunchKernel<'_>) -> Outcome<()> {
        self.launch(message).into()
    }

    fn context_reset(&mut self, call: &Call, _: &ContextReset) -> Outcome<()> {
        self.reset(call)
    }

    fn context_get_limit(
        &mut self,
        _: &Call,
        message: &ContextGetLimit,
    ) -> Outcome<ContextGetLimitReply> {
        self.done(self.device.limit(message.limit))
            .map(|value| ContextGetLimitReply { value })
            .into()
    }

    fn context_set_limit(
        &mut self,
        _: &Call,
        message: &ContextSetLimit,
    ) -> Outcome<ContextSetLimitReply> {
        let set = self.device.set_limit(message.limit, message.value);
        self.done(set.and_then(|()| self.device.limit(message.limit)))
            .map(|value| ContextSetLimitReply { value })
            .into()
    }

    fn function_set_cache_config(
        &mut self,
        _: &Call,
        message: &FunctionSetCacheConfig,
    ) -> Outcome<()> {
        self.function(message.function)
            .and_then(|function| {
                self.done(self.device.set_cache_config(function.raw, message.config))
            })
            .into()
    }

    fn take_output<'s>(&'s mut self, _: &Call, _: &TakeOutput) -> Outcome<TakeOutputReply<'s>> {
        self.output.append(self.device.take_output());
        let (remaining, stdout, stderr) = self.output.next_part();
        Outcome::Done(TakeOutputReply {
            remaining,
            stdout,
            stderr,
        })
    }
}
