//! Runs both sides of a virtio-serial port, each against a hostile other side, and processes and a backend that do anything.
//!
//! The input lists steps: a byte for the step, whose highest bit chooses the side, then two bytes of arguments, and the bytes
//! that they announce. At the end no descriptor is left.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use wormhole_serial::{Frame, MAX_DATA, MAX_STREAMS, Mux, Opening, ProcessSocket};

use crate::{Steps, open_files};

/// Most bytes that a side has for its port at once.
const MOST: usize = 32 << 10;

pub fn run(input: &[u8]) {
    let before = open_files();
    play(Steps(input));
    // Another thread closes the sockets of processes.
    let end = Instant::now() + Duration::from_secs(10);
    while open_files() != before {
        assert!(Instant::now() < end, "descriptors are left open");
        std::thread::yield_now();
    }
}

/// One side, and the other ends of its streams.
struct Side {
    mux: Mux,
    opened: Receiver<UnixStream>,
    ends: Vec<UnixStream>,
}

fn open(opened: &Sender<UnixStream>) -> Option<Opening> {
    let (bell, _) = UnixStream::pair().ok()?;
    let (ours, theirs) = UnixStream::pair().ok()?;
    ours.set_nonblocking(true).ok()?;
    let (sender, stream) = channel();
    sender.send(theirs).ok()?;
    opened.send(ours).ok()?;
    Some(Opening { bell, stream })
}

fn play(mut steps: Steps<'_>) {
    let (sender, opened) = channel();
    let host = Mux::host(move || open(&sender));
    let sides = [(host, opened), (Mux::agent(0), channel().1)];
    let mut sides = sides.map(|(mux, opened)| Side {
        mux,
        opened,
        ends: Vec::new(),
    });
    while let Some([step, first, second]) = steps.next() {
        let side = &mut sides[usize::from(step >> 7)];
        side.step(step & 0x7f, first, second, &mut steps);
        assert!(side.mux.len() <= MAX_STREAMS);
        let opened: Vec<UnixStream> = side.opened.try_iter().collect();
        side.ends.extend(opened);
    }
}

impl Side {
    fn step(&mut self, step: u8, first: u8, second: u8, steps: &mut Steps<'_>) {
        let (stream, count) = (u32::from(first), usize::from(second) * 17);
        match step {
            0 => self.receive(steps.take(first.into())),
            1 => self.frame(&Frame::Open { stream }),
            2 => self.frame(&Frame::Data {
                stream,
                bytes: &[first; MAX_DATA][..count.min(MAX_DATA)],
            }),
            3 => self.frame(&Frame::Credit {
                stream,
                bytes: u32::from(second) << 10,
            }),
            4 => self.frame(&Frame::Close { stream }),
            5 => self.frame(&Frame::Hello {
                version: stream,
                nonce: second.into(),
            }),
            6 => {
                let events = PollFlags::from_bits_truncate(second.into());
                self.mux.ready(stream, events);
            }
            7 => {
                let mut out = Vec::new();
                self.mux.produce(&mut out);
                assert!(out.len() <= MOST, "{} bytes", out.len());
            }
            8 => {
                if let Ok((ours, theirs)) = UnixStream::pair()
                    && [&ours, &theirs].map(|it| it.set_nonblocking(true).is_ok()) == [true; 2]
                {
                    self.mux.add(ProcessSocket::new(theirs), 0);
                    self.ends.push(ours);
                }
            }
            _ => self.of_end(first.into(), count),
        }
    }

    fn frame(&mut self, frame: &Frame<'_>) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.receive(&bytes);
    }

    fn receive(&mut self, bytes: &[u8]) {
        // An agent ends at another version of the host.
        if let Err(error) = self.mux.receive(bytes) {
            _ = error.to_string();
        }
    }

    /// The other end of a stream writes, reads or goes away.
    fn of_end(&mut self, at: usize, count: usize) {
        let Some(mut end) = self.ends.get(at / 3) else {
            return;
        };
        // It may be full, empty or at its end.
        match at % 3 {
            0 => _ = end.write(&vec![7; count]),
            1 => _ = end.read(&mut vec![0; count]),
            _ => drop(self.ends.swap_remove(at / 3)),
        }
    }
}
