//! Acceptor: accepts tenants' connections, and refuses those of users who may not attach or have
//! too many.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use event_manager::EventOps;
use wormhole_link::channel::Outgoing;
use wormhole_ring::control::{Message, Refusal};

use super::Supervisor;
use super::descriptors::{self, Held, TENANT};
use super::listener::{self, Accepted, Listener};
use super::log_budget::{LogBudget, Verdict};

/// Number of connections accepted in a turn.
const ACCEPTED: usize = 2;

/// Listener and state of accepting.
#[derive(Debug)]
pub(super) struct Acceptor {
    pub listener: Option<Listener>,
    /// Token of the listener in the event loop.
    pub token: u32,
    /// Whether tenants may be waiting that could not be accepted.
    pub keeps_tenants_waiting: bool,
    /// Whether that has been logged since no tenant was waiting.
    said_so: bool,
    /// Log budget for connections that are refused or have no window.
    pub log: LogBudget,
}

impl Acceptor {
    pub fn new(listener: Option<Listener>) -> Self {
        Self {
            listener,
            token: 0,
            keeps_tenants_waiting: false,
            said_so: false,
            log: LogBudget::of_lines(Instant::now()),
        }
    }

    /// Notes that tenants wait, and logs the first reason since none was waiting.
    fn keep_waiting(&mut self, why: &str) {
        self.keeps_tenants_waiting = true;
        if !std::mem::replace(&mut self.said_so, true) {
            tracing::warn!("tenants are kept waiting: {why}");
        }
    }

    fn log_refused(&mut self, reason: &str) {
        match self.log.spend(Instant::now()) {
            Verdict::Log => tracing::warn!("a tenant is refused: {reason}"),
            Verdict::Last => {
                tracing::warn!("a tenant is refused: {reason}; most that follow are not logged");
            }
            Verdict::Drop => {}
        }
    }
}

impl Supervisor {
    /// Accepts a few waiting tenants. The others have their turn later: connections may arrive
    /// faster than they are accepted, and would keep the loop from all other streams.
    pub(super) fn accept(&mut self, ops: &mut EventOps<'_>) {
        self.acceptor.keeps_tenants_waiting = false;
        for _ in 0..ACCEPTED {
            let Some(listener) = &self.acceptor.listener else {
                return;
            };
            let all = self.held_by_all();
            let anybody = Held {
                all,
                ..Held::default()
            };
            let kept = self.descriptors.for_tenants();
            let why = if !self.scrubber.may_refuse(descriptors::REFUSED, kept) {
                "connections that were refused are being closed".to_owned()
            } else if self.descriptors.allow(anybody, TENANT) {
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
            return self.acceptor.keep_waiting(&why);
        }
        self.turns.add(self.acceptor.token);
    }

    /// Adds the tenant of a permitted user's connection, unless the user has too many.
    fn admit(&mut self, ops: &mut EventOps<'_>, stream: OwnedFd, user: u32) {
        let held = Held {
            tenant: 0,
            user: self.held_by_user(user),
            all: self.held_by_all(),
        };
        let too_many = self.too_many_tenants(user).or_else(|| {
            let may = self.descriptors.allow(held, TENANT);
            (!may).then(|| format!("user {user} has as many descriptors as are left to others"))
        });
        if let Some(reason) = too_many {
            return self.refuse_connection(stream, Some(user), Refusal::Quota, &reason);
        }
        let end = Instant::now() + self.hello_limit;
        self.set_deadline(end);
        self.add_tenant(ops, stream, user, Some(end));
    }

    /// Sends the refusal, as far as the socket takes it at once, and closes the connection.
    fn refuse_connection(
        &mut self,
        stream: OwnedFd,
        user: Option<u32>,
        refusal: Refusal,
        reason: &str,
    ) {
        let refused = Message::Refused {
            code: refusal as u32,
            reason,
        };
        let _ = Outgoing::default().send(&stream, &refused, Vec::new());
        self.acceptor.log_refused(reason);
        // After the shutdown no further data can arrive in it.
        let _ = rustix::net::shutdown(&stream, rustix::net::Shutdown::Both);
        if !listener::has_no_descriptors(&stream) {
            self.scrubber.refuse(user, stream);
        }
    }
}

/// Returns whether accept failed for a tenant that is gone, so that the next can be accepted.
fn passes(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
    )
}
