//! The tenants' processes: which one serves which connection, and what each may ask for.
//!
//! The supervisor never reads a tenant's stream, sends on it or closes its last copy. It accepts a
//! connection, checks the user, and gives the connection to a process that was forked before. A
//! process is one tenant's, and ends with it. It asks for workers and scrubbers, and for nothing of
//! another tenant; one that asks for more is killed.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use event_manager::EventOps;
use wormhole_link::users::peer_of;
use wormhole_ring::control::Refusal;

use super::environment;
use super::observers::FRESH;
use super::pair::{self, End, Lost, Order, Report, Service};
use super::process_logs::Owner;
use super::sampler::{Sample, Sampler};
use super::spawn_queue::Start;
use super::spawner::Process;
use super::usage::LastUsage;
use super::{Id, Source, Supervisor};

/// Number of reports read from a process in a turn.
const TURN: usize = 16;
/// Largest number of a tenant's scrubbers at a time.
const SCRUBBERS: usize = 4;
/// Time within which a tenant's process tells its workers of the first neighbour. The launcher of that neighbour waits for it.
const TELLS_WITHIN: Duration = Duration::from_secs(10);
/// Lines that a connection may cause in the log before it has a window.
pub(super) const LINES: u32 = 2;

/// Connection that waits for a process.
#[derive(Debug)]
pub(super) struct Waiting {
    pub user: u32,
    stream: OwnedFd,
    /// Whether it has to attach in time.
    attaches: bool,
    /// Lines that it may log without a window.
    lines: u32,
}

/// A tenant, from the process that serves it until all of its processes have ended and their memory is free.
#[derive(Debug)]
pub(super) struct TenantProcess {
    pub user: u32,
    /// Process that connected, 0 if it is unknown.
    pub launcher: i32,
    pub state: State,
    /// Sessions that have begun and are not over.
    pub sessions: BTreeSet<Id>,
    pub has_window: bool,
    /// Whether it has asked for the usage of tenants.
    pub is_client: bool,
    pub last_usage: LastUsage,
    /// Whether it has had a window, and its workers may still use the devices.
    is_neighbour: bool,
    /// Number of orders about neighbours that its process has not answered.
    untold: u32,
    /// Time by which it must have answered, since its workers may act as if there were no neighbours.
    tells_by: Option<Instant>,
    /// Whether its launcher waits to hear whether the devices work.
    pub awaits_device: bool,
    wants_figures: bool,
    /// Scrubbers of the tenant by ticket, with their process numbers once known.
    pub scrubbers: BTreeMap<u64, Option<i32>>,
}

/// State of the process that serves a tenant.
#[derive(Debug)]
pub(super) enum State {
    Serving(Link),
    /// The process has closed its end of the pair, and has not ended.
    Leaving,
    /// The process was killed for a reason that was logged, and has not ended.
    Killed,
    Ended,
    /// All of its processes have ended, and something may still hold memory of theirs.
    Left,
}

/// Way to a process that serves a tenant.
#[derive(Debug)]
pub(super) struct Link {
    /// The process; none for this one.
    process: Option<Process>,
    /// The supervisor's end of the pair.
    end: End,
    token: u32,
}

impl TenantProcess {
    fn new(user: u32, launcher: i32, link: Link) -> Self {
        Self {
            user,
            launcher,
            state: State::Serving(link),
            sessions: BTreeSet::new(),
            has_window: false,
            is_client: false,
            last_usage: LastUsage::default(),
            is_neighbour: false,
            untold: 0,
            tells_by: None,
            awaits_device: false,
            wants_figures: false,
            scrubbers: BTreeMap::new(),
        }
    }

    /// Returns the end of the pair, while the process serves the tenant.
    pub fn end(&mut self) -> Option<&mut End> {
        match &mut self.state {
            State::Serving(link) => Some(&mut link.end),
            State::Leaving | State::Killed | State::Ended | State::Left => None,
        }
    }

    /// Orders the process to tell its workers whether there are neighbours, while it serves the tenant.
    fn tell_of_neighbours(&mut self, has_neighbours: bool) {
        self.order(&Order::Neighbours(has_neighbours));
        self.untold = self.untold.saturating_add(1);
        // Without a window it has no workers.
        let tells_by = (has_neighbours && self.has_window).then(|| Instant::now() + TELLS_WITHIN);
        self.tells_by = tells_by;
    }

    /// Sends the process an order, while it serves the tenant.
    pub fn order(&mut self, order: &Order) {
        if let Some(end) = self.end() {
            end.order(order);
        }
    }
}

impl Supervisor {
    /// Returns the number of tenants whose process has not ended.
    pub(super) fn served(&self) -> usize {
        let tenants = self.tenants.values();
        let is_over = |tenant: &&TenantProcess| matches!(tenant.state, State::Ended | State::Left);
        tenants.filter(|tenant| !is_over(tenant)).count() + self.waiting.len()
    }

    /// Serves the tenant of a connection, as soon as there is a process for it. `attaches` is whether
    /// it has to attach in time.
    pub(super) fn add_tenant(
        &mut self,
        ops: &mut EventOps<'_>,
        stream: OwnedFd,
        user: u32,
        attaches: bool,
    ) {
        let waiting = Waiting {
            user,
            stream,
            attaches,
            lines: self.acceptor.take_lines(),
        };
        match self.near.take() {
            Some(near) => {
                let id = self.id();
                self.serve(ops, id, waiting, (None, End::new(near)));
            }
            None => {
                self.waiting.push(waiting);
                self.serve_waiting(ops);
            }
        }
    }

    /// Gives a process a connection to serve.
    pub(super) fn serve(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        waiting: Waiting,
        (process, mut end): (Option<Process>, End),
    ) {
        let Waiting {
            user,
            stream,
            attaches,
            lines,
        } = waiting;
        let token = self.sources.add(Source::Tenant(id));
        if let Err(error) = end.register(ops, token) {
            let (owner, reason) = (Owner { tenant: id, user }, error.to_string());
            self.pass_on_error(owner, &format!("it cannot serve: {reason}"));
            self.sources.remove(token);
            process.into_iter().for_each(|process| process.kill());
            let refusal = Refusal::NoDevice;
            return self.refusals.refuse(Some(user), stream, refusal, &reason);
        }
        let service = Service {
            tenant: id,
            attach_limit: attaches.then_some(self.hello_limit),
            hello_limit: self.hello_limit,
            reap_limit: self.reap_limit,
            lines,
            sessions: self.quotas.sessions as u64,
            window: self.quotas.window,
            unread: self.unread_for_each(),
            has_driver: self.sampler.is_some(),
            has_strangers: self.has_strangers,
            hashes: self.pool.hashes.clone(),
        };
        let launcher = peer_of(&stream).map_or(0, |peer| peer.process);
        end.give(&Order::Serve(service), vec![stream]);
        let link = Link {
            process,
            end,
            token,
        };
        let mut tenant = TenantProcess::new(user, launcher, link);
        tenant.tell_of_neighbours(self.history.has_neighbours());
        self.tenants.insert(id, tenant);
    }

    /// Returns the number of descriptors that each tenant may leave unread. The kernel counts those
    /// in flight by user, and the processes of all tenants have the supervisor's.
    fn unread_for_each(&self) -> u64 {
        let users = self
            .acceptor
            .listener
            .as_ref()
            .map_or(1, |listener| listener.users());
        let tenants = match self.acceptor.listener {
            Some(_) => self.quotas.tenants_per_user.saturating_mul(users),
            None => 1,
        };
        self.descriptors.unread_of_one(tenants) as u64
    }

    /// Handles the reports of a tenant's process.
    pub(super) fn tenant_event(&mut self, ops: &mut EventOps<'_>, id: Id) {
        for _ in 0..TURN {
            let Some(end) = self.tenants.get_mut(&id).and_then(TenantProcess::end) else {
                return;
            };
            end.flush();
            let reason = match end.report() {
                Ok(Some(report)) => match self.execute(id, report) {
                    Ok(()) => continue,
                    Err(reason) => reason,
                },
                Ok(None) => return,
                Err(Lost::Ended) => return self.cut_off(ops, id, State::Leaving),
                Err(Lost::Malformed) => "it sent no report",
            };
            self.pass_on_error(self.owner(id), &format!("it is killed: {reason}"));
            return self.cut_off(ops, id, State::Killed);
        }
    }

    /// Executes a report.
    ///
    /// # Errors
    /// The process asked for more than it may have, which it never does by itself.
    fn execute(&mut self, id: Id, report: Report) -> Result<(), &'static str> {
        let queued = self.queue_limit();
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return Ok(());
        };
        if tenant.end().is_some_and(|end| end.queued() > queued) {
            return Err("it leaves too many orders unread");
        }
        match report {
            Report::Attached { lines } => {
                if std::mem::replace(&mut tenant.has_window, true) {
                    return Err("it attaches twice");
                }
                if tenant.is_client {
                    return Err("it attaches and has asked for usage");
                }
                tenant.last_usage = LastUsage::attached();
                tenant.is_neighbour = true;
                tenant.awaits_device = true;
                self.acceptor.give_lines_back(lines.min(LINES));
                self.count_neighbours();
                self.adjust_spares(Instant::now());
                self.answer_if_known();
            }
            Report::Told => {
                let left = tenant.untold.checked_sub(1);
                tenant.untold = left.ok_or("it answers what it was not asked")?;
                if tenant.untold == 0 && tenant.tells_by.take().is_some() {
                    self.answer_if_known();
                }
            }
            Report::Want {
                session,
                hash,
                environment,
            } => {
                if tenant.sessions.len() >= self.quotas.sessions {
                    return Err("it has too many sessions");
                }
                if !tenant.has_window || !self.pool.hashes.contains(&hash) {
                    return Err("it wants a worker that it cannot have");
                }
                // A worker counts until it was reaped, also if the session is over.
                let mut workers = self.workers.values();
                if tenant.sessions.contains(&session)
                    || workers.any(|worker| worker.session == Some((id, session)))
                {
                    return Err("it began a session twice");
                }
                let user = Some(tenant.user);
                let refused = self.too_many_sessions(id);
                if let Some(tenant) = self.tenants.get_mut(&id) {
                    tenant.sessions.insert(session);
                }
                self.history.begins(id);
                if let Some(reason) = refused {
                    self.refuse_worker((id, session), Refusal::Quota, reason);
                    return Ok(());
                }
                if self.stopping {
                    return Ok(());
                }
                let environment = if self.history.has_neighbours() {
                    environment::beside_neighbours(&environment)
                } else if self.has_strangers {
                    environment::with_default_channels(&environment)
                } else {
                    environment::passed_on(&environment)
                };
                let start = Start {
                    hash,
                    environment,
                    session: Some((id, session)),
                    account: Some(id),
                    user,
                };
                self.find_worker(start);
            }
            Report::Taken { session } => {
                if tenant.sessions.contains(&session) {
                    self.spare_taken((id, session));
                }
            }
            Report::Over { session } => {
                tenant.sessions.remove(&session);
                self.end_worker_of((id, session));
            }
            Report::Kill { ticket } => {
                let mut workers = self.workers.values();
                match workers.find(|worker| worker.process.ticket() == ticket) {
                    Some(worker) if worker.is_given_to(id) => worker.process.kill(),
                    Some(_) => return Err("it would kill a worker that is not its own"),
                    // It has been reaped meanwhile.
                    None => {}
                }
            }
            Report::Scrubber => {
                if tenant.scrubbers.len() >= SCRUBBERS {
                    return Err("it has too many scrubbers");
                }
                self.fork_scrubber(id);
            }
            Report::Figures => {
                // Before that it does not count as a neighbour of others, whose work they show.
                if !tenant.has_window {
                    return Err("it wants figures without a window");
                }
                tenant.wants_figures = true;
                self.send_figures();
            }
            Report::AskUsage => self.ask_usage(id)?,
            Report::Usage { usage, is_last } => self.usage_reported(id, *usage, is_last),
        }
        Ok(())
    }

    /// Returns the largest number of orders that a process may leave queued here. A process with as
    /// many sessions as it may have causes fewer before it reports something else: a worker's gift
    /// and end for each session, an answer for each scrubber, and its figures.
    fn queue_limit(&self) -> usize {
        4 * self.quotas.sessions + 64
    }

    /// Kills a tenant's process, and stops serving it. Its workers are killed.
    pub(super) fn cut_off(&mut self, ops: &mut EventOps<'_>, id: Id, state: State) {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        tenant.sessions.clear();
        tenant.awaits_device = false;
        let was_telling = tenant.tells_by.take().is_some();
        let had_window = std::mem::replace(&mut tenant.has_window, false);
        let user = tenant.user;
        if matches!(tenant.state, State::Serving(_))
            && let State::Serving(link) = std::mem::replace(&mut tenant.state, state)
        {
            let is_here = link.process.is_none();
            self.leave(ops, user, link);
            if is_here {
                self.process_ended(ops, id);
            }
        }
        for worker in self.workers.values() {
            if worker.session.is_some_and(|(of, _)| of == id) {
                worker.process.kill();
            }
        }
        self.forget_usage(id);
        if had_window {
            self.end_demand();
        }
        if was_telling {
            self.answer_if_known();
        }
    }

    /// Returns whether workers of a tenant may not know yet that there are neighbours.
    pub(super) fn is_telling(&self) -> bool {
        self.tenants.values().any(|one| one.tells_by.is_some())
    }

    /// Ends the tenants whose processes have not told their workers of a neighbour in time. Returns the next such time.
    pub(super) fn end_untold(&mut self, ops: &mut EventOps<'_>, now: Instant) -> Option<Instant> {
        let late = |one: &TenantProcess| one.tells_by.is_some_and(|by| by <= now);
        let tenants = self.tenants.iter().filter(|(_, one)| late(one));
        let tenants: Vec<Id> = tenants.map(|(id, _)| *id).collect();
        for id in tenants {
            // The report waits where this process stood still itself.
            self.tenant_event(ops, id);
            if self
                .tenants
                .get(&id)
                .is_none_or(|one| one.tells_by.is_none())
            {
                continue;
            }
            let seconds = TELLS_WITHIN.as_secs();
            let line = format!(
                "it is killed: it has not told its workers of other tenants within {seconds} s"
            );
            self.pass_on_error(self.owner(id), &line);
            self.cut_off(ops, id, State::Killed);
        }
        self.tenants.values().filter_map(|one| one.tells_by).min()
    }

    /// Kills a process that served a tenant, and closes the supervisor's end of the pair, unless
    /// the process has sent descriptors, as one that was taken over may: then the end is closed
    /// elsewhere.
    fn leave(&mut self, ops: &mut EventOps<'_>, user: u32, link: Link) {
        self.sources.remove(link.token);
        // The loop in this process has sent none.
        let is_clean = match &link.process {
            Some(process) => {
                process.kill();
                link.end.drain()
            }
            None => true,
        };
        let (socket, unsent) = link.end.into_parts(ops);
        if !is_clean {
            self.refusals.close(Some(user), socket);
        }
        let reason = "the process that was to serve it has ended";
        for (order, descriptors) in unsent {
            // All others are the supervisor's own, or those of workers that have met no guest.
            if let Some(Order::Serve(_)) = Order::decode(&order)
                && let Some(stream) = descriptors.into_iter().next()
            {
                let refusal = Refusal::NoDevice;
                self.refusals.refuse(Some(user), stream, refusal, reason);
            }
        }
    }

    pub(super) fn process_ended(&mut self, ops: &mut EventOps<'_>, id: Id) {
        match self.tenants.get_mut(&id) {
            Some(tenant) => {
                tenant.state = State::Ended;
                self.forget_tenant(id);
            }
            None => self.remove_cgroup(id),
        }
        self.serve_waiting(ops);
    }

    /// Has the cgroup of a process removed that has served no tenant.
    pub(super) fn remove_cgroup(&mut self, id: Id) {
        // Without a spawner there is none.
        let _ = self.pool.starts.spawner().remove_tenant(id);
    }

    /// Passes on the end of a worker that a tenant's process has.
    pub(super) fn worker_of_tenant_ended(&mut self, id: Id, order: &Order) {
        if let Some(tenant) = self.tenants.get_mut(&id) {
            tenant.order(order);
        }
        self.forget_tenant(id);
    }

    /// Removes a tenant if no process serves it any more, as soon as the spawner reports that its memory is free.
    pub(super) fn forget_tenant(&mut self, id: Id) {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        let is_over = matches!(tenant.state, State::Ended) && tenant.scrubbers.is_empty();
        let mut workers = self.workers.values();
        if is_over && !workers.any(|worker| worker.session.is_some_and(|(of, _)| of == id)) {
            tenant.state = State::Left;
            if std::mem::replace(&mut tenant.is_neighbour, false) {
                self.history.leaves(id, Instant::now());
            }
            if !self.pool.starts.spawner().remove_tenant(id) {
                self.tenants.remove(&id);
            }
            self.count_neighbours();
        }
    }

    /// Handles the report that nothing of a tenant is left.
    pub(super) fn tenant_removed(&mut self, ops: &mut EventOps<'_>, id: Id) {
        let tenant = self.tenants.get(&id);
        if tenant.is_some_and(|tenant| matches!(tenant.state, State::Left)) {
            self.tenants.remove(&id);
            self.serve_waiting(ops);
        }
    }

    /// Counts the tenants that use the devices. Their processes publish to the workers whether there is more than one.
    fn count_neighbours(&mut self) {
        let before = self.history.has_neighbours();
        let attached = self.tenants.values().filter(|one| one.is_neighbour);
        self.history.set(attached.count());
        let has_neighbours = self.history.has_neighbours();
        if has_neighbours != before {
            let tenants = self.tenants.values_mut();
            tenants.for_each(|one| one.tell_of_neighbours(has_neighbours));
            self.answer_if_known();
        }
    }

    /// Sends the tenants that wait for it the facts on the devices, or the reason why there is none.
    pub(super) fn publish_devices(&mut self, devices: &Order) {
        let tenants = self.tenants.values_mut();
        for tenant in tenants.filter(|tenant| tenant.awaits_device) {
            tenant.awaits_device = false;
            tenant.order(devices);
        }
    }

    /// Orders all tenants' processes to end their sessions. Refuses connections that no process has.
    pub(super) fn stop_tenants(&mut self, why: &str) {
        for tenant in self.tenants.values_mut() {
            tenant.order(&Order::Stop(why.to_owned()));
        }
        let reason = format!("the supervisor ended: {why}");
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let waiting = waiting.map(|one| (one.user, one.stream));
        for (user, stream) in waiting.chain(self.acceptor.take_postponed()) {
            let refusal = Refusal::NoDevice;
            self.refusals.refuse(Some(user), stream, refusal, &reason);
        }
        self.forks.idle.clear();
    }

    /// Orders all tenants' processes to log their pending waits.
    pub(super) fn dump_tenants(&mut self) {
        for tenant in self.tenants.values_mut() {
            tenant.order(&Order::Dump);
        }
    }

    /// Stores the answer of the host's NVML.
    pub(super) fn device_sampled(&mut self) {
        if let Some(samples) = self.sampler.as_mut().and_then(Sampler::finished) {
            self.figures = Some((Instant::now(), samples));
            self.send_figures();
        }
    }

    /// Sends the figures of the host's NVML to the tenants that want them, or asks for new ones.
    fn send_figures(&mut self) {
        if !self.tenants.values().any(|tenant| tenant.wants_figures) {
            return;
        }
        self.figures.take_if(|(at, _)| at.elapsed() >= FRESH);
        let devices = super::observers::devices(&self.pool.devices);
        if self.figures.is_none()
            && let Some(sampler) = &mut self.sampler
            && sampler.order(&devices)
        {
            return;
        }
        let samples = self
            .figures
            .as_ref()
            .map_or(&[][..], |(_, samples)| samples);
        let now = Instant::now();
        let wanting = self.tenants.iter_mut().filter(|(_, one)| one.wants_figures);
        for (id, tenant) in wanting {
            tenant.wants_figures = false;
            let workers = self.workers.values().filter(|one| one.is_given_to(*id));
            let own: BTreeSet<i32> = workers.map(|worker| worker.process.pid()).collect();
            let visible = self.history.visible(*id, now);
            let visible: Vec<Sample> = samples
                .iter()
                .map(|sample| sample.for_tenant(visible, &own))
                .collect();
            for order in pair::figures(&visible) {
                tenant.order(&order);
            }
        }
    }

    /// Makes the event loop report room for queued orders.
    pub(super) fn watch_tenants(&mut self, ops: &mut EventOps<'_>) {
        for tenant in self.tenants.values_mut() {
            if let State::Serving(link) = &mut tenant.state {
                link.end.watch(ops, link.token);
            }
        }
    }

    /// Returns the time at which queued orders are sent again, if any.
    pub(super) fn send_again(&mut self) -> Option<Instant> {
        let ends = self.tenants.values_mut().filter_map(TenantProcess::end);
        ends.filter_map(|end| {
            end.flush();
            end.deadline()
        })
        .min()
    }
}
