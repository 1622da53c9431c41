//! Notices that the backend is gone while no call waits for it.
//!
//! Records and launches read only the session's status word, and a killed backend writes nothing there. So one thread
//! sleeps on the control stream and writes the word when the stream ends. It never reads from the stream, so other
//! threads receive every message.

use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

use wormhole_ring::status::EndCause;

use super::Session;
use super::wait::BACKEND_LOST;

/// Stack bytes, enough for one system call; the thread-local storage of the program's libraries is added to them.
const STACK: usize = 64 << 10;

/// Starts the thread.
pub fn start(session: &'static Session) -> io::Result<()> {
    spawn_quiet("wormhole-watch", STACK, || watch(session))
}

/// Starts a thread with all signals blocked, so that the program's handlers never run on it.
pub fn spawn_quiet(
    name: &str,
    stack: usize,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let mut all = MaybeUninit::uninit();
    let mut old = MaybeUninit::uninit();
    // SAFETY: both sets outlive the calls; the first is written before it is read. A new thread inherits
    // the mask of the one that starts it.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let started = std::thread::Builder::new()
        .name(name.to_owned())
        .stack_size(stack)
        .spawn(body);
    // SAFETY: the call above, which cannot fail with these arguments, wrote the old mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
    started.map(drop)
}

fn watch(session: &Session) {
    while session.control.sleep(Duration::MAX) {}
    session.end_of_stream();
}

impl Session {
    /// Records that the control stream has ended. A cause that the backend has already written stays.
    #[cold]
    pub fn end_of_stream(&self) {
        self.status
            .set_once(BACKEND_LOST.0, EndCause::SupervisorLost);
    }
}
