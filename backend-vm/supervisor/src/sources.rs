//! Tokens of the descriptors in an event loop.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::{AsRawFd, OwnedFd};

use event_manager::{EventOps, EventSet, Events};

use super::connection::Connection;
use super::workers::Log;

/// Descriptors in an event loop, by token.
#[derive(Debug)]
pub struct Sources<S> {
    known: HashMap<u32, S>,
    next: u32,
}

impl<S> Default for Sources<S> {
    fn default() -> Self {
        Self {
            known: HashMap::new(),
            next: 0,
        }
    }
}

impl<S: Copy> Sources<S> {
    /// Returns a new token.
    pub fn add(&mut self, source: S) -> u32 {
        loop {
            self.next = self.next.wrapping_add(1);
            if let Entry::Vacant(entry) = self.known.entry(self.next) {
                entry.insert(source);
                return self.next;
            }
        }
    }

    /// Registers a descriptor with the event loop, to be read, and returns its token.
    ///
    /// # Errors
    /// The system has no room for one more descriptor in the loop.
    pub fn watch(
        &mut self,
        ops: &mut EventOps<'_>,
        fd: &impl AsRawFd,
        source: S,
    ) -> Result<u32, event_manager::Error> {
        let token = self.add(source);
        if let Err(error) = ops.add(Events::with_data(fd, token, EventSet::IN)) {
            self.remove(token);
            return Err(error);
        }
        Ok(token)
    }

    /// Registers a worker's stream and its log with the event loop, or neither. Returns their tokens beside the stream.
    ///
    /// # Errors
    /// The system has no room for two more descriptors in the loop.
    pub fn watch_worker(
        &mut self,
        ops: &mut EventOps<'_>,
        socket: OwnedFd,
        log: &Log,
        (of_stream, of_log): (S, S),
    ) -> Result<(Connection, [u32; 2]), event_manager::Error> {
        let stream = self.add(of_stream);
        let mut peer = Connection::register(ops, socket, stream, true).map_err(|(error, _)| {
            self.remove(stream);
            error
        })?;
        match self.watch(ops, log.socket(), of_log) {
            Ok(log) => Ok((peer, [stream, log])),
            Err(error) => {
                peer.forget(ops);
                self.remove(stream);
                Err(error)
            }
        }
    }

    pub fn get(&self, token: u32) -> Option<S> {
        self.known.get(&token).copied()
    }

    pub fn remove(&mut self, token: u32) -> Option<S> {
        self.known.remove(&token)
    }
}
