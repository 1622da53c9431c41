//! Spawner process: one loop over the supervisor's orders, started workers and ended workers.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use wormhole_link::{chain, tasks};
use wormhole_sandbox::Child;

use super::message::{Order, Report};
use super::setup::{Prepared, Setup};
use super::starter::{self, Starter};
use crate::listener::Place;
use crate::workers::Started;
use crate::{datagram, environment, scrubber};

/// Interval between checks whether the last workers have ended.
const AGAIN: Duration = Duration::from_millis(5);
/// Largest number of characters of a reason.
const LONGEST_REASON: usize = 4000;

/// Serves the supervisor until it closes its end. Returns the process's exit status.
pub fn serve(socket: &OwnedFd, setup: Setup, place: Option<&Place>) -> i32 {
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
    // SAFETY: system calls on integers, and on a local signal set, for which all zeros are valid.
    unsafe {
        libc::setsid();
        let mut dump: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut dump, libc::SIGUSR1);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const dump, std::ptr::null_mut());
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) != 0 {
            let error = io::Error::last_os_error();
            return Err(format!(
                "a process cannot be tied to another's life: {error}"
            ));
        }
    }
    Ok(())
}

fn prepare(socket: &OwnedFd, setup: Setup) -> Result<Spawner, String> {
    let reap_limit = setup.reap_limit;
    let prepared = setup.prepare().map_err(|error| chain(&error))?;
    let ready = Report::Ready {
        hashes: prepared.executables.hashes().collect(),
        device: match &prepared.device {
            Ok(device) => Ok(device.to_string()),
            Err(reason) => Err(reason.clone()),
        },
    };
    let starter = Starter::new(prepared.confinement.clone())
        .map_err(|error| format!("the thread that starts workers cannot be made: {error}"))?;
    datagram::send(socket, &ready.encode(), &[], true)
        .map_err(|error| format!("the supervisor cannot be told of its workers: {error}"))?;
    Ok(Spawner {
        prepared,
        reap_limit,
        starter,
        workers: BTreeMap::new(),
        scrubbers: BTreeMap::new(),
        reports: VecDeque::new(),
    })
}

/// State of the spawner.
struct Spawner {
    prepared: Prepared,
    /// Time to wait for workers at the end.
    reap_limit: Duration,
    starter: Starter,
    /// Running workers, by ticket.
    workers: BTreeMap<u64, Child>,
    /// Scrubber processes that run, by number.
    scrubbers: BTreeMap<libc::pid_t, OwnedFd>,
    /// Reports for which the supervisor's socket had no room.
    reports: VecDeque<(Report, Vec<OwnedFd>)>,
}

impl Spawner {
    /// Returns when the supervisor has closed its end.
    fn run(&mut self, socket: &OwnedFd) {
        loop {
            let tickets: Vec<u64> = self.workers.keys().copied().collect();
            let ends = self.workers.values().map(|child| child.pidfd().as_raw_fd());
            let entry = |fd: RawFd, events| libc::pollfd {
                fd,
                events,
                revents: 0,
            };
            let writes = match self.reports.is_empty() {
                true => 0,
                false => libc::POLLOUT,
            };
            let mut entries = vec![
                entry(socket.as_raw_fd(), libc::POLLIN | writes),
                entry(self.starter.as_raw_fd(), libc::POLLIN),
            ];
            entries.extend(ends.map(|fd| entry(fd, libc::POLLIN)));
            let scrubbers: Vec<libc::pid_t> = self.scrubbers.keys().copied().collect();
            let ends = self.scrubbers.values().map(AsRawFd::as_raw_fd);
            entries.extend(ends.map(|fd| entry(fd, libc::POLLIN)));
            let count = libc::nfds_t::try_from(entries.len()).unwrap_or(0);
            // SAFETY: a live array of this many entries.
            if unsafe { libc::poll(entries.as_mut_ptr(), count, -1) } < 0 {
                continue;
            }
            self.announce_started();
            let (workers, others) = entries[2..].split_at(tickets.len());
            // Fewer than before if an end was reported meanwhile; the others are checked again.
            for (ticket, entry) in tickets.iter().zip(workers) {
                if entry.revents != 0 {
                    self.announce_end(*ticket);
                }
            }
            for (pid, entry) in scrubbers.iter().zip(others) {
                if entry.revents != 0 {
                    self.announce_scrubber_end(*pid);
                }
            }
            if !self.take_orders(socket) {
                return;
            }
            self.flush(socket);
        }
    }

    fn announce_started(&mut self) {
        for (ticket, outcome) in self.starter.finished() {
            match outcome {
                Ok(Started { child, socket, log }) => {
                    let pid = child.pid();
                    self.workers.insert(ticket, child);
                    let report = Report::Started { ticket, pid };
                    self.reports.push_back((report, vec![socket, log]));
                }
                Err(error) => {
                    let reason = chain(&error).chars().take(LONGEST_REASON).collect();
                    let report = Report::Failed { ticket, reason };
                    self.reports.push_back((report, Vec::new()));
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
                out_of_memory: child.ran_out_of_memory(),
            };
            self.reports.push_back((report, Vec::new()));
        }
    }

    fn announce_scrubber_end(&mut self, pid: libc::pid_t) {
        // SAFETY: integers; a child of this process.
        let reaped = unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) };
        if reaped == pid && self.scrubbers.remove(&pid).is_some() {
            let report = Report::ScrubberEnded { pid };
            self.reports.push_back((report, Vec::new()));
        }
    }

    /// Executes pending orders. Returns false when the supervisor has closed its end or sent an
    /// invalid message.
    fn take_orders(&mut self, socket: &OwnedFd) -> bool {
        loop {
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
                }
                Ok(Order::Assign { ticket, tenant }) => self.assign(ticket, tenant),
                Ok(Order::Scrubber) => self.make_scrubber(),
                Err(error) => {
                    tracing::error!("{error}");
                    return false;
                }
            }
        }
    }

    /// Moves a worker into its tenant's cgroup. Kills it if that fails, because it would escape the
    /// tenant's limits.
    fn assign(&mut self, ticket: u64, tenant: u32) {
        let Some(child) = self.workers.get_mut(&ticket) else {
            return;
        };
        if let Err(error) = child.move_to(tenant) {
            let (pid, why) = (child.pid(), chain(&error));
            tracing::error!("worker {pid} is killed: it has no cgroup of tenant {tenant}: {why}");
            child.kill();
        }
    }

    fn make_scrubber(&mut self) {
        let report = match fork_scrubber().and_then(watched) {
            Ok((pid, end, socket)) => {
                self.scrubbers.insert(pid, end);
                (Report::Scrubber { pid }, vec![socket])
            }
            Err(error) => (Report::NoScrubber(error.to_string()), Vec::new()),
        };
        self.reports.push_back(report);
    }

    fn start(&mut self, ticket: u64, hash: u64, guest: &str) {
        let started = match (self.prepared.executables.get(hash), &self.prepared.device) {
            (Some(program), Ok(device)) => {
                let mut environment = self.prepared.environment.clone();
                environment.extend(environment::passed_on(guest));
                let order = starter::Order {
                    program: program.to_owned(),
                    device: device.clone(),
                    environment,
                };
                match self.starter.order(ticket, order) {
                    true => Ok(()),
                    false => Err("the thread that starts workers has ended".to_owned()),
                }
            }
            (None, _) => Err(format!("no worker speaks protocol {hash:016x}")),
            (_, Err(reason)) => Err(reason.clone()),
        };
        if let Err(reason) = started {
            let report = Report::Failed { ticket, reason };
            self.reports.push_back((report, Vec::new()));
        }
    }

    /// Sends as many reports as the socket takes.
    fn flush(&mut self, socket: &OwnedFd) {
        while let Some((report, descriptors)) = self.reports.pop_front() {
            match datagram::send(socket, &report.encode(), &descriptors, false) {
                Ok(()) => {}
                Err(Errno::AGAIN) => {
                    self.reports.push_front((report, descriptors));
                    return;
                }
                Err(error) => {
                    // Kills the worker, so that at least its end is reported.
                    tracing::error!("the supervisor is not told of {report:?}: {error}");
                    if let Report::Started { ticket, .. } = report
                        && let Some(child) = self.workers.get(&ticket)
                    {
                        child.kill();
                    }
                }
            }
        }
    }

    /// Kills and reaps all workers, as far as they end in time.
    fn end(mut self) {
        self.starter.end();
        let started = self.starter.finished().into_iter();
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

/// Opens a pidfd, which is readable when the forked process has ended. Ends the process if that
/// fails.
fn watched((pid, socket): (libc::pid_t, OwnedFd)) -> io::Result<(libc::pid_t, OwnedFd, OwnedFd)> {
    let opened = rustix::process::Pid::from_raw(pid)
        .ok_or(Errno::SRCH)
        .and_then(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()));
    match opened {
        Ok(end) => Ok((pid, end, socket)),
        Err(error) => {
            // The process has no descriptors yet, so it ends at once.
            // SAFETY: integers; a child of this process.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, std::ptr::null_mut(), 0);
            }
            Err(error.into())
        }
    }
}

/// Forks a process that closes descriptors, and returns the supervisor's end of its socket. It
/// keeps no other descriptor of this process but the standard ones.
fn fork_scrubber() -> io::Result<(libc::pid_t, OwnedFd)> {
    /// Number of the process's socket.
    const SOCKET: RawFd = 3;
    let (near, far) = datagram::pair()?;
    // SAFETY: the child runs `main` and then exits. The C library keeps its allocator usable after
    // a fork, and the child takes no lock of the other thread, which starts workers.
    match unsafe { libc::fork() } {
        ..0 => Err(tasks::named(io::Error::last_os_error())),
        // SAFETY: system calls on integers and literals; the child uses no descriptor from `SOCKET`
        // on but the socket that is put there.
        0 => unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
            libc::prctl(libc::PR_SET_NAME, c"scrubber".as_ptr(), 0, 0, 0);
            if far.as_raw_fd() != SOCKET && libc::dup2(far.as_raw_fd(), SOCKET) < 0 {
                libc::_exit(2);
            }
            if libc::syscall(libc::SYS_close_range, SOCKET + 1, RawFd::MAX, 0) != 0 {
                libc::_exit(2);
            }
            std::mem::forget((near, far));
            libc::_exit(scrubber::main(&OwnedFd::from_raw_fd(SOCKET)))
        },
        pid => Ok((pid, near)),
    }
}
