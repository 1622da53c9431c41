//! Makes one PID namespace for several workers. NVIDIA's driver identifies processes by their numbers in their
//! namespace, and in namespaces of their own all workers have number 1.
//!
//! Other means keep such workers apart: each has a user of its own, which no other worker may signal, a system call
//! filter, and a `/proc` that shows only the processes of its user.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use rustix::process::{WaitId, WaitIdOptions, waitid};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};
use wormhole_lock::Mutex;

use super::spawn::cloned;

/// PID namespace of several workers, made anew when its first process has ended.
#[derive(Debug)]
pub struct Processes {
    current: Mutex<Namespace>,
    /// PID namespace of the supervisor.
    outside: OwnedFd,
}

/// First process of a PID namespace. When it ends, the kernel kills every other process of the namespace.
#[derive(Debug)]
struct Namespace {
    first: OwnedFd,
    /// Write end of a pipe. The first process ends when this end is closed, so also when the supervisor is killed.
    _lifeline: OwnedFd,
}

impl Processes {
    /// Makes a namespace, and enters it once to see that this process may.
    ///
    /// # Errors
    /// Fails if the system does not let this process make a PID namespace, or enter it.
    pub fn new() -> io::Result<Self> {
        let processes = Self {
            current: Mutex::new(Namespace::new()?),
            outside: std::fs::File::open("/proc/self/ns/pid")?.into(),
        };
        processes.within(|| ())?;
        Ok(processes)
    }

    /// Calls `make` such that the processes that it creates are in the namespace. `make` must not create threads.
    ///
    /// # Errors
    /// Fails if the namespace has ended, and no other can be made.
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
        let (reader, lifeline) = io::pipe()?;
        // SAFETY: the child only runs `hold`, which neither allocates nor returns.
        let (pid, first) = unsafe { cloned(libc::CLONE_NEWPID.unsigned_abs().into(), None) }?;
        if pid == 0 {
            // SAFETY: this is the child just cloned.
            unsafe { hold(reader.as_raw_fd()) }
        }
        Ok(Self {
            first: first.ok_or(io::ErrorKind::NotFound)?,
            _lifeline: lifeline.into(),
        })
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // WNOHANG: the first process ends after all others of the namespace, which may take long. It is reaped here
        // only if it has ended already.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let _ = waitid(WaitId::PidFd(self.first.as_fd()), options);
    }
}

/// Makes a PID namespace the one of the calling thread's children (setns(2)). Takes the pidfd of a process in the
/// namespace, or a descriptor of the namespace itself.
fn enter(namespace: &OwnedFd) -> io::Result<()> {
    let kind = ThreadNameSpaceType::PROCESS_ID;
    Ok(move_into_thread_name_spaces(namespace.as_fd(), kind)?)
}

/// Waits until the other end of the lifeline is closed.
///
/// # Safety
/// The caller is a process that has just been cloned without sharing memory.
unsafe fn hold(lifeline: RawFd) -> ! {
    let mut byte = 0u8;
    // SAFETY: system calls on integers and a local buffer; the process ends here.
    unsafe {
        libc::setsid();
        // All workers end with this process, so the OOM killer must never choose it.
        let score = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
        libc::write(score, c"-1000".as_ptr().cast(), 5);
        libc::dup2(lifeline, 0);
        libc::syscall(libc::SYS_close_range, 1, u32::MAX, 0);
        while libc::read(0, (&raw mut byte).cast(), 1) < 0 {}
        libc::_exit(0)
    }
}
