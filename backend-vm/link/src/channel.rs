//! Sends and receives control messages and file descriptors over sockets.
//!
//! [`Incoming`] assembles messages from a byte stream. It never buffers more bytes than one message can have and a few
//! descriptors, whatever the other side sends. [`Outgoing`] queues messages for a slow reader, up to a limit. Neither
//! waits.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use wormhole_ring::control::{
    ControlError, HEADER_BYTES, Header, MAX_CONTROL_BODY, MAX_FRAME, Message,
};

/// Most received descriptors that wait for their messages.
const MAX_DESCRIPTORS: usize = 8;
/// Most descriptors that one `recvmsg` can receive: Linux's `SCM_MAX_FD`.
pub const MAX_RECEIVED: usize = 253;
/// Most messages queued for a slow reader.
const MAX_QUEUED: usize = 256;

/// Errors after which a stream is unusable.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    #[error("the stream ended")]
    Ended,
    #[error("the stream ended in the middle of a message")]
    Cut,
    #[error(transparent)]
    Message(#[from] ControlError),
    #[error("more than {0} descriptors came without messages that take them")]
    Descriptors(usize),
    #[error("the reader has left {MAX_QUEUED} messages unread")]
    Unread,
    #[error("the tenant has left {0} descriptors unread")]
    InFlight(usize),
    #[error("the stream failed")]
    Socket(#[source] io::Error),
}

/// Reading side of a stream.
#[derive(Debug)]
pub struct Incoming {
    bytes: Vec<u8>,
    /// Received descriptors. `None` stands for descriptors that the kernel dropped (MSG_CTRUNC), because this process
    /// had no free descriptor.
    descriptors: VecDeque<Option<OwnedFd>>,
    /// Set if the descriptor requested last was lost.
    lost: bool,
    /// Bytes at the front that belong to the message taken last.
    consumed: usize,
    /// Most waiting descriptors. More of them end the stream, and stay here until the owner closes them.
    most: usize,
    ended: bool,
}

impl Incoming {
    pub fn new(takes_descriptors: bool) -> Self {
        Self {
            bytes: Vec::new(),
            descriptors: VecDeque::new(),
            lost: false,
            consumed: 0,
            most: if takes_descriptors {
                MAX_DESCRIPTORS
            } else {
                0
            },
            ended: false,
        }
    }

    /// Reads once from the socket, if it has data.
    ///
    /// # Errors
    /// The socket failed, or more descriptors arrived than may wait; they stay here.
    pub fn fill(&mut self, socket: &impl AsFd) -> Result<(), ChannelError> {
        self.bytes.drain(..self.consumed);
        self.consumed = 0;
        let room = MAX_FRAME - self.bytes.len().min(MAX_FRAME);
        if room == 0 || self.ended {
            return Ok(());
        }
        let mut buffer = [0u8; MAX_FRAME];
        match receive(socket.as_fd(), &mut buffer[..room], &mut self.descriptors) {
            Ok(0) => self.ended = true,
            Ok(count) => self.bytes.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The other side closed with unread bytes, which is an end like any other.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => self.ended = true,
            Err(error) => return Err(ChannelError::Socket(error)),
        }
        if self.descriptors.len() > self.most {
            return Err(ChannelError::Descriptors(self.most));
        }
        Ok(())
    }

    /// Returns whether [`take`](Self::take) has a message.
    ///
    /// # Errors
    /// As of [`take`](Self::take).
    pub fn is_ready(&mut self) -> Result<bool, ChannelError> {
        self.peek().map(|length| length.is_some())
    }

    /// Takes the next complete message, if there is one.
    ///
    /// # Errors
    /// The bytes are no message, or the stream has ended.
    pub fn take(&mut self) -> Result<Option<Message<'_>>, ChannelError> {
        let Some((kind, length)) = self.peek()? else {
            return Ok(None);
        };
        self.consumed = length;
        let body = self.bytes.get(HEADER_BYTES..length).unwrap_or(&[]);
        Ok(Some(Message::decode(kind, body)?))
    }

    /// Returns the kind and the length of the next complete message, if there is one.
    fn peek(&mut self) -> Result<Option<(u16, usize)>, ChannelError> {
        self.bytes.drain(..self.consumed);
        self.consumed = 0;
        let header = match self.bytes.first_chunk::<HEADER_BYTES>() {
            Some(header) => Header::decode(header)?,
            None if self.ended && self.bytes.is_empty() => return Err(ChannelError::Ended),
            None if self.ended => return Err(ChannelError::Cut),
            None => return Ok(None),
        };
        debug_assert!(header.body_len <= MAX_CONTROL_BODY);
        let length = HEADER_BYTES + header.body_len;
        match self.bytes.len() >= length {
            true => Ok(Some((header.kind, length))),
            false if self.ended => Err(ChannelError::Cut),
            false => Ok(None),
        }
    }

    /// Skips the following messages that equal the message taken last, byte for byte.
    pub fn skip_repeats(&mut self) {
        let length = self.consumed;
        let next = |at: usize| self.bytes.get(at..at + length);
        let mut end = length;
        while length > 0 && next(end) == next(0) {
            end += length;
        }
        self.consumed = end;
    }

    /// Takes the next received descriptor, in the order of sending.
    pub fn descriptor(&mut self) -> Option<OwnedFd> {
        let next = self.descriptors.pop_front();
        self.lost = matches!(next, Some(None));
        next.flatten()
    }

    /// Returns true if the descriptor requested last was sent but dropped, because this process had no free descriptor.
    pub fn was_lost(&self) -> bool {
        self.lost
    }

    /// Returns the descriptors that no message took.
    pub fn into_descriptors(self) -> impl Iterator<Item = OwnedFd> {
        self.descriptors.into_iter().flatten()
    }
}

/// Writing side of a stream.
#[derive(Debug, Default)]
pub struct Outgoing {
    queue: VecDeque<Frame>,
    /// Descriptors written since the socket's buffer was last seen empty.
    unread: usize,
}

#[derive(Debug)]
struct Frame {
    bytes: Vec<u8>,
    written: usize,
    descriptors: Vec<OwnedFd>,
}

impl Outgoing {
    /// Queues a message with its descriptors, and writes as much as the socket accepts.
    ///
    /// # Errors
    /// The message cannot be encoded, the queue is full, or the socket failed.
    pub fn send(
        &mut self,
        socket: &impl AsFd,
        message: &Message<'_>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), ChannelError> {
        if self.queue.len() >= MAX_QUEUED {
            return Err(ChannelError::Unread);
        }
        self.queue.push_back(Frame {
            bytes: message.to_vec()?,
            written: 0,
            descriptors,
        });
        self.flush(socket)
    }

    /// Writes as much of the queue as the socket accepts.
    ///
    /// # Errors
    /// The socket failed.
    pub fn flush(&mut self, socket: &impl AsFd) -> Result<(), ChannelError> {
        while let Some(frame) = self.queue.front_mut() {
            match send(
                socket.as_fd(),
                &frame.bytes[frame.written..],
                &frame.descriptors,
            ) {
                Ok(count) => {
                    frame.written += count;
                    // The descriptors were sent with the first byte.
                    self.unread += frame.descriptors.len();
                    frame.descriptors.clear();
                    if frame.written == frame.bytes.len() {
                        self.queue.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
                    ) =>
                {
                    return Err(ChannelError::Ended);
                }
                Err(error) => return Err(ChannelError::Socket(error)),
            }
        }
        Ok(())
    }

    /// Returns the descriptors that were not sent.
    pub fn into_descriptors(self) -> impl Iterator<Item = OwnedFd> {
        self.queue.into_iter().flat_map(|frame| frame.descriptors)
    }

    /// Returns the number of descriptors that the reader may not have received yet, in the queue or in the socket.
    pub fn underway(&mut self, socket: &impl AsRawFd) -> usize {
        let mut bytes: libc::c_int = 0;
        // SAFETY: an open descriptor, and an integer that the kernel fills.
        let known = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        if known == 0 && bytes == 0 {
            self.unread = 0;
        }
        self.unread()
    }

    /// Returns at least as many as [`underway`](Self::underway), without a query of the socket: also the descriptors that
    /// the reader has received since the last one.
    pub fn unread(&self) -> usize {
        let queued = self.queue.iter().map(|frame| frame.descriptors.len());
        self.unread + queued.sum::<usize>()
    }

    /// Returns true if messages are queued.
    pub fn is_waiting(&self) -> bool {
        !self.queue.is_empty()
    }
}

/// Waits until the socket can be read, or has ended.
///
/// # Errors
/// As `poll`.
pub fn wait_readable(socket: &impl AsFd) -> io::Result<()> {
    wait(socket, PollFlags::IN)
}

/// Waits until the socket can be written, or has ended.
///
/// # Errors
/// As `poll`.
pub fn wait_writable(socket: &impl AsFd) -> io::Result<()> {
    wait(socket, PollFlags::OUT)
}

fn wait(socket: &impl AsFd, events: PollFlags) -> io::Result<()> {
    retry_on_intr(|| poll(&mut [PollFd::new(socket, events)], None))?;
    Ok(())
}

/// Bytes of control data for [`MAX_RECEIVED`] descriptors. With less room the kernel would close the others during the
/// call, and wait for that.
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(MAX_RECEIVED));

fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    descriptors: &mut VecDeque<Option<OwnedFd>>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            descriptors.extend(sent.map(Some));
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        descriptors.push_back(None);
    }
    Ok(received.bytes)
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[OwnedFd]) -> io::Result<usize> {
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(Errno::INVAL.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    Ok(sent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_message_arrives_with_its_descriptor() {
        let (near, far) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let mut outgoing = Outgoing::default();
        outgoing
            .send(&near, &Message::Doorbell, Vec::new())
            .unwrap();
        outgoing
            .send(&near, &Message::Mapped, vec![file.into()])
            .unwrap();
        let mut incoming = Incoming::new(true);
        incoming.fill(&far).unwrap();
        incoming.fill(&far).unwrap();
        assert_eq!(incoming.take().unwrap(), Some(Message::Doorbell));
        assert_eq!(incoming.take().unwrap(), Some(Message::Mapped));
        assert!(incoming.descriptor().is_some());
        assert!(incoming.descriptor().is_none());
    }

    #[test]
    fn repeats_are_skipped_up_to_the_first_other_message() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let frame = |message: &Message<'_>| message.to_vec().unwrap();
        let rings = frame(&Message::Doorbell).repeat(3);
        let report = Message::SessionReport("report");
        let sent = [rings.clone(), frame(&report), rings].concat();
        near.write_all(&sent[..sent.len() - 1]).unwrap();
        let mut incoming = Incoming::new(false);
        incoming.skip_repeats();
        incoming.fill(&far).unwrap();
        for expected in [Message::Doorbell, report, Message::Doorbell] {
            assert_eq!(incoming.take().unwrap(), Some(expected));
            incoming.skip_repeats();
        }
        // The last message lacks a byte.
        assert_eq!(incoming.take().unwrap(), None);
    }

    #[test]
    fn descriptors_on_a_stream_that_takes_none_end_it_and_are_not_closed_unseen() {
        let (near, far) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let mut outgoing = Outgoing::default();
        outgoing
            .send(&near, &Message::Doorbell, vec![file.into()])
            .unwrap();
        let mut incoming = Incoming::new(false);
        let filled = incoming.fill(&far);
        assert!(
            matches!(filled, Err(ChannelError::Descriptors(0))),
            "{filled:?}"
        );
        assert_eq!(incoming.into_descriptors().count(), 1);
    }

    #[test]
    fn as_many_descriptors_as_the_kernel_passes_on_are_received() {
        let (near, far) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        let all = (0..MAX_RECEIVED).map(|_| file.try_clone().unwrap().into());
        let mut outgoing = Outgoing::default();
        outgoing
            .send(&near, &Message::Doorbell, all.collect())
            .unwrap();
        let mut incoming = Incoming::new(true);
        assert!(incoming.fill(&far).is_err());
        assert_eq!(incoming.into_descriptors().count(), MAX_RECEIVED);
    }

    #[test]
    fn descriptors_are_underway_until_the_reader_has_taken_them() {
        let (near, far) = UnixStream::pair().unwrap();
        let file = || tempfile::tempfile().unwrap().into();
        let mut outgoing = Outgoing::default();
        for count in 1..=3 {
            let descriptors = vec![file()];
            outgoing.send(&near, &Message::Mapped, descriptors).unwrap();
            assert_eq!(
                (outgoing.underway(&near), outgoing.unread()),
                (count, count)
            );
        }
        let mut incoming = Incoming::new(true);
        for _ in 0..3 {
            incoming.fill(&far).unwrap();
        }
        assert_eq!(outgoing.unread(), 3);
        assert_eq!((outgoing.underway(&near), outgoing.unread()), (0, 0));
    }

    #[test]
    fn a_reader_that_never_reads_is_given_up() {
        let (near, _far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let text = "x".repeat(8000);
        let mut outgoing = Outgoing::default();
        let refused = (0..10_000).find_map(|_| {
            outgoing
                .send(&near, &Message::SessionReport(&text), Vec::new())
                .err()
        });
        assert!(matches!(refused, Some(ChannelError::Unread)));
    }

    #[test]
    fn the_end_is_distinguished_from_a_cut_message() {
        for (bytes, cut) in [(0, false), (7, true), (HEADER_BYTES + 3, true)] {
            let (mut near, far) = UnixStream::pair().unwrap();
            let frame = Message::SessionReport("report").to_vec().unwrap();
            near.write_all(&frame[..bytes]).unwrap();
            drop(near);
            let mut incoming = Incoming::new(false);
            incoming.fill(&far).unwrap();
            incoming.fill(&far).unwrap();
            match incoming.take() {
                Err(ChannelError::Cut) => assert!(cut),
                Err(ChannelError::Ended) => assert!(!cut),
                other => panic!("{other:?}"),
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_give_messages_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let (mut near, far) = UnixStream::pair().unwrap();
            near.write_all(&bytes).unwrap();
            drop(near);
            let mut incoming = Incoming::new(false);
            let mut turns = 0;
            loop {
                turns += 1;
                prop_assert!(turns < 1000);
                if incoming.fill(&far).is_err() {
                    break;
                }
                match incoming.take() {
                    Ok(_) => {}
                    Err(_) => break,
                }
            }
        }
    }
}
