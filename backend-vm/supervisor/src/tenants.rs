//! Tenant streams: a launcher attaches a window, then requests control streams for its guests.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet};
use wormhole_link::channel::ChannelError;
use wormhole_link::log_budget::{LogBudget, Verdict};
use wormhole_link::report::SessionReport;
use wormhole_link::usage::Usage;
use wormhole_ring::control::{
    Attach, Exits, FileMemory, MAX_CONTROL_BODY, Message, Refusal, Stream, WindowRun,
};
use wormhole_ring::session::SessionState;

use super::Id;
use super::connection::Connection;
use super::descriptors::{SESSION, STREAM, TENANT};
use super::guests::Guest;
use super::pair::Report;
use super::tenant_loop::{Source, TenantLoop};
use super::window::{Window, WindowError};

/// Largest number of control streams that a tenant may have open.
const MAX_GUESTS: usize = 1024;
/// Largest number of them without a hello.
const MAX_SILENT_GUESTS: usize = 128;

/// A tenant.
#[derive(Debug)]
pub(super) struct Tenant {
    /// None once the stream has ended.
    peer: Option<Connection>,
    token: u32,
    /// Deadline for attaching. None where there is none.
    attach_end: Option<Instant>,
    pub window: Option<Window>,
    /// Window whose bootstrap is being written. Until then the stream is not read.
    attaching: Option<(Window, u32)>,
    pub session_limit: u32,
    /// States of the session numbers used so far.
    pub numbers: Vec<SessionState>,
    /// Number of its control streams, and below of its sessions.
    pub guests: usize,
    pub sessions: usize,
    log: LogBudget,
    /// Lines that it may cause without a window.
    lines: u32,
    /// Log budget of its workers.
    pub worker_log: LogBudget,
    /// Whether the launcher waits for the result of starting the device.
    awaits_device: bool,
    /// Whether the launcher has closed its direction and waits for its sessions' reports.
    leaving: bool,
    /// Usage of the sessions that have ended.
    pub ended: Usage,
    /// Exits of the guest's vCPUs, as last reported by the launcher.
    pub exits: Option<u64>,
    /// Whether the launcher was asked for them and has not answered.
    pub owes_exits: bool,
    /// Whether the supervisor waits for the usage.
    pub owes_usage: bool,
    /// Whether the launcher waits for it.
    pub asks_usage: bool,
    /// Time of the launcher's last question that was answered.
    pub asked_usage: Option<Instant>,
    question: Question,
}

/// Question for the usage of tenants, by a client that attaches no window.
#[derive(Debug, PartialEq, Eq)]
enum Question {
    /// None so far.
    Never,
    Asked,
    Answered,
}

/// Returns the window of a tenant, if it has one.
pub(super) fn window_of(tenants: &mut BTreeMap<Id, Tenant>, tenant: Id) -> Option<&mut Window> {
    tenants.get_mut(&tenant)?.window.as_mut()
}

impl Tenant {
    /// Returns the deadline for attaching, if the tenant has not attached.
    pub fn deadline(&self) -> Option<Instant> {
        let waits =
            self.window.is_none() && self.peer.is_some() && self.question == Question::Never;
        self.attach_end.filter(|_| waits)
    }

    /// Begins a question for the usage of tenants, unless it has another one.
    pub fn begin_question(&mut self) -> bool {
        let may = self.question != Question::Asked;
        if may {
            self.question = Question::Asked;
        }
        may
    }

    pub fn awaits_usage(&self) -> bool {
        self.question == Question::Asked
    }

    pub fn end_question(&mut self) {
        self.question = Question::Answered;
    }

    /// Returns whether its launcher answers questions: from the end of its attachment on, as long as it is connected.
    pub fn takes_questions(&self) -> bool {
        self.is_attached() && self.window.is_some() && !self.awaits_device
    }

    /// Returns whether its launcher is still connected.
    pub fn is_attached(&self) -> bool {
        self.peer.is_some() && !self.leaving
    }

    /// Returns the number of descriptors that the tenant may use, without those that it shares or
    /// that are waiting to be closed.
    fn held(&self) -> usize {
        let sent = self.peer.as_ref().map_or(0, Connection::unread);
        TENANT + STREAM * self.guests + SESSION * self.sessions + sent
    }
}

/// Message of a launcher, as an owned value.
enum Request {
    Attach(Attach),
    Stream(Stream),
    Mapped(WindowRun),
    AskUsage,
    Exits(Exits),
    FileMemory(FileMemory),
    Wrong(&'static str),
}

impl TenantLoop {
    /// Closes the streams whose window did not arrive in time.
    pub(super) fn end_late_tenants(&mut self, now: Instant) {
        let mut late = Vec::new();
        for (id, tenant) in &mut self.tenants {
            if tenant.deadline().is_some_and(|end| end <= now) {
                tenant.attach_end = None;
                if let Some(peer) = &tenant.peer {
                    peer.shut_down();
                }
                late.push(*id);
            }
        }
        for id in late {
            if self.may_log(id) {
                let limit = self.hello_limit();
                tracing::warn!("tenant {id} is closed: no window after {limit:?}");
            }
        }
    }

    pub(super) fn add_tenant(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        stream: OwnedFd,
        (attach_end, lines): (Option<Instant>, u32),
    ) {
        let token = self.sources.add(Source::Tenant(id));
        match Connection::register(ops, stream, token, true) {
            Ok(peer) => {
                self.tenants.insert(
                    id,
                    Tenant {
                        peer: Some(peer),
                        token,
                        attach_end,
                        window: None,
                        attaching: None,
                        session_limit: 0,
                        numbers: Vec::new(),
                        guests: 0,
                        sessions: 0,
                        log: LogBudget::of_lines(Instant::now()),
                        lines,
                        worker_log: LogBudget::of_workers(Instant::now()),
                        awaits_device: false,
                        leaving: false,
                        ended: Usage::default(),
                        exits: None,
                        owes_exits: false,
                        owes_usage: false,
                        asks_usage: false,
                        asked_usage: None,
                        question: Question::Never,
                    },
                );
            }
            Err((error, stream)) => {
                self.sources.remove(token);
                tracing::error!("a tenant's stream cannot be watched: {error}");
                self.scrubber.close(id, [stream]);
            }
        }
    }

    pub(super) fn tenant_event(&mut self, ops: &mut EventOps<'_>, id: Id, set: EventSet) {
        if let Err(error) = self.serve_tenant(ops, id, set) {
            match error {
                ChannelError::Ended => {
                    if self.let_tenant_leave(ops, id) {
                        return;
                    }
                    tracing::debug!("tenant {id} is gone");
                }
                error if self.may_log(id) => {
                    tracing::warn!("tenant {id} is cut off: {}", wormhole_link::chain(&error));
                }
                _ => {}
            }
            self.end_tenant(ops, id);
        }
    }

    fn serve_tenant(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        set: EventSet,
    ) -> Result<(), ChannelError> {
        let Some(peer) = self.tenant_peer(id) else {
            return Ok(());
        };
        if set.contains(EventSet::OUT) {
            peer.flush(ops)?;
        }
        let token = peer.token();
        let may = !self.is_attaching(id) && self.may_read(id, token);
        let Some(peer) = self.tenant_peer(id) else {
            return Ok(());
        };
        let filled = peer.fill(ops, may, set).map_err(|error| match error {
            // The stream may have contained more than was read.
            ChannelError::Ended => ChannelError::Cut,
            error => error,
        });
        if !filled? {
            return Ok(());
        }
        loop {
            if self.is_attaching(id) {
                return Ok(());
            }
            let Some(peer) = self.tenant_peer(id) else {
                return Ok(());
            };
            let request = match peer.incoming.take()? {
                None => return Ok(()),
                Some(Message::Attach(attach)) => Request::Attach(attach),
                Some(Message::Stream(stream)) => Request::Stream(stream),
                Some(Message::WindowMapped(run)) => Request::Mapped(run),
                Some(Message::AskUsage) => Request::AskUsage,
                Some(Message::Exits(exits)) => Request::Exits(exits),
                Some(Message::FileMemory(memory)) => Request::FileMemory(memory),
                Some(other) => Request::Wrong(other.name()),
            };
            match request {
                Request::Attach(attach) => {
                    let file = peer.incoming.descriptor();
                    self.attach(ops, id, &attach, file)?;
                }
                Request::Stream(stream) => self.add_guest(ops, id, stream)?,
                Request::Mapped(run) => {
                    if let Err(reason) = self.run_shown(ops, id, &run) {
                        if self.may_log(id) {
                            tracing::warn!("tenant {id}: {reason}");
                        }
                        return Err(ChannelError::Cut);
                    }
                }
                Request::AskUsage => self.usage_asked(ops, id)?,
                Request::Exits(exits) => self.exits_reported(ops, id, exits)?,
                Request::FileMemory(memory) => {
                    let file = peer.incoming.descriptor();
                    self.take_file_memory(id, memory, file)?;
                }
                Request::Wrong(name) => {
                    if self.may_log(id) {
                        tracing::warn!("tenant {id} sent {name}, which launchers do not send");
                    }
                    return Err(ChannelError::Cut);
                }
            }
        }
    }

    pub(super) fn tenant_peer(&mut self, id: Id) -> Option<&mut Connection> {
        self.tenants.get_mut(&id)?.peer.as_mut()
    }

    fn is_attaching(&self, id: Id) -> bool {
        let tenant = self.tenants.get(&id);
        tenant.is_some_and(|tenant| tenant.attaching.is_some())
    }

    fn attach(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        attach: &Attach,
        file: Option<OwnedFd>,
    ) -> Result<(), ChannelError> {
        let most = self.service.as_ref().map_or(0, |service| service.window);
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return Ok(());
        };
        let accepted = match &file {
            _ if tenant.window.is_some() => Err("the window is attached already".to_owned()),
            _ if tenant.question != Question::Never => {
                Err("a client that asks for usage has no window".to_owned())
            }
            None => Err("the window's descriptor did not come with it".to_owned()),
            Some(file) => {
                Window::accept(file, attach, most).map_err(|error| wormhole_link::chain(&error))
            }
        };
        match (accepted, file) {
            (Ok(window), Some(file)) => {
                let bytes = window.bytes();
                tenant.attaching = Some((window, attach.session_limit));
                if let Some(peer) = &mut tenant.peer {
                    peer.set_reading(ops, false);
                }
                self.scrubber.write_bootstrap(id, file, bytes);
                Ok(())
            }
            (Ok(_), None) => Ok(()),
            (Err(reason), file) => {
                self.scrubber.close(id, file);
                self.refuse_window(ops, id, &reason)
            }
        }
    }

    /// Takes the memory of a guest's file system. Workers do not get one that is larger than the operator allows.
    fn take_file_memory(
        &mut self,
        id: Id,
        memory: FileMemory,
        file: Option<OwnedFd>,
    ) -> Result<(), ChannelError> {
        let window = self.tenants.get_mut(&id);
        let window = window.and_then(|tenant| tenant.window.as_mut());
        let taken = match (window, &file) {
            (Some(window), Some(file)) => window.take_file_memory(file, memory.bytes),
            (None, _) | (_, None) => Err(WindowError::NoFiles),
        };
        self.scrubber.close(id, file);
        let Err(error) = taken else {
            return Ok(());
        };
        if self.may_log(id) {
            let reason = wormhole_link::chain(&error);
            tracing::warn!("tenant {id} sent memory for files that is not used: {reason}");
        }
        match error {
            WindowError::FilesTooLarge { .. } => Ok(()),
            _ => Err(ChannelError::Cut),
        }
    }

    fn refuse_window(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        reason: &str,
    ) -> Result<(), ChannelError> {
        if self.may_log(id) {
            tracing::warn!("tenant {id}: {reason}");
        }
        let code = Refusal::Protocol as u32;
        self.tell_tenant(ops, id, &Message::Refused { code, reason }, Vec::new())
    }

    /// Handles the result of writing a window's bootstrap.
    pub(super) fn window_written(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        result: io::Result<()>,
    ) {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        let Some((window, session_limit)) = tenant.attaching.take() else {
            return;
        };
        if let Some(peer) = &mut tenant.peer {
            peer.set_reading(ops, true);
        }
        match result {
            Ok(()) => {
                tenant.window = Some(window);
                tenant.session_limit = session_limit;
                tenant.awaits_device = true;
                let lines = tenant.lines;
                self.supervisor.report(&Report::Attached { lines });
            }
            Err(error) => {
                self.scrubber.close(id, window.into_files());
                let reason = format!("the window cannot be written: {error}");
                if self.refuse_window(ops, id, &reason).is_err() {
                    return self.end_tenant(ops, id);
                }
            }
        }
        // Handles the messages received meanwhile.
        self.tenant_event(ops, id, EventSet::empty());
    }

    /// Answers waiting launchers: the supervisor has reported whether the devices work.
    pub(super) fn answer_attached(&mut self, ops: &mut EventOps<'_>) {
        let Some(devices) = &self.devices else {
            return;
        };
        let reason = devices.as_ref().err().cloned();
        let waiting: Vec<Id> = self
            .tenants
            .iter()
            .filter(|(_, tenant)| tenant.awaits_device)
            .map(|(id, _)| *id)
            .collect();
        for id in waiting {
            if let Some(tenant) = self.tenants.get_mut(&id) {
                tenant.awaits_device = false;
            }
            let message = match &reason {
                None => Message::Attached,
                Some(reason) => Message::Refused {
                    code: Refusal::NoDevice as u32,
                    reason,
                },
            };
            if self.tell_tenant(ops, id, &message, Vec::new()).is_err() {
                self.end_tenant(ops, id);
            }
        }
    }

    pub(super) fn tell_tenant(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        message: &Message<'_>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ChannelError> {
        self.check_in_flight(descriptors.len())?;
        let Some(peer) = self.tenant_peer(id) else {
            return Ok(());
        };
        if !descriptors.is_empty() {
            // Updates the count of those that the tenant is charged for.
            peer.underway();
        }
        peer.send(ops, message, descriptors)
    }

    /// Checks that further descriptors may be sent: the tenant's parties have left few unread. The
    /// kernel counts those in flight of all tenants together.
    ///
    /// # Errors
    /// The tenant's parties have too many unread descriptors.
    pub(super) fn check_in_flight(&mut self, more: usize) -> Result<(), ChannelError> {
        if more == 0 {
            return Ok(());
        }
        let most = self.service.as_ref().map_or(0, |service| service.unread);
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let unread: usize = self.peers().map(|peer| peer.unread()).sum();
        if unread + more <= most {
            return Ok(());
        }
        // Asks the sockets.
        let unread: usize = self.peers().map(Connection::underway).sum();
        match unread + more <= most {
            true => Ok(()),
            false => Err(ChannelError::InFlight(unread)),
        }
    }

    /// Returns all streams.
    pub(super) fn peers(&mut self) -> impl Iterator<Item = &mut Connection> {
        let tenants = self.tenants.values_mut();
        let tenants = tenants.filter_map(|tenant| tenant.peer.as_mut());
        let guests = self.guests.values_mut().map(|guest| &mut guest.peer);
        let workers = self.workers.values_mut().map(|worker| &mut worker.peer);
        tenants.chain(guests).chain(workers)
    }

    /// Shuts a tenant's stream down; its end is reported like any other.
    pub(super) fn cut_off(&mut self, id: Id) {
        if let Some(peer) = self.tenant_peer(id) {
            peer.shut_down();
        }
    }

    /// Sends a session's report to its launcher, if that is still connected.
    pub(super) fn send_report(&mut self, ops: &mut EventOps<'_>, id: Id, report: &SessionReport) {
        let text = match text_of(report) {
            Ok(text) => text,
            Err(error) => {
                tracing::error!("a report cannot be written: {error}");
                return;
            }
        };
        let message = Message::SessionReport(&text);
        if let Err(error) = self.tell_tenant(ops, id, &message, Vec::new()) {
            tracing::debug!("tenant {id} does not take its report: {error}");
        }
    }

    /// Handles the end of the launcher's direction: ends its sessions, whose reports are still
    /// sent. Returns false if the direction had ended before, which means that the other one has
    /// ended now too.
    fn let_tenant_leave(&mut self, ops: &mut EventOps<'_>, id: Id) -> bool {
        match self.tenants.get_mut(&id) {
            Some(Tenant {
                leaving: leaving @ false,
                peer: Some(peer),
                ..
            }) => {
                *leaving = true;
                peer.set_reading(ops, false);
            }
            _ => return false,
        }
        self.end_sessions_of(ops, id, "the launcher has closed its stream");
        self.end_idle_tenants(ops);
        true
    }

    /// Handles the end of a launcher: ends its streams and sessions.
    fn end_tenant(&mut self, ops: &mut EventOps<'_>, id: Id) {
        if let Some(tenant) = self.tenants.get_mut(&id) {
            self.sources.remove(tenant.token);
            if let Some(peer) = tenant.peer.take() {
                self.close_connection(ops, id, peer);
            }
        }
        self.end_sessions_of(ops, id, "the launcher is gone");
        self.end_idle_tenants(ops);
    }

    /// Ends a tenant's streams and sessions.
    pub(super) fn end_sessions_of(&mut self, ops: &mut EventOps<'_>, id: Id, why: &str) {
        let guests: Vec<Id> = self
            .guests
            .iter()
            .filter(|(_, guest)| guest.tenant == id)
            .map(|(id, _)| *id)
            .collect();
        for guest in guests {
            self.revoke_guest(ops, guest, why);
        }
    }

    /// Removes tenants that are gone and have no session left.
    pub(super) fn end_idle_tenants(&mut self, ops: &mut EventOps<'_>) {
        let idle: Vec<Id> = self
            .tenants
            .iter()
            .filter(|(id, tenant)| {
                (self.stopping || tenant.leaving || tenant.peer.is_none())
                    && !self.sessions.values().any(|session| session.tenant == **id)
            })
            .map(|(id, _)| *id)
            .collect();
        for id in idle {
            if let Some(mut tenant) = self.tenants.remove(&id) {
                self.sources.remove(tenant.token);
                let left_out = tenant.log.take_left_out() + tenant.worker_log.take_left_out();
                if left_out > 0 {
                    tracing::warn!("{left_out} lines of tenant {id} and its workers were left out");
                }
                self.returning.retain(|_, returning| returning.tenant != id);
                let attaching = tenant.attaching.map(|(window, _)| window);
                let windows = attaching.into_iter().chain(tenant.window);
                self.scrubber
                    .close(id, windows.flat_map(Window::into_files));
                if let Some(mut peer) = tenant.peer {
                    let _ = peer.flush(ops);
                    self.close_connection(ops, id, peer);
                }
            }
        }
    }

    /// Returns the time within which a guest must send its hello, and a launcher attach.
    pub(super) fn hello_limit(&self) -> Duration {
        let service = self.service.as_ref();
        service.map_or(Duration::ZERO, |service| service.hello_limit)
    }

    /// Returns whether to log a line that the tenant or its guests caused.
    pub(super) fn may_log(&mut self, id: Id) -> bool {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return true;
        };
        // Connections cost nothing, so those that never attach a window have few lines each.
        if tenant.window.is_none() {
            let may = tenant.lines > 0;
            tenant.lines = tenant.lines.saturating_sub(1);
            return may;
        }
        match tenant.log.spend(Instant::now()) {
            Verdict::Log => true,
            Verdict::Last => {
                tracing::warn!("tenant {id} causes too many lines: most that follow are left out");
                true
            }
            Verdict::After(count) => {
                tracing::warn!("{count} lines that tenant {id} caused were left out");
                true
            }
            Verdict::Drop => false,
        }
    }

    /// Returns whether the tenant may open another control stream.
    pub(super) fn has_room_for_guest(&self, id: Id) -> bool {
        let guests = self.tenants.get(&id).map_or(0, |tenant| tenant.guests);
        let is_silent = |guest: &&Guest| guest.tenant == id && guest.is_silent();
        let silent = || self.guests.values().filter(is_silent).count();
        guests < MAX_GUESTS
            && (guests < MAX_SILENT_GUESTS || silent() < MAX_SILENT_GUESTS)
            && self.may_hold(id, STREAM)
    }

    /// Returns whether the tenant may hold `more` further descriptors.
    pub(super) fn may_hold(&self, id: Id, more: usize) -> bool {
        self.held_by(id) + more <= self.descriptors.for_tenants()
    }

    /// Returns the number of descriptors that a tenant uses, whether it is still connected or not.
    pub(super) fn held_by(&self, id: Id) -> usize {
        self.tenants.get(&id).map_or(0, Tenant::held)
            + self.scrubber.held_for(id)
            + self.shares.held_for(id)
    }
}

/// Encodes a report. A worker that counts messages that do not exist could make it longer than a
/// control message: then its counts by message are left out.
fn text_of(report: &SessionReport) -> serde_json::Result<String> {
    let text = serde_json::to_string(report)?;
    if text.len() <= MAX_CONTROL_BODY {
        return Ok(text);
    }
    serde_json::to_string(&SessionReport {
        messages: BTreeMap::new(),
        ..report.clone()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_with_any_number_of_messages_fits_into_a_control_message() {
        let report = |messages: u64| SessionReport {
            session: "7.1".to_owned(),
            messages: (0..messages).map(|id| (id.to_string(), id)).collect(),
            end: "the guest process ended".to_owned(),
            ..SessionReport::default()
        };
        for messages in [0, 100, 5000] {
            let text = text_of(&report(messages)).unwrap();
            assert!(text.len() <= MAX_CONTROL_BODY, "{} bytes", text.len());
            let read: SessionReport = serde_json::from_str(&text).unwrap();
            assert_eq!(read.end, "the guest process ended");
            let left = if messages == 5000 { 0 } else { messages };
            assert_eq!(read.messages.len() as u64, left);
        }
    }
}
