//! Event loop for one tenant: reads the streams of its launcher, its guests and its workers.
//!
//! Each tenant that connects has a process of its own for this loop, because any holder of the far end of a
//! stream can delay its reader: the kernel visits every watch on that end for each buffer that a
//! read frees. Such a process has no privileges and belongs into its tenant's cgroup, so a delay
//! costs the tenant's own processors. It gets workers, scrubbers and the figures of the host's NVML
//! from the supervisor, over a [`pair`](super::pair) of sockets.
//!
//! A supervisor of a single tenant runs this loop beside its own, in one process.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use wormhole_link::channel::MAX_RECEIVED;
use wormhole_link::neighbours::NeighboursFile;
use wormhole_sandbox::Ending;

use super::assigned::Worker;
use super::connection::{self, Connection};
use super::descriptors::Descriptors;
use super::dump::LastDump;
use super::guests::Guest;
use super::observers::Observers;
use super::pair::{self, Lost, Order, Service};
use super::scrubber::{Completion, Scrubber};
use super::sessions::Session;
use super::sharing::Shares;
use super::sources::Sources;
use super::static_window::Returning;
use super::tenants::Tenant;
use super::{Id, listener, privileges};

/// Time until a refused message is sent again.
const AGAIN: Duration = Duration::from_millis(100);

/// Owner of a descriptor in the event loop.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    Supervisor,
    Scrubber,
    Tenant(Id),
    Guest(Id),
    WorkerStream(Id),
    WorkerLog(Id),
}

/// State of the loop.
#[derive(Debug)]
pub struct TenantLoop {
    pub(super) supervisor: pair::SupervisorLink,
    supervisor_token: u32,
    /// Order whose descriptors the supervisor may still hold.
    held: Option<(Order, Vec<OwnedFd>)>,
    /// Limits and facts; none until there is a tenant.
    pub(super) service: Option<Service>,
    /// File in which the tenant's workers read whether there are neighbours; none until there is a tenant.
    pub(super) neighbours: Option<NeighboursFile>,
    pub(super) descriptors: Descriptors,
    pub(super) sources: Sources<Source>,
    next_id: Id,
    pub(super) tenants: BTreeMap<Id, Tenant>,
    pub(super) guests: BTreeMap<Id, Guest>,
    pub(super) sessions: BTreeMap<Id, Session>,
    /// Segments of static windows, by their session, while they are being scrubbed.
    pub(super) returning: BTreeMap<Id, Returning>,
    pub(super) workers: BTreeMap<Id, Worker>,
    pub(super) shares: Shares,
    /// Facts on each device, or the reason why no worker has one; none until either is known.
    pub(super) devices: Option<Result<Vec<String>, String>>,
    pub(super) scrubber: Scrubber,
    pub(super) observers: Observers,
    /// Tokens of streams that are not read while descriptors are waiting to be closed.
    waiting: BTreeSet<u32>,
    pub(super) last_dump: LastDump,
    pub(super) stopping: bool,
    /// Whether the supervisor has closed its end, or its spawner and with it all workers is gone.
    is_cut: bool,
    pub(super) lost: bool,
    /// Deadline for ending although sessions are not closed.
    ends_by: Option<Instant>,
    /// Time of the next check for late guests and launchers.
    next_deadline: Option<Instant>,
}

/// Serves a tenant that the supervisor at the other end of `socket` names, without privileges.
/// Returns the process's exit status.
pub fn main(socket: OwnedFd) -> i32 {
    let descriptors = match Descriptors::claim() {
        Ok(descriptors) => descriptors,
        Err(error) => {
            tracing::error!("a tenant's process: {error}");
            return 2;
        }
    };
    let confined = privileges::drop_capabilities().is_ok() && privileges::filter(false).is_ok();
    if !confined {
        return 2;
    }
    match serve(socket, descriptors) {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!("a tenant's process: {error}");
            1
        }
    }
}

fn serve(socket: OwnedFd, descriptors: Descriptors) -> Result<(), event_manager::Error> {
    let served = Rc::new(RefCell::new(TenantLoop::new(socket, descriptors)));
    let mut manager = EventManager::new()?;
    let id = manager.add_subscriber(Rc::clone(&served));
    while !served.borrow().is_done() {
        let ops = &mut manager.event_ops(id)?;
        let milliseconds = served.borrow_mut().meet_deadlines(ops);
        manager.run_with_timeout(milliseconds)?;
    }
    served.borrow().tell_of_the_rest();
    // The exit closes all descriptors, and does not wait for lingering sockets.
    std::mem::forget(served);
    Ok(())
}

impl TenantLoop {
    pub fn new(socket: OwnedFd, descriptors: Descriptors) -> Self {
        let supervisor = pair::SupervisorLink::new(socket);
        Self {
            scrubber: Scrubber::new(supervisor.clone()),
            supervisor,
            supervisor_token: 0,
            held: None,
            service: None,
            neighbours: None,
            descriptors,
            sources: Sources::default(),
            next_id: 0,
            tenants: BTreeMap::new(),
            guests: BTreeMap::new(),
            sessions: BTreeMap::new(),
            returning: BTreeMap::new(),
            workers: BTreeMap::new(),
            shares: Shares::default(),
            devices: None,
            observers: Observers::default(),
            waiting: BTreeSet::new(),
            last_dump: LastDump::default(),
            stopping: false,
            is_cut: false,
            lost: false,
            ends_by: None,
            next_deadline: None,
        }
    }

    fn is_ending(&self) -> bool {
        self.stopping || (self.service.is_some() && self.tenants.is_empty())
    }

    /// Returns whether the tenant is gone with all of its sessions, or the loop waits no longer.
    pub fn is_done(&self) -> bool {
        let idle = self.tenants.is_empty() && self.sessions.is_empty();
        let late = self.ends_by.is_some_and(|end| end <= Instant::now());
        self.is_cut || (self.is_ending() && (idle || late))
    }

    /// Shows the supervisor that the loop is done.
    pub fn leave(&self) {
        self.supervisor.leave();
    }

    /// Logs the sessions and workers that this loop does not wait for any longer.
    pub fn tell_of_the_rest(&self) {
        let Some(service) = self.service.as_ref().filter(|_| !self.sessions.is_empty()) else {
            return;
        };
        let processes = self
            .workers
            .values()
            .map(|worker| worker.process.pid().to_string());
        tracing::error!(
            "the supervisor ends, although {} sessions were not closed within {:?}; these workers were killed and \
             have not ended: {}",
            self.sessions.len(),
            service.reap_limit,
            processes.collect::<Vec<_>>().join(", ")
        );
    }

    /// Makes [`meet_deadlines`](Self::meet_deadlines) check at `end` at the latest.
    pub(super) fn set_deadline(&mut self, end: Instant) {
        self.next_deadline = Some(self.next_deadline.map_or(end, |next| next.min(end)));
    }

    /// Ends streams that are late; their end is reported like any other. Returns the milliseconds
    /// until the next deadline, -1 for none.
    pub fn meet_deadlines(&mut self, ops: &mut EventOps<'_>) -> i32 {
        let now = Instant::now();
        self.scrubber.try_again(now);
        self.supervisor.end().flush();
        let is_delayed = self.flush_delayed(ops);
        if self.is_ending()
            && let Some(service) = &self.service
        {
            self.ends_by.get_or_insert(now + service.reap_limit);
        }
        if self.next_deadline.is_some_and(|next| next <= now) {
            self.end_late_guests(now);
            self.end_late_tenants(now);
            let guests = self.guests.values().filter_map(Guest::deadline);
            let tenants = self.tenants.values().filter_map(Tenant::deadline);
            self.next_deadline = guests.chain(tenants).min();
        }
        let next = self
            .next_deadline
            .into_iter()
            .chain(self.ends_by)
            .chain(self.scrubber.deadline())
            .chain(self.supervisor.end().deadline())
            .chain(is_delayed.then_some(now + AGAIN));
        super::milliseconds_until(next.min(), now)
    }

    /// Sends messages again that were refused because of descriptors in flight. Returns whether some
    /// are left.
    fn flush_delayed(&mut self, ops: &mut EventOps<'_>) -> bool {
        let mut is_delayed = false;
        for peer in self.peers().filter(|peer| peer.is_delayed()) {
            if peer.flush(ops).is_err() {
                // Its end is reported.
                peer.shut_down();
            }
            is_delayed |= peer.is_delayed();
        }
        is_delayed
    }

    /// Returns an unused number.
    pub(super) fn id(&mut self) -> Id {
        loop {
            self.next_id = self.next_id.wrapping_add(1);
            let id = self.next_id;
            let used = self.tenants.contains_key(&id)
                || self.guests.contains_key(&id)
                || self.sessions.contains_key(&id)
                // The scrubber of its segments reports the end by this number.
                || self.returning.contains_key(&id)
                || self.workers.contains_key(&id);
            if !used {
                return id;
            }
        }
    }

    /// Executes the supervisor's orders.
    fn take_orders(&mut self, ops: &mut EventOps<'_>) {
        loop {
            match self.supervisor.next() {
                Ok(Some((Order::Released, _))) => {
                    if let Some((order, descriptors)) = self.held.take() {
                        self.execute(ops, order, descriptors);
                    }
                }
                Ok(Some((order, descriptors))) if descriptors.is_empty() => {
                    self.execute(ops, order, descriptors);
                }
                Ok(Some(given)) => self.held = Some(given),
                Ok(None) => return,
                Err(Lost::Ended | Lost::Malformed) => {
                    self.is_cut = true;
                    return connection::forget(ops, &*self.supervisor.end());
                }
            }
        }
    }

    fn execute(&mut self, ops: &mut EventOps<'_>, order: Order, descriptors: Vec<OwnedFd>) {
        match order {
            Order::Serve(service) => self.begin(ops, service, descriptors),
            Order::Released => {}
            Order::Device(devices) => self.device_known(ops, devices),
            Order::Worker {
                session,
                ticket,
                pid,
            } => self.add_worker(ops, session, (ticket, pid), descriptors),
            Order::NoWorker {
                session,
                refusal,
                reason,
            } => self.no_worker(ops, session, refusal, &reason),
            Order::Ended {
                ticket,
                ending,
                out_of_memory,
            } => self.worker_reaped(ops, ticket, ending, out_of_memory),
            Order::Scrubber { pid } => match descriptors.into_iter().next() {
                Some(socket) => self.add_scrubber(ops, pid, socket),
                None => {
                    self.scrubber.failed("no descriptor is left for its socket");
                    self.hear_scrubber(ops);
                }
            },
            Order::NoScrubber(reason) => {
                self.scrubber.failed(&reason);
                self.hear_scrubber(ops);
            }
            Order::ScrubberEnded { pid } => self.scrubber_ended(ops, pid),
            Order::Neighbours(some) => {
                self.neighbours.iter().for_each(|file| file.set(some));
                self.supervisor.report(&pair::Report::Told);
            }
            Order::Figures { is_last, part } => self.figures(ops, is_last, &part),
            Order::CountUsage => self.count_usage(ops),
            Order::Usage { is_last, part } => self.usage_answered(ops, is_last, &part),
            Order::Dump => self.dump(ops),
            Order::Stop(why) => self.stop(ops, &why),
            Order::Lost(reason) => {
                self.lost = true;
                // Scrubbers cannot be started either.
                self.scrubber.failed(&reason);
                self.hear_scrubber(ops);
            }
        }
    }

    fn begin(&mut self, ops: &mut EventOps<'_>, service: Service, descriptors: Vec<OwnedFd>) {
        let Ok([stream]) = <[OwnedFd; 1]>::try_from(descriptors) else {
            tracing::error!("no descriptor is left for a tenant's stream");
            self.is_cut = true;
            return;
        };
        let neighbours = match NeighboursFile::create() {
            Ok(file) => file,
            Err(error) => {
                tracing::error!("the word on neighbours cannot be shared with workers: {error}");
                self.is_cut = true;
                return;
            }
        };
        let attach_end = service.attach_limit.map(|limit| Instant::now() + limit);
        attach_end
            .into_iter()
            .for_each(|end| self.set_deadline(end));
        let (id, lines) = (service.tenant, service.lines);
        self.neighbours = Some(neighbours);
        self.service = Some(service);
        self.add_tenant(ops, id, stream, (attach_end, lines));
    }

    /// Stores whether the devices work, and answers launchers and observers that wait for it.
    fn device_known(&mut self, ops: &mut EventOps<'_>, devices: Result<String, String>) {
        self.devices = Some(devices.map(|text| super::observers::devices(&text)));
        self.answer_attached(ops);
    }

    fn worker_reaped(
        &mut self,
        ops: &mut EventOps<'_>,
        ticket: u64,
        ending: Ending,
        out_of_memory: bool,
    ) {
        let mut workers = self.workers.iter();
        let ended = workers.find(|(_, worker)| worker.process.ticket() == ticket);
        if let Some(id) = ended.map(|(id, _)| *id) {
            self.worker_ended(ops, id, ending, out_of_memory);
        }
    }

    /// Registers the socket of a new scrubber.
    fn add_scrubber(&mut self, ops: &mut EventOps<'_>, pid: i32, socket: OwnedFd) {
        match self.sources.watch(ops, &socket, Source::Scrubber) {
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
            tracing::error!("a process that gives memory back has ended");
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
        for (completion, result) in self.scrubber.finished() {
            match completion {
                Completion::Scrubbed { session, run } => self.run_scrubbed(session, run, result),
                Completion::Forgotten { session, request } => self.unshared(ops, session, request),
                Completion::RecordsCompleted { token, parties } => {
                    self.shares.records_completed(token, parties)
                }
                Completion::Attached { tenant } => self.window_written(ops, tenant, result),
                Completion::Status { session } => self.status_written(ops, session, result),
                Completion::Ended { session } => self.static_scrubbed(session, result),
            }
        }
        self.read_again(ops);
        while let Some(token) = self.scrubber.surplus() {
            self.remove_scrubber(ops, token);
        }
    }

    fn remove_scrubber(&mut self, ops: &mut EventOps<'_>, token: u32) {
        self.sources.remove(token);
        if let Some(socket) = self.scrubber.remove(token) {
            connection::forget(ops, &socket);
        }
    }

    /// Returns whether a stream of a tenant may be read, with all descriptors that may arrive: none
    /// of those received before waits to be passed on, or there is room. Otherwise the stream waits
    /// for that.
    pub(super) fn may_read(&mut self, tenant: Id, token: u32) -> bool {
        let may = !self.scrubber.is_behind(tenant) || self.may_hold(tenant, MAX_RECEIVED);
        if !may {
            self.waiting.insert(token);
        }
        may
    }

    /// Reads the streams that had to wait, as far as they may be read now.
    fn read_again(&mut self, ops: &mut EventOps<'_>) {
        for token in std::mem::take(&mut self.waiting) {
            let Some(source) = self.sources.get(token) else {
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
    pub(super) fn close_connection(
        &mut self,
        ops: &mut EventOps<'_>,
        tenant: Id,
        mut peer: Connection,
    ) {
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
        let tenants: Vec<Id> = self.tenants.keys().copied().collect();
        for id in tenants {
            self.end_sessions_of(ops, id, &format!("the supervisor ended: {why}"));
        }
        self.end_idle_tenants(ops);
    }
}

impl MutEventSubscriber for TenantLoop {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        let token = self.sources.add(Source::Supervisor);
        self.supervisor_token = token;
        if let Err(error) = self.supervisor.end().register(ops, token) {
            tracing::error!("the event loop: {error}");
            self.is_cut = true;
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let token = events.data();
        // A source removed earlier in this round may still have an event.
        let Some(source) = self.sources.get(token) else {
            return;
        };
        self.serve(ops, token, source, events.event_set());
        self.answer_observers(ops);
        if !self.is_cut {
            let token = self.supervisor_token;
            self.supervisor.end().watch(ops, token);
        }
    }
}

impl TenantLoop {
    fn serve(&mut self, ops: &mut EventOps<'_>, token: u32, source: Source, set: EventSet) {
        match source {
            Source::Supervisor => {
                self.supervisor.end().flush();
                self.take_orders(ops);
            }
            Source::Scrubber => self.memory_given_back(ops, token),
            Source::Tenant(id) => self.tenant_event(ops, id, set),
            Source::Guest(id) => self.guest_event(ops, id, set),
            Source::WorkerStream(id) => self.worker_event(ops, id, set),
            Source::WorkerLog(id) => self.worker_log(ops, id),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::datagram;

    #[test]
    fn a_stream_is_not_used_before_the_supervisor_has_closed_its_copy() {
        let (near, far) = datagram::pair().unwrap();
        let descriptors = Descriptors::claim().unwrap();
        let served = Rc::new(RefCell::new(TenantLoop::new(far, descriptors)));
        let mut manager = EventManager::new().unwrap();
        manager.add_subscriber(Rc::clone(&served));
        let limit = Duration::from_secs(3600);
        let service = Service {
            tenant: 7,
            attach_limit: None,
            hello_limit: limit,
            reap_limit: limit,
            lines: 1,
            sessions: 1,
            window: 1 << 30,
            unread: 64,
            has_driver: false,
            has_strangers: false,
            hashes: Vec::new(),
        };
        let (launcher, stream) = UnixStream::pair().unwrap();
        let given = [stream.into()];
        datagram::send(&near, &Order::Serve(service).encode(), &given, false).unwrap();
        drop(given);
        let mut run = || {
            while manager.run_with_timeout(0).unwrap() > 0 {}
            let tenants: Vec<Id> = served.borrow().tenants.keys().copied().collect();
            tenants
        };
        assert!(run().is_empty());
        datagram::send(&near, &Order::Released.encode(), &[], false).unwrap();
        assert_eq!(run(), [7]);
        // The loop ends with its only tenant.
        drop(launcher);
        assert!(run().is_empty());
        assert!(served.borrow().is_done());
    }
}
