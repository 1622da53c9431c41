//! Tables of the objects behind the session's handles.

use std::sync::Arc;

use wormhole_api::handle::{HandleKind, Slab};
use wormhole_api::{
    CuResult, Event as EventKind, Function, Handle, Library, Memory, Module, Pool, Stream,
};
use wormhole_device::RawStream;
use wormhole_link::counters::{Counter, Counters};

use super::arrays::Arrays;
use super::graphs::Graphs;
use super::green_contexts::{Ending, GreenContexts};
use super::images::ImageHandle;
use super::pools::PoolObject;
use super::virtual_memory::MemoryObject;
use super::{Call, OBJECTS};
use crate::devices::Devices;
use crate::objects::{EventObject, FunctionObject, ImageObject, Loaded, Reclaim, StreamObject};

/// Objects of one type, by handle.
#[derive(Debug)]
pub(super) struct Table<K, T> {
    slab: Slab<K, T>,
    counters: Arc<Counters>,
}

impl<K: HandleKind, T> Table<K, T> {
    pub fn new(counters: &Arc<Counters>) -> Self {
        Self {
            slab: Slab::new(OBJECTS),
            counters: Arc::clone(counters),
        }
    }

    /// Counts a handle that names no object, or a new one that is in use, and returns the error.
    pub fn refused<R>(&self, error: CuResult) -> Result<R, CuResult> {
        self.counters.add(Counter::InvalidHandles, 1);
        Err(error)
    }

    /// Returns an object.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`: the handle names none.
    #[inline]
    pub fn get(&self, handle: Handle<K>) -> Result<&T, CuResult> {
        match self.slab.get(handle) {
            Some(object) => Ok(object),
            None => self.refused(CuResult::INVALID_HANDLE),
        }
    }

    /// Returns an object, mutably.
    ///
    /// # Errors
    /// Same as [`Table::get`].
    pub fn get_mut(&mut self, handle: Handle<K>) -> Result<&mut T, CuResult> {
        match self.slab.get_mut(handle) {
            Some(object) => Ok(object),
            None => {
                self.counters.add(Counter::InvalidHandles, 1);
                Err(CuResult::INVALID_HANDLE)
            }
        }
    }

    /// Returns an object if the handle names one, without counting a failure.
    pub fn find(&self, handle: Handle<K>) -> Option<&T> {
        self.slab.get(handle)
    }

    /// Returns an object mutably if the handle names one, without counting a failure.
    pub fn find_mut(&mut self, handle: Handle<K>) -> Option<&mut T> {
        self.slab.get_mut(handle)
    }

    /// Enters a new object.
    ///
    /// # Errors
    /// The handle is out of bounds or in use.
    pub fn enter(&mut self, handle: Handle<K>, object: T) -> Result<(), CuResult> {
        match self.slab.insert(handle, object) {
            Ok(()) => Ok(()),
            Err(error) => self.refused(error.into()),
        }
    }

    /// Removes an object, so that it may not be named any more.
    ///
    /// # Errors
    /// Same as [`Table::get`].
    pub fn remove(&mut self, handle: Handle<K>) -> Result<T, CuResult> {
        match self.slab.remove(handle) {
            Some(object) => Ok(object),
            None => self.refused(CuResult::INVALID_HANDLE),
        }
    }

    pub fn len(&self) -> usize {
        self.slab.len()
    }

    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.slab.values()
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slab.values_mut()
    }

    /// Removes all objects.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.slab.drain()
    }
}

/// All objects with handles. Look-ups do not change them, so several threads may make them.
#[derive(Debug)]
pub(super) struct Objects {
    /// Legacy streams, by device.
    legacy: Vec<Arc<StreamObject>>,
    pub streams: Table<Stream, Arc<StreamObject>>,
    pub events: Table<EventKind, Arc<EventObject>>,
    modules: Table<Module, ImageObject>,
    libraries: Table<Library, ImageObject>,
    pub functions: Table<Function, FunctionObject>,
    pub arrays: Arrays,
    pub green_contexts: GreenContexts,
    pub graphs: Graphs,
    pub pools: Table<Pool, Arc<PoolObject>>,
    pub memories: Table<Memory, Arc<MemoryObject>>,
    pub reclaim: Reclaim,
    /// Images whose handle is destroyed while a job still uses them, with the requests to unload
    /// them.
    pub unloading: Vec<(Call, Arc<Loaded>)>,
}

/// Several executing threads may look handles up.
const _: () = {
    const fn is_shared<T: Sync>() {}
    is_shared::<Objects>();
};

impl Objects {
    /// Creates the tables with nothing but the devices' legacy streams.
    pub fn new(devices: &Devices, counters: &Arc<Counters>) -> Self {
        let legacy = devices
            .iter()
            .map(|device| Arc::new(StreamObject::new(device.clone(), RawStream::LEGACY)));
        Self {
            legacy: legacy.collect(),
            streams: Table::new(counters),
            events: Table::new(counters),
            modules: Table::new(counters),
            libraries: Table::new(counters),
            functions: Table::new(counters),
            arrays: Arrays::new(counters),
            green_contexts: GreenContexts::default(),
            graphs: Graphs::new(counters),
            pools: Table::new(counters),
            memories: Table::new(counters),
            reclaim: Reclaim::default(),
            unloading: Vec::new(),
        }
    }

    /// Returns the legacy streams, by device.
    pub fn legacy(&self) -> &[Arc<StreamObject>] {
        &self.legacy
    }

    /// Returns a stream. The legacy stream is that of the device that the message names.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`: the handle names none.
    #[inline]
    pub fn stream(
        &self,
        call: &Call,
        handle: Handle<Stream>,
    ) -> Result<&Arc<StreamObject>, CuResult> {
        if handle.is_legacy() {
            return Ok(&self.legacy[call.device]);
        }
        self.streams.get(handle)
    }

    /// Returns a stream as [`Objects::stream`] does, or `None` without a word for a handle that names none.
    pub fn find_stream(&self, call: &Call, handle: Handle<Stream>) -> Option<&Arc<StreamObject>> {
        match handle.is_legacy() {
            true => self.legacy.get(call.device),
            false => self.streams.find(handle),
        }
    }

    /// Returns a loaded image.
    ///
    /// # Errors
    /// Same as [`Objects::stream`].
    pub fn image(&self, handle: ImageHandle) -> Result<&ImageObject, CuResult> {
        match handle {
            ImageHandle::Module(module) => self.modules.get(module),
            ImageHandle::Library(library) => self.libraries.get(library),
        }
    }

    /// Returns a loaded image, mutably.
    ///
    /// # Errors
    /// Same as [`Objects::stream`].
    pub fn image_mut(&mut self, handle: ImageHandle) -> Result<&mut ImageObject, CuResult> {
        match handle {
            ImageHandle::Module(module) => self.modules.get_mut(module),
            ImageHandle::Library(library) => self.libraries.get_mut(library),
        }
    }

    /// Enters a loaded image.
    ///
    /// # Errors
    /// Same as [`Table::enter`].
    pub fn enter_image(&mut self, new: ImageHandle, image: ImageObject) -> Result<(), CuResult> {
        match new {
            ImageHandle::Module(module) => self.modules.enter(module, image),
            ImageHandle::Library(library) => self.libraries.enter(library, image),
        }
    }

    /// Removes an image with the functions and aliases that were found in it, so that none may be
    /// named any more. Returns the image and the start addresses of its global variables.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`: there is none, or it is a library's module, which is removed
    /// with the library.
    pub fn remove_image(
        &mut self,
        handle: ImageHandle,
    ) -> Result<(Arc<Loaded>, Vec<u64>), CuResult> {
        let image = match handle {
            ImageHandle::Module(module) => {
                let known = self.modules.find(module);
                if known.is_some_and(|image| image.library.is_some()) {
                    return self.modules.refused(CuResult::INVALID_HANDLE);
                }
                self.modules.remove(module)
            }
            ImageHandle::Library(library) => self.libraries.remove(library),
        }?;
        let mut globals = Vec::new();
        let aliases = image.aliases.iter();
        let aliases: Vec<_> = aliases
            .filter_map(|alias| self.modules.slab.remove(*alias))
            .collect();
        for ImageObject {
            functions,
            globals: found,
            ..
        } in aliases.iter().chain([&image])
        {
            for function in functions {
                self.functions.slab.remove(*function);
            }
            globals.extend(found);
        }
        Ok((image.loaded, globals))
    }

    /// Forgets the objects of the context, and returns those that must be destroyed before the
    /// context is reset, and the requests to unload images that go with it. Pools and mappable
    /// memory belong to no context and stay.
    pub fn reset(&mut self) -> (Ending, Vec<Call>) {
        let streams = self.streams.drain().chain(self.reclaim.clear());
        let ending = self.green_contexts.clear(streams.collect());
        self.events.drain().for_each(drop);
        self.modules.drain().for_each(drop);
        self.libraries.drain().for_each(drop);
        self.functions.drain().for_each(drop);
        self.arrays.clear();
        self.graphs.clear();
        let unloading = self.unloading.drain(..);
        (ending, unloading.map(|(call, _)| call).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use wormhole_cpu_device::{CpuDevice, Options};
    use wormhole_device::{Device, RawModule};
    use wormhole_link::counters::CountersFile;
    use wormhole_link::neighbours::{Neighbours, NeighboursFile};

    use super::*;

    #[test]
    fn no_image_of_before_a_reset_is_unloaded_after_it() {
        let device = CpuDevice::open(&Options::default()).unwrap();
        let devices = Devices::new(vec![Arc::new(device) as Arc<dyn Device>]);
        let file = CountersFile::create().unwrap();
        let page = OwnedFd::from(file.file().try_clone().unwrap());
        let neighbours = NeighboursFile::create().unwrap();
        let word = Neighbours::map(&neighbours.descriptor().unwrap()).unwrap();
        let counters = Arc::new(Counters::map(&page, word).unwrap());
        let mut objects = Objects::new(&devices, &counters);
        let image = Arc::new(Loaded::new(devices[0].clone(), RawModule(1), None, false));
        let call = Call {
            slot: None,
            sequence: 7,
            device: 0,
            thread: 0,
            more: false,
            brief: false,
        };
        objects.unloading.push((call, image));
        let (_, unloads) = objects.reset();
        assert!(objects.unloading.is_empty());
        let sequences: Vec<u64> = unloads.iter().map(|call| call.sequence).collect();
        assert_eq!(sequences, [7], "its request is to be answered");
    }
}
