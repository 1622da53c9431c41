//! Client that asks a backend for the usage by its tenants.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use wormhole_link::usage::TenantUsage;
use wormhole_ring::control::Message;

use super::{BackendsError, Chosen, Entry, Place, connect_to};
use crate::backend::{BackendError, receive, send};

/// Time within which a supervisor answers. It waits for its tenants' processes a part of it.
const LIMIT: Duration = Duration::from_secs(20);

/// Connection to a backend, which counts as one of the user's tenants.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    stream: UnixStream,
}

impl Client {
    /// Connects to a backend.
    ///
    /// # Errors
    /// Same as [`Chosen::connect`].
    pub fn connect(chosen: &Chosen) -> Result<Self, BackendsError> {
        let path = match chosen {
            Chosen::Socket(path) => path.clone(),
            Chosen::Name(name) => Place::find(name)?.socket(),
        };
        Self::of(path, chosen.connect()?.stream)
    }

    /// Connects to a backend of the list.
    ///
    /// # Errors
    /// Nothing listens on its socket, or its user is a stranger.
    pub fn connect_to(entry: &Entry) -> Result<Self, BackendsError> {
        let stream = connect_to(&entry.socket)?;
        Self::of(entry.socket.clone(), stream)
    }

    fn of(path: PathBuf, stream: UnixStream) -> Result<Self, BackendsError> {
        match stream.set_read_timeout(Some(LIMIT)) {
            Ok(()) => Ok(Self { path, stream }),
            Err(source) => Err(BackendsError::Connect { path, source }),
        }
    }

    /// Returns the usage by the tenants that this user may see.
    ///
    /// # Errors
    /// The backend refuses the client, or ends.
    pub fn ask(&self) -> Result<Vec<TenantUsage>, BackendsError> {
        self.answer().map_err(|source| BackendsError::Usage {
            path: self.path.clone(),
            source,
        })
    }

    fn answer(&self) -> Result<Vec<TenantUsage>, BackendError> {
        // A supervisor that refuses the client may have closed the connection: its reason is received below.
        let sent = send(&self.stream, &Message::AskUsage, &[]);
        let (mut text, mut body) = (String::new(), Vec::new());
        loop {
            match receive(&self.stream, &mut body) {
                Ok(Some((Message::Usage { more, tenants }, _))) => {
                    text.push_str(tenants);
                    if more == 0 {
                        return Ok(serde_json::from_str(&text)?);
                    }
                }
                Ok(Some((Message::Refused { reason, .. }, _))) => {
                    return Err(BackendError::Refused(reason.to_owned()));
                }
                Ok(Some((other, _))) => return Err(BackendError::Unexpected(other.name())),
                Ok(None) => return Err(sent.err().unwrap_or(BackendError::Closed)),
                Err(BackendError::Stream(error))
                    if error.kind() == std::io::ErrorKind::WouldBlock =>
                {
                    return Err(BackendError::NoUsage(LIMIT));
                }
                Err(error) => return Err(error),
            }
        }
    }
}
