//! Acceptor: accepts tenants' connections, and refuses those of users who may not attach or have
//! too many.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events};
use wormhole_link::log_budget::{LogBudget, Verdict};
use wormhole_ring::control::Refusal;

use super::Supervisor;
use super::descriptors::REFUSED;
use super::listener::{Accepted, Listener};
use super::tenant_processes::LINES;

/// Number of connections accepted in a turn.
const ACCEPTED: usize = 2;
/// Time until connections that could not be accepted are tried again.
const AGAIN: Duration = Duration::from_millis(100);
/// Time that a connection of a user with too many tenants waits for the end of one of them. A launcher that has ended
/// counts until the processes that served it have ended too.
const END_OF_ANOTHER: Duration = Duration::from_secs(2);
/// Largest number of such connections of one user.
const POSTPONED: usize = 4;

/// Connection of a user with too many tenants.
#[derive(Debug)]
struct Postponed {
    stream: OwnedFd,
    user: u32,
    until: Instant,
}

/// Listener and state of accepting.
#[derive(Debug)]
pub(super) struct Acceptor {
    pub listener: Option<Listener>,
    /// Token of the listener in the event loop.
    pub token: u32,
    /// Time to accept tenants that wait, because they could not be accepted. The listener is not
    /// watched until then.
    pub again: Option<Instant>,
    /// Whether that has been logged since no tenant was waiting.
    said_so: bool,
    /// Log budget for connections that are refused or have no window.
    log: LogBudget,
    /// Lines that are left of those taken from the budget for a connection and not used.
    lines: u32,
    /// Connections that wait for the end of another tenant of their user, in the order of their arrival.
    postponed: Vec<Postponed>,
}

impl Acceptor {
    pub fn new(listener: Option<Listener>) -> Self {
        Self {
            listener,
            token: 0,
            again: None,
            said_so: false,
            log: LogBudget::of_lines(Instant::now()),
            lines: 0,
            postponed: Vec::new(),
        }
    }

    /// Returns the number of connections that wait for the end of another tenant of their user: of one user or of all.
    pub fn postponed(&self, user: Option<u32>) -> usize {
        let is_of = |one: &&Postponed| user.is_none_or(|user| one.user == user);
        self.postponed.iter().filter(is_of).count()
    }

    /// Takes the connections that wait for the end of another tenant, with their users.
    pub fn take_postponed(&mut self) -> impl Iterator<Item = (u32, OwnedFd)> + use<> {
        let postponed = std::mem::take(&mut self.postponed);
        postponed.into_iter().map(|one| (one.user, one.stream))
    }

    /// Returns the next time at which something is due.
    pub fn deadline(&self) -> Option<Instant> {
        let postponed = self.postponed.iter().map(|one| one.until);
        postponed.chain(self.again).min()
    }

    /// Notes that tenants wait, and logs the first reason since none was waiting.
    fn keep_waiting(&mut self, ops: &mut EventOps<'_>, why: &str) {
        self.again = Some(Instant::now() + AGAIN);
        self.watch(ops, EventSet::empty());
        if !std::mem::replace(&mut self.said_so, true) {
            tracing::warn!("tenants are kept waiting: {why}");
        }
    }

    fn watch(&self, ops: &mut EventOps<'_>, set: EventSet) {
        if let Some(listener) = &self.listener
            && let Err(error) = ops.modify(Events::with_data(listener, self.token, set))
        {
            tracing::error!("the event loop: {error}");
        }
    }

    /// Takes the lines that a connection may cause before it has a window, as far as there are any.
    pub fn take_lines(&mut self) -> u32 {
        if self.lines >= LINES {
            self.lines -= LINES;
            return LINES;
        }
        match self.log.spend_all(LINES, Instant::now()) {
            Verdict::Log => LINES,
            Verdict::Last => {
                tracing::warn!(
                    "connecting without a window causes too many lines: most that follow are left out"
                );
                LINES
            }
            Verdict::After(count) => {
                tracing::warn!("{count} connections without a window or refused were not logged");
                LINES
            }
            Verdict::Drop => 0,
        }
    }

    /// Takes back the lines of a connection that has a window now.
    pub fn give_lines_back(&mut self, lines: u32) {
        self.lines = (self.lines + lines).min(64);
    }

    fn log_refused(&mut self, reason: &str) {
        match self.log.spend(Instant::now()) {
            Verdict::Log => tracing::warn!("a tenant is refused: {reason}"),
            Verdict::Last => {
                tracing::warn!("a tenant is refused: {reason}; most that follow are not logged");
            }
            Verdict::After(count) => {
                tracing::warn!(
                    "a tenant is refused: {reason}; {count} connections before were not logged"
                );
            }
            Verdict::Drop => {}
        }
    }
}

impl Supervisor {
    /// Accepts a few waiting tenants. The others have their turn later: connections may arrive
    /// faster than they are accepted, and would keep the loop from all tenants' processes.
    pub(super) fn accept(&mut self, ops: &mut EventOps<'_>) {
        for _ in 0..ACCEPTED {
            let Some(listener) = &self.acceptor.listener else {
                return;
            };
            // An event of the round in which the supervisor was stopped.
            if self.stopping {
                return;
            }
            let all = self.holders(None);
            let why = if self.refusals.here() >= REFUSED {
                "connections that were refused are being closed".to_owned()
            } else if self.descriptors.allow(0, all) {
                match listener.accept() {
                    Ok(Accepted::Tenant(stream, user)) => {
                        self.admit(ops, stream, user);
                        continue;
                    }
                    Ok(Accepted::Stranger(stream, user)) => {
                        let reason = format!(
                            "user {user} may not attach: the supervisor serves root, its own user and those that \
                             --tenant-user names"
                        );
                        self.refuse_connection(stream, None, Refusal::NoDevice, &reason);
                        continue;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.acceptor.said_so = false;
                        return;
                    }
                    Err(error) if passes(&error) => continue,
                    Err(error) => error.to_string(),
                }
            } else {
                "others hold the descriptors that there are".to_owned()
            };
            return self.acceptor.keep_waiting(ops, &why);
        }
    }

    /// Accepts no tenant any more. Clients that wait see the end of the listener.
    pub(super) fn stop_accepting(&mut self, ops: &mut EventOps<'_>) {
        self.acceptor.again = None;
        self.acceptor.watch(ops, EventSet::empty());
    }

    /// Accepts tenants that were kept waiting.
    pub(super) fn accept_again(&mut self, ops: &mut EventOps<'_>, now: Instant) {
        if self.acceptor.again.take_if(|again| *again <= now).is_some() {
            self.acceptor.watch(ops, EventSet::IN);
            self.accept(ops);
        }
    }

    /// Adds the tenant of a permitted user's connection, unless the user holds too many descriptors. If the user has too
    /// many tenants, the connection waits for the end of one.
    pub(super) fn admit(&mut self, ops: &mut EventOps<'_>, stream: OwnedFd, user: u32) {
        let (of_user, all) = (self.holders(Some(user)), self.holders(None));
        if !self.descriptors.allow(of_user, all) {
            let reason = format!("user {user} has as many descriptors as are left to others");
            return self.refuse_connection(stream, Some(user), Refusal::Quota, &reason);
        }
        let before = self.acceptor.postponed(Some(user));
        if before == 0 && self.has_room_for_tenant(user) {
            self.add_tenant(ops, stream, user, true);
        } else if before < POSTPONED {
            let until = Instant::now() + END_OF_ANOTHER;
            let one = Postponed {
                stream,
                user,
                until,
            };
            self.acceptor.postponed.push(one);
        } else {
            self.refuse_too_many(stream, user);
        }
    }

    fn refuse_too_many(&mut self, stream: OwnedFd, user: u32) {
        let reason = self.too_many_tenants(user);
        self.refuse_connection(stream, Some(user), Refusal::Quota, &reason);
    }

    /// Adds the tenants of postponed connections for which there is room now, and refuses those that have waited for too
    /// long.
    pub(super) fn admit_postponed(&mut self, ops: &mut EventOps<'_>, now: Instant) {
        for one in std::mem::take(&mut self.acceptor.postponed) {
            let user = one.user;
            if self.has_room_for_tenant(user) {
                self.add_tenant(ops, one.stream, user, true);
            } else if one.until <= now {
                self.refuse_too_many(one.stream, user);
            } else {
                self.acceptor.postponed.push(one);
            }
        }
    }

    /// Has another process refuse a connection.
    fn refuse_connection(
        &mut self,
        stream: OwnedFd,
        user: Option<u32>,
        refusal: Refusal,
        reason: &str,
    ) {
        self.acceptor.log_refused(reason);
        self.refusals.refuse(user, stream, refusal, reason);
        self.order_refusers();
    }
}

/// Returns whether accept failed for a tenant that is gone, so that the next can be accepted.
fn passes(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
    )
}
