//! The agent: gives a stream to each process that connects, and waits for the host when there is none.

use std::convert::Infallible;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_oobinline, socket_peercred};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::closer::{self, ProcessSocket};
use crate::line::{LineError, serve};
use crate::mux::Mux;

/// Time between two looks for the host. A port has no event for its arrival that ends a wait, since its absence is one.
pub(crate) const LOOK: Duration = Duration::from_millis(500);

/// Reason why the agent ends.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("cannot open the port {}: {source}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot listen on {}: {source}", path.display())]
    Listen { path: PathBuf, source: io::Error },
    #[error("no random number for the hello: {0}")]
    Random(io::Error),
    #[error("the listener cannot be waited for: {0}")]
    Wait(io::Error),
    #[error("the port cannot be used: {0}")]
    Port(io::Error),
    #[error(transparent)]
    Line(#[from] LineError),
}

/// Listens on a socket for processes of every user, as vsock has them. Replaces the socket of an earlier agent.
///
/// # Errors
/// The socket cannot be made.
pub fn listen(path: &Path) -> Result<UnixListener, AgentError> {
    let bind = || {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o666))?;
        Ok(listener)
    };
    bind().map_err(|source| AgentError::Listen {
        path: path.to_owned(),
        source,
    })
}

/// Opens the port of a guest, which no other process must have open.
///
/// # Errors
/// There is no port, or it is in use.
pub fn open_port(path: &Path) -> Result<File, AgentError> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path);
    opened.map_err(|source| AgentError::Open {
        path: path.to_owned(),
        source,
    })
}

/// Serves the port of a guest for the processes that connect, each host that opens the port in turn.
///
/// # Errors
/// The port cannot be used, or the host speaks another version of the protocol.
pub fn serve_port(mut port: File, listener: &UnixListener) -> Result<Infallible, AgentError> {
    loop {
        while !has_host(&mut port)? {
            refuse(listener)?;
        }
        let mut mux = Mux::agent(nonce()?);
        serve(port.as_fd(), &mut mux, Some(listener))?;
    }
}

fn nonce() -> Result<u64, AgentError> {
    let mut bytes = [0; 8];
    // So few bytes are never given in parts.
    let random = getrandom(&mut bytes, GetRandomFlags::empty());
    random.map_err(|error| AgentError::Random(error.into()))?;
    Ok(u64::from_le_bytes(bytes))
}

/// Returns whether the host has opened the port. Drops bytes of an earlier host.
fn has_host(port: &mut File) -> Result<bool, AgentError> {
    match port.read(&mut [0; 4096]) {
        Ok(0) => Ok(false),
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(true),
        Err(error) => Err(AgentError::Port(error)),
    }
}

/// Closes the connections of processes for a while.
fn refuse(listener: &UnixListener) -> Result<(), AgentError> {
    let limit = Timespec::try_from(LOOK).unwrap_or_default();
    let listener_events = match closer::is_busy() {
        true => PollFlags::empty(),
        false => PollFlags::IN,
    };
    let mut events = [PollFd::new(listener, listener_events)];
    match poll(&mut events, Some(&limit)) {
        Ok(0) | Err(Errno::INTR) => Ok(()),
        Ok(_) => {
            // The next look comes earlier then.
            if let Ok((process, _)) = listener.accept() {
                drop(ProcessSocket::new(process));
            }
            Ok(())
        }
        Err(error) => Err(AgentError::Wait(error.into())),
    }
}

/// Accepts a process and sends it its end of a stream, in the way of each listener of a control stream. Returns the other end, and
/// the process's user.
pub fn accept(listener: &UnixListener) -> io::Result<(ProcessSocket, u32)> {
    let (process, _) = listener.accept()?;
    let process = ProcessSocket::new(process);
    let user = socket_peercred(&*process)?.uid.as_raw();
    let (ours, theirs) = UnixStream::pair()?;
    let ours = ProcessSocket::new(ours);
    ours.set_nonblocking(true)?;
    // A read would drop a byte that was sent out of band, and close its descriptors.
    set_socket_oobinline(&*ours, true)?;
    let descriptors = [theirs.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(
        &*process,
        &[IoSlice::new(&[0])],
        &mut control,
        SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
    )?;
    Ok((ours, user))
}
