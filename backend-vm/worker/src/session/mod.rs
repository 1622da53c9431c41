//! A guest process's session in its worker: the objects behind the guest's handles, the addresses
//! that it may name, and the effect of each message on them.
//!
//! Functions here receive decoded messages. Handles are looked up and addresses are checked before
//! the device is called. The executor alone owns a `Session`; calls that may block run as [`Jobs`]
//! with all the data they need, and their [`Finish`] runs on the executor.
//!
//! Executed on the executor itself:
//! - Records. Each keeps its place in the order of the ring, but for launches that lanes execute
//!   ([`Lanes`]), and the driver blocks in none of them:
//!   copies and fills are between memory that the device reaches (copies from host to host, in which
//!   the driver would wait, are refused), launches are of kernels that have run before, and the guest
//!   keeps the number of its pending launches below that at which the driver's own call blocks. A
//!   guest that sends a first launch as a record, or too many of them, holds up only itself. The
//!   instantiation of a short graph whose nodes the guest has checked takes some 2 µs a node, so
//!   up to 1 ms, in which the driver waits for nothing, and the executor serves no other stream. Mapping memory and freeing addresses are notes of the driver's.
//! - Requests that the driver answers at once (`cuStreamQuery`, `cuEventQuery`,
//!   `cuEventElapsedTime`, `cuMemAddressReserve`, and `cuMemAllocFromPoolAsync` for memory that the
//!   stream has freed), and those that the session answers: `ManagedIdle`, `DeviceDescribe`,
//!   `LibraryGetModule`, and `TakeOutput` while output is queued here.
//! - While nothing else is underway, brief requests: those in which the driver waits for nothing and takes some 10 to 60 µs
//!   (allocations and changes of mappable memory, of at most [`BRIEF_BYTES`]), and those in which it waits for the device's work
//!   alone, while there is none (`cuMemFree`, and the load of an image that was [loaded quickly](quick_images) before). The
//!   unload of such an image, for which no guest waits, is the executor's then too.
//!
//! Every other request is a job. Its guest thread waits for the answer, so no later work of that
//! thread is in the ring yet; work that other threads sent meanwhile is unordered relative to it.
//! This holds for a launch too: the executor has submitted all work before it to its stream, and
//! work that must follow it cannot arrive before its answer.

mod addresses;
mod arrays;
mod attributes;
mod closed;
mod conditional_graphs;
mod describe;
mod driver_calls;
mod files;
mod graphs;
mod green_contexts;
mod handles;
mod images;
mod kernels;
mod launch;
mod limits;
mod managed;
mod mem_ops;
mod memory;
mod order;
mod output;
mod peers;
mod pools;
mod quick_images;
mod reset;
mod sharing;
mod slabs;
mod streams;
mod texture_references;
mod virtual_memory;

pub use files::FileSource;

use std::sync::Arc;
use std::time::Duration;

use wormhole_api::{CuResult, Encode, Outcome, Served, Server};
use wormhole_device::{Device, LaunchAttribute, MemoryOperation};
use wormhole_link::counters::{Counter, Counters};
use wormhole_ring::slot::SlotIndex;
use wormhole_ring::status::{EndCause, Status};

use self::addresses::Addresses;
use self::handles::Objects;
use self::managed::Placements;
use self::output::PendingOutput;
use self::pools::Recycled;
use self::quick_images::QuickImages;
use self::reset::Reset;
use self::sharing::Shares;
use super::chains::{self, Chains};
use super::devices::{Devices, SessionDevice};
use super::exchange::Exchange;
use super::jobs::Jobs;
use super::lanes::{Lanes, Plan, Report};
use super::registrar::{Registrar, Task};
use super::unloads::{Unloads, ask_twice};
use super::wake::Notifier;
use super::watcher::{self, Watcher};

/// Largest number of objects of one type that a session may have at the same time.
const OBJECTS: u32 = 1 << 18;

/// Most streams of a session whose device is asked for its work before a brief call: a question takes the driver some 0.3 µs, and handing the
/// call over some 10 µs.
const MOST_ASKED: usize = 16;

/// Greatest size of memory whose allocation, release or mapping is brief. On one H200, whose memory is not short, the driver
/// takes up to some 60 µs for it, and waits for no kernel but in `cuMemFree`.
const BRIEF_BYTES: u64 = 64 << 20;

/// Destination of an answer, and the device of the message.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub slot: Option<SlotIndex>,
    pub sequence: u64,
    /// Number of the device that the message names.
    pub device: usize,
    /// Number of the guest's thread; 0 if it is not known.
    pub thread: u16,
    /// Whether another record lies in the ring behind the call's, as far as the executor has looked.
    pub more: bool,
    /// Whether the driver waits for nothing in the call.
    pub brief: bool,
}

impl Call {
    /// Returns the call as one in which the driver waits for nothing.
    fn brief(self) -> Self {
        Self {
            brief: true,
            ..self
        }
    }

    /// Returns the call as a brief one if it is that.
    fn brief_if(self, is_brief: bool) -> Self {
        match is_brief {
            true => self.brief(),
            false => self,
        }
    }
}

/// An answer, ready to be published.
#[derive(Debug)]
pub struct Answer {
    pub result: CuResult,
    pub payload: Vec<u8>,
}

/// Last part of a job, which runs on the executor and returns the answer.
pub type Finish = Box<dyn FnOnce(&mut Session) -> Answer + Send>;

/// Event that another thread sends to the executor.
pub enum Event {
    /// A job is done.
    Finished {
        slot: SlotIndex,
        sequence: u64,
        finish: Finish,
    },
    /// A run of arena is mapped and registered.
    ExtentAdded { address: u64, bytes: u64 },
    /// A run of arena is to be returned. `release` runs once nothing here uses the run.
    ExtentRemoved { address: u64, release: Task },
    /// A lane's call has failed; the lane has set the status word.
    LaneFailed,
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Finished { .. } => "Finished",
            Self::ExtentAdded { .. } => "ExtentAdded",
            Self::ExtentRemoved { .. } => "ExtentRemoved",
            Self::LaneFailed => "LaneFailed",
        })
    }
}

impl Answer {
    /// Returns success without payload.
    pub const fn done() -> Self {
        Self::failed(CuResult::SUCCESS)
    }

    pub const fn failed(result: CuResult) -> Self {
        Self {
            result,
            payload: Vec::new(),
        }
    }

    /// Returns success without payload, or the failure.
    pub fn of(result: Result<(), CuResult>) -> Self {
        result.map_or_else(Self::failed, |()| Self::done())
    }

    /// Encodes a reply. Replies are defined to fit an answer.
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

/// Buffers that messages reuse one after the other.
#[derive(Debug, Default)]
struct Scratch {
    /// Attributes of a launch.
    attributes: Vec<LaunchAttribute>,
    /// Memory operations of a message.
    memory_operations: Vec<MemoryOperation>,
    /// Bytes of the images that are being loaded, each in a private copy.
    image_bytes: u64,
}

/// State of one guest process.
#[derive(Debug)]
pub struct Session {
    devices: Devices,
    descriptions: Vec<describe::Described>,
    notifier: Notifier<Event>,
    jobs: Jobs,
    lanes: Lanes,
    chains: Chains,
    registrar: Registrar,
    unloads: Unloads,
    watcher: Watcher,
    status: Status,
    counters: Arc<Counters>,
    /// Address of the session segment, for the device and in this process.
    base: u64,
    objects: Objects,
    addresses: Addresses,
    placements: Placements,
    recycled: Recycled,
    reset: Reset,
    shares: Shares,
    scratch: Scratch,
    output: PendingOutput,
    quick_images: QuickImages,
}

impl Server for Session {
    type Call = Call;
}

impl Session {
    /// Creates a session without objects, whose segment is mapped at `base` and registered.
    pub fn new(
        devices: Devices,
        notifier: Notifier<Event>,
        registrar: Registrar,
        watcher: Watcher,
        status: Status,
        counters: Counters,
        base: u64,
    ) -> Self {
        let counters = Arc::new(counters);
        let descriptions = devices
            .iter()
            .map(|device| describe::Described::new(device.describe()))
            .collect();
        let objects = Objects::new(&devices, &counters);
        objects
            .legacy()
            .iter()
            .for_each(|stream| watcher.watch(stream));
        Self {
            descriptions,
            jobs: Jobs::new(notifier.clone(), counters.progress().clone()),
            lanes: Lanes::new(devices.clone(), status.clone(), notifier.clone()),
            chains: Chains::new(devices.clone(), Arc::clone(&counters)),
            devices,
            notifier,
            registrar,
            unloads: Unloads::default(),
            watcher,
            status,
            base,
            objects,
            addresses: Addresses::new(Arc::clone(&counters)),
            counters,
            placements: Placements::default(),
            recycled: Recycled::default(),
            reset: Reset::default(),
            shares: Shares::default(),
            scratch: Scratch::default(),
            output: PendingOutput::default(),
            quick_images: QuickImages::default(),
        }
    }

    /// Sets the exchange with the tenant's other processes.
    pub fn share_by(&mut self, exchange: Exchange) {
        self.shares.share_by(exchange);
    }

    /// Lets job threads stay awake after a job.
    pub fn let_jobs_linger(&mut self, linger: Duration) {
        self.jobs.set_linger(linger);
    }

    /// Lets launches go to lanes.
    pub fn launch_in_lanes(&mut self, plan: Plan) {
        self.lanes.set_plan(plan);
    }

    /// Lets launches go into chains.
    pub fn launch_in_chains(&mut self, plan: chains::Plan) {
        self.chains.set_plan(plan);
    }

    /// Returns a view of the lanes, for a dump.
    pub fn lanes(&self) -> Report {
        self.lanes.report()
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    pub fn status(&self) -> &Status {
        &self.status
    }

    /// Converts the device number in the head of a record. Returns `None` if there is no such
    /// device.
    #[inline]
    pub fn device_number(&self, device: u16) -> Option<usize> {
        let number = usize::from(device);
        (number < self.devices.count()).then_some(number)
    }

    /// Returns the device that a message names.
    fn here(&self, call: &Call) -> SessionDevice {
        self.devices[call.device].clone()
    }

    /// Publishes in the counters how much memory of each device the process holds.
    pub fn count_memory(&self) {
        for device in self.devices.iter() {
            self.counters
                .set_device_memory(device.number(), self.held_on(device));
        }
    }

    /// Returns the bytes of a device's memory that the process holds.
    fn held_on(&self, device: &SessionDevice) -> u64 {
        let counted = || self.addresses.bytes_of(device.number());
        device.own_memory().unwrap_or_else(counted)
    }

    /// Returns whether fences are outstanding, for which the guest may be waiting.
    pub fn expects_fences(&self) -> bool {
        self.watcher.is_watching()
    }

    /// Returns whether a reset has begun, so that no record may be taken.
    pub fn is_resetting(&self) -> bool {
        self.reset.has_begun()
    }

    /// Admits addresses in a run of arena that is mapped and registered.
    pub fn add_extent(&mut self, address: u64, bytes: u64) {
        self.addresses.add_extent(address, bytes);
    }

    /// Removes a run of arena, so that it may not be named any more. `release` runs once no job
    /// reads arena.
    pub fn remove_extent(&mut self, address: u64, release: Task) {
        if let Some(found) = self.addresses.host_range(address)
            && self.placements.has_home_in(found.start, found.bytes)
        {
            tracing::error!("arena at {address:#x} is to be given back and is in use");
            return;
        }
        self.addresses
            .remove_extent(address, release, &self.registrar);
    }

    /// Does work that had to wait until a job was done.
    pub fn sweep(&mut self) {
        self.objects.reclaim.sweep(&self.watcher);
        self.addresses.release_pending(&self.registrar);
    }

    /// Counts a failure of the device, and publishes the context's death if that is the cause.
    fn failed(&self, error: CuResult) -> CuResult {
        self.counters.add(Counter::Failures, 1);
        if let Some(sticky) = self.devices.fault() {
            watcher::publish_death(&self.status, sticky);
        }
        error
    }

    /// Handles a failure that no answer carries. The program went on as if the call had worked, so the error becomes sticky.
    /// The program learns the first one.
    pub fn fail(&self, name: &str, result: CuResult) {
        tracing::warn!("{name} failed with {}, and no answer carries it", result.0);
        self.make_sticky(result);
    }

    /// Makes an error the session's status, if there is none yet.
    pub fn make_sticky(&self, result: CuResult) {
        self.status
            .set_once(result.0, EndCause::of_device(result.0));
    }

    fn done<T>(&self, result: wormhole_device::Result<T>) -> Result<T, CuResult> {
        result.map_err(|error| self.failed(error))
    }

    /// Returns whether no other thread works for the session that may hold a lock of the driver's for as long as it waits.
    #[inline]
    fn is_quiet(&self) -> bool {
        self.reset.is_quiet() && !self.unloads.are_outstanding() && !self.registrar.is_busy()
    }

    /// Returns whether a call that allocates, releases or maps memory of a size is brief. Of several devices, which may work with
    /// each other's memory, none is known to be.
    fn takes_little(&self, bytes: u64) -> bool {
        bytes <= BRIEF_BYTES && self.devices.count() == 1
    }

    /// Returns whether a call in which the driver waits for nothing but a device's work is brief.
    fn waits_for_nothing(&self, device: &SessionDevice) -> bool {
        let few = self.objects.streams.len() <= MOST_ASKED && self.devices.count() == 1;
        few && self.is_quiet() && self.all_idle(device).is_ok()
    }

    /// Hands a job of a device to the thread of the caller's slot. The executor runs a brief one itself while nothing else is
    /// underway: that spares two hand-overs between threads.
    fn defer<R>(
        &mut self,
        call: &Call,
        device: SessionDevice,
        job: impl FnOnce(&dyn Device) -> Finish + Send + 'static,
    ) -> Outcome<R> {
        let Some(slot) = call.slot else {
            return Err(CuResult::INVALID_VALUE);
        };
        if call.brief && self.is_quiet() {
            self.jobs.run_here(&device, slot, call.sequence, job);
        } else {
            let handed = self.jobs.run(device, slot, call.sequence, job);
            self.done(handed)?;
        }
        self.reset.job_begun();
        Ok(Served::Deferred)
    }

    /// Runs a job that queries a device. `answer` turns the result into the answer on the executor.
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

    /// As [`ask`](Self::ask), for memory ([`ask_twice`]).
    fn ask_for_memory<R, T: Send + 'static>(
        &mut self,
        call: &Call,
        device: SessionDevice,
        ask: impl Fn(&dyn Device) -> wormhole_device::Result<T> + Send + 'static,
        answer: impl FnOnce(&mut Self, T) -> Answer + Send + 'static,
    ) -> Outcome<R> {
        let outstanding = self.unloads.outstanding();
        let ask = move |device: &dyn Device| ask_twice(outstanding, || ask(device));
        self.ask(call, device, ask, answer)
    }

    /// Runs a job that changes something of a device, and answers whether that succeeded.
    fn order<R>(
        &mut self,
        call: &Call,
        device: SessionDevice,
        order: impl FnOnce(&dyn Device) -> wormhole_device::Result<()> + Send + 'static,
    ) -> Outcome<R> {
        self.ask(call, device, order, |_, ()| Answer::done())
    }
}
