//! Option `--transport`, and the server of its streams.

use std::fs::File;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use clap::ValueEnum;
use rustix::fs::{SealFlags, fcntl_get_seals, fstatfs};
use vm_memory::{FileOffset, MmapRegion};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_link::tasks;
use wormhole_ring::layout::SEGMENT_BYTES;
use wormhole_ring::memory::SessionMemory;
use wormhole_ring::stream::Server;
use wormhole_ring::transport::{Transport, VARIABLE};

use super::environment::Variable;
use super::process::RETRY;

/// Ways of the program's records to the backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// By the ring, which the backend polls.
    #[default]
    Poll,
    /// By the ring, with a system call for each record and for each wait.
    Doorbell,
    /// By a socket, with a message and its answer for each call.
    Socket,
}

/// Name of the streams' socket in its folder.
pub(super) const SOCKET: &str = "stream";

/// Starts what the choice needs, with its files in `folder`. Returns the variable that tells the program, if it needs one: a
/// session with a variable for its worker gets no idle worker.
pub fn start(choice: Choice, folder: &Path) -> io::Result<Option<Variable>> {
    let path = folder.join(SOCKET);
    let transport = match choice {
        Choice::Poll => return Ok(None),
        Choice::Doorbell => Transport::Doorbell,
        Choice::Socket => {
            let listener = UnixListener::bind(&path)?;
            tasks::spawn("streams", move || accept(&listener))?;
            Transport::Socket(path.to_str().ok_or(io::ErrorKind::InvalidFilename)?)
        }
    };
    Ok(Some((VARIABLE.into(), transport.to_string().into())))
}

fn accept(listener: &UnixListener) {
    for stream in listener.incoming() {
        // A stream that gets no thread is closed, which its program reports.
        let served = stream.and_then(|stream| {
            tasks::spawn("stream", move || {
                if let Err(error) = serve(stream) {
                    crate::say::line(format_args!("a stream of --transport socket: {error}"));
                }
            })
        });
        if served.is_err() {
            std::thread::sleep(RETRY);
        }
    }
}

/// Serves the stream of one thread of the program, which first sends the session's file and the offset of its segment.
fn serve(stream: UnixStream) -> io::Result<()> {
    let mut offset = [0; 8];
    let received = stream.recv_with_fd(&mut offset);
    let (bytes, file) = received.map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
    let file = match file {
        Some(file) if bytes == offset.len() => file,
        _ => return Err(io::Error::other("it began without a session")),
    };
    let memory = map(&file, u64::from_ne_bytes(offset))?;
    // SAFETY: the mapping is dropped after the server. Other threads of the program have streams to this process too, with a
    // server each. No two of them use an answer slot at the same time, since the program takes a slot for each request.
    let server = unsafe {
        let session = SessionMemory::new(memory.as_ptr(), SEGMENT_BYTES);
        Server::new(session.map_err(io::Error::other)?, file)
    };
    server.serve(stream).map_err(io::Error::other)
}

/// Maps a session's segment of a file that cannot become shorter.
fn map(file: &File, offset: u64) -> io::Result<MmapRegion<()>> {
    let is_memory = fstatfs(file)?.f_type == libc::TMPFS_MAGIC;
    if !is_memory || !fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
        return Err(io::Error::other("its session is no memory of fixed size"));
    }
    let part = FileOffset::new(file.try_clone()?, offset);
    MmapRegion::from_file(part, SEGMENT_BYTES).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A session with a variable for its worker gets no idle worker.
    #[test]
    fn the_usual_transport_needs_no_variable() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(start(Choice::Poll, folder.path()).unwrap(), None);
        let (name, value) = start(Choice::Socket, folder.path()).unwrap().unwrap();
        assert_eq!(name, VARIABLE);
        let value = value.into_string().unwrap();
        let path = value.strip_prefix("socket:").unwrap();
        UnixStream::connect(path).unwrap();
    }

    #[test]
    fn a_session_that_could_become_shorter_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 << 20).unwrap();
        let error = map(&file, 0).unwrap_err().to_string();
        assert!(error.contains("no memory of fixed size"), "{error}");
    }
}
