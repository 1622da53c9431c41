//! Modules and libraries, and the kernels and variables in them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use wormhole_api::constants::image_flags::{ANY_KERNEL_PRINTS, USES_OUTPUT};
use wormhole_api::constants::kernel_flags::PRINTS;
use wormhole_api::{
    Attribute, CuResult, DevicePtr, Function, Handle, Items, JitOption, Library, LibraryGetGlobal,
    LibraryGetGlobalReply, LibraryGetKernel, LibraryGetKernelReply, LibraryGetModule, LibraryLoad,
    LibraryLoadReply, LibraryUnload, Link, LinkInput as LinkPart, LinkReply, Module,
    ModuleGetFunction, ModuleGetFunctionReply, ModuleGetGlobal, ModuleGetGlobalReply, ModuleLoad,
    ModuleLoadReply, ModuleUnload, Outcome, Parameter, Serve, Served, is_plain_jit_option,
};
use wormhole_device::{
    Device, ImageKind, ImageOutput, Jit, LinkInput, LoadedFunction, Loading, ManagedPlace,
    RawFunction,
};
use wormhole_link::counters::Counter;
use wormhole_link::memory;

use super::addresses::in_bands;
use super::quick_images::Digest;
use super::{Answer, Call, Finish, Session};
use crate::devices::SessionDevice;
use crate::objects::{CLUSTERS, FunctionObject, ImageObject, Loaded};
use crate::registrar::Task;
use crate::unloads::{ask_twice, unload};

/// Handle of a loaded image.
#[derive(Clone, Copy, Debug)]
pub(super) enum ImageHandle {
    Module(Handle<Module>),
    Library(Handle<Library>),
}

/// Limit on the bytes of images that jobs load at the same time: each is copied out of the arena
/// first. Beyond it, loading fails with `CUDA_ERROR_OUT_OF_MEMORY`.
const IMAGE_BYTES: u64 = 4 << 30;

/// Greatest size of an image that the executor may load.
const BRIEF_IMAGE: usize = 64 << 10;

/// Limit on the bytes of each of the compiler's two logs.
const LOG_BYTES: u64 = 1 << 20;

/// An image in the arena, and the options to compile it with.
#[derive(Clone, Debug)]
pub(super) struct Incoming<'a> {
    pub address: u64,
    pub bytes: u64,
    pub log: u64,
    pub log_bytes: u64,
    /// Place for its managed variables.
    pub place: ManagedPlace,
    /// Whether the managed variables keep their present values.
    pub keep: bool,
    pub options: &'a Items<'a, JitOption>,
}

/// Compiler options and logs, and the address in the arena to which the logs are written.
#[derive(Debug)]
struct Compiler {
    jit: Jit,
    log: u64,
}

impl Compiler {
    /// Writes the logs, each with a zero byte at its end.
    ///
    /// # Safety
    /// The place was found in an extent that stays mapped.
    unsafe fn write_logs(mut self) {
        let room = self.jit.log_bytes;
        if room == 0 {
            return;
        }
        for (text, offset) in [(&mut self.jit.info, 0), (&mut self.jit.errors, room)] {
            text.truncate(room - 1);
            text.push(0);
            // SAFETY: as the caller promises; the text is no longer than its room.
            unsafe { memory::copy_in(self.log + offset as u64, text) };
        }
    }
}

/// Splits the next `bytes` off `data`.
fn take<'a>(data: &mut &'a [u8], bytes: u64) -> wormhole_device::Result<&'a [u8]> {
    let (piece, rest) = usize::try_from(bytes)
        .ok()
        .and_then(|bytes| data.split_at_checked(bytes))
        .ok_or(CuResult::INVALID_VALUE)?;
    *data = rest;
    Ok(piece)
}

/// Links the parts in `data`, where each part follows its name. Without `complete`, returns no
/// image.
fn link(
    device: &dyn Device,
    parts: &[LinkPart],
    mut data: &[u8],
    complete: bool,
    jit: &mut Jit,
) -> wormhole_device::Result<Vec<u8>> {
    let mut inputs = Vec::with_capacity(parts.len());
    for part in parts {
        let name = take(&mut data, u64::from(part.name))?;
        inputs.push(LinkInput {
            kind: part.kind,
            name: std::str::from_utf8(name).map_err(|_| CuResult::INVALID_VALUE)?,
            data: take(&mut data, part.bytes)?,
        });
    }
    if complete {
        device.link(&inputs, jit)
    } else {
        device.try_link(&inputs, jit).map(|()| Vec::new())
    }
}

impl Session {
    /// Loads an image from the arena, by a private copy, because the guest may write there at any time. The executor makes
    /// that of a small image, and the job that of another.
    pub(super) fn load<R>(
        &mut self,
        call: &Call,
        new: ImageHandle,
        image: &Incoming<'_>,
    ) -> Outcome<R> {
        let Incoming {
            address,
            bytes,
            keep,
            ..
        } = *image;
        let mut compiler = self.compiler(image.log, image.log_bytes, image.options)?;
        if bytes == 0 {
            return Err(self.addresses.refused());
        }
        let reader = self.addresses.arena(address, bytes)?;
        let Ok(length) = usize::try_from(bytes) else {
            return Err(CuResult::INVALID_VALUE);
        };
        if bytes > IMAGE_BYTES - self.scratch.image_bytes {
            return Err(CuResult::OUT_OF_MEMORY);
        }
        let place = (image.place.bytes != 0).then_some(image.place);
        if let Some(place) = place {
            self.addresses.arena(place.address, place.bytes)?;
        }
        let here = self.here(call);
        let owner = here.clone();
        let copy = move || {
            // SAFETY: the range lies in an extent, which stays mapped while `reader` lives.
            unsafe { memory::copy_out(address, length) }
        };
        let kind = match new {
            ImageHandle::Module(_) => ImageKind::Module,
            ImageHandle::Library(_) => ImageKind::Library,
        };
        let small = (length <= BRIEF_IMAGE).then(copy);
        let digest = small
            .as_deref()
            .map(|image| Digest::of(image, kind, &compiler.jit));
        let is_quick = digest.is_some_and(|digest| self.quick_images.contains(digest));
        let call = call.brief_if(is_quick && self.waits_for_nothing(&here));
        let outstanding = self.unloads.outstanding();
        let outcome = self.defer(&call, here, move |device: &dyn Device| {
            let image = small.unwrap_or_else(copy);
            let start = Instant::now();
            let loaded = ask_twice(outstanding, || {
                device.load(&image, kind, &mut compiler.jit, place)
            });
            let took = loaded.is_ok().then(|| start.elapsed());
            let is_final = !matches!(loaded, Ok(Loading::NeedsPlace(_)));
            // SAFETY: as above.
            unsafe { compiler.write_logs() };
            if let Ok(Loading::Done(loaded)) = &loaded
                && !keep
            {
                for (address, values) in &loaded.initial {
                    // SAFETY: as above: the device puts the addresses into `place`, which lies in
                    // an extent as well.
                    unsafe { memory::copy_in(*address, values) };
                }
            }
            drop(reader);
            drop(image);
            Box::new(move |session: &mut Session| {
                session.scratch.image_bytes -= bytes;
                // A load that only asked for a place may not have come to the driver.
                let noted = digest.filter(|_| is_final);
                let is_quick = noted.is_some_and(|digest| session.quick_images.note(digest, took));
                session.loaded(owner, new, loaded, place, is_quick)
            }) as Finish
        });
        if outcome.is_ok() {
            self.scratch.image_bytes += bytes;
            self.counters.add(Counter::BytesToDevice, bytes);
        }
        outcome
    }
}

macro_rules! loads {
    ($message:ident, $reply:ident, $handle:ident) => {
        impl Serve<$message<'_>> for Session {
            fn serve(&mut self, call: &Call, message: &$message<'_>) -> Outcome<$reply> {
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
                self.load(call, ImageHandle::$handle(message.new), &image)
            }
        }
    };
}

loads!(ModuleLoad, ModuleLoadReply, Module);
loads!(LibraryLoad, LibraryLoadReply, Library);

/// Links the parts in the arena. The job copies them first, because the guest may write there at
/// any time.
impl Serve<Link<'_>> for Session {
    fn serve(&mut self, call: &Call, message: &Link<'_>) -> Outcome<LinkReply> {
        let parts: Vec<LinkPart> = message.parts.iter().collect();
        let total = parts.iter().try_fold(0_u64, |sum, part| {
            sum.checked_add(part.bytes)?
                .checked_add(u64::from(part.name))
        });
        let Some(bytes) = total.filter(|&bytes| bytes != 0) else {
            return Err(CuResult::INVALID_VALUE);
        };
        let mut compiler = self.compiler(message.log.0, message.log_bytes, &message.options)?;
        let complete = message.complete != 0;
        let (inputs, target, room) = (message.inputs.0, message.image.0, message.room);
        let reader = self.addresses.arena(inputs, bytes)?;
        self.addresses.arena(target, room)?;
        let Ok(length) = usize::try_from(bytes) else {
            return Err(CuResult::INVALID_VALUE);
        };
        if bytes > IMAGE_BYTES - self.scratch.image_bytes {
            return Err(CuResult::OUT_OF_MEMORY);
        }
        let outcome = self.defer(call, self.here(call), move |device: &dyn Device| {
            // SAFETY: the range lies in an extent, which stays mapped while `reader` lives.
            let copy = unsafe { memory::copy_out(inputs, length) };
            let linked = link(device, &parts, &copy, complete, &mut compiler.jit);
            // SAFETY: as above.
            unsafe { compiler.write_logs() };
            if let Ok(image) = &linked
                && image.len() as u64 <= room
            {
                // SAFETY: as above, and the copies are the worker's own.
                unsafe { memory::copy_in(target, image) };
            }
            drop(reader);
            let linked = linked.map(|image| image.len() as u64);
            Box::new(move |session: &mut Session| {
                session.scratch.image_bytes -= bytes;
                match linked {
                    Ok(bytes) => Answer::reply(&LinkReply { bytes }),
                    Err(error) => Answer::failed(session.failed(error)),
                }
            }) as Finish
        });
        if outcome.is_ok() {
            self.scratch.image_bytes += bytes;
            self.counters.add(Counter::BytesToDevice, bytes);
        }
        outcome
    }
}

impl Session {
    /// Reads the compiler options with plain numbers, drops the others, and checks that the place for
    /// the logs lies in the arena.
    fn compiler(
        &self,
        log: u64,
        log_bytes: u64,
        options: &Items<'_, JitOption>,
    ) -> Result<Compiler, CuResult> {
        if log_bytes > LOG_BYTES {
            return Err(CuResult::INVALID_VALUE);
        }
        if log_bytes > 0 {
            self.addresses.arena(log, 2 * log_bytes)?;
        }
        let plain = options
            .iter()
            .filter(|option| is_plain_jit_option(option.option));
        let jit = Jit {
            options: plain.map(|option| (option.option, option.value)).collect(),
            log_bytes: usize::try_from(log_bytes).unwrap_or(0),
            ..Jit::default()
        };
        Ok(Compiler { jit, log })
    }

    fn loaded(
        &mut self,
        device: SessionDevice,
        new: ImageHandle,
        loaded: wormhole_device::Result<Loading>,
        place: Option<ManagedPlace>,
        is_quick: bool,
    ) -> Answer {
        let answer = |flags, managed| match new {
            ImageHandle::Module(_) => Answer::reply(&ModuleLoadReply { flags, managed }),
            ImageHandle::Library(_) => Answer::reply(&LibraryLoadReply { flags, managed }),
        };
        let loaded = match loaded {
            Ok(Loading::Done(loaded)) => loaded,
            Ok(Loading::NeedsPlace(bytes)) => return answer(0, bytes),
            Err(error) => return Answer::failed(self.failed(error)),
        };
        let image = Arc::new(Loaded::new(device, loaded.module, place, is_quick));
        let entered = self
            .objects
            .enter_image(new, ImageObject::new(Arc::clone(&image)));
        if let Err(error) = entered {
            self.unload_quietly(image);
            return Answer::failed(error);
        }
        let flags = match loaded.output {
            ImageOutput::None => 0,
            ImageOutput::Kernels => USES_OUTPUT,
            ImageOutput::Any => USES_OUTPUT | ANY_KERNEL_PRINTS,
        };
        answer(flags, 0)
    }

    /// Unloads an image on the thread of [`Unloads`](crate::unloads::Unloads), because that may block: the driver waits for
    /// kernels. The registrar, on which others wait, does it only if that thread cannot be started. A failure is logged only.
    fn unload_quietly(&mut self, image: Arc<Loaded>) {
        if let Err(image) = self.unloads.add(image) {
            self.registrar.run(Task::new(move |_| unload(&image)));
        }
    }

    /// Removes an image and the functions and variables found in it, so that none may be named any
    /// more. The device unloads it once no other job uses it, and may block: on the caller's job
    /// thread, or on a thread of their own if no call waits. The executor unloads images that are quick, if nobody waits.
    pub(super) fn unload(&mut self, call: &Call, handle: ImageHandle) -> Outcome<()> {
        let (image, globals) = self.objects.remove_image(handle)?;
        for start in globals {
            self.addresses.forget_global(start);
        }
        self.unload_unless_used(call, image)
    }
}

impl Serve<LibraryUnload> for Session {
    fn serve(&mut self, call: &Call, message: &LibraryUnload) -> Outcome<()> {
        self.chains.forget_all();
        self.unload(call, ImageHandle::Library(message.library))
    }
}

impl Serve<ModuleUnload> for Session {
    fn serve(&mut self, call: &Call, message: &ModuleUnload) -> Outcome<()> {
        self.chains.forget_all();
        self.unload(call, ImageHandle::Module(message.module))
    }
}

impl Session {
    /// Has an image unloaded, or leaves the image to [`unload_unused`](Self::unload_unused) while another
    /// job uses it. Takes the image out of its `Arc` first: from then on no graph can upgrade its `Weak`, so that none is
    /// made or launched of functions that the device is freeing. The graphs that hold such functions go with the image, which
    /// destroys them before it is unloaded.
    fn unload_unless_used(&mut self, call: &Call, image: Arc<Loaded>) -> Outcome<()> {
        let image = match Arc::try_unwrap(image) {
            Ok(image) => image,
            Err(image) => {
                self.objects.unloading.push((*call, image));
                return Ok(Served::Deferred);
            }
        };
        image.graphs.lock().extend(self.objects.graphs.take_ended());
        if call.slot.is_some() {
            return self.free(call, image.device.clone(), move |_| image.unload());
        }
        // No graph names the image by this reference.
        let image = Arc::new(image);
        if self.addresses.has_users() {
            self.objects.unloading.push((*call, image));
        } else if image.is_quick
            && image.graphs.lock().is_empty()
            && self.waits_for_nothing(&image.device)
        {
            unload(&image);
        } else {
            self.unload_quietly(image);
        }
        Ok(Served::Deferred)
    }

    /// Unloads the images that no job uses any more. Returns the requests that failed, with the
    /// error.
    pub(super) fn unload_unused(&mut self) -> Vec<(Call, CuResult)> {
        let mut refused = Vec::new();
        for (call, image) in std::mem::take(&mut self.objects.unloading) {
            if let Err(error) = self.unload_unless_used(&call, image) {
                refused.push((call, error));
            }
        }
        refused
    }

    /// Looks a kernel up. The driver may load it.
    pub(super) fn find_function<R>(
        &mut self,
        call: &Call,
        handle: ImageHandle,
        new: Handle<Function>,
        name: &[u8],
    ) -> Outcome<R> {
        let (image, name) = self.named(handle, name)?;
        let used = Arc::clone(&image);
        self.ask(
            call,
            image.device.clone(),
            move |device| device.function(image.raw, &name),
            move |session, found| match session.enter_function(handle, new, used, &found) {
                Ok(()) => describe(handle, &found),
                Err(error) => Answer::failed(error),
            },
        )
    }
}

impl Serve<LibraryGetKernel<'_>> for Session {
    fn serve<'s>(
        &'s mut self,
        call: &Call,
        message: &LibraryGetKernel<'_>,
    ) -> Outcome<LibraryGetKernelReply<'s>> {
        let image = ImageHandle::Library(message.library);
        self.find_function(call, image, message.new, message.name)
    }
}

impl Serve<ModuleGetFunction<'_>> for Session {
    fn serve<'s>(
        &'s mut self,
        call: &Call,
        message: &ModuleGetFunction<'_>,
    ) -> Outcome<ModuleGetFunctionReply<'s>> {
        let image = ImageHandle::Module(message.module);
        self.find_function(call, image, message.new, message.name)
    }
}

impl Session {
    /// Checks that a handle names the image that a job has used. Another thread may have unloaded the image meanwhile, and
    /// given the handle to another image: the job's result would then outlive its own image.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`: it does not.
    fn still_names(&self, handle: ImageHandle, used: &Arc<Loaded>) -> Result<(), CuResult> {
        if Arc::ptr_eq(&self.objects.image(handle)?.loaded, used) {
            Ok(())
        } else {
            Err(CuResult::INVALID_HANDLE)
        }
    }

    fn enter_function(
        &mut self,
        handle: ImageHandle,
        new: Handle<Function>,
        image: Arc<Loaded>,
        found: &LoadedFunction,
    ) -> Result<(), CuResult> {
        self.still_names(handle, &image)?;
        let ends = found.parameters.iter();
        let ends = ends.map(|parameter| u64::from(parameter.offset) + u64::from(parameter.size));
        let mut attributes = found.attributes.iter();
        let clustered = attributes.any(|(id, value)| *value != 0 && CLUSTERS.contains(id));
        let object = FunctionObject {
            raw: found.function,
            image,
            parameter_bytes: ends.max().unwrap_or(0),
            clustered: AtomicBool::new(clustered),
        };
        self.objects.functions.enter(new, object)?;
        self.objects.image_mut(handle)?.functions.push(new);
        Ok(())
    }

    /// Looks a variable up. The driver may load it. Copies may name it from then on.
    pub(super) fn find_global<R>(
        &mut self,
        call: &Call,
        handle: ImageHandle,
        name: &[u8],
    ) -> Outcome<R> {
        let (image, name) = self.named(handle, name)?;
        let used = Arc::clone(&image);
        self.ask(
            call,
            image.device.clone(),
            move |device| device.global(image.raw, &name),
            move |session, (start, bytes)| {
                if let Err(error) = session.enter_global(handle, &used, start, bytes) {
                    return Answer::failed(error);
                }
                let address = DevicePtr(start);
                match handle {
                    ImageHandle::Module(_) => {
                        Answer::reply(&ModuleGetGlobalReply { address, bytes })
                    }
                    ImageHandle::Library(_) => {
                        Answer::reply(&LibraryGetGlobalReply { address, bytes })
                    }
                }
            },
        )
    }
}

impl Serve<LibraryGetGlobal<'_>> for Session {
    fn serve(
        &mut self,
        call: &Call,
        message: &LibraryGetGlobal<'_>,
    ) -> Outcome<LibraryGetGlobalReply> {
        self.find_global(call, ImageHandle::Library(message.library), message.name)
    }
}

impl Serve<ModuleGetGlobal<'_>> for Session {
    fn serve(
        &mut self,
        call: &Call,
        message: &ModuleGetGlobal<'_>,
    ) -> Outcome<ModuleGetGlobalReply> {
        self.find_global(call, ImageHandle::Module(message.module), message.name)
    }
}

impl Session {
    fn enter_global(
        &mut self,
        handle: ImageHandle,
        used: &Arc<Loaded>,
        address: u64,
        bytes: u64,
    ) -> Result<(), CuResult> {
        self.still_names(handle, used)?;
        let image = self.objects.image_mut(handle)?;
        if image.loaded.holds_managed(address) {
            // Managed variables lie in arena, so the arena's ranges admit them.
            return Ok(());
        }
        if !in_bands(address, bytes) {
            tracing::error!(
                "the device has a variable of {bytes} bytes at {address:#x}, which a guest may use itself"
            );
            return Err(CuResult::INVALID_IMAGE);
        }
        // A variable found before is entered already.
        let device = &image.loaded.device;
        if self.addresses.enter_global(device, address, bytes) {
            image.globals.push(address);
        }
        Ok(())
    }

    /// Returns an image and a name to look up in it, for a job.
    pub(super) fn named(
        &self,
        handle: ImageHandle,
        name: &[u8],
    ) -> Result<(Arc<Loaded>, String), CuResult> {
        let image = Arc::clone(&self.objects.image(handle)?.loaded);
        let name = std::str::from_utf8(name).map_err(|_| CuResult::NOT_FOUND)?;
        Ok((image, name.to_owned()))
    }
}

/// Creates a module handle that names a library's contents (`cuLibraryGetModule`).
impl Serve<LibraryGetModule> for Session {
    fn serve(&mut self, _: &Call, message: &LibraryGetModule) -> Outcome<()> {
        let new = message.new;
        let (library, alias) = (
            ImageHandle::Library(message.library),
            ImageHandle::Module(new),
        );
        let mut object = ImageObject::new(Arc::clone(&self.objects.image(library)?.loaded));
        object.library = Some(message.library);
        self.objects.enter_image(alias, object)?;
        self.objects.image_mut(library)?.aliases.push(new);
        Ok(Served::Done(()))
    }
}

impl Session {
    /// Runs a job that queries the device for a kernel.
    pub(super) fn ask_function<R, T: Send + 'static>(
        &mut self,
        call: &Call,
        handle: Handle<Function>,
        ask: impl FnOnce(&dyn Device, RawFunction) -> wormhole_device::Result<T> + Send + 'static,
        answer: impl FnOnce(&mut Self, T) -> Answer + Send + 'static,
    ) -> Outcome<R> {
        let function = self.objects.functions.get(handle)?;
        let (raw, image) = (function.raw, Arc::clone(&function.image));
        self.ask(
            call,
            image.device.clone(),
            move |device| {
                let _used = image;
                ask(device, raw)
            },
            answer,
        )
    }
}

/// Encodes the answer to a look-up.
fn describe(handle: ImageHandle, found: &LoadedFunction) -> Answer {
    let parameters: Vec<Parameter> = found
        .parameters
        .iter()
        .map(|parameter| Parameter {
            offset: parameter.offset,
            size: parameter.size,
        })
        .collect();
    let attributes: Vec<Attribute> = found
        .attributes
        .iter()
        .map(|&(id, value)| Attribute { id, value })
        .collect();
    let (parameters, attributes) = (Items::new(&parameters), Items::new(&attributes));
    let flags = if found.prints { PRINTS } else { 0 };
    match handle {
        ImageHandle::Module(_) => Answer::reply(&ModuleGetFunctionReply {
            flags,
            parameters,
            attributes,
        }),
        ImageHandle::Library(_) => Answer::reply(&LibraryGetKernelReply {
            flags,
            parameters,
            attributes,
        }),
    }
}
