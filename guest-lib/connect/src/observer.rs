//! Asks the supervisor for facts about the tenant's devices, over a control stream of its own.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use wormhole_ring::bootstrap;
use wormhole_ring::control::{ControlError, HEADER_BYTES, Header, MAX_FRAME, Message, Observe};

use crate::address::{self, ConnectError, uninterrupted};

/// Timeout of an answer. It includes the time until the device is ready.
const PATIENCE: Duration = Duration::from_secs(20);
/// Maximum bytes of facts in one answer.
const LONGEST: usize = 1 << 20;

/// Error from querying the supervisor.
#[derive(Debug, thiserror::Error)]
pub enum ObserverError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the stream to the backend failed: {0}")]
    Stream(#[from] io::Error),
    #[error("the backend does not speak this protocol: {0}")]
    Protocol(#[from] ControlError),
    #[error("the backend answered {0} where Observation was due")]
    Unexpected(&'static str),
    #[error("the backend answers with more than {LONGEST} bytes")]
    TooLong,
    #[error("the backend refuses: {reason} (refusal {code})")]
    Refused { code: u32, reason: String },
}

impl ObserverError {
    /// Returns whether the supervisor did not answer in time.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Stream(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Returns a hint for the user.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Connect(error) => error.hint(),
            _ => None,
        }
    }
}

/// Answer of the supervisor.
#[derive(Debug)]
pub struct Answer {
    /// Number of the tenant's devices.
    pub devices: u32,
    /// Facts about the requested device; empty if it does not exist.
    pub facts: String,
}

/// A stream to the backend.
#[derive(Debug)]
pub struct Observer {
    stream: UnixStream,
}

impl Observer {
    /// Connects to the backend.
    ///
    /// # Errors
    /// No backend is known, or it cannot be reached.
    pub fn open() -> Result<Self, ObserverError> {
        let stream = address::connect()?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { stream })
    }

    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// Queries the facts about a device.
    ///
    /// # Errors
    /// The stream fails, or the answer is none.
    pub fn ask(&mut self, device: u32) -> Result<Answer, ObserverError> {
        let mut frame = [0; MAX_FRAME];
        let length = Message::Observe(Observe {
            bootstrap_version: bootstrap::VERSION,
            device,
        })
        .encode(&mut frame)?;
        self.send(&frame[..length])?;
        let mut answer = Answer {
            devices: 0,
            facts: String::new(),
        };
        while self.receive(device, &mut answer)? {
            if answer.facts.len() > LONGEST {
                return Err(ObserverError::TooLong);
            }
        }
        Ok(answer)
    }

    /// Writes a frame. MSG_NOSIGNAL prevents that a disconnected backend kills the program with SIGPIPE.
    fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let sent = uninterrupted(|| {
                // SAFETY: the socket is open, and the bytes outlive the call.
                let sent = unsafe {
                    libc::send(
                        self.stream.as_raw_fd(),
                        bytes.as_ptr().cast(),
                        bytes.len(),
                        libc::MSG_NOSIGNAL,
                    )
                };
                usize::try_from(sent).map_err(|_| io::Error::last_os_error())
            })?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Reads one part of an answer. Returns whether more parts follow.
    fn receive(&mut self, asked: u32, answer: &mut Answer) -> Result<bool, ObserverError> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header)?;
        let header = Header::decode(&header)?;
        let mut body = vec![0; header.body_len];
        self.stream.read_exact(&mut body)?;
        match Message::decode(header.kind, &body)? {
            Message::Observation {
                device,
                devices,
                more,
                facts,
            } if device == asked => {
                answer.devices = devices;
                answer.facts.push_str(facts);
                Ok(more != 0)
            }
            Message::Refused { code, reason } => Err(ObserverError::Refused {
                code,
                reason: reason.to_owned(),
            }),
            other => Err(ObserverError::Unexpected(other.name())),
        }
    }
}
