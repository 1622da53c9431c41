//! `wormhole-fs FOLDER`: serves one guest over the socket on standard input, until its other end is closed.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use rustix::io::Errno;
use rustix::net::SocketType;
use rustix::net::sockopt::socket_type;
use wormhole_fs::confinement::{self, ConfinementError};
use wormhole_fs::packets;
use wormhole_fs::server::Server;
use wormhole_fs::tree::{MOST_NODES, Tree};
use wormhole_link::arguments::{USAGE, parse};
use wormhole_link::chain;

/// Show a folder of this host to one guest, read-only. `wormhole run` starts this.
#[derive(Debug, Parser)]
#[command(name = "wormhole-fs", version)]
struct Arguments {
    /// The folder that the guest sees.
    folder: PathBuf,
}

#[derive(Debug, thiserror::Error)]
enum FsError {
    #[error("cannot open {}", .0.display())]
    Folder(PathBuf, #[source] Errno),
    #[error(
        "standard input is no socket of packets (SOCK_SEQPACKET): `wormhole run` starts this program with one"
    )]
    NoSocket,
    #[error("the process cannot be confined")]
    Confinement(#[from] ConfinementError),
    #[error("the socket to the monitor failed")]
    Socket(#[source] Errno),
}

fn main() -> ExitCode {
    let arguments = match parse::<Arguments>("wormhole-fs") {
        Ok(arguments) => arguments,
        Err(status) => return status,
    };
    match serve(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wormhole-fs: {}", chain(&error));
            ExitCode::from(USAGE)
        }
    }
}

fn serve(Arguments { folder }: Arguments) -> Result<(), FsError> {
    let socket = standard_input()?;
    let tree = Tree::open(&folder, MOST_NODES);
    let tree = tree.map_err(|error| FsError::Folder(folder, error))?;
    confinement::enter(tree.root())?;
    packets::serve(&mut Server::new(tree), &socket).map_err(FsError::Socket)
}

fn standard_input() -> Result<OwnedFd, FsError> {
    let input = std::io::stdin().as_fd().try_clone_to_owned();
    let socket = input.map_err(|_| FsError::NoSocket)?;
    match socket_type(&socket) {
        Ok(SocketType::SEQPACKET) => Ok(socket),
        _ => Err(FsError::NoSocket),
    }
}
