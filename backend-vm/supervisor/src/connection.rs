//! One stream of the event loop, with what was read and what is still to be written.

use std::os::fd::{AsRawFd, OwnedFd};

use event_manager::{EventOps, EventSet, Events};
use wormhole_ring::control::Message;

use super::alarm;
use wormhole_link::channel::{ChannelError, Incoming, Outgoing};

/// A registered stream.
#[derive(Debug)]
pub struct Peer {
    socket: OwnedFd,
    pub incoming: Incoming,
    outgoing: Outgoing,
    token: u32,
    /// What the event loop watches it for.
    watched: EventSet,
    /// Whether the other side may still say something.
    reads: bool,
}

impl Peer {
    /// Registers `socket` with the event loop, under `token`.
    ///
    /// # Errors
    /// The loop cannot watch the descriptor, which comes back.
    pub fn register(
        ops: &mut EventOps<'_>,
        socket: OwnedFd,
        token: u32,
        takes_descriptors: bool,
    ) -> Result<Self, (event_manager::Error, OwnedFd)> {
        // A read that finds a byte out of band frees it unread, with descriptors that came along: the kernel would close
        // them here, and wait for that. In line they are read.
        let _ = rustix::net::sockopt::set_socket_oobinline(&socket, true);
        if let Err(error) = ops.add(Events::with_data(&socket, token, EventSet::IN)) {
            return Err((error, socket));
        }
        Ok(Self {
            socket,
            incoming: Incoming::new(takes_descriptors),
            outgoing: Outgoing::default(),
            token,
            watched: EventSet::IN,
            reads: true,
        })
    }

    /// As [`fill`](Self::fill), of a stream that its sender may have a copy of. Whether the read waited all the same.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    pub fn fill_foreign(
        &mut self,
        ops: &mut EventOps<'_>,
        may: bool,
        set: EventSet,
    ) -> (Result<bool, ChannelError>, bool) {
        alarm::within(|| self.fill(ops, may, set))
    }

    /// Reads what is there, once, if the stream `may` be read now. Else the loop does not watch it for input until
    /// [`set_reading`](Self::set_reading). Whether it was read.
    ///
    /// # Errors
    /// As [`Incoming::fill`]; `Ended` for a stream that is not read and of which `set` announces the end, since the loop
    /// would announce that again and again.
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
    /// As [`Outgoing::send`].
    pub fn send(
        &mut self,
        ops: &mut EventOps<'_>,
        message: &Message<'_>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ChannelError> {
        self.outgoing.send(&self.socket, message, descriptors)?;
        self.watch(ops);
        Ok(())
    }

    /// Writes what waited.
    ///
    /// # Errors
    /// As [`Outgoing::flush`].
    pub fn flush(&mut self, ops: &mut EventOps<'_>) -> Result<(), ChannelError> {
        self.outgoing.flush(&self.socket)?;
        self.watch(ops);
        Ok(())
    }

    /// Descriptors that the reader may not have taken yet.
    pub fn underway(&mut self) -> usize {
        self.outgoing.underway(&self.socket)
    }

    /// Those of them that this process holds.
    pub fn unsent(&self) -> usize {
        self.outgoing.unsent()
    }

    /// Whether the reader has left something unread.
    pub fn is_waiting(&self) -> bool {
        self.outgoing.is_waiting()
    }

    /// Takes the stream out of the event loop. To be called before it is dropped.
    pub fn forget(&self, ops: &mut EventOps<'_>) {
        forget(ops, &self.socket);
    }

    pub fn token(&self) -> u32 {
        self.token
    }

    /// The socket, and the descriptors that wait in it: all that is closed with the stream.
    pub fn into_descriptors(self) -> Vec<OwnedFd> {
        let (socket, mut descriptors) = self.into_parts();
        descriptors.push(socket);
        descriptors
    }

    /// The socket, and apart from it the descriptors that wait in it.
    pub fn into_parts(self) -> (OwnedFd, Vec<OwnedFd>) {
        let incoming = self.incoming.into_descriptors();
        let descriptors = incoming.chain(self.outgoing.into_descriptors());
        (self.socket, descriptors.collect())
    }

    /// Closes the stream in both directions; the event loop announces its end.
    pub fn shut_down(&self) {
        shut_down(&self.socket);
    }

    /// Reads, or does not: the other side has said its last word but still listens, or is to wait.
    pub fn set_reading(&mut self, ops: &mut EventOps<'_>, reads: bool) {
        self.reads = reads;
        self.watch(ops);
    }

    fn watch(&mut self, ops: &mut EventOps<'_>) {
        let mut set = EventSet::empty();
        set.set(EventSet::IN, self.reads);
        set.set(EventSet::OUT, self.outgoing.is_waiting());
        if set != self.watched {
            match ops.modify(Events::with_data(&self.socket, self.token, set)) {
                Ok(()) => self.watched = set,
                Err(error) => tracing::error!("the event loop: {error}"),
            }
        }
    }
}

/// Whether a descriptor from outside is a stream socket, which does not make the event loop wait when it is looked at, as
/// a file of any file system can.
pub fn is_stream(fd: &OwnedFd) -> bool {
    use rustix::net::{AddressFamily, SocketType, sockopt};
    let domain = sockopt::socket_domain(fd);
    domain.is_ok_and(|domain| [AddressFamily::UNIX, AddressFamily::VSOCK].contains(&domain))
        && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
}

/// Closes a stream in both directions: its other side sees the end now, whenever the last descriptor is closed.
pub fn shut_down(stream: &OwnedFd) {
    // One that has ended is no worse.
    let _ = rustix::net::shutdown(stream, rustix::net::Shutdown::Both);
}

/// Takes a descriptor out of the event loop.
pub fn forget(ops: &mut EventOps<'_>, fd: &impl AsRawFd) {
    if let Err(error) = ops.remove(Events::empty(fd)) {
        tracing::error!("the event loop: {error}");
    }
}
