//! The spawner: a separate process that starts, kills and reaps workers for the supervisor.
//!
//! Confining a worker needs privileges: namespaces, users, cgroups. Reading guests' messages needs
//! none. So the supervisor forks the spawner before it reads any, and drops its own privileges
//! ([`crate::privileges`]). The spawner keeps the privileges, the executables and the confinement,
//! and executes five orders: start the worker of a protocol, kill a process that it started, move
//! one into its tenant's cgroup, fork a process that serves a tenant ([`crate::tenant_loop`])
//! or closes descriptors ([`crate::scrubber`]), and report when the memory of a tenant that has left
//! is free.
//! Of a guest's environment it passes on known variables only. It never reads bytes written by a
//! guest, a launcher or a worker that has served a guest, and holds none of their descriptors.
//!
//! The kernel kills the spawner when the supervisor dies, and all that it started when it dies.

mod emptied_tenants;
mod libraries;
pub(crate) mod message;
mod process;
mod setup;
mod spawn_thread;

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::io::retry_on_intr;
use rustix::process::{Pid, WaitOptions, waitpid};
use wormhole_link::made::Made;
use wormhole_link::tasks;

use self::message::{FORKS, Order};
pub use self::message::{Report, Role};
pub use self::setup::{Setup, Tenants};
use crate::datagram;

/// Reason why there is no spawner.
#[derive(Debug, thiserror::Error)]
pub enum SpawnerError {
    #[error("the process that starts workers cannot be made")]
    Fork(#[source] io::Error),
    #[error("the process that starts workers has ended")]
    Ended,
    #[error("the socket to the process that starts workers failed")]
    Socket(#[source] io::Error),
    #[error("the process that starts workers sent a malformed message: {0}")]
    Malformed(#[from] message::Malformed),
    #[error("the process that starts workers did not say whether it can")]
    Unready,
    #[error("{0}")]
    Unfit(String),
}

/// Supervisor's end of the socket. Readable when the spawner has sent a report.
#[derive(Debug)]
pub struct Spawner {
    socket: Arc<OwnedFd>,
    pid: libc::pid_t,
    /// Number of processes that were to be forked.
    forks: u64,
}

/// Workers that can be started.
#[derive(Debug)]
pub struct Abilities {
    /// Whether each process has a user of its own.
    pub has_users: bool,
    /// Protocol hashes of the workers.
    pub hashes: Vec<u64>,
    /// Device of the workers, or the reason why none can be started.
    pub device: Result<String, String>,
}

/// A report, with the stream and the log of a worker that was started.
#[derive(Debug)]
pub struct Heard {
    pub report: Report,
    pub descriptors: Vec<OwnedFd>,
}

impl Spawner {
    /// Forks the spawner and waits for its `Ready` report. The spawner closes the descriptors
    /// `closes`, and removes the socket at `place` when it ends. Call it in a process of one
    /// thread, on a thread that lives as long as the workers.
    ///
    /// # Errors
    /// The process cannot be forked, or it cannot start workers.
    pub fn fork(
        setup: Setup,
        closes: &[RawFd],
        place: Option<Made>,
    ) -> Result<(Self, Abilities), SpawnerError> {
        let (near, far) = datagram::pair().map_err(SpawnerError::Fork)?;
        // SAFETY: the process has one thread, so the child finds every lock free; the child runs
        // `serve` and then exits.
        let pid = unsafe { libc::fork() };
        match pid {
            ..0 => return Err(SpawnerError::Fork(tasks::named(io::Error::last_os_error()))),
            0 => {
                drop(near);
                // SAFETY: the descriptors are copies of the parent's, which this process does not use. It ends without
                // destructors of the parent's objects.
                unsafe {
                    for fd in closes {
                        libc::close(*fd);
                    }
                    libc::_exit(process::serve(&far, setup, place.as_ref()))
                }
            }
            1.. => {}
        }
        drop(far);
        let spawner = Self {
            socket: Arc::new(near),
            pid,
            forks: 0,
        };
        match spawner.next(true)?.map(|heard| heard.report) {
            Some(Report::Ready {
                has_users,
                hashes,
                device,
            }) => {
                let abilities = Abilities {
                    has_users,
                    hashes,
                    device,
                };
                Ok((spawner, abilities))
            }
            Some(Report::Unfit(reason)) => Err(SpawnerError::Unfit(reason)),
            _ => Err(SpawnerError::Unready),
        }
    }

    /// Creates a handle on a test that plays the spawner at the other end of `socket`.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn played_by(socket: OwnedFd) -> Self {
        Self {
            socket: Arc::new(socket),
            pid: 0,
            forks: 0,
        }
    }

    fn next(&self, waits: bool) -> Result<Option<Heard>, SpawnerError> {
        match datagram::receive(&self.socket, waits) {
            Ok(Some((bytes, descriptors))) => Ok(Some(Heard {
                report: Report::decode(&bytes)?,
                descriptors,
            })),
            Ok(None) => Err(SpawnerError::Ended),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                Err(SpawnerError::Ended)
            }
            Err(error) => Err(SpawnerError::Socket(error)),
        }
    }

    /// Receives the next report, if there is one.
    ///
    /// # Errors
    /// The spawner has ended, and with it all workers.
    pub fn report(&self) -> Result<Option<Heard>, SpawnerError> {
        self.next(false)
    }

    /// Orders a worker. Returns false if the spawner has ended.
    pub fn start(&self, ticket: u64, hash: u64, environment: String) -> bool {
        let order = Order::Start {
            ticket,
            hash,
            environment,
        };
        datagram::send(&self.socket, &order.encode(), &[], true).is_ok()
    }

    /// Orders a process that starts no program. Returns its ticket, or none if the spawner has
    /// ended.
    pub fn fork_process(&mut self, role: Role) -> Option<u64> {
        let ticket = FORKS + self.forks;
        self.forks += 1;
        let order = Order::Fork { ticket, role };
        let sent = datagram::send(&self.socket, &order.encode(), &[], true);
        sent.is_ok().then_some(ticket)
    }

    /// Orders a report for when a tenant's memory is free. Returns false if the spawner has ended.
    pub fn remove_tenant(&self, tenant: u32) -> bool {
        let order = Order::Remove { tenant };
        datagram::send(&self.socket, &order.encode(), &[], true).is_ok()
    }

    /// Returns the handle of the process of an order.
    pub fn process(&self, ticket: u64, pid: i32) -> Process {
        Process {
            socket: Arc::clone(&self.socket),
            ticket,
            pid,
            was_killed: Cell::new(false),
        }
    }

    /// Ends all workers and the spawner, and waits until it has exited.
    pub fn end(&self) {
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
        if let Some(pid) = Pid::from_raw(self.pid) {
            let _ = retry_on_intr(|| waitpid(Some(pid), WaitOptions::empty()));
        }
    }
}

impl AsRawFd for Spawner {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// A process, reaped by the spawner.
#[derive(Debug)]
pub struct Process {
    socket: Arc<OwnedFd>,
    ticket: u64,
    pid: i32,
    was_killed: Cell<bool>,
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

    /// Moves a worker into its tenant's cgroup. The spawner kills it if that fails.
    pub fn assign(&self, tenant: u32) {
        let order = Order::Assign {
            ticket: self.ticket,
            tenant,
        };
        let _ = datagram::send(&self.socket, &order.encode(), &[], true);
    }

    /// Kills the process with SIGKILL. Has no effect if it has ended.
    pub fn kill(&self) {
        if self.was_killed.replace(true) {
            return;
        }
        let order = Order::Kill {
            ticket: self.ticket,
        };
        // The spawner always reads. If it has ended, so have the workers.
        let _ = datagram::send(&self.socket, &order.encode(), &[], true);
    }
}
