//! Streams with more messages than one turn executes. They continue after all others have had their
//! turn.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Number of one stream's messages executed in a turn.
pub const TURN: usize = 16;

/// Tokens of the streams that have not finished their turn. Readable while there are any.
#[derive(Debug)]
pub struct Turns {
    tokens: BTreeSet<u32>,
    bell: EventFd,
}

impl Turns {
    /// # Errors
    /// Same as `eventfd`.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            tokens: BTreeSet::new(),
            bell: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// Adds a stream with further messages.
    pub fn add(&mut self, token: u32) {
        self.tokens.insert(token);
        // The write fails only if the counter is full, and then the eventfd is readable as well.
        let _ = self.bell.write(1);
    }

    /// Takes the streams whose turn has come again.
    pub fn take(&mut self) -> BTreeSet<u32> {
        // The read fails if there are none.
        let _ = self.bell.read();
        std::mem::take(&mut self.tokens)
    }
}

impl AsRawFd for Turns {
    fn as_raw_fd(&self) -> RawFd {
        self.bell.as_raw_fd()
    }
}
