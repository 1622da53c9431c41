//! Workers of a tenant's sessions, from the supervisor's gift to the reaping. Each has its device
//! and has met no guest before.

use std::fmt;
use std::os::fd::OwnedFd;
use std::time::Instant;

use event_manager::{EventOps, EventSet};
use wormhole_link::channel::ChannelError;
use wormhole_link::process::BROKEN;
use wormhole_ring::control::{ArenaRun, Fetch, Message, Refusal, Share};
use wormhole_sandbox::Ending;

use super::Id;
use super::connection::{self, Connection};
use super::pair;
use super::tenant_loop::{Source, TenantLoop};
use super::tenants::Tenant;
use super::window::Window;
use super::workers::{LAST_PORTIONS, Log, Portion};

/// Largest number of descriptors with which a worker is assigned its session.
const ASSIGNED: usize = 4;

/// A worker's process, which the supervisor's spawner kills and reaps.
#[derive(Debug)]
pub(super) struct Process {
    supervisor: pair::SupervisorLink,
    ticket: u64,
    pid: i32,
}

impl Process {
    pub fn ticket(&self) -> u64 {
        self.ticket
    }

    /// Returns the process's number in the supervisor's PID namespace: for log messages, not as an
    /// identity.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Kills the process. Has no effect if it has ended.
    pub fn kill(&self) {
        let ticket = self.ticket;
        self.supervisor.report(&pair::Report::Kill { ticket });
    }
}

/// A worker with its session.
#[derive(Debug)]
pub(super) struct Worker {
    pub process: Process,
    pub peer: Connection,
    log: Option<Log>,
    tokens: [u32; 2],
    session: Id,
    /// Time since which it has the session.
    since: Instant,
    /// Reason why it cannot serve, if that is known before its end.
    refusal: Option<String>,
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
        let (pid, seconds) = (self.process.pid(), self.since.elapsed().as_secs_f64());
        write!(f, "worker {pid} has its session, for {seconds:.1} s")?;
        if self.peer.is_waiting() {
            f.write_str("; it does not take what it is sent")?;
        }
        Ok(())
    }
}

/// Message of a worker, as an owned value.
enum WorkerMessage {
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

impl TenantLoop {
    /// Assigns a session the worker that the supervisor gives.
    pub(super) fn add_worker(
        &mut self,
        ops: &mut EventOps<'_>,
        session: Id,
        (ticket, pid): (u64, i32),
        descriptors: Vec<OwnedFd>,
    ) {
        let process = Process {
            supervisor: self.supervisor.clone(),
            ticket,
            pid,
        };
        let is_wanted = |session: &super::sessions::Session| session.worker.is_none();
        let wanted = self.sessions.get(&session).is_some_and(is_wanted);
        // Its session has ended meanwhile.
        if !wanted || self.is_dying(session) {
            return process.kill();
        }
        let Ok([socket, log]) = <[OwnedFd; 2]>::try_from(descriptors) else {
            process.kill();
            let reason = "no descriptor is left for the worker";
            return self.session_unserved(ops, session, Refusal::NoDevice, reason);
        };
        let (id, log) = (self.id(), Log::new(log));
        let sources = (Source::WorkerStream(id), Source::WorkerLog(id));
        let (peer, tokens) = match self.sources.watch_worker(ops, socket, &log, sources) {
            Ok(watched) => watched,
            Err(error) => {
                process.kill();
                let reason = format!("the event loop: {error}");
                return self.session_unserved(ops, session, Refusal::NoDevice, &reason);
            }
        };
        self.workers.insert(
            id,
            Worker {
                process,
                peer,
                log: Some(log),
                tokens,
                session,
                since: Instant::now(),
                refusal: None,
            },
        );
        self.bind_worker(session, id, pid);
        self.assign(ops, id, session);
    }

    pub(super) fn worker_of(&mut self, session: Id) -> Option<&mut Worker> {
        let worker = self.sessions.get(&session)?.worker?;
        self.workers.get_mut(&worker)
    }

    /// Sends a worker its session.
    fn assign(&mut self, ops: &mut EventOps<'_>, id: Id, key: Id) {
        let grant = self.grant_of(key);
        if let Err(error) = self.check_in_flight(ASSIGNED) {
            let reason = error.to_string();
            return self.session_unserved(ops, key, Refusal::Quota, &reason);
        }
        let session = self.sessions.get_mut(&key).zip(self.neighbours.as_ref());
        let descriptors = session.and_then(|(session, neighbours)| {
            let tenant = self.tenants.get(&session.tenant)?;
            let memory = tenant.window.as_ref().and_then(Window::file_memory);
            session.descriptors(neighbours, memory).ok()
        });
        let (Some(grant), Some(descriptors), Some(worker)) =
            (grant, descriptors, self.workers.get_mut(&id))
        else {
            let reason = "no descriptor is left for the session";
            self.session_unserved(ops, key, Refusal::NoDevice, reason);
            return;
        };
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
        self.sources.remove(token);
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
        let tenant = self.sessions.get(&worker.session).map(|one| one.tenant);
        let may = tenant.is_none_or(|tenant| self.may_read(tenant, token));
        let Some(worker) = self.workers.get_mut(&id) else {
            return Ok(());
        };
        if !worker.peer.fill(ops, may, set).map_err(failed)? {
            return Ok(());
        }
        loop {
            let Some(worker) = self.workers.get_mut(&id) else {
                return Ok(());
            };
            let report = match worker.peer.incoming.take().map_err(failed)? {
                None => return Ok(()),
                Some(Message::Ready { .. }) => {
                    return Err(Some("it sent a message out of turn".to_owned()));
                }
                Some(Message::Refused { reason, .. }) => {
                    WorkerMessage::Refused(reason.chars().take(1000).collect())
                }
                Some(Message::Assigned) => WorkerMessage::Assigned,
                Some(Message::ArenaAdded(run)) => WorkerMessage::Added(run),
                Some(Message::ArenaRemoved(run)) => WorkerMessage::Removed(run),
                Some(Message::ArenaRefused(run)) => WorkerMessage::RefusedArena(run),
                Some(Message::Share(share)) if share.descriptor == 0 => {
                    WorkerMessage::Share(share, None)
                }
                Some(Message::Share(share)) => {
                    match worker.peer.incoming.descriptor() {
                        Some(descriptor) => WorkerMessage::Share(share, Some(descriptor)),
                        // The descriptor was lost because the supervisor had none free.
                        None if worker.peer.incoming.was_lost() => {
                            WorkerMessage::ShareLost(share.id)
                        }
                        None => {
                            let reason = "it shares a descriptor that did not come";
                            return Err(Some(reason.to_owned()));
                        }
                    }
                }
                Some(Message::Fetch(fetch)) => WorkerMessage::Fetch(fetch),
                Some(Message::Unshare(fetch)) => WorkerMessage::Unshare(fetch),
                Some(other) => WorkerMessage::Wrong(other.name()),
            };
            self.worker_report(ops, id, report).map_err(Some)?;
        }
    }

    fn worker_report(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        report: WorkerMessage,
    ) -> Result<(), String> {
        let Some(worker) = self.workers.get_mut(&id) else {
            return Ok(());
        };
        let session = worker.session;
        match report {
            // No guest uses it yet, or its guest has left and it is not dead yet.
            WorkerMessage::Refused(reason)
                if self.is_preparing(session) || self.is_dying(session) =>
            {
                if let Some(worker) = self.workers.get_mut(&id) {
                    worker.refusal = Some(reason);
                }
                Ok(())
            }
            WorkerMessage::Assigned => {
                self.session_assigned(ops, session)?;
                self.supervisor.report(&pair::Report::Taken { session });
                Ok(())
            }
            WorkerMessage::Added(run) => self.arena_added(ops, session, &run),
            WorkerMessage::Removed(run) => self.arena_removed(ops, session, &run),
            WorkerMessage::RefusedArena(run) => self.arena_refused(ops, session, &run),
            WorkerMessage::Share(share, descriptor) => {
                self.share(ops, session, &share, descriptor);
                Ok(())
            }
            WorkerMessage::ShareLost(request) => {
                self.refuse_share(ops, session, request);
                Ok(())
            }
            WorkerMessage::Fetch(fetch) => {
                self.fetch(ops, session, &fetch);
                Ok(())
            }
            WorkerMessage::Unshare(fetch) => {
                self.unshare(ops, session, &fetch);
                Ok(())
            }
            WorkerMessage::Wrong(name) => Err(format!("it sent {name}, which workers do not send")),
            WorkerMessage::Refused(_) => Err("it sent a message out of turn".to_owned()),
        }
    }

    /// Handles the end of a worker's process.
    pub(super) fn worker_ended(
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
        let Some(mut worker) = self.workers.remove(&id) else {
            return;
        };
        worker.peer.forget(ops);
        for token in worker.tokens {
            self.sources.remove(token);
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
        let mut descriptors = worker.peer.into_descriptors();
        descriptors.extend(log);
        self.session_lost_worker(ops, worker.session, &why, descriptors);
    }

    pub(super) fn worker_log(&mut self, ops: &mut EventOps<'_>, id: Id) {
        let portion = self.read_log(id);
        if matches!(portion, Portion::Data | Portion::Empty) {
            return;
        }
        let tenant = self.tenant_of(id);
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
        let session = self.workers.get(&id)?.session;
        Some(self.sessions.get(&session)?.tenant)
    }

    /// Removes a worker's log from the event loop and returns its socket.
    fn take_log(&mut self, ops: &mut EventOps<'_>, id: Id) -> Option<OwnedFd> {
        let worker = self.workers.get_mut(&id)?;
        let log = worker.log.take()?;
        connection::forget(ops, log.socket());
        let token = std::mem::take(&mut worker.tokens[1]);
        self.sources.remove(token);
        Some(log.into_socket())
    }

    /// Passes on one portion of a worker's log.
    fn read_log(&mut self, id: Id) -> Portion {
        let Some(worker) = self.workers.get_mut(&id) else {
            return Portion::Closed;
        };
        let pid = worker.process.pid();
        let session = self.sessions.get(&worker.session);
        let tenant = session.and_then(|session| self.tenants.get_mut(&session.tenant));
        let Some(Tenant { worker_log, .. }) = tenant else {
            return Portion::Closed;
        };
        worker
            .log
            .as_mut()
            .map_or(Portion::Closed, |log| log.read(pid, worker_log))
    }
}
