//! The supervisor: one event loop that waits for nobody, processes that close descriptors and give memory back for it
//! ([`scrubber`]), and one that starts workers and those for it: the [`spawner`]. The loop hears guests without privileges
//! and under a system call filter ([`privileges`]).
//!
//! Launchers bring windows and guest processes' control streams over tenant streams. A guest's hello is
//! matched with a worker by the hash of its protocol; the session is granted when the worker has mapped it.
//! Everything a launcher, a guest or a worker sends is checked, and whoever breaks the protocol loses its
//! stream, with one line in the log, while the others notice nothing.
//!
//! A session ends in one order, whoever dies first: its worker is killed and reaped; its guest's stream has
//! ended; its segments are scrubbed; they are free. See [`sessions`].
//!
//! When the supervisor itself is killed, the kernel kills its workers and closes its guests' streams; a guest
//! learns it from the end of its stream.

mod alarm;
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

pub use self::command::main;
use self::connection::Peer;
use self::descriptors::Descriptors;
pub use self::descriptors::DescriptorsError;
use self::dump::LastDump;
use self::guests::Guest;
pub use self::listener::{ListenError, Listener};
use self::log_budget::LogBudget;
use self::observers::Observers;
pub use self::quotas::Quotas;
pub use self::sampler::Sample;
use self::sampler::Sampler;
use self::scrubber::{REFUSED, Scrubber, Told};
use self::sessions::Session;
use self::sharing::Shares;
use self::signals::{Asked, Signals};
use self::spawn_queue::Starts;
pub use self::spawner::SpawnerError;
use self::spawner::{Abilities, Setup, Spawner, Tenants};
use self::tenants::Tenant;
use self::turns::Turns;
pub use self::window::MINIMUM_BYTES as MINIMUM_WINDOW_BYTES;
use self::worker_pool::Worker;
use wormhole_link::channel::MAX_RECEIVED;
use wormhole_link::device::DeviceChoice;
use wormhole_link::neighbours::NeighboursFile;
pub use wormhole_sandbox::MemoryLimits;

/// `CUDA_ERROR_CONTEXT_IS_DESTROYED`: what every call returns after the worker died.
pub const WORKER_LOST_RESULT: u32 = 709;
/// `CUDA_ERROR_SYSTEM_NOT_READY`: what every call returns after the supervisor was told to stop.
pub const REVOKED_RESULT: u32 = 802;

/// The supervisor's and its spawner's `oom_score_adj` (proc(5)).
const OOM_SCORE: &str = "-900";

/// What a supervisor is to do.
#[derive(Debug)]
pub struct Options {
    pub device: DeviceChoice,
    /// Directories of worker executables.
    pub workers: Vec<PathBuf>,
    /// Tenants connect here.
    pub listener: Option<Listener>,
    /// The stream of one tenant; when it ends and its sessions are closed, so is the supervisor.
    pub stream: Option<OwnedFd>,
    /// The tenants of the listener trust each other.
    pub trusted_tenants: bool,
    /// Start workers although this system lets nobody confine them with namespaces.
    pub without_namespaces: bool,
    /// Bytes of memory that workers may have.
    pub memory: MemoryLimits,
    /// How long a worker may take to have its device.
    pub start_limit: Duration,
    /// How long a guest may take to say hello, and a launcher that connects to attach.
    pub hello_limit: Duration,
    /// How long a worker that was killed may take to end. Afterwards it keeps no other from starting, and a supervisor
    /// that ends waits for it no longer.
    pub reap_limit: Duration,
    /// What tenants may have at most.
    pub quotas: Quotas,
}

/// Why the supervisor cannot start or go on.
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

/// A number that names a tenant, a guest, a worker or a session in this supervisor, and is not used again
/// while it is in use.
type Id = u32;

/// What a descriptor of the event loop belongs to.
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

/// The supervisor's state. Reached through [`run`].
#[derive(Debug)]
struct Supervisor {
    /// What workers are started on, or why none can be.
    device: Result<String, String>,
    /// The protocols of the workers that there are.
    hashes: Vec<u64>,
    listener: Option<Listener>,
    /// Its number in the event loop.
    listener_token: u32,
    /// Tenants may be waiting that could not be accepted.
    keeps_tenants_waiting: bool,
    /// That has been logged since the last time when none was waiting.
    said_so: bool,
    descriptors: Descriptors,
    stream: Option<OwnedFd>,
    signals: Signals,
    /// End when the last tenant is gone.
    ends_with_tenants: bool,
    stopping: bool,
    /// Why there can be no workers any more.
    lost: Option<SpawnerError>,
    sources: HashMap<u32, Source>,
    next_token: u32,
    next_id: Id,
    tenants: BTreeMap<Id, Tenant>,
    /// More than one of them has a window: what tells of the devices' work as a whole tells of others'.
    has_neighbours: bool,
    /// Where workers read that.
    neighbours: NeighboursFile,
    guests: BTreeMap<Id, Guest>,
    sessions: BTreeMap<Id, Session>,
    workers: BTreeMap<Id, Worker>,
    shares: Shares,
    /// What workers without a session may still write to their logs.
    spare_log: LogBudget,
    /// Workers that are to come.
    starts: Starts,
    start_limit: Duration,
    hello_limit: Duration,
    reap_limit: Duration,
    /// When to end although sessions are not closed.
    ends_by: Option<Instant>,
    quotas: Quotas,
    /// Lines on connections that are refused, or have no window.
    refusals: LogBudget,
    /// The users of tenants that are gone and whose descriptors are still to be closed.
    gone: BTreeMap<Id, u32>,
    /// When to look for workers and guests that have taken longer than that.
    next_deadline: Option<Instant>,
    scrubber: Scrubber,
    /// Asks the host's NVML. None where the device has none.
    sampler: Option<Sampler>,
    observers: Observers,
    turns: Turns,
    /// The tenant whose stream was read last with the descriptors that the supervisor keeps for that.
    reader: Option<Id>,
    /// Streams that are not read, by their tenants and tokens, while the tenant's descriptors wait to be closed.
    waiting: BTreeMap<Id, BTreeSet<u32>>,
    last_dump: LastDump,
    /// What the last worker that became ready says of its devices, in facts.
    devices: Vec<String>,
    /// Why the last spare worker of a protocol could not be had; the next demand tries again.
    failures: BTreeMap<u64, String>,
    /// A worker has been ready once: the device works.
    device_works: bool,
}

/// Serves until told to stop.
///
/// # Errors
/// When workers cannot be confined or found, or the event loop fails.
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
        memory: options.memory,
        reap_limit: options.reap_limit / 3,
    };
    come_last_when_memory_is_short();
    let (spawner, abilities) = Spawner::fork(setup, &closes, place)?;
    privileges::drop_capabilities().map_err(SupervisorError::Privileges)?;
    // The threads that follow have these signals blocked as well.
    let signals = Signals::new().map_err(SupervisorError::Signals)?;
    let sampler = match options.device {
        DeviceChoice::Cuda(_) => Some(Sampler::new().map_err(SupervisorError::Sampler)?),
        DeviceChoice::Cpu { .. } => None,
    };
    alarm::install().map_err(SupervisorError::Signals)?;
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
    supervisor.starts.end();
    supervisor
        .lost
        .take()
        .map_or(Ok(()), |error| Err(error.into()))
}

/// All workers end with this process. Only root may say so.
fn come_last_when_memory_is_short() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        tracing::debug!(
            "the supervisor is killed like any other process when memory is short: {error}"
        );
    }
}

/// What the system gives a supervisor before it serves anybody.
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
            device: parts.abilities.device,
            hashes: parts.abilities.hashes,
            ends_with_tenants: options.listener.is_none(),
            listener: options.listener,
            listener_token: 0,
            keeps_tenants_waiting: false,
            said_so: false,
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
            spare_log: LogBudget::of_workers(Instant::now()),
            scrubber: Scrubber::new(parts.spawner.orders()),
            starts: Starts::new(parts.spawner),
            start_limit: options.start_limit,
            hello_limit: options.hello_limit,
            reap_limit: options.reap_limit,
            ends_by: None,
            quotas: options.quotas,
            gone: BTreeMap::new(),
            refusals: LogBudget::of_lines(Instant::now()),
            next_deadline: None,
            sampler: parts.sampler,
            observers: Observers::default(),
            turns: parts.turns,
            reader: None,
            waiting: BTreeMap::new(),
            last_dump: LastDump::default(),
            devices: Vec::new(),
            failures: BTreeMap::new(),
            device_works: false,
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

    /// Says what this process does not wait for any longer.
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

    /// Has [`meet_deadlines`](Self::meet_deadlines) look again then, at the latest.
    fn set_deadline(&mut self, end: Instant) {
        self.next_deadline = Some(self.next_deadline.map_or(end, |next| next.min(end)));
    }

    /// Ends what has taken too long; its end is announced like any other's. How many milliseconds there are
    /// until the next may be late, -1 for ever.
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
            // Not before it.
            i32::try_from(left.saturating_add(1)).unwrap_or(i32::MAX)
        })
    }

    /// A token for a descriptor.
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

    /// A number that nothing has.
    fn id(&mut self) -> Id {
        loop {
            self.next_id = self.next_id.wrapping_add(1);
            let id = self.next_id;
            let used = id == REFUSED
                || self.tenants.contains_key(&id)
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

    /// A process that gives memory back has come, with its socket.
    fn add_scrubber(&mut self, ops: &mut EventOps<'_>, socket: OwnedFd) {
        match self.add_source(ops, &socket, Source::Scrubber) {
            Ok(token) => {
                self.scrubber.add(token, socket);
            }
            Err(error) => {
                self.scrubber.failed(&error.to_string());
            }
        }
        self.hear_scrubber(ops);
    }

    /// A process that gives memory back has finished something, or has ended.
    fn memory_given_back(&mut self, ops: &mut EventOps<'_>, token: u32) {
        if !self.scrubber.read(token) {
            if !self.scrubber.closes_refused(token) {
                tracing::error!("a process that gives memory back has ended");
            }
            self.remove_scrubber(ops, token);
        }
        self.hear_scrubber(ops);
    }

    /// Does what waited for descriptors to be passed on, or for what was to be done with them.
    fn hear_scrubber(&mut self, ops: &mut EventOps<'_>) {
        for (told, result) in self.scrubber.finished() {
            match told {
                Told::Scrubbed { session, run } => self.run_scrubbed(session, run, result),
                Told::Forgotten { session, request } => self.unshared(ops, session, request),
                Told::Buried { token, parties } => self.shares.buried(token, parties),
                Told::Attached { tenant } => self.window_written(ops, tenant, result),
                Told::Status { session } => self.status_written(ops, session, result),
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

    /// Whether a stream of a tenant may be read, with as many descriptors as come. Either a process takes them at once, and
    /// so took those of the last reader, or the tenant may hold them. If not, the stream waits until descriptors that are
    /// here have been passed on.
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
            // The loop does not watch it meanwhile, nor the others.
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

    /// Takes a tenant's stream out of the event loop, and has it closed with what waits in it.
    fn close_connection(&mut self, ops: &mut EventOps<'_>, tenant: Id, peer: Peer) {
        peer.forget(ops);
        peer.shut_down();
        let descriptors = peer.into_descriptors();
        // Dropped here if it is all there is.
        if !matches!(&descriptors[..], [socket] if listener::has_brought_nothing(socket)) {
            self.scrubber.close(tenant, descriptors);
        }
    }

    /// Ends every session, in order; the loop ends when they have.
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
            // Of a socket of another kind, the process that gave it is the owner.
            let user = listener::user_of(&stream);
            self.add_tenant(ops, stream, user.unwrap_or(0), None);
        }
        self.keep_spares(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let token = events.data();
        // What was closed earlier in this round may still be announced.
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
        if self.keeps_tenants_waiting {
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
            self.starts.spawner(),
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
        if let Some(listener) = self.listener.take() {
            // Announced once, a tenant that cannot be accepted does not keep the loop busy.
            let token = self.token(Source::Listener);
            let set = EventSet::IN | EventSet::EDGE_TRIGGERED;
            ops.add(Events::with_data(&listener, token, set))?;
            self.listener = Some(listener);
            self.listener_token = token;
        }
        Ok(())
    }
}
