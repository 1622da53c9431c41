//! Scrubbers: processes that close descriptors from outside, free memory and map foreign files for
//! the event loop, which never blocks.
//!
//! Closing a descriptor can take as long as its sender likes: a lingering socket, a file of a FUSE
//! file system, the last reference to gigabytes. So the loop passes each descriptor that it did not
//! create on to a scrubber, which waits until the loop has closed its own copy. A scrubber works
//! for one tenant at a time. If it blocks, it delays that tenant alone, and its descriptors count
//! as the tenant's.

pub(crate) mod message;
pub(crate) mod process;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use wormhole_ring::layout::{BOOTSTRAP_BYTES, SEGMENT_BYTES};
use wormhole_ring::session::Run;
use wormhole_ring::status::EndCause;

pub use self::message::{Done, KEPT, Work};
use self::message::{MAX_RUNS, Order as Sent};
#[cfg(test)]
pub use self::process::complete_records;
pub use self::process::main;
use super::Id;
use super::datagram::{self, DESCRIPTORS};
use super::pair;

/// Largest number of orders that a process has at the same time.
pub const WINDOW: usize = 8;
/// Largest number of descriptors that a process has at the same time, unless one order has more.
pub const IN_FLIGHT: usize = DESCRIPTORS;
/// Largest number of idle processes.
const IDLE: usize = 4;
/// Time until a failed operation is tried again.
const AGAIN: Duration = Duration::from_millis(100);

/// Result of an order for the event loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// The run may be granted again if it was scrubbed. The session goes on.
    Scrubbed { session: Id, run: Run },
    /// The file of a session's request with this number is closed.
    Forgotten { session: Id, request: u32 },
    /// The records of these parties of the event with this token are complete.
    RecordsCompleted { token: [u64; 2], parties: u32 },
    /// The bootstrap of a tenant's window was written, or could not be.
    Attached { tenant: Id },
    /// A session's status word was written, or could not be.
    Status { session: Id },
    /// Some segments of a session that has ended may be granted again if they were scrubbed.
    Ended { session: Id },
}

/// Work for a tenant.
#[derive(Debug)]
struct Order {
    work: Work,
    files: Vec<OwnedFd>,
    completion: Option<Completion>,
}

impl Order {
    /// Returns whether a guest or worker waits for the order, so that it goes before others and
    /// beyond the limit of orders.
    fn is_urgent(&self) -> bool {
        matches!(
            self.completion,
            Some(Completion::Forgotten { .. } | Completion::Status { .. })
        )
    }
}

/// Unfinished work for an owner.
#[derive(Debug, Default)]
struct Account {
    waiting: VecDeque<Order>,
    /// Number of descriptors and the result to report, by ticket.
    sent: BTreeMap<u64, (usize, Option<Completion>)>,
    /// Descriptors that no process accepts.
    kept: Vec<OwnedFd>,
    /// Numbers of descriptors of processes that are exiting or have ended, by process. They are
    /// closed when the process is reaped.
    ending: BTreeMap<i32, usize>,
    /// Number of descriptors in all of these.
    held: usize,
    /// Number of them that this process holds.
    here: usize,
    process: Option<u32>,
}

impl Account {
    fn is_over(&self) -> bool {
        self.process.is_none()
            && self.waiting.is_empty()
            && self.sent.is_empty()
            && self.kept.is_empty()
            && self.ending.is_empty()
    }
}

#[derive(Debug)]
struct Process {
    socket: OwnedFd,
    pid: i32,
    account: Option<Id>,
}

impl Process {
    fn is_idle(&self) -> bool {
        self.account.is_none()
    }
}

/// Event loop's handle on the processes.
#[derive(Debug)]
pub struct Scrubber {
    supervisor: pair::SupervisorLink,
    accounts: BTreeMap<Id, Account>,
    /// Processes, by token of the event loop.
    processes: BTreeMap<u32, Process>,
    /// Number of processes ordered and not started yet.
    coming: usize,
    /// Whether the last order of a process failed.
    lacking: bool,
    next_ticket: u64,
    /// Number of descriptors of all tenants.
    held: usize,
    finished: Vec<(Completion, io::Result<()>)>,
    /// Time to retry failed sends.
    again: Option<Instant>,
}

impl Scrubber {
    pub fn new(supervisor: pair::SupervisorLink) -> Self {
        Self {
            supervisor,
            accounts: BTreeMap::new(),
            processes: BTreeMap::new(),
            coming: 0,
            lacking: false,
            next_ticket: 0,
            held: 0,
            finished: Vec::new(),
            again: None,
        }
    }

    /// Scrubs a run of a session that goes on; [`finished`](Self::finished) reports the end.
    pub fn scrub(&mut self, tenant: Id, session: Id, file: OwnedFd, run: Run) {
        let completion = Some(Completion::Scrubbed { session, run });
        self.order(tenant, Work::Scrub(vec![run]), vec![file], completion);
    }

    /// Frees the memory of a session that has ended.
    pub fn discard(&mut self, tenant: Id, file: OwnedFd) {
        self.order(tenant, Work::Discard(0), vec![file], None);
    }

    /// Frees the memory of a session's file except the page with the status word in the session's own segment.
    pub fn discard_beside_status(&mut self, tenant: Id, file: OwnedFd, segment: u32) {
        let before = Run {
            first: 0,
            count: segment,
        };
        let status = u64::from(segment) * SEGMENT_BYTES as u64;
        // Without a descriptor for the copy, the memory before the segment stays.
        if segment > 0
            && let Ok(copy) = file.try_clone()
        {
            self.order(tenant, Work::Scrub(vec![before]), vec![copy], None);
        }
        let from = status + BOOTSTRAP_BYTES as u64;
        self.order(tenant, Work::Discard(from), vec![file], None);
    }

    /// Scrubs runs of a session that are not granted again.
    ///
    /// # Errors
    /// No descriptor is free for the copies.
    pub fn scrub_all(&mut self, tenant: Id, file: &OwnedFd, runs: &[Run]) -> io::Result<()> {
        for runs in runs.chunks(MAX_RUNS) {
            let file = file.try_clone()?;
            self.order(tenant, Work::Scrub(runs.to_vec()), vec![file], None);
        }
        Ok(())
    }

    /// Scrubs the segments of a session that has ended, which are granted again then.
    /// [`finished`](Self::finished) reports the end of each order; returns their number.
    ///
    /// # Errors
    /// No descriptor is free for the copies.
    pub fn scrub_ended(
        &mut self,
        tenant: Id,
        session: Id,
        file: &OwnedFd,
        runs: &[Run],
    ) -> io::Result<usize> {
        let chunks = runs.chunks(MAX_RUNS);
        let files: Vec<OwnedFd> = (0..chunks.len())
            .map(|_| file.try_clone())
            .collect::<io::Result<_>>()?;
        let orders = files.len();
        for (runs, file) in chunks.zip(files) {
            let completion = Some(Completion::Ended { session });
            self.order(tenant, Work::Scrub(runs.to_vec()), vec![file], completion);
        }
        Ok(orders)
    }

    /// Closes descriptors.
    pub fn close(&mut self, tenant: Id, files: impl IntoIterator<Item = OwnedFd>) {
        let mut files = files.into_iter();
        loop {
            let some: Vec<OwnedFd> = files.by_ref().take(DESCRIPTORS).collect();
            if some.is_empty() {
                return;
            }
            self.order(tenant, Work::Close, some, None);
        }
    }

    /// Closes a descriptor for a session that waits for it; [`finished`](Self::finished) reports
    /// the end.
    pub fn close_for(&mut self, tenant: Id, file: OwnedFd, session: Id, request: u32) {
        let completion = Some(Completion::Forgotten { session, request });
        self.order(tenant, Work::Close, vec![file], completion);
    }

    /// Completes the records of parties in an event's words, which are in `file`.
    pub fn complete_records(&mut self, tenant: Id, file: OwnedFd, token: [u64; 2], parties: u32) {
        let completion = Some(Completion::RecordsCompleted { token, parties });
        self.order(
            tenant,
            Work::CompleteRecords(parties),
            vec![file],
            completion,
        );
    }

    /// Writes the bootstrap of a window of `bytes` bytes.
    pub fn write_bootstrap(&mut self, tenant: Id, file: OwnedFd, bytes: u64) {
        let completion = Some(Completion::Attached { tenant });
        self.order(tenant, Work::Bootstrap(bytes), vec![file], completion);
    }

    /// Writes the cause of a session's end to its status word; [`finished`](Self::finished) reports
    /// the end.
    pub fn set_status(
        &mut self,
        tenant: Id,
        session: Id,
        (file, segment): (OwnedFd, u32),
        (result, cause): (u32, EndCause),
    ) {
        let work = Work::Status {
            segment,
            result,
            cause,
        };
        let completion = Some(Completion::Status { session });
        self.order(tenant, work, vec![file], completion);
    }

    fn order(
        &mut self,
        tenant: Id,
        work: Work,
        files: Vec<OwnedFd>,
        completion: Option<Completion>,
    ) {
        self.held += files.len();
        let account = self.accounts.entry(tenant).or_default();
        account.held += files.len();
        account.here += files.len();
        let order = Order {
            work,
            files,
            completion,
        };
        if order.is_urgent() {
            account.waiting.push_front(order);
        } else {
            account.waiting.push_back(order);
        }
        self.serve(tenant);
    }

    /// Sends an owner's process as many orders as it may have.
    fn serve(&mut self, owner: Id) {
        let Some(account) = self.accounts.get_mut(&owner) else {
            return;
        };
        if account.process.is_none() && !account.waiting.is_empty() {
            let mut idle = self.processes.iter_mut();
            let idle = idle.find(|(_, process)| process.is_idle());
            if let Some((token, process)) = idle {
                process.account = Some(owner);
                account.process = Some(*token);
            }
        }
        let process = account
            .process
            .and_then(|token| self.processes.get_mut(&token));
        let Some(process) = process else {
            if account.is_over() {
                self.accounts.remove(&owner);
            }
            self.order_processes();
            return;
        };
        let has_room = |account: &Account, order: &Order| {
            let sent: usize = account.sent.values().map(|(count, _)| count).sum();
            let fits = sent == 0 || sent + order.files.len() <= IN_FLIGHT;
            (fits && account.sent.len() < WINDOW) || order.is_urgent()
        };
        while let Some(order) = account.waiting.pop_front() {
            if !has_room(account, &order) {
                account.waiting.push_front(order);
                break;
            }
            let ticket = self.next_ticket;
            match pass_on(&process.socket, ticket, &order.work, &order.files) {
                Ok(()) => {
                    self.next_ticket += 1;
                    let count = order.files.len();
                    account.here -= count;
                    account.sent.insert(ticket, (count, order.completion));
                    // These are not the last copies: the process keeps its own until it receives
                    // `Released`.
                    drop(order.files);
                    release(&process.socket);
                }
                // Other processes of this user may have used up the limit on descriptors in flight.
                Err(Errno::TOOMANYREFS | Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                    account.waiting.push_front(order);
                    self.again.get_or_insert_with(|| Instant::now() + AGAIN);
                    return;
                }
                // The event loop reports its end.
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    account.waiting.push_front(order);
                    return;
                }
                Err(error) => {
                    tracing::error!(
                        "tenant {owner}: {} descriptors cannot be passed on to be closed: {error}",
                        order.files.len()
                    );
                    account.kept.extend(order.files);
                    let completion = order
                        .completion
                        .map(|completion| (completion, Err(error.into())));
                    self.finished.extend(completion);
                }
            }
        }
        let idle = account.sent.is_empty() && account.waiting.is_empty();
        if idle {
            let token = account.process.take();
            if account.is_over() {
                self.accounts.remove(&owner);
            }
            if let Some(process) = token.and_then(|token| self.processes.get_mut(&token)) {
                process.account = None;
            }
            self.serve_next();
        }
    }

    /// Orders as many processes as there are owners without one.
    fn order_processes(&mut self) {
        let without = |account: &&Account| account.process.is_none() && !account.waiting.is_empty();
        let wanted = self.accounts.values().filter(without).count();
        while self.coming < wanted {
            self.supervisor.report(&pair::Report::Scrubber);
            self.coming += 1;
        }
    }

    /// Assigns an idle process to an owner with work.
    fn serve_next(&mut self) {
        let mut accounts = self.accounts.iter();
        let next = accounts
            .find(|(_, account)| account.process.is_none() && !account.waiting.is_empty())
            .map(|(owner, _)| *owner);
        if let Some(owner) = next {
            self.serve(owner);
        }
    }

    /// Adds a process, whose socket the event loop watches under this token.
    pub fn add(&mut self, token: u32, pid: i32, socket: OwnedFd) {
        self.coming = self.coming.saturating_sub(1);
        self.lacking = false;
        let process = Process {
            socket,
            pid,
            account: None,
        };
        self.processes.insert(token, process);
        self.serve_next();
    }

    /// Handles the failure to start a process. It is ordered again after a while. Launchers and
    /// guests do not wait for that: [`finished`](Self::finished) reports their window or status
    /// word as failed.
    pub fn failed(&mut self, reason: &str) {
        if !std::mem::replace(&mut self.lacking, true) {
            tracing::error!("no process can be had to give memory back: {reason}");
        }
        self.coming = self.coming.saturating_sub(1);
        self.again.get_or_insert_with(|| Instant::now() + AGAIN);
        let accounts = self.accounts.values_mut();
        let without = accounts.filter(|account| account.process.is_none());
        for order in without.flat_map(|account| &mut account.waiting) {
            let waits = |completion: &mut Completion| {
                matches!(
                    completion,
                    Completion::Attached { .. } | Completion::Status { .. }
                )
            };
            if let Some(completion) = order.completion.take_if(waits) {
                order.work = Work::Close;
                let reason = format!("no process can be had for that: {reason}");
                self.finished
                    .push((completion, Err(io::Error::other(reason))));
            }
        }
    }

    /// Reads a process's answers. Returns false if it has ended.
    #[must_use]
    pub fn read(&mut self, token: u32) -> bool {
        loop {
            let Some(process) = self.processes.get(&token) else {
                return true;
            };
            let (owner, heard) = (process.account, datagram::receive(&process.socket, false));
            let done = match heard {
                Ok(Some((bytes, _))) => Done::decode(&bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                _ => None,
            };
            let (Some(done), Some(owner)) = (done, owner) else {
                return false;
            };
            self.finish(owner, done);
        }
    }

    fn finish(&mut self, owner: Id, done: Done) {
        let Some(account) = self.accounts.get_mut(&owner) else {
            return;
        };
        let Some((count, completion)) = account.sent.remove(&done.ticket) else {
            return;
        };
        self.closed(owner, count);
        self.finished
            .extend(completion.map(|completion| (completion, done.result())));
        self.serve(owner);
    }

    /// Subtracts closed descriptors.
    fn closed(&mut self, owner: Id, count: usize) {
        if let Some(account) = self.accounts.get_mut(&owner) {
            account.held -= count;
        }
        self.held -= count;
    }

    /// Removes a process that has ended. Its unfinished orders have failed; their
    /// descriptors count until the process is [reaped](Self::reaped).
    pub fn remove(&mut self, token: u32) -> Option<OwnedFd> {
        let process = self.processes.remove(&token)?;
        if let Some(owner) = process.account
            && let Some(account) = self.accounts.get_mut(&owner)
        {
            account.process = None;
            let mut left = 0;
            for (count, completion) in std::mem::take(&mut account.sent).into_values() {
                left += count;
                let lost = io::Error::from_raw_os_error(libc::ESRCH);
                self.finished
                    .extend(completion.map(|completion| (completion, Err(lost))));
            }
            account.ending.insert(process.pid, left);
            self.serve(owner);
        }
        Some(process.socket)
    }

    /// Returns the token of a process that was not removed.
    pub fn token_of(&self, pid: i32) -> Option<u32> {
        let mut processes = self.processes.iter();
        let found = processes.find(|(_, process)| process.pid == pid);
        found.map(|(token, _)| *token)
    }

    /// Handles the end of a process that was removed: its descriptors are closed.
    pub fn reaped(&mut self, pid: i32) {
        let mut accounts = self.accounts.iter_mut();
        let ended = accounts.find_map(|(owner, account)| {
            let count = account.ending.remove(&pid)?;
            Some((*owner, count))
        });
        if let Some((owner, count)) = ended {
            self.closed(owner, count);
            self.serve(owner);
        }
    }

    /// Returns an idle process beyond the limit, if there is one.
    pub fn surplus(&self) -> Option<u32> {
        let mut idle = self.processes.iter();
        let mut idle = idle.by_ref().filter(|(_, process)| process.is_idle());
        idle.nth(IDLE).map(|(token, _)| *token)
    }

    /// Takes the results since the last call.
    pub fn finished(&mut self) -> Vec<(Completion, io::Result<()>)> {
        std::mem::take(&mut self.finished)
    }

    /// Returns the time at which to [try again](Self::try_again), if any.
    pub fn deadline(&self) -> Option<Instant> {
        self.again
    }

    /// Retries failed sends.
    pub fn try_again(&mut self, now: Instant) {
        if self.again.take_if(|again| *again <= now).is_some() {
            let owners: Vec<Id> = self.accounts.keys().copied().collect();
            for owner in owners {
                self.serve(owner);
            }
            self.order_processes();
        }
    }

    /// Returns whether this process holds descriptors of a tenant that are to be passed on.
    pub fn is_behind(&self, tenant: Id) -> bool {
        let account = self.account(tenant);
        account.is_some_and(|account| account.here > 0)
    }

    /// Returns the number of a tenant's descriptors that are not closed yet.
    pub fn held_for(&self, tenant: Id) -> usize {
        self.account(tenant).map_or(0, |account| account.held)
    }

    fn account(&self, tenant: Id) -> Option<&Account> {
        self.accounts.get(&tenant)
    }
}

/// Sends the process at the other end of a socket an order.
///
/// # Errors
/// Same as `sendmsg`.
pub fn pass_on(socket: &OwnedFd, ticket: u64, work: &Work, files: &[OwnedFd]) -> Result<(), Errno> {
    let work = work.clone();
    let message = Sent::Do { ticket, work }.encode();
    datagram::send(socket, &message, files, false)
}

/// Tells the process that this one has closed its copies of the descriptors.
pub fn release(socket: &OwnedFd) {
    // Fails only if the process has ended, and then the message is not needed: a socket has room
    // for the messages of more orders than a process has at the same time.
    let _ = datagram::send(socket, &Sent::Released.encode(), &[], false);
}

impl fmt::Display for Scrubber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} files are being given back", self.held)?;
        for (owner, account) in &self.accounts {
            write!(f, ", {} of tenant {owner}", account.held)?;
        }
        Ok(())
    }
}
