//! The supervisor: accepts tenants, and starts what serves them. Each tenant has a process of its
//! own ([`tenant_loop`]) that reads its streams. A further process, the [`spawner`], has the
//! privileges: it starts workers, the tenants' processes, and processes that close descriptors and
//! free memory ([`scrubber`]). All others work without privileges and under a system call filter
//! ([`privileges`]).
//!
//! Launchers send windows over tenant streams, and request control streams for guest processes
//! there. A tenant's process asks for a worker by the protocol hash in a guest's hello, and grants the session once the
//! worker has mapped it. Every message of a launcher, a guest or a worker is checked. A peer that breaks
//! the protocol loses its stream, with one line in the log, and other peers are not affected.
//!
//! A session ends in the same order, whichever process dies first: its worker is killed and reaped;
//! its guest's stream has ended; its segments are scrubbed; they are free. See [`sessions`].
//!
//! When the supervisor itself is killed, the kernel kills all its processes and closes its guests'
//! streams, whose end the guests notice.

mod acceptor;
mod access_list;
#[cfg(test)]
mod alone;
mod arena;
mod assigned;
mod command;
mod connection;
mod datagram;
mod demand;
mod descriptors;
mod dump;
mod environment;
mod fields;
mod forks;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod guests;
mod host_nvml;
mod listener;
mod log;
mod observers;
mod pair;
mod privileges;
mod process_logs;
mod quotas;
mod refusals;
mod sampler;
mod scrubber;
mod session_file;
mod sessions;
mod sharing;
mod signals;
mod sources;
mod spawn_queue;
mod spawner;
mod static_window;
mod tenant_loop;
mod tenant_processes;
mod tenants;
mod usage;
mod user_budget;
mod visibility;
mod window;
mod window_memory;
mod worker_pool;
mod workers;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use wormhole_api::CuResult;
use wormhole_link::device::DeviceChoice;
use wormhole_link::users::peer_of;
pub use wormhole_sandbox::Limits;
use wormhole_sandbox::device::needs;

use self::acceptor::Acceptor;
pub use self::command::main;
use self::descriptors::Descriptors;
pub use self::descriptors::DescriptorsError;
use self::forks::Forks;
pub use self::listener::{ListenError, Listener};
use self::process_logs::ProcessLogs;
pub use self::quotas::Quotas;
use self::refusals::Refusals;
pub use self::sampler::Sample;
use self::sampler::Sampler;
use self::signals::{Asked, Signals};
use self::sources::Sources;
pub use self::spawner::SpawnerError;
use self::spawner::{Abilities, Setup, Spawner, Tenants};
use self::tenant_loop::TenantLoop;
use self::tenant_processes::{TenantProcess, Waiting};
use self::usage::Questions;
use self::visibility::TenantHistory;
pub use self::window::MINIMUM_BYTES as MINIMUM_WINDOW_BYTES;
use self::worker_pool::{Worker, WorkerPool};

/// Result of every call after the worker died.
pub const WORKER_LOST_RESULT: u32 = CuResult::CONTEXT_IS_DESTROYED.0;
/// Result of every call after the supervisor was ordered to stop.
pub const REVOKED_RESULT: u32 = CuResult::SYSTEM_NOT_READY.0;

/// Time that an ending supervisor leaves to those who refuse connections.
const REFUSAL_LIMIT: Duration = Duration::from_secs(1);
/// `oom_score_adj` (proc(5)) of the supervisor and its spawner.
const OOM_SCORE: &str = "-900";

/// Options of a supervisor.
#[derive(Debug)]
pub struct Options {
    pub device: DeviceChoice,
    /// Directories of worker executables.
    pub workers: Vec<PathBuf>,
    /// Socket to which tenants connect.
    pub listener: Option<Listener>,
    /// Stream of one tenant. The supervisor ends when the stream ends and the tenant's sessions are
    /// closed.
    pub stream: Option<OwnedFd>,
    /// Whether the listener's tenants trust each other.
    pub trusted_tenants: bool,
    /// Start workers even if this system provides no namespaces to confine them.
    pub without_namespaces: bool,
    /// Limits on workers' memory and threads.
    pub limits: Limits,
    /// Time within which a worker must have its device.
    pub start_limit: Duration,
    /// Time within which a guest must send its hello, and a launcher that connects must attach.
    pub hello_limit: Duration,
    /// Time within which a killed worker must end. Afterwards it no longer delays other starts, and
    /// an ending supervisor no longer waits for it.
    pub reap_limit: Duration,
    /// Limits on tenants.
    pub quotas: Quotas,
}

/// Reason why the supervisor cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    #[error(transparent)]
    Spawner(#[from] SpawnerError),
    #[error("the supervisor cannot give up its privileges")]
    Privileges(#[source] std::io::Error),
    #[error("the supervisor cannot install its system call filter")]
    Filter(#[source] privileges::FilterError),
    #[error("the event loop failed: {0}")]
    Loop(#[from] event_manager::Error),
    #[error(transparent)]
    Descriptors(#[from] DescriptorsError),
    #[error("signals cannot be received")]
    Signals(#[source] std::io::Error),
    #[error("the loop of the only tenant cannot be made")]
    Tenant(#[source] std::io::Error),
    #[error("the thread that asks the host's NVML cannot be made")]
    Sampler(#[source] std::io::Error),
}

/// Number of a tenant or a worker in this supervisor, or of a guest, a worker or a session in a
/// tenant's loop. Not reused while it is in use.
type Id = u32;

/// Owner of a descriptor in the event loop.
#[derive(Clone, Copy, Debug)]
enum Source {
    Listener,
    Signals,
    Spawner,
    Sampler,
    /// A tenant's process.
    Tenant(Id),
    WorkerStream(Id),
    WorkerLog(Id),
    /// Log of a tenant's process, by the process's ticket.
    ProcessLog(u64),
}

/// State of the supervisor, which runs in [`run`].
#[derive(Debug)]
struct Supervisor {
    acceptor: Acceptor,
    descriptors: Descriptors,
    /// Stream of the tenant with which the supervisor was started.
    stream: Option<OwnedFd>,
    /// End of the pair to the loop of the only tenant, which this process runs as well.
    near: Option<OwnedFd>,
    signals: Signals,
    /// Whether the supervisor ends with its last tenant.
    ends_with_tenants: bool,
    /// Whether tenants may be strangers to each other.
    has_strangers: bool,
    stopping: bool,
    /// Reason why the spawner, and with it all workers, is gone.
    lost: Option<SpawnerError>,
    sources: Sources<Source>,
    next_id: Id,
    /// Connections that wait for a process.
    waiting: Vec<Waiting>,
    tenants: BTreeMap<Id, TenantProcess>,
    forks: Forks,
    process_logs: ProcessLogs,
    refusals: Refusals,
    /// Tenants with a window. Values that depend on a device's whole work reveal other tenants'.
    history: TenantHistory,
    workers: BTreeMap<Id, Worker>,
    pool: WorkerPool,
    hello_limit: Duration,
    reap_limit: Duration,
    /// Deadline for ending although tenants are left.
    ends_by: Option<Instant>,
    quotas: Quotas,
    /// Time of the next check for late workers.
    next_deadline: Option<Instant>,
    /// Queries the host's NVML. None for a device without it.
    sampler: Option<Sampler>,
    /// Last answer of the host's NVML, by device.
    figures: Option<(Instant, Vec<Sample>)>,
    /// Questions of clients for the usage by tenants.
    questions: Questions,
}

/// Serves until a signal or the last tenant's end stops it.
///
/// # Errors
/// Workers cannot be confined or found, or the event loop fails.
pub fn run(mut options: Options) -> Result<(), SupervisorError> {
    let descriptors = Descriptors::claim()?;
    window_memory::find_devices();
    let closes: Vec<RawFd> = options.listener.iter().map(AsRawFd::as_raw_fd).collect();
    let closes = [
        closes,
        options.stream.iter().map(AsRawFd::as_raw_fd).collect(),
    ]
    .concat();
    let place = options
        .listener
        .as_ref()
        .map(|listener| listener.place().clone());
    let setup = Setup {
        device: options.device.clone(),
        workers: std::mem::take(&mut options.workers),
        tenants: match (&options.listener, options.trusted_tenants) {
            (None, _) => Tenants::One,
            (Some(_), true) => Tenants::Trusting,
            (Some(_), false) => Tenants::Strangers,
        },
        without_namespaces: options.without_namespaces,
        limits: options.limits,
        reap_limit: options.reap_limit / 3,
    };
    come_last_when_memory_is_short();
    let (spawner, abilities) = Spawner::fork(setup, &closes, place)?;
    privileges::drop_capabilities().map_err(SupervisorError::Privileges)?;
    // Threads started later inherit the blocked signals.
    let signals = Signals::new().map_err(SupervisorError::Signals)?;
    let sampler = needs(options.device.kind())
        .has_figures
        .then(Sampler::new)
        .transpose()
        .map_err(SupervisorError::Sampler)?;
    let pair = match &options.listener {
        Some(_) => None,
        None => Some(pair::sockets().map_err(SupervisorError::Tenant)?),
    };
    let (near, far) = pair.unzip();
    let forks = Forks::new();
    privileges::filter(sampler.is_some()).map_err(SupervisorError::Filter)?;
    let parts = Parts {
        spawner,
        abilities,
        descriptors,
        signals,
        sampler,
        forks,
        near,
    };
    let mut manager: EventManager<Rc<RefCell<dyn MutEventSubscriber>>> = EventManager::new()?;
    let served = far.map(|far| Rc::new(RefCell::new(TenantLoop::new(far, descriptors))));
    let loop_id = served
        .as_ref()
        .map(|served| manager.add_subscriber(Rc::clone(served) as _));
    let supervisor = Rc::new(RefCell::new(Supervisor::new(options, parts)));
    let id = manager.add_subscriber(Rc::clone(&supervisor) as _);
    while !supervisor.borrow().is_done() {
        let ops = &mut manager.event_ops(id)?;
        let mut milliseconds = supervisor.borrow_mut().meet_deadlines(ops);
        if let Some((served, id)) = served.as_ref().zip(loop_id) {
            let mut served = served.borrow_mut();
            if served.is_done() {
                served.leave();
            }
            let ops = &mut manager.event_ops(id)?;
            milliseconds = earlier(milliseconds, served.meet_deadlines(ops));
        }
        manager.run_with_timeout(milliseconds)?;
    }
    served
        .iter()
        .for_each(|one| one.borrow().tell_of_the_rest());
    let lost = {
        let mut supervisor = supervisor.borrow_mut();
        supervisor.drain_process_logs();
        supervisor.tell_of_the_rest();
        supervisor.pool.starts.end();
        supervisor.lost.take()
    };
    // The exit closes all descriptors, and does not wait for lingering sockets.
    std::mem::forget((supervisor, served, manager));
    lost.map_or(Ok(()), |error| Err(error.into()))
}

/// Returns the earlier of two timeouts in milliseconds. -1 stands for none.
fn earlier(one: i32, other: i32) -> i32 {
    match (one, other) {
        (-1, time) | (time, -1) => time,
        (one, other) => one.min(other),
    }
}

/// Lowers this process's OOM score, because all workers end with it. Only root may do so.
fn come_last_when_memory_is_short() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        tracing::debug!(
            "the supervisor is killed like any other process when memory is short: {error}"
        );
    }
}

/// Resources acquired before the supervisor serves a peer.
struct Parts {
    spawner: Spawner,
    abilities: Abilities,
    descriptors: Descriptors,
    signals: Signals,
    sampler: Option<Sampler>,
    forks: Forks,
    near: Option<OwnedFd>,
}

impl Supervisor {
    fn new(options: Options, parts: Parts) -> Self {
        let is_one_user = !parts.abilities.has_users;
        let descriptors = parts.descriptors.with_one_user(is_one_user);
        Self {
            ends_with_tenants: options.listener.is_none(),
            has_strangers: options.listener.is_some() && !options.trusted_tenants,
            acceptor: Acceptor::new(options.listener),
            descriptors,
            stream: options.stream,
            near: parts.near,
            signals: parts.signals,
            stopping: false,
            lost: None,
            sources: Sources::default(),
            next_id: 0,
            waiting: Vec::new(),
            tenants: BTreeMap::new(),
            forks: parts.forks,
            process_logs: ProcessLogs::default(),
            refusals: Refusals::new(descriptors.for_tenants()),
            history: TenantHistory::default(),
            workers: BTreeMap::new(),
            pool: WorkerPool::new(parts.spawner, parts.abilities, options.start_limit),
            hello_limit: options.hello_limit,
            reap_limit: options.reap_limit,
            ends_by: None,
            quotas: options.quotas,
            next_deadline: None,
            sampler: parts.sampler,
            figures: None,
            questions: Questions::default(),
        }
    }

    fn is_ending(&self) -> bool {
        let left = self.ends_with_tenants && self.stream.is_none() && self.served() == 0;
        self.stopping || left
    }

    fn is_done(&self) -> bool {
        let late = self.ends_by.is_some_and(|end| end <= Instant::now());
        self.is_ending() && (self.is_empty() || late)
    }

    /// Returns whether no tenant is left, and no connection that is being refused.
    fn is_empty(&self) -> bool {
        self.served() == 0 && self.refusals.is_empty()
    }

    /// Logs the tenants that this process does not wait for any longer.
    fn tell_of_the_rest(&self) {
        let count = self.served();
        if count > 0 {
            let tenants = if count == 1 {
                "tenant is"
            } else {
                "tenants are"
            };
            tracing::error!("the supervisor ends, although {count} {tenants} left");
        }
    }

    /// Makes [`meet_deadlines`](Self::meet_deadlines) check at `end` at the latest.
    fn set_deadline(&mut self, end: Instant) {
        self.next_deadline = Some(self.next_deadline.map_or(end, |next| next.min(end)));
    }

    /// Ends workers that are late, and tries again what failed. Returns the milliseconds until the
    /// next deadline, -1 for none.
    fn meet_deadlines(&mut self, ops: &mut EventOps<'_>) -> i32 {
        let now = Instant::now();
        if self.is_ending() {
            let limit = match self.served() {
                0 => REFUSAL_LIMIT,
                // Tenants' processes end by the limit itself, and say what they leave.
                _ => self.reap_limit + self.reap_limit / 4,
            };
            let end = now + limit;
            self.ends_by = Some(self.ends_by.map_or(end, |by| by.min(end)));
        }
        self.refusals.try_again(now);
        if self.forks.resume(now) {
            self.serve_waiting(ops);
        }
        self.admit_postponed(ops, now);
        self.accept_again(ops, now);
        self.answer_questions(now);
        let tells_by = self.end_untold(ops, now);
        self.order_refusers();
        if self.next_deadline.is_some_and(|next| next <= now) {
            self.end_late_workers(now);
            let workers = self.workers.values().filter_map(Worker::deadline);
            self.next_deadline = workers.min();
            self.adjust_spares(now);
        }
        let next = self
            .next_deadline
            .into_iter()
            .chain(self.ends_by)
            .chain(self.refusals.deadline())
            .chain(self.forks.deadline())
            .chain(self.acceptor.deadline())
            .chain(tells_by)
            .chain(self.questions.deadline())
            .chain(self.send_again());
        milliseconds_until(next.min(), now)
    }

    /// Returns an unused number.
    fn id(&mut self) -> Id {
        loop {
            self.next_id = self.next_id.wrapping_add(1);
            let id = self.next_id;
            let used = self.tenants.contains_key(&id)
                || self.workers.contains_key(&id)
                || self.is_reserved(id);
            if !used {
                return id;
            }
        }
    }

    /// Ends every tenant's sessions, in order. The loop ends when all have ended.
    fn stop(&mut self, ops: &mut EventOps<'_>, why: &str) {
        if self.stopping {
            return;
        }
        self.stopping = true;
        tracing::info!("the supervisor ends: {why}");
        self.stop_accepting(ops);
        self.stop_tenants(why);
    }

    fn watch_start(&mut self, ops: &mut EventOps<'_>) -> Result<(), event_manager::Error> {
        let signals = self.signals.as_fd().as_raw_fd();
        self.sources.watch(ops, &signals, Source::Signals)?;
        let spawner = self.pool.starts.spawner().as_raw_fd();
        self.sources.watch(ops, &spawner, Source::Spawner)?;
        if let Some(bell) = self.sampler.as_ref().map(AsRawFd::as_raw_fd) {
            self.sources.watch(ops, &bell, Source::Sampler)?;
        }
        if let Some(listener) = self.acceptor.listener.as_ref().map(AsRawFd::as_raw_fd) {
            self.acceptor.token = self.sources.watch(ops, &listener, Source::Listener)?;
        }
        Ok(())
    }
}

impl MutEventSubscriber for Supervisor {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        let watched = self.watch_start(ops);
        if let Err(error) = watched {
            tracing::error!("the event loop: {error}");
            self.stopping = true;
        }
        if let Some(stream) = self.stream.take() {
            // For a socket of another kind, the tenant is attributed to root.
            let user = peer_of(&stream).map(|peer| peer.user);
            self.add_tenant(ops, stream, user.unwrap_or(0), false);
        }
        self.serve_waiting(ops);
        self.keep_spares();
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let token = events.data();
        // A source removed earlier in this round may still have an event.
        let Some(source) = self.sources.get(token) else {
            return;
        };
        match source {
            Source::Listener => self.accept(ops),
            Source::Signals => match self.signals.take() {
                Some(Asked::End(why)) => self.stop(ops, why),
                Some(Asked::Dump) => self.dump(),
                None => {}
            },
            Source::Spawner => self.spawner_event(ops),
            Source::Sampler => self.device_sampled(),
            Source::Tenant(id) => self.tenant_event(ops, id),
            Source::WorkerStream(id) => self.worker_event(ops, id),
            Source::WorkerLog(id) => self.worker_log(ops, id),
            Source::ProcessLog(ticket) => self.process_log(ops, ticket),
        }
        self.order_refusers();
        self.watch_tenants(ops);
    }
}

/// Returns the milliseconds until a deadline, -1 for none.
fn milliseconds_until(deadline: Option<Instant>, now: Instant) -> i32 {
    deadline.map_or(-1, |next| {
        let left = next.saturating_duration_since(now).as_millis();
        // Rounds up, so that the check is not before the deadline.
        i32::try_from(left.saturating_add(1)).unwrap_or(i32::MAX)
    })
}
