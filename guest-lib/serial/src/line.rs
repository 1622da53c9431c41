//! Serves a port: waits for its bytes and those of the streams' sockets, and passes them on.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, read, write};

use crate::agent;
use crate::closer;
use crate::mux::{Mux, OtherVersion};

/// Most bytes that are read from the port at once.
const CHUNK: usize = 32 << 10;
/// Time for which processes wait in the listener's queue after one for which there was no descriptor or memory.
const PAUSE: Duration = Duration::from_millis(10);

/// Reason why a port cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    #[error("the port cannot be used: {0}")]
    Port(io::Error),
    #[error(transparent)]
    Version(#[from] OtherVersion),
}

impl From<Errno> for LineError {
    fn from(error: Errno) -> Self {
        Self::Port(error.into())
    }
}

/// Bytes for the port that it has not taken.
#[derive(Debug, Default)]
struct Pending {
    bytes: Vec<u8>,
    taken: usize,
}

impl Pending {
    fn is_empty(&self) -> bool {
        self.taken == self.bytes.len()
    }

    /// Writes frames as far as the port takes them, once.
    fn write(&mut self, port: BorrowedFd<'_>, mux: &mut Mux) -> Result<(), Errno> {
        if self.is_empty() {
            self.taken = 0;
            self.bytes.clear();
            mux.produce(&mut self.bytes);
        }
        while !self.is_empty() {
            match write(port, &self.bytes[self.taken..]) {
                Ok(count) => self.taken += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Serves a port, which must not block, until its other side is gone. Adds a stream for each process that connects to the
/// listener.
///
/// # Errors
/// The port cannot be used, or its other side speaks another version of the protocol.
pub fn serve(
    port: BorrowedFd<'_>,
    mux: &mut Mux,
    listener: Option<&UnixListener>,
) -> Result<(), LineError> {
    let mut pending = Pending::default();
    let mut chunk = vec![0; CHUNK];
    let mut accepts_from = Instant::now();
    loop {
        match pending.write(port, mux) {
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
            written => written?,
        }
        let events = wait(port, mux, listener, !pending.is_empty(), accepts_from)?;
        // Before the port's bytes, which can give the number to another stream.
        for (number, events) in events.streams {
            mux.ready(number, events);
        }
        if events
            .port
            .intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR)
        {
            match read(port, &mut chunk[..]) {
                Ok(0) | Err(Errno::CONNRESET) => return Ok(()),
                Ok(count) => mux.receive(&chunk[..count])?,
                Err(Errno::INTR) => {}
                // Without a host, the driver of a port says so by the event alone.
                Err(Errno::AGAIN) if events.port.contains(PollFlags::HUP) => return Ok(()),
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(listener) = listener.filter(|_| events.has_process) {
            match agent::accept(listener) {
                Ok((stream, user)) => mux.add(stream, user),
                Err(error) if lacks_room(&error) => accepts_from = Instant::now() + PAUSE,
                // A process that is gone by now gets no stream.
                Err(_) => {}
            }
        }
    }
}

/// Returns whether a process was not accepted for want of descriptors or memory.
fn lacks_room(error: &io::Error) -> bool {
    let error = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(
        error,
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)
    )
}

struct Events {
    port: PollFlags,
    has_process: bool,
    streams: Vec<(u32, PollFlags)>,
}

fn wait(
    port: BorrowedFd<'_>,
    mux: &Mux,
    listener: Option<&UnixListener>,
    is_full: bool,
    accepts_from: Instant,
) -> Result<Events, Errno> {
    let mut of_port = PollFlags::IN;
    of_port.set(PollFlags::OUT, is_full || mux.has_frames());
    // Until the host has answered, processes wait in the listener's queue.
    let pause = accepts_from.saturating_duration_since(Instant::now());
    let pause = match closer::is_busy() {
        true => agent::LOOK,
        false => pause,
    };
    let listener = listener.filter(|_| mux.is_synchronised() && pause.is_zero());
    let limit = (!pause.is_zero()).then(|| Timespec::try_from(pause).unwrap_or_default());
    let mut polled = vec![PollFd::from_borrowed_fd(port, of_port)];
    polled.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
    let first = polled.len();
    let mut numbers = Vec::new();
    for (number, socket, flags) in mux.interests() {
        numbers.push(number);
        polled.push(PollFd::from_borrowed_fd(socket, flags));
    }
    match poll(&mut polled, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error),
    }
    let streams = numbers.into_iter().zip(&polled[first..]);
    Ok(Events {
        port: polled[0].revents(),
        has_process: first > 1 && !polled[1].revents().is_empty(),
        streams: streams
            .map(|(number, polled)| (number, polled.revents()))
            .filter(|(_, events)| !events.is_empty())
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, IoSliceMut, Read, Write};
    use std::mem::MaybeUninit;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::path::{Path, PathBuf};
    use std::sync::mpsc::{Receiver, channel};
    use std::thread::{JoinHandle, spawn};
    use std::time::{Duration, Instant};

    use rustix::net::sockopt::set_socket_linger;
    use rustix::net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    };

    use tempfile::TempDir;

    use super::*;
    use crate::agent::listen;
    use crate::closer::ProcessSocket;
    use crate::stream::Opening;

    /// Connects as a process does, and returns its stream.
    fn connect(path: &Path) -> UnixStream {
        let connection = UnixStream::connect(path).expect("an agent listens");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut parts = [IoSliceMut::new(&mut byte)];
        recvmsg(&connection, &mut parts, &mut control, RecvFlags::empty()).expect("a message");
        let descriptors = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        descriptors.last().expect("a stream").into()
    }

    /// A port with its two sides, each on a thread.
    struct Served {
        /// Socket of the agent.
        path: PathBuf,
        /// Ends of the streams that the host has opened, in order.
        streams: Receiver<UnixStream>,
        /// Another descriptor of the host's end of the port.
        end: UnixStream,
        host: JoinHandle<Result<(), LineError>>,
        agent: JoinHandle<Result<(), LineError>>,
        _folder: TempDir,
    }

    fn served() -> Served {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control");
        let listener = listen(&path).expect("it listens");
        let (guest, outside) = UnixStream::pair().expect("a port");
        for port in [&guest, &outside] {
            port.set_nonblocking(true).expect("a socket");
        }
        let end = outside.try_clone().expect("a descriptor");
        let (opened, streams) = channel();
        let host = spawn(move || {
            let mut mux = Mux::host(move || {
                let (bell, _) = UnixStream::pair().ok()?;
                let (ours, theirs) = UnixStream::pair().ok()?;
                let (sender, stream) = channel();
                sender.send(theirs).ok()?;
                opened.send(ours).ok()?;
                Some(Opening { bell, stream })
            });
            serve(outside.as_fd(), &mut mux, None)
        });
        let agent = spawn(move || serve(guest.as_fd(), &mut Mux::agent(1), Some(&listener)));
        Served {
            path,
            streams,
            end,
            host,
            agent,
            _folder: folder,
        }
    }

    #[test]
    fn processes_get_streams_of_the_backend_until_either_side_of_the_port_ends() {
        let Served {
            path,
            streams,
            end,
            host,
            agent,
            _folder,
        } = served();
        let mut killed = connect(&path);
        let mut process = connect(&path);
        killed.write_all(b"last").expect("room");
        drop(killed);
        let [mut first, mut second] =
            [streams.recv(), streams.recv()].map(|it| it.expect("opened"));
        let mut said = String::new();
        first.read_to_string(&mut said).expect("its end");
        assert_eq!(said, "last");
        // Many times a window.
        let all = vec![7; 1 << 20];
        let sent = all.clone();
        let writer = spawn(move || {
            process.write_all(&sent).expect("it is read");
            process
        });
        let mut read = vec![0; all.len()];
        second.read_exact(&mut read).expect("all of it");
        assert!(read == all);
        let mut process = writer.join().expect("a thread");
        second.write_all(b"answer").expect("room");
        let mut answer = [0; 6];
        process.read_exact(&mut answer).expect("the answer");
        assert_eq!(&answer, b"answer");

        end.shutdown(std::net::Shutdown::Both).expect("it is open");
        assert!(host.join().expect("a thread").is_ok());
        assert!(agent.join().expect("a thread").is_ok());
        for socket in [&mut process, &mut second] {
            assert_eq!(socket.read(&mut [0]).expect("an end"), 0);
        }
    }

    /// Time for which the close of a socket waits that a process sends.
    const LINGER: Duration = Duration::from_secs(60);

    /// Returns a socket with bytes that nobody reads, which waits for them in its close.
    fn slow(listener: &TcpListener) -> TcpStream {
        let address = listener.local_addr().expect("an address");
        let mut socket = TcpStream::connect(address).expect("it listens");
        set_socket_linger(&socket, Some(LINGER)).expect("an option");
        socket.set_nonblocking(true).expect("a socket");
        while socket.write(&[0; 1 << 16]).is_ok() {}
        socket
    }

    fn send(over: &UnixStream, descriptors: &[BorrowedFd<'_>], flags: SendFlags) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(descriptors));
        let bytes = [IoSlice::new(&[0])];
        sendmsg(over, &bytes, &mut control, flags).expect("room");
    }

    /// Sends such a socket and closes it here, most often before its receiver does: the last close waits.
    fn attack(over: &UnixStream, reader: &TcpListener, flags: SendFlags) {
        let (over, socket) = (over.try_clone().expect("a descriptor"), slow(reader));
        spawn(move || {
            send(&over, &[socket.as_fd()], flags);
            drop(socket);
        });
    }

    #[test]
    fn a_descriptor_that_closes_slowly_holds_its_own_process_up_alone() {
        let Served {
            path,
            streams,
            _folder,
            ..
        } = served();
        let began = Instant::now();

        let reader = TcpListener::bind("127.0.0.1:0").expect("an address");
        // Over the connection, which the agent closes, and over the stream, which it reads.
        let kinds = [SendFlags::empty(), SendFlags::OOB];
        for flags in kinds.into_iter().cycle().take(8) {
            let connection = UnixStream::connect(&path).expect("an agent listens");
            attack(&connection, &reader, flags);
            streams.recv().expect("a stream without a process");
            let stream = connect(&path);
            let mut ended = streams.recv().expect("its stream");
            attack(&stream, &reader, flags);
            let mut said = Vec::new();
            ended.read_to_end(&mut said).expect("its end");
            assert!(said.is_empty(), "what came with a descriptor is dropped");
        }

        let mut other = connect(&path);
        let mut third = streams.recv().expect("a third");
        other.write_all(b"question").expect("room");
        let mut read = [0; 8];
        third.read_exact(&mut read).expect("the question");
        assert_eq!(&read, b"question");
        assert!(began.elapsed() < LINGER / 2, "it waited for a close");
    }

    #[test]
    fn descriptors_of_a_process_are_not_taken() {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let process = ProcessSocket::new(ours);
        let reader = TcpListener::bind("127.0.0.1:0").expect("an address");
        let (first, second) = (
            slow(&reader),
            tempfile::NamedTempFile::new().expect("a file"),
        );
        let descriptors = [first.as_fd(), second.as_file().as_fd()];
        (&theirs).write_all(b"before").expect("room");
        send(&theirs, &descriptors, SendFlags::empty());
        drop(first);
        let path = second.into_temp_path();
        let received = process.receive(&mut [0; 16]);
        assert_eq!(received.unwrap_err().kind(), io::ErrorKind::InvalidData);
        let own = std::fs::read_dir("/proc/self/fd").expect("it is there");
        let mut own = own.filter_map(|own| std::fs::read_link(own.ok()?.path()).ok());
        assert!(!own.any(|own| own == *path));
    }
}
