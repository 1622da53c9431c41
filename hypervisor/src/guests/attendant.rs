//! A guest's attendant: a process beside the guest's own, which may open no file and accept no connection.
//!
//! Standard input carries the console's output, and standard output, a socket, the console's input. By the socket comes
//! first the end of another one, which carries the connections of commands that save the guest.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ioctl_fionbio;
use rustix::net::{SendFlags, send};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_link::tasks;
use wormhole_link::users::peer_of;
use wormhole_lock::Mutex;

use super::log::Log;
use super::{END, GuestsError, Place, snapshot};
use crate::attach::names::Names;
use crate::installation::Installation;
use crate::places::{Name, Process};

#[derive(Debug, Args)]
pub struct Options {
    name: Name,
    /// Number of the guest's process.
    process: u32,
}

/// The byte that an attached person gets first. Anything else is the reason for a refusal.
pub const ATTACHED: u8 = 0;

/// Guest's handle on its attendant.
#[derive(Debug)]
pub struct Attendant {
    process: Child,
    /// Open until the guest has written down how it ended.
    output: Option<ChildStdin>,
}

/// An attendant that has started.
#[derive(Debug)]
pub struct Attended {
    pub attendant: Attendant,
    /// The console's input.
    pub input: UnixStream,
    /// Connections of commands that save the guest, each beside one byte.
    pub connections: UnixStream,
}

impl Attendant {
    /// Starts the attendant, and waits until people can attach.
    ///
    /// # Errors
    /// The attendant cannot be started, or has reported a failure.
    pub fn start(installation: &Installation, name: &Name) -> io::Result<Attended> {
        let (mut input, theirs) = UnixStream::pair()?;
        let (connections, forwarded) = UnixStream::pair()?;
        let mut process = Command::new(installation.command())
            .args(["attend-guest", &name.to_string()])
            .arg(std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(OwnedFd::from(theirs))
            // No signal of a terminal reaches it.
            .process_group(0)
            .spawn()
            .map_err(tasks::named)?;
        let output = process.stdin.take();
        let attendant = Self { process, output };
        input.send_with_fd(&[0u8][..], forwarded.as_raw_fd())?;
        input.read_exact(&mut [0])?;
        Ok(Attended {
            attendant,
            input,
            connections,
        })
    }

    /// Returns a sink for the console's output. While the sink is full, the guest does not wait, and its output is lost.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn sink(&self) -> io::Result<fs::File> {
        let output = self.output.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        let sink = output.as_fd().try_clone_to_owned()?;
        ioctl_fionbio(&sink, true)?;
        Ok(sink.into())
    }
}

impl Drop for Attendant {
    /// Waits until the folder is removed.
    fn drop(&mut self) {
        self.output = None;
        let _ = self.process.wait();
    }
}

/// The person who is attached.
type Person = Arc<Mutex<Option<Arc<UnixStream>>>>;

/// Runs as the process, until the guest's process has closed its end.
pub fn run(options: &Options) -> Result<(), GuestsError> {
    let guest = Process::of(options.process);
    let place = Place::own(options.name.clone())?;
    let failed = |source| GuestsError::Attendant {
        name: place.name.clone(),
        source,
    };
    let mut names = Names::default();
    let listener = names.bind(&place.socket())?;
    let mut log = Log::new(&place).map_err(failed)?;
    let person = Person::default();
    let accepting = (place.name.clone(), Arc::clone(&person));
    tasks::spawn("accept", move || {
        accept(&listener, &accepting.0, &accepting.1)
    })
    .map_err(failed)?;
    let snapshots = names.bind(&place.file(snapshot::SOCKET))?;
    let guests = guests_end().map_err(failed)?;
    tasks::spawn("snapshots", move || forward(&snapshots, &guests)).map_err(failed)?;
    let mut stdout = io::stdout();
    stdout
        .write_all(b"!")
        .and_then(|()| stdout.flush())
        .map_err(failed)?;

    let mut bytes = [0; 4096];
    let mut stdin = io::stdin().lock();
    while let Ok(count @ 1..) = stdin.read(&mut bytes) {
        log.add(&bytes[..count]);
        if let Some(person) = &*person.lock() {
            // The guest does not wait for a person: output without room is lost to that person.
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let _ = send(person, &bytes[..count], flags);
        }
    }
    drop(names);
    if fs::metadata(place.file(END)).is_ok_and(|end| end.len() > 0) {
        return Ok(());
    }
    // The command that holds the folder removes it otherwise.
    if let Ok(held) = place.hold()
        && guest.is_none_or(|guest| held.is_of(guest))
    {
        held.remove();
    }
    Ok(())
}

/// Time within which a command that connects must send its files.
const SENDS_WITHIN: Duration = Duration::from_secs(5);

/// Receives the socket to the guest's process that carries connections.
fn guests_end() -> io::Result<UnixStream> {
    let stdout = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    match stdout.recv_with_fd(&mut [0])? {
        (_, Some(socket)) => Ok(OwnedFd::from(socket).into()),
        (_, None) => Err(io::ErrorKind::BrokenPipe.into()),
    }
}

/// Passes the connections of commands to the guest's process, until that has ended.
fn forward(listener: &UnixListener, guest: &UnixStream) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        // The guest's process may not set it.
        if stream.set_read_timeout(Some(SENDS_WITHIN)).is_err() {
            continue;
        }
        let sent = guest.send_with_fd(&[0u8][..], stream.as_raw_fd());
        // After any other error the command gets no answer, and the next one can.
        if sent.is_err_and(|error| error.errno() == libc::EPIPE) {
            return;
        }
    }
}

/// Lets one person after the other attach.
fn accept(listener: &UnixListener, name: &Name, person: &Person) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let mut attached = person.lock();
        if let Some(other) = attached.as_ref().filter(|other| !has_left(other)) {
            let process = peer_of(other).map_or(0, |peer| peer.process);
            let text = format!(
                "process {process} is attached to the console of guest {name}: detach it with Ctrl-], or end it"
            );
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let _ = send(&stream, text.as_bytes(), flags);
            continue;
        }
        if stream.write_all(&[ATTACHED]).is_err() {
            continue;
        }
        let stream = Arc::new(stream);
        *attached = Some(Arc::clone(&stream));
        drop(attached);
        let leave = {
            let (person, stream) = (Arc::clone(person), Arc::clone(&stream));
            move || {
                // A person who keeps the other direction open is detached as well.
                let _ = stream.shutdown(std::net::Shutdown::Both);
                // Another one may have come meanwhile.
                let mut attached = person.lock();
                if attached.as_ref().is_some_and(|it| Arc::ptr_eq(it, &stream)) {
                    *attached = None;
                }
            }
        };
        let started = tasks::spawn("person", {
            let leave = leave.clone();
            move || {
                let _ = io::copy(&mut &*stream, &mut Typed);
                leave();
            }
        });
        if started.is_err() {
            leave();
        }
    }
}

/// Returns whether a person has closed the connection. The thread that reads from it may not have noticed yet.
fn has_left(person: &UnixStream) -> bool {
    let mut events = [PollFd::new(person, PollFlags::RDHUP)];
    poll(&mut events, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

/// Writes to the console's input at once.
struct Typed;

impl Write for Typed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut stdout = io::stdout();
        stdout.write_all(bytes)?;
        stdout.flush()?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
