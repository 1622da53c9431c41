//! Stream of the event loop, with the data read from it and the messages queued for it.

use std::os::fd::{AsRawFd, OwnedFd};

use event_manager::{EventOps, EventSet, Events};
use wormhole_ring::control::Message;

use wormhole_link::channel::{ChannelError, Incoming, Outgoing};

/// A stream registered with the event loop.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    pub incoming: Incoming,
    outgoing: Outgoing,
    token: u32,
    /// Events for which the loop watches it, until [`forget`](Self::forget).
    watched: Option<EventSet>,
    /// Whether the loop watches it for input.
    reads: bool,
    /// Whether a queued message was refused, since the user has too many descriptors in flight.
    is_delayed: bool,
}

impl Connection {
    /// Registers `socket` with the event loop, under `token`. No other process may have a copy of
    /// it.
    ///
    /// # Errors
    /// The loop cannot watch the descriptor, which is returned.
    pub fn register(
        ops: &mut EventOps<'_>,
        socket: OwnedFd,
        token: u32,
        takes_descriptors: bool,
    ) -> Result<Self, (event_manager::Error, OwnedFd)> {
        // Without this option, a read that meets a byte out of band frees it unread, and the kernel
        // closes the descriptors that came with it in this process, which may block. With it, the
        // byte is read as data.
        let _ = rustix::net::sockopt::set_socket_oobinline(&socket, true);
        if let Err(error) = ops.add(Events::with_data(&socket, token, EventSet::IN)) {
            return Err((error, socket));
        }
        Ok(Self {
            socket,
            incoming: Incoming::new(takes_descriptors),
            outgoing: Outgoing::default(),
            token,
            watched: Some(EventSet::IN),
            reads: true,
            is_delayed: false,
        })
    }

    /// Reads once, if the stream `may` be read now; otherwise stops watching it for input until
    /// [`set_reading`](Self::set_reading). Returns whether it was read.
    ///
    /// # Errors
    /// Same as [`Incoming::fill`]. Also `Ended` for a stream that may not be read and whose end is
    /// in `set`, because the loop would announce that end again and again.
    pub fn fill(
        &mut self,
        ops: &mut EventOps<'_>,
        may: bool,
        set: EventSet,
    ) -> Result<bool, ChannelError> {
        if may {
            self.incoming.fill(&self.socket)?;
        } else if set.intersects(EventSet::HANG_UP | EventSet::ERROR) {
            return Err(ChannelError::Ended);
        } else {
            self.set_reading(ops, false);
        }
        Ok(may)
    }

    /// Sends a message, or queues it for when the reader has room.
    ///
    /// # Errors
    /// Same as [`Outgoing::send`].
    pub fn send(
        &mut self,
        ops: &mut EventOps<'_>,
        message: &Message<'_>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ChannelError> {
        let sent = self.outgoing.send(&self.socket, message, descriptors);
        self.sent(ops, sent)
    }

    /// Sends queued messages.
    ///
    /// # Errors
    /// Same as [`Outgoing::flush`].
    pub fn flush(&mut self, ops: &mut EventOps<'_>) -> Result<(), ChannelError> {
        let sent = self.outgoing.flush(&self.socket);
        self.sent(ops, sent)
    }

    fn sent(
        &mut self,
        ops: &mut EventOps<'_>,
        sent: Result<(), ChannelError>,
    ) -> Result<(), ChannelError> {
        const REFUSED: Option<i32> = Some(libc::ETOOMANYREFS);
        // Other processes of the user may have sent these. The message stays in the queue.
        self.is_delayed = matches!(
            &sent,
            Err(ChannelError::Socket(error)) if error.raw_os_error() == REFUSED
        );
        self.watch(ops);
        if self.is_delayed { Ok(()) } else { sent }
    }

    /// Returns whether to [flush](Self::flush) it after a while, although the loop reports no room.
    pub fn is_delayed(&self) -> bool {
        self.is_delayed
    }

    /// Returns the number of sent descriptors that the reader may not have received yet.
    pub fn underway(&mut self) -> usize {
        self.outgoing.underway(&self.socket)
    }

    /// Returns at least as many as [`underway`](Self::underway), from its last result.
    pub fn unread(&self) -> usize {
        self.outgoing.unread()
    }

    /// Returns whether messages are queued because the reader has left others unread.
    pub fn is_waiting(&self) -> bool {
        self.outgoing.is_waiting()
    }

    /// Removes the stream from the event loop, once. Call it before dropping the stream.
    pub fn forget(&mut self, ops: &mut EventOps<'_>) {
        if self.watched.take().is_some() {
            forget(ops, &self.socket);
        }
    }

    pub fn token(&self) -> u32 {
        self.token
    }

    /// Returns the socket and the queued descriptors: all descriptors that closing the stream would
    /// close.
    pub fn into_descriptors(self) -> Vec<OwnedFd> {
        let (socket, mut descriptors) = self.into_parts();
        descriptors.push(socket);
        descriptors
    }

    /// Returns the socket, and separately the queued descriptors.
    pub fn into_parts(self) -> (OwnedFd, Vec<OwnedFd>) {
        let incoming = self.incoming.into_descriptors();
        let descriptors = incoming.chain(self.outgoing.into_descriptors());
        (self.socket, descriptors.collect())
    }

    /// Shuts the stream down in both directions. The event loop then reports its end.
    pub fn shut_down(&self) {
        shut_down(&self.socket);
    }

    /// Sets whether the loop reads the stream. It does not after the other side's last message, or
    /// while the stream has to wait.
    pub fn set_reading(&mut self, ops: &mut EventOps<'_>, reads: bool) {
        self.reads = reads;
        self.watch(ops);
    }

    fn watch(&mut self, ops: &mut EventOps<'_>) {
        let Some(watched) = self.watched else {
            return;
        };
        let mut set = EventSet::empty();
        set.set(EventSet::IN, self.reads);
        set.set(
            EventSet::OUT,
            self.outgoing.is_waiting() && !self.is_delayed,
        );
        if set != watched {
            match ops.modify(Events::with_data(&self.socket, self.token, set)) {
                Ok(()) => self.watched = Some(set),
                Err(error) => tracing::error!("the event loop: {error}"),
            }
        }
    }
}

/// Shuts a stream down in both directions, so that its peer sees the end at once, even while copies
/// of the descriptor are open.
pub fn shut_down(stream: &OwnedFd) {
    // A stream that has ended already needs no shutdown.
    let _ = rustix::net::shutdown(stream, rustix::net::Shutdown::Both);
}

/// Removes a descriptor from the event loop.
pub fn forget(ops: &mut EventOps<'_>, fd: &impl AsRawFd) {
    if let Err(error) = ops.remove(Events::empty(fd)) {
        tracing::error!("the event loop: {error}");
    }
}
