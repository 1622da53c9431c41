//! Objects that a session's handles name.

use std::collections::{HashMap, VecDeque};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use wormhole_api::constants::function_attribute::{
    CLUSTER_SCHEDULING_POLICY_PREFERENCE, CLUSTER_SIZE_MUST_BE_SET,
};
use wormhole_api::{Function, Handle, Library, Module};
use wormhole_device::{
    ArrayShape, ManagedPlace, RawArray, RawEvent, RawFunction, RawGraph, RawGreenContext,
    RawMipmap, RawModule, RawStream, TexRefTarget,
};
use wormhole_lock::Mutex;
use wormhole_ring::fence::{FenceIndex, Fences};

use super::devices::SessionDevice;
use super::lanes::Placement;
use super::registrar::{Registrar, Task};
use super::watcher::Watcher;

/// [`StreamObject::fence`] of a stream that awaits no fence.
const NO_FENCE: u32 = u32::MAX;

/// A green context. Jobs hold it while they use it, and its streams hold it for their lifetime,
/// because a stream must not outlive its green context. Destroyed when the last reference is
/// dropped.
#[derive(Debug)]
pub struct GreenContextObject {
    pub device: SessionDevice,
    pub raw: RawGreenContext,
    registrar: Registrar,
    ended: AtomicBool,
    /// Part of the session's room for green contexts.
    room: Arc<()>,
}

impl GreenContextObject {
    pub fn new(
        device: SessionDevice,
        raw: RawGreenContext,
        registrar: Registrar,
        room: Arc<()>,
    ) -> Self {
        Self {
            device,
            raw,
            registrar,
            ended: AtomicBool::new(false),
            room,
        }
    }

    /// Destroys the green context unless that is done; may block. Nothing may use it afterwards.
    pub fn end(&self) -> wormhole_device::Result<()> {
        if self.ended.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.device.destroy_green(self.raw)
    }
}

impl Drop for GreenContextObject {
    /// Destroys on the registrar: the last reference may be the executor's, which must not block.
    fn drop(&mut self) {
        if *self.ended.get_mut() {
            return;
        }
        let (device, raw, room) = (self.device.clone(), self.raw, Arc::clone(&self.room));
        self.registrar.run(Task::new(move |_| {
            if let Err(error) = device.destroy_green(raw) {
                tracing::debug!("destroying a green context: {error}");
            }
            drop(room);
        }));
    }
}

/// A stream. Jobs and the watcher hold it while they use it, so that it outlives its handle.
#[derive(Debug)]
pub struct StreamObject {
    pub device: SessionDevice,
    pub raw: RawStream,
    /// Green context of the stream, if it has one.
    pub green: Option<Arc<GreenContextObject>>,
    /// Whether its work and that of the legacy stream wait for each other.
    pub blocking: bool,
    /// Whether attributes have been set on it, which a graph's kernels would not have.
    pub has_attributes: AtomicBool,
    /// Lane that its launches go to.
    pub placement: Placement,
    /// Fence that was requested last. Its value, in `value`, covers all fences before it.
    fence: AtomicU32,
    value: AtomicU64,
}

impl StreamObject {
    pub fn new(device: SessionDevice, raw: RawStream) -> Self {
        Self {
            device,
            raw,
            green: None,
            blocking: true,
            has_attributes: AtomicBool::new(false),
            placement: Placement::default(),
            fence: AtomicU32::new(NO_FENCE),
            value: AtomicU64::new(0),
        }
    }

    /// Creates the object of a stream in a green context.
    pub fn of(green: Arc<GreenContextObject>, raw: RawStream) -> Self {
        let stream = Self::new(green.device.clone(), raw);
        Self {
            green: Some(green),
            ..stream
        }
    }

    /// Records a fence behind the work so far. Called by the executor only.
    pub fn expect(&self, fence: FenceIndex, value: u64) {
        self.value.store(value, Ordering::Relaxed);
        self.fence.store(fence.get(), Ordering::Release);
    }

    /// Forgets the fence, because the device will not write it.
    pub fn expect_nothing(&self) {
        self.fence.store(NO_FENCE, Ordering::Release);
    }

    /// Returns whether a fence is not written yet. Concurrently with [`StreamObject::expect`]
    /// either answer may come.
    pub fn is_awaited(&self, fences: &Fences) -> bool {
        self.awaited(fences).is_some()
    }

    /// Returns the fence that is not written yet: its index, the awaited value and the current
    /// value.
    pub fn awaited(&self, fences: &Fences) -> Option<(u32, u64, u64)> {
        let fence = FenceIndex::new(self.fence.load(Ordering::Acquire))?;
        let (value, wanted) = (fences.load(fence), self.value.load(Ordering::Relaxed));
        (value < wanted).then_some((fence.get(), wanted, value))
    }
}

/// An event. Held as a stream is, except by the watcher.
#[derive(Debug)]
pub struct EventObject {
    pub device: SessionDevice,
    pub raw: RawEvent,
    /// Whether a launch may record it: the event has no timing and is not shared between processes.
    pub of_launches: bool,
    /// Whether it is shared between processes.
    pub shared: bool,
}

/// A loaded image. Jobs hold it while they use it or one of its kernels; it is unloaded when the
/// last reference is dropped.
#[derive(Debug)]
pub struct Loaded {
    pub device: SessionDevice,
    pub raw: RawModule,
    /// Place of its managed variables.
    pub place: Option<ManagedPlace>,
    /// Objects bound to its texture and surface references, held until the reference is bound anew.
    /// Jobs lock it, also while they bind.
    pub bound: Mutex<HashMap<(TexRefTarget, String), Used>>,
    /// Executable graphs that hold its kernels, once it is to be unloaded.
    pub graphs: Mutex<Vec<EndingGraph>>,
    /// Whether it is small and was loaded in a short time.
    pub is_quick: bool,
}

/// An executable graph that nothing uses any more, with the objects that its nodes name.
#[derive(Debug)]
pub struct EndingGraph {
    pub raw: RawGraph,
    pub events: Vec<Arc<EventObject>>,
    pub arrays: Vec<Arc<ArrayObject>>,
}

impl EndingGraph {
    /// Destroys the graph, then the arrays whose last user it was. A failure is logged only.
    fn end(self, device: &SessionDevice) {
        if let Err(error) = device.destroy_graph(self.raw) {
            tracing::debug!("destroying a graph whose image is unloaded: {error}");
        }
        drop(self.events);
        self.arrays
            .into_iter()
            .map(Used::Array)
            .for_each(Used::let_go);
    }
}

impl Loaded {
    pub fn new(
        device: SessionDevice,
        raw: RawModule,
        place: Option<ManagedPlace>,
        is_quick: bool,
    ) -> Self {
        Self {
            device,
            raw,
            place,
            bound: Mutex::default(),
            graphs: Mutex::default(),
            is_quick,
        }
    }

    /// Returns whether an address lies in the image's managed variables.
    pub fn holds_managed(&self, variable: u64) -> bool {
        self.place.is_some_and(|place| {
            let offset = variable.checked_sub(place.address);
            offset.is_some_and(|offset| offset < place.bytes)
        })
    }

    /// Destroys the graphs that hold its kernels, unloads the image and releases the bound objects.
    pub fn unload(&self) -> wormhole_device::Result<()> {
        for graph in self.graphs.lock().drain(..) {
            graph.end(&self.device);
        }
        let unloaded = self.device.unload(self.raw);
        let mut bound = self.bound.lock();
        bound.drain().for_each(|(_, used)| used.let_go());
        unloaded
    }
}

/// A loaded image, under the handle of a module or of a library.
#[derive(Debug)]
pub struct ImageObject {
    pub loaded: Arc<Loaded>,
    /// Functions handed out of the image. They are removed with it.
    pub functions: Vec<Handle<Function>>,
    /// Start addresses of the global variables that copies may name.
    pub globals: Vec<u64>,
    /// Modules that name this library's contents (`cuLibraryGetModule`).
    pub aliases: Vec<Handle<Module>>,
    /// Library whose contents this module names.
    pub library: Option<Handle<Library>>,
}

impl ImageObject {
    pub fn new(loaded: Arc<Loaded>) -> Self {
        Self {
            loaded,
            functions: Vec::new(),
            globals: Vec::new(),
            aliases: Vec::new(),
            library: None,
        }
    }
}

/// A kernel.
#[derive(Debug)]
pub struct FunctionObject {
    pub raw: RawFunction,
    /// Image that contains the kernel.
    pub image: Arc<Loaded>,
    /// Bytes of the packed parameters: the driver reads this many, however few a guest sends.
    pub parameter_bytes: u64,
    /// Whether its blocks form clusters without an attribute of the launch. A graph's node that is given another kernel keeps
    /// the clusters of its first one (driver 580).
    pub clustered: AtomicBool,
}

/// Attributes of functions that are about clusters.
pub const CLUSTERS: RangeInclusive<i32> =
    CLUSTER_SIZE_MUST_BE_SET..=CLUSTER_SCHEDULING_POLICY_PREFERENCE;

/// A mipmapped array. Destroyed by the holder of the last reference.
#[derive(Debug)]
pub struct MipmapObject {
    pub device: SessionDevice,
    pub raw: RawMipmap,
    pub shape: ArrayShape,
    pub levels: u32,
}

/// An array. Held as a mipmapped array is.
#[derive(Debug)]
pub struct ArrayObject {
    pub device: SessionDevice,
    pub raw: RawArray,
    pub shape: ArrayShape,
    /// Mipmapped array that contains this level.
    pub mipmap: Option<Arc<MipmapObject>>,
}

/// Destroys a mipmapped array if this is the last reference.
pub fn let_go_of_mipmap(mipmap: Arc<MipmapObject>) -> wormhole_device::Result<()> {
    Arc::into_inner(mipmap).map_or(Ok(()), |mipmap| mipmap.device.mipmap_destroy(mipmap.raw))
}

/// Destroys an array if this is the last reference.
pub fn let_go_of_array(array: Arc<ArrayObject>) -> wormhole_device::Result<()> {
    match Arc::into_inner(array) {
        Some(ArrayObject {
            mipmap: Some(mipmap),
            ..
        }) => let_go_of_mipmap(mipmap),
        Some(array) => array.device.array_destroy(array.raw),
        None => Ok(()),
    }
}

/// Resource of a texture, held by graphs, by references, and by jobs while they create the texture.
#[derive(Debug)]
pub enum Used {
    Array(Arc<ArrayObject>),
    Mipmap(Arc<MipmapObject>),
    Memory,
}

impl Used {
    /// Releases the resource and logs a failure: it has no handle any more, so no call could return
    /// the error.
    pub fn let_go(self) {
        let gone = match self {
            Self::Array(array) => let_go_of_array(array),
            Self::Mipmap(mipmap) => let_go_of_mipmap(mipmap),
            Self::Memory => Ok(()),
        };
        if let Err(error) = gone {
            tracing::debug!("destroying an array without a handle: {error}");
        }
    }
}

/// Streams and events whose handle is destroyed while they are still in use.
#[derive(Debug, Default)]
pub struct Reclaim {
    streams: VecDeque<Arc<StreamObject>>,
    events: VecDeque<Arc<EventObject>>,
}

/// Entries that each destruction inspects: more than the one it may add, so that the queue does not
/// grow while the executor is never idle.
const LOOKS: usize = 2;

impl Reclaim {
    /// Destroys the stream, now or once its last fence is written and its last user is done.
    pub fn destroy_stream(
        &mut self,
        watcher: &Watcher,
        stream: Arc<StreamObject>,
    ) -> wormhole_device::Result<()> {
        self.sweep_streams(LOOKS, watcher);
        self.end_stream(watcher, stream)
    }

    /// Destroys the event, now or once its last user is done.
    pub fn destroy_event(&mut self, event: Arc<EventObject>) -> wormhole_device::Result<()> {
        self.sweep_events(LOOKS);
        self.end_event(event)
    }

    fn end_stream(
        &mut self,
        watcher: &Watcher,
        stream: Arc<StreamObject>,
    ) -> wormhole_device::Result<()> {
        // The guest may be waiting for the fence, and a fault before it must be detected.
        if watcher.awaits(&stream) {
            self.streams.push_back(stream);
            return Ok(());
        }
        watcher.forget(&stream);
        match Arc::try_unwrap(stream) {
            Ok(stream) => stream.device.destroy_stream(stream.raw),
            Err(used) => {
                self.streams.push_back(used);
                Ok(())
            }
        }
    }

    fn end_event(&mut self, event: Arc<EventObject>) -> wormhole_device::Result<()> {
        match Arc::try_unwrap(event) {
            Ok(event) => event.device.destroy_event(event.raw),
            Err(used) => {
                self.events.push_back(used);
                Ok(())
            }
        }
    }

    fn sweep_streams(&mut self, most: usize, watcher: &Watcher) {
        for _ in 0..most.min(self.streams.len()) {
            if let Some(stream) = self.streams.pop_front()
                && let Err(error) = self.end_stream(watcher, stream)
            {
                tracing::debug!("destroying a stream: {error}");
            }
        }
    }

    fn sweep_events(&mut self, most: usize) {
        for _ in 0..most.min(self.events.len()) {
            if let Some(event) = self.events.pop_front()
                && let Err(error) = self.end_event(event)
            {
                tracing::debug!("destroying an event: {error}");
            }
        }
    }

    /// Destroys the entries that are not in use any more.
    pub fn sweep(&mut self, watcher: &Watcher) {
        self.sweep_streams(usize::MAX, watcher);
        self.sweep_events(usize::MAX);
    }

    /// Forgets all entries, because their context is going to be reset, and returns the streams.
    pub fn clear(&mut self) -> impl Iterator<Item = Arc<StreamObject>> {
        self.events.clear();
        self.streams.drain(..)
    }
}
