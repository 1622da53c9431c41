//! A PID namespace that several workers have in common, for a driver that tells processes apart by their numbers in
//! it: in namespaces of their own all of them have number 1.
//!
//! Workers are then kept apart by what else holds for each: a user of its own, whom no signal of another reaches, a
//! filter of system calls and a `/proc` that shows nobody else's processes.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use wormhole_lock::Mutex;

use super::spawn::{cloned, pipe};

/// The namespace, made anew when it has ended.
#[derive(Debug)]
pub struct Processes {
    current: Mutex<Namespace>,
    /// The supervisor's own.
    outside: OwnedFd,
}

/// The process that a namespace begins with: when it ends, every other one in it is ended.
#[derive(Debug)]
struct Namespace {
    first: OwnedFd,
    /// The first process ends when this is closed, and so with the supervisor, however that ends.
    _lifeline: OwnedFd,
}

impl Processes {
    /// # Errors
    /// The system does not let this process make one, or enter it.
    pub fn new() -> io::Result<Self> {
        let processes = Self {
            current: Mutex::new(Namespace::new()?),
            outside: std::fs::File::open("/proc/self/ns/pid")?.into(),
        };
        processes.within(|| ())?;
        Ok(processes)
    }

    /// Calls `make` such that the processes that it creates are in the namespace. It must not create threads.
    ///
    /// # Errors
    /// The namespace is gone, and there is no other to be had.
    pub fn within<R>(&self, make: impl FnOnce() -> R) -> io::Result<R> {
        let mut current = self.current.lock();
        if enter(&current.first).is_err() {
            tracing::error!("the first process of the workers has ended, and they with it");
            *current = Namespace::new()?;
            enter(&current.first)?;
        }
        let made = make();
        if let Err(error) = enter(&self.outside) {
            tracing::error!("a thread makes processes for workers alone from now on: {error}");
        }
        Ok(made)
    }
}

impl Namespace {
    fn new() -> io::Result<Self> {
        let (reader, lifeline) = pipe()?;
        // SAFETY: the child only runs `hold`, which neither allocates nor returns.
        let (pid, first) = unsafe { cloned(libc::CLONE_NEWPID.unsigned_abs().into(), None) }?;
        if pid == 0 {
            // SAFETY: this is the child just cloned.
            unsafe { hold(reader.as_raw_fd()) }
        }
        Ok(Self {
            first: first.ok_or(io::ErrorKind::NotFound)?,
            _lifeline: lifeline,
        })
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Not waited for: it ends after all that are in the namespace, whom others wait for. One that has ended is
        // reaped.
        // SAFETY: a descriptor of this object's own and a local structure.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let first = self.first.as_raw_fd().unsigned_abs();
            libc::waitid(
                libc::P_PIDFD,
                first,
                &raw mut info,
                libc::WEXITED | libc::WNOHANG,
            );
        }
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
        // All workers end with it: it is the last to be chosen where memory is short.
        let score = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
        libc::write(score, c"-1000".as_ptr().cast(), 5);
        libc::dup2(lifeline, 0);
        libc::syscall(libc::SYS_close_range, 1, u32::MAX, 0);
        while libc::read(0, (&raw mut byte).cast(), 1) < 0 {}
        libc::_exit(0)
    }
}
