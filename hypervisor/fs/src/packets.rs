//! Serves a guest over a socket that preserves packets: each is a request or a reply.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::server::{MOST_REQUEST, Server};

/// Serves until the other end is closed.
///
/// # Errors
/// The socket fails.
pub fn serve(server: &mut Server, socket: &OwnedFd) -> Result<(), Errno> {
    let mut request = vec![0; MOST_REQUEST];
    loop {
        let len = match recv(socket, &mut request[..], RecvFlags::TRUNC) {
            Ok((0, _)) => return Ok(()),
            // A request that was cut: its header names another length, so that it is refused.
            Ok((_, received)) => received.min(MOST_REQUEST),
            Err(Errno::INTR) => continue,
            Err(Errno::CONNRESET) => return Ok(()),
            Err(error) => return Err(error),
        };
        let Some(reply) = server.serve(&request[..len]) else {
            continue;
        };
        loop {
            match send(socket, reply, SendFlags::NOSIGNAL) {
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}
