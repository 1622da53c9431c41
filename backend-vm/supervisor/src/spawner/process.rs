//! Spawner process: one loop over the supervisor's orders, started workers and ended workers.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open,
    set_parent_process_death_signal, setsid, waitpid,
};
use rustix::thread::set_name;
use vmm_sys_util::signal::block_signal;
use wormhole_link::made::Made;
use wormhole_link::{chain, tasks};
use wormhole_sandbox::{Child, Ending, Place as CgroupPlace};

use super::emptied_tenants::EmptiedTenants;
use super::message::{Order, Report, Role};
use super::setup::{Prepared, Setup};
use super::spawn_thread::{self, SpawnThread};
use crate::pair::End;
use crate::workers::Started;
use crate::{datagram, environment, log, pair, process_logs, scrubber, tenant_loop};

/// Interval between checks whether the last workers have ended.
const AGAIN: Duration = Duration::from_millis(5);
/// Exit status of a process that was forked and has panicked.
const PANICKED: i32 = 101;
/// End of a process that the OOM killer has ended, among others.
const KILLED: Ending = Ending::Signalled(libc::SIGKILL);
/// Number of orders executed before started and ended processes have their turn.
const TURN: usize = 16;
/// Largest number of characters of a reason.
const LONGEST_REASON: usize = 4000;

/// Serves the supervisor until it closes its end. Returns the process's exit status.
pub fn serve(socket: &OwnedFd, setup: Setup, place: Option<&Made>) -> i32 {
    let status = match live_and_die_with_supervisor().and_then(|()| prepare(socket, setup)) {
        Ok(mut spawner) => {
            spawner.run(socket);
            spawner.end();
            0
        }
        Err(reason) => {
            let report = Report::Unfit(reason);
            // Fails only if the supervisor has ended.
            let _ = datagram::send(socket, &report.encode(), &[], true);
            2
        }
    };
    if let Some(place) = place {
        place.remove();
    }
    status
}

/// Makes the kernel kill this process when the supervisor dies; normally it ends with the socket.
/// Detaches from the supervisor's process group, whose signals are for the supervisor. Blocks
/// SIGUSR1, which requests a dump from the supervisor and may reach this process, since both have
/// the same name.
fn live_and_die_with_supervisor() -> Result<(), String> {
    // Fails if the process leads a group already.
    let _ = setsid();
    // Fails if the supervisor has blocked it already.
    let _ = block_signal(libc::SIGUSR1);
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| format!("a process cannot be tied to another's life: {error}"))
}

fn prepare(socket: &OwnedFd, setup: Setup) -> Result<Spawner, String> {
    // A socket has names in the namespace in which it was made. This process and its children make the workers' sockets, to
    // which a worker on a GPU can give names.
    if let Err(error) = wormhole_privileges::leave_namespaces() {
        tracing::debug!("workers' sockets are in the network namespace of the system: {error}");
    }
    let reap_limit = setup.reap_limit;
    let prepared = setup.prepare().map_err(|error| chain(&error))?;
    let ready = Report::Ready {
        has_users: prepared.confinement.changes_user(),
        hashes: prepared.executables.hashes().collect(),
        device: match &prepared.device {
            Ok(device) => Ok(device.to_string()),
            Err(reason) => Err(reason.clone()),
        },
    };
    let spawn_thread = SpawnThread::new(prepared.confinement.clone())
        .map_err(|error| format!("the thread that starts workers cannot be made: {error}"))?;
    let supervisor = socket.try_clone().map_err(|error| error.to_string())?;
    datagram::send(socket, &ready.encode(), &[], true)
        .map_err(|error| format!("the spawner cannot report to the supervisor: {error}"))?;
    Ok(Spawner {
        prepared,
        reap_limit,
        spawn_thread,
        workers: BTreeMap::new(),
        forked: BTreeMap::new(),
        emptied: EmptiedTenants::default(),
        supervisor: End::new(supervisor),
    })
}

/// A process that was forked.
struct Forked {
    pid: libc::pid_t,
    /// Readable when it has ended.
    end: OwnedFd,
    /// Cgroup of the process's tenant. It is removed after the process.
    place: Option<CgroupPlace>,
}

/// State of the spawner.
struct Spawner {
    prepared: Prepared,
    /// Time to wait for workers at the end.
    reap_limit: Duration,
    spawn_thread: SpawnThread,
    /// Running workers, by ticket.
    workers: BTreeMap<u64, Child>,
    /// Forked processes that run, by ticket.
    forked: BTreeMap<u64, Forked>,
    /// Tenants whose processes have ended, and whose memory is not free.
    emptied: EmptiedTenants,
    /// Way of the reports.
    supervisor: End,
}

impl Spawner {
    /// Returns when the supervisor has closed its end.
    fn run(&mut self, socket: &OwnedFd) {
        loop {
            let tickets: Vec<u64> = self.workers.keys().copied().collect();
            let writes = match self.supervisor.is_full() {
                true => PollFlags::OUT,
                false => PollFlags::empty(),
            };
            let again = self.supervisor.deadline().into_iter();
            let again = again.chain(self.emptied.next()).min();
            let mut entries = vec![
                PollFd::new(socket, PollFlags::IN | writes),
                PollFd::new(&self.spawn_thread, PollFlags::IN),
            ];
            let ends = self.workers.values().map(Child::pidfd);
            entries.extend(ends.map(|end| PollFd::from_borrowed_fd(end, PollFlags::IN)));
            let forked: Vec<u64> = self.forked.keys().copied().collect();
            let ends = self.forked.values().map(|forked| &forked.end);
            entries.extend(ends.map(|end| PollFd::new(end, PollFlags::IN)));
            let left = again.map(|again| again.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            if poll(&mut entries, left.as_ref()).is_err() {
                continue;
            }
            let mut ready = entries[2..].iter().map(|entry| !entry.revents().is_empty());
            let ended = |tickets: Vec<u64>| -> Vec<u64> {
                let found = tickets.into_iter().zip(ready.by_ref());
                found
                    .filter(|(_, ready)| *ready)
                    .map(|(ticket, _)| ticket)
                    .collect()
            };
            let [workers, others] = [tickets, forked].map(ended);
            self.announce_started();
            for ticket in workers {
                self.announce_end(ticket);
            }
            for ticket in others {
                self.announce_forked_end(ticket);
            }
            if !self.take_orders(socket) {
                return;
            }
            self.check_emptied();
            self.supervisor.flush();
        }
    }

    fn announce_started(&mut self) {
        for (ticket, outcome) in self.spawn_thread.finished() {
            match outcome {
                Ok(Started { child, socket, log }) => {
                    let pid = child.pid();
                    self.workers.insert(ticket, child);
                    let report = Report::Started { ticket, pid };
                    self.report(&report, vec![socket, log]);
                }
                Err(error) => {
                    let reason = shortened(&error);
                    let report = Report::Failed { ticket, reason };
                    self.report(&report, Vec::new());
                }
            }
        }
    }

    fn announce_end(&mut self, ticket: u64) {
        let Some(ending) = self.workers.get(&ticket).and_then(Child::try_reap) else {
            return;
        };
        if let Some(child) = self.workers.remove(&ticket) {
            let report = Report::Ended {
                ticket,
                ending,
                out_of_memory: ending == KILLED && child.ran_out_of_memory(),
            };
            self.report(&report, Vec::new());
        }
    }

    fn announce_forked_end(&mut self, ticket: u64) {
        let Some(forked) = self.forked.get(&ticket) else {
            return;
        };
        if let Ok(Some((_, status))) = waitpid(Pid::from_raw(forked.pid), WaitOptions::NOHANG) {
            let ending = match status.terminating_signal() {
                Some(signal) => Ending::Signalled(signal),
                None => Ending::Exited(status.exit_status().unwrap_or_default()),
            };
            let place = forked.place.as_ref().filter(|_| ending == KILLED);
            let out_of_memory = place.is_some_and(CgroupPlace::ran_out_of_memory);
            self.forked.remove(&ticket);
            let report = Report::Ended {
                ticket,
                ending,
                out_of_memory,
            };
            self.report(&report, Vec::new());
        }
    }

    /// Executes some of the pending orders. Returns false when the supervisor has closed its end or
    /// sent an invalid message.
    fn take_orders(&mut self, socket: &OwnedFd) -> bool {
        for _ in 0..TURN {
            let bytes = match datagram::receive(socket, false) {
                Ok(Some((bytes, _))) => bytes,
                Ok(None) => return false,
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            };
            match Order::decode(&bytes) {
                Ok(Order::Start {
                    ticket,
                    hash,
                    environment,
                }) => self.start(ticket, hash, &environment),
                Ok(Order::Kill { ticket }) => {
                    // A worker that has ended may still be killed by a supervisor that has not read
                    // the report yet.
                    if let Some(child) = self.workers.get(&ticket) {
                        child.kill();
                    }
                    if let Some(forked) = self.forked.get(&ticket) {
                        forked.kill();
                    }
                }
                Ok(Order::Assign { ticket, tenant }) => self.assign(ticket, tenant),
                Ok(Order::Fork { ticket, role }) => self.fork(ticket, role),
                Ok(Order::Remove { tenant }) => self.remove(tenant, Instant::now()),
                Err(error) => {
                    tracing::error!("{error}");
                    return false;
                }
            }
        }
        true
    }

    /// Moves a worker into its tenant's cgroup. Kills it if that fails, because it would escape the
    /// tenant's limits. The supervisor logs the reason, as far as the tenant's budget of lines permits.
    fn assign(&mut self, ticket: u64, tenant: u32) {
        let Some(child) = self.workers.get_mut(&ticket) else {
            return;
        };
        let report = match child.move_to(tenant) {
            Ok(()) => Report::Assigned { ticket },
            Err(error) => {
                child.kill();
                let reason = shortened(&error);
                Report::NotAssigned { ticket, reason }
            }
        };
        self.report(&report, Vec::new());
    }

    /// Checks some of the tenants whose turn it is.
    fn check_emptied(&mut self) {
        let now = Instant::now();
        for _ in 0..TURN {
            let Some((tenant, ended)) = self.emptied.take_due(now) else {
                break;
            };
            self.remove(tenant, ended);
        }
    }

    /// Reports a tenant if its memory is free. Otherwise it is checked again later.
    fn remove(&mut self, tenant: u32, ended: Instant) {
        let cgroups = self.prepared.confinement.cgroups.as_ref();
        if cgroups.is_none_or(|cgroups| cgroups.remove_tenant(tenant, ended)) {
            self.report(&Report::Removed { tenant }, Vec::new());
        } else {
            self.emptied.add(tenant, ended, Instant::now());
        }
    }

    fn fork(&mut self, ticket: u64, role: Role) {
        let changes_user = self.prepared.confinement.changes_user();
        let forked = fork(role, changes_user).and_then(|(pid, sockets)| {
            let watched = watched(pid).and_then(|end| Ok((end, self.place(role, pid)?)));
            let (end, place) = watched.inspect_err(|_| end(pid))?;
            Ok((Forked { pid, end, place }, sockets))
        });
        let report = match forked {
            Ok((forked, sockets)) => {
                let pid = forked.pid;
                self.forked.insert(ticket, forked);
                (Report::Forked { ticket, pid }, sockets)
            }
            Err(error) => {
                let reason = error.to_string();
                (Report::NotForked { ticket, reason }, Vec::new())
            }
        };
        self.report(&report.0, report.1);
    }

    /// Moves a forked process, which has nothing to do yet, into the cgroup that it belongs to.
    fn place(&self, role: Role, pid: libc::pid_t) -> io::Result<Option<CgroupPlace>> {
        let Some(cgroups) = &self.prepared.confinement.cgroups else {
            return Ok(None);
        };
        let placed = match role {
            Role::Tenant { tenant, user } => cgroups.place_first((user, tenant), pid).map(Some),
            Role::Scrubber(Some(tenant)) => cgroups.place_for(tenant, pid).map(Some),
            Role::Scrubber(None) => Ok(None),
            Role::Refuser => cgroups.place_refuser(pid).map(|()| None),
        };
        placed.map_err(|error| io::Error::other(chain(&error)))
    }

    fn start(&mut self, ticket: u64, hash: u64, guest: &str) {
        let started = match (self.prepared.executables.get(hash), &self.prepared.device) {
            (Some(program), Ok(device)) => {
                let mut environment = self.prepared.environment.clone();
                environment.extend(environment::passed_on(guest));
                let order = spawn_thread::Order {
                    program: program.to_owned(),
                    device: device.clone(),
                    environment,
                };
                match self.spawn_thread.order(ticket, order) {
                    true => Ok(()),
                    false => Err("the thread that starts workers has ended".to_owned()),
                }
            }
            (None, _) => Err(format!("no worker speaks protocol {hash:016x}")),
            (_, Err(reason)) => Err(reason.clone()),
        };
        if let Err(reason) = started {
            let report = Report::Failed { ticket, reason };
            self.report(&report, Vec::new());
        }
    }

    /// Sends a report, or queues it until the supervisor has room.
    fn report(&mut self, report: &Report, descriptors: Vec<OwnedFd>) {
        self.supervisor.send(report.encode(), descriptors);
    }

    /// Kills and reaps all workers, as far as they end in time.
    fn end(mut self) {
        self.spawn_thread.end();
        let started = self.spawn_thread.finished().into_iter();
        let started = started.filter_map(|(_, outcome)| outcome.ok());
        let mut left: Vec<Child> = started.map(|started| started.child).collect();
        left.extend(self.workers.into_values());
        for child in &left {
            child.kill();
        }
        let end = Instant::now() + self.reap_limit;
        loop {
            left.retain(|child| child.try_reap().is_none());
            if left.is_empty() {
                return;
            }
            if Instant::now() >= end {
                break;
            }
            std::thread::sleep(AGAIN);
        }
        let left: Vec<String> = left.iter().map(|child| child.pid().to_string()).collect();
        tracing::error!(
            "these workers were killed and have not ended within {:?}, and are left: {}",
            self.reap_limit,
            left.join(", ")
        );
    }
}

/// Returns an error and its causes, as far as they fit into a report.
fn shortened(error: &dyn std::error::Error) -> String {
    chain(error).chars().take(LONGEST_REASON).collect()
}

/// Opens a pidfd, which is readable when the forked process has ended.
fn watched(pid: libc::pid_t) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Ends a forked process that has no descriptors yet, so that it ends at once.
fn end(pid: libc::pid_t) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, Signal::KILL);
        let _ = waitpid(Some(pid), WaitOptions::empty());
    }
}

impl Forked {
    fn kill(&self) {
        // A child that was not reaped, so that no other process has its number.
        let _ = Pid::from_raw(self.pid).map(|pid| kill_process(pid, Signal::KILL));
    }
}

/// Forks a process, and returns the supervisor's end of its socket, and that of its log for one that serves a tenant. It
/// keeps no other descriptor of this process but the standard ones and the log. One that serves a tenant has the socket
/// of its own log in their place.
fn fork(role: Role, changes_user: bool) -> io::Result<(libc::pid_t, Vec<OwnedFd>)> {
    let (logs, own_log) = match role {
        Role::Tenant { .. } => {
            let (near, far) = process_logs::sockets()?;
            (Some(near), Some(far))
        }
        Role::Scrubber(_) | Role::Refuser => (None, None),
    };
    let (near, far) = match role {
        Role::Tenant { .. } => pair::sockets()?,
        Role::Scrubber(_) | Role::Refuser => datagram::pair()?,
    };
    let mut kept = [far.as_raw_fd(), log::number().unwrap_or(far.as_raw_fd())];
    kept.sort_unstable();
    // SAFETY: the child runs `main` and then exits. The C library keeps its allocator usable after
    // a fork. Of the locks of the other thread, which starts workers, the child takes only the log's
    // own, held while a line of the program is logged for the first time.
    match unsafe { libc::fork() } {
        ..0 => Err(tasks::named(io::Error::last_os_error())),
        // SAFETY: system calls on integers and literals; the child uses no descriptor but those
        // that are kept.
        0 => unsafe {
            let name = match role {
                Role::Scrubber(_) => c"scrubber",
                Role::Refuser => c"refuser",
                Role::Tenant { .. } => c"tenant",
            };
            // The OOM killer spares the spawner, and not processes that tenants can fill.
            let _ = std::fs::write("/proc/self/oom_score_adj", "0");
            if changes_user && wormhole_sandbox::become_own_user().is_err() {
                libc::_exit(2);
            }
            // A change of the user would reset it.
            let _ = set_parent_process_death_signal(Some(Signal::KILL));
            let _ = set_name(name);
            if let Some(socket) = &own_log {
                let standard = [0, 1, 2].into_iter();
                for number in standard.chain(log::number()) {
                    if libc::dup2(socket.as_raw_fd(), number) < 0 {
                        libc::_exit(2);
                    }
                }
                log::became_socket();
            }
            let [low, high] = kept;
            for (first, last) in [(3, low - 1), (low + 1, high - 1), (high + 1, RawFd::MAX)] {
                if first <= last && libc::syscall(libc::SYS_close_range, first, last, 0) != 0 {
                    libc::_exit(2);
                }
            }
            std::mem::forget((near, logs, own_log));
            // Nothing of the spawner's is left to unwind to.
            let served = std::panic::catch_unwind(AssertUnwindSafe(|| match role {
                Role::Scrubber(_) | Role::Refuser => scrubber::main(&far),
                Role::Tenant { .. } => tenant_loop::main(far),
            }));
            libc::_exit(served.unwrap_or(PANICKED))
        },
        pid => Ok((pid, std::iter::once(near).chain(logs).collect())),
    }
}
