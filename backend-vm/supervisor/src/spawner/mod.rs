//! The spawner: a process of its own that starts, kills and reaps workers for the supervisor.
//!
//! Confining a worker takes privileges: namespaces, users, cgroups. Hearing guests takes none. So the supervisor forks
//! the spawner before it hears anyone, and gives up its own privileges ([`crate::privileges`]). The spawner holds the
//! privileges, the executables and the confinement, and takes four orders: start the worker of a protocol, kill a worker that it
//! started, move one into its tenant's cgroup, and fork a process that closes descriptors ([`crate::scrubber`]). Of a
//! guest's environment it passes on known variables alone. It never reads what a guest, a launcher or a worker that
//! has met a guest wrote, and holds no descriptor of theirs.
//!
//! The kernel kills the spawner when the supervisor dies, and the workers when the spawner dies.

pub(crate) mod message;
mod process;
mod setup;
mod starter;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use wormhole_link::tasks;

use self::message::Order;
pub use self::message::Report;
pub use self::setup::{Setup, Tenants};
use crate::datagram;
use crate::listener::Place;

/// Why there is no spawner.
#[derive(Debug, thiserror::Error)]
pub enum SpawnerError {
    #[error("the process that starts workers cannot be made")]
    Fork(#[source] io::Error),
    #[error("the process that starts workers has ended")]
    Ended,
    #[error("the process that starts workers cannot be heard")]
    Socket(#[source] io::Error),
    #[error("the process that starts workers sent what it never sends: {0}")]
    Malformed(#[from] message::Malformed),
    #[error("the process that starts workers did not say whether it can")]
    Unready,
    #[error("{0}")]
    Unfit(String),
}

/// The supervisor's end. Readable when the spawner has something to report.
#[derive(Debug)]
pub struct Spawner {
    socket: Arc<OwnedFd>,
    pid: libc::pid_t,
}

/// What can be started.
#[derive(Debug)]
pub struct Abilities {
    /// Protocols that workers speak.
    pub hashes: Vec<u64>,
    /// What workers are started on, or why none can be.
    pub device: Result<String, String>,
}

/// A report, with the stream and the log of a worker that was started.
#[derive(Debug)]
pub struct Heard {
    pub report: Report,
    pub descriptors: Vec<OwnedFd>,
}

impl Spawner {
    /// Forks the spawner and waits until it knows what can be started. The spawner keeps no descriptor of `closes`, and
    /// removes the socket at `place` in the end. To be called by a process of one thread, in the thread that lives as
    /// long as workers are to live.
    ///
    /// # Errors
    /// No process can be made, or it cannot start workers.
    pub fn fork(
        setup: Setup,
        closes: &[RawFd],
        place: Option<Place>,
    ) -> Result<(Self, Abilities), SpawnerError> {
        let (near, far) = datagram::pair().map_err(SpawnerError::Fork)?;
        // SAFETY: the process has one thread, so the child finds every lock free; it leaves by `serve` alone.
        let pid = unsafe { libc::fork() };
        match pid {
            ..0 => return Err(SpawnerError::Fork(tasks::named(io::Error::last_os_error()))),
            0 => {
                drop(near);
                for fd in closes {
                    // SAFETY: copies of the parent's descriptors. Nothing in this process uses them.
                    unsafe {
                        libc::close(*fd);
                    }
                }
                let status = process::serve(&far, setup, place.as_ref());
                // SAFETY: ends the process, without destructors of what the parent owns.
                unsafe { libc::_exit(status) }
            }
            1.. => {}
        }
        drop(far);
        let spawner = Self {
            socket: Arc::new(near),
            pid,
        };
        match spawner.next(true)?.map(|heard| heard.report) {
            Some(Report::Ready { hashes, device }) => Ok((spawner, Abilities { hashes, device })),
            Some(Report::Unfit(reason)) => Err(SpawnerError::Unfit(reason)),
            _ => Err(SpawnerError::Unready),
        }
    }

    /// Takes a stand-in for the spawner at the other end of `socket`.
    #[cfg(any(test, fuzzing))]
    pub fn played_by(socket: OwnedFd) -> Self {
        Self {
            socket: Arc::new(socket),
            pid: 0,
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

    /// The next report that is there.
    ///
    /// # Errors
    /// The spawner has ended, and with it all workers.
    pub fn report(&self) -> Result<Option<Heard>, SpawnerError> {
        self.next(false)
    }

    /// Orders a worker; false when the spawner has ended.
    pub fn start(&self, ticket: u64, hash: u64, environment: String) -> bool {
        let order = Order::Start {
            ticket,
            hash,
            environment,
        };
        datagram::send(&self.socket, &order.encode(), &[], true).is_ok()
    }

    /// What orders processes that close descriptors.
    pub fn orders(&self) -> Orders {
        Orders(Arc::clone(&self.socket))
    }

    /// The worker of an order.
    pub fn process(&self, ticket: u64, pid: i32) -> Process {
        Process {
            socket: Arc::clone(&self.socket),
            ticket,
            pid,
        }
    }

    /// Has the spawner end all workers and itself, and waits for that.
    pub fn end(&self) {
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
        let mut status = 0;
        // SAFETY: a child of this process, and a local integer.
        while unsafe { libc::waitpid(self.pid, &raw mut status, 0) } < 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
    }
}

impl AsRawFd for Spawner {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// Orders processes that close descriptors.
#[derive(Clone, Debug)]
pub struct Orders(Arc<OwnedFd>);

impl Orders {
    /// Orders one; false when the spawner has ended.
    pub fn scrubber(&self) -> bool {
        datagram::send(&self.0, &Order::Scrubber.encode(), &[], true).is_ok()
    }
}

/// A worker process, which the spawner reaps.
#[derive(Clone, Debug)]
pub struct Process {
    socket: Arc<OwnedFd>,
    ticket: u64,
    pid: i32,
}

impl Process {
    pub fn ticket(&self) -> u64 {
        self.ticket
    }

    /// The process's number in the supervisor's PID namespace: for people to read, never an identity.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Counts the process among a tenant's: it is killed if the system does not let it.
    pub fn assign(&self, tenant: u32) {
        let order = Order::Assign {
            ticket: self.ticket,
            tenant,
        };
        let _ = datagram::send(&self.socket, &order.encode(), &[], true);
    }

    /// Ends the process with SIGKILL; nothing happens when it has ended already.
    pub fn kill(&self) {
        let order = Order::Kill {
            ticket: self.ticket,
        };
        // The spawner always reads. When it has ended, so have the workers.
        let _ = datagram::send(&self.socket, &order.encode(), &[], true);
    }
}
