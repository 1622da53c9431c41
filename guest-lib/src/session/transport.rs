//! Way of this process's records to the backend, which the environment chooses.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_connect::environment::trusted;
use wormhole_ring::stream::{Client, StreamError};
use wormhole_ring::transport::{self, Transport};

use super::Session;

/// Way of the records of a session.
#[derive(Debug)]
pub enum Way {
    Poll,
    /// A doorbell for each record.
    Doorbell,
    /// Messages on a stream.
    Streams(Streams),
}

/// Reason why the environment's choice cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum WayError {
    #[error("the transport {0:?} is unknown: leave {variable} out", variable = transport::VARIABLE)]
    Unknown(String),
    #[error("the transport {0} needs a backend on this process's own system")]
    Apart(String),
    #[error("the session's file cannot be shared with the stream's server: {0}")]
    File(#[from] std::io::Error),
}

impl Way {
    /// Returns the way that the environment chooses for a session whose segment lies at this offset of a file of its own. A
    /// session of a VM has no such file.
    pub fn chosen(segment: Option<(&File, u64)>) -> Result<Self, WayError> {
        match trusted(transport::VARIABLE) {
            Some(text) => Self::named(&text, segment),
            None => Ok(Self::Poll),
        }
    }

    fn named(text: &str, segment: Option<(&File, u64)>) -> Result<Self, WayError> {
        let wanted = Transport::parse(text).ok_or_else(|| WayError::Unknown(text.to_owned()))?;
        match (wanted, segment) {
            (Transport::Poll, _) => Ok(Self::Poll),
            (_, None) => Err(WayError::Apart(text.to_owned())),
            (Transport::Doorbell, _) => Ok(Self::Doorbell),
            (Transport::Socket(path), Some((file, offset))) => Ok(Self::Streams(Streams {
                path: path.to_owned(),
                file: file.try_clone()?,
                offset,
            })),
        }
    }

    pub const fn streams(&self) -> Option<&Streams> {
        match self {
            Self::Streams(streams) => Some(streams),
            Self::Poll | Self::Doorbell => None,
        }
    }
}

/// Streams of the threads of this process.
#[derive(Debug)]
pub struct Streams {
    /// Path at which the server listens.
    path: String,
    /// The session's file, and the offset of its segment, which the server gets with each connection.
    file: File,
    offset: u64,
}

thread_local! {
    /// This thread's stream, and the process that made it: a forked child makes its own.
    static STREAM: RefCell<Option<(u32, Client<UnixStream>)>> = const { RefCell::new(None) };
}

impl Streams {
    /// Calls `talk` with this thread's stream, which its first call connects. A thread whose data are destroyed already
    /// connects each time.
    pub fn with<R>(
        &self,
        talk: impl FnOnce(&mut Client<UnixStream>) -> Result<R, StreamError>,
    ) -> Result<R, StreamError> {
        let mut talk = Some(talk);
        let own = STREAM.try_with(|place| {
            let mut place = place.try_borrow_mut().ok()?;
            let talk = talk.take()?;
            Some(self.ready(&mut place).and_then(talk))
        });
        match (own, talk) {
            (Ok(Some(said)), _) => said,
            (_, Some(talk)) => talk(&mut self.connect()?),
            (_, None) => Err(StreamError::Over),
        }
    }

    fn ready<'a>(
        &self,
        place: &'a mut Option<(u32, Client<UnixStream>)>,
    ) -> Result<&'a mut Client<UnixStream>, StreamError> {
        let process = std::process::id();
        if place.as_ref().is_none_or(|(maker, _)| *maker != process) {
            *place = None;
        }
        match place {
            Some((_, client)) => Ok(client),
            empty => Ok(&mut empty.insert((process, self.connect()?)).1),
        }
    }

    fn connect(&self) -> Result<Client<UnixStream>, StreamError> {
        let stream = UnixStream::connect(&self.path)?;
        stream
            .send_with_fd(&self.offset.to_ne_bytes()[..], self.file.as_raw_fd())
            .map_err(|error| std::io::Error::from_raw_os_error(error.errno()))?;
        Ok(Client::new(stream))
    }
}

impl Session {
    /// Returns whether data of copies go into messages, as those of page-locked memory then do too.
    pub const fn carries_data(&self) -> bool {
        self.way.streams().is_some()
    }

    /// Sends the bytes of at most one staging buffer to an address of the arena. A failure ends the session.
    pub fn put(&self, address: u64, bytes: &[u8]) {
        if let (Some(streams), Some((_, offset))) = (self.way.streams(), self.arena_file(address)) {
            let _ = self.told(streams.with(|client| client.put(offset, bytes)));
        }
    }

    /// Receives the bytes of at most one staging buffer from an address of the arena. A failure ends the session.
    pub fn get(&self, address: u64, bytes: &mut [u8]) {
        if let (Some(streams), Some((_, offset))) = (self.way.streams(), self.arena_file(address)) {
            let _ = self.told(streams.with(|client| client.get(offset, bytes)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transport_that_cannot_be_is_refused_by_name() {
        let file = File::open("/dev/null").unwrap();
        assert!(matches!(Way::named("poll", None), Ok(Way::Poll)));
        let doorbell = Way::named("doorbell", Some((&file, 0)));
        assert!(matches!(doorbell, Ok(Way::Doorbell)));
        let error = Way::named("socket:/s", None).unwrap_err().to_string();
        assert!(error.contains("socket:/s needs a backend"), "{error}");
        let error = Way::named("pigeon", Some((&file, 0)))
            .unwrap_err()
            .to_string();
        assert!(error.contains("\"pigeon\" is unknown"), "{error}");
    }
}
