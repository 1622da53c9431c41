//! `wormhole-fs [--writable] FOLDER`: serves one guest over the socket on standard input, until its other end is closed.

mod inherited;

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use rustix::io::Errno;
use rustix::net::SocketType;
use rustix::net::sockopt::socket_type;
use wormhole_fs::confinement::{self, Access, ConfinementError, Queues};
use wormhole_fs::server::Server;
use wormhole_fs::tree::{MOST_NODES, Tree};
use wormhole_fs::{packets, vhost_user};
use wormhole_link::arguments::{USAGE, parse};
use wormhole_link::chain;

/// Show a folder of this host to one guest, which can read it. `wormhole run` starts this.
#[derive(Debug, Parser)]
#[command(name = "wormhole-fs", version)]
struct Arguments {
    /// Standard input is a listening socket, to which a monitor connects that speaks vhost-user.
    #[arg(long)]
    vhost_user: bool,
    /// The guest can also change the folder, with the rights of this process's user.
    #[arg(long)]
    writable: bool,
    /// The folder that the guest sees.
    folder: PathBuf,
}

#[derive(Debug, thiserror::Error)]
enum FsError {
    #[error("cannot open {}", .0.display())]
    Folder(PathBuf, #[source] Errno),
    #[error("standard input is no socket {0}: `wormhole run` starts this program with one")]
    NoSocket(&'static str),
    #[error("the process cannot be confined")]
    Confinement(#[from] ConfinementError),
    #[error("the socket to the monitor failed")]
    Socket(#[source] Errno),
    #[error("the monitor broke the protocol: {0}")]
    VhostUser(vhost_user_backend::Error),
}

fn main() -> ExitCode {
    inherited::close();
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

fn serve(arguments: Arguments) -> Result<(), FsError> {
    let Arguments {
        vhost_user,
        writable,
        folder,
    } = arguments;
    let (kind, name) = match vhost_user {
        true => (SocketType::STREAM, "of a stream"),
        false => (SocketType::SEQPACKET, "of packets"),
    };
    let socket = standard_input(kind).ok_or(FsError::NoSocket(name))?;
    let tree = Tree::open(&folder, MOST_NODES);
    let tree = tree.map_err(|error| FsError::Folder(folder, error))?;
    let queues = match vhost_user {
        true => Queues::Own,
        false => Queues::Monitor,
    };
    let access = match writable {
        true => Access::Change,
        false => Access::Read,
    };
    confinement::enter(tree.root(), queues, access)?;
    let mut server = match access {
        Access::Change => Server::writable(tree),
        Access::Read => Server::new(tree),
    };
    match queues {
        Queues::Own => vhost_user::serve(server, socket.into()).map_err(FsError::VhostUser),
        Queues::Monitor => packets::serve(&mut server, &socket).map_err(FsError::Socket),
    }
}

/// Returns standard input if it is a socket of this kind.
fn standard_input(kind: SocketType) -> Option<OwnedFd> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().ok()?;
    let found = socket_type(&socket).ok()?;
    (found == kind).then_some(socket)
}
