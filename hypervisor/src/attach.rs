//! `wormhole attach`: a tenant of a backend for a guest of another monitor, such as QEMU.
//!
//! The other monitor cannot receive descriptors while its guest runs. So it maps one file at its start, the static
//! window, and connects to a vhost-user device, over which the guest's processes reach the backend.

mod confinement;
pub mod names;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use wormhole_link::tasks;
use wormhole_monitor::devices::vsock::{self, Accepted};
use wormhole_monitor::{ConnectRequest, Refused};
use wormhole_ring::control::VSOCK_PORT;

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
    /// Socket for the guest's monitor to connect its vhost-user-vsock device to.
    #[arg(long, value_name = "PATH")]
    vsock: PathBuf,
    /// Context id of the guest.
    #[arg(long, value_name = "NUMBER", default_value_t = 3, value_parser = clap::value_parser!(u32).range(3..u32::MAX as i64))]
    cid: u32,
    #[command(flatten)]
    config: ConfigOption,
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
    #[error("the thread that serves the guest's vsock cannot be made")]
    Thread(#[source] io::Error),
    #[error("the guest's vsock device cannot be served any more: attach again")]
    Vsock(#[source] io::Error),
    #[error("the backend has ended: start it and attach again")]
    Ended,
}

impl AttachError {
    /// Returns the names of the options that the error is about.
    pub fn options(&self) -> Vec<&'static str> {
        match self {
            Self::Backends(_) => vec!["backend"],
            Self::Names(_) => vec!["window", "vsock"],
            _ => Vec::new(),
        }
    }
}

/// Attaches one guest until it ends, or a signal arrives.
pub fn run(options: &Options) -> Result<(), AttachError> {
    // A backend or a path may not answer: a signal ends this process at once, until only its own work is left. The next
    // attach replaces a name that is left.
    let stream = options.backend.connect()?.stream;
    let mut backend = Backend::attach_static(stream, options.size.0)?;
    let mut names = Names::default();
    let listener = names.bind(&options.vsock)?;
    names.link(&options.window, backend.window())?;
    let ends = Set::of(&ENDS);
    ends.block();
    names.hand_over()?;
    // All files are open by now, and all processes are started.
    confinement::enter()?;
    backend.listen(None)?;

    let (cid, control) = (u64::from(options.cid), Arc::new(backend.streams()?));
    let server = tasks::spawn("attach", move || {
        // One guest alone: the window contains what it wrote. Others may look whether the socket has a listener.
        loop {
            let acceptor = Box::new(acceptor(Arc::clone(&control)));
            if vsock::serve(&listener, cid, acceptor)? {
                break Ok(());
            }
        }
    });
    let server = server.map_err(AttachError::Thread)?;
    say::result(format_args!(
        "attached: window {} of {}, vsock {} with the context id {}",
        options.window.display(),
        options.size,
        options.vsock.display(),
        options.cid,
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
            break served.and_then(Result::err).map(AttachError::Vsock);
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

/// Returns the acceptor of the guest's connections: control streams lead to the backend.
fn acceptor(
    control: Arc<Streams>,
) -> impl FnMut(ConnectRequest) -> Result<Accepted, Refused> + Send {
    move |request| match request.port {
        VSOCK_PORT => control.open(),
        _ => Err(Refused),
    }
}
