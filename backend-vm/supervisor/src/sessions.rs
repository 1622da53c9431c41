//! Sessions, from the hello to the scrubbed segments.
//!
//! `begin` reserves a number, segments and a worker. Once the worker has mapped the segments, the
//! guest is granted the session. It ends when the guest's stream ends, when the worker dies, or
//! when either breaks the protocol; then the worker is killed and reaped, and once the guest is
//! gone too, the segments are scrubbed and freed, and the launcher gets the report. While the guest
//! lives its segments stay quarantined: it may still map them, and it reads in its status word why
//! the session ended.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;

use event_manager::EventOps;
use wormhole_link::counters::CountersFile;
use wormhole_link::device;
use wormhole_link::neighbours::NeighboursFile;
use wormhole_link::report::SessionReport;
use wormhole_link::usage::Usage;
use wormhole_ring::control::{
    Band, FEATURE_FILE_MEMORY, FEATURE_FILES, Grant, Message, Refusal, WindowRun,
};
use wormhole_ring::layout::{APERTURE_HIGH, APERTURE_LOW, HANDLE_BASE, WINDOW_BASE};
use wormhole_ring::session::{GrantError, Run, SessionId, SessionState, State};
use wormhole_ring::status::{Cause, EndCause};

use super::arena::{Extent, ExtentState};
use super::connection;
use super::descriptors::SESSION;
use super::guests::GuestError;
use super::pair::Report;
use super::session_file::{self, SessionFile, SessionHeader};
use super::static_window::View;
use super::tenant_loop::TenantLoop;
use super::tenants::window_of;
use super::window::Window;
use super::{Id, REVOKED_RESULT, WORKER_LOST_RESULT};

/// Largest number of descriptors with which a guest is granted its session.
const GRANTED: usize = 2;

/// A session.
#[derive(Debug)]
pub(super) struct Session {
    pub id: SessionId,
    pub tenant: Id,
    pub view: View,
    /// None once the guest's stream has ended.
    pub guest: Option<Id>,
    /// None until the supervisor has given one, and once it has been reaped.
    pub worker: Option<Id>,
    pub worker_pid: i32,
    pub hash: u64,
    /// Features of the hello that the supervisor supports too.
    features: u64,
    /// Number of the process in its guest, if the guest has reported it.
    pub process: Option<u32>,
    /// File of its memory.
    pub file: SessionFile,
    pub segment: Run,
    arena: Option<Run>,
    /// Runs of arena by their first segment.
    pub extents: BTreeMap<u32, Extent>,
    phase: Phase,
    pub counters: CountersFile,
    /// Guest's end of the socket for descriptors, until the session is granted.
    files: Option<UnixDatagram>,
    /// Cause of its end.
    end: String,
    /// Whether the supervisor has refused it for a quota. It then has no report, as if it had not
    /// begun.
    is_refused: bool,
    /// Work that waits while its status word is being written.
    ending: Option<Ending>,
}

/// Work that waits until a session's guest can read the cause of the session's end.
#[derive(Debug, Default)]
pub(super) struct Ending {
    /// Control stream, closed then.
    pub stream: Option<OwnedFd>,
    /// Requests for arena, denied then.
    pub requests: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The worker is starting or mapping the segments.
    Preparing,
    /// The launcher is mapping the segments for the guest.
    Showing,
    Granted,
    Dying,
}

impl Session {
    /// Returns its tenant and its number there.
    fn number(&self) -> (Id, SessionId) {
        (self.tenant, self.id)
    }

    /// Returns the descriptors to send with the worker's assignment. The guest's file system may have memory.
    pub fn descriptors(
        &mut self,
        neighbours: &NeighboursFile,
        file_memory: Option<&OwnedFd>,
    ) -> io::Result<Vec<OwnedFd>> {
        let page = self.counters.file().try_clone()?;
        let word = neighbours.descriptor()?;
        let mut descriptors = vec![self.file.descriptor()?, page.into(), word];
        if self.features & FEATURE_FILES != 0 {
            let (guest, worker) = UnixDatagram::pair()?;
            // The worker must not block on a descriptor that the guest has announced and not sent.
            worker.set_nonblocking(true)?;
            // A compromised worker must not send the guest its own descriptors, such as its GPU's.
            worker.shutdown(Shutdown::Write)?;
            self.files = Some(guest);
            descriptors.push(worker.into());
        }
        if let Some(memory) = file_memory.filter(|_| self.features & FEATURE_FILE_MEMORY != 0) {
            descriptors.push(memory.try_clone()?);
        }
        Ok(descriptors)
    }

    /// Adds it and its counts to its tenant's usage.
    pub fn add_usage(&self, usage: &mut Usage) {
        if self.is_refused {
            return;
        }
        let header = self.file.header(self.segment.first);
        let local_calls = header.map_or(0, |header| header.local_calls());
        usage.sessions += 1;
        usage.add(&self.counters.read(), local_calls);
        // A dead worker holds no memory.
        let devices = 0..self.worker.map_or(0, |_| device::MOST);
        let memory = devices.map(|device| self.counters.device_memory(device));
        usage.device_memory = memory.fold(usage.device_memory, u64::saturating_add);
    }

    /// Returns the cause of the session's end, with the error that its status word contained
    /// before.
    fn end_with_status(&self, status: Option<Cause>) -> String {
        let said = status.and_then(|said| {
            let cause = EndCause::from_code(said.cause)?;
            let own = [
                EndCause::Violation,
                EndCause::ContextDead,
                EndCause::SystemLimit,
            ];
            own.contains(&cause)
                .then(|| format!("{}; error {}: {}", self.end, said.result, cause.describe()))
        });
        said.unwrap_or_else(|| self.end.clone())
    }
}

impl fmt::Display for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = match self.phase {
            Phase::Preparing => "waits for its worker",
            Phase::Showing => "waits for its launcher to show its memory",
            Phase::Granted => "is granted",
            Phase::Dying => "ends",
        };
        let (tenant, id, worker) = (self.tenant, self.id, self.worker_pid);
        write!(f, "tenant {tenant} {id} with worker {worker} {phase}")?;
        if self.phase == Phase::Dying {
            let left = |some: bool| if some { "is still there" } else { "is gone" };
            let (guest, worker) = (left(self.guest.is_some()), left(self.worker.is_some()));
            write!(f, ": its guest {guest}, its worker {worker}")?;
        }
        match self.file.header(self.segment.first) {
            Ok(header) => write!(f, "; {header}"),
            Err(error) => write!(f, "; its header cannot be read: {error}"),
        }
    }
}

impl TenantLoop {
    pub(super) fn is_granted(&self, session: Id) -> bool {
        self.sessions
            .get(&session)
            .is_some_and(|session| session.phase == Phase::Granted)
    }

    /// Returns whether a session is over while its guest is still connected.
    pub(super) fn is_dying(&self, session: Id) -> bool {
        self.sessions
            .get(&session)
            .is_some_and(|session| session.phase == Phase::Dying)
    }

    /// Returns whether the session's worker has not mapped it yet.
    pub(super) fn is_preparing(&self, session: Id) -> bool {
        self.sessions
            .get(&session)
            .is_some_and(|session| session.phase == Phase::Preparing)
    }

    /// Creates a session for a guest that sent its hello, and asks for a worker for it.
    pub(super) fn begin_session(
        &mut self,
        guest: Id,
        hash: u64,
        features: u64,
        environment: &[(OsString, OsString)],
    ) -> Result<(), (Refusal, String)> {
        let key = self.id();
        let Some(said) = self.guests.get(&guest) else {
            return Err((Refusal::Protocol, "the control stream is closed".to_owned()));
        };
        let (tenant_id, local) = (said.tenant, said.local);
        let live = self.tenants.get(&tenant_id).map_or(0, |one| one.sessions);
        if !self.may_hold(tenant_id, SESSION) {
            let reason =
                format!("no descriptors are left for more than the {live} sessions there are");
            return Err((Refusal::Quota, reason));
        }
        let Some(tenant) = self.tenants.get(&tenant_id) else {
            return Err((Refusal::Protocol, "the tenant is gone".to_owned()));
        };
        let refused = self.too_many_sessions(tenant.session_limit, live);
        let Some(tenant) = self.tenants.get_mut(&tenant_id) else {
            return Err((Refusal::Protocol, "the tenant is gone".to_owned()));
        };
        let Some(window) = &mut tenant.window else {
            let reason = "no window is attached for this guest".to_owned();
            return Err((Refusal::Protocol, reason));
        };
        if let Some(reason) = refused {
            return Err((Refusal::Quota, reason));
        }
        let id = activate(&mut tenant.numbers);
        let view = match (local, window.file()) {
            (true, _) => View::Process,
            (false, None) => View::Launcher,
            (false, Some(_)) => View::Static,
        };
        let has_strangers = self.service.as_ref().is_some_and(|one| one.has_strangers);
        let offered = view.features(has_strangers, window.file_memory().is_some());
        let granted = grant_first(window, id).and_then(|(segment, arena)| {
            let (bytes, generation) = (window.bytes(), id.generation);
            let file = match window.file().filter(|_| view == View::Static) {
                Some(shared) => SessionFile::within(shared, segment.first, generation),
                None => SessionFile::new(bytes, segment.first, generation),
            };
            let file = file.map_err(|error| (Refusal::WindowFull, wormhole_link::chain(&error)))?;
            let counters = CountersFile::create().map_err(|error| {
                (
                    Refusal::NoDevice,
                    format!("no memory for counters: {error}"),
                )
            })?;
            Ok((segment, arena, file, counters))
        });
        let (segment, arena, file, counters) = match granted {
            Ok(granted) => granted,
            Err(refused) => {
                for run in window.segments.take_back_all(id) {
                    let _ = window.segments.scrubbed(id, run);
                }
                release(&tenant.numbers, id);
                return Err(refused);
            }
        };
        let lines: Vec<String> = environment
            .iter()
            .map(|(name, value)| format!("{}={}", name.display(), value.display()))
            .collect();
        let extents = arena
            .map(|run| {
                let state = ExtentState::Granted;
                let count = run.count;
                (run.first, Extent { count, state })
            })
            .into_iter()
            .collect();
        tenant.sessions += 1;
        self.sessions.insert(
            key,
            Session {
                id,
                tenant: tenant_id,
                view,
                guest: Some(guest),
                worker: None,
                worker_pid: 0,
                hash,
                features: features & offered,
                process: None,
                file,
                segment,
                arena,
                extents,
                phase: Phase::Preparing,
                counters,
                files: None,
                end: String::new(),
                is_refused: false,
                ending: None,
            },
        );
        if let Some(guest) = self.guests.get_mut(&guest) {
            guest.session = Some(key);
        }
        self.supervisor.report(&Report::Want {
            session: key,
            hash,
            environment: lines.join("\n"),
        });
        Ok(())
    }

    /// Returns the reason why the tenant may not have another session beside its `live` ones, if
    /// there is one. The supervisor counts those of its user.
    fn too_many_sessions(&self, limit: u32, live: usize) -> Option<String> {
        let own = match limit {
            0 => usize::MAX,
            limit => limit as usize,
        };
        if live >= own {
            return Some(format!(
                "the tenant has {live} sessions, its limit is {own}"
            ));
        }
        let most = self.service.as_ref().map_or(0, |service| service.sessions);
        (live as u64 >= most)
            .then(|| format!("the tenant has {live} sessions, and --sessions allows {most}"))
    }

    /// Records the process number that a guest has reported for its session.
    pub(super) fn name_process(&mut self, session: Id, pid: u32) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.process = Some(pid);
        }
    }

    /// Assigns a worker to a session.
    pub(super) fn bind_worker(&mut self, session: Id, worker: Id, pid: i32) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.worker = Some(worker);
            session.worker_pid = pid;
            self.observers.ask_anew();
        }
    }

    /// Returns a session's grant for the worker and the guest.
    pub(super) fn grant_of(&self, session: Id) -> Option<Grant> {
        let session = self.sessions.get(&session)?;
        let window = self.tenants.get(&session.tenant)?.window.as_ref()?;
        let band = |(base, size)| Band { base, size };
        let arena = session.arena.unwrap_or(Run { first: 0, count: 0 });
        Some(Grant {
            session: session.id.index,
            generation: session.id.generation,
            session_segment: session.segment.first,
            arena_first: arena.first,
            arena_count: arena.count,
            reserved: 0,
            window_base: WINDOW_BASE,
            window_size: window.bytes(),
            handle_base: HANDLE_BASE,
            apertures: [band(APERTURE_HIGH), band(APERTURE_LOW)],
            protocol_hash: session.hash,
            features: session.features,
        })
    }

    /// Handles the worker's message that it has mapped the session: grants it, or has the launcher
    /// map the segments.
    pub(super) fn session_assigned(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
    ) -> Result<(), String> {
        let Some(session) = self.sessions.get_mut(&key) else {
            return Ok(());
        };
        match session.phase {
            Phase::Preparing => session.phase = Phase::Showing,
            // The guest has left meanwhile, and the worker is not dead yet.
            Phase::Dying => return Ok(()),
            Phase::Showing | Phase::Granted => {
                return Err("it sent Assigned for a session that it has".to_owned());
            }
        }
        if session.view != View::Launcher {
            self.grant_session(ops, key);
            return Ok(());
        }
        let runs = [Some(session.segment), session.arena];
        for run in runs.into_iter().flatten() {
            self.show_run(ops, key, run);
        }
        Ok(())
    }

    /// Orders the launcher to map a run for the guest.
    pub(super) fn show_run(&mut self, ops: &mut EventOps<'_>, key: Id, run: Run) {
        let Some(session) = self.sessions.get(&key) else {
            return;
        };
        let tenant = session.tenant;
        let message = Message::WindowMap(window_run(key, run));
        let shown = match session.file.descriptor() {
            Ok(file) => self
                .tell_tenant(ops, tenant, &message, vec![file])
                .map_err(|error| wormhole_link::chain(&error)),
            Err(error) => Err(error.to_string()),
        };
        if let Err(reason) = shown {
            let why = format!("the guest cannot be shown its memory: {reason}");
            self.end_session(ops, key, &why, Some((REVOKED_RESULT, EndCause::Revoked)));
        }
    }

    /// Handles the launcher's message that a run is mapped for the guest: grants the session or the
    /// arena.
    pub(super) fn run_shown(
        &mut self,
        ops: &mut EventOps<'_>,
        tenant: Id,
        run: &WindowRun,
    ) -> Result<(), &'static str> {
        let key = run.session;
        let Some(session) = self.sessions.get(&key) else {
            return Ok(());
        };
        if session.tenant != tenant || session.view != View::Launcher {
            return Err("it shows a session's memory that is not its own");
        }
        match session.phase {
            Phase::Dying => Ok(()),
            Phase::Preparing => Err("it shows memory before it was asked to"),
            Phase::Showing => {
                if run.first == session.arena.unwrap_or(session.segment).first {
                    self.grant_session(ops, key);
                }
                Ok(())
            }
            Phase::Granted => self.arena_shown(ops, key, run.segments()),
        }
    }

    /// Grants the session to the guest. The worker has mapped it, and so has the guest's launcher.
    fn grant_session(&mut self, ops: &mut EventOps<'_>, key: Id) {
        let grant = self.grant_of(key);
        let in_flight = self.check_in_flight(GRANTED);
        let (Some(session), Some(grant)) = (self.sessions.get_mut(&key), grant) else {
            return;
        };
        session.phase = Phase::Granted;
        if let (Err(error), Some(guest)) = (in_flight, session.guest) {
            let why = format!("the guest cannot be granted its session: {error}");
            return self.end_guest(ops, guest, &why, None);
        }
        let Some((id, guest)) = session
            .guest
            .and_then(|id| Some((id, self.guests.get_mut(&id)?)))
        else {
            return;
        };
        let mut descriptors = Vec::new();
        if session.view == View::Process {
            match session.file.descriptor() {
                Ok(file) => descriptors.push(file),
                Err(error) => tracing::error!("the session's file cannot be passed on: {error}"),
            }
            descriptors.extend(session.files.take().map(OwnedFd::from));
        }
        if let Err(error) = guest.peer.send(ops, &Message::Grant(grant), descriptors) {
            let why = format!("the guest does not take its grant: {error}");
            self.end_guest(ops, id, &why, None);
        }
    }

    /// Handles the supervisor's message that there is no worker for a session.
    pub(super) fn no_worker(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        refusal: Refusal,
        reason: &str,
    ) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        session.is_refused = refusal == Refusal::Quota;
        let (tenant, id) = (session.tenant, session.id);
        if session.is_refused && self.may_log(tenant) {
            tracing::info!("tenant {tenant} {id} is refused: {reason}");
        }
        self.session_unserved(ops, key, refusal, reason);
    }

    /// Refuses a session's guest, because there is no worker for it.
    pub(super) fn session_unserved(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        refusal: Refusal,
        reason: &str,
    ) {
        let Some(session) = self.sessions.get(&key) else {
            return;
        };
        match session.guest {
            Some(guest) => {
                self.refuse(ops, guest, refusal, reason.to_owned());
                self.end_guest(ops, guest, reason, None);
            }
            None => self.end_session(ops, key, reason, None),
        }
    }

    pub(super) fn ring_doorbell(
        &mut self,
        ops: &mut EventOps<'_>,
        session: Id,
    ) -> Result<(), GuestError> {
        let Some(worker) = self.worker_of(session) else {
            return Ok(());
        };
        // If a message is queued before it, the worker will wake up anyway.
        if worker.peer.is_waiting() {
            return Ok(());
        }
        worker
            .peer
            .send(ops, &Message::Doorbell, Vec::new())
            .or(Ok(()))
    }

    pub(super) fn tell_worker(
        &mut self,
        ops: &mut EventOps<'_>,
        session: Id,
        message: &Message<'_>,
    ) -> Result<(), GuestError> {
        match self.worker_of(session) {
            Some(worker) => worker
                .peer
                .send(ops, message, Vec::new())
                .map_err(|_| GuestError::Worker),
            // The worker has died; the guest reads that in its status word.
            None => Ok(()),
        }
    }

    /// Ends a session: writes the cause to its status word, if a guest may read it, and kills its
    /// worker. The rest follows once the word is written, the worker is reaped and the guest is
    /// gone.
    pub(super) fn end_session(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        why: &str,
        status: Option<(u32, EndCause)>,
    ) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        if session.phase != Phase::Dying {
            let status = status.filter(|_| session.phase == Phase::Granted);
            session.phase = Phase::Dying;
            why.clone_into(&mut session.end);
            advance(&self.tenants, session.number(), SessionState::end);
            if let Some(worker) = session.worker.and_then(|worker| self.workers.get(&worker)) {
                worker.process.kill();
            }
            match status {
                Some(status) => self.write_status(ops, key, status),
                None => self.deny_pending_arena(ops, key, Vec::new()),
            }
        }
        self.finish_session(ops, key);
    }

    /// Orders a scrubber to write a session's status word.
    fn write_status(&mut self, ops: &mut EventOps<'_>, key: Id, status: (u32, EndCause)) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        session.ending = Some(Ending::default());
        let (tenant, segment) = (session.tenant, session.segment.first);
        match session.file.descriptor() {
            // The spawner is gone, so there is no scrubber to do it, and no other session that a
            // blocking write would delay.
            Ok(file) if self.lost => {
                let (result, cause) = status;
                let written = session_file::set_status(&file, segment, result, cause);
                self.status_written(ops, key, written);
            }
            Ok(file) => self
                .scrubber
                .set_status(tenant, key, (file, segment), status),
            Err(error) => self.status_written(ops, key, Err(error)),
        }
    }

    /// Continues the end of a session whose status word was written or cannot be.
    pub(super) fn status_written(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        result: io::Result<()>,
    ) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let (tenant, guest) = (session.tenant, session.guest);
        let ending = session.ending.take().unwrap_or_default();
        if let Some(stream) = ending.stream {
            connection::shut_down(&stream);
            self.scrubber.close(tenant, [stream]);
        }
        match (result, guest) {
            (Err(error), Some(guest)) => {
                tracing::error!("tenant {tenant}: a session's end cannot be said: {error}");
                self.end_guest(ops, guest, "its end could not be said", None);
            }
            _ => self.deny_pending_arena(ops, key, ending.requests),
        }
        self.finish_session(ops, key);
    }

    /// Returns the work that waits until a session's status word is written, while it is being
    /// written.
    pub(super) fn ending(&mut self, key: Id) -> Option<&mut Ending> {
        self.sessions.get_mut(&key)?.ending.as_mut()
    }

    /// Handles the end of a session's worker, which has been reaped and left these descriptors.
    pub(super) fn session_lost_worker(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        why: &str,
        left: Vec<OwnedFd>,
    ) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        session.worker = None;
        let (tenant, id, phase) = (session.tenant, session.id, session.phase);
        if phase == Phase::Granted {
            if self.may_log(tenant) {
                tracing::warn!("tenant {tenant} {id}: {why}");
            }
            let lost = (WORKER_LOST_RESULT, EndCause::WorkerLost);
            self.end_session(ops, key, why, Some(lost));
        }
        // Ordered last, so that the guest does not wait until these are closed.
        self.scrubber.close(tenant, left);
        self.end_shares(key, tenant);
        if matches!(phase, Phase::Preparing | Phase::Showing) {
            self.session_unserved(ops, key, Refusal::NoDevice, why);
        }
        self.finish_session(ops, key);
        self.punch_beside_runs(key);
    }

    /// Frees the memory that a dead worker allocated in its session's file outside of the session's
    /// runs. The runs themselves stay until the guest is gone.
    fn punch_beside_runs(&mut self, key: Id) {
        // The rest of a static window belongs to other sessions.
        let session = self.sessions.get(&key);
        let Some(session) = session.filter(|session| session.view != View::Static) else {
            return;
        };
        let tenant = session.tenant;
        let Some(window) = window_of(&mut self.tenants, tenant) else {
            return;
        };
        let extents = session.extents.iter();
        let arena = extents.map(|(&first, extent)| Run {
            first,
            count: extent.count,
        });
        let mut runs: Vec<Run> = arena.chain([session.segment]).collect();
        runs.sort_by_key(|run| run.first);
        let gaps = gaps(&runs, window.segments.segments());
        let ordered = session.file.descriptor();
        let ordered = ordered.and_then(|file| {
            // Not the last copy: the session has its own.
            self.scrubber.scrub_all(tenant, &file, &gaps)
        });
        if let Err(error) = ordered {
            tracing::warn!("a dead worker's memory stays: {error}");
        }
    }

    /// Orders the launcher to unmap runs; after that they can be granted again.
    fn free_runs(&mut self, ops: &mut EventOps<'_>, session: &Session, key: Id, runs: &[Run]) {
        // After the first failure the launcher is cut off and gets no further orders.
        let _ = session.view == View::Process
            || runs
                .iter()
                .all(|run| self.hide_run(ops, session.tenant, key, *run));
        let Some(window) = window_of(&mut self.tenants, session.tenant) else {
            return;
        };
        for run in runs {
            if let Err(error) = window.segments.scrubbed(session.id, *run) {
                tracing::error!("{error}");
            }
        }
    }

    /// Orders the launcher of a guest VM to unmap a run from the guest. Orders about the same
    /// segments are executed in the order sent. A launcher to which the order cannot be sent is cut
    /// off, so that the guest does not keep access to another session's segments. Returns whether
    /// the order was sent.
    pub(super) fn hide_run(
        &mut self,
        ops: &mut EventOps<'_>,
        tenant: Id,
        key: Id,
        run: Run,
    ) -> bool {
        let message = Message::WindowUnmap(window_run(key, run));
        let sent = self.tell_tenant(ops, tenant, &message, Vec::new());
        if let Err(error) = &sent {
            if self.may_log(tenant) {
                tracing::warn!(
                    "tenant {tenant} is cut off: {run} cannot be taken from it: {error}"
                );
            }
            self.cut_off(tenant);
        }
        sent.is_ok()
    }

    /// Frees a session's segments once no process can access them.
    fn finish_session(&mut self, ops: &mut EventOps<'_>, key: Id) {
        let over = self.sessions.get(&key).is_some_and(|session| {
            session.phase == Phase::Dying
                && session.worker.is_none()
                && session.guest.is_none()
                && session.ending.is_none()
        });
        if !over {
            return;
        }
        let Some(session) = self.sessions.remove(&key) else {
            return;
        };
        self.supervisor.report(&Report::Over { session: key });
        advance(&self.tenants, session.number(), SessionState::worker_reaped);
        let header = session.file.header(session.segment.first).ok();
        let header = header.as_ref();
        let counts = session.counters.read();
        let local_calls = header.map_or(0, SessionHeader::local_calls);
        if let Some(tenant) = self.tenants.get_mut(&session.tenant) {
            tenant.sessions -= 1;
            if !session.is_refused {
                tenant.ended.ended_sessions += 1;
                tenant.ended.add(&counts, local_calls);
            }
        }
        let report = SessionReport::new(
            format!("{}.{}", session.id.index, session.id.generation),
            session.worker_pid,
            &counts,
            local_calls,
            session.end_with_status(header.and_then(SessionHeader::status)),
        );
        // The segments of a launcher that has left are not granted again; its guests may still read
        // their status words there.
        let goes_on = |tenant: &&mut super::tenants::Tenant| !self.stopping && tenant.is_attached();
        let runs = self
            .tenants
            .get_mut(&session.tenant)
            .filter(goes_on)
            .and_then(|tenant| tenant.window.as_mut())
            .map(|window| window.segments.take_back_all(session.id))
            .unwrap_or_default();
        let is_static = session.view == View::Static;
        if !is_static {
            self.free_runs(ops, &session, key, &runs);
            advance(&self.tenants, session.number(), SessionState::scrubbed);
            advance(&self.tenants, session.number(), SessionState::release);
        }
        tracing::debug!(
            "tenant {} {} ended: {}",
            session.tenant,
            session.id,
            session.end
        );
        if !session.is_refused {
            self.send_report(ops, session.tenant, &report);
        }
        let (tenant, file) = (session.tenant, session.file.into());
        // A launcher that has left may keep the file. Its memory would outlive the tenant and the limit on it.
        // A static window's memory is the guest's, and its free segments stay with it.
        if self.stopping || (is_static && runs.is_empty()) {
            self.scrubber.close(tenant, [file]);
        } else if is_static {
            self.scrub_static(key, tenant, session.id, file, runs);
        } else if runs.is_empty() {
            let segment = session.segment.first;
            self.scrubber.discard_beside_status(tenant, file, segment);
        } else {
            self.scrubber.discard(tenant, file);
        }
        let files = session.files.map(OwnedFd::from);
        self.scrubber.close(tenant, files);
        self.end_idle_tenants(ops);
    }
}

/// Returns the segments below `segments` that are in none of these ordered runs.
fn gaps(runs: &[Run], segments: u32) -> Vec<Run> {
    let mut gaps = Vec::new();
    let mut first = 0;
    let end = Run {
        first: segments,
        count: 0,
    };
    for run in runs.iter().chain([&end]) {
        let count = run.first.saturating_sub(first);
        if count > 0 {
            gaps.push(Run { first, count });
        }
        first = run.first + run.count;
    }
    gaps
}

fn window_run(session: Id, run: Run) -> WindowRun {
    WindowRun {
        session,
        first: run.first,
        count: run.count,
    }
}

/// Activates the first free session number.
fn activate(numbers: &mut Vec<SessionState>) -> SessionId {
    let free = numbers
        .iter()
        .position(|number| number.load().0 == State::Free)
        .unwrap_or_else(|| {
            numbers.push(SessionState::new());
            numbers.len() - 1
        });
    let generation = numbers[free].activate().unwrap_or(0);
    SessionId {
        index: u32::try_from(free).unwrap_or(u32::MAX),
        generation,
    }
}

/// Releases a number that no session has used.
fn release(numbers: &[SessionState], id: SessionId) {
    let steps = [
        SessionState::end,
        SessionState::worker_reaped,
        SessionState::scrubbed,
        SessionState::release,
    ];
    for step in steps {
        if let Err(error) = step(&numbers[id.index as usize], id.generation) {
            tracing::error!("{id}: {error}");
        }
    }
}

/// Advances the state of a tenant's session number.
pub(super) fn advance(
    tenants: &BTreeMap<Id, super::tenants::Tenant>,
    (tenant, id): (Id, SessionId),
    step: impl Fn(&SessionState, u32) -> Result<(), wormhole_ring::session::TransitionError>,
) {
    let number = tenants
        .get(&tenant)
        .and_then(|tenant| tenant.numbers.get(id.index as usize));
    if let Some(Err(error)) = number.map(|number| step(number, id.generation)) {
        tracing::error!("{id}: {error}");
    }
}

/// Grants a session's own segment and its first segment of arena. When half of the window is
/// granted, a session starts without arena and requests it when needed, so that more sessions can
/// start. The first free segments are granted: guests register memory in the last ones.
fn grant_first(
    window: &mut Window,
    id: SessionId,
) -> Result<(Run, Option<Run>), (Refusal, String)> {
    let grant = |window: &mut Window| {
        let table = &mut window.segments;
        let first = table.grant_within(id, 1, (1, table.segments()), 0);
        // The error of a request for any segment names no part of the window.
        first.or_else(|_| table.grant(id, 1))
    };
    let segment = grant(window).map_err(|error| (refusal_of(&error), window.explain(&error)))?;
    let room = window.segments.room();
    let arena = (room > window.segments.held()).then(|| grant(window));
    Ok((segment, arena.and_then(Result::ok)))
}

pub(super) fn refusal_of(error: &GrantError) -> Refusal {
    match error {
        GrantError::Empty { .. } => Refusal::Protocol,
        GrantError::Quota { .. } => Refusal::Quota,
        GrantError::Kept { .. } | GrantError::NoRun { .. } | GrantError::NoRunWithin { .. } => {
            Refusal::WindowFull
        }
    }
}

#[cfg(test)]
mod tests {
    use wormhole_ring::control::Attach;

    use super::*;

    #[test]
    fn a_session_begins_in_the_first_free_segments_however_short_other_runs_are() {
        const SEGMENTS: u32 = 16;
        let bytes = u64::from(SEGMENTS) * wormhole_ring::layout::SEGMENT_BYTES as u64;
        let file = wormhole_link::memory::anonymous_file(c"window").unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        let seals = rustix::fs::SealFlags::GROW | rustix::fs::SealFlags::SHRINK;
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        let attach = Attach {
            window_size: bytes,
            ..Attach::default()
        };
        let mut window = Window::accept(&file, &attach, bytes).unwrap();
        let session = |index| SessionId {
            index,
            generation: 1,
        };
        // Registered memory leaves one of the last two segments, which is the shortest free run.
        let part = (SEGMENTS - 2, SEGMENTS);
        let table = &mut window.segments;
        table.grant_within(session(0), 1, part, 0).unwrap();
        let run = |first| Run { first, count: 1 };
        let granted = grant_first(&mut window, session(1)).unwrap();
        assert_eq!(granted, (run(1), Some(run(2))));
    }

    #[test]
    fn gaps_are_what_no_run_has() {
        let run = |first, count| Run { first, count };
        let runs = [run(1, 2), run(3, 1), run(6, 1)];
        assert_eq!(gaps(&runs, 9), [run(0, 1), run(4, 2), run(7, 2)]);
        assert_eq!(gaps(&runs[..2], 4), [run(0, 1)]);
        assert_eq!(gaps(&[], 4), [run(0, 4)]);
    }
}
