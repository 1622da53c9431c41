//! Asks the keeper of a guest VM's shared files (`images/init/src/shared_files.rs`) in which parts of the memory for files a
//! file lies. The keeper holds the file open until it is let go, or until the backend has given up this process's session: a
//! worker may outlive its process, and the file's memory must not become another file's before that.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_api::FilePart;
use wormhole_lock::Mutex;
use wormhole_ring::shared_files::{Answer, MOST_PARTS, Part, Request, SOCKET};

use super::close_in_children;

/// Memory of a session's first segment, by which the keeper sees whether the session has ended.
#[derive(Debug)]
pub struct SessionPlace {
    /// Device of the window.
    pub window: File,
    pub offset: u64,
    pub generation: u32,
}

/// A file that the keeper holds.
#[derive(Debug)]
pub struct Held {
    /// The keeper's number of it.
    pub number: u64,
    /// Parts of the memory for files in which the range lies.
    pub parts: Vec<FilePart>,
}

/// The keeper.
#[derive(Debug)]
pub struct Keeper {
    place: SessionPlace,
    /// Connection, once a file was registered.
    stream: Mutex<Option<UnixStream>>,
}

impl Keeper {
    pub fn new(place: SessionPlace) -> Self {
        Self {
            place,
            stream: Mutex::new(None),
        }
    }

    /// Has a file held. Returns the parts in which this range of it lies.
    pub fn hold(&self, file: RawFd, offset: u64, bytes: u64) -> io::Result<Held> {
        let mut stream = self.stream.lock();
        let stream = match &*stream {
            Some(stream) => stream,
            None => stream.insert(self.connect()?),
        };
        let hold = Request::Hold {
            start: offset,
            bytes,
        };
        send(stream, hold, &[file])?;
        let answer = Answer::decode(receive(stream)?);
        if answer.status != 0 {
            let status = i32::try_from(answer.status).unwrap_or(libc::EIO);
            return Err(io::Error::from_raw_os_error(status));
        }
        if answer.parts > MOST_PARTS as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let part = |_| {
            let Part { offset, bytes } = Part::decode(receive(stream)?);
            Ok(FilePart { offset, bytes })
        };
        let parts = (0..answer.parts)
            .map(part)
            .collect::<io::Result<Vec<_>>>()?;
        let number = answer.number;
        Ok(Held { number, parts })
    }

    /// Lets a file go that no device reaches any more.
    pub fn let_go(&self, number: u64) {
        if let Some(stream) = self.stream.lock().as_ref() {
            // Without a keeper nothing holds the file.
            let _ = send(stream, Request::LetGo { number }, &[]);
        }
    }

    fn connect(&self) -> io::Result<UnixStream> {
        let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(SOCKET)?)?;
        // Any process can take the name where there is no keeper.
        if !rustix::net::sockopt::socket_peercred(&stream)?
            .uid
            .is_root()
        {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let session = Request::Session {
            offset: self.place.offset,
            generation: self.place.generation,
        };
        send(&stream, session, &[self.place.window.as_raw_fd()])?;
        close_in_children(stream.as_raw_fd());
        Ok(stream)
    }
}

fn send(stream: &UnixStream, request: Request, descriptors: &[RawFd]) -> io::Result<()> {
    let message = request.encode();
    // No signal comes if the other end is closed.
    let sent = stream.send_with_fds(&[&message[..]], descriptors);
    // A message is far smaller than a socket's buffer.
    match sent.map_err(|error| io::Error::from_raw_os_error(error.errno()))? {
        all if all == message.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

fn receive<const BYTES: usize>(mut stream: &UnixStream) -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
