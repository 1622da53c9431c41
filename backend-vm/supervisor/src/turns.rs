//! Streams with more messages than they may have executed in one turn: they go on when all others have had theirs.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Messages of one stream that are executed in a turn.
pub const TURN: usize = 16;

/// The streams that have not finished their turn, by their tokens. Readable while there are some.
#[derive(Debug)]
pub struct Turns {
    tokens: BTreeSet<u32>,
    bell: EventFd,
}

impl Turns {
    /// # Errors
    /// As `eventfd`.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            tokens: BTreeSet::new(),
            bell: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// A stream has more to say.
    pub fn add(&mut self, token: u32) {
        self.tokens.insert(token);
        // Full, it is readable as well.
        let _ = self.bell.write(1);
    }

    /// Those whose turn has come again.
    pub fn take(&mut self) -> BTreeSet<u32> {
        // Empty when there are none.
        let _ = self.bell.read();
        std::mem::take(&mut self.tokens)
    }
}

impl AsRawFd for Turns {
    fn as_raw_fd(&self) -> RawFd {
        self.bell.as_raw_fd()
    }
}
