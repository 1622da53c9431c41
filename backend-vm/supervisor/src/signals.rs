//! SIGTERM, SIGINT and SIGUSR1 as a descriptor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// Request that a signal makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// End the supervisor, for this reason.
    End(&'static str),
    /// Dump the pending waits to the log.
    Dump,
}

/// The supervisor's signals, blocked and read from a descriptor.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
}

impl Signals {
    /// Blocks the signals for this process and creates a descriptor for them.
    ///
    /// # Errors
    /// Same as `signalfd`.
    pub fn new() -> io::Result<Self> {
        // SAFETY: a local signal set, filled before it is used; the result is a fresh descriptor.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1] {
                libc::sigaddset(&raw mut set, signal);
            }
            if libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Self {
                fd: OwnedFd::from_raw_fd(fd),
            })
        }
    }

    /// Reads the next signal, if there is one.
    pub fn take(&self) -> Option<Asked> {
        const SIZE: usize = size_of::<libc::signalfd_siginfo>();
        const NUMBER: usize = std::mem::offset_of!(libc::signalfd_siginfo, ssi_signo);
        let mut info = [0; SIZE];
        if rustix::io::read(&self.fd, &mut info) != Ok(SIZE) {
            return None;
        }
        match info[NUMBER..]
            .first_chunk()
            .copied()
            .map(i32::from_ne_bytes)
        {
            Some(libc::SIGUSR1) => Some(Asked::Dump),
            Some(libc::SIGINT) => Some(Asked::End("interrupted")),
            _ => Some(Asked::End("terminated")),
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
