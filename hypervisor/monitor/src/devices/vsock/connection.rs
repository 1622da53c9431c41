//! Translates between the host's socket and the credit-controlled packets of one connection.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::num::Wrapping;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use super::opening::{Accepted, Hold};
use super::packet::{Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};

/// Bytes that a guest may send before the host's socket accepts them.
pub const BUFFER: u32 = 64 << 10;

/// Port pair that identifies a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// The guest's port.
    pub guest_port: u32,
    /// The host's port.
    pub host_port: u32,
}

/// Events for which the event loop waits on a connection's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interest {
    /// Data from the host. A hang-up is always reported.
    pub read: bool,
    /// Room for data to the host.
    pub write: bool,
}

/// State of a connection after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The connection stays open.
    Lives,
    /// The connection is closed, and the guest must be sent a reset.
    Reset,
    /// The connection is closed by the guest.
    Gone,
}

/// A connection that is open or is being opened.
#[derive(Debug)]
pub struct Connection {
    key: Key,
    stream: UnixStream,
    /// Channel from the thread that opens the connection, until it has sent the stream. `stream` hangs up then.
    opening: Option<Receiver<UnixStream>>,
    /// Dropped when the guest has closed the connection. The host's end alone does not close one that has it.
    hold: Option<Hold>,
    response_due: bool,
    credit_update_due: bool,
    /// Whether a credit request was sent: the socket may have data, and the guest's credit is used up.
    credit_asked: bool,
    shutdown_due: u32,
    shutdown_sent: u32,
    guest_shutdown: u32,
    /// Whether the socket may have data; cleared when a read would block.
    readable: bool,
    /// Whether the host closed its end.
    hung_up: bool,
    end_of_file: bool,
    /// Bytes from the guest that the host's socket has not accepted yet, at most [`BUFFER`].
    outgoing: VecDeque<u8>,
    forwarded: Wrapping<u32>,
    forwarded_told: Wrapping<u32>,
    sent: Wrapping<u32>,
    peer_buffer: u32,
    peer_forwarded: Wrapping<u32>,
    /// Whether the connection is in the mux's queue of connections with a packet.
    pub queued: bool,
    /// Events for which the event loop waits; `None` if the socket is not watched.
    pub watched: Option<Interest>,
}

impl Connection {
    /// Creates a connection that responds to `request` once it is open.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking.
    pub fn new(key: Key, accepted: Accepted, request: &Header) -> io::Result<Self> {
        let (stream, opening, hold) = match accepted {
            Accepted::Open(stream) => (stream, None, None),
            Accepted::Opening(opening) => (opening.bell, Some(opening.stream), opening.hold),
        };
        stream.set_nonblocking(true)?;
        Ok(Self {
            key,
            stream,
            response_due: opening.is_none(),
            opening,
            hold,
            credit_update_due: false,
            credit_asked: false,
            shutdown_due: 0,
            shutdown_sent: 0,
            guest_shutdown: 0,
            readable: false,
            hung_up: false,
            end_of_file: false,
            outgoing: VecDeque::new(),
            forwarded: Wrapping(0),
            forwarded_told: Wrapping(0),
            sent: Wrapping(0),
            peer_buffer: request.buf_alloc.get(),
            peer_forwarded: Wrapping(request.fwd_cnt.get()),
            queued: false,
            watched: None,
        })
    }

    /// Returns the connection that takes the place of this one because its stream is there.
    pub fn opened(&mut self) -> Option<Self> {
        let stream = self.opening.as_ref()?.try_recv().ok()?;
        let request = Header {
            buf_alloc: self.peer_buffer.into(),
            fwd_cnt: self.peer_forwarded.0.into(),
            ..Header::default()
        };
        let mut opened = Self::new(self.key, stream.into(), &request)
            .inspect_err(|error| tracing::warn!(%error, "no socket for a guest's connection"))
            .ok()?;
        opened.hold = self.hold.take();
        Some(opened)
    }

    /// Returns the socket's descriptor, for the event loop.
    pub fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// Processes a packet of this connection from the guest.
    pub fn receive(&mut self, header: &Header, payload: &[u8]) -> Fate {
        if self.opening.is_some() {
            // The guest sends nothing else before it has the response.
            return match header.op() {
                Op::Reset => Fate::Gone,
                _ => Fate::Reset,
            };
        }
        let had_credit = self.credit() > 0;
        self.peer_buffer = header.buf_alloc.get();
        self.peer_forwarded = Wrapping(header.fwd_cnt.get());
        if !had_credit && self.credit() > 0 {
            // The socket may have data, which only a read can show.
            self.readable = true;
            self.credit_asked = false;
        }
        match header.op() {
            Op::Data => self.receive_data(payload),
            Op::Shutdown => {
                self.guest_shutdown |= header.flags.get() & SHUTDOWN_BOTH;
                self.flush()
            }
            Op::CreditUpdate => Fate::Lives,
            Op::CreditRequest => {
                self.credit_update_due = true;
                Fate::Lives
            }
            Op::Reset => {
                // Delivers the earlier data as far as the socket accepts it.
                self.flush();
                Fate::Gone
            }
            Op::Request | Op::Response | Op::Unknown(_) => Fate::Reset,
        }
    }

    fn receive_data(&mut self, payload: &[u8]) -> Fate {
        let overdrawn = self.outgoing.len() + payload.len() > BUFFER as usize;
        if overdrawn || self.guest_shutdown & SHUTDOWN_SEND != 0 {
            return Fate::Reset;
        }
        self.outgoing.extend(payload);
        self.flush()
    }

    /// Handles an event of the socket.
    pub fn host_ready(&mut self, readable: bool, hung_up: bool) -> Fate {
        if self.opening.is_some() {
            return if hung_up { Fate::Reset } else { Fate::Lives };
        }
        self.readable |= readable || hung_up;
        self.hung_up |= hung_up;
        self.flush()
    }

    /// Writes the guest's data to the socket as far as the socket accepts it.
    fn flush(&mut self) -> Fate {
        while !self.outgoing.is_empty() {
            let (front, _) = self.outgoing.as_slices();
            match self.stream.write(front) {
                Ok(written) => {
                    self.outgoing.drain(..written);
                    self.forwarded += u32::try_from(written).unwrap_or(0);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The host closed its end, so that the data cannot be delivered.
                Err(_) if self.hold.is_none() => return Fate::Reset,
                Err(_) => {
                    self.forwarded += u32::try_from(self.outgoing.len()).unwrap_or(0);
                    self.outgoing.clear();
                    self.hung_up = true;
                }
            }
        }
        if (self.forwarded - self.forwarded_told).0 >= BUFFER / 4 {
            self.credit_update_due = true;
        }
        if self.outgoing.is_empty() && self.guest_shutdown & SHUTDOWN_SEND != 0 {
            if self.guest_shutdown & SHUTDOWN_RECEIVE != 0 {
                return Fate::Reset;
            }
            // The host reads end of file. An error means that it has closed its end.
            if self.stream.shutdown(Shutdown::Write).is_err() {
                self.hung_up = true;
            }
        }
        Fate::Lives
    }

    /// Delivers the remaining data after the guest has ended, waiting for the host until `deadline`.
    pub fn finish(mut self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        if self.outgoing.is_empty() || left.is_zero() {
            return;
        }
        let bytes = self.outgoing.make_contiguous();
        let delivered = self
            .stream
            .set_nonblocking(false)
            .and_then(|()| self.stream.set_write_timeout(Some(left)))
            .and_then(|()| self.stream.write_all(bytes));
        if let Err(error) = delivered {
            tracing::debug!(%error, key = ?self.key, "the guest's last bytes are lost");
        }
    }

    /// Returns the number of bytes that the guest can receive.
    fn credit(&self) -> u32 {
        let in_flight = (self.sent - self.peer_forwarded).0;
        self.peer_buffer.saturating_sub(in_flight)
    }

    fn may_read(&self) -> bool {
        !self.end_of_file && self.guest_shutdown & SHUTDOWN_RECEIVE == 0
    }

    /// Returns whether [`Self::produce`] may return a packet.
    pub fn has_packet(&self) -> bool {
        self.response_due
            || self.shutdown_due & !self.shutdown_sent != 0
            || self.credit_update_due
            || self.readable && self.may_read() && (self.credit() > 0 || !self.credit_asked)
            || self.end_of_file && self.ends() & !self.shutdown_sent != 0
    }

    /// Returns the directions that end with the host's data.
    fn ends(&self) -> u32 {
        match self.hung_up && self.hold.is_none() {
            true => SHUTDOWN_BOTH,
            false => SHUTDOWN_SEND,
        }
    }

    /// Returns operation, flags and length of the next packet for the guest. Writes its payload to `payload`, which
    /// must
    /// not be empty.
    pub fn produce(&mut self, payload: &mut [u8]) -> Option<(Op, u32, usize)> {
        if self.response_due {
            self.response_due = false;
            return Some((Op::Response, 0, 0));
        }
        if self.credit_update_due {
            self.credit_update_due = false;
            return Some((Op::CreditUpdate, 0, 0));
        }
        if self.readable && self.may_read() {
            let credit = usize::try_from(self.credit()).unwrap_or(usize::MAX);
            if credit == 0 {
                if !self.credit_asked {
                    self.credit_asked = true;
                    return Some((Op::CreditRequest, 0, 0));
                }
            } else {
                let limit = credit.min(payload.len());
                match self.stream.read(&mut payload[..limit]) {
                    Ok(0) => self.end_of_file = true,
                    Ok(len) => {
                        self.sent += u32::try_from(len).unwrap_or(0);
                        return Some((Op::Data, 0, len));
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => self.readable = false,
                    Err(_) => {
                        self.end_of_file = true;
                        self.hung_up = true;
                    }
                }
            }
        }
        if self.end_of_file {
            self.shutdown_due = self.ends();
        }
        if self.shutdown_due & !self.shutdown_sent != 0 {
            self.shutdown_sent |= self.shutdown_due;
            return Some((Op::Shutdown, self.shutdown_sent, 0));
        }
        None
    }

    /// Returns the header of a packet that [`Self::produce`] returned, with the current credit.
    pub fn header(&mut self, guest_cid: u64, op: Op, flags: u32, len: usize) -> Header {
        self.forwarded_told = self.forwarded;
        Header {
            buf_alloc: BUFFER.into(),
            fwd_cnt: self.forwarded.0.into(),
            ..super::mux::header_to_guest(guest_cid, self.key, op, flags, len)
        }
    }

    /// Returns the events to wait for; `None` after a hang-up, since no further event of the socket matters.
    pub fn interest(&self) -> Option<Interest> {
        (!self.hung_up).then(|| Interest {
            read: !self.readable && self.may_read() && self.credit() > 0,
            write: !self.outgoing.is_empty(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const KEY: Key = Key {
        guest_port: 1,
        host_port: 2,
    };

    /// Returns a connection whose socket and outgoing buffer are full, the host's end, and the bytes sent.
    fn full() -> (Connection, UnixStream, usize) {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let opened = Connection::new(KEY, ours.into(), &Header::default());
        let mut connection = opened.expect("a socket");
        let header = Header {
            op: u16::from(Op::Data).into(),
            ..Header::default()
        };
        let chunk = [7; 4096];
        let mut sent = 0;
        while connection.outgoing.len() + chunk.len() <= BUFFER as usize {
            assert_eq!(connection.receive(&header, &chunk), Fate::Lives);
            sent += chunk.len();
        }
        (connection, theirs, sent)
    }

    #[test]
    fn the_last_bytes_reach_a_host_that_reads() {
        let (connection, mut theirs, sent) = full();
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).map(|_| all.len())
        });
        connection.finish(Instant::now() + Duration::from_secs(60));
        let read = reader.join().expect("thread").expect("end of file");
        assert_eq!(read, sent);
    }

    #[test]
    fn a_host_that_does_not_read_holds_nobody_up() {
        let (connection, _theirs, _) = full();
        let start = Instant::now();
        connection.finish(start + Duration::from_millis(20));
        assert!(start.elapsed() < Duration::from_secs(30));
        let (connection, _theirs, _) = full();
        connection.finish(start);
    }

    #[test]
    fn a_full_socket_is_watched_for_room_and_a_hung_up_one_for_nothing() {
        let (mut connection, theirs, _) = full();
        assert!(connection.interest().is_some_and(|interest| interest.write));
        drop(theirs);
        assert_eq!(connection.host_ready(false, true), Fate::Reset);
        assert_eq!(connection.interest(), None);
    }
}
