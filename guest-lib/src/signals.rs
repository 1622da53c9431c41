//! Blocks signals while their handlers must not run on a thread.

use std::marker::PhantomData;
use std::{io, mem, ptr};

/// Blocks all signals to the calling thread but those of faults until dropped. A thread that it starts meanwhile inherits
/// that. A fault whose signal is blocked would end the process, although the program may have a handler for it. So would a
/// system call that the program's filter traps (`SECCOMP_RET_TRAP`).
#[derive(Debug)]
pub struct BlockedSignals {
    before: libc::sigset_t,
    /// The mask belongs to the thread.
    _thread: PhantomData<*const ()>,
}

impl BlockedSignals {
    pub fn new() -> Self {
        // SAFETY: both sets outlive the calls.
        let before = unsafe {
            let (mut all, mut before) = (mem::zeroed(), mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::sigdelset(&raw mut all, libc::SIGSEGV);
            libc::sigdelset(&raw mut all, libc::SIGBUS);
            libc::sigdelset(&raw mut all, libc::SIGSYS);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            before
        };
        Self {
            before,
            _thread: PhantomData,
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set is the one that was in force.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut());
        }
    }
}

/// Starts a thread with all signals blocked but those of faults, so that the program's handlers run on it only where it
/// touches the program's memory.
pub fn spawn_quiet(
    name: &str,
    stack: usize,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let _signals = BlockedSignals::new();
    std::thread::Builder::new()
        .name(name.to_owned())
        .stack_size(stack)
        .spawn(body)
        .map(drop)
}
