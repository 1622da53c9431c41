//! A PID namespace that several workers have in common, for a driver that tells processes apart by their numbers in
//! it: in namespaces of their own all of them have number 1.
//!
//! Workers are then kept apart by what else holds for each: a user of its own, a filter without `kill` and a `/proc`
//! that shows nobody else's processes.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use super::spawn::{cloned, pipe};

/// The namespace, and the process that it begins with: when that ends, every other one in it is ended.
#[derive(Debug)]
pub struct Processes {
    first: OwnedFd,
    /// The supervisor's own.
    outside: OwnedFd,
    /// The first process ends when this is closed, and so with the supervisor, however that ends.
    _lifeline: OwnedFd,
}

impl Processes {
    /// # Errors
    /// The system does not let this process make one, or enter it.
    pub fn new() -> io::Result<Self> {
        let outside = OwnedFd::from(std::fs::File::open("/proc/self/ns/pid")?);
        let (reader, lifeline) = pipe()?;
        // SAFETY: the child only runs `hold`, which neither allocates nor returns.
        let (pid, first) = unsafe { cloned(libc::CLONE_NEWPID.unsigned_abs().into(), None) }?;
        if pid == 0 {
            // SAFETY: this is the child just cloned.
            unsafe { hold(reader.as_raw_fd()) }
        }
        let first = first.ok_or(io::ErrorKind::NotFound)?;
        let processes = Self {
            first,
            outside,
            _lifeline: lifeline,
        };
        processes.within(|| ())?;
        Ok(processes)
    }

    /// What processes `make` makes are in the namespace. It makes no threads.
    ///
    /// # Errors
    /// The namespace is gone.
    pub fn within<R>(&self, make: impl FnOnce() -> R) -> io::Result<R> {
        enter(&self.first)?;
        let made = make();
        if let Err(error) = enter(&self.outside) {
            tracing::error!("a thread makes processes for workers alone from now on: {error}");
        }
        Ok(made)
    }
}

/// Has the calling thread make its processes there.
fn enter(namespace: &OwnedFd) -> io::Result<()> {
    // SAFETY: a descriptor and a flag.
    match unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWPID) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Waits until the other end of the lifeline is closed.
///
/// # Safety
/// To be called in a process that has just been cloned without sharing memory.
unsafe fn hold(lifeline: RawFd) -> ! {
    let mut byte = 0u8;
    // SAFETY: system calls on integers and a local buffer; the process ends here.
    unsafe {
        libc::setsid();
        libc::dup2(lifeline, 0);
        libc::syscall(libc::SYS_close_range, 1, u32::MAX, 0);
        while libc::read(0, (&raw mut byte).cast(), 1) < 0 {}
        libc::_exit(0)
    }
}
