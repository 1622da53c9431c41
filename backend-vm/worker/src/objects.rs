//! What a session's handles stand for.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use wormhole_api::{Function, Handle, Library, Module};
use wormhole_device::{
    ArrayShape, ManagedPlace, RawArray, RawEvent, RawFunction, RawGreenContext, RawMipmap,
    RawModule, RawStream, ReferenceTo,
};
use wormhole_ring::fence::{FenceIndex, Fences};

use super::devices::SessionDevice;
use super::registrar::{Registrar, Task};
use super::watcher::Watcher;

/// [`StreamObject::fence`] of a stream behind whose work no fence was asked for.
const NO_FENCE: u32 = u32::MAX;

/// A green context. Jobs hold it while they use it, and its streams as long as they live: a stream must not outlive
/// it. It is destroyed when nobody does.
#[derive(Debug)]
pub struct GreenContextObject {
    pub device: SessionDevice,
    pub raw: RawGreenContext,
    registrar: Registrar,
    ended: AtomicBool,
}

impl GreenContextObject {
    pub fn new(device: SessionDevice, raw: RawGreenContext, registrar: Registrar) -> Self {
        Self {
            device,
            raw,
            registrar,
            ended: AtomicBool::new(false),
        }
    }

    /// Destroys it, if that is not done yet; it may wait. Nobody uses it any more.
    pub fn end(&self) -> wormhole_device::Result<()> {
        if self.ended.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.device.destroy_green(self.raw)
    }
}

impl Drop for GreenContextObject {
    /// The last holder may be the executor, which must not wait.
    fn drop(&mut self) {
        if *self.ended.get_mut() {
            return;
        }
        let (device, raw) = (self.device.clone(), self.raw);
        self.registrar.run(Task::new(move |_| {
            if let Err(error) = device.destroy_green(raw) {
                tracing::debug!("destroying a green context: {error}");
            }
        }));
    }
}

/// A stream. Jobs and the watcher hold it while they use it, so that it outlives its handle.
#[derive(Debug)]
pub struct StreamObject {
    pub device: SessionDevice,
    pub raw: RawStream,
    /// The green context that it belongs to.
    pub green: Option<Arc<GreenContextObject>>,
    /// The fence that was asked for last, and the value it will reach: it covers those before it.
    fence: AtomicU32,
    value: AtomicU64,
}

impl StreamObject {
    pub fn new(device: SessionDevice, raw: RawStream) -> Self {
        Self {
            device,
            raw,
            green: None,
            fence: AtomicU32::new(NO_FENCE),
            value: AtomicU64::new(0),
        }
    }

    /// One of a green context.
    pub fn of(green: Arc<GreenContextObject>, raw: RawStream) -> Self {
        let stream = Self::new(green.device.clone(), raw);
        Self {
            green: Some(green),
            ..stream
        }
    }

    /// Notes a fence behind the work so far. Only the executor does.
    pub fn expect(&self, fence: FenceIndex, value: u64) {
        self.value.store(value, Ordering::Relaxed);
        self.fence.store(fence.get(), Ordering::Release);
    }

    /// Forgets the fence: it will not be written.
    pub fn expect_nothing(&self) {
        self.fence.store(NO_FENCE, Ordering::Release);
    }

    /// Whether a fence has not been written yet. Beside [`StreamObject::expect`] either answer may come.
    pub fn is_awaited(&self, fences: &Fences) -> bool {
        self.awaited(fences).is_some()
    }

    /// The fence that has not been written yet: its number, what it is to become, and what it is.
    pub fn awaited(&self, fences: &Fences) -> Option<(u32, u64, u64)> {
        let fence = FenceIndex::new(self.fence.load(Ordering::Acquire))?;
        let (value, wanted) = (fences.load(fence), self.value.load(Ordering::Relaxed));
        (value < wanted).then_some((fence.get(), wanted, value))
    }
}

/// An event; held like a stream, but for the watcher.
#[derive(Debug)]
pub struct EventObject {
    pub device: SessionDevice,
    pub raw: RawEvent,
    /// A launch may record it: it keeps no time, and no other process knows it.
    pub of_launches: bool,
}

/// What was loaded. Jobs hold it while they use it or a kernel of it; it is unloaded when nobody does.
#[derive(Debug)]
pub struct Loaded {
    pub device: SessionDevice,
    pub raw: RawModule,
    /// Where its managed variables are.
    pub place: Option<ManagedPlace>,
    /// What its references name, held until they name something else. Locked by jobs, also while they bind.
    pub bound: Mutex<HashMap<(ReferenceTo, String), Used>>,
}

impl Loaded {
    pub fn new(device: SessionDevice, raw: RawModule, place: Option<ManagedPlace>) -> Self {
        Self {
            device,
            raw,
            place,
            bound: Mutex::default(),
        }
    }

    /// Whether a variable is a managed one.
    pub fn holds_managed(&self, variable: u64) -> bool {
        self.place.is_some_and(|place| {
            let offset = variable.checked_sub(place.address);
            offset.is_some_and(|offset| offset < place.bytes)
        })
    }

    /// Unloads it, and lets go of what was bound.
    pub fn unload(&self) -> wormhole_device::Result<()> {
        let unloaded = self.device.unload(self.raw);
        let mut bound = self.bound.lock().unwrap_or_else(PoisonError::into_inner);
        bound.drain().for_each(|(_, used)| used.let_go());
        unloaded
    }
}

/// A loaded image, under the handle of a module or of a library.
#[derive(Debug)]
pub struct ImageObject {
    pub loaded: Arc<Loaded>,
    /// What was handed out of it and goes with it.
    pub functions: Vec<Handle<Function>>,
    /// Starts of the global variables that may be copied to and from.
    pub globals: Vec<u64>,
    /// Modules that are this library by another name.
    pub aliases: Vec<Handle<Module>>,
    /// The library that this module is by another name.
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
    /// The image it belongs to.
    pub image: Arc<Loaded>,
    /// Bytes of the packed parameters: the driver reads as many whatever a guest sends.
    pub parameter_bytes: u64,
}

/// A mipmapped array. Whoever is the last to let go of it destroys it.
#[derive(Debug)]
pub struct MipmapObject {
    pub device: SessionDevice,
    pub raw: RawMipmap,
    pub shape: ArrayShape,
    pub levels: u32,
}

/// An array; held like a mipmapped one.
#[derive(Debug)]
pub struct ArrayObject {
    pub device: SessionDevice,
    pub raw: RawArray,
    pub shape: ArrayShape,
    /// What it is a level of.
    pub mipmap: Option<Arc<MipmapObject>>,
}

/// Destroys a mipmapped array if nobody else holds it.
pub fn let_go_of_mipmap(mipmap: Arc<MipmapObject>) -> wormhole_device::Result<()> {
    Arc::into_inner(mipmap).map_or(Ok(()), |mipmap| mipmap.device.destroy_mipmap(mipmap.raw))
}

/// Destroys an array if nobody else holds it.
pub fn let_go_of_array(array: Arc<ArrayObject>) -> wormhole_device::Result<()> {
    match Arc::into_inner(array) {
        Some(ArrayObject {
            mipmap: Some(mipmap),
            ..
        }) => let_go_of_mipmap(mipmap),
        Some(array) => array.device.destroy_array(array.raw),
        None => Ok(()),
    }
}

/// What is held by a graph, by a reference, and by jobs while a texture is made of it.
#[derive(Debug)]
pub enum Used {
    Array(Arc<ArrayObject>),
    Mipmap(Arc<MipmapObject>),
    Memory,
}

impl Used {
    /// Nobody is to hear of a failure: what is let go of has no handle any more.
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

/// Streams and events whose handle is gone while somebody still uses them.
#[derive(Debug, Default)]
pub struct Reclaim {
    streams: VecDeque<Arc<StreamObject>>,
    events: VecDeque<Arc<EventObject>>,
}

/// Entries that each burial looks at: more than the one that it may add, so that their number does not grow
/// while the executor has no quiet moment.
const LOOKS: usize = 2;

impl Reclaim {
    /// Destroys the stream now, or when its last fence has come and its last user is done.
    pub fn bury_stream(
        &mut self,
        watcher: &Watcher,
        stream: Arc<StreamObject>,
    ) -> wormhole_device::Result<()> {
        self.sweep_streams(LOOKS, watcher);
        self.end_stream(watcher, stream)
    }

    /// Destroys the event now, or when its last user is done.
    pub fn bury_event(&mut self, event: Arc<EventObject>) -> wormhole_device::Result<()> {
        self.sweep_events(LOOKS);
        self.end_event(event)
    }

    fn end_stream(
        &mut self,
        watcher: &Watcher,
        stream: Arc<StreamObject>,
    ) -> wormhole_device::Result<()> {
        // Somebody may be waiting for the fence, and a fault before it must be found.
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

    /// Destroys what nobody uses any more.
    pub fn sweep(&mut self, watcher: &Watcher) {
        self.sweep_streams(usize::MAX, watcher);
        self.sweep_events(usize::MAX);
    }

    /// Forgets everything, since the context it belonged to goes: what streams there were.
    pub fn clear(&mut self) -> impl Iterator<Item = Arc<StreamObject>> {
        self.events.clear();
        self.streams.drain(..)
    }
}
