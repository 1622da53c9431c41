//! A worker: the process that executes one guest process's calls.
//!
//! The supervisor starts it, confined, with one stream as its only connection. The worker reserves
//! the window's address band, opens its devices, reports that it is ready, and is later assigned a
//! session. From then on the [`executor`] serves records from the session's ring, [`lanes`] launch
//! on streams that are independent, [`jobs`] runs calls that may block, the [`registrar`] maps and
//! registers arena, `unloads` unloads modules while no call waits, the [`watcher`] detects a dead
//! context, and the main thread only reads the supervisor's messages. When the supervisor closes
//! its end of the stream, the worker publishes that in the session's status word and exits.
//!
//! Invariants:
//! - One session per worker, ever. Its end is the process's end, which frees everything on the device.
//! - Bytes that the guest wrote are copied out before they are decoded, and are decoded without
//!   unsafe code.

mod abort_on_panic;
pub mod chains;
mod command;
mod confinement;
mod description;
pub mod devices;
pub mod exchange;
pub mod executor;
pub mod jobs;
pub mod lanes;
mod objects;
mod open;
mod peers;
mod ranges;
pub mod registrar;
pub mod session;
mod sleepers;
mod unloads;
pub mod wake;
pub mod watcher;
mod window;

pub use self::command::main;
pub use self::confinement::confine;
pub use self::window::reserve_bands;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use wormhole_api::{CuResult, PROTOCOL_HASH};
use wormhole_device::{Device, Found};
use wormhole_link::channel::{self, ChannelError, Incoming, Outgoing};
use wormhole_link::counters::Counters;
use wormhole_link::device::DeviceChoice;
use wormhole_link::neighbours::Neighbours;
use wormhole_link::process::{BROKEN, CONTROL, NO_ARENA};
use wormhole_link::tasks;
use wormhole_lock::Mutex;
use wormhole_ring::control::{
    ArenaRun, FEATURE_FILE_MEMORY, FEATURE_FILES, Fetched, Grant, Message, Refusal, Shared,
};
use wormhole_ring::fence::Fences;
use wormhole_ring::memory::SessionMemory;
use wormhole_ring::ring::Consumer;
use wormhole_ring::slot::AnswerSlots;
use wormhole_ring::status::{EndCause, Status};
use wormhole_ring::waits::Waits;

use self::abort_on_panic::AbortOnPanic;
use self::devices::Devices;
use self::exchange::{Exchange, Reply};
use self::executor::Executor;
use self::lanes::Report;
use self::open::Opened;
pub use self::open::Tuning;
use self::registrar::{Registrar, Registrations, Task};
use self::session::{Event, FileSource, Session};
use self::sleepers::Sleepers;
use self::wake::{Inbox, Notifier};
use self::watcher::{Watcher, publish_death};
use self::window::{Window, WindowError};

/// Result of every call after the supervisor is gone.
pub const SUPERVISOR_LOST_RESULT: u32 = CuResult::SYSTEM_NOT_READY.0;

/// Reason why a worker cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(transparent)]
    Window(#[from] WindowError),
    #[error("the device {device} cannot be used: {reason}")]
    Device {
        device: DeviceChoice,
        reason: String,
    },
    #[error("the stream to the supervisor failed")]
    Channel(#[from] ChannelError),
    #[error("the supervisor sent {0} where an assignment was due")]
    Unexpected(&'static str),
    #[error("the assignment came without its descriptors")]
    Descriptors,
    #[error("the counters page cannot be mapped")]
    Counters(#[source] io::Error),
    #[error("the memory at {address:#x} cannot be registered with the device: {error}")]
    Register { address: u64, error: CuResult },
    #[error("the worker cannot make a thread or its descriptor")]
    Thread(#[source] io::Error),
}

/// Receiving side of the control stream.
#[derive(Debug)]
struct Orders {
    socket: Arc<OwnedFd>,
    incoming: Incoming,
}

/// Sending side of the control stream.
#[derive(Debug)]
struct Reports {
    socket: Arc<OwnedFd>,
    outgoing: Outgoing,
}

impl Reports {
    fn send(&mut self, message: &Message<'_>) -> Result<(), ChannelError> {
        self.send_with(message, Vec::new())
    }

    fn send_with(
        &mut self,
        message: &Message<'_>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ChannelError> {
        self.outgoing.send(&self.socket, message, descriptors)?;
        while self.outgoing.is_waiting() {
            channel::wait_writable(&self.socket).map_err(ChannelError::Socket)?;
            self.outgoing.flush(&self.socket)?;
        }
        Ok(())
    }
}

impl Orders {
    /// Waits for the next message from the supervisor.
    fn receive(&mut self) -> Result<Order, ChannelError> {
        loop {
            if let Some(message) = self.incoming.take()? {
                return Ok(match message {
                    Message::Assign(grant) => Order::Assign(grant),
                    Message::ArenaAdd(run) => Order::Add(run),
                    Message::ArenaRemove(run) => Order::Remove(run),
                    Message::Shared(shared) => Order::Shared(shared),
                    Message::Fetched(fetched) => Order::Fetched(fetched),
                    Message::Doorbell => Order::Doorbell,
                    Message::Dump => Order::Dump,
                    other => Order::Unknown(other.name()),
                });
            }
            channel::wait_readable(&self.socket).map_err(ChannelError::Socket)?;
            self.incoming.fill(&self.socket)?;
        }
    }
}

/// Message from the supervisor.
#[derive(Debug)]
enum Order {
    Assign(Grant),
    Add(ArenaRun),
    Remove(ArenaRun),
    Shared(Shared),
    Fetched(Fetched),
    Doorbell,
    Dump,
    Unknown(&'static str),
}

/// Serves one session on `choice`, from start to end, and returns the process's exit status.
///
/// # Errors
/// No session can be served, or the supervisor broke the protocol.
pub fn run(choice: DeviceChoice, socket: OwnedFd) -> Result<i32, WorkerError> {
    let socket = Arc::new(socket);
    let Opened { devices, tuning } = match open::open(choice) {
        Ok(opened) => opened,
        Err(error) => {
            let mut reports = Reports {
                socket,
                outgoing: Outgoing::default(),
            };
            refuse(&mut reports, &error)?;
            return Err(error);
        }
    };
    run_on(devices, tuning, socket)
}

/// Serves one session on devices that the calling thread has opened, from start to end, and returns
/// the process's exit status. The caller has reserved the bands ([`reserve_bands`]).
///
/// # Errors
/// Same as [`run`].
pub fn run_on(
    devices: Vec<Arc<dyn Device>>,
    tuning: Tuning,
    socket: Arc<OwnedFd>,
) -> Result<i32, WorkerError> {
    let devices = Devices::new(devices);
    let mut reports = Reports {
        socket: Arc::clone(&socket),
        outgoing: Outgoing::default(),
    };
    let mut supervisor = Orders {
        socket,
        incoming: Incoming::new(true),
    };
    reports.send(&Message::Ready {
        protocol_hash: PROTOCOL_HASH,
        device: &description::text(&devices),
    })?;
    let grant = match supervisor.receive() {
        Ok(Order::Assign(grant)) => grant,
        Ok(Order::Unknown(name)) => return Err(WorkerError::Unexpected(name)),
        Ok(_) => return Err(WorkerError::Unexpected("a message about a session")),
        // The supervisor does not need this spare worker any more.
        Err(ChannelError::Ended) => return Ok(0),
        Err(error) => return Err(error.into()),
    };
    let (Some(file), Some(page), Some(neighbours)) = (
        supervisor.incoming.descriptor(),
        supervisor.incoming.descriptor(),
        supervisor.incoming.descriptor(),
    ) else {
        return Err(WorkerError::Descriptors);
    };
    let files = match file_source(grant.features) {
        None => None,
        Some(source) => {
            let file = supervisor.incoming.descriptor();
            Some(source(file.ok_or(WorkerError::Descriptors)?))
        }
    };
    let counters = Neighbours::map(&neighbours)
        .and_then(|neighbours| Counters::map(&page, neighbours))
        .map_err(WorkerError::Counters)?;
    let window = Arc::new(Window::new(file, &grant)?);
    let reports = Arc::new(Mutex::new(reports));
    let exchange = {
        let reports = Arc::clone(&reports);
        Exchange::new(move |message, descriptors| {
            reports.lock().send_with(message, descriptors).is_ok()
        })
    };
    let served = match serve(&devices, tuning, &window, &grant, counters, exchange, files) {
        Ok(served) => served,
        Err(error) => {
            refuse(&mut reports.lock(), &error)?;
            return Err(error);
        }
    };
    reports.lock().send(&Message::Assigned)?;
    let arena = Arena {
        window,
        notifier: served.notifier.clone(),
        status: served.status.clone(),
        reports,
    };
    listen(&mut supervisor, &Arc::new(arena), &served)
}

/// Returns the way in which a guest with these features names files. A descriptor for it comes with the session.
fn file_source(features: u64) -> Option<fn(OwnedFd) -> FileSource> {
    match features {
        _ if features & FEATURE_FILES != 0 => Some(FileSource::Socket),
        _ if features & FEATURE_FILE_MEMORY != 0 => Some(FileSource::Memory),
        _ => None,
    }
}

fn thread_error(error: io::Error) -> WorkerError {
    WorkerError::Thread(tasks::named(error))
}

/// Reports to the supervisor why no session can be served.
fn refuse(reports: &mut Reports, error: &WorkerError) -> Result<(), ChannelError> {
    reports.send(&Message::Refused {
        code: Refusal::NoDevice as u32,
        reason: &wormhole_link::chain(error),
    })
}

/// Handles on the threads that serve a session.
struct Served {
    devices: Devices,
    exchange: Exchange,
    notifier: Notifier<Event>,
    registrar: Registrar,
    status: Status,
    lanes: Report,
}

fn serve(
    devices: &Devices,
    tuning: Tuning,
    window: &Arc<Window>,
    grant: &Grant,
    counters: Counters,
    exchange: Exchange,
    files: Option<FileSource>,
) -> Result<Served, WorkerError> {
    let memory = window.map_session(grant.session_segment)?;
    let (base, bytes) = window.range(grant.session_segment, 1)?;
    let mut registrations = Registrations::new(devices.clone());
    register(&mut registrations, base, bytes)?;
    let (notifier, inbox) = wake::inbox().map_err(thread_error)?;
    let status = Status::new(memory.clone());
    if grant.arena_count > 0 {
        let (address, bytes) = window.map(grant.arena_first, grant.arena_count)?;
        register(&mut registrations, address, bytes)?;
        notifier.send(Event::ExtentAdded { address, bytes });
    }
    let registrar = Registrar::start(registrations, counters.progress()).map_err(thread_error)?;
    let own = notifier.clone();
    let mut executor = executor(
        devices,
        &memory,
        base,
        counters,
        own,
        inbox,
        registrar.clone(),
    )
    .map_err(thread_error)?
    .lingering(tuning.linger)
    .rung(open::is_rung_for_each_record())
    .launching_in_lanes(tuning.lanes)
    .launching_in_chains(tuning.chains)
    .sharing_by(exchange.clone())
    .taking_files_from(files)
    .placing_in(Arc::clone(window));
    let lanes = executor.session().lanes();
    std::thread::Builder::new()
        .name("executor".to_owned())
        .spawn(move || {
            let _abort_on_panic = AbortOnPanic;
            let broken = executor.run();
            tracing::warn!("the session ends: {}", wormhole_link::chain(&broken));
            leave(BROKEN);
        })
        .map_err(thread_error)?;
    Ok(Served {
        devices: devices.clone(),
        exchange,
        notifier,
        registrar,
        status,
        lanes,
    })
}

/// Builds an executor for the session segment that is mapped at `base` and registered with
/// `registrar`.
///
/// # Errors
/// The watcher's thread cannot be started.
pub fn executor(
    devices: &Devices,
    memory: &SessionMemory,
    base: u64,
    counters: Counters,
    notifier: Notifier<Event>,
    inbox: Inbox<Event>,
    registrar: Registrar,
) -> io::Result<Executor> {
    let status = Status::new(memory.clone());
    let fences = Fences::new(memory.clone());
    let waits = Waits::new(memory.clone());
    let device_is_apart = !devices.call_after_fences(&waits);
    let watcher = Watcher::start(
        devices.clone(),
        fences,
        device_is_apart.then(|| waits.clone()),
        status.clone(),
        counters.progress().clone(),
    )?;
    let session = Session::new(
        devices.clone(),
        notifier,
        registrar,
        watcher,
        status,
        counters,
        base,
    );
    // SAFETY: this worker alone serves the session, and this executor alone consumes its ring and
    // publishes its answers.
    let (consumer, answers) = unsafe {
        (
            Consumer::new(memory.clone()),
            AnswerSlots::new(memory.clone()),
        )
    };
    let sleepers = Sleepers::new(waits, device_is_apart);
    Ok(Executor::new(consumer, answers, session, inbox, sleepers))
}

/// Handles the supervisor's messages until it is gone, and returns the process's exit status.
fn listen(
    supervisor: &mut Orders,
    arena: &Arc<Arena>,
    served: &Served,
) -> Result<i32, WorkerError> {
    loop {
        match supervisor.receive() {
            Ok(Order::Doorbell) => served.notifier.ring(),
            Ok(Order::Dump) => {
                for line in served
                    .devices
                    .queues()
                    .into_iter()
                    .chain(served.lanes.lines())
                {
                    tracing::warn!("dump: {line}");
                }
            }
            Ok(Order::Add(run)) => {
                let arena = Arc::clone(arena);
                served.registrar.run(Task::new(move |registrations| {
                    arena.exit_on_error(arena.add(registrations, run));
                }));
            }
            Ok(Order::Remove(run)) => {
                let (address, _) = arena.window.range(run.first, run.count)?;
                let arena = Arc::clone(arena);
                let release = Task::new(move |registrations| {
                    arena.exit_on_error(arena.remove(registrations, run));
                });
                served
                    .notifier
                    .send(Event::ExtentRemoved { address, release });
            }
            Ok(Order::Shared(shared)) => {
                let token = Reply::Token(shared.token);
                served.exchange.answer(shared.id, shared.result, token);
            }
            Ok(Order::Fetched(fetched)) => {
                let descriptor = match fetched.descriptor {
                    0 => None,
                    _ => Some(
                        supervisor
                            .incoming
                            .descriptor()
                            .ok_or(WorkerError::Descriptors)?,
                    ),
                };
                let found = Reply::Found(Found {
                    description: fetched.description,
                    descriptor,
                    party: fetched.party,
                });
                served.exchange.answer(fetched.id, fetched.result, found);
            }
            Ok(Order::Assign(_)) => return Err(WorkerError::Unexpected("a second assignment")),
            Ok(Order::Unknown(name)) => return Err(WorkerError::Unexpected(name)),
            Err(error) => {
                // Also for a malformed message: without a supervisor there is no session.
                served
                    .status
                    .set_once(SUPERVISOR_LOST_RESULT, EndCause::SupervisorLost);
                return match error {
                    ChannelError::Ended | ChannelError::Cut => Ok(0),
                    error => Err(error.into()),
                };
            }
        }
    }
}

/// State that the registrar needs to add and remove arena.
#[derive(Debug)]
struct Arena {
    window: Arc<Window>,
    notifier: Notifier<Event>,
    status: Status,
    /// Shared by the registrar and by jobs that share objects.
    reports: Arc<Mutex<Reports>>,
}

impl Arena {
    fn add(&self, registrations: &mut Registrations, run: ArenaRun) -> Result<(), WorkerError> {
        let (address, bytes) = self.window.map(run.first, run.count)?;
        if let Err(error) = register(registrations, address, bytes) {
            tracing::warn!("{error}");
            // Publish a dead context before the guest learns that its arena is refused.
            if let Some(fault) = registrations.fault() {
                publish_death(&self.status, fault);
            }
            // SAFETY: neither the executor nor the guest knows the range, and it is not registered
            // with the device.
            unsafe { self.window.unmap(run.first, run.count)? };
            return self.report(&Message::ArenaRefused(run));
        }
        // Sent before the guest learns of the extent, so before a record can name it.
        self.notifier.send(Event::ExtentAdded { address, bytes });
        self.report(&Message::ArenaAdded(run))
    }

    /// Releases a run. The executor no longer admits addresses in it, and no job reads it.
    fn remove(&self, registrations: &mut Registrations, run: ArenaRun) -> Result<(), WorkerError> {
        let (address, _) = self.window.range(run.first, run.count)?;
        if let Err(error) = registrations.remove(address) {
            // The run stays mapped, and counts as the session's, until the session ends.
            tracing::warn!("the arena at {address:#x} cannot be unregistered: {error}");
            return Ok(());
        }
        // SAFETY: no record can name it, no job reads it, and the device has unregistered it.
        unsafe { self.window.unmap(run.first, run.count)? };
        self.report(&Message::ArenaRemoved(run))
    }

    fn report(&self, message: &Message<'_>) -> Result<(), WorkerError> {
        match self.reports.lock().send(message) {
            // The thread that reads the stream detects its end too.
            Err(ChannelError::Ended) => Ok(()),
            sent => Ok(sent?),
        }
    }

    /// Exits the process, and so ends the session, if an arena operation that the supervisor relies
    /// on failed.
    fn exit_on_error(&self, outcome: Result<(), WorkerError>) {
        if let Err(error) = outcome {
            tracing::error!("the session ends: {}", wormhole_link::chain(&error));
            leave(NO_ARENA);
        }
    }
}

fn register(
    registrations: &mut Registrations,
    address: u64,
    bytes: u64,
) -> Result<(), WorkerError> {
    // SAFETY: the caller has just mapped the range, and removes the registration before it unmaps
    // it.
    unsafe { registrations.add(address, bytes) }
        .map_err(|error| WorkerError::Register { address, error })
}

/// Ends the process at once. Other threads may be in calls of the driver, beside which its exit handlers would run, and a
/// call that does not end would keep these waiting.
pub(crate) fn leave(status: i32) -> ! {
    // SAFETY: ends the process, which has nothing left to write.
    unsafe { libc::_exit(status) }
}

/// Takes the control stream that the supervisor passed to this process.
pub fn inherited_stream() -> OwnedFd {
    use std::os::fd::FromRawFd;
    // SAFETY: the supervisor put the stream at this number, and nothing else in this process uses
    // it.
    let socket = unsafe { OwnedFd::from_raw_fd(CONTROL) };
    debug_assert_eq!(socket.as_raw_fd(), CONTROL);
    socket
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    /// Set in the process that ends.
    const LEAVES: &str = "WORMHOLE_TEST_LEAVES";

    #[test]
    fn a_worker_ends_without_exit_handlers() {
        if std::env::var_os(LEAVES).is_some() {
            // An exit handler of the standard library would write it.
            std::io::stdout().write_all(b"unfinished").unwrap();
            super::leave(7);
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "tests::a_worker_ends_without_exit_handlers"]);
        let output = command
            .arg("--nocapture")
            .env(LEAVES, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(7), "{said}");
        assert!(!said.contains("unfinished"), "{said}");
    }
}
