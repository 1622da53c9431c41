//! `wormhole detach`: ends the `attach` that listens on a socket.

use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use wormhole_link::users::peer_of;

use crate::places::Process;
use crate::say;

/// Time after which an `attach` that has been asked to end is killed: longer than it waits for the reports of its sessions.
const LIMIT: Duration = Duration::from_secs(60);
/// The command of the process, after its name.
const COMMAND: &str = "attach";

#[derive(Debug, Args)]
pub struct Options {
    /// Socket that `attach --vsock` has made.
    #[arg(long, value_name = "PATH")]
    vsock: PathBuf,
}

/// Reason why a guest is not detached.
#[derive(Debug, thiserror::Error)]
pub enum DetachError {
    #[error(
        "no guest is attached at {}: name the socket that `wormhole attach --vsock` has made",
        path.display()
    )]
    None {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "another program listens on {}: name the socket that `wormhole attach --vsock` has made",
        .0.display()
    )]
    Other(PathBuf),
    #[error("the guest that is attached at {} cannot be detached", path.display())]
    End {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Ends the process, and returns when its names are gone.
pub fn run(options: &Options) -> Result<(), DetachError> {
    let path = &options.vsock;
    let none = |source| DetachError::None {
        path: path.clone(),
        source,
    };
    let number = listener_of(path).map_err(none)?;
    let process = number.and_then(attached);
    let process = process.ok_or_else(|| DetachError::Other(path.clone()))?;
    process.end(LIMIT).map_err(|source| DetachError::End {
        path: path.clone(),
        source,
    })?;
    say::result(format_args!("detached: vsock {}", path.display()));
    Ok(())
}

/// Returns the number of the process that listens on a socket, if it is one of this system.
fn listener_of(path: &Path) -> io::Result<Option<u32>> {
    let peer = peer_of(&UnixStream::connect(path)?)?;
    Ok(u32::try_from(peer.process).ok().filter(|pid| *pid != 0))
}

/// Returns the process of this number, if it is an `attach`.
fn attached(pid: u32) -> Option<Process> {
    // Found first: the command line is that of this process, or of a later one, which is then not ended.
    let process = Process::of(pid)?;
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let mut words = line.split(|byte| *byte == 0).skip(1);
    (words.next() == Some(COMMAND.as_bytes())).then_some(process)
}
