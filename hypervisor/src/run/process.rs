//! Placement `process`: the program is a process of this system, the backend another.

use std::ffi::OsString;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::net::sockopt::socket_peercred;
use rustix::process::{Signal, geteuid, set_parent_process_death_signal};

use crate::backend::Backend;
use crate::installation::Installation;

use super::summary::Summary;
use super::{Options, RunError};

/// How long the listener pauses when it cannot accept.
const RETRY: Duration = Duration::from_millis(10);

/// Runs the program with the frontends where it looks first, and its control streams handed to a backend.
pub fn run(
    options: &Options,
    program: &Path,
    installation: &Installation,
) -> Result<(u8, Summary), RunError> {
    let start = Instant::now();
    let frontends = installation.frontends()?;
    let mut backend = Backend::start(installation, &options.device, options.window.0)?;

    // An abstract address leaves no file behind, however this process ends.
    let address = format!("wormhole-{}", std::process::id());
    let listener = SocketAddr::from_abstract_name(&address)
        .and_then(|address| UnixListener::bind_addr(&address))
        .map_err(|source| RunError::Io {
            what: "cannot listen for guest processes".to_owned(),
            source,
        })?;
    backend.listen(None)?;
    let port = backend.port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // No descriptor is left for now, or the process has gone again.
                std::thread::sleep(RETRY);
                continue;
            };
            if same_user(&stream) && port.forward(&stream.into(), true).is_err() {
                break;
            }
        }
    });

    let mut command = Command::new(program);
    // Programs look for what belongs to them beside the name they were called by: a Python environment's
    // interpreter is a link.
    command
        .arg0(&options.command[0])
        .args(&options.command[1..])
        .env(
            "LD_LIBRARY_PATH",
            library_path(frontends.first().and_then(|library| library.parent())),
        )
        .env("WORMHOLE_CONTROL", format!("unix:@{address}"));
    // SAFETY: between fork and exec this makes one system call and allocates nothing.
    unsafe {
        command
            .pre_exec(|| set_parent_process_death_signal(Some(Signal::KILL)).map_err(Into::into));
    }
    let status = command.status().map_err(|source| RunError::Io {
        what: format!("cannot start {}", program.display()),
        source,
    })?;
    let sessions = backend.finish()?;
    Ok((
        exit_code(status),
        Summary::of(sessions, "none", start.elapsed()),
    ))
}

/// The folder of the frontends before everything that the user set.
fn library_path(frontends: Option<&Path>) -> OsString {
    let own = frontends
        .map(|folder| folder.as_os_str().to_owned())
        .unwrap_or_default();
    match std::env::var_os("LD_LIBRARY_PATH") {
        Some(others) if !others.is_empty() => [own, others].join(std::ffi::OsStr::new(":")),
        _ => own,
    }
}

/// Abstract addresses have no permissions, so the peer's user is asked for.
fn same_user(stream: &UnixStream) -> bool {
    socket_peercred(stream).is_ok_and(|peer| peer.uid == geteuid())
}

/// A status as a shell reports it.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(u8::MAX)
}
