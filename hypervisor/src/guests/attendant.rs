//! A guest's attendant: a process beside the guest's own, which may open no file and accept no connection.
//!
//! Standard input carries the console's output, and standard output the console's input.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ioctl_fionbio;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SendFlags, send};
use wormhole_link::tasks;
use wormhole_lock::Mutex;

use super::log::Log;
use super::{END, GuestsError, Place};
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

impl Attendant {
    /// Starts the attendant, and waits until people can attach. Returns the console's input as well.
    ///
    /// # Errors
    /// The attendant cannot be started, or has reported a failure.
    pub fn start(installation: &Installation, name: &Name) -> io::Result<(Self, ChildStdout)> {
        let mut process = Command::new(installation.command())
            .args(["attend-guest", &name.to_string()])
            .arg(std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // No signal of a terminal reaches it.
            .process_group(0)
            .spawn()
            .map_err(tasks::named)?;
        let (output, input) = (process.stdin.take(), process.stdout.take());
        let attendant = Self { process, output };
        let mut input = input.ok_or(io::ErrorKind::BrokenPipe)?;
        input.read_exact(&mut [0])?;
        Ok((attendant, input))
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

/// Lets one person after the other attach.
fn accept(listener: &UnixListener, name: &Name, person: &Person) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { continue };
        let mut attached = person.lock();
        if let Some(other) = attached.as_ref().filter(|other| !has_left(other)) {
            let process = socket_peercred(other).map_or(0, |peer| peer.pid.as_raw_nonzero().get());
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
