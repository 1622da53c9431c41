//! Placement `process`: the program and the backend are processes of this system.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::geteuid;
use tempfile::TempDir;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_images::Ending;
use wormhole_link::tasks;
use wormhole_link::users::peer_of;

use crate::backend::BackendError;
use crate::installation::Installation;
use crate::private;
use crate::signals::Signals;

use super::environment::{LIBRARY_PATH, Variable};
use super::reaper::{Program, Reaper};
use super::summary::Summary;
use super::{Ended, Options, RunError, transport};

/// Pause after a failed accept.
pub(super) const RETRY: Duration = Duration::from_millis(10);

/// Runs the program with the frontends first in its library path, and gives each process that
/// connects a control stream to a backend.
pub fn run(
    options: &Options,
    program: &Path,
    installation: &Installation,
    signals: &Signals,
) -> Result<Ended, RunError> {
    let start = Instant::now();
    let frontends = installation.frontends()?;
    let mut backend = options.open_backend(installation)?;

    let (listener, place) = listener().map_err(|source| RunError::Io {
        what: "cannot listen for guest processes".to_owned(),
        source,
    })?;
    backend.listen(None)?;
    let port = backend.port();
    let accepting = tasks::spawn("accept", move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // No descriptor is free, or the process has closed the connection.
                std::thread::sleep(RETRY);
                continue;
            };
            if !same_user(&stream) {
                continue;
            }
            match port.open(true) {
                // Fails only if the process is gone.
                Ok(control) => drop(stream.send_with_fd(&[0][..], control.as_raw_fd())),
                // The supervisor has logged why. The process finds its connection closed.
                Err(BackendError::NoStream(_)) => {}
                Err(_) => break,
            }
        }
    });
    accepting.map_err(|source| RunError::Io {
        what: "the thread that accepts guest processes cannot be created".to_owned(),
        source,
    })?;

    let transport = transport::start(options.transport, place.path());
    let transport = transport.map_err(|source| RunError::Io {
        what: "cannot start the server of --transport socket".to_owned(),
        source,
    })?;
    let socket = place.path().join(SOCKET);
    let frontends = frontends.first().and_then(|library| library.parent());
    let (reaper, passing) = Reaper::start(
        installation.command(),
        Program {
            path: program,
            // Programs search for their files beside the name by which they were called: the
            // interpreter of a Python environment is a link.
            command: &options.command,
            variables: options
                .env
                .iter()
                .cloned()
                .chain(transport)
                .chain([
                    (LIBRARY_PATH.into(), library_path(frontends, &options.env)),
                    (
                        "WORMHOLE_CONTROL".into(),
                        format!("unix:{}", socket.display()).into(),
                    ),
                ])
                .collect(),
            socket: &socket,
            grace: Duration::from_secs(options.grace),
        },
        signals,
    )?;
    let ending = reaper.wait(passing)?;
    let served = backend.finish();
    match ending {
        Ending::Failed { status, message } => Err(RunError::NotRun { status, message }),
        ending => Ok(Ended {
            status: ending.status(),
            summary: Summary::of(served, "none", start.elapsed()),
            collected: Vec::new(),
            is_absence_said: false,
        }),
    }
}

/// Name of the socket in its folder.
const SOCKET: &str = "control";

/// Beginning of the name of the socket's folder.
const PREFIX: &str = "wormhole-";

/// Parent of the socket's folder. `TMPDIR` can name a file system that never answers, or a path that is too long for an
/// address (unix(7)).
const PARENT: &str = "/tmp";

/// Listens in a fresh private folder. The reaper removes the folder if this process cannot.
fn listener() -> io::Result<(UnixListener, TempDir)> {
    let place = private::folder_in(Path::new(PARENT), PREFIX)?;
    let listener = UnixListener::bind(place.path().join(SOCKET))?;
    Ok((listener, place))
}

/// Returns the library path: the folder of the frontends before the user's folders.
fn library_path(frontends: Option<&Path>, variables: &[Variable]) -> OsString {
    let own = frontends
        .map(|folder| folder.as_os_str().to_owned())
        .unwrap_or_default();
    let chosen = variables.iter().rfind(|(name, _)| name == LIBRARY_PATH);
    let chosen = chosen.map(|(_, value)| value.clone());
    match chosen.or_else(|| std::env::var_os(LIBRARY_PATH)) {
        Some(others) if !others.is_empty() => [own, others].join(std::ffi::OsStr::new(":")),
        _ => own,
    }
}

/// Returns whether the peer runs as the same user: root can enter the folder as well.
fn same_user(stream: &UnixStream) -> bool {
    peer_of(stream).is_ok_and(|peer| peer.user == geteuid().as_raw())
}
