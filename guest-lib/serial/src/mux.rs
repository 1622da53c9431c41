//! The streams of a port, without its bytes' way: frames of the other side in, own frames out.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Bound::{Excluded, Included, Unbounded};
use std::os::fd::BorrowedFd;

use rustix::event::PollFlags;

use crate::closer::ProcessSocket;
use crate::frame::{Decoder, Frame, VERSION};
use crate::stream::{Opening, Overdrawn, Stream};

/// Most streams of a port: a guest has 64 CUDA processes, and some more that ask for facts.
pub const MAX_STREAMS: usize = 128;
/// Most streams of the processes of one user other than root.
const MOST_OF_USER: usize = 96;
/// Bytes after which [`Mux::produce`] begins no further stream. With the frames of one more stream they fit a buffer of the
/// port's driver (32 KiB), which takes them whole or not at all.
const ENOUGH: usize = 16 << 10;

/// Opens a stream of the backend; `None` refuses it.
type Open = Box<dyn FnMut() -> Option<Opening> + Send>;

/// End of the port on which a multiplexer is.
enum Side {
    /// Waits for the host's answer to a hello with this number.
    Agent {
        nonce: u64,
    },
    Host {
        open: Open,
    },
}

/// Reason why frames end all streams.
enum Fault {
    Violation,
    Version(u32),
}

impl From<Overdrawn> for Fault {
    fn from(_: Overdrawn) -> Self {
        Self::Violation
    }
}

/// The host speaks another version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the host speaks version {0} of the port's protocol instead of {VERSION}: install the same version of Wormhole on host and guest"
)]
pub struct OtherVersion(pub u32);

/// All streams of a port.
#[derive(Debug)]
pub struct Mux {
    decoder: Decoder,
    streams: Streams,
}

struct Streams {
    side: Side,
    /// Whether hello and answer have passed.
    is_synchronised: bool,
    /// Whether the host has had a hello.
    has_begun: bool,
    /// Hello that is to be sent.
    hello: Option<u64>,
    by_number: BTreeMap<u32, Stream>,
    /// Last number of a stream.
    last: u32,
    /// Streams that are refused, whose end is to be sent.
    refused: Vec<u32>,
    /// Stream behind which the next turn begins.
    turn: u32,
}

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams")
            .field("is_synchronised", &self.is_synchronised)
            .field("last", &self.last)
            .field("count", &self.by_number.len())
            .finish_non_exhaustive()
    }
}

impl Mux {
    /// Creates the guest's side. The number must be another one for each agent of a guest.
    #[must_use]
    pub fn agent(nonce: u64) -> Self {
        Self::new(Side::Agent { nonce }, Some(nonce))
    }

    /// Creates the host's side. `open` must not wait.
    #[must_use]
    pub fn host(open: impl FnMut() -> Option<Opening> + Send + 'static) -> Self {
        let open = Box::new(open);
        Self::new(Side::Host { open }, None)
    }

    fn new(side: Side, hello: Option<u64>) -> Self {
        Self {
            decoder: Decoder::default(),
            streams: Streams {
                side,
                is_synchronised: false,
                has_begun: false,
                hello,
                by_number: BTreeMap::new(),
                last: 0,
                refused: Vec::new(),
                turn: 0,
            },
        }
    }

    /// Returns whether hello and answer have passed, and no fault since.
    #[must_use]
    pub fn is_synchronised(&self) -> bool {
        self.streams.is_synchronised
    }

    /// Returns whether an agent has said hello to this host.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.streams.has_begun
    }

    /// Returns the number of streams.
    #[must_use]
    pub fn len(&self) -> usize {
        self.streams.by_number.len()
    }

    /// Returns whether there are no streams.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a stream of a process of a user in the guest. The socket must not block. Drops it if there is no room for that user, or
    /// no host.
    pub fn add(&mut self, socket: ProcessSocket, user: u32) {
        let streams = &mut self.streams;
        if !streams.is_synchronised || !streams.has_room(user) {
            return;
        }
        let Some(number) = streams.last.checked_add(1) else {
            // All numbers are used up: a hello begins anew.
            return streams.restart();
        };
        streams.last = number;
        let stream = Stream::of_process(socket, user);
        streams.by_number.insert(number, stream);
    }

    /// Takes bytes of the port. A violation of the protocol ends all streams.
    ///
    /// # Errors
    /// The host speaks another version, as an agent learns.
    pub fn receive(&mut self, mut bytes: &[u8]) -> Result<(), OtherVersion> {
        while let Some(frame) = self.decoder.next(&mut bytes) {
            let done = match frame {
                Ok(frame) => self.streams.apply(frame),
                Err(_) => Err(Fault::Violation),
            };
            match done {
                Err(Fault::Version(version)) => return Err(OtherVersion(version)),
                Err(Fault::Violation) if self.streams.is_synchronised => self.streams.restart(),
                // Bytes before hello and answer are of an earlier agent or host.
                Err(Fault::Violation) | Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Returns whether [`Self::produce`] may append frames.
    #[must_use]
    pub fn has_frames(&self) -> bool {
        let streams = &self.streams;
        let has_frame = |stream: &Stream| stream.has_frame();
        streams.hello.is_some()
            || !streams.refused.is_empty()
            || streams.by_number.values().any(has_frame)
    }

    /// Appends frames for the other side, a bounded number of bytes. Streams take turns.
    pub fn produce(&mut self, out: &mut Vec<u8>) {
        let streams = &mut self.streams;
        if let Some(nonce) = streams.hello.take() {
            let version = VERSION;
            Frame::Hello { version, nonce }.encode(out);
        }
        for stream in streams.refused.drain(..) {
            Frame::Close { stream }.encode(out);
        }
        let numbers = |range| streams.by_number.range(range).map(|(number, _)| *number);
        let behind = numbers((Excluded(streams.turn), Unbounded));
        let others = numbers((Unbounded, Included(streams.turn)));
        let numbers: Vec<u32> = behind.chain(others).collect();
        for number in numbers {
            if out.len() >= ENOUGH {
                break;
            }
            streams.turn = number;
            let stream = streams.by_number.get_mut(&number);
            if stream.is_some_and(|stream| stream.produce(number, out)) {
                streams.by_number.remove(&number);
            }
        }
    }

    /// Returns the sockets of the streams, by their numbers, and the events to wait for.
    pub fn interests(&self) -> impl Iterator<Item = (u32, BorrowedFd<'_>, PollFlags)> {
        self.streams
            .by_number
            .iter()
            .filter_map(|(number, stream)| {
                let (socket, flags) = stream.interest()?;
                Some((*number, socket, flags))
            })
    }

    /// Handles the events of a stream's socket.
    pub fn ready(&mut self, number: u32, events: PollFlags) {
        let Some(stream) = self.streams.by_number.get_mut(&number) else {
            return;
        };
        stream.ready(events);
        self.streams.remove_if_over(number);
    }
}

impl Streams {
    /// Ends all streams, until hello and answer have passed again.
    fn restart(&mut self) {
        self.by_number.clear();
        self.refused.clear();
        self.last = 0;
        self.is_synchronised = false;
        if let Side::Agent { nonce } = &mut self.side {
            *nonce = nonce.wrapping_add(1);
            self.hello = Some(*nonce);
        }
    }

    /// Returns whether a process of a user may have a stream.
    fn has_room(&self, user: u32) -> bool {
        let of_user = self.by_number.values().filter(|it| it.is_of(user)).count();
        self.by_number.len() < MAX_STREAMS && (user == 0 || of_user < MOST_OF_USER)
    }

    fn remove_if_over(&mut self, number: u32) {
        if self.by_number.get(&number).is_some_and(Stream::is_over) {
            self.by_number.remove(&number);
        }
    }

    fn apply(&mut self, frame: Frame<'_>) -> Result<(), Fault> {
        if let Frame::Hello { version, nonce } = frame {
            return self.hello(version, nonce);
        }
        if !self.is_synchronised {
            return Ok(());
        }
        let number = match frame {
            Frame::Hello { .. } => return Ok(()),
            Frame::Open { stream } => return self.open(stream),
            Frame::Data { stream, .. } | Frame::Credit { stream, .. } | Frame::Close { stream } => {
                stream
            }
        };
        let Some(stream) = self.by_number.get_mut(&number) else {
            // The other side may not know yet that the stream has ended.
            return match number != 0 && number <= self.last {
                true => Ok(()),
                false => Err(Fault::Violation),
            };
        };
        match frame {
            Frame::Data { bytes, .. } => stream.receive(bytes)?,
            Frame::Credit { bytes, .. } => stream.grant(bytes)?,
            _ => stream.close()?,
        }
        self.remove_if_over(number);
        Ok(())
    }

    fn hello(&mut self, version: u32, nonce: u64) -> Result<(), Fault> {
        match self.side {
            Side::Host { .. } => {
                self.restart();
                self.has_begun = true;
                self.hello = Some(nonce);
                self.is_synchronised = version == VERSION;
                Ok(())
            }
            Side::Agent { .. } if self.is_synchronised => Err(Fault::Violation),
            // An answer to an earlier agent.
            Side::Agent { nonce: own } if nonce != own => Ok(()),
            Side::Agent { .. } if version != VERSION => Err(Fault::Version(version)),
            Side::Agent { .. } => {
                self.is_synchronised = true;
                Ok(())
            }
        }
    }

    fn open(&mut self, number: u32) -> Result<(), Fault> {
        let Side::Host { open } = &mut self.side else {
            return Err(Fault::Violation);
        };
        if number <= self.last {
            return Err(Fault::Violation);
        }
        self.last = number;
        let has_room = self.by_number.len() < MAX_STREAMS;
        match has_room.then(open).flatten() {
            Some(opening) => {
                self.by_number.insert(number, Stream::of_backend(opening));
                Ok(())
            }
            // An agent that goes on to open more does not listen.
            None if self.refused.len() >= MAX_STREAMS => Err(Fault::Violation),
            None => {
                self.refused.push(number);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests;
