//! Notices that the backend is gone while no call waits for it.
//!
//! Records and launches read only the session's status word, and a killed backend writes nothing there. So one thread
//! sleeps on the control stream and writes the word when the stream ends. It never reads from the stream, so other
//! threads receive every message.

use std::io;
use std::time::Duration;

use wormhole_ring::status::EndCause;

use super::Session;
use super::wait::BACKEND_LOST;
use crate::signals::spawn_quiet;

/// Stack bytes, enough for one system call; the thread-local storage of the program's libraries is added to them.
const STACK: usize = 64 << 10;

/// Starts the thread.
pub fn start(session: &'static Session) -> io::Result<()> {
    spawn_quiet("wormhole-watch", STACK, || watch(session))
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
