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

mod addresses;
mod arrays;
mod attributes;
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
mod mem_ops;
mod memory;
mod output;
mod peers;
mod pools;
mod reset;
mod sharing;
mod streams;
mod texture_references;
mod virtual_memory;

use std::sync::Arc;
use std::time::Duration;

use wormhole_api::{CuResult, Encode, Outcome, Served, Server};
use wormhole_device::{Device, LaunchAttribute, MemoryOperation};
use wormhole_ring::slot::SlotIndex;
use wormhole_ring::status::Status;

use self::addresses::Addresses;
use self::handles::Objects;
use self::output::PendingOutput;
use self::reset::Reset;
use self::sharing::Shares;
use super::devices::{Devices, SessionDevice};
use super::exchange::Exchange;
use super::jobs::Jobs;
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

/// Room that messages use one after the other.
#[derive(Debug, Default)]
struct Scratch {
    /// The attributes of a launch.
    attributes: Vec<LaunchAttribute>,
    /// The memory operations of a message.
    memory_operations: Vec<MemoryOperation>,
    /// Bytes of the images that jobs have copied out of the arena.
    image_bytes: u64,
}

/// One guest process's state.
#[derive(Debug)]
pub struct Session {
    devices: Devices,
    descriptions: Vec<describe::Described>,
    notifier: Notifier<Event>,
    jobs: Jobs,
    registrar: Registrar,
    watcher: Watcher,
    status: Status,
    counters: Arc<Counters>,
    /// Where the session segment lies, for the device and here.
    base: u64,
    objects: Objects,
    addresses: Addresses,
    reset: Reset,
    shares: Shares,
    scratch: Scratch,
    output: PendingOutput,
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
            devices,
            descriptions,
            jobs: Jobs::new(notifier.clone(), counters.progress().clone()),
            notifier,
            registrar,
            watcher,
            status,
            base,
            objects,
            addresses: Addresses::new(Arc::clone(&counters)),
            counters,
            reset: Reset::default(),
            shares: Shares::default(),
            scratch: Scratch::default(),
            output: PendingOutput::default(),
        }
    }

    /// The way to what the tenant's other processes share.
    pub fn share_by(&mut self, exchange: Exchange) {
        self.shares.share_by(exchange);
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
        let counted = || self.addresses.bytes_of(device.number());
        device.own_memory().unwrap_or_else(counted)
    }

    /// Whether a fence is outstanding, for which the guest may be waiting.
    pub fn expects_fences(&self) -> bool {
        self.watcher.is_watching()
    }

    /// Whether the device is being reset, so that no record may be taken.
    pub fn is_resetting(&self) -> bool {
        self.reset.has_begun()
    }

    /// A run of arena that is mapped and registered may be named from now on.
    pub fn add_extent(&mut self, address: u64, bytes: u64) {
        self.addresses.add_extent(address, bytes);
    }

    /// Takes a run of arena out of what may be named; it is released when nothing reads it any more.
    pub fn remove_extent(&mut self, address: u64, release: Task) {
        self.addresses
            .remove_extent(address, release, &self.registrar);
    }

    /// Does what had to wait for a job.
    pub fn sweep(&mut self) {
        self.objects.graveyard.sweep(&self.watcher);
        self.addresses.release_leaving(&self.registrar);
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
        self.reset.job_begun();
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
