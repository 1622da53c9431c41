//! Control streams of guest processes.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use event_manager::{EventOps, EventSet};
use wormhole_link::channel::ChannelError;
use wormhole_ring::bootstrap;
use wormhole_ring::control::{
    ArenaRun, ArenaWithin, Message, Observe, ProcessNumber, Refusal, Stream,
};
use wormhole_ring::status::EndCause;

use super::connection::{self, Connection};
use super::observers::Observer;
use super::tenant_loop::{Source, TenantLoop};
use super::{Id, REVOKED_RESULT, arena, environment};

/// A control stream.
#[derive(Debug)]
pub(super) struct Guest {
    pub tenant: Id,
    /// Whether descriptors can be passed over the stream.
    pub local: bool,
    pub peer: Connection,
    token: u32,
    /// Session of the guest, from the hello on.
    pub session: Option<Id>,
    /// State of a guest that observes, which has no session.
    pub observer: Option<Observer>,
    /// Deadline for the hello or the first `Observe`. None once it no longer applies.
    hello_end: Option<Instant>,
}

impl Guest {
    /// Returns the deadline for the first message, if none has arrived.
    pub fn deadline(&self) -> Option<Instant> {
        self.hello_end.filter(|_| self.is_silent())
    }

    /// Returns whether no message has arrived yet.
    pub fn is_silent(&self) -> bool {
        self.session.is_none() && self.observer.is_none()
    }
}

/// Message of a guest, as an owned value.
enum Request {
    Hello {
        version: u32,
        hash: u64,
        features: u64,
        environment: String,
    },
    Mapped,
    Unmappable,
    Arena(ArenaWithin),
    ArenaReturn(ArenaRun),
    Doorbell,
    Process(ProcessNumber),
    Observe(Observe),
    Wrong(&'static str),
}

/// Reason to close a control stream.
#[derive(Debug, thiserror::Error)]
pub(super) enum GuestError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("it sent {0}, which guests do not send")]
    Direction(&'static str),
    #[error("it sent {0} before its session was granted")]
    Early(&'static str),
    #[error("it sent the hello message twice")]
    SecondHello,
    #[error("it asked for facts before its launcher attached a window")]
    NoWindow,
    #[error("it asked again before it was answered")]
    Impatient,
    #[error("it returned {count} segments from {first}, which are no extent of its arena")]
    Return { first: u32, count: u32 },
    #[error("its worker's stream failed")]
    Worker,
    /// The guest has received the refusal.
    #[error("{0}")]
    Refused(String),
}

impl TenantLoop {
    /// Answers a launcher that requests a control stream: sends it the guest's end of a new one, or
    /// a refusal.
    ///
    /// The event loop polls and reads only sockets that it has made or accepted itself. Another
    /// process with a copy of its end could change the socket's options, so that a read frees a
    /// byte out of band and closes the descriptors beside it, or hold the socket's lock.
    ///
    /// # Errors
    /// The answer cannot be sent.
    pub(super) fn add_guest(
        &mut self,
        ops: &mut EventOps<'_>,
        tenant: Id,
        stream: Stream,
    ) -> Result<(), ChannelError> {
        match self.open_stream(ops, tenant, stream.local != 0) {
            Ok((far, copy)) => {
                let sent = self.tell_tenant(ops, tenant, &Message::Stream(stream), vec![copy]);
                // The launcher may have put it into any number of epoll sets already, which the
                // last close removes.
                self.scrubber.close(tenant, [far]);
                sent
            }
            Err(reason) => {
                let reason = format!("no control stream: {reason}");
                if self.may_log(tenant) {
                    tracing::warn!("tenant {tenant}: {reason}");
                }
                let refused = Message::Refused {
                    code: Refusal::Quota as u32,
                    reason: &reason,
                };
                self.tell_tenant(ops, tenant, &refused, Vec::new())
            }
        }
    }

    /// Opens a control stream. Returns the guest's end, and a copy of it.
    fn open_stream(
        &mut self,
        ops: &mut EventOps<'_>,
        tenant: Id,
        local: bool,
    ) -> Result<(OwnedFd, OwnedFd), String> {
        if self.stopping {
            return Err("the supervisor ends".to_owned());
        }
        if !self.has_room_for_guest(tenant) {
            return Err("the tenant has too many".to_owned());
        }
        let (near, far) = UnixStream::pair().map_err(|error| error.to_string())?;
        let far = OwnedFd::from(far);
        let copy = far.try_clone().map_err(|error| error.to_string())?;
        let id = self.id();
        let token = self.sources.add(Source::Guest(id));
        let peer = Connection::register(ops, near.into(), token, false).map_err(|(error, _)| {
            self.sources.remove(token);
            error.to_string()
        })?;
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.guests += 1;
        }
        let hello_end = Instant::now() + self.hello_limit();
        self.guests.insert(
            id,
            Guest {
                tenant,
                local,
                peer,
                token,
                session: None,
                observer: None,
                hello_end: Some(hello_end),
            },
        );
        self.set_deadline(hello_end);
        Ok((far, copy))
    }

    pub(super) fn guest_event(&mut self, ops: &mut EventOps<'_>, id: Id, set: EventSet) {
        let Err(error) = self.serve_guest(ops, id, set) else {
            return;
        };
        let name = self.guest_name(id);
        let logs = match (&error, self.guests.get(&id).map(|guest| guest.tenant)) {
            (GuestError::Channel(ChannelError::Ended), _) | (_, None) => true,
            (_, Some(tenant)) => self.may_log(tenant),
        };
        let why = match error {
            GuestError::Channel(ChannelError::Ended) => {
                tracing::debug!("{name}: its guest process is gone");
                "the guest process ended".to_owned()
            }
            GuestError::Refused(reason) => {
                if logs {
                    tracing::info!("{name} is refused: {reason}");
                }
                reason
            }
            error => {
                let why = format!(
                    "the guest broke the protocol: {}",
                    wormhole_link::chain(&error)
                );
                if logs {
                    tracing::warn!("{name}: {why}");
                }
                why
            }
        };
        self.end_guest(ops, id, &why, None);
    }

    /// Closes the streams whose hello did not arrive in time.
    pub(super) fn end_late_guests(&mut self, now: Instant) {
        let mut late = Vec::new();
        for (id, guest) in &mut self.guests {
            if guest.deadline().is_some_and(|end| end <= now) {
                guest.hello_end = None;
                guest.peer.shut_down();
                late.push((*id, guest.tenant));
            }
        }
        for (id, tenant) in late {
            if self.may_log(tenant) {
                let name = self.guest_name(id);
                tracing::warn!("{name} is closed: no hello after {:?}", self.hello_limit());
            }
        }
    }

    /// Returns the name of a control stream in the log.
    fn guest_name(&self, id: Id) -> String {
        let session = self
            .guests
            .get(&id)
            .and_then(|guest| guest.session)
            .and_then(|session| self.sessions.get(&session));
        match (session, self.guests.get(&id)) {
            (Some(session), _) => format!("tenant {} {}", session.tenant, session.id),
            (None, Some(guest)) => format!("tenant {} control stream {id}", guest.tenant),
            (None, None) => format!("control stream {id}"),
        }
    }

    fn serve_guest(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        set: EventSet,
    ) -> Result<(), GuestError> {
        let Some(guest) = self.guests.get_mut(&id) else {
            return Ok(());
        };
        if set.contains(EventSet::OUT) {
            guest.peer.flush(ops)?;
        }
        let (tenant, token) = (guest.tenant, guest.peer.token());
        let may = self.may_read(tenant, token);
        let Some(guest) = self.guests.get_mut(&id) else {
            return Ok(());
        };
        if !guest.peer.fill(ops, may, set)? {
            return Ok(());
        }
        loop {
            let Some(guest) = self.guests.get_mut(&id) else {
                return Ok(());
            };
            let request = match guest.peer.incoming.take()? {
                None => return Ok(()),
                Some(Message::Hello {
                    bootstrap_version,
                    protocol_hash,
                    features,
                    environment,
                }) => Request::Hello {
                    version: bootstrap_version,
                    hash: protocol_hash,
                    features,
                    environment: environment.to_owned(),
                },
                Some(Message::Mapped) => Request::Mapped,
                Some(Message::Unmappable) => Request::Unmappable,
                Some(Message::ArenaRequest(request)) => Request::Arena(arena::anywhere(request)),
                Some(Message::ArenaWithin(request)) => Request::Arena(request),
                Some(Message::ArenaReturn(run)) => Request::ArenaReturn(run),
                // However often a guest rings, its worker checks the ring once.
                Some(Message::Doorbell) => {
                    guest.peer.incoming.skip_repeats();
                    Request::Doorbell
                }
                Some(Message::Process(process)) => Request::Process(process),
                Some(Message::Observe(observe)) => Request::Observe(observe),
                Some(other) => Request::Wrong(other.name()),
            };
            let session = guest.session;
            self.guest_request(ops, id, session, request)?;
        }
    }

    /// Executes a guest's request.
    fn guest_request(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        session: Option<Id>,
        request: Request,
    ) -> Result<(), GuestError> {
        let observes = self
            .guests
            .get(&id)
            .is_some_and(|guest| guest.observer.is_some());
        match (session, request) {
            (None, Request::Observe(observe)) => self.observe(ops, id, observe),
            (None, request) if observes => Err(GuestError::Direction(request.name())),
            (
                None,
                Request::Hello {
                    version,
                    hash,
                    features,
                    environment,
                },
            ) => self.hello(ops, id, version, hash, features, &environment),
            (Some(_), Request::Hello { .. }) => Err(GuestError::SecondHello),
            (_, Request::Wrong(name)) => Err(GuestError::Direction(name)),
            // The guest cannot know yet that its session is over; it will read so in its status
            // word. A request for arena still needs an answer.
            (Some(session), Request::Arena(request)) if self.is_dying(session) => {
                Ok(self.deny_dying(ops, id, session, request.id)?)
            }
            (Some(session), _) if self.is_dying(session) => Ok(()),
            (session, request) => {
                let granted = session.filter(|session| self.is_granted(*session));
                let Some(session) = granted else {
                    return Err(GuestError::Early(request.name()));
                };
                match request {
                    Request::Mapped => {}
                    Request::Unmappable => {
                        let reason =
                            "the address bands of the session are taken in the guest process";
                        return Err(self.refuse(ops, id, Refusal::Bands, reason.to_owned()));
                    }
                    Request::Arena(request) => {
                        self.request_arena(ops, id, session, &request)?;
                    }
                    Request::ArenaReturn(run) => {
                        self.return_arena(ops, session, &run)?;
                    }
                    Request::Process(process) => self.name_process(session, process.pid),
                    Request::Doorbell => self.ring_doorbell(ops, session)?,
                    Request::Observe(_) | Request::Hello { .. } | Request::Wrong(_) => {
                        return Err(GuestError::Direction(request.name()));
                    }
                }
                Ok(())
            }
        }
    }

    fn hello(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        version: u32,
        hash: u64,
        features: u64,
        environment: &str,
    ) -> Result<(), GuestError> {
        self.check_version(ops, id, version)?;
        if let Err(reason) = self.check_protocol(hash) {
            return Err(self.refuse(ops, id, Refusal::Version, reason));
        }
        let environment = environment::passed_on(environment);
        match self.begin_session(id, hash, features, &environment) {
            Ok(()) => Ok(()),
            Err((refusal, reason)) => Err(self.refuse(ops, id, refusal, reason)),
        }
    }

    /// Checks that an installed worker speaks a guest's protocol.
    ///
    /// # Errors
    /// Returns the refusal, which names both protocols.
    fn check_protocol(&self, hash: u64) -> Result<(), String> {
        let hashes = self.service.iter().flat_map(|service| &service.hashes);
        if hashes.clone().any(|known| *known == hash) {
            return Ok(());
        }
        let known = hashes.map(|hash| format!("{hash:016x}"));
        Err(format!(
            "the guest speaks protocol {hash:016x}, the installed workers speak {}",
            known.collect::<Vec<_>>().join(", ")
        ))
    }

    pub(super) fn check_version(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        version: u32,
    ) -> Result<(), GuestError> {
        if version == bootstrap::VERSION {
            return Ok(());
        }
        let reason = format!(
            "the guest speaks version {version} of the control channel, the backend version {}",
            bootstrap::VERSION
        );
        Err(self.refuse(ops, id, Refusal::Version, reason))
    }

    /// Sends a guest a refusal, and returns the error to close its stream with.
    pub(super) fn refuse(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        refusal: Refusal,
        reason: String,
    ) -> GuestError {
        if let Some(guest) = self.guests.get_mut(&id) {
            let message = Message::Refused {
                code: refusal as u32,
                reason: &reason,
            };
            if let Err(error) = guest.peer.send(ops, &message, Vec::new()) {
                tracing::debug!("a refusal was not taken: {error}");
            }
        }
        GuestError::Refused(reason)
    }

    /// Closes a control stream and ends its session.
    pub(super) fn end_guest(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        why: &str,
        status: Option<(u32, EndCause)>,
    ) {
        let Some(mut guest) = self.guests.remove(&id) else {
            return;
        };
        if let Some(tenant) = self.tenants.get_mut(&guest.tenant) {
            tenant.guests -= 1;
        }
        self.sources.remove(guest.token);
        guest.peer.forget(ops);
        let (stream, mut others) = guest.peer.into_parts();
        let ending = guest.session.and_then(|session| {
            self.sessions.get_mut(&session)?.guest = None;
            self.end_session(ops, session, why, status);
            self.ending(session)
        });
        match ending {
            Some(ending) => ending.stream = Some(stream),
            None => {
                connection::shut_down(&stream);
                others.push(stream);
            }
        }
        self.scrubber.close(guest.tenant, others);
    }

    /// Disconnects a guest for a reason that lies outside of it.
    pub(super) fn revoke_guest(&mut self, ops: &mut EventOps<'_>, id: Id, why: &str) {
        self.end_guest(ops, id, why, Some((REVOKED_RESULT, EndCause::Revoked)));
    }
}

impl Request {
    fn name(&self) -> &'static str {
        match self {
            Self::Hello { .. } => "Hello",
            Self::Mapped => "Mapped",
            Self::Unmappable => "Unmappable",
            Self::Arena(_) => "ArenaRequest",
            Self::ArenaReturn(_) => "ArenaReturn",
            Self::Doorbell => "Doorbell",
            Self::Process(_) => "Process",
            Self::Observe(_) => "Observe",
            Self::Wrong(name) => name,
        }
    }
}
