//! Asks the keeper of a guest VM's shared files (`images/init/src/shared_files.rs`) in which parts of the memory for files a
//! file lies. The keeper holds the file open until it is let go, or until the backend has given up this process's session: a
//! worker may outlive its process, and the file's memory must not become another file's before that.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
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

/// Time within which the keeper takes a message and answers it. Others may have all of its places.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// A file that the keeper holds.
#[derive(Debug)]
pub struct Held {
    /// The keeper's number of it.
    pub number: FileNumber,
    /// Parts of the memory for files in which the range lies.
    pub parts: Vec<FilePart>,
}

/// Number of a file that the keeper holds.
#[derive(Clone, Copy, Debug)]
pub struct FileNumber {
    /// Number of the connection on which it was given.
    connection: u64,
    file: u64,
}

/// The keeper.
#[derive(Debug)]
pub struct Keeper {
    place: SessionPlace,
    connection: Mutex<Connection>,
}

/// Connection to the keeper, once a file was registered.
#[derive(Debug, Default)]
struct Connection {
    stream: Option<UnixStream>,
    /// Number of connections before this one.
    number: u64,
}

impl Keeper {
    pub fn new(place: SessionPlace) -> Self {
        Self {
            place,
            connection: Mutex::default(),
        }
    }

    /// Has a file held. Returns the parts in which this range of it lies.
    pub fn hold(&self, file: RawFd, offset: u64, bytes: u64) -> io::Result<Held> {
        let mut connection = self.connection.lock();
        let stream = match &connection.stream {
            Some(stream) => stream,
            None => connection.stream.insert(self.connect()?),
        };
        let answer = ask(stream, file, offset, bytes).inspect_err(|_| {
            // An answer may come later, or the keeper is another one by now. Files that it holds stay held.
            // A child closes no file of the program's that gets the number.
            close_in_children(-1);
            connection.stream = None;
            connection.number += 1;
        })?;
        let (number, parts) = answer.map_err(io::Error::from_raw_os_error)?;
        let number = FileNumber {
            connection: connection.number,
            file: number,
        };
        Ok(Held { number, parts })
    }

    /// Lets a file go that no device reaches any more.
    pub fn let_go(&self, number: FileNumber) {
        let connection = self.connection.lock();
        if let Some(stream) = &connection.stream
            && number.connection == connection.number
        {
            // Without a keeper nothing holds the file.
            let _ = send(
                stream,
                Request::LetGo {
                    number: number.file,
                },
                &[],
            );
        }
    }

    fn connect(&self) -> io::Result<UnixStream> {
        let flags = SocketFlags::CLOEXEC;
        let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let stream = UnixStream::from(stream);
        stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
        // Connecting waits no longer either, where others fill the keeper's queue.
        stream.set_write_timeout(Some(ANSWERS_WITHIN))?;
        connect(&stream, &SocketAddrUnix::new(SOCKET)?)?;
        // A container can have another file there.
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

/// Returns the number of a file and the parts in which a range of it lies, or the error for which the keeper does not hold it.
fn ask(
    stream: &UnixStream,
    file: RawFd,
    start: u64,
    bytes: u64,
) -> io::Result<Result<(u64, Vec<FilePart>), i32>> {
    send(stream, Request::Hold { start, bytes }, &[file])?;
    let answer = Answer::decode(receive(stream)?);
    if answer.status != 0 {
        return Ok(Err(i32::try_from(answer.status).unwrap_or(libc::EIO)));
    }
    if answer.parts > MOST_PARTS as u64 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let part = |_| {
        let Part { offset, bytes } = Part::decode(receive(stream)?);
        Ok(FilePart { offset, bytes })
    };
    let parts = (0..answer.parts).map(part).collect::<io::Result<_>>()?;
    Ok(Ok((answer.number, parts)))
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
