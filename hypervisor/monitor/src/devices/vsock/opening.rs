//! Streams for connections that a guest asks for. One that takes time is opened on another thread, and the guest's other
//! connections go on meanwhile.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
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
    pub(super) hold: Option<Hold>,
}

/// Counts connections that the guest's processes have not closed.
#[derive(Clone, Debug, Default)]
pub struct Holders(Arc<AtomicUsize>);

/// A connection's part in [`Holders`]. When the host ends a connection that has one, the guest reads end of file, and the
/// connection stays until its process closes it or ends.
#[derive(Debug)]
pub struct Hold(Arc<AtomicUsize>);

impl Holders {
    /// Adds a connection.
    pub fn add(&self) -> Hold {
        self.0.fetch_add(1, Ordering::AcqRel);
        Hold(Arc::clone(&self.0))
    }

    /// Returns the number of connections.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
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
        let opening = Self {
            bell,
            stream,
            hold: None,
        };
        Ok((opening, opener))
    }

    /// Returns the socket that hangs up when the stream is there, or is refused, and the stream by then, for a device other
    /// than vsock.
    pub fn into_parts(self) -> (UnixStream, Receiver<UnixStream>) {
        (self.bell, self.stream)
    }

    /// Makes the connection one that is counted.
    pub fn held(self, hold: Hold) -> Self {
        Self {
            hold: Some(hold),
            ..self
        }
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
