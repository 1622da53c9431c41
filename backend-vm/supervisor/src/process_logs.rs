//! Logs of the tenants' processes. Such a process reads its tenant's streams and may be taken over, so it has no descriptor
//! of the supervisor's log. It writes to a socket, and the supervisor passes its lines on under its name, as far as the
//! budget of its user permits.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use event_manager::EventOps;
use rustix::io::Errno;
use rustix::net::sockopt;

use super::datagram::{self, Plain};
use super::log_budget::{LogBudget, Verdict};
use super::{Id, Source, Supervisor, connection};

/// Largest size of a line in bytes.
const LINE_LIMIT: usize = 4096;
/// Bytes that a socket holds, if the kernel's own limit is not lower. The process loses lines for which there is no room.
const SOCKET_BYTES: usize = 1 << 20;
/// Number of bytes of one read.
const PORTION: usize = 16 << 10;
/// Number of reads from the log of an ended process: more than its socket holds.
const LAST_PORTIONS: usize = 256;

/// Logs of processes, by the ticket of the process.
#[derive(Debug, Default)]
pub(super) struct ProcessLogs {
    logs: BTreeMap<u64, ProcessLog>,
    budgets: BTreeMap<u32, LogBudget>,
}

#[derive(Debug)]
struct ProcessLog {
    socket: OwnedFd,
    /// Number of the tenant that the process serves or is going to serve.
    tenant: Id,
    line: Vec<u8>,
    token: u32,
}

/// Result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Read {
    Data,
    Empty,
    /// All other ends are closed.
    Closed,
    /// Descriptors came with the next bytes, or the socket failed.
    Unfit,
}

/// Creates the supervisor's end and the process's end of a log.
///
/// # Errors
/// No descriptor is left.
pub(super) fn sockets() -> io::Result<(OwnedFd, OwnedFd)> {
    let (near, far) = UnixStream::pair()?;
    // A byte out of band would otherwise be readable for epoll alone, and a receive would close its descriptors.
    sockopt::set_socket_oobinline(&near, true)?;
    sockopt::set_socket_send_buffer_size(&far, SOCKET_BYTES)?;
    Ok((near.into(), far.into()))
}

impl ProcessLogs {
    /// Forgets what was logged so far, because the operator has ordered a dump.
    pub fn begin_dump(&mut self) {
        self.budgets.clear();
    }
}

impl ProcessLog {
    /// Reads once. Appends whole lines to `lines`.
    fn read(&mut self, lines: &mut Vec<String>) -> Read {
        let mut buffer = [0; PORTION];
        let count = match datagram::receive_plain(&self.socket, &mut buffer) {
            Ok(Plain::Bytes { count: 0, .. }) => return Read::Closed,
            Ok(Plain::Bytes { count, .. }) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Read::Empty,
            Ok(Plain::Descriptors) | Err(_) => return Read::Unfit,
        };
        for &byte in &buffer[..count] {
            if byte == b'\n' || self.line.len() == LINE_LIMIT {
                lines.extend(self.take_line());
            }
            if byte != b'\n' {
                self.line.push(byte);
            }
        }
        Read::Data
    }

    fn take_line(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.line);
        let text = wormhole_link::harmless(&String::from_utf8_lossy(&line));
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }
}

impl Supervisor {
    /// Reads the log of a process that was forked for a tenant from now on.
    pub(super) fn add_process_log(
        &mut self,
        ops: &mut EventOps<'_>,
        (ticket, tenant): (u64, Id),
        socket: OwnedFd,
    ) {
        match self.add_source(ops, &socket, Source::ProcessLog(ticket)) {
            Ok(token) => {
                let log = ProcessLog {
                    socket,
                    tenant,
                    line: Vec::new(),
                    token,
                };
                self.process_logs.logs.insert(ticket, log);
            }
            Err(error) => tracing::error!("the event loop: {error}"),
        }
    }

    /// Passes on a portion of a process's log.
    pub(super) fn process_log(&mut self, ops: &mut EventOps<'_>, ticket: u64) {
        if matches!(self.read_process_log(ticket), Read::Closed | Read::Unfit)
            && let Some(log) = self.process_logs.logs.get_mut(&ticket)
        {
            let token = std::mem::take(&mut log.token);
            connection::forget(ops, &log.socket);
            self.sources.remove(&token);
        }
    }

    /// Passes on the rest of the log of a process that has ended.
    pub(super) fn end_process_log(&mut self, ops: &mut EventOps<'_>, ticket: u64) {
        let mut last = Read::Empty;
        for _ in 0..LAST_PORTIONS {
            last = self.read_process_log(ticket);
            if last != Read::Data {
                break;
            }
        }
        let Some(mut log) = self.process_logs.logs.remove(&ticket) else {
            return;
        };
        let line = log.take_line();
        self.pass_on(log.tenant, line);
        if log.token != 0 {
            connection::forget(ops, &log.socket);
            self.sources.remove(&log.token);
        }
        // Others may still have the far end, and may have sent descriptors on it.
        if last != Read::Closed {
            let owner = self.tenants.get(&log.tenant).map(|tenant| tenant.user);
            self.refusals.close(owner, log.socket);
        }
    }

    /// Passes on all that is in the logs of processes for which this one does not wait.
    pub(super) fn drain_process_logs(&mut self) {
        let tickets: Vec<u64> = self.process_logs.logs.keys().copied().collect();
        for ticket in tickets {
            let read = |_: &usize| self.read_process_log(ticket) == Read::Data;
            (0..LAST_PORTIONS).take_while(read).for_each(drop);
        }
    }

    fn read_process_log(&mut self, ticket: u64) -> Read {
        let Some(log) = self.process_logs.logs.get_mut(&ticket) else {
            return Read::Closed;
        };
        let mut lines = Vec::new();
        let read = log.read(&mut lines);
        let tenant = log.tenant;
        self.pass_on(tenant, lines);
        read
    }

    /// Logs lines of a tenant's process, or about it, as far as the budget of the user permits.
    pub(super) fn pass_on(&mut self, tenant: Id, lines: impl IntoIterator<Item = String>) {
        // A process that waits for a tenant has read nothing of anybody's.
        let user = self.tenants.get(&tenant).map_or(0, |tenant| tenant.user);
        let now = Instant::now();
        let budget = self.process_logs.budgets.entry(user);
        let budget = budget.or_insert_with(|| LogBudget::of_processes(now));
        for line in lines {
            let cost = u32::try_from(line.len()).unwrap_or(u32::MAX);
            let verdict = budget.spend_all(cost.max(LogBudget::LEAST_LINE), now);
            if verdict == Verdict::Drop {
                continue;
            }
            match level_of(&line) {
                ("ERROR", text) => tracing::error!("process of tenant {tenant}: {text}"),
                ("WARN", text) => tracing::warn!("process of tenant {tenant}: {text}"),
                ("DEBUG", text) => tracing::debug!("process of tenant {tenant}: {text}"),
                (_, text) => tracing::info!("process of tenant {tenant}: {text}"),
            }
            if verdict == Verdict::Last {
                tracing::warn!(
                    "the processes of user {user}'s tenants write too much: most of their logs is left out"
                );
            }
        }
    }
}

/// Splits off the level that a process has given a line. Returns `ERROR` for a line without one: a panic writes such lines.
fn level_of(line: &str) -> (&str, &str) {
    match line.split_once(' ') {
        Some((level @ ("ERROR" | "WARN" | "INFO" | "DEBUG" | "TRACE"), text)) => (level, text),
        _ => ("ERROR", line),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    fn log_of(socket: OwnedFd) -> ProcessLog {
        ProcessLog {
            socket,
            tenant: 7,
            line: Vec::new(),
            token: 0,
        }
    }

    #[test]
    fn bytes_out_of_band_are_read_and_their_descriptors_are_not_received() {
        for brings in [false, true] {
            let (near, far) = sockets().unwrap();
            let mut log = log_of(near);
            let file = File::open("/dev/null").unwrap();
            let files = [file.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(!brings || control.push(SendAncillaryMessage::ScmRights(&files)));
            sendmsg(&far, &[IoSlice::new(b"x")], &mut control, SendFlags::OOB).unwrap();
            rustix::io::write(&far, b"y\n").unwrap();
            let mut lines = Vec::new();
            let reads = [0, 1, 2].map(|_| log.read(&mut lines));
            if brings {
                assert_eq!(reads, [Read::Unfit; 3]);
            } else {
                assert_eq!(reads[2], Read::Empty, "{reads:?}");
                assert_eq!(lines, ["xy"]);
            }
        }
    }

    #[test]
    fn lines_come_whole_harmless_and_with_their_level() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut log = log_of(near.into());
        let mut lines = Vec::new();
        assert_eq!(log.read(&mut lines), Read::Empty);
        far.write_all(b" WARN one\nDEBUG t\x1bwo\n\nERR").unwrap();
        assert_eq!(log.read(&mut lines), Read::Data);
        assert_eq!(lines, ["WARN one", "DEBUG t.wo"]);
        far.write_all(&[b'x'; LINE_LIMIT]).unwrap();
        drop(far);
        assert_eq!(log.read(&mut lines), Read::Data);
        assert_eq!(lines[2].len(), LINE_LIMIT, "a line without an end is cut");
        assert_eq!(log.read(&mut lines), Read::Closed);
        assert_eq!(log.take_line().unwrap(), "xxx");
        let levels = ["WARN a b", "thread panicked", "INFO"].map(level_of);
        assert_eq!(
            levels,
            [
                ("WARN", "a b"),
                ("ERROR", "thread panicked"),
                ("ERROR", "INFO")
            ]
        );
    }
}
