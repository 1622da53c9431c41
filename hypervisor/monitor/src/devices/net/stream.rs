//! Exchanges frames with a process by a stream socket, as passt(1) and QEMU's `-netdev stream` do: a frame follows its
//! length, 32 bits in network byte order.
//!
//! The process is not trusted: it may send lengths that no frame has, send a frame in pieces, read nothing, or end.

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::device::{HEADER_LEN, MAX_FRAME};
use super::frame::GuestFrame;
use super::host_end::HostEnd;

/// Bytes of a frame's length.
const LENGTH: usize = 4;
/// Bytes of the shortest frame: its addresses and its type.
const SHORTEST: usize = 14;
/// Bytes of the longest frame.
const LONGEST: usize = MAX_FRAME - HEADER_LEN;

/// Reason why no frame can pass any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamEnd {
    /// The process has closed its socket.
    #[error("it has ended")]
    Closed,
    /// The process does not speak the protocol, or not any more.
    #[error("it announced a frame of {0} bytes")]
    Length(usize),
}

/// The stream of a process that is a guest's network.
pub struct FrameStream {
    socket: File,
    /// Buffer of received bytes. The guest has yet to get `received[start..end]`.
    received: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes of a frame that the socket has not taken yet.
    unsent: Vec<u8>,
    /// Called once, when no frame can pass any more; `None` from then on.
    on_end: Option<Box<dyn FnOnce(StreamEnd) + Send>>,
}

impl FrameStream {
    /// Uses a connected socket of the process. `on_end` is called on the interface's thread if the process ends before
    /// the guest.
    pub fn new(
        socket: OwnedFd,
        on_end: impl FnOnce(StreamEnd) + Send + 'static,
    ) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self {
            socket: socket.into(),
            received: vec![0; LENGTH + LONGEST].into(),
            start: 0,
            end: 0,
            unsent: Vec::new(),
            on_end: Some(Box::new(on_end)),
        })
    }

    /// Returns the length of the next frame, if the socket has delivered it.
    fn next_length(&self) -> Option<usize> {
        let length = self.received[self.start..self.end].first_chunk()?;
        Some(usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX))
    }

    /// Reads available bytes. The buffer has room for them, since it holds the longest frame and gets rid of complete ones
    /// first.
    fn read(&mut self) -> io::Result<()> {
        self.received.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        match self.socket.read(&mut self.received[self.end..]) {
            Ok(0) => self.finish(StreamEnd::Closed),
            Ok(count) => self.end += count,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                self.finish(StreamEnd::Closed);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Writes to the socket, and returns the number of bytes that it took.
    fn write(&mut self, bytes: &[u8]) -> usize {
        match self.socket.write(bytes) {
            Ok(count) => count,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                0
            }
            Err(_) => {
                self.finish(StreamEnd::Closed);
                bytes.len()
            }
        }
    }

    fn finish(&mut self, why: StreamEnd) {
        if let Some(on_end) = self.on_end.take() {
            on_end(why);
        }
        self.unsent.clear();
    }

    fn is_over(&self) -> bool {
        self.on_end.is_none()
    }
}

impl fmt::Debug for FrameStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameStream")
            .field("socket", &self.socket)
            .field("is_over", &self.is_over())
            .finish_non_exhaustive()
    }
}

impl AsFd for FrameStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl HostEnd for FrameStream {
    fn features(&self) -> u64 {
        0
    }

    fn start(&mut self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn receive(&mut self, frame: &mut [u8]) -> io::Result<usize> {
        while !self.is_over() {
            match self.next_length() {
                Some(length) if !(SHORTEST..=LONGEST).contains(&length) => {
                    self.finish(StreamEnd::Length(length));
                }
                Some(length) if self.end - self.start >= LENGTH + length => {
                    let from = self.start + LENGTH;
                    frame[..HEADER_LEN].fill(0);
                    let room = &mut frame[HEADER_LEN..HEADER_LEN + length];
                    room.copy_from_slice(&self.received[from..from + length]);
                    self.start = from + length;
                    return Ok(HEADER_LEN + length);
                }
                _ => self.read()?,
            }
        }
        Ok(0)
    }

    fn send(&mut self, frame: &GuestFrame<'_>) -> io::Result<()> {
        let length = frame.bytes() - HEADER_LEN;
        if self.is_over() || length < SHORTEST {
            return Ok(());
        }
        let start = self.unsent.len();
        let prefix = u32::try_from(length).map_err(io::Error::other)?;
        self.unsent.extend(prefix.to_be_bytes());
        self.unsent.resize(start + LENGTH + length, 0);
        let copy = &mut self.unsent[start + LENGTH..];
        frame.copy_without_header(copy);
        if is_for_loopback(copy) {
            self.unsent.truncate(start);
        }
        self.is_blocked();
        Ok(())
    }

    fn is_blocked(&mut self) -> bool {
        if !self.unsent.is_empty() {
            let mut unsent = std::mem::take(&mut self.unsent);
            let taken = self.write(&unsent);
            unsent.drain(..taken);
            self.unsent = unsent;
        }
        !self.unsent.is_empty()
    }
}

/// Returns whether a frame is an IPv4 packet to 127.0.0.0/8 or 0.0.0.0/8. Such a packet is in no network. passt of Debian 12
/// would connect to the address, and so to what listens on the host's loopback interface.
fn is_for_loopback(frame: &[u8]) -> bool {
    const TYPE: usize = 12;
    const DESTINATION: usize = 30;
    frame[TYPE..].starts_with(&[8, 0]) && matches!(frame.get(DESTINATION), Some(0 | 127))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{Receiver, channel};

    use proptest::prelude::*;
    use vm_memory::VolatileSlice;

    use super::*;

    /// Returns an end, the socket of its process, and where its end is told.
    fn told() -> (FrameStream, UnixStream, Receiver<StreamEnd>) {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        theirs.set_nonblocking(true).expect("a socket");
        let (tell, told) = channel();
        let on_end = move |why| tell.send(why).expect("the test listens");
        let stream = FrameStream::new(ours.into(), on_end).expect("a socket");
        (stream, theirs, told)
    }

    /// Returns an end and the socket of its process.
    fn pair() -> (FrameStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        theirs.set_nonblocking(true).expect("a socket");
        let stream = FrameStream::new(ours.into(), |_| ()).expect("a socket");
        (stream, theirs)
    }

    /// Returns the bytes of a frame.
    fn frame(length: usize, seed: u8) -> Vec<u8> {
        let bytes = (0..length).map(|at| at.to_le_bytes()[0].wrapping_mul(29).wrapping_add(seed));
        bytes.collect()
    }

    /// Returns a frame behind its length.
    fn framed(frame: &[u8]) -> Vec<u8> {
        let length = u32::try_from(frame.len()).expect("a length");
        [&length.to_be_bytes(), frame].concat()
    }

    /// Returns the next frame, without the header, which is empty.
    fn received(stream: &mut FrameStream) -> io::Result<Option<Vec<u8>>> {
        let mut room = vec![0xff; MAX_FRAME];
        let length = stream.receive(&mut room)?;
        if length == 0 {
            return Ok(None);
        }
        assert_eq!(room[..HEADER_LEN], [0; HEADER_LEN]);
        Ok(Some(room[HEADER_LEN..length].to_vec()))
    }

    fn would_block<T: fmt::Debug>(outcome: io::Result<T>) -> bool {
        outcome.expect_err("nothing came").kind() == ErrorKind::WouldBlock
    }

    /// Sends a frame behind a header.
    fn send(stream: &mut FrameStream, frame: &[u8]) {
        let mut bytes = [&[0xaa; HEADER_LEN], frame].concat();
        // The header and a part of the frame lie in one buffer, the rest in another.
        let (first, second) = bytes.split_at_mut(HEADER_LEN + 2);
        let parts = [first, second].map(VolatileSlice::from).into();
        let frame = GuestFrame::new(parts).expect("a frame");
        stream.send(&frame).expect("it is taken");
    }

    #[test]
    fn a_frame_that_comes_byte_by_byte_arrives_whole() {
        let (mut stream, mut process) = pair();
        let frame = frame(60, 1);
        for byte in framed(&frame) {
            assert!(would_block(received(&mut stream)));
            process.write_all(&[byte]).expect("room");
        }
        assert_eq!(received(&mut stream).expect("it came"), Some(frame));
        assert!(would_block(received(&mut stream)));
    }

    #[test]
    fn frames_that_come_together_arrive_one_by_one() {
        let (mut stream, mut process) = pair();
        let frames = [
            frame(SHORTEST, 1),
            frame(1514, 2),
            frame(LONGEST, 3),
            frame(60, 4),
        ];
        let bytes: Vec<u8> = frames.iter().flat_map(|frame| framed(frame)).collect();
        process.write_all(&bytes).expect("room");
        for frame in frames {
            assert_eq!(received(&mut stream).expect("it came"), Some(frame));
        }
        assert!(would_block(received(&mut stream)));
    }

    #[test]
    fn a_length_that_no_frame_has_ends_the_network() {
        let longer = u32::try_from(LONGEST + 1).expect("a length");
        for length in [0, 13, longer, 0x8000_0000, u32::MAX] {
            let (mut stream, mut process, told) = told();
            process.write_all(&framed(&frame(60, 1))).expect("room");
            process.write_all(&length.to_be_bytes()).expect("room");
            process.write_all(&framed(&frame(60, 2))).expect("room");
            assert!(received(&mut stream).expect("it came").is_some());
            assert_eq!(received(&mut stream).expect("an end"), None, "{length}");
            assert_eq!(received(&mut stream).expect("an end"), None, "{length}");
            send(&mut stream, &frame(60, 3));
            assert!(!stream.is_blocked());
            let error = process.read(&mut [0; 64]).expect_err("nothing came");
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            let length = usize::try_from(length).expect("a length");
            let ends: Vec<StreamEnd> = told.try_iter().collect();
            assert_eq!(ends, [StreamEnd::Length(length)]);
        }
    }

    #[test]
    fn a_process_that_ends_takes_the_network_with_it() {
        let ended = |told: Receiver<StreamEnd>| {
            let ends: Vec<StreamEnd> = told.try_iter().collect();
            assert_eq!(ends, [StreamEnd::Closed]);
        };
        let (mut stream, mut process, first) = told();
        let whole = framed(&frame(60, 1));
        process.write_all(&whole[..20]).expect("room");
        drop(process);
        assert_eq!(received(&mut stream).expect("an end"), None);
        ended(first);

        let (mut stream, process, second) = told();
        drop(process);
        send(&mut stream, &frame(60, 1));
        assert!(!stream.is_blocked());
        assert_eq!(received(&mut stream).expect("an end"), None);
        ended(second);

        // Frames that it has not read reset the connection.
        let (mut stream, process, third) = told();
        send(&mut stream, &frame(60, 1));
        drop(process);
        assert_eq!(received(&mut stream).expect("an end"), None);
        ended(third);
    }

    #[test]
    fn no_packet_is_for_the_hosts_loopback_interface() {
        let packet = |kind: [u8; 2], destination: u8| {
            let mut packet = vec![0xaa; 60];
            packet[12..14].copy_from_slice(&kind);
            packet[30] = destination;
            packet
        };
        let (mut stream, mut process) = pair();
        let others = [packet([8, 0], 10), packet([8, 6], 127), packet([8, 0], 128)];
        for frame in [&packet([8, 0], 127), &others[0], &packet([8, 0], 0)] {
            send(&mut stream, frame);
        }
        send(&mut stream, &others[1]);
        send(&mut stream, &others[2]);
        let mut room = [0; 1000];
        let count = process.read(&mut room).expect("something came");
        assert_eq!(
            room[..count],
            others.each_ref().map(|frame| framed(frame)).concat()
        );
    }

    #[test]
    fn frames_leave_whole_by_a_socket_that_takes_parts() {
        let (mut stream, mut process) = pair();
        let frames: Vec<Vec<u8>> = (0..8).map(|seed| frame(LONGEST, seed)).collect();
        let expected: Vec<u8> = frames.iter().flat_map(|frame| framed(frame)).collect();
        let mut frames = frames.iter();
        let (mut arrived, mut room) = (Vec::new(), [0; 5000]);
        let mut blocked = 0;
        while arrived.len() < expected.len() {
            while !stream.is_blocked() {
                match frames.next() {
                    Some(frame) => send(&mut stream, frame),
                    None => break,
                }
            }
            blocked += usize::from(stream.is_blocked());
            let count = process.read(&mut room).expect("something came");
            arrived.extend_from_slice(&room[..count]);
        }
        assert!(blocked > 0);
        assert!(arrived == expected);
    }

    proptest! {
        /// Arbitrary bytes in arbitrary pieces cause no panic and no hang.
        #[test]
        fn hostile_bytes_are_survived(
            pieces in proptest::collection::vec(
                prop_oneof![
                    proptest::collection::vec(any::<u8>(), 0..40),
                    (0usize..200, any::<u8>()).prop_map(|(length, seed)| framed(&frame(length, seed))),
                ],
                0..20,
            ),
        ) {
            let (mut stream, mut process) = pair();
            for piece in pieces {
                process.write_all(&piece).expect("room");
                while let Ok(Some(frame)) = received(&mut stream) {
                    prop_assert!((SHORTEST..=LONGEST).contains(&frame.len()));
                }
            }
            drop(process);
            while let Ok(Some(_)) = received(&mut stream) {}
            prop_assert_eq!(received(&mut stream).expect("an end"), None);
        }
    }
}
