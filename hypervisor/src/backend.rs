//! Starting a backend and talking to it on a tenant stream.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_backend::report::SessionReport;
use wormhole_ring::control::{Attach, ControlError, HEADER_BYTES, Header, Message, Stream};

use crate::installation::{Installation, InstallationError};

/// Why there is no backend, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error(transparent)]
    Installation(#[from] InstallationError),
    #[error("cannot make a window of {size} bytes")]
    Window {
        size: u64,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot start the supervisor")]
    Start(#[source] std::io::Error),
    #[error("{0}")]
    Refused(String),
    #[error("the supervisor ended without a word")]
    Ended,
    #[error("the supervisor's stream broke")]
    Stream(#[source] std::io::Error),
    #[error("the supervisor sent what is no control message")]
    Control(#[from] ControlError),
    #[error("the supervisor sent {0} where none is expected")]
    Unexpected(&'static str),
    #[error("the supervisor's report cannot be read")]
    Report(#[from] serde_json::Error),
}

/// Sessions that a tenant may have at the same time: each has a worker process of the host's.
const SESSION_LIMIT: u32 = 64;

/// A supervisor of our own, with one tenant.
#[derive(Debug)]
pub struct Backend {
    supervisor: Child,
    stream: UnixStream,
    window: File,
}

impl Backend {
    /// Starts a supervisor for `device` and attaches a fresh window of `window_size` bytes.
    pub fn start(
        installation: &Installation,
        device: &str,
        window_size: u64,
    ) -> Result<Self, BackendError> {
        let window = window(window_size).map_err(|source| BackendError::Window {
            size: window_size,
            source: source.into(),
        })?;
        let (stream, theirs) = UnixStream::pair().map_err(BackendError::Start)?;
        let mut command = Command::new(installation.supervisor()?);
        command
            .args([
                "--fd",
                &theirs.as_raw_fd().to_string(),
                "--device",
                device,
                "--workers",
            ])
            .arg(installation.folder())
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        // The supervisor is the only process that is started while its end can be inherited.
        fcntl_setfd(&theirs, FdFlags::empty())
            .map_err(|error| BackendError::Start(error.into()))?;
        // Started from its own process group, so that an interrupt at the terminal ends the program
        // first and the backend in order.
        let supervisor = command
            .process_group(0)
            .spawn()
            .map_err(BackendError::Start)?;
        drop(theirs);

        let mut backend = Self {
            supervisor,
            stream,
            window,
        };
        let attach = Attach {
            window_size,
            session_limit: SESSION_LIMIT,
            ..Attach::default()
        };
        send(
            &backend.stream,
            &Message::Attach(attach),
            backend.window.as_raw_fd(),
        )?;
        let mut body = Vec::new();
        match receive(&mut backend.stream, &mut body)? {
            Some(Message::Attached) => Ok(backend),
            Some(Message::Refused { reason, .. }) => Err(BackendError::Refused(reason.to_owned())),
            Some(other) => Err(BackendError::Unexpected(other.name())),
            None => Err(BackendError::Ended),
        }
    }

    /// The tenant's window.
    pub fn window(&self) -> &File {
        &self.window
    }

    /// Where guest processes' control streams are handed to the supervisor.
    pub fn port(&self) -> Result<Port, BackendError> {
        self.stream
            .try_clone()
            .map(Port)
            .map_err(BackendError::Stream)
    }

    /// Ends the tenant and returns what its sessions did.
    pub fn finish(mut self) -> Result<Vec<SessionReport>, BackendError> {
        self.stream
            .shutdown(std::net::Shutdown::Write)
            .map_err(BackendError::Stream)?;
        let mut sessions = Vec::new();
        let mut body = Vec::new();
        while let Some(message) = receive(&mut self.stream, &mut body)? {
            match message {
                Message::SessionReport(json) => sessions.push(serde_json::from_str(json)?),
                other => return Err(BackendError::Unexpected(other.name())),
            }
        }
        Ok(sessions)
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // The end of the tenant stream ends the supervisor; this only collects it.
        drop(self.stream.shutdown(std::net::Shutdown::Both));
        drop(self.supervisor.wait());
    }
}

/// Hands control streams of guest processes to the supervisor.
#[derive(Debug)]
pub struct Port(UnixStream);

impl Port {
    /// `local`: the guest process runs on this system and can be sent the window itself.
    pub fn forward(&self, guest: &OwnedFd, local: bool) -> Result<(), BackendError> {
        let stream = Stream {
            local: local.into(),
        };
        send(&self.0, &Message::Stream(stream), guest.as_raw_fd())
    }
}

/// A sparse memfd whose size nobody can change any more.
fn window(size: u64) -> Result<File, Errno> {
    let window = memfd_create(
        "wormhole-window",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    ftruncate(&window, size)?;
    fcntl_add_seals(
        &window,
        SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL,
    )?;
    Ok(window.into())
}

fn send(stream: &UnixStream, message: &Message<'_>, fd: RawFd) -> Result<(), BackendError> {
    let frame = message.to_vec()?;
    // Frames are far smaller than a socket's buffer, which takes them whole.
    stream
        .send_with_fd(&frame[..], fd)
        .map(drop)
        .map_err(|error| BackendError::Stream(error.into()))
}

/// The next message; none at the end of the stream.
fn receive<'a>(
    stream: &mut UnixStream,
    body: &'a mut Vec<u8>,
) -> Result<Option<Message<'a>>, BackendError> {
    let mut bytes = [0; HEADER_BYTES];
    let mut done = 0;
    while done < bytes.len() {
        match stream.read(&mut bytes[done..]) {
            Ok(0) if done == 0 => return Ok(None),
            Ok(0) => return Err(BackendError::Ended),
            Ok(count) => done += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(BackendError::Stream(error)),
        }
    }
    let header = Header::decode(&bytes)?;
    body.resize(header.body_len, 0);
    stream.read_exact(body).map_err(BackendError::Stream)?;
    Ok(Some(Message::decode(header.kind, body)?))
}
