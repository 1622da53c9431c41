//! Streams for connections that a guest asks for. One that takes time is opened on another thread, and the guest's other
//! connections go on meanwhile.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};

/// The device's end of an accepted connection's stream.
#[derive(Debug)]
pub enum Accepted {
    Open(UnixStream),
    Opening(Opening),
}

/// The device's part of a stream that is being opened.
#[derive(Debug)]
pub struct Opening {
    /// Hangs up when the stream is there, or is refused.
    pub(super) bell: UnixStream,
    pub(super) stream: Receiver<UnixStream>,
}

/// The part of the thread that opens the stream. Dropping it refuses the connection.
#[derive(Debug)]
pub struct Opener {
    stream: Sender<UnixStream>,
    _bell: UnixStream,
}

impl Opening {
    /// Creates the two parts.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<(Self, Opener)> {
        let (bell, theirs) = UnixStream::pair()?;
        let (sender, stream) = channel();
        let opener = Opener {
            stream: sender,
            _bell: theirs,
        };
        Ok((Self { bell, stream }, opener))
    }
}

impl Opener {
    /// Gives the device its end of the stream.
    pub fn open(self, stream: UnixStream) {
        // A guest that has given the connection up needs no stream.
        let _ = self.stream.send(stream);
    }
}

impl From<UnixStream> for Accepted {
    fn from(stream: UnixStream) -> Self {
        Self::Open(stream)
    }
}

impl From<Opening> for Accepted {
    fn from(opening: Opening) -> Self {
        Self::Opening(opening)
    }
}
