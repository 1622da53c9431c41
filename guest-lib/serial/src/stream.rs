//! One stream: a socket on this side, the bytes that wait for it, and the credit of both directions.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Receiver;

use rustix::event::PollFlags;

use crate::closer::ProcessSocket;
use crate::frame::{Frame, MAX_DATA};

/// Bytes of one direction of a stream that may be on the way or wait for their reader.
pub const WINDOW: u32 = 64 << 10;

/// A stream of the backend that is being opened.
#[derive(Debug)]
pub struct Opening {
    /// Hangs up when the stream is there, or is refused.
    pub bell: UnixStream,
    /// Has the stream by then, unless it is refused.
    pub stream: Receiver<UnixStream>,
}

/// Socket on this side.
#[derive(Debug)]
enum Socket {
    /// Agent's socket, with a process of a user at its other end.
    Process(ProcessSocket, u32),
    /// Host's socket, with the backend at its other end.
    Backend(UnixStream),
    Opening(Opening),
}

impl Socket {
    fn stream(&self) -> Option<&UnixStream> {
        match self {
            Self::Process(socket, _) => Some(socket),
            Self::Backend(socket) => Some(socket),
            Self::Opening(_) => None,
        }
    }
}

/// A stream.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    /// Bytes of the other side that the socket has not taken.
    outgoing: VecDeque<u8>,
    /// Bytes that the other side may send, by the frames that were produced.
    room: u32,
    /// Bytes that the socket has taken, and that are not granted again yet.
    taken: u32,
    /// Bytes that the other side takes.
    credit: u32,
    /// Whether the other side does not know the stream yet.
    is_new: bool,
    /// Whether a read of the socket may return bytes or its end.
    is_readable: bool,
    /// Whether the socket's other end is gone, so that its events say nothing more.
    is_hung_up: bool,
    /// Whether all bytes of the socket have been sent.
    has_ended: bool,
    /// Whether the other side has ended the stream.
    is_closed: bool,
}

/// A frame's bytes exceed the credit of its stream, or the frame follows the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overdrawn;

impl Stream {
    fn new(socket: Socket, is_new: bool) -> Self {
        Self {
            socket,
            outgoing: VecDeque::new(),
            room: WINDOW,
            taken: 0,
            credit: WINDOW,
            is_new,
            is_readable: false,
            is_hung_up: false,
            has_ended: false,
            is_closed: false,
        }
    }

    /// Creates the agent's side of a stream, which the host does not know yet. The socket must not block.
    pub fn of_process(socket: ProcessSocket, user: u32) -> Self {
        Self::new(Socket::Process(socket, user), true)
    }

    /// Creates the host's side of a stream.
    pub fn of_backend(opening: Opening) -> Self {
        Self::new(Socket::Opening(opening), false)
    }

    /// Returns whether it is that of a process of this user.
    pub fn is_of(&self, user: u32) -> bool {
        matches!(self.socket, Socket::Process(_, of) if of == user)
    }

    /// Takes bytes of the other side.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<(), Overdrawn> {
        let length = u32::try_from(bytes.len()).map_err(|_| Overdrawn)?;
        if self.is_closed {
            return Err(Overdrawn);
        }
        self.room = self.room.checked_sub(length).ok_or(Overdrawn)?;
        self.outgoing.extend(bytes);
        self.flush();
        Ok(())
    }

    /// Takes credit from the other side.
    pub fn grant(&mut self, bytes: u32) -> Result<(), Overdrawn> {
        let credit = self.credit.saturating_add(bytes);
        if self.is_closed || credit > WINDOW {
            return Err(Overdrawn);
        }
        self.credit = credit;
        Ok(())
    }

    /// Takes the other side's end.
    pub fn close(&mut self) -> Result<(), Overdrawn> {
        match std::mem::replace(&mut self.is_closed, true) {
            true => Err(Overdrawn),
            false => Ok(()),
        }
    }

    /// Returns whether the other side has ended the stream, and the socket has all of its bytes.
    pub fn is_over(&self) -> bool {
        self.is_closed && self.outgoing.is_empty()
    }

    /// Returns the socket and the events to wait for; `None` after a hang-up.
    pub fn interest(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let mut flags = PollFlags::empty();
        if self.is_hung_up {
            return None;
        }
        let socket = match &self.socket {
            Socket::Opening(opening) => return Some((opening.bell.as_fd(), flags)),
            Socket::Process(socket, _) => socket.as_fd(),
            Socket::Backend(socket) => socket.as_fd(),
        };
        flags.set(PollFlags::IN, self.may_read() && !self.is_readable);
        flags.set(PollFlags::OUT, !self.outgoing.is_empty());
        Some((socket, flags))
    }

    /// Handles the events of the socket.
    pub fn ready(&mut self, events: PollFlags) {
        let is_over = events.intersects(PollFlags::HUP | PollFlags::ERR);
        if let Socket::Opening(opening) = &self.socket {
            if !is_over {
                return;
            }
            match opening.stream.try_recv() {
                Ok(stream) if stream.set_nonblocking(true).is_ok() => {
                    self.socket = Socket::Backend(stream);
                    self.flush();
                }
                _ => self.hang_up(),
            }
            return;
        }
        self.is_readable |= events.contains(PollFlags::IN);
        if is_over {
            self.is_hung_up = true;
            self.is_readable = true;
        }
        self.flush();
    }

    /// The socket takes nothing more, and has nothing but what it had.
    fn hang_up(&mut self) {
        self.outgoing.clear();
        self.is_hung_up = true;
        match self.socket {
            Socket::Process(..) | Socket::Backend(_) => self.is_readable = true,
            Socket::Opening(_) => self.has_ended = true,
        }
    }

    /// Returns the number of bytes that wait for the socket.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.outgoing.len()
    }

    /// Writes what waits, as far as the socket takes it.
    fn flush(&mut self) {
        let Some(mut socket) = self.socket.stream() else {
            return;
        };
        while !self.outgoing.is_empty() {
            match socket.write(self.outgoing.as_slices().0) {
                Ok(count) => {
                    self.outgoing.drain(..count);
                    self.taken += u32::try_from(count).unwrap_or_default();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => return self.hang_up(),
            }
        }
    }

    fn may_read(&self) -> bool {
        self.credit > 0 && !self.is_closed && !self.has_ended
    }

    fn grants(&self) -> bool {
        self.taken >= WINDOW / 4 && !self.is_closed
    }

    /// Returns whether [`Self::produce`] may append a frame.
    pub fn has_frame(&self) -> bool {
        self.is_new || self.grants() || self.is_readable && self.may_read() || self.has_ended
    }

    /// Appends at most a frame of each kind. Returns whether the stream has ended on this side, so that the other side has
    /// its last frame.
    pub fn produce(&mut self, stream: u32, out: &mut Vec<u8>) -> bool {
        if std::mem::take(&mut self.is_new) {
            Frame::Open { stream }.encode(out);
        }
        if self.grants() {
            let bytes = std::mem::take(&mut self.taken);
            self.room += bytes;
            Frame::Credit { stream, bytes }.encode(out);
        }
        if self.is_readable && self.may_read() {
            self.read(stream, out);
        }
        if self.has_ended && !self.is_closed {
            Frame::Close { stream }.encode(out);
        }
        self.has_ended
    }

    /// Reads from the socket and appends what it has.
    fn read(&mut self, stream: u32, out: &mut Vec<u8>) {
        let mut bytes = [0; MAX_DATA];
        let limit = usize::try_from(self.credit).map_or(MAX_DATA, |credit| credit.min(MAX_DATA));
        let read = match &mut self.socket {
            Socket::Opening(_) => return,
            Socket::Process(socket, _) => socket.receive(&mut bytes[..limit]),
            Socket::Backend(socket) => socket.read(&mut bytes[..limit]),
        };
        match read {
            Ok(count @ 1..) => {
                self.credit -= u32::try_from(count).unwrap_or(self.credit);
                let bytes = &bytes[..count];
                Frame::Data { stream, bytes }.encode(out);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.is_readable = false,
            Ok(0) | Err(_) => self.has_ended = true,
        }
    }
}
