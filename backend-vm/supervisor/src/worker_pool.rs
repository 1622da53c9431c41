//! Workers, from the start to the reaping, and spare ones with a ready device.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet};
use wormhole_link::channel::ChannelError;
use wormhole_link::process::BROKEN;
use wormhole_ring::control::{ArenaRun, Fetch, Message, Share, facts};
use wormhole_sandbox::Ending;

use super::connection::{self, Connection};
use super::log_budget::LogBudget;
use super::observers;
use super::spawn_queue::{SpawnQueue, Start};
use super::spawner::{Abilities, Heard, Process, Report as Spawned, Spawner};
use super::turns::TURN;
use super::workers::{Log, Portion};
use super::{Id, Source, SpawnerError, Supervisor};

/// Number of writes read from the log of an ended worker: more than its socket holds.
const LAST_PORTIONS: usize = 512;

/// State of workers' starts, which all tenants share.
#[derive(Debug)]
pub(super) struct WorkerPool {
    /// Device of the workers, or the reason why none can be started.
    device: Result<String, String>,
    /// Protocol hashes of the installed workers.
    hashes: Vec<u64>,
    /// Workers to be started.
    pub starts: SpawnQueue,
    /// Time within which a worker must have its device.
    start_limit: Duration,
    /// Log budget of workers without a session.
    log: LogBudget,
    /// Facts on the devices, from the worker that became ready last.
    pub devices: Vec<String>,
    /// Reason why the last spare worker of a protocol failed. The next demand tries again.
    failures: BTreeMap<u64, String>,
    /// Whether a worker has been ready once, so that the device works.
    pub device_works: bool,
}

impl WorkerPool {
    pub fn new(spawner: Spawner, abilities: Abilities, start_limit: Duration) -> Self {
        Self {
            device: abilities.device,
            hashes: abilities.hashes,
            starts: SpawnQueue::new(spawner),
            start_limit,
            log: LogBudget::of_workers(Instant::now()),
            devices: Vec::new(),
            failures: BTreeMap::new(),
            device_works: false,
        }
    }

    /// Checks that an installed worker speaks a guest's protocol.
    ///
    /// # Errors
    /// Returns the refusal, which names both protocols.
    pub fn check_protocol(&self, hash: u64) -> Result<(), String> {
        if self.hashes.contains(&hash) {
            return Ok(());
        }
        let known = self.hashes.iter().map(|hash| format!("{hash:016x}"));
        Err(format!(
            "the guest speaks protocol {hash:016x}, the installed workers speak {}",
            known.collect::<Vec<_>>().join(", ")
        ))
    }

    /// Returns the reason why a spare worker failed, if one did and none has replaced it.
    pub fn failure(&self) -> Option<&str> {
        self.failures.values().next().map(String::as_str)
    }

    /// Orders a worker's process.
    ///
    /// # Errors
    /// Returns the start and the reason why no worker can be started.
    fn order(&mut self, start: Start) -> Result<(), (Start, String)> {
        if let Err(reason) = &self.device {
            return Err((start, reason.clone()));
        }
        self.starts
            .order(start)
            .map_err(|start| (start, SpawnerError::Ended.to_string()))
    }
}

/// A worker process.
#[derive(Debug)]
pub(super) struct Worker {
    pub process: Process,
    pub peer: Connection,
    log: Option<Log>,
    tokens: [u32; 2],
    hash: u64,
    /// Environment beyond that of every worker.
    environment: Vec<(OsString, OsString)>,
    /// Tenant whose demand started it.
    account: Option<Id>,
    state: WorkerState,
    /// Time at which it entered that state.
    since: Instant,
    /// Session that it has or is going to have.
    session: Option<Id>,
    /// Reason why it cannot serve, if that is known before its end.
    refusal: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkerState {
    /// The process runs without its device so far. Contains the deadline for the device.
    Starting(Instant),
    /// Killed because it had no device in time. Contains the deadline for its end.
    Late(Instant),
    /// Killed and not ended in time: the kernel is holding it.
    Stuck,
    Ready,
    /// Session received.
    Assigned,
}

impl Worker {
    /// Returns whether it is known if the device works in this worker.
    pub fn is_settled(&self) -> bool {
        !matches!(self.state, WorkerState::Starting(_) | WorkerState::Late(_))
    }

    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            WorkerState::Starting(end) | WorkerState::Late(end) => Some(end),
            _ => None,
        }
    }

    fn enter(&mut self, state: WorkerState) {
        self.state = state;
        self.since = Instant::now();
    }

    fn end_late(&mut self, limit: Duration, ended_by: Instant) {
        self.enter(WorkerState::Late(ended_by));
        self.refusal.get_or_insert_with(|| {
            format!(
                "worker {} had no device after {limit:?}",
                self.process.pid()
            )
        });
        self.process.kill();
    }
}

impl Worker {
    /// Asks the worker to log a line for each queue of its device. Does nothing while earlier
    /// messages to the worker are queued.
    pub(super) fn ask_for_queues(&mut self, ops: &mut EventOps<'_>) -> Result<(), ChannelError> {
        if self.peer.is_waiting() {
            return Ok(());
        }
        if let Some(log) = &mut self.log {
            log.await_dump();
        }
        self.peer.send(ops, &Message::Dump, Vec::new())
    }
}

impl fmt::Display for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            WorkerState::Starting(_) => "has no device yet",
            WorkerState::Late(_) => "is killed, since it had no device in time",
            WorkerState::Stuck => "was killed, since it had no device in time, and does not end",
            WorkerState::Ready => "is ready",
            WorkerState::Assigned => "has its session",
        };
        let seconds = self.since.elapsed().as_secs_f64();
        write!(
            f,
            "worker {} {state}, for {seconds:.1} s",
            self.process.pid()
        )?;
        if self.session.is_none() {
            f.write_str(", as a spare")?;
        }
        if self.peer.is_waiting() {
            f.write_str("; it does not take what it is sent")?;
        }
        Ok(())
    }
}

/// Message of a worker, as an owned value.
enum Report {
    Ready(u64, String),
    Refused(String),
    Assigned,
    Added(ArenaRun),
    Removed(ArenaRun),
    RefusedArena(ArenaRun),
    Share(Share, Option<OwnedFd>),
    /// A `Share` whose descriptor was lost, because none was free.
    ShareLost(u32),
    Fetch(Fetch),
    Unshare(Fetch),
    Wrong(&'static str),
}

impl Supervisor {
    /// Requests a spare worker for every protocol that has none.
    pub(super) fn keep_spares(&mut self, ops: &mut EventOps<'_>) {
        self.replace_spares(ops, None);
    }

    /// Requests spares as [`keep_spares`](Self::keep_spares) does, on behalf of the tenant
    /// `account`, which took the missing ones.
    fn replace_spares(&mut self, ops: &mut EventOps<'_>, account: Option<Id>) {
        if self.stopping {
            return;
        }
        self.request_spares(account);
        self.start_next(ops);
    }

    fn request_spares(&mut self, account: Option<Id>) {
        for hash in self.pool.hashes.clone() {
            let is_spare = |worker: &Worker| {
                worker.hash == hash && worker.session.is_none() && worker.environment.is_empty()
            };
            if !self.pool.starts.has_spare(hash) && !self.workers.values().any(is_spare) {
                self.pool.failures.remove(&hash);
                self.pool.starts.add(Start {
                    hash,
                    environment: Vec::new(),
                    session: None,
                    account,
                });
            }
        }
    }

    fn worker_failed(&mut self, hash: u64, reason: String) {
        // The launcher of a supervisor's only tenant prints the reason itself while it waits for the device.
        if self.acceptor.listener.is_none()
            && self.tenants.values().any(|tenant| tenant.awaits_device())
        {
            tracing::info!("no worker for protocol {hash:016x}: {reason}");
        } else {
            tracing::error!("no worker for protocol {hash:016x}: {reason}");
        }
        self.pool.failures.insert(hash, reason);
    }

    /// Starts the workers whose turn it is.
    fn start_next(&mut self, ops: &mut EventOps<'_>) {
        while !self.stopping {
            let waiting: BTreeSet<Id> = self
                .sessions
                .keys()
                .copied()
                .filter(|session| !self.is_dying(*session))
                .collect();
            let dropped = self.pool.starts.retain(
                |session| waiting.contains(&session),
                |tenant| self.tenants.contains_key(&tenant),
            );
            if let Some(start) = dropped.first() {
                self.request_spares(start.account);
            }
            let starting = self.workers.values().filter(|worker| !worker.is_settled());
            let starting = starting.map(|worker| worker.account);
            let Some(start) = self.pool.starts.next(starting) else {
                return;
            };
            if let Err((start, reason)) = self.pool.order(start) {
                self.start_failed(ops, &start, reason);
            }
        }
    }

    fn start_failed(&mut self, ops: &mut EventOps<'_>, start: &Start, reason: String) {
        match start.session {
            Some(session) => self.session_lost_worker(ops, session, &reason, Vec::new()),
            None => self.worker_failed(start.hash, reason),
        }
    }

    /// Handles the spawner's reports: workers that have started, could not start, or have ended.
    pub(super) fn spawner_event(&mut self, ops: &mut EventOps<'_>) {
        loop {
            match self.pool.starts.spawner().report() {
                Ok(Some(heard)) => self.spawner_report(ops, heard),
                Ok(None) => break,
                Err(error) => return self.spawner_lost(ops, error),
            }
        }
        self.start_next(ops);
        self.answer_if_known(ops);
    }

    fn spawner_report(&mut self, ops: &mut EventOps<'_>, heard: Heard) {
        match heard.report {
            Spawned::Started { ticket, pid } => {
                let process = self.pool.starts.spawner().process(ticket, pid);
                let descriptors = <[OwnedFd; 2]>::try_from(heard.descriptors);
                match (self.pool.starts.finish(ticket), descriptors) {
                    (Some(start), Ok([socket, log])) => {
                        self.add_worker(ops, start, process, socket, Log::new(log));
                    }
                    (start, _) => {
                        process.kill();
                        if let Some(start) = start {
                            let reason = "no descriptor is left for the worker".to_owned();
                            self.start_failed(ops, &start, reason);
                        }
                    }
                }
            }
            Spawned::Failed { ticket, reason } => {
                if let Some(start) = self.pool.starts.finish(ticket) {
                    self.start_failed(ops, &start, reason);
                }
            }
            Spawned::Ended {
                ticket,
                ending,
                out_of_memory,
            } => {
                let mut workers = self.workers.iter();
                let ended = workers.find(|(_, worker)| worker.process.ticket() == ticket);
                if let Some(id) = ended.map(|(id, _)| *id) {
                    self.worker_ended(ops, id, ending, out_of_memory);
                }
            }
            Spawned::Scrubber { pid } => {
                for socket in heard.descriptors {
                    self.add_scrubber(ops, pid, socket);
                }
            }
            Spawned::ScrubberEnded { pid } => self.scrubber_ended(ops, pid),
            Spawned::NoScrubber(reason) => {
                self.scrubber.failed(&reason);
                self.hear_scrubber(ops);
            }
            // Sent once, before all other reports.
            Spawned::Ready { .. } | Spawned::Unfit(_) => {}
        }
    }

    /// Handles the end of the spawner, with which the kernel has killed all workers. Without it no
    /// session can be served.
    fn spawner_lost(&mut self, ops: &mut EventOps<'_>, error: SpawnerError) {
        connection::forget(ops, self.pool.starts.spawner());
        let reason = error.to_string();
        self.lost = Some(error);
        for start in self.pool.starts.abandon() {
            self.start_failed(ops, &start, reason.clone());
        }
        let workers: Vec<Id> = self.workers.keys().copied().collect();
        for id in workers {
            self.worker_ended(ops, id, Ending::Signalled(libc::SIGKILL), false);
        }
        self.stop(ops, "no worker can be started any more");
        // Scrubbers cannot be started either.
        self.scrubber.failed(&reason);
        self.hear_scrubber(ops);
    }

    /// Answers waiting launchers, unless the device has failed so far but another worker is
    /// starting.
    fn answer_if_known(&mut self, ops: &mut EventOps<'_>) {
        if self.pool.device_works || self.pool.starts.is_empty() {
            self.answer_attached(ops);
        }
    }

    fn add_worker(
        &mut self,
        ops: &mut EventOps<'_>,
        start: Start,
        process: Process,
        socket: OwnedFd,
        log: Log,
    ) {
        let id = self.id();
        let (peer, tokens) = match self.watch_worker(ops, id, socket, &log) {
            Ok(watched) => watched,
            Err(error) => {
                process.kill();
                return self.start_failed(ops, &start, format!("the event loop: {error}"));
            }
        };
        let pid = process.pid();
        if let Ok(device) = &self.pool.device {
            let hash = start.hash;
            tracing::debug!("worker {pid} starts on {device} for protocol {hash:016x}");
        }
        let waits = start
            .session
            .map(|session| self.sessions.contains_key(&session) && !self.is_dying(session));
        // Its session has ended meanwhile.
        if waits == Some(false) {
            process.kill();
        }
        let end = Instant::now() + self.pool.start_limit;
        self.set_deadline(end);
        self.workers.insert(
            id,
            Worker {
                process,
                peer,
                log: Some(log),
                tokens,
                hash: start.hash,
                environment: start.environment,
                account: start.account,
                state: WorkerState::Starting(end),
                since: Instant::now(),
                session: start.session,
                refusal: None,
            },
        );
        if let (Some(session), Some(true)) = (start.session, waits) {
            self.bind_worker(session, id, pid);
        }
    }

    /// Makes the event loop watch a worker's stream and log, or neither.
    fn watch_worker(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        socket: OwnedFd,
        log: &Log,
    ) -> Result<(Connection, [u32; 2]), event_manager::Error> {
        let stream = self.token(Source::WorkerStream(id));
        let peer = Connection::register(ops, socket, stream, true).map_err(|(error, _)| {
            self.sources.remove(&stream);
            error
        })?;
        match self.add_source(ops, log.socket(), Source::WorkerLog(id)) {
            Ok(log) => Ok((peer, [stream, log])),
            Err(error) => {
                peer.forget(ops);
                self.sources.remove(&stream);
                Err(error)
            }
        }
    }

    /// Kills the workers that have no device in time.
    pub(super) fn end_late_workers(&mut self, now: Instant) {
        let mut gives_way = false;
        for worker in self.workers.values_mut() {
            if worker.deadline().is_none_or(|end| now < end) {
                continue;
            }
            if let WorkerState::Late(_) = worker.state {
                let pid = worker.process.pid();
                tracing::error!(
                    "worker {pid} was killed and has not ended within {:?}: others start without it",
                    self.reap_limit
                );
                worker.enter(WorkerState::Stuck);
                gives_way = true;
            } else {
                worker.end_late(self.pool.start_limit, now + self.reap_limit);
            }
        }
        if gives_way {
            // Its place is free, as after a report of its end.
            let spawner = |source: &Source| matches!(source, Source::Spawner);
            let token = self.sources.iter().find(|(_, source)| spawner(source));
            if let Some((&token, _)) = token {
                self.turns.add(token);
            }
        }
    }

    pub(super) fn worker_of(&mut self, session: Id) -> Option<&mut Worker> {
        let worker = self.sessions.get(&session)?.worker?;
        self.workers.get_mut(&worker)
    }

    /// Assigns a session a spare worker with the same protocol and environment, or requests one.
    pub(super) fn find_worker(
        &mut self,
        ops: &mut EventOps<'_>,
        session: Id,
    ) -> Result<(), String> {
        let Some(wanted) = self.sessions.get(&session) else {
            return Ok(());
        };
        let wanted = Start {
            hash: wanted.hash,
            environment: wanted.environment.clone(),
            session: Some(session),
            account: Some(wanted.tenant),
        };
        let spare = self
            .workers
            .iter()
            .filter(|(_, worker)| {
                worker.session.is_none()
                    && worker.refusal.is_none()
                    && worker.hash == wanted.hash
                    && worker.environment == wanted.environment
            })
            .max_by_key(|(_, worker)| worker.is_settled())
            .map(|(id, _)| *id);
        let Some((id, worker)) = spare.and_then(|id| Some((id, self.workers.get_mut(&id)?))) else {
            if !self.pool.starts.claim(&wanted) {
                self.pool.starts.add(wanted);
            }
            self.start_next(ops);
            return Ok(());
        };
        worker.session = Some(session);
        let (pid, ready) = (worker.process.pid(), worker.state == WorkerState::Ready);
        self.bind_worker(session, id, pid);
        if ready {
            self.assign(ops, id);
        }
        Ok(())
    }

    /// Sends a ready worker its session.
    fn assign(&mut self, ops: &mut EventOps<'_>, id: Id) {
        let Some(key) = self.workers.get(&id).and_then(|worker| worker.session) else {
            return;
        };
        let grant = self.grant_of(key);
        let session = self.sessions.get_mut(&key);
        let descriptors = session.and_then(|one| one.descriptors(&self.neighbours).ok());
        let (Some(grant), Some(descriptors), Some(worker)) =
            (grant, descriptors, self.workers.get_mut(&id))
        else {
            self.session_unserved(ops, key, "no descriptor is left for the session");
            return;
        };
        worker.enter(WorkerState::Assigned);
        if let Err(error) = worker.peer.send(ops, &Message::Assign(grant), descriptors) {
            tracing::warn!("worker {} takes no session: {error}", worker.process.pid());
            worker.process.kill();
        }
    }

    pub(super) fn worker_event(&mut self, ops: &mut EventOps<'_>, id: Id, set: EventSet) {
        let Err(reason) = self.serve_worker(ops, id, set) else {
            return;
        };
        let Some(worker) = self.workers.get(&id) else {
            return;
        };
        let pid = worker.process.pid();
        let tenant = self.tenant_of(id);
        if let Some(reason) = reason
            && tenant.is_none_or(|tenant| self.may_log(tenant))
        {
            tracing::warn!("worker {pid} is killed: it broke the protocol: {reason}");
        }
        let Some(worker) = self.workers.get_mut(&id) else {
            return;
        };
        // The spawner reports its end; the stream would only report the same event again.
        worker.process.kill();
        worker.peer.forget(ops);
        let token = std::mem::take(&mut worker.tokens[0]);
        self.sources.remove(&token);
    }

    /// Returns `Err(None)` if the stream ended.
    fn serve_worker(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        set: EventSet,
    ) -> Result<(), Option<String>> {
        let failed = |error: ChannelError| match error {
            ChannelError::Ended => None,
            error => Some(wormhole_link::chain(&error)),
        };
        let Some(worker) = self.workers.get_mut(&id) else {
            return Ok(());
        };
        if set.contains(EventSet::OUT) {
            worker.peer.flush(ops).map_err(failed)?;
        }
        let token = worker.peer.token();
        let session = worker.session.and_then(|key| self.sessions.get(&key));
        let tenant = session.map(|session| session.tenant);
        let may = tenant.is_none_or(|tenant| self.may_read(tenant, token));
        let Some(worker) = self.workers.get_mut(&id) else {
            return Ok(());
        };
        if !worker.peer.fill(ops, may, set).map_err(failed)? {
            return Ok(());
        }
        for _ in 0..TURN {
            let Some(worker) = self.workers.get_mut(&id) else {
                return Ok(());
            };
            let report = match worker.peer.incoming.take().map_err(failed)? {
                None => return Ok(()),
                Some(Message::Ready {
                    protocol_hash,
                    device,
                }) => Report::Ready(protocol_hash, device.to_owned()),
                Some(Message::Refused { reason, .. }) => {
                    Report::Refused(reason.chars().take(1000).collect())
                }
                Some(Message::Assigned) => Report::Assigned,
                Some(Message::ArenaAdded(run)) => Report::Added(run),
                Some(Message::ArenaRemoved(run)) => Report::Removed(run),
                Some(Message::ArenaRefused(run)) => Report::RefusedArena(run),
                Some(Message::Share(share)) if share.descriptor == 0 => Report::Share(share, None),
                Some(Message::Share(share)) => {
                    match worker.peer.incoming.descriptor() {
                        Some(descriptor) => Report::Share(share, Some(descriptor)),
                        // The descriptor was lost because the supervisor had none free.
                        None if worker.peer.incoming.was_lost() => Report::ShareLost(share.id),
                        None => {
                            let reason = "it shares a descriptor that did not come";
                            return Err(Some(reason.to_owned()));
                        }
                    }
                }
                Some(Message::Fetch(fetch)) => Report::Fetch(fetch),
                Some(Message::Unshare(fetch)) => Report::Unshare(fetch),
                Some(other) => Report::Wrong(other.name()),
            };
            self.worker_report(ops, id, report).map_err(Some)?;
        }
        self.turns.add(token);
        Ok(())
    }

    fn worker_report(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        report: Report,
    ) -> Result<(), String> {
        let Some(worker) = self.workers.get_mut(&id) else {
            return Ok(());
        };
        let assigned = worker
            .session
            .filter(|_| worker.state == WorkerState::Assigned);
        match (report, assigned) {
            // The worker has been killed.
            _ if matches!(worker.state, WorkerState::Late(_) | WorkerState::Stuck) => Ok(()),
            (Report::Ready(hash, device), None) if !worker.is_settled() => {
                if hash != worker.hash {
                    return Err(format!(
                        "it speaks protocol {hash:016x}, its executable said {:016x}",
                        worker.hash
                    ));
                }
                let name = facts::get(&device, facts::NAME).unwrap_or(&device);
                let name: String = name.chars().take(200).collect();
                tracing::debug!("worker {} is ready on {name:?}", worker.process.pid());
                worker.enter(WorkerState::Ready);
                // It has not served a guest yet, so its description is trustworthy.
                self.pool.devices = observers::devices(&device);
                self.pool.device_works = true;
                self.answer_attached(ops);
                self.assign(ops, id);
                self.start_next(ops);
                Ok(())
            }
            (Report::Refused(reason), None) if !worker.is_settled() => {
                worker.refusal = Some(reason);
                Ok(())
            }
            // No guest uses it yet, or its guest has left and it is not dead yet.
            (Report::Refused(reason), Some(session))
                if self.is_preparing(session) || self.is_dying(session) =>
            {
                if let Some(worker) = self.workers.get_mut(&id) {
                    worker.refusal = Some(reason);
                }
                Ok(())
            }
            (Report::Assigned, Some(session)) => {
                self.session_assigned(ops, session)?;
                let tenant = self.sessions.get(&session).map(|session| session.tenant);
                self.replace_spares(ops, tenant);
                Ok(())
            }
            (Report::Added(run), Some(session)) => self.arena_added(ops, session, &run),
            (Report::Removed(run), Some(session)) => self.arena_removed(ops, session, &run),
            (Report::RefusedArena(run), Some(session)) => self.arena_refused(ops, session, &run),
            (Report::Share(share, descriptor), Some(session)) => {
                self.share(ops, session, &share, descriptor);
                Ok(())
            }
            (Report::ShareLost(request), Some(session)) => {
                self.refuse_share(ops, session, request);
                Ok(())
            }
            (Report::Fetch(fetch), Some(session)) => {
                self.fetch(ops, session, &fetch);
                Ok(())
            }
            (Report::Unshare(fetch), Some(session)) => {
                self.unshare(ops, session, &fetch);
                Ok(())
            }
            (Report::Wrong(name), _) => Err(format!("it sent {name}, which workers do not send")),
            _ => Err("it sent a message out of turn".to_owned()),
        }
    }

    /// Handles the end of a worker's process.
    fn worker_ended(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        ending: Ending,
        out_of_memory: bool,
    ) {
        // Its last messages may give the reason.
        let _ = self.serve_worker(ops, id, EventSet::IN);
        // The worker may have left the log's other end open in another process, so the end of the
        // log may never come.
        for _ in 0..LAST_PORTIONS {
            if self.read_log(id) != Portion::Data {
                break;
            }
        }
        let log = self.take_log(ops, id);
        let Some(worker) = self.workers.remove(&id) else {
            return;
        };
        if worker.tokens[0] != 0 {
            worker.peer.forget(ops);
        }
        for token in worker.tokens {
            self.sources.remove(&token);
        }
        let why = match (&worker.refusal, ending) {
            (Some(reason), _) => reason.clone(),
            (None, Ending::Exited(BROKEN)) => "the guest corrupted its ring".to_owned(),
            (None, _) if out_of_memory => format!(
                "worker {} wanted more memory than workers may have",
                worker.process.pid()
            ),
            (None, ending) => format!("worker {} {ending}", worker.process.pid()),
        };
        match worker.session {
            Some(session) => {
                let mut descriptors = worker.peer.into_descriptors();
                descriptors.extend(log);
                let tenant = self.sessions.get(&session).map(|session| session.tenant);
                self.session_lost_worker(ops, session, &why, descriptors);
                // A spare that a session took is replaced at `Assigned`, which this one may not have sent.
                if self.lost.is_none() {
                    self.replace_spares(ops, tenant);
                }
            }
            // It has served no guest, so it has sent no foreign descriptors, and the supervisor
            // closes them itself.
            None => self.worker_failed(worker.hash, why),
        }
        self.start_next(ops);
        self.answer_if_known(ops);
    }

    pub(super) fn worker_log(&mut self, ops: &mut EventOps<'_>, id: Id) {
        let portion = self.read_log(id);
        if matches!(portion, Portion::Data | Portion::Empty) {
            return;
        }
        let tenant = self.tenant_of(id);
        // One that has served no guest has no foreign descriptors to send.
        if let (Some(log), Some(tenant)) = (self.take_log(ops, id), tenant) {
            self.scrubber.close(tenant, [log]);
        }
        if portion == Portion::Descriptors
            && let Some(worker) = self.workers.get(&id)
        {
            worker.process.kill();
            let pid = worker.process.pid();
            if tenant.is_none_or(|tenant| self.may_log(tenant)) {
                tracing::warn!("worker {pid} is killed: it sent descriptors on its log");
            }
        }
    }

    /// Returns the tenant that a worker serves, if any.
    fn tenant_of(&self, id: Id) -> Option<Id> {
        let session = self.workers.get(&id)?.session?;
        Some(self.sessions.get(&session)?.tenant)
    }

    /// Removes a worker's log from the event loop and returns its socket.
    fn take_log(&mut self, ops: &mut EventOps<'_>, id: Id) -> Option<OwnedFd> {
        let worker = self.workers.get_mut(&id)?;
        let log = worker.log.take()?;
        connection::forget(ops, log.socket());
        let token = std::mem::take(&mut worker.tokens[1]);
        self.sources.remove(&token);
        Some(log.into_socket())
    }

    /// Passes on one portion of a worker's log.
    fn read_log(&mut self, id: Id) -> Portion {
        let Some(worker) = self.workers.get_mut(&id) else {
            return Portion::Closed;
        };
        let pid = worker.process.pid();
        let tenant = worker
            .session
            .and_then(|session| self.sessions.get(&session))
            .and_then(|session| self.tenants.get_mut(&session.tenant));
        // A spare has served no guest; all spares share one budget.
        let budget = tenant.map_or(&mut self.pool.log, |tenant| &mut tenant.worker_log);
        worker
            .log
            .as_mut()
            .map_or(Portion::Closed, |log| log.read(pid, budget))
    }
}
