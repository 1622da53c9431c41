//! Workers, from the start until a tenant's process has them, and spare ones with a ready device.
//!
//! A spare belongs to the tenant that caused its start, by taking the one before, or to none. While several tenants have
//! windows, a spare is given to its tenant first. Any other tenant gets it only if its user has no worker in preparation,
//! so that a user who begins sessions without pause waits for its own starts, and leaves a spare to each other user.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet};
use wormhole_link::channel::ChannelError;
use wormhole_link::log_budget::{LogBudget, Verdict};
use wormhole_ring::control::{Message, Refusal, facts};
use wormhole_sandbox::Ending;

use super::connection::{self, Connection};
use super::demand::{Demand, TOGETHER};
use super::pair::Order;
use super::spawn_queue::{Cause, SpawnQueue, Start, Wanted};
use super::spawner::{Abilities, Heard, Process, Report as Spawned, Spawner};
use super::tenant_processes::TenantProcess;
use super::workers::{LAST_PORTIONS, Log, Portion};
use super::{Id, Source, SpawnerError, Supervisor};

/// Number of spare workers of a protocol while several tenants have windows. Each takes a part of the device's memory.
const SPARES: usize = 2;
/// Most spare workers of a protocol for a tenant that is alone, which has as many as it has begun sessions together.
const SPARES_ALONE: usize = 8;

/// Longest time for which spares wait with their start.
const LONGEST_QUIET: Duration = Duration::from_secs(1);
/// Time for which the next spare waits for a session to take the one that it was given. A tenant that never says so keeps no
/// spare from others.
const OWED: Duration = Duration::from_secs(2);

/// State of workers' starts, which all tenants share.
#[derive(Debug)]
pub(super) struct WorkerPool {
    /// Device of the workers, or the reason why none can be started.
    device: Result<String, String>,
    /// Protocol hashes of the installed workers.
    pub hashes: Vec<u64>,
    /// Workers to be started.
    pub starts: SpawnQueue,
    /// Time within which a worker must have its device.
    start_limit: Duration,
    /// Log budget of workers without a session.
    log: LogBudget,
    /// Facts on the devices, from the worker that became ready last.
    pub devices: String,
    /// Reason why the last spare worker of a protocol failed. The next demand tries again.
    failures: BTreeMap<u64, String>,
    /// Budget of log lines about these.
    failure_lines: LogBudget,
    /// Whether a worker has been ready once, so that the device works.
    pub device_works: bool,
    /// Demand for workers of each protocol.
    demand: BTreeMap<u64, Demand>,
    /// Time that the last start took, from the process to the ready device.
    start_took: Duration,
    /// Time until which spares of a tenant that is alone wait with their start: a session that has just begun does its
    /// first work, which a start on the same device would hold up for about as long as it takes itself.
    quiet_until: Option<Instant>,
}

impl WorkerPool {
    pub fn new(spawner: Spawner, abilities: Abilities, start_limit: Duration) -> Self {
        Self {
            device: abilities.device,
            hashes: abilities.hashes,
            starts: SpawnQueue::new(spawner),
            start_limit,
            log: LogBudget::of_workers(Instant::now()),
            devices: String::new(),
            failures: BTreeMap::new(),
            failure_lines: LogBudget::of_lines(Instant::now()),
            device_works: false,
            demand: BTreeMap::new(),
            start_took: Duration::ZERO,
            quiet_until: None,
        }
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
    /// Stream and log of the worker. None once the tenant's process has them.
    ends: Option<(Connection, Log)>,
    tokens: [u32; 2],
    hash: u64,
    /// Environment beyond that of every worker.
    environment: Vec<(OsString, OsString)>,
    /// User and tenant whose demand started it, or who took it as a spare.
    cause: Cause,
    /// Whether a session was given this spare, and the tenant's process has not reported the session as `Taken`. The
    /// supervisor starts the next spare after that report.
    is_owed: bool,
    /// Whether it is in the cgroup of its session's tenant. Memory that it touches before does not count for the tenant.
    is_placed: bool,
    state: WorkerState,
    /// Time at which it entered that state.
    since: Instant,
    /// Session that it has or is going to have.
    pub session: Option<Wanted>,
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
    /// A tenant's process has it.
    Given,
    /// Killed, since fewer spares are useful by now.
    Surplus,
}

impl Worker {
    /// Returns whether it is known if the device works in this worker.
    pub fn is_settled(&self) -> bool {
        !matches!(self.state, WorkerState::Starting(_) | WorkerState::Late(_))
    }

    /// Returns whether this tenant's process has it.
    pub fn is_given_to(&self, tenant: Id) -> bool {
        self.state == WorkerState::Given && self.session.is_some_and(|(of, _)| of == tenant)
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

    /// Returns whether it waits for a session of any tenant, with the usual environment.
    fn is_idle(&self) -> bool {
        self.session.is_none() && self.environment.is_empty() && self.state == WorkerState::Ready
    }

    /// Returns whether it is a spare for a session that has not taken it, so that the next one waits.
    fn is_awaited(&self) -> bool {
        let now = Instant::now();
        self.is_owed && self.awaited_until().is_none_or(|until| now < until)
    }

    /// Returns the time until which the next spare waits for a session to take this one, which it was given.
    fn awaited_until(&self) -> Option<Instant> {
        (self.is_owed && self.state == WorkerState::Given).then(|| self.since + OWED)
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

impl fmt::Display for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            WorkerState::Starting(_) => "has no device yet",
            WorkerState::Late(_) => "is killed, since it had no device in time",
            WorkerState::Stuck => "was killed, since it had no device in time, and does not end",
            WorkerState::Ready => "is ready",
            WorkerState::Given => "is its tenant's",
            WorkerState::Surplus => "is killed, since fewer spares are useful",
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
        Ok(())
    }
}

impl Supervisor {
    /// Requests a spare worker for every protocol that has none.
    pub(super) fn keep_spares(&mut self) {
        self.replace_spares(None);
    }

    /// Requests spares as [`keep_spares`](Self::keep_spares) does, on behalf of the tenant
    /// `account`, which took the missing ones.
    pub(super) fn replace_spares(&mut self, account: Option<Id>) {
        self.request_spares(account, self.pool.hashes.clone());
        self.start_next();
    }

    /// Requests the missing spares of protocols, the first of each for the tenant `account`, and all if it is alone. A tenant that
    /// has one beside others, or whose sessions wait for their start, gets none for itself: its next session would claim it.
    fn request_spares(&mut self, account: Option<Id>, hashes: Vec<u64>) {
        if self.stopping {
            return;
        }
        let now = Instant::now();
        let awaited = self.workers.values().filter_map(Worker::awaited_until);
        if let Some(until) = awaited.filter(|until| now < *until).min() {
            self.set_deadline(until);
        }
        if self.is_alone() {
            let is_busy = self.tenants.keys().any(|tenant| {
                let starts = &self.pool.starts;
                starts.has_waiting_session(Some(*tenant))
            });
            let quiet = self.pool.quiet_until;
            let quiet = quiet.filter(|until| Instant::now() < *until);
            if let Some(until) = quiet {
                self.set_deadline(until);
            }
            if is_busy || quiet.is_some() {
                return;
            }
        }
        for hash in hashes {
            let spares = self.workers.values().filter(|worker| {
                worker.hash == hash
                    && worker.environment.is_empty()
                    && worker.state != WorkerState::Surplus
                    && (worker.session.is_none() || worker.is_awaited())
            });
            let mut owners: Vec<_> = spares.map(|worker| worker.cause.1).collect();
            owners.extend(self.pool.starts.spares(hash));
            while owners.len() < self.wanted_spares(hash) {
                self.pool.failures.remove(&hash);
                let account = account.filter(|_| {
                    self.is_alone()
                        || !owners.contains(&account)
                            && !self.pool.starts.has_waiting_session(account)
                });
                let tenant = account.and_then(|account| self.tenants.get(&account));
                self.pool.starts.add(Start {
                    hash,
                    environment: Vec::new(),
                    session: None,
                    account,
                    user: tenant.map(|tenant| tenant.user),
                });
                owners.push(account);
            }
        }
    }

    /// Returns the number of spare workers of a protocol.
    fn wanted_spares(&self, hash: u64) -> usize {
        let demand = self.pool.demand.get(&hash);
        match self.is_alone() {
            true => demand.map_or(1, |demand| demand.peak(Instant::now()).max(1)),
            false => SPARES,
        }
    }

    /// Returns whether at most one tenant has a window.
    fn is_alone(&self) -> bool {
        let tenants = self.tenants.values().filter(|tenant| tenant.has_window);
        tenants.count() <= 1
    }

    /// Returns the number of sessions of a protocol that have just begun, or wait for their workers.
    fn begun_together(&self, hash: u64) -> usize {
        let workers = self.workers.values().filter(|worker| {
            let is_new = worker.state != WorkerState::Given || worker.since.elapsed() < TOGETHER;
            let lives = |wanted| is_wanted(&self.tenants, wanted);
            worker.hash == hash && is_new && worker.session.is_some_and(lives)
        });
        workers.count() + self.pool.starts.sessions(hash)
    }

    /// Forgets the demand when a tenant leaves: the next one that is alone has a demand of its own, and no number of spares
    /// tells it of this one.
    pub(super) fn end_demand(&mut self) {
        self.pool.demand.clear();
        self.adjust_spares(Instant::now());
    }

    /// Starts the spares that have waited, but for protocols whose last one failed, ends those beyond what is useful, and sets
    /// the deadline of the next change.
    pub(super) fn adjust_spares(&mut self, now: Instant) {
        let failures = &self.pool.failures;
        let hashes = self.pool.hashes.iter().copied();
        let works = |hash: &u64| !failures.contains_key(hash);
        self.request_spares(None, hashes.filter(works).collect());
        self.start_next();
        for hash in self.pool.hashes.clone() {
            let most = self.wanted_spares(hash).max(SPARES);
            let idle = |worker: &&mut Worker| worker.hash == hash && worker.is_idle();
            let mut idle: Vec<_> = self.workers.values_mut().filter(idle).collect();
            idle.sort_by_key(|worker| worker.since);
            let surplus = idle.len().saturating_sub(most);
            let missing = most.saturating_sub(idle.len());
            self.pool.starts.withdraw_spares(hash, missing);
            for worker in &mut idle[..surplus] {
                worker.enter(WorkerState::Surplus);
                worker.process.kill();
            }
        }
        let fades = self.pool.demand.values();
        if let Some(end) = fades.filter_map(|demand| demand.fades(now)).min() {
            self.set_deadline(end);
        }
    }

    /// Returns whether a worker is in preparation on behalf of a user, or will be in place of a spare that the user has
    /// taken.
    fn is_preparing_for(&self, user: u32) -> bool {
        let mut workers = self.workers.values();
        self.pool.starts.has_any_of(user)
            || workers.any(|worker| {
                worker.cause.0 == Some(user) && (worker.is_owed || !worker.is_settled())
            })
    }

    /// Replaces the spare that a session has taken, if it has.
    pub(super) fn spare_taken(&mut self, wanted: Wanted) {
        let mut workers = self.workers.values_mut();
        if let Some(worker) = workers.find(|worker| worker.session == Some(wanted)) {
            worker.is_owed = false;
        }
        self.replace_spares(Some(wanted.0));
    }

    fn worker_failed(&mut self, hash: u64, reason: String) {
        let verdict = self.pool.failure_lines.spend(Instant::now());
        if let Verdict::After(count) = verdict {
            tracing::error!("{count} lines on workers that failed were left out");
        }
        // The launcher of a supervisor's only tenant prints the reason itself: it waits for the device, or will when it has
        // attached its window.
        let asks = |one: &TenantProcess| one.awaits_device || !one.has_window;
        if verdict == Verdict::Drop {
            // It is counted.
        } else if self.acceptor.listener.is_none() && self.tenants.values().any(asks) {
            tracing::info!("no worker for protocol {hash:016x}: {reason}");
        } else {
            tracing::error!("no worker for protocol {hash:016x}: {reason}");
        }
        self.pool.failures.insert(hash, reason);
    }

    /// Starts the workers whose turn it is.
    pub(super) fn start_next(&mut self) {
        while !self.stopping {
            let tenants = &self.tenants;
            let dropped = self.pool.starts.retain(
                |wanted| is_wanted(tenants, wanted),
                |tenant| tenants.contains_key(&tenant),
            );
            if let Some(start) = dropped.first() {
                self.request_spares(start.account, self.pool.hashes.clone());
            }
            let starting = self.workers.values().filter(|worker| !worker.is_settled());
            let starting = starting.map(|worker| worker.cause);
            let Some(start) = self.pool.starts.next(starting) else {
                return;
            };
            if let Err((start, reason)) = self.pool.order(start) {
                self.start_failed(&start, reason);
            }
        }
    }

    fn start_failed(&mut self, start: &Start, reason: String) {
        match start.session {
            Some(wanted) => self.refuse_worker(wanted, Refusal::NoDevice, reason),
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
        self.start_next();
        self.answer_if_known();
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
                            self.start_failed(&start, reason);
                        }
                    }
                }
            }
            Spawned::Failed { ticket, reason } => {
                if let Some(start) = self.pool.starts.finish(ticket) {
                    self.start_failed(&start, reason);
                }
            }
            Spawned::Ended {
                ticket,
                ending,
                out_of_memory,
            } => match self.worker_with(ticket) {
                Some(id) => self.worker_ended(ops, id, ending, out_of_memory),
                None => self.fork_ended(ops, ticket, (ending, out_of_memory)),
            },
            Spawned::Forked { ticket, pid } => {
                let mut descriptors = heard.descriptors.into_iter();
                let ends = (descriptors.next(), descriptors.next());
                self.forked(ops, ticket, pid, ends);
            }
            Spawned::NotForked { ticket, reason } => self.not_forked(ticket, &reason),
            Spawned::Removed { tenant } => self.tenant_removed(ops, tenant),
            Spawned::Assigned { ticket } => self.assigned(ops, ticket),
            Spawned::NotAssigned { ticket, reason } => self.not_assigned(ticket, &reason),
            // Sent once, before all other reports.
            Spawned::Ready { .. } | Spawned::Unfit(_) => {}
        }
    }

    /// Gives a worker that is in its tenant's cgroup to the tenant's process, if it is ready.
    fn assigned(&mut self, ops: &mut EventOps<'_>, ticket: u64) {
        if let Some(id) = self.worker_with(ticket)
            && let Some(worker) = self.workers.get_mut(&id)
        {
            worker.is_placed = true;
            if worker.state == WorkerState::Ready {
                self.give_worker(ops, id);
            }
        }
    }

    fn worker_with(&self, ticket: u64) -> Option<Id> {
        let mut workers = self.workers.iter();
        let found = workers.find(|(_, worker)| worker.process.ticket() == ticket);
        found.map(|(id, _)| *id)
    }

    /// Logs why a worker is killed. A tenant whose memory is used up can cause such a line with each session.
    fn not_assigned(&mut self, ticket: u64, reason: &str) {
        let worker = self.worker_with(ticket);
        if let Some(worker) = worker.and_then(|id| self.workers.get(&id))
            && let Some((tenant, _)) = worker.session
        {
            let pid = worker.process.pid();
            let line = format!("worker {pid} is killed, since it has no cgroup: {reason}");
            self.pass_on_error(self.owner(tenant), &line);
        }
    }

    /// Handles the end of the spawner, with which the kernel has killed all processes that it
    /// started. Without it no session can be served.
    fn spawner_lost(&mut self, ops: &mut EventOps<'_>, error: SpawnerError) {
        connection::forget(ops, self.pool.starts.spawner());
        let reason = error.to_string();
        self.lost = Some(error);
        for start in self.pool.starts.abandon() {
            self.start_failed(&start, reason.clone());
        }
        self.lose_processes(ops, &reason);
        let workers: Vec<Id> = self.workers.keys().copied().collect();
        for id in workers {
            self.worker_ended(ops, id, Ending::Signalled(libc::SIGKILL), false);
        }
        self.stop(ops, "no worker can be started any more");
    }

    /// Reports to waiting tenants whether the devices work. Waits with a failure while another worker is starting.
    pub(super) fn answer_if_known(&mut self) {
        // The work of who waits must not show in what other tenants' workers say.
        if self.is_telling() {
            return;
        }
        if self.pool.device_works {
            return self.publish_devices(&self.devices());
        }
        let starting = self.workers.values().any(|worker| !worker.is_settled());
        if !starting
            && self.pool.starts.is_empty()
            && let Some(reason) = self.pool.failure()
        {
            self.publish_devices(&Order::Device(Err(reason.to_owned())));
        }
    }

    /// Returns the facts on the devices, which work.
    pub(super) fn devices(&self) -> Order {
        Order::Device(Ok(self.pool.devices.clone()))
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
        let sources = (Source::WorkerStream(id), Source::WorkerLog(id));
        let (peer, tokens) = match self.sources.watch_worker(ops, socket, &log, sources) {
            Ok(watched) => watched,
            Err(error) => {
                process.kill();
                return self.start_failed(&start, format!("the event loop: {error}"));
            }
        };
        let pid = process.pid();
        if let Ok(device) = &self.pool.device {
            let hash = start.hash;
            tracing::debug!("worker {pid} starts on {device} for protocol {hash:016x}");
        }
        let waits = start.session.map(|wanted| is_wanted(&self.tenants, wanted));
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
                ends: Some((peer, log)),
                tokens,
                hash: start.hash,
                cause: (start.user, start.account),
                environment: start.environment,
                is_owed: false,
                is_placed: false,
                state: WorkerState::Starting(end),
                since: Instant::now(),
                session: start.session,
                refusal: None,
            },
        );
        if let (Some(wanted), Some(true)) = (start.session, waits) {
            self.bind_worker(id, wanted);
        }
    }

    /// Counts a worker among a tenant's, and has it moved into the tenant's cgroup once it is ready: the tenant's other
    /// workers, with which it would share processors there, must not hold up a start, for which the user's other tenants wait.
    fn bind_worker(&mut self, id: Id, wanted: Wanted) {
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.session = Some(wanted);
            if worker.state == WorkerState::Ready {
                worker.process.assign(wanted.0);
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
            self.start_next();
            self.answer_if_known();
        }
    }

    /// Assigns a session a spare worker with the same protocol and environment, or requests one.
    pub(super) fn find_worker(&mut self, wanted: Start) {
        let Some(session) = wanted.session else {
            return;
        };
        let now = Instant::now();
        if wanted.environment.is_empty() {
            let together = (1 + self.begun_together(wanted.hash)).min(SPARES_ALONE);
            let demand = self.pool.demand.entry(wanted.hash).or_default();
            demand.note(now, together);
        }
        let quiet = now + self.pool.start_took.min(LONGEST_QUIET);
        self.pool.quiet_until = Some(quiet);
        self.set_deadline(quiet);
        // A tenant that is alone takes whichever is there.
        let takes = self.is_alone() || !wanted.user.is_some_and(|user| self.is_preparing_for(user));
        let tenants = &self.tenants;
        let is_of_another = |account: Option<Id>| {
            let owner = account.and_then(|account| tenants.get(&account));
            owner.is_some_and(|owner| owner.has_window)
        };
        let is_left =
            |account: Option<Id>| account == wanted.account || (takes && !is_of_another(account));
        let find = |matches: &dyn Fn(&Worker) -> bool| {
            let spares = self.workers.iter().filter(|(_, worker)| {
                worker.session.is_none()
                    && worker.refusal.is_none()
                    && worker.state != WorkerState::Surplus
                    // Its stream has not ended.
                    && worker.tokens[0] != 0
                    && worker.hash == wanted.hash
                    && worker.environment == wanted.environment
                    && matches(worker)
            });
            let first = spares.min_by_key(|(_, worker)| {
                let is_foreign = worker.cause.1 != wanted.account;
                (!worker.is_settled(), is_foreign, worker.since)
            });
            first.map(|(id, _)| *id)
        };
        let mut spare = find(&|worker| is_left(worker.cause.1));
        if spare.is_none() && self.pool.starts.claim(&wanted, is_left) {
            return self.start_next();
        }
        if takes {
            // Of those of others the one that its tenant has not needed for the longest time.
            spare = spare.or_else(|| find(&|worker| worker.state == WorkerState::Ready));
        }
        let Some(spare) = spare else {
            self.pool.starts.add(wanted);
            return self.start_next();
        };
        self.bind_worker(spare, session);
        if let Some(worker) = self.workers.get_mut(&spare) {
            worker.cause = (wanted.user, wanted.account);
            worker.is_owed = true;
        }
    }

    /// Gives a ready worker to its tenant's process, once it is in the tenant's cgroup.
    fn give_worker(&mut self, ops: &mut EventOps<'_>, id: Id) {
        let Some(worker) = self.workers.get_mut(&id).filter(|one| one.is_placed) else {
            return;
        };
        let Some((tenant, session)) = worker.session else {
            return;
        };
        let Some((mut peer, log)) = worker.ends.take() else {
            return;
        };
        worker.enter(WorkerState::Given);
        let awaited = worker.awaited_until();
        peer.forget(ops);
        connection::forget(ops, log.socket());
        for token in std::mem::take(&mut worker.tokens) {
            self.sources.remove(token);
        }
        let (ticket, pid) = (worker.process.ticket(), worker.process.pid());
        if let Some(end) = awaited {
            self.set_deadline(end);
        }
        let order = Order::Worker {
            session,
            ticket,
            pid,
        };
        // It has met no guest, so it has sent no descriptors of others.
        let (stream, _) = peer.into_parts();
        let log = log.finish(pid, &mut self.pool.log);
        // The host's NVML may not include its process yet.
        self.figures = None;
        let tenant = self.tenants.get_mut(&tenant);
        match tenant.and_then(TenantProcess::end) {
            Some(end) => end.give(&order, vec![stream, log]),
            None => {
                if let Some(worker) = self.workers.get(&id) {
                    worker.process.kill();
                }
            }
        }
    }

    /// Tells a tenant's process that there is no worker for a session.
    pub(super) fn refuse_worker(&mut self, wanted: Wanted, refusal: Refusal, reason: String) {
        let (tenant, session) = wanted;
        if is_wanted(&self.tenants, wanted)
            && let Some(tenant) = self.tenants.get_mut(&tenant)
        {
            tenant.order(&Order::NoWorker {
                session,
                refusal,
                reason,
            });
        }
    }

    /// Kills the worker of a session which is over.
    pub(super) fn end_worker_of(&mut self, wanted: Wanted) {
        let workers = self.workers.values();
        for worker in workers.filter(|worker| worker.session == Some(wanted)) {
            worker.process.kill();
        }
        // Its first work needs no quiet any more.
        self.pool.quiet_until = None;
        self.keep_spares();
        self.start_next();
    }

    pub(super) fn worker_event(&mut self, ops: &mut EventOps<'_>, id: Id) {
        let Err(reason) = self.serve_worker(ops, id) else {
            return;
        };
        let Some(worker) = self.workers.get_mut(&id) else {
            return;
        };
        if let Some(reason) = reason {
            let pid = worker.process.pid();
            tracing::warn!("worker {pid} is killed: it broke the protocol: {reason}");
        }
        // The spawner reports its end; the stream would only report the same event again.
        worker.process.kill();
        if let Some((peer, _)) = &mut worker.ends {
            peer.forget(ops);
        }
        let token = std::mem::take(&mut worker.tokens[0]);
        self.sources.remove(token);
    }

    /// Reads the messages of a worker that has met no guest. Returns `Err(None)` if the stream
    /// ended.
    fn serve_worker(&mut self, ops: &mut EventOps<'_>, id: Id) -> Result<(), Option<String>> {
        let failed = |error: ChannelError| match error {
            ChannelError::Ended => None,
            error => Some(wormhole_link::chain(&error)),
        };
        let Some(worker) = self.workers.get_mut(&id) else {
            return Ok(());
        };
        let Some((peer, _)) = &mut worker.ends else {
            return Ok(());
        };
        peer.fill(ops, true, EventSet::empty()).map_err(failed)?;
        let mut is_ready = false;
        while let Some(message) = peer.incoming.take().map_err(failed)? {
            match (worker.state, message) {
                // The worker has been killed.
                (WorkerState::Late(_) | WorkerState::Stuck | WorkerState::Surplus, _) => {}
                (
                    WorkerState::Starting(_),
                    Message::Ready {
                        protocol_hash,
                        device,
                    },
                ) => {
                    if protocol_hash != worker.hash {
                        return Err(Some(format!(
                            "it speaks protocol {protocol_hash:016x}, its executable said {:016x}",
                            worker.hash
                        )));
                    }
                    let name = facts::get(device, facts::NAME).unwrap_or(device);
                    let name: String = name.chars().take(200).collect();
                    tracing::debug!("worker {} is ready on {name:?}", worker.process.pid());
                    // It has not served a guest yet, so its description is trustworthy.
                    device.clone_into(&mut self.pool.devices);
                    self.pool.start_took = worker.since.elapsed();
                    (worker.state, worker.since) = (WorkerState::Ready, Instant::now());
                    if let Some((tenant, _)) = worker.session {
                        worker.process.assign(tenant);
                    }
                    is_ready = true;
                }
                (WorkerState::Starting(_), Message::Refused { reason, .. }) => {
                    worker.refusal = Some(reason.chars().take(1000).collect());
                }
                (_, Message::Ready { .. } | Message::Refused { .. } | Message::Assigned) => {
                    return Err(Some("it sent a message out of turn".to_owned()));
                }
                (_, other) => {
                    let name = other.name();
                    return Err(Some(format!("it sent {name}, which workers do not send")));
                }
            }
        }
        if is_ready {
            self.pool.device_works = true;
            self.answer_if_known();
            self.give_worker(ops, id);
            self.start_next();
            self.adjust_spares(Instant::now());
        }
        Ok(())
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
        let _ = self.serve_worker(ops, id);
        // The worker may have left the log's other end open in another process, so the end of the
        // log may never come.
        for _ in 0..LAST_PORTIONS {
            if self.read_log(id) != Portion::Data {
                break;
            }
        }
        let Some(mut worker) = self.workers.remove(&id) else {
            return;
        };
        if let Some((peer, log)) = &mut worker.ends {
            peer.forget(ops);
            if worker.tokens[1] != 0 {
                connection::forget(ops, log.socket());
            }
        }
        for token in worker.tokens {
            self.sources.remove(token);
        }
        let (ticket, pid) = (worker.process.ticket(), worker.process.pid());
        let why = match (worker.refusal, ending) {
            (Some(reason), _) => reason,
            (None, _) if out_of_memory => {
                format!("worker {pid} wanted more memory than workers may have")
            }
            (None, ending) => format!("worker {pid} {ending}"),
        };
        match worker.session {
            Some(wanted) => {
                if worker.state == WorkerState::Given {
                    let order = Order::Ended {
                        ticket,
                        ending,
                        out_of_memory,
                    };
                    self.worker_of_tenant_ended(wanted.0, &order);
                } else {
                    self.refuse_worker(wanted, Refusal::NoDevice, why);
                    self.forget_tenant(wanted.0);
                }
                // A spare that a session took is replaced at `Taken`, which its tenant may not have
                // sent.
                if self.lost.is_none() {
                    self.replace_spares(Some(wanted.0));
                }
            }
            None if worker.state == WorkerState::Surplus => {}
            None => self.worker_failed(worker.hash, why),
        }
        self.start_next();
        self.answer_if_known();
    }

    pub(super) fn worker_log(&mut self, ops: &mut EventOps<'_>, id: Id) {
        if matches!(self.read_log(id), Portion::Data | Portion::Empty) {
            return;
        }
        if let Some(worker) = self.workers.get_mut(&id)
            && let Some((_, log)) = &worker.ends
        {
            connection::forget(ops, log.socket());
            let token = std::mem::take(&mut worker.tokens[1]);
            self.sources.remove(token);
        }
    }

    /// Passes on one portion of a worker's log. All workers without a session share one budget.
    fn read_log(&mut self, id: Id) -> Portion {
        let Some(worker) = self.workers.get_mut(&id) else {
            return Portion::Closed;
        };
        let pid = worker.process.pid();
        let log = worker.ends.as_mut().map(|(_, log)| log);
        log.map_or(Portion::Closed, |log| log.read(pid, &mut self.pool.log))
    }
}

/// Returns whether a session waits for its worker, or has it.
fn is_wanted(tenants: &BTreeMap<Id, TenantProcess>, (tenant, session): Wanted) -> bool {
    let tenant = tenants.get(&tenant);
    tenant.is_some_and(|tenant| tenant.sessions.contains(&session))
}
