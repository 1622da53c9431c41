//! Logs of the tenants' processes. Such a process reads its tenant's streams and may be taken over, so it has no descriptor
//! of the supervisor's log. It writes to a socket, and the supervisor passes its lines on under its name, as far as the
//! budget of its tenant permits. A line that is left out is counted, and not looked at.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use event_manager::EventOps;
use rustix::io::Errno;
use rustix::net::sockopt;
use wormhole_link::log_budget::{LogBudget, Verdict};

use super::datagram::{self, Plain};
use super::user_budget::{TenantBudget, UserBudget};
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
    budgets: BTreeMap<u32, UserBudget>,
}

#[derive(Debug)]
struct ProcessLog {
    socket: OwnedFd,
    /// Number of the tenant that the process serves or is going to serve, and the tenant's user.
    owner: Owner,
    line: Vec<u8>,
    token: u32,
}

/// A tenant and its user, whose budget its lines spend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub tenant: Id,
    pub user: u32,
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
    /// Forgets what was logged so far, because the operator has ordered a dump, and logs what was left out.
    pub fn begin_dump(&mut self) {
        for budget in std::mem::take(&mut self.budgets).into_values() {
            for (tenant, count) in budget.left_out() {
                log_left_out(tenant, count);
            }
        }
    }
}

impl ProcessLog {
    /// Reads once, and passes whole lines on.
    fn read(&mut self, mut pass_on: impl FnMut(&[u8])) -> Read {
        let mut buffer = [0; PORTION];
        let count = match datagram::receive_plain(&self.socket, &mut buffer) {
            Ok(Plain::Bytes { count: 0, .. }) => return Read::Closed,
            Ok(Plain::Bytes { count, .. }) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Read::Empty,
            Ok(Plain::Descriptors) | Err(_) => return Read::Unfit,
        };
        for piece in buffer[..count].split_inclusive(|byte| *byte == b'\n') {
            let (mut text, is_whole) = match piece.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (piece, false),
            };
            while self.line.len() + text.len() > LINE_LIMIT {
                let (first, rest) = text.split_at(LINE_LIMIT - self.line.len());
                self.line.extend_from_slice(first);
                pass_on(&self.line);
                self.line.clear();
                text = rest;
            }
            self.line.extend_from_slice(text);
            if is_whole {
                pass_on(&self.line);
                self.line.clear();
            }
        }
        Read::Data
    }
}

impl Supervisor {
    /// Reads the log of a process that was forked for a tenant from now on.
    pub(super) fn add_process_log(
        &mut self,
        ops: &mut EventOps<'_>,
        (ticket, owner): (u64, Owner),
        socket: OwnedFd,
    ) {
        match self.sources.watch(ops, &socket, Source::ProcessLog(ticket)) {
            Ok(token) => {
                let log = ProcessLog {
                    socket,
                    owner,
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
            self.sources.remove(token);
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
        let Some(log) = self.process_logs.logs.remove(&ticket) else {
            return;
        };
        self.pass_on(log.owner, &log.line);
        self.budget_of(log.owner, |mut budget| {
            log_left_out(log.owner.tenant, budget.take_left_out());
        });
        if log.token != 0 {
            connection::forget(ops, &log.socket);
            self.sources.remove(log.token);
        }
        // Others may still have the far end, and may have sent descriptors on it.
        if last != Read::Closed {
            self.refusals.close(Some(log.owner.user), log.socket);
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
        let Some(mut log) = self.process_logs.logs.remove(&ticket) else {
            return Read::Closed;
        };
        let (owner, now) = (log.owner, Instant::now());
        let read = self.budget_of(owner, |mut budget| {
            log.read(|line| pass_on(owner.tenant, line, &mut budget, now))
        });
        self.process_logs.logs.insert(ticket, log);
        read
    }

    /// Logs a line about a tenant's process, as far as its tenant's budget permits.
    pub(super) fn pass_on(&mut self, owner: Owner, line: &[u8]) {
        let now = Instant::now();
        self.budget_of(owner, |mut budget| {
            pass_on(owner.tenant, line, &mut budget, now);
        });
    }

    /// Logs an error of a tenant's process in the same way.
    pub(super) fn pass_on_error(&mut self, owner: Owner, text: &str) {
        self.pass_on(owner, format!("ERROR {text}").as_bytes());
    }

    /// Returns a tenant and its user.
    pub(super) fn owner(&self, tenant: Id) -> Owner {
        let user = self.tenants.get(&tenant).map_or(0, |tenant| tenant.user);
        Owner { tenant, user }
    }

    /// Calls `spend` with the budget of a tenant.
    fn budget_of<T>(&mut self, owner: Owner, spend: impl FnOnce(TenantBudget<'_>) -> T) -> T {
        let now = Instant::now();
        let budget = self.process_logs.budgets.entry(owner.user);
        let budget = budget.or_insert_with(|| UserBudget::new(now));
        let is_there = |id| self.tenants.contains_key(&id);
        let most = self.quotas.tenants_per_user;
        spend(budget.of(owner.tenant, most, now, is_there))
    }
}

/// Logs a line of a tenant's process, or counts it if it is left out.
fn pass_on(tenant: Id, line: &[u8], budget: &mut TenantBudget<'_>, now: Instant) {
    if line.is_empty() {
        return;
    }
    let cost = u32::try_from(line.len()).unwrap_or(u32::MAX);
    let verdict = budget.spend(cost.max(LogBudget::LEAST_LINE), now);
    if let Verdict::After(count) = verdict {
        log_left_out(tenant, count);
    }
    if verdict != Verdict::Drop {
        let text = wormhole_link::harmless_bytes(line);
        log_line(tenant, text.trim());
    }
    if verdict == Verdict::Last {
        tracing::warn!(
            "the process of tenant {tenant} writes too much: most of its log is left out"
        );
    }
}

fn log_left_out(tenant: Id, count: u64) {
    if count > 0 {
        tracing::warn!("{count} lines of the process of tenant {tenant} were left out");
    }
}

/// Logs a line of a tenant's process at the level that the process has given it.
fn log_line(tenant: Id, line: &str) {
    match level_of(line) {
        ("ERROR", text) => tracing::error!("process of tenant {tenant}: {text}"),
        ("WARN", text) => tracing::warn!("process of tenant {tenant}: {text}"),
        ("INFO", text) => tracing::info!("process of tenant {tenant}: {text}"),
        ("DEBUG", text) => tracing::debug!("process of tenant {tenant}: {text}"),
        (_, text) => tracing::trace!("process of tenant {tenant}: {text}"),
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
    use std::io::{IoSlice, Read as _, Write};
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    fn log_of(socket: OwnedFd) -> ProcessLog {
        ProcessLog {
            socket,
            owner: Owner { tenant: 7, user: 0 },
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
            let reads = [0, 1, 2].map(|_| log.read(|line| lines.push(line.to_vec())));
            if brings {
                assert_eq!(reads, [Read::Unfit; 3]);
            } else {
                assert_eq!(reads[2], Read::Empty, "{reads:?}");
                assert_eq!(lines, [b"xy"]);
            }
        }
    }

    #[test]
    fn each_line_has_the_level_that_its_process_has_given_it() {
        let (mut reader, writer) = UnixStream::pair().unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_writer(move || writer.try_clone().unwrap())
            .with_target(false)
            .without_time()
            .with_ansi(false)
            .finish();
        let levels = ["ERROR", "WARN", "INFO", "DEBUG", "TRACE"];
        tracing::subscriber::with_default(subscriber, || {
            for level in levels {
                log_line(7, &format!("{level} said"));
            }
        });
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        let lines = levels.map(|level| format!("{level} process of tenant 7: said"));
        assert_eq!(text.lines().map(str::trim).collect::<Vec<_>>(), lines);
    }

    #[test]
    fn lines_come_whole_and_with_their_level() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut log = log_of(near.into());
        let mut lines = Vec::new();
        let mut read = |lines: &mut Vec<Vec<u8>>| log.read(|line| lines.push(line.to_vec()));
        assert_eq!(read(&mut lines), Read::Empty);
        far.write_all(b" WARN one\nDEBUG two\n\nERR").unwrap();
        assert_eq!(read(&mut lines), Read::Data);
        assert_eq!(lines, [&b" WARN one"[..], b"DEBUG two", b""]);
        far.write_all(&[b'x'; LINE_LIMIT]).unwrap();
        drop(far);
        assert_eq!(read(&mut lines), Read::Data);
        assert_eq!(lines[3].len(), LINE_LIMIT, "a line without an end is cut");
        assert_eq!(read(&mut lines), Read::Closed);
        assert_eq!(log.line, b"xxx");
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
