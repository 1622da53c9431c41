//! A process by its number and the time of its start, which no later process has in common.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::wait::until_readable;

/// Identity of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    /// Start in clock ticks since the boot (`starttime`, proc(5)).
    start: u64,
}

/// End of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Ended before it was signalled.
    Gone,
    /// Ended by itself or by SIGTERM.
    Ended,
    /// Killed by SIGKILL after the time limit.
    Killed,
}

impl Process {
    /// Returns the identity of the living process with this number.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses, and may contain any character.
        let (_, fields) = stat.rsplit_once(") ")?;
        let mut fields = fields.split(' ');
        let state = fields.next()?;
        let start = fields.nth(18)?.parse().ok()?;
        (state != "Z").then_some(Self { pid, start })
    }

    pub fn lives(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Sends the process SIGTERM, and SIGKILL if it is still there after `patience`.
    ///
    /// # Errors
    /// This user may not signal the process.
    pub fn end(self, patience: Duration) -> io::Result<End> {
        self.end_after(Duration::ZERO, patience)
    }

    /// Lets the process end by itself within `respite`, and afterwards ends it as [`Self::end`] does.
    ///
    /// # Errors
    /// As for [`Self::end`].
    pub fn end_after(self, respite: Duration, patience: Duration) -> io::Result<End> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let process = match pidfd_open(pid.ok_or(Errno::SRCH)?, PidfdFlags::empty()) {
            Ok(process) => process,
            Err(Errno::SRCH) => return Ok(End::Gone),
            Err(error) => return Err(error.into()),
        };
        // The descriptor may be that of a later process with the same number.
        if !self.lives() {
            return Ok(End::Gone);
        }
        let turns = [
            (None, Some(respite)),
            (Some(Signal::TERM), Some(patience)),
            (Some(Signal::KILL), None),
        ];
        for (signal, limit) in turns {
            let sent = signal.map_or(Ok(()), |signal| pidfd_send_signal(&process, signal));
            match sent {
                Err(Errno::SRCH) => break,
                sent => sent?,
            }
            if ends_within(&process, limit)? {
                return Ok(match signal {
                    Some(Signal::KILL) => End::Killed,
                    _ => End::Ended,
                });
            }
        }
        Ok(End::Ended)
    }
}

/// Waits for the end of a process.
fn ends_within(process: &OwnedFd, limit: Option<Duration>) -> io::Result<bool> {
    let end = limit.and_then(|limit| Instant::now().checked_add(limit));
    until_readable(process, end)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_is_ended_and_a_later_one_of_its_number_is_not() {
        let start = || {
            let mut command = Command::new("sleep");
            command.arg("600").stdin(Stdio::null()).spawn().unwrap()
        };
        let mut child = start();
        let process = Process::of(child.id()).unwrap();
        assert!(process.lives());
        let other = Process {
            start: process.start + 1,
            ..process
        };
        assert!(!other.lives());
        let patience = Duration::from_secs(60);
        assert_eq!(other.end(patience).unwrap(), End::Gone);
        assert!(child.try_wait().unwrap().is_none());
        assert_eq!(process.end(patience).unwrap(), End::Ended);
        assert!(!process.lives());
        child.wait().unwrap();
        assert_eq!(process.end(patience).unwrap(), End::Gone);
    }

    #[test]
    fn a_process_that_ignores_the_request_is_killed() {
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' TERM; echo; exec sleep 600"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = [0];
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        let process = Process::of(child.id()).unwrap();
        assert_eq!(process.end(Duration::from_millis(10)).unwrap(), End::Killed);
        assert!(!child.wait().unwrap().success());
    }
}
