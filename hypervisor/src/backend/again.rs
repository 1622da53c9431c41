//! Attaches the window of a guest again after its backend has ended and another one has taken its place.
//!
//! The guest's process may not connect once the guest runs, so a process beside it does, when asked. It reads no byte of a
//! guest, and connects only to the backend that the guest was started with, one connection at a time: the one before must
//! have ended. It waits for the backend's answer as well, and passes the stream of a tenant that is attached.
//!
//! A process of the guest that outlives its session can still write to the session's memory. So the window is attached
//! again when all of the guest's control streams of the earlier backend are closed by their processes, and its memory is
//! cleared before.
//!
//! Workers of a backend that was killed end after it. They write to the files of their own sessions, which the next backend does
//! not get, and to the memory of the guest's shared files. In that memory the keeper lets files of ended processes go when the
//! window is cleared, and their places become those of other files. So the window is cleared some time after a backend that has
//! left sessions. The workers of a backend VM end with it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use wormhole_link::{chain, tasks};
use wormhole_monitor::devices::vsock::Holders;
use wormhole_ring::control::{Attach, Message, Refusal, WindowRun};

use super::{BackendError, handshake, receive, send};
use crate::backends::{Chosen, Placement};
use crate::installation::Installation;

/// Time between two attempts to attach.
pub const AGAIN: Duration = Duration::from_millis(500);

/// Longest time from the end of a tenant to the first attempt to attach it again.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Time from the end of a tenant to the first attempt to attach it again. It doubles with each tenant that a backend has
/// ended soon: a hostile guest may cause that, to try something again.
#[derive(Clone, Copy, Debug)]
pub struct Pause(Duration);

impl Pause {
    pub const FIRST: Self = Self(AGAIN);

    /// Returns the pause after a tenant that has lived so long.
    pub fn after(self, life: Duration) -> Self {
        if life >= LONGEST_PAUSE {
            return Self::FIRST;
        }
        Self((self.0 * 2).min(LONGEST_PAUSE))
    }

    pub fn time(self) -> Duration {
        self.0
    }
}

/// Time within which the workers of a backend that was killed have ended. A driver destroys a context within seconds. A backend
/// that keeps them longer harms its own tenant alone, which does not wait for it.
const WORKERS_END_WITHIN: Duration = Duration::from_secs(5);

/// Segments of sessions that a backend has had the guest map. It has them unmapped when a session's worker has ended.
#[derive(Debug, Default)]
pub struct Shown(u64);

impl Shown {
    pub fn map(&mut self, run: WindowRun) {
        self.0 = self.0.saturating_add(run.count.into());
    }

    pub fn unmap(&mut self, run: WindowRun) {
        self.0 = self.0.saturating_sub(run.count.into());
    }

    /// Returns the time after the backend's end for which its workers may live.
    pub fn workers_live(&self) -> Duration {
        match self.0 {
            0 => Duration::ZERO,
            _ => WORKERS_END_WITHIN,
        }
    }
}

/// Arguments of the process that connects.
#[derive(Debug, Args)]
pub struct Options {
    /// The backend.
    backend: Chosen,
}

/// A guest's way to its next backend.
#[derive(Debug)]
pub struct Again {
    /// The process that connects, which ends with this stream.
    helper: UnixStream,
    process: Child,
    attach: Attach,
    /// Streams of the guest's processes.
    pub holders: Holders,
}

impl Again {
    /// Starts the process that connects. `now` is the stream of the tenant.
    ///
    /// # Errors
    /// No process can be started.
    pub fn start(
        installation: &Installation,
        backend: &Chosen,
        attach: Attach,
        now: &UnixStream,
    ) -> Result<Self, BackendError> {
        let started = || {
            let (helper, theirs) = UnixStream::pair()?;
            let process = Command::new(installation.command())
                .args(["connect-again", &backend.to_string()])
                .stdin(OwnedFd::from(theirs))
                .stdout(OwnedFd::from(now.try_clone()?))
                // No signal of a terminal reaches it.
                .process_group(0)
                .spawn()
                .map_err(tasks::named)?;
            Ok((helper, process))
        };
        let (helper, process) = started().map_err(BackendError::Start)?;
        Ok(Self {
            helper,
            process,
            attach,
            holders: Holders::default(),
        })
    }

    /// Returns the stream of the process that connects. Shutting it down ends the process.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn helper(&self) -> io::Result<UnixStream> {
        self.helper.try_clone()
    }

    /// Returns whether the guest's processes have closed all streams.
    pub fn is_due(&self) -> bool {
        self.holders.count() == 0
    }

    /// Attaches the guest's cleared window to the backend. Returns the tenant's stream.
    ///
    /// # Errors
    /// No backend is there, or it refuses. [`BackendError::Ended`] if the process that connects has ended.
    pub fn attach(&self, file: &File) -> Result<UnixStream, BackendError> {
        let attach = Message::Attach(self.attach);
        send(&self.helper, &attach, &[file.as_raw_fd()])?;
        let mut body = Vec::new();
        match receive(&self.helper, &mut body)? {
            Some((Message::Attached, Some(stream))) => Ok(OwnedFd::from(stream).into()),
            Some((Message::Refused { reason, .. }, _)) => {
                Err(BackendError::Refused(reason.to_owned()))
            }
            Some((other, _)) => Err(BackendError::Unexpected(other.name())),
            None => Err(BackendError::Ended),
        }
    }
}

impl Drop for Again {
    fn drop(&mut self) {
        drop(self.helper.shutdown(std::net::Shutdown::Both));
        drop(self.process.wait());
    }
}

/// Runs as the process that connects, until the guest's process has ended.
///
/// # Errors
/// Standard input or output is no stream, or the guest's process sends another message.
pub fn run(options: &Options) -> Result<(), BackendError> {
    let stream = |stream: io::Result<OwnedFd>| stream.map(UnixStream::from);
    let guest = stream(io::stdin().as_fd().try_clone_to_owned()).map_err(BackendError::Stream)?;
    let now = stream(io::stdout().as_fd().try_clone_to_owned());
    let mut now = now.map_err(BackendError::Stream)?;
    // Only `now` refers to the stream.
    let null = File::options().write(true).open("/dev/null");
    null.and_then(|null| Ok(rustix::stdio::dup2_stdout(null)?))
        .map_err(BackendError::Stream)?;
    // A backend may take minutes to answer, and the guest's process waits for this one's end.
    let watched = guest.try_clone().map_err(BackendError::Stream)?;
    tasks::spawn("watch", move || {
        wait_for_end(&watched);
        std::process::exit(0);
    })
    .map_err(BackendError::Thread)?;
    let mut body = Vec::new();
    while let Some((message, window)) = receive(&guest, &mut body)? {
        let (Message::Attach(attach), Some(window)) = (&message, window) else {
            return Err(BackendError::Unexpected(message.name()));
        };
        match connect(&options.backend, *attach, &window, &now) {
            Ok(stream) => {
                send(&guest, &Message::Attached, &[stream.as_raw_fd()])?;
                now = stream;
            }
            Err(reason) => {
                let refused = Message::Refused {
                    code: Refusal::Protocol as u32,
                    reason: &reason,
                };
                send(&guest, &refused, &[])?;
            }
        }
    }
    Ok(())
}

/// Attaches a window, if the stream before has ended.
fn connect(
    backend: &Chosen,
    attach: Attach,
    window: &File,
    before: &UnixStream,
) -> Result<UnixStream, String> {
    if !has_ended(before) {
        return Err("the backend serves the guest already".to_owned());
    }
    let connected = backend.connect().map_err(|error| chain(&error))?;
    let is_static = connected.placement == Placement::Vm;
    // Its starter has not attached yet, for which it needs a slot.
    if is_static && connected.boot_id.is_none() {
        return Err("the backend VM has not started yet".to_owned());
    }
    if is_static != (attach.static_window != 0) {
        return Err("the backend has another placement than the one before".to_owned());
    }
    handshake(&connected.stream, attach, window).map_err(|error| chain(&error))?;
    Ok(connected.stream)
}

/// Returns whether both directions of a stream are closed.
fn has_ended(stream: &UnixStream) -> bool {
    ends_within(stream, Some(&Timespec::default())).unwrap_or(false)
}

/// Waits until both directions of a stream are closed. An error of the kernel is an end as well.
fn wait_for_end(stream: &UnixStream) {
    while !ends_within(stream, None).unwrap_or(true) {}
}

/// Returns whether both directions of a stream are closed within a time, or without a limit. A signal ends the waiting.
fn ends_within(stream: &UnixStream, limit: Option<&Timespec>) -> Result<bool, Errno> {
    let mut events = [PollFd::new(stream, PollFlags::empty())];
    match poll(&mut events, limit) {
        Ok(_) => Ok(events[0].revents().contains(PollFlags::HUP)),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use super::*;

    #[test]
    fn a_connection_has_ended_when_both_directions_are_closed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(!has_ended(&ours));
        theirs.shutdown(Shutdown::Write).unwrap();
        assert!(!has_ended(&ours));
        drop(theirs);
        assert!(has_ended(&ours));
    }

    #[test]
    fn the_end_of_a_stream_is_waited_for() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let waiting = std::thread::spawn(move || wait_for_end(&ours));
        drop(theirs);
        waiting.join().unwrap();
    }

    #[test]
    fn a_pause_doubles_with_each_tenant_that_ends_soon_up_to_a_minute() {
        let soon = Duration::from_secs(1);
        let pauses = std::iter::successors(Some(Pause::FIRST), |pause| Some(pause.after(soon)));
        let seconds: Vec<f32> = pauses
            .take(9)
            .map(|pause| pause.time().as_secs_f32())
            .collect();
        assert_eq!(seconds, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]);
        let long = Pause(LONGEST_PAUSE).after(LONGEST_PAUSE);
        assert_eq!(long.time(), AGAIN);
    }

    #[test]
    fn workers_are_waited_for_if_their_sessions_were_not_ended_before_the_backend() {
        let run = |session, count| WindowRun {
            session,
            first: 0,
            count,
        };
        let mut shown = Shown::default();
        assert_eq!(shown.workers_live(), Duration::ZERO);
        shown.map(run(0, 1));
        shown.map(run(1, 3));
        shown.unmap(run(0, 1));
        assert_eq!(shown.workers_live(), WORKERS_END_WITHIN);
        shown.unmap(run(1, 3));
        assert_eq!(shown.workers_live(), Duration::ZERO);
    }

    #[test]
    fn a_backend_that_serves_the_guest_gets_no_second_window_of_it() {
        let (now, _backend) = UnixStream::pair().unwrap();
        let window = tempfile::tempfile().unwrap();
        let backend = "none".parse().unwrap();
        let refused = connect(&backend, Attach::default(), &window, &now).unwrap_err();
        assert!(refused.contains("already"), "{refused}");
    }
}
