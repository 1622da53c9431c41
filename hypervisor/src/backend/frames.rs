//! Control messages on a stream, with files beside them.

use std::fs::File;
use std::io::Read;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_ring::control::{HEADER_BYTES, Header, Message};

use super::BackendError;

/// Sends a message with descriptors.
pub fn send(
    stream: &UnixStream,
    message: &Message<'_>,
    descriptors: &[RawFd],
) -> Result<(), BackendError> {
    let frame = message.to_vec()?;
    // Frames are far smaller than a socket's buffer, so each is sent whole.
    stream
        .send_with_fds(&[&frame[..]], descriptors)
        .map(drop)
        .map_err(|error| BackendError::Stream(error.into()))
}

/// Receives the next message and the file that came with it. Returns none at the end of the stream.
pub fn receive<'a>(
    mut stream: &UnixStream,
    body: &'a mut Vec<u8>,
) -> Result<Option<(Message<'a>, Option<File>)>, BackendError> {
    let mut bytes = [0; HEADER_BYTES];
    let (mut done, file) = loop {
        match stream.recv_with_fd(&mut bytes) {
            Ok((0, _)) => return Ok(None),
            Ok(received) => break received,
            Err(error) => match std::io::Error::from(error) {
                error if error.kind() == std::io::ErrorKind::Interrupted => {}
                error if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(None),
                error => return Err(BackendError::Stream(error)),
            },
        }
    };
    while done < bytes.len() {
        match stream.read(&mut bytes[done..]) {
            Ok(0) => return Err(BackendError::Ended),
            Ok(count) => done += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(BackendError::Stream(error)),
        }
    }
    let header = Header::decode(&bytes)?;
    body.resize(header.body_len, 0);
    stream.read_exact(body).map_err(BackendError::Stream)?;
    Ok(Some((Message::decode(header.kind, body)?, file)))
}
