//! `wormhole detach`: ends the `attach` that listens on a socket.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use rustix::io::Errno;
use wormhole_link::users::{Peer, peer_of};

use crate::attach::{self, Socket};
use crate::listener::connect_at_once;
use crate::places::Process;
use crate::say;

/// Time after which an `attach` that has been asked to end is killed: longer than it waits for the reports of its sessions.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    socket: Socket,
}

/// Reason why a guest is not detached.
#[derive(Debug, thiserror::Error)]
pub enum DetachError {
    #[error(
        "no guest is attached at {}: name the socket that `wormhole attach` has made",
        path.display()
    )]
    None {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "another program listens on {}: name the socket that `wormhole attach` has made",
        .0.display()
    )]
    Other(PathBuf),
    #[error("{} takes no more connections: end the programs that wait for it", .0.display())]
    Full(PathBuf),
    #[error("the guest that is attached at {} cannot be detached", path.display())]
    End {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Ends the process, and returns when its names are gone.
pub fn run(options: &Options) -> Result<(), DetachError> {
    end_at(options.socket.path())?;
    say::result(format_args!("detached: {}", options.socket));
    Ok(())
}

/// Ends the process that listens on a socket.
fn end_at(path: &Path) -> Result<(), DetachError> {
    let listener = listener_of(path).map_err(|error| match error {
        Errno::AGAIN => DetachError::Full(path.to_owned()),
        error => DetachError::None {
            path: path.to_owned(),
            source: error.into(),
        },
    })?;
    let process = attached(listener).ok_or_else(|| DetachError::Other(path.to_owned()))?;
    process.end(LIMIT).map_err(|source| DetachError::End {
        path: path.to_owned(),
        source,
    })?;
    Ok(())
}

/// Returns the process that has begun to listen on a socket. Fails with `AGAIN` instead of waiting for room.
fn listener_of(path: &Path) -> rustix::io::Result<Peer> {
    let socket = connect_at_once(path)?;
    peer_of(&socket).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// Returns the process that has begun to listen, if it is an `attach` of the user who did. If that one has ended and left the
/// socket to another process, a later process may have its number.
///
/// A user can give a process any name. So a caller who names a stranger's socket can end a process of that stranger, and no other
/// user's. Nothing that lies in the process's memory is read, such as its command line: the stranger can keep its reader waiting.
fn attached(listener: Peer) -> Option<Process> {
    let pid = u32::try_from(listener.process).ok()?;
    // Found first: the facts are those of this process, or of a later one, which is then not ended.
    let process = Process::of(pid)?;
    let is_own = user_of(pid) == Some(listener.user)
        && program_of("self").is_some_and(|own| program_of(&pid.to_string()) == Some(own));
    (is_own && is_attach(pid)).then_some(process)
}

/// Returns whether a process has the name of an `attach`, which the kernel keeps.
fn is_attach(pid: u32) -> bool {
    let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.strip_suffix(b"\n") == Some(attach::NAME.to_bytes())
}

/// Returns the effective user of a process.
fn user_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    users.split_whitespace().nth(1)?.parse().ok()
}

/// Returns the name of a process's program, which may have been replaced by a newer one.
fn program_of(process: &str) -> Option<OsString> {
    let path = fs::read_link(format!("/proc/{process}/exe")).ok()?;
    let name = path.file_name()?.as_bytes();
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    Some(OsString::from_vec(name.to_vec()))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::process::{Command, Stdio};

    use rustix::process::geteuid;

    use super::*;

    /// Starts a shell as a program of this name, which names itself so, and reads a line. Returns what `attached` finds for a
    /// listener of this user, and for one of another user, at its number.
    fn found(program: &OsStr, name: &str) -> [bool; 2] {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(program);
        // By another process: a program that this one had open for writing could not be executed.
        let copied = Command::new("cp").arg("/bin/sh").arg(&program).status();
        assert!(copied.unwrap().success());
        let mut command = Command::new(&program);
        let script = format!("printf {name} > /proc/$$/comm; echo; read line");
        // The arguments are those of a real one.
        command.args(["-c", &script, "attach"]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let user = geteuid().as_raw();
        let process = child.id().cast_signed();
        let found = [user, user + 1].map(|user| attached(Peer { user, process }).is_some());
        drop(child.stdin.take());
        child.wait().unwrap();
        found
    }

    #[test]
    fn a_process_of_another_user_or_program_is_not_ended() {
        let (own, name) = (program_of("self").unwrap(), attach::NAME.to_str().unwrap());
        assert_eq!(found(&own, name), [true, false]);
        assert_eq!(found("other".as_ref(), name), [false, false]);
        assert_eq!(found(&own, "wormhole"), [false, false]);
        let process = 0;
        assert_eq!(attached(Peer { user: 0, process }), None);
    }

    #[test]
    fn a_socket_without_room_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vsock");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let mut waiting = 0;
        while listener_of(&path).is_ok() {
            waiting += 1;
        }
        assert!(waiting > 0);
        let ended = end_at(&path);
        assert!(matches!(ended, Err(DetachError::Full(_))), "{ended:?}");
    }
}
