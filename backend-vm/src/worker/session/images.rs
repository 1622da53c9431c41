//! Modules, libraries, and what is found in them.

use std::sync::Arc;

use wormhole_api::{
    Attribute, CuResult, Function, Handle, Library, LibraryLoadReply, Module, ModuleGetGlobalReply,
    ModuleLoadReply, Outcome, Parameter,
};
use wormhole_device::{CuError, Device, ImageKind, LoadedModule, RawModule};

use super::{Answer, Call, Finish, Session, to_result};
use crate::counters::Counter;
use crate::memory;
use crate::worker::objects::{FunctionObject, ImageObject};

/// A kernel's parameters and attributes, as they go into an answer.
#[derive(Debug, Default)]
pub(super) struct FunctionDescription {
    pub parameters: Vec<Parameter>,
    pub attributes: Vec<Attribute>,
}

/// The handle of something that was loaded from an image.
#[derive(Clone, Copy, Debug)]
pub(super) enum ImageHandle {
    Module(Handle<Module>),
    Library(Handle<Library>),
}

/// The image uses device output.
const USES_OUTPUT: u32 = 1;

impl Session {
    fn image(&mut self, handle: ImageHandle) -> Result<&mut ImageObject, CuResult> {
        let image = match handle {
            ImageHandle::Module(module) => self.modules.get_mut(module),
            ImageHandle::Library(library) => self.libraries.get_mut(library),
        };
        image.ok_or_else(|| {
            self.counters.add(Counter::InvalidHandles, 1);
            CuResult::INVALID_HANDLE
        })
    }

    /// Loads an image from the arena. It is copied first: the guest may write there at any time.
    pub(super) fn load<R>(
        &mut self,
        call: &Call,
        new: ImageHandle,
        address: u64,
        bytes: u64,
    ) -> Outcome<R> {
        if bytes == 0 || !self.extents.contains(address, bytes) {
            return Outcome::Failed(self.invalid_address());
        }
        let Ok(length) = usize::try_from(bytes) else {
            return Outcome::Failed(CuResult::INVALID_VALUE);
        };
        self.counters.add(Counter::BytesToDevice, bytes);
        let reader = Arc::clone(&self.readers);
        self.defer(call, move |device: &dyn Device| {
            // SAFETY: the range lies in an extent, which stays mapped while `reader` lives.
            let image = unsafe { memory::copy_out(address, length) };
            drop(reader);
            let kind = match new {
                ImageHandle::Module(_) => ImageKind::Module,
                ImageHandle::Library(_) => ImageKind::Library,
            };
            let loaded = device.load(&image, kind);
            Box::new(move |session: &mut Session| session.loaded(new, loaded)) as Finish
        })
    }

    fn loaded(
        &mut self,
        new: ImageHandle,
        loaded: wormhole_device::Result<LoadedModule>,
    ) -> Answer {
        let loaded = match loaded {
            Ok(loaded) => loaded,
            Err(error) => return Answer::failed(self.failed(error)),
        };
        let entered = self.enter_image(new, ImageObject::new(loaded.module));
        if let Err(error) = entered {
            self.unload_quietly(loaded.module);
            return Answer::failed(error);
        }
        let flags = if loaded.uses_output { USES_OUTPUT } else { 0 };
        match new {
            ImageHandle::Module(_) => Answer::reply(&ModuleLoadReply { flags, log: &[] }),
            ImageHandle::Library(_) => Answer::reply(&LibraryLoadReply { flags, log: &[] }),
        }
    }

    fn enter_image(&mut self, new: ImageHandle, image: ImageObject) -> Result<(), CuResult> {
        let entered = match new {
            ImageHandle::Module(module) => self.modules.insert(module, image),
            ImageHandle::Library(library) => self.libraries.insert(library, image),
        };
        entered.map_err(|error| {
            self.counters.add(Counter::InvalidHandles, 1);
            error.into()
        })
    }

    fn unload_quietly(&self, module: RawModule) {
        if let Err(error) = self.device.unload(module) {
            tracing::debug!("unloading an image without a handle: {error}");
        }
    }

    /// The module and all that was found in it may not be named from here on; the device's own wait
    /// happens on the caller's thread.
    pub(super) fn unload(&mut self, call: &Call, handle: ImageHandle) -> Outcome<()> {
        let removed = match handle {
            // A library's module goes with the library.
            ImageHandle::Module(module)
                if self
                    .modules
                    .get(module)
                    .is_some_and(|image| image.library.is_some()) =>
            {
                None
            }
            ImageHandle::Module(module) => self.modules.remove(module),
            ImageHandle::Library(library) => self.libraries.remove(library),
        };
        let Some(image) = removed else {
            return Outcome::Failed(self.invalid_handle());
        };
        for alias in &image.aliases {
            if let Some(alias) = self.modules.remove(*alias) {
                self.forget_contents(&alias);
            }
        }
        self.forget_contents(&image);
        let raw = image.raw;
        self.defer(call, move |device: &dyn Device| {
            let unloaded = device.unload(raw);
            Box::new(move |session: &mut Session| {
                Answer::status(unloaded.inspect_err(|error| {
                    session.failed(*error);
                }))
            }) as Finish
        })
    }

    fn forget_contents(&mut self, image: &ImageObject) {
        for function in &image.functions {
            self.functions.remove(*function);
        }
        for start in &image.globals {
            self.device_memory.remove(*start);
        }
    }

    pub(super) fn find_function(
        &mut self,
        handle: ImageHandle,
        new: Handle<Function>,
        name: &[u8],
    ) -> Result<FunctionDescription, CuResult> {
        let raw = self.image(handle)?.raw;
        let name = name_of(name)?;
        let found = self.device.function(raw, name);
        let found = self.done(found)?;
        let object = FunctionObject {
            raw: found.function,
        };
        if let Err(error) = self.functions.insert(new, object) {
            self.counters.add(Counter::InvalidHandles, 1);
            return Err(error.into());
        }
        self.image(handle)?.functions.push(new);
        Ok(FunctionDescription {
            parameters: found
                .parameters
                .iter()
                .map(|parameter| Parameter {
                    offset: parameter.offset,
                    size: parameter.size,
                })
                .collect(),
            attributes: found
                .attributes
                .iter()
                .map(|&(id, value)| Attribute { id, value })
                .collect(),
        })
    }

    /// Finds a variable; copies may name it from now on.
    pub(super) fn find_global(
        &mut self,
        handle: ImageHandle,
        name: &[u8],
    ) -> Result<ModuleGetGlobalReply, CuResult> {
        let raw = self.image(handle)?.raw;
        let found = self.device.global(raw, name_of(name)?);
        let (address, bytes) = self.done(found)?;
        // Asked for before, it is there already.
        if self.device_memory.insert(address, bytes) {
            self.image(handle)?.globals.push(address);
        }
        Ok(ModuleGetGlobalReply {
            address: wormhole_api::DevicePtr(address),
            bytes,
        })
    }

    /// A module by which a library's contents can be named too (`cuLibraryGetModule`).
    pub(super) fn alias_library(
        &mut self,
        library: Handle<Library>,
        new: Handle<Module>,
    ) -> Result<(), CuResult> {
        let raw = self.image(ImageHandle::Library(library))?.raw;
        let mut alias = ImageObject::new(raw);
        alias.library = Some(library);
        self.enter_image(ImageHandle::Module(new), alias)?;
        self.image(ImageHandle::Library(library))?.aliases.push(new);
        Ok(())
    }

    pub(super) fn function(&self, handle: Handle<Function>) -> Result<FunctionObject, CuResult> {
        self.functions
            .get(handle)
            .copied()
            .ok_or_else(|| self.invalid_handle())
    }

    /// Destroys everything in the context. No record is taken until it is done, and it begins when the jobs
    /// before it are done: nobody else may use the device meanwhile.
    pub(super) fn reset(&mut self, call: &Call) -> Outcome<()> {
        self.resetting = true;
        if self.jobs_running > 0 {
            self.wanted_reset = Some(*call);
            return Outcome::Deferred;
        }
        self.start_reset(call)
    }

    pub(super) fn start_reset(&mut self, call: &Call) -> Outcome<()> {
        self.streams.drain().for_each(drop);
        self.events.drain().for_each(drop);
        self.modules.drain().for_each(drop);
        self.libraries.drain().for_each(drop);
        self.functions.drain().for_each(drop);
        self.graveyard.clear();
        self.device_memory.clear();
        self.allocations.clear();
        let watcher = self.watcher.pause();
        let mut registered: Vec<(u64, u64)> = self.extents.iter().collect();
        registered.push((self.base, wormhole_ring::layout::SEGMENT_BYTES as u64));
        let reader = Arc::clone(&self.readers);
        let outcome = self.defer(call, move |device: &dyn Device| {
            let result = reset_and_register(device, &registered);
            drop(reader);
            drop(watcher);
            Box::new(move |session: &mut Session| {
                session.resetting = false;
                session.jobs.retire();
                let bound = session.device.bind_thread();
                Answer::status(result.and(bound).inspect_err(|error| {
                    session.failed(*error);
                }))
            }) as Finish
        });
        if !matches!(outcome, Outcome::Deferred) {
            self.resetting = false;
        }
        outcome
    }
}

/// A reset forgets the registrations too.
fn reset_and_register(device: &dyn Device, ranges: &[(u64, u64)]) -> wormhole_device::Result<()> {
    device.reset()?;
    device.bind_thread()?;
    for &(address, bytes) in ranges {
        // SAFETY: the session's segment and its extents are mapped, and stay so while the caller holds
        // on to the session's readers.
        unsafe { device.register(address, bytes)? };
    }
    Ok(())
}

fn name_of(name: &[u8]) -> Result<&str, CuResult> {
    std::str::from_utf8(name).map_err(|_| to_result(CuError::NOT_FOUND))
}
