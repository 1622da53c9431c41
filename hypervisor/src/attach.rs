//! `wormhole attach`: a tenant of a backend for a guest of another monitor, such as QEMU.
//!
//! The other monitor cannot receive descriptors while its guest runs. So it maps one file at its start, the static
//! window, and connects to a vhost-user device or to the other end of a virtio-serial port, over which the guest's processes
//! reach the backend.

mod confinement;
pub mod names;

use std::ffi::CStr;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use rustix::fs::fstat;
use wormhole_link::tasks;
use wormhole_monitor::devices::vsock::{self, Accepted};
use wormhole_monitor::{ConnectRequest, Refused};
use wormhole_ring::control::VSOCK_PORT;
use wormhole_serial::{Mux, Opening};

use self::names::{Names, NamesError};
use crate::backend::{Backend, BackendError, Streams};
use crate::backends::{BackendsError, Chosen};
use crate::config::ConfigOption;
use crate::confinement::ConfinementError;
use crate::run::Size;
use crate::say;
use crate::signals::Set;

/// Time between two looks at the backend.
const LOOK: Duration = Duration::from_millis(500);
/// Name of the process, as the kernel has it, by which `detach` knows it. The kernel has room for no longer one.
pub const NAME: &CStr = c"wormhole-attach";
/// Signals that end the command.
const ENDS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

#[derive(Debug, Args)]
pub struct Options {
    /// The backend: the name that `backend start` gave it, or the path of its socket.
    #[arg(long, value_name = "NAME|unix:PATH", default_value = "default")]
    backend: Chosen,
    /// Path of the window's file, for the guest's monitor.
    #[arg(long, value_name = "PATH")]
    window: PathBuf,
    /// Size of the window.
    #[arg(long, default_value = "258M")]
    size: Size,
    #[command(flatten)]
    socket: Socket,
    /// Context id of the guest.
    #[arg(long, value_name = "NUMBER", default_value_t = 3, conflicts_with = "serial", value_parser = clap::value_parser!(u32).range(3..u32::MAX as i64))]
    cid: u32,
    #[command(flatten)]
    config: ConfigOption,
}

/// The socket that the guest's monitor connects to, and its device there.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Socket {
    /// Socket of the guest's vhost-user-vsock device.
    #[arg(long, value_name = "PATH")]
    vsock: Option<PathBuf>,
    /// Socket of the guest's virtio-serial port org.wormhole.control, for a guest without vsock.
    #[arg(long, value_name = "PATH")]
    serial: Option<PathBuf>,
}

impl Socket {
    /// Returns the socket's path.
    pub fn path(&self) -> &Path {
        let path = self.vsock.as_ref().or(self.serial.as_ref());
        path.map_or(Path::new(""), PathBuf::as_path)
    }
}

impl fmt::Display for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = match self.serial {
            Some(_) => "serial port",
            None => "vsock",
        };
        write!(f, "{device} {}", self.path().display())
    }
}

/// Reason why a guest is not attached, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error(transparent)]
    Backends(#[from] BackendsError),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Names(#[from] NamesError),
    #[error(transparent)]
    Confinement(#[from] ConfinementError),
    #[error("the thread that serves the guest's device cannot be made")]
    Thread(#[source] io::Error),
    #[error("the guest's device cannot be served any more: attach again")]
    Device(#[source] io::Error),
    #[error("the backend has ended: start it and attach again")]
    Ended,
}

impl AttachError {
    /// Returns the names of the options that the error is about.
    pub fn options(&self) -> Vec<&'static str> {
        match self {
            Self::Backends(_) => vec!["backend"],
            Self::Names(_) => vec!["window", "vsock", "serial"],
            _ => Vec::new(),
        }
    }
}

/// Attaches one guest until it ends, or a signal arrives.
pub fn run(options: &Options) -> Result<(), AttachError> {
    // Fails for no name. Threads that start later have names of their own.
    let _ = rustix::thread::set_name(NAME);
    // A backend or a path may not answer: a signal ends this process at once, until only its own work is left. The next
    // attach replaces a name that is left.
    let stream = options.backend.connect()?.stream;
    let mut backend = Backend::attach_static(stream, options.size.0)?;
    let mut names = Names::default();
    let window = backend.window().try_clone().map_err(AttachError::Device)?;
    // Read before a guest can find the window.
    let untouched = fstat(&window).map_err(|error| AttachError::Device(error.into()))?;
    let listener = names.bind(options.socket.path())?;
    names.link(&options.window, backend.window())?;
    let ends = Set::of(&ENDS);
    ends.block();
    names.hand_over()?;
    // All files are open by now, and all processes are started.
    confinement::enter()?;
    backend.listen(None)?;

    let (cid, control) = (u64::from(options.cid), Arc::new(backend.streams()?));
    let has_vsock = options.socket.vsock.is_some();
    // One guest alone: the window contains what it wrote. Others may look whether the socket has a listener.
    let server = tasks::spawn("attach", move || match has_vsock {
        true => serve_vsock(&listener, cid, &control),
        false => serve_port(&listener, (&window, untouched.st_blocks), &control),
    });
    let server = server.map_err(AttachError::Thread)?;
    let cid = match has_vsock {
        true => format!(" with the context id {cid}"),
        false => String::new(),
    };
    say::result(format_args!(
        "attached: window {} of {}, {}{cid}",
        options.window.display(),
        options.size,
        options.socket,
    ));
    let ended = loop {
        if ends.wait(Some(LOOK)).is_some() {
            break None;
        }
        if backend.is_over() {
            break Some(AttachError::Ended);
        }
        if server.is_finished() {
            let served = server.join().ok();
            break served.and_then(Result::err).map(AttachError::Device);
        }
    };
    drop(names);
    let served = backend.finish();
    match (served.failure, ended) {
        (_, Some(ended)) => Err(ended),
        (Some(failure), None) => Err(failure.into()),
        (None, None) => Ok(()),
    }
}

/// Serves the vsock device of one guest until its monitor ends.
fn serve_vsock(listener: &UnixListener, cid: u64, control: &Arc<Streams>) -> io::Result<()> {
    loop {
        let acceptor = Box::new(acceptor(Arc::clone(control)));
        if vsock::serve(listener, cid, acceptor)? {
            return Ok(());
        }
    }
}

/// Serves the port of one guest until its monitor ends. A monitor whose guest has no agent is not known from another process that
/// looks for the listener, unless the guest has used the window: it had so many blocks before.
fn serve_port(
    listener: &UnixListener,
    (window, untouched): (&File, i64),
    control: &Arc<Streams>,
) -> io::Result<()> {
    loop {
        let (port, _) = listener.accept()?;
        port.set_nonblocking(true)?;
        let control = Arc::clone(control);
        let mut mux = Mux::host(move || {
            let (bell, stream) = control.opening().ok()?.into_parts();
            Some(Opening { bell, stream })
        });
        wormhole_serial::serve(port.as_fd(), &mut mux, None).map_err(io::Error::other)?;
        if mux.has_begun() || fstat(window)?.st_blocks != untouched {
            return Ok(());
        }
    }
}

/// Returns the acceptor of the guest's connections: control streams lead to the backend.
fn acceptor(
    control: Arc<Streams>,
) -> impl FnMut(ConnectRequest) -> Result<Accepted, Refused> + Send {
    move |request| match request.port {
        VSOCK_PORT => control.open(),
        _ => Err(Refused),
    }
}
