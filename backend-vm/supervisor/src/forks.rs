//! Processes that are forked from the spawner: those that serve tenants, scrubbers, and those that
//! refuse connections.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use event_manager::EventOps;
use wormhole_sandbox::Ending;

use super::pair::{End, Order};
use super::process_logs::Owner;
use super::spawner::{Process, Role};
use super::tenant_processes::{State, TenantProcess};
use super::{Id, Supervisor};

/// Time until a process that could not be forked is ordered again.
const AGAIN: Duration = Duration::from_millis(100);

/// A process that was forked or is going to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fork {
    /// Waits for the next tenant of a user, which will have this number.
    Idle(Id, u32),
    Tenant(Id),
    Scrubber(Id),
    Refuser,
}

/// Processes that were forked or are going to be, by ticket.
#[derive(Debug, Default)]
pub(super) struct Forks {
    all: BTreeMap<u64, Fork>,
    /// Processes that wait for a tenant of a user.
    pub idle: Vec<(Id, u32, Process, End)>,
    /// User whose tenant got the last process; at first the supervisor's own.
    last_user: u32,
    /// Users whose last process could not be forked or has ended, and the time to order their next one.
    again: BTreeMap<u32, Instant>,
    /// Whether the last process that refuses connections could not be forked.
    lacks_refuser: bool,
}

impl Forks {
    pub fn new() -> Self {
        Self {
            last_user: rustix::process::geteuid().as_raw(),
            ..Self::default()
        }
    }

    /// Orders no process for a user for a while. One that has too little memory for another process holds up itself alone.
    fn pause(&mut self, user: u32) {
        self.again
            .entry(user)
            .or_insert_with(|| Instant::now() + AGAIN);
    }

    /// Returns the time at which a pause ends, if there is one.
    pub fn deadline(&self) -> Option<Instant> {
        self.again.values().min().copied()
    }

    /// Ends the pauses that are over. Returns whether there were any.
    pub fn resume(&mut self, now: Instant) -> bool {
        let pauses = self.again.len();
        self.again.retain(|_, again| *again > now);
        self.again.len() < pauses
    }
}

impl Supervisor {
    /// Gives connections to idle processes, and orders more of these: one for each user with a waiting connection, and
    /// one for the next connection of the user who was the last to connect. A process runs in its user's cgroup from its
    /// start, so it waits for that user alone.
    pub(super) fn serve_waiting(&mut self, ops: &mut EventOps<'_>) {
        while let Some((next, idle)) = self.next_waiting() {
            let (id, _, process, end) = self.forks.idle.swap_remove(idle);
            if end.report() != Ok(None) {
                // It has ended, which the spawner reports as well.
                process.kill();
                continue;
            }
            let waiting = self.waiting.remove(next);
            self.forks.last_user = waiting.user;
            self.forks.all.insert(process.ticket(), Fork::Tenant(id));
            self.serve(ops, id, waiting, (Some(process), end));
        }
        if self.stopping {
            return;
        }
        let mut users: BTreeSet<u32> = self.waiting.iter().map(|one| one.user).collect();
        if self.acceptor.listener.is_some() {
            users.insert(self.forks.last_user);
        }
        for fork in self.forks.all.values() {
            if let Fork::Idle(_, user) = fork {
                users.remove(user);
            }
        }
        users.retain(|user| !self.forks.again.contains_key(user));
        for user in users {
            let tenant = self.id();
            self.fork(Role::Tenant { tenant, user }, Fork::Idle(tenant, user));
        }
    }

    /// Returns the connection that gets the next process, and the process. Users take turns.
    fn next_waiting(&self) -> Option<(usize, usize)> {
        let last = self.forks.last_user;
        let idle = |user| self.forks.idle.iter().position(|(_, of, ..)| *of == user);
        let waiting = self.waiting.iter().enumerate();
        let ready = waiting.filter_map(|(index, one)| Some((one.user, index, idle(one.user)?)));
        let next = ready.min_by_key(|(user, index, _)| (*user <= last, *user, *index));
        next.map(|(_, index, idle)| (index, idle))
    }

    fn fork(&mut self, role: Role, fork: Fork) -> Option<u64> {
        let ticket = self.pool.starts.spawner_mut().fork_process(role)?;
        self.forks.all.insert(ticket, fork);
        Some(ticket)
    }

    /// Returns whether a process that waits for a tenant has this number.
    pub(super) fn is_reserved(&self, id: Id) -> bool {
        let mut forks = self.forks.all.values();
        forks.any(|fork| matches!(fork, Fork::Idle(of, _) if *of == id))
    }

    pub(super) fn fork_scrubber(&mut self, id: Id) {
        // It belongs where its tenant's loop runs.
        let is_apart = self.acceptor.listener.is_some();
        let role = Role::Scrubber(is_apart.then_some(id));
        let ticket = self.fork(role, Fork::Scrubber(id));
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        match ticket {
            Some(ticket) => _ = tenant.scrubbers.insert(ticket, None),
            None => {
                let reason = "the process that starts workers has ended".to_owned();
                tenant.order(&Order::NoScrubber(reason));
            }
        }
    }

    /// Orders processes that refuse connections.
    pub(super) fn order_refusers(&mut self) {
        let (forks, spawner) = (&mut self.forks, self.pool.starts.spawner_mut());
        self.refusals.order(|| {
            let ticket = spawner.fork_process(Role::Refuser)?;
            forks.all.insert(ticket, Fork::Refuser);
            Some(ticket)
        });
    }

    /// Handles a process that was forked.
    pub(super) fn forked(
        &mut self,
        ops: &mut EventOps<'_>,
        ticket: u64,
        pid: i32,
        (socket, log): (Option<OwnedFd>, Option<OwnedFd>),
    ) {
        let process = self.pool.starts.spawner().process(ticket, pid);
        let Some(socket) = socket else {
            process.kill();
            return self.not_forked(ticket, "no descriptor is left for its socket");
        };
        match self.forks.all.get(&ticket) {
            Some(Fork::Idle(id, user)) => {
                let (id, user) = (*id, *user);
                let end = End::new(socket);
                self.forks.idle.push((id, user, process, end));
                if let Some(log) = log {
                    let owner = Owner { tenant: id, user };
                    self.add_process_log(ops, (ticket, owner), log);
                }
                self.serve_waiting(ops);
            }
            Some(Fork::Scrubber(id)) => {
                if let Some(tenant) = self.tenants.get_mut(id) {
                    tenant.scrubbers.insert(ticket, Some(pid));
                    if let Some(end) = tenant.end() {
                        end.give(&Order::Scrubber { pid }, vec![socket]);
                    }
                }
            }
            Some(Fork::Refuser) => {
                self.forks.lacks_refuser = false;
                self.refusals.add(ticket, socket);
            }
            Some(Fork::Tenant(_)) | None => {}
        }
    }

    /// Handles the failure to fork a process.
    pub(super) fn not_forked(&mut self, ticket: u64, reason: &str) {
        let Some(fork) = self.forks.all.remove(&ticket) else {
            return;
        };
        let line = format!("{fork} cannot be forked: {reason}");
        match fork {
            // A user can lack room for as long as it likes.
            Fork::Idle(tenant, user) => self.pass_on_error(Owner { tenant, user }, &line),
            Fork::Tenant(id) | Fork::Scrubber(id) => self.pass_on_error(self.owner(id), &line),
            Fork::Refuser if std::mem::replace(&mut self.forks.lacks_refuser, true) => {}
            Fork::Refuser => tracing::error!("{line}"),
        }
        match fork {
            Fork::Idle(id, user) => {
                self.remove_cgroup(id);
                self.forks.pause(user);
            }
            Fork::Tenant(id) => self.remove_cgroup(id),
            Fork::Scrubber(id) => {
                if let Some(tenant) = self.tenants.get_mut(&id) {
                    tenant.scrubbers.remove(&ticket);
                    tenant.order(&Order::NoScrubber(reason.to_owned()));
                }
                self.forget_tenant(id);
            }
            Fork::Refuser => self.refusals.failed(ticket),
        }
    }

    /// Handles the end of a process that was forked.
    pub(super) fn fork_ended(
        &mut self,
        ops: &mut EventOps<'_>,
        ticket: u64,
        (ending, out_of_memory): (Ending, bool),
    ) {
        let Some(fork) = self.forks.all.remove(&ticket) else {
            return;
        };
        // Its last lines may give the reason.
        self.end_process_log(ops, ticket);
        if !self.is_expected(fork, ending) {
            let line = match out_of_memory {
                true => format!("{fork} was killed: memory is short"),
                false => format!("{fork} {ending}"),
            };
            // A tenant can end its processes, and orders or connects again.
            match fork {
                Fork::Idle(tenant, user) => self.pass_on_error(Owner { tenant, user }, &line),
                Fork::Tenant(id) | Fork::Scrubber(id) => {
                    self.pass_on_error(self.owner(id), &line);
                }
                Fork::Refuser => tracing::error!("{line}"),
            }
        }
        match fork {
            Fork::Idle(id, user) => {
                self.remove_cgroup(id);
                self.forks
                    .idle
                    .retain(|(_, _, one, _)| one.ticket() != ticket);
                self.forks.pause(user);
            }
            Fork::Tenant(id) => {
                self.cut_off(ops, id, State::Leaving);
                self.process_ended(ops, id);
            }
            Fork::Scrubber(id) => {
                if let Some(tenant) = self.tenants.get_mut(&id)
                    && let Some(pid) = tenant.scrubbers.remove(&ticket)
                {
                    let pid = pid.unwrap_or(0);
                    tenant.order(&Order::ScrubberEnded { pid });
                }
                self.forget_tenant(id);
            }
            Fork::Refuser => self.refusals.reaped(ticket),
        }
    }

    /// Returns whether a process has ended by itself, or because it was killed for a reason that
    /// was logged.
    fn is_expected(&self, fork: Fork, ending: Ending) -> bool {
        let was_killed = |tenant: &TenantProcess| matches!(tenant.state, State::Killed);
        let tenant = match fork {
            Fork::Tenant(id) => self.tenants.get(&id),
            _ => None,
        };
        ending == Ending::Exited(0) || self.lost.is_some() || tenant.is_some_and(was_killed)
    }

    /// Handles the end of the spawner, and with it of all processes that it has forked.
    pub(super) fn lose_processes(&mut self, ops: &mut EventOps<'_>, reason: &str) {
        let tickets: Vec<u64> = self.forks.all.keys().copied().collect();
        for tenant in self.tenants.values_mut() {
            tenant.order(&Order::Lost(reason.to_owned()));
        }
        for ticket in tickets {
            self.fork_ended(ops, ticket, (Ending::Signalled(libc::SIGKILL), false));
        }
    }
}

impl fmt::Display for Fork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle(..) => f.write_str("the process that waits for the next tenant"),
            Self::Tenant(_) => f.write_str("it"),
            Self::Scrubber(_) => f.write_str("the process that closes descriptors"),
            Self::Refuser => f.write_str("a process that refuses connections"),
        }
    }
}
