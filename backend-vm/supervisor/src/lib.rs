//! The supervisor: an event loop that never blocks, processes that close descriptors and free
//! memory for it ([`scrubber`]), and a process that starts workers and those processes: the
//! [`spawner`]. The loop reads guests' messages without privileges and under a system call filter
//! ([`privileges`]).
//!
//! Launchers send windows over tenant streams, and request control streams for guest processes
//! there. The supervisor selects a worker by the protocol hash in a guest's hello, and grants the session once the worker
//! has mapped it. Every message of a launcher, a guest or a worker is checked. A peer that breaks
//! the protocol loses its stream, with one line in the log, and other peers are not affected.
//!
//! A session ends in the same order, whichever process dies first: its worker is killed and reaped;
//! its guest's stream has ended; its segments are scrubbed; they are free. See [`sessions`].
//!
//! When the supervisor itself is killed, the kernel kills its workers and closes its guests'
//! streams, whose end the guests notice.

mod acceptor;
#[cfg(test)]
mod alone;
mod arena;
mod command;
mod connection;
mod datagram;
mod descriptors;
mod dump;
mod environment;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod guests;
mod host_nvml;
mod listener;
mod log;
mod log_budget;
mod observers;
mod privileges;
mod quotas;
mod sampler;
mod scrubber;
mod session_file;
mod sessions;
mod sharing;
mod signals;
mod spawn_queue;
mod spawner;
mod tenants;
mod turns;
mod window;
mod worker_pool;
mod workers;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use wormhole_api::CuResult;
use wormhole_link::channel::MAX_RECEIVED;
use wormhole_link::device::DeviceChoice;
use wormhole_link::neighbours::NeighboursFile;
pub use wormhole_sandbox::Limits;
use wormhole_sandbox::device::needs;

use self::acceptor::Acceptor;
pub use self::command::main;
use self::connection::Connection;
use self::descriptors::Descriptors;
pub use self::descriptors::DescriptorsError;
use self::dump::LastDump;
use self::guests::Guest;
pub use self::listener::{ListenError, Listener};
use self::observers::Observers;
pub use self::quotas::Quotas;
pub use self::sampler::Sample;
use self::sampler::Sampler;
use self::scrubber::{Completion, Scrubber};
use self::sessions::Session;
use self::sharing::Shares;
use self::signals::{Asked, Signals};
pub use self::spawner::SpawnerError;
use self::spawner::{Abilities, Setup, Spawner, Tenants};
use self::tenants::Tenant;
use self::turns::Turns;
pub use self::window::MINIMUM_BYTES as MINIMUM_WINDOW_BYTES;
use self::worker_pool::{Worker, WorkerPool};

/// Result of every call after the worker died.
pub const WORKER_LOST_RESULT: u32 = CuResult::CONTEXT_IS_DESTROYED.0;
/// Result of every call after the supervisor was ordered to stop.
pub const REVOKED_RESULT: u32 = CuResult::SYSTEM_NOT_READY.0;

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
    #[error("no descriptor is left for the turns of streams")]
    Turns(#[source] std::io::Error),
    #[error("the word on neighbours cannot be shared with workers")]
    Neighbours(#[source] std::io::Error),
    #[error("the thread that asks the host's NVML cannot be made")]
    Sampler(#[source] std::io::Error),
}

/// Number of a tenant, a guest, a worker or a session in this supervisor. Not reused while it is in
/// use.
type Id = u32;

/// Owner of a descriptor in the event loop.
#[derive(Clone, Copy, Debug)]
enum Source {
    Listener,
    Signals,
    Spawner,
    Scrubber,
    Sampler,
    Turns,
    Tenant(Id),
    Guest(Id),
    WorkerStream(Id),
    WorkerLog(Id),
}

/// State of the supervisor, which runs in [`run`].
#[derive(Debug)]
struct Supervisor {
    acceptor: Acceptor,
    descriptors: Descriptors,
    stream: Option<OwnedFd>,
    signals: Signals,
    /// Whether the supervisor ends with its last tenant.
    ends_with_tenants: bool,
    stopping: bool,
    /// Reason why the spawner, and with it all workers, is gone.
    lost: Option<SpawnerError>,
    sources: HashMap<u32, Source>,
    next_token: u32,
    next_id: Id,
    tenants: BTreeMap<Id, Tenant>,
    /// Whether more than one tenant has a window. Values that depend on a device's whole work then
    /// reveal other tenants'.
    has_neighbours: bool,
    /// File in which workers read `has_neighbours`.
    neighbours: NeighboursFile,
    guests: BTreeMap<Id, Guest>,
    sessions: BTreeMap<Id, Session>,
    workers: BTreeMap<Id, Worker>,
    shares: Shares,
    pool: WorkerPool,
    hello_limit: Duration,
    reap_limit: Duration,
    /// Deadline for ending although sessions are not closed.
    ends_by: Option<Instant>,
    quotas: Quotas,
    /// Users of tenants that are gone and whose descriptors are not all closed.
    gone: BTreeMap<Id, u32>,
    /// Time of the next check for late workers, guests and tenants.
    next_deadline: Option<Instant>,
    scrubber: Scrubber,
    /// Queries the host's NVML. None for a device without it.
    sampler: Option<Sampler>,
    observers: Observers,
    turns: Turns,
    /// Tenant whose stream was read last with the descriptors reserved for a read.
    reader: Option<Id>,
    /// Tokens of streams that are not read, by tenant, while the tenant's descriptors are waiting
    /// to be closed.
    waiting: BTreeMap<Id, BTreeSet<u32>>,
    last_dump: LastDump,
}

/// Serves until a signal or the last tenant's end stops it.
///
/// # Errors
/// Workers cannot be confined or found, or the event loop fails.
pub fn run(mut options: Options) -> Result<(), SupervisorError> {
    let many_users = options.listener.as_ref();
    let descriptors = Descriptors::claim(many_users.is_some_and(Listener::has_many_users))?;
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
    let turns = Turns::new().map_err(SupervisorError::Turns)?;
    let neighbours = NeighboursFile::create().map_err(SupervisorError::Neighbours)?;
    privileges::filter(sampler.is_some()).map_err(SupervisorError::Filter)?;
    let parts = Parts {
        spawner,
        abilities,
        descriptors,
        signals,
        sampler,
        turns,
        neighbours,
    };
    let supervisor = Supervisor::new(options, parts);
    let mut manager = EventManager::new()?;
    let id = manager.add_subscriber(supervisor);
    while !manager.subscriber_mut(id)?.is_done() {
        let milliseconds = manager.subscriber_mut(id)?.meet_deadlines();
        manager.run_with_timeout(milliseconds)?;
    }
    let supervisor = manager.subscriber_mut(id)?;
    supervisor.tell_of_the_rest();
    supervisor.pool.starts.end();
    supervisor
        .lost
        .take()
        .map_or(Ok(()), |error| Err(error.into()))
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
    turns: Turns,
    neighbours: NeighboursFile,
}

impl Supervisor {
    fn new(options: Options, parts: Parts) -> Self {
        Self {
            ends_with_tenants: options.listener.is_none(),
            acceptor: Acceptor::new(options.listener),
            descriptors: parts.descriptors,
            stream: options.stream,
            signals: parts.signals,
            stopping: false,
            lost: None,
            sources: HashMap::new(),
            next_token: 0,
            next_id: 0,
            tenants: BTreeMap::new(),
            has_neighbours: false,
            neighbours: parts.neighbours,
            guests: BTreeMap::new(),
            sessions: BTreeMap::new(),
            workers: BTreeMap::new(),
            shares: Shares::default(),
            scrubber: Scrubber::new(parts.spawner.orders()),
            pool: WorkerPool::new(parts.spawner, parts.abilities, options.start_limit),
            hello_limit: options.hello_limit,
            reap_limit: options.reap_limit,
            ends_by: None,
            quotas: options.quotas,
            gone: BTreeMap::new(),
            next_deadline: None,
            sampler: parts.sampler,
            observers: Observers::default(),
            turns: parts.turns,
            reader: None,
            waiting: BTreeMap::new(),
            last_dump: LastDump::default(),
        }
    }

    fn is_ending(&self) -> bool {
        let left = self.ends_with_tenants && self.stream.is_none() && self.tenants.is_empty();
        self.stopping || left
    }

    fn is_done(&self) -> bool {
        let idle = self.tenants.is_empty() && self.sessions.is_empty();
        self.is_ending() && (idle || self.ends_by.is_some_and(|end| end <= Instant::now()))
    }

    /// Logs the sessions and workers that this process does not wait for any longer.
    fn tell_of_the_rest(&self) {
        if self.sessions.is_empty() {
            return;
        }
        let processes = self
            .workers
            .values()
            .map(|worker| worker.process.pid().to_string());
        tracing::error!(
            "the supervisor ends, although {} sessions were not closed within {:?}; these workers were killed and \
             have not ended: {}",
            self.sessions.len(),
            self.reap_limit,
            processes.collect::<Vec<_>>().join(", ")
        );
    }

    /// Makes [`meet_deadlines`](Self::meet_deadlines) check at `end` at the latest.
    fn set_deadline(&mut self, end: Instant) {
        self.next_deadline = Some(self.next_deadline.map_or(end, |next| next.min(end)));
    }

    /// Ends processes and streams that are late; their end is reported like any other. Returns the
    /// milliseconds until the next deadline, -1 for none.
    fn meet_deadlines(&mut self) -> i32 {
        let now = Instant::now();
        self.scrubber.try_again(now);
        if self.is_ending() {
            self.ends_by.get_or_insert(now + self.reap_limit);
        }
        if self.next_deadline.is_some_and(|next| next <= now) {
            self.end_late_workers(now);
            self.end_late_guests(now);
            self.end_late_tenants(now);
            let workers = self.workers.values().filter_map(Worker::deadline);
            let guests = self.guests.values().filter_map(Guest::deadline);
            let tenants = self.tenants.values().filter_map(Tenant::deadline);
            self.next_deadline = workers.chain(guests).chain(tenants).min();
        }
        let next = self
            .next_deadline
            .into_iter()
            .chain(self.ends_by)
            .chain(self.scrubber.deadline());
        next.min().map_or(-1, |next| {
            let left = next.saturating_duration_since(now).as_millis();
            // Rounds up, so that the check is not before the deadline.
            i32::try_from(left.saturating_add(1)).unwrap_or(i32::MAX)
        })
    }

    /// Returns a new token for a descriptor.
    fn token(&mut self, source: Source) -> u32 {
        loop {
            self.next_token = self.next_token.wrapping_add(1);
            if let std::collections::hash_map::Entry::Vacant(entry) =
                self.sources.entry(self.next_token)
            {
                entry.insert(source);
                return self.next_token;
            }
        }
    }

    /// Returns an unused number.
    fn id(&mut self) -> Id {
        loop {
            self.next_id = self.next_id.wrapping_add(1);
            let id = self.next_id;
            let used = self.tenants.contains_key(&id)
                || self.guests.contains_key(&id)
                || self.sessions.contains_key(&id)
                || self.workers.contains_key(&id)
                || self.scrubber.serves(id);
            if !used {
                return id;
            }
        }
    }

    fn add_source(
        &mut self,
        ops: &mut EventOps<'_>,
        fd: &impl AsRawFd,
        source: Source,
    ) -> Result<u32, event_manager::Error> {
        let token = self.token(source);
        ops.add(Events::with_data(fd, token, EventSet::IN))
            .inspect_err(|_| {
                self.sources.remove(&token);
            })?;
        Ok(token)
    }

    /// Registers the socket of a new scrubber.
    fn add_scrubber(&mut self, ops: &mut EventOps<'_>, pid: i32, socket: OwnedFd) {
        match self.add_source(ops, &socket, Source::Scrubber) {
            Ok(token) => {
                self.scrubber.add(token, pid, socket);
            }
            Err(error) => {
                self.scrubber.failed(&error.to_string());
            }
        }
        self.hear_scrubber(ops);
    }

    /// Handles a scrubber's answers, or its end.
    fn memory_given_back(&mut self, ops: &mut EventOps<'_>, token: u32) {
        if !self.scrubber.read(token) {
            if !self.scrubber.exits(token) {
                tracing::error!("a process that gives memory back has ended");
            }
            self.remove_scrubber(ops, token);
        }
        self.hear_scrubber(ops);
    }

    /// Handles the report that a scrubber was reaped.
    fn scrubber_ended(&mut self, ops: &mut EventOps<'_>, pid: i32) {
        // The end of its socket may come later.
        if let Some(token) = self.scrubber.token_of(pid) {
            self.memory_given_back(ops, token);
        }
        self.scrubber.reaped(pid);
        self.hear_scrubber(ops);
    }

    /// Continues work that waited for descriptors to be passed on, or for a scrubber's order.
    fn hear_scrubber(&mut self, ops: &mut EventOps<'_>) {
        for (told, result) in self.scrubber.finished() {
            match told {
                Completion::Scrubbed { session, run } => self.run_scrubbed(session, run, result),
                Completion::Forgotten { session, request } => self.unshared(ops, session, request),
                Completion::Buried { token, parties } => self.shares.buried(token, parties),
                Completion::Attached { tenant } => self.window_written(ops, tenant, result),
                Completion::Status { session } => self.status_written(ops, session, result),
            }
        }
        for tenant in self.scrubber.drained() {
            self.read_again(ops, tenant);
            if self.reader.take_if(|reader| *reader == tenant).is_some() {
                let others: Vec<Id> = self.waiting.keys().copied().collect();
                for other in others {
                    self.read_again(ops, other);
                }
            }
        }
        while let Some(token) = self.scrubber.surplus() {
            self.remove_scrubber(ops, token);
        }
    }

    fn remove_scrubber(&mut self, ops: &mut EventOps<'_>, token: u32) {
        self.sources.remove(&token);
        if let Some(socket) = self.scrubber.remove(token) {
            connection::forget(ops, &socket);
        }
    }

    /// Returns whether a stream of a tenant may be read, with all descriptors that may arrive.
    /// Either a scrubber takes these at once, and has taken those of the last reader, or the tenant
    /// may hold them. Otherwise the stream waits until the tenant's descriptors in this process
    /// have been passed on.
    fn may_read(&mut self, tenant: Id, token: u32) -> bool {
        let is_free = self
            .reader
            .is_none_or(|reader| !self.scrubber.is_behind(reader));
        let may = if is_free && self.scrubber.takes_at_once(tenant) {
            self.reader = Some(tenant);
            true
        } else {
            self.may_hold(tenant, MAX_RECEIVED)
        };
        if !may {
            self.waiting.entry(tenant).or_default().insert(token);
        }
        may
    }

    fn read_again(&mut self, ops: &mut EventOps<'_>, tenant: Id) {
        let mut tokens = self.waiting.remove(&tenant).unwrap_or_default();
        while let Some(token) = tokens.pop_first() {
            // The loop watches neither this stream nor the others meanwhile.
            if !self.may_read(tenant, token) {
                return self.waiting.entry(tenant).or_default().append(&mut tokens);
            }
            let Some(source) = self.sources.get(&token).copied() else {
                continue;
            };
            let peer = match source {
                Source::Tenant(id) => self.tenant_peer(id),
                Source::Guest(id) => self.guests.get_mut(&id).map(|guest| &mut guest.peer),
                Source::WorkerStream(id) => self.workers.get_mut(&id).map(|one| &mut one.peer),
                _ => None,
            };
            if let Some(peer) = peer {
                peer.set_reading(ops, true);
                self.serve(ops, token, source, EventSet::empty());
            }
        }
    }

    /// Removes a tenant's stream from the event loop, and has a scrubber close it with the
    /// descriptors queued in it.
    fn close_connection(&mut self, ops: &mut EventOps<'_>, tenant: Id, peer: Connection) {
        peer.forget(ops);
        peer.shut_down();
        let descriptors = peer.into_descriptors();
        // Closed here if it brings no further descriptors.
        if !matches!(&descriptors[..], [socket] if listener::has_no_descriptors(socket)) {
            self.scrubber.close(tenant, descriptors);
        }
    }

    /// Ends every session, in order. The loop ends when all have ended.
    fn stop(&mut self, ops: &mut EventOps<'_>, why: &str) {
        if self.stopping {
            return;
        }
        self.stopping = true;
        tracing::info!("the supervisor ends: {why}");
        let tenants: Vec<Id> = self.tenants.keys().copied().collect();
        for id in tenants {
            self.end_sessions_of(ops, id, &format!("the supervisor ended: {why}"));
        }
        self.end_idle_tenants(ops);
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
            let user = listener::user_of(&stream);
            self.add_tenant(ops, stream, user.unwrap_or(0), None);
        }
        self.keep_spares(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let token = events.data();
        // A source removed earlier in this round may still have an event.
        let Some(source) = self.sources.get(&token).copied() else {
            return;
        };
        if let Source::Turns = source {
            for token in self.turns.take() {
                if let Some(source) = self.sources.get(&token).copied() {
                    self.serve(ops, token, source, EventSet::empty());
                }
            }
        } else {
            self.serve(ops, token, source, events.event_set());
        }
        self.answer_observers(ops);
        // A descriptor may be free again.
        if self.acceptor.keeps_tenants_waiting {
            self.accept(ops);
        }
    }
}

impl Supervisor {
    fn serve(&mut self, ops: &mut EventOps<'_>, token: u32, source: Source, set: EventSet) {
        match source {
            Source::Listener => self.accept(ops),
            Source::Signals => match self.signals.take() {
                Some(Asked::End(why)) => self.stop(ops, why),
                Some(Asked::Dump) => self.dump(ops),
                None => {}
            },
            Source::Spawner => self.spawner_event(ops),
            Source::Scrubber => self.memory_given_back(ops, token),
            Source::Sampler => self.device_sampled(),
            Source::Turns => {}
            Source::Tenant(id) => self.tenant_event(ops, id, set),
            Source::Guest(id) => self.guest_event(ops, id, set),
            Source::WorkerStream(id) => self.worker_event(ops, id, set),
            Source::WorkerLog(id) => self.worker_log(ops, id),
        }
    }

    fn watch_start(&mut self, ops: &mut EventOps<'_>) -> Result<(), event_manager::Error> {
        let token = self.token(Source::Signals);
        ops.add(Events::with_data(
            &self.signals.as_fd(),
            token,
            EventSet::IN,
        ))?;
        let token = self.token(Source::Spawner);
        ops.add(Events::with_data(
            self.pool.starts.spawner(),
            token,
            EventSet::IN,
        ))?;
        let token = self.token(Source::Turns);
        ops.add(Events::with_data(&self.turns, token, EventSet::IN))?;
        if let Some(sampler) = &self.sampler {
            let bell = sampler.as_raw_fd();
            let token = self.token(Source::Sampler);
            ops.add(Events::with_data(&bell, token, EventSet::IN))?;
        }
        if let Some(listener) = self.acceptor.listener.take() {
            // Edge-triggered, so that a tenant that cannot be accepted does not keep the loop busy.
            let token = self.token(Source::Listener);
            let set = EventSet::IN | EventSet::EDGE_TRIGGERED;
            ops.add(Events::with_data(&listener, token, set))?;
            self.acceptor.listener = Some(listener);
            self.acceptor.token = token;
        }
        Ok(())
    }
}
