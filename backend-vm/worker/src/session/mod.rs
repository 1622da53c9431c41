//! A session as its worker sees it: the tables behind the guest's handles, the addresses it may name, and
//! what each message does to them.
//!
//! Everything here takes decoded messages. Handles are looked up, addresses are checked, and only then is
//! the device called. The executor alone owns a `Session`; what blocks is handed to [`Jobs`] with all it
//! needs, and what it leaves behind comes back as a [`Finish`].
//!
//! What runs on the executor itself:
//! - Records. Each keeps its place in the order of the ring, and the driver waits in none of them: copies
//!   and fills are between memory that the device reaches (host to host, where the driver would wait, is
//!   refused), launches are of kernels that have run before, and the guest holds its launches back
//!   below the number at which the driver's own call blocks. A guest that sends a first launch as a
//!   record, or too many of them, holds up nobody but itself.
//! - Requests that the driver answers at once (`cuStreamQuery`, `cuEventQuery`, `cuEventElapsedTime`), and those
//!   that are answered from here: `DeviceDescribe`, `LibraryGetModule`, and `TakeOutput` while text waits here.
//!
//! Every other request is a job. Its guest thread waits for the answer, so nothing that it ordered behind the
//! request is in the ring yet; what other threads sent meanwhile has no place before or after it. That
//! holds for a launch too: all work before it was handed to its stream by the executor, and none that
//! has to follow it can come before its answer.

mod arrays;
mod attributes;
mod conditional_graphs;
mod describe;
mod files;
mod graphs;
mod green_contexts;
mod images;
mod kernels;
mod launch;
mod limits;
mod memory;
mod output;
mod peers;
mod pools;
mod references;
mod sharing;
mod stream_memory;
mod streams;
mod virtual_memory;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use wormhole_api::{
    CuResult, Encode, Event as EventKind, Function, Graph, Library, Memory, Module, Outcome, Pool,
    Served, Server, Stream,
};
use wormhole_device::{Device, LaunchAttribute, MemoryOperation, RawStream};
use wormhole_ring::slot::SlotIndex;
use wormhole_ring::status::Status;

use self::graphs::GraphObject;
use self::output::PendingOutput;
use self::pools::PoolObject;
use self::virtual_memory::{MemoryObject, VirtualMemory};
use super::devices::{Devices, SessionDevice};
use super::exchange::{Exchange, Token};
use super::jobs::Jobs;
use super::objects::{EventObject, FunctionObject, Graveyard, ImageObject, Loaded, StreamObject};
use super::ranges::Ranges;
use super::registrar::{Registrar, Task};
use super::wake::Notifier;
use super::watcher::{self, Watcher};
use wormhole_link::counters::{Counter, Counters};

/// Objects of one type that a session may have at the same time.
const OBJECTS: u32 = 1 << 18;

/// Where an answer goes.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub slot: Option<SlotIndex>,
    pub sequence: u64,
    /// The number of the device that the message is for.
    pub device: usize,
}

/// An answer that is ready to be published.
#[derive(Debug)]
pub struct Answer {
    pub result: CuResult,
    pub payload: Vec<u8>,
}

/// What a job leaves to be done on the executor, and the answer it then gives.
pub type Finish = Box<dyn FnOnce(&mut Session) -> Answer + Send>;

/// What reaches the executor from other threads.
pub enum Event {
    /// A job is done.
    Finished {
        slot: SlotIndex,
        sequence: u64,
        finish: Finish,
    },
    /// A run of arena is mapped and registered.
    ExtentAdded { address: u64, bytes: u64 },
    /// A run of arena is to be given back: released when nothing here will touch it again.
    ExtentRemoved { address: u64, release: Task },
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Finished { .. } => "Finished",
            Self::ExtentAdded { .. } => "ExtentAdded",
            Self::ExtentRemoved { .. } => "ExtentRemoved",
        })
    }
}

impl Answer {
    /// Success without payload.
    pub const fn done() -> Self {
        Self::failed(CuResult::SUCCESS)
    }

    pub const fn failed(result: CuResult) -> Self {
        Self {
            result,
            payload: Vec::new(),
        }
    }

    /// An answer with a reply, which was made to fit.
    pub fn reply(reply: &impl Encode) -> Self {
        match reply.encode(|parts| parts.concat()) {
            Ok(payload) => Self {
                result: CuResult::SUCCESS,
                payload,
            },
            Err(error) => {
                tracing::error!("an answer does not fit: {error}");
                Self::failed(CuResult::NOT_SUPPORTED)
            }
        }
    }
}

/// One guest process's state.
#[derive(Debug)]
pub struct Session {
    devices: Devices,
    notifier: Notifier<Event>,
    jobs: Jobs,
    registrar: Registrar,
    exchange: Exchange,
    watcher: Watcher,
    status: Status,
    counters: Counters,
    /// Where the session segment lies, for the device and here.
    base: u64,
    /// The legacy streams, by device.
    legacy: Vec<Arc<StreamObject>>,
    streams: wormhole_api::handle::Slab<Stream, Arc<StreamObject>>,
    events: wormhole_api::handle::Slab<EventKind, Arc<EventObject>>,
    modules: wormhole_api::handle::Slab<Module, ImageObject>,
    libraries: wormhole_api::handle::Slab<Library, ImageObject>,
    functions: wormhole_api::handle::Slab<Function, FunctionObject>,
    arrays: arrays::Held,
    greens: green_contexts::Greens,
    graphs: wormhole_api::handle::Slab<Graph, GraphObject>,
    /// Bytes that the descriptions of graphs take.
    graph_bytes: usize,
    graveyard: Graveyard,
    /// Images whose handle is gone while a job still uses them, with the requests to unload them.
    unloading: Vec<(Call, Arc<Loaded>)>,
    /// Device memory that copies may name: allocations and global variables.
    device_memory: Ranges,
    /// What was allocated, and so may be freed: start and device.
    allocations: HashMap<u64, SessionDevice>,
    /// What other processes share and this one has opened.
    opened: Ranges,
    /// What this one shares, by the token of each.
    shared: HashMap<sharing::Key, Token>,
    /// Further tokens of the same.
    twice: Vec<(sharing::Key, Token)>,
    /// What was allocated from pools: start, device and bytes.
    pool_allocations: HashMap<u64, (SessionDevice, u64)>,
    pools: wormhole_api::handle::Slab<Pool, Arc<PoolObject>>,
    memories: wormhole_api::handle::Slab<Memory, Arc<MemoryObject>>,
    virtual_memory: VirtualMemory,
    /// Arena that the session was granted.
    extents: Ranges,
    files: files::Files,
    /// Held by jobs that read the arena.
    readers: Arc<()>,
    /// Runs of arena that wait for those jobs.
    leaving: Vec<Task>,
    /// Bytes of the images that jobs have copied out of the arena.
    image_bytes: u64,
    /// Room for the attributes of a launch.
    attributes: Vec<LaunchAttribute>,
    /// Room for the memory operations of a message.
    memory_operations: Vec<MemoryOperation>,
    output: PendingOutput,
    descriptions: Vec<describe::Described>,
    /// A reset is wanted or under way: nothing else may touch the device.
    resetting: bool,
    /// The reset that waits for jobs to end.
    wanted_reset: Option<Call>,
    /// Jobs that have not left anything behind yet.
    jobs_running: usize,
}

impl Server for Session {
    type Call = Call;
}

impl Session {
    /// A session without objects, whose segment is mapped at `base` and registered.
    pub fn new(
        devices: Devices,
        notifier: Notifier<Event>,
        registrar: Registrar,
        watcher: Watcher,
        status: Status,
        counters: Counters,
        base: u64,
    ) -> Self {
        let slab = OBJECTS;
        let descriptions = devices
            .iter()
            .map(|device| describe::Described::new(device.describe()))
            .collect();
        let legacy: Vec<_> = devices
            .iter()
            .map(|device| Arc::new(StreamObject::new(device.clone(), RawStream::LEGACY)))
            .collect();
        legacy.iter().for_each(|stream| watcher.watch(stream));
        Self {
            jobs: Jobs::new(notifier.clone(), counters.progress().clone()),
            notifier,
            registrar,
            descriptions,
            exchange: Exchange::none(),
            devices,
            watcher,
            status,
            counters,
            base,
            legacy,
            streams: wormhole_api::handle::Slab::new(slab),
            events: wormhole_api::handle::Slab::new(slab),
            modules: wormhole_api::handle::Slab::new(slab),
            libraries: wormhole_api::handle::Slab::new(slab),
            functions: wormhole_api::handle::Slab::new(slab),
            arrays: arrays::Held::new(slab),
            greens: green_contexts::Greens::default(),
            graphs: wormhole_api::handle::Slab::new(slab),
            graph_bytes: 0,
            graveyard: Graveyard::default(),
            unloading: Vec::new(),
            device_memory: Ranges::default(),
            allocations: HashMap::new(),
            opened: Ranges::default(),
            shared: HashMap::new(),
            twice: Vec::new(),
            pool_allocations: HashMap::new(),
            pools: wormhole_api::handle::Slab::new(slab),
            memories: wormhole_api::handle::Slab::new(slab),
            virtual_memory: VirtualMemory::default(),
            extents: Ranges::default(),
            files: files::Files::default(),
            readers: Arc::new(()),
            leaving: Vec::new(),
            image_bytes: 0,
            attributes: Vec::new(),
            memory_operations: Vec::new(),
            output: PendingOutput::default(),
            resetting: false,
            wanted_reset: None,
            jobs_running: 0,
        }
    }

    /// The way to what the tenant's other processes share.
    pub fn share_by(&mut self, exchange: Exchange) {
        self.exchange = exchange;
    }

    /// Lets the threads for what can block stay awake after a job.
    pub fn let_jobs_linger(&mut self, linger: Duration) {
        self.jobs.set_linger(linger);
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    pub fn status(&self) -> &Status {
        &self.status
    }

    /// The number of a device in the head of a record, if there are so many.
    #[inline]
    pub fn device_number(&self, device: u16) -> Option<usize> {
        let number = usize::from(device);
        (number < self.devices.count()).then_some(number)
    }

    /// The device that a message is for.
    fn here(&self, call: &Call) -> SessionDevice {
        self.devices[call.device].clone()
    }

    /// Lets the supervisor know how much memory of each device the process holds.
    pub fn count_memory(&self) {
        for device in self.devices.iter() {
            self.counters
                .set_device_memory(device.number(), self.held_on(device));
        }
    }

    /// Bytes of a device's memory that the process holds.
    fn held_on(&self, device: &SessionDevice) -> u64 {
        let number = device.number();
        device.own_memory().unwrap_or_else(|| {
            self.device_memory.bytes_of(number) + self.virtual_memory.bytes_of(number)
        })
    }

    /// Whether a fence is outstanding, for which the guest may be waiting.
    pub fn expects_fences(&self) -> bool {
        self.watcher.is_watching()
    }

    /// Whether the device is being reset, so that no record may be taken.
    pub fn is_resetting(&self) -> bool {
        self.resetting
    }

    /// A run of arena that is mapped and registered may be named from now on.
    pub fn add_extent(&mut self, address: u64, bytes: u64) {
        if !self.extents.insert(address, bytes) {
            tracing::error!("arena at {address:#x} was granted twice");
        }
    }

    /// Takes a run of arena out of what may be named; it is released when nothing reads it any more.
    pub fn remove_extent(&mut self, address: u64, release: Task) {
        if self.extents.remove(address).is_none() {
            tracing::error!("arena at {address:#x} is to be given back and was not granted");
            return;
        }
        self.leaving.push(release);
        self.release_leaving();
    }

    /// A job's leavings have been dealt with, so what waited for it goes on: requests that cannot come back,
    /// with the error to answer.
    pub fn job_finished(&mut self) -> Vec<(Call, CuResult)> {
        self.jobs_running -= 1;
        let mut refused = self.unload_unused();
        if self.jobs_running == 0
            && let Some(call) = self.wanted_reset.take()
            && let Err(error) = self.start_reset(&call)
        {
            refused.push((call, error));
        }
        refused
    }

    /// Does what had to wait for a job.
    pub fn sweep(&mut self) {
        self.graveyard.sweep(&self.watcher);
        self.release_leaving();
    }

    fn release_leaving(&mut self) {
        if Arc::strong_count(&self.readers) == 1 {
            for release in self.leaving.drain(..) {
                self.registrar.run(release);
            }
        }
    }

    /// Translates a failure of the device, and publishes it if it was the context's end.
    fn failed(&self, error: CuResult) -> CuResult {
        self.counters.add(Counter::Failures, 1);
        if let Some(sticky) = self.devices.fault() {
            watcher::publish_death(&self.status, sticky);
        }
        error
    }

    fn done<T>(&self, result: wormhole_device::Result<T>) -> Result<T, CuResult> {
        result.map_err(|error| self.failed(error))
    }

    fn invalid_handle(&self) -> CuResult {
        self.counters.add(Counter::InvalidHandles, 1);
        CuResult::INVALID_HANDLE
    }

    fn invalid_address(&self) -> CuResult {
        self.counters.add(Counter::InvalidAddresses, 1);
        CuResult::INVALID_VALUE
    }

    /// Hands a job of a device to the thread of the caller's slot.
    fn defer<R>(
        &mut self,
        call: &Call,
        device: SessionDevice,
        job: impl FnOnce(&dyn Device) -> Finish + Send + 'static,
    ) -> Outcome<R> {
        let Some(slot) = call.slot else {
            return Err(CuResult::INVALID_VALUE);
        };
        let handed = self.jobs.run(device, slot, call.sequence, job);
        self.done(handed)?;
        self.jobs_running += 1;
        Ok(Served::Deferred)
    }

    /// A job that asks a device, and what becomes of its answer.
    fn ask<R, T: Send + 'static>(
        &mut self,
        call: &Call,
        device: SessionDevice,
        ask: impl FnOnce(&dyn Device) -> wormhole_device::Result<T> + Send + 'static,
        answer: impl FnOnce(&mut Self, T) -> Answer + Send + 'static,
    ) -> Outcome<R> {
        self.defer(call, device, move |device: &dyn Device| {
            let result = ask(device);
            Box::new(move |session: &mut Self| match result {
                Ok(found) => answer(session, found),
                Err(error) => Answer::failed(session.failed(error)),
            }) as Finish
        })
    }
}
