//! Scrubbers: processes that close what came from outside, give memory back and map foreign files for the event loop,
//! which waits for nobody.
//!
//! To close a descriptor can take as long as its owner likes: a socket that lingers, a file of a file system that a user
//! serves, the last hold on gigabytes. So the loop passes each descriptor that it did not make on to a process, and lets
//! go of its own copy first. A process works for one tenant at a time. One that cannot go on holds up its tenant alone,
//! and what it holds counts as the tenant's.

mod message;
pub(crate) mod process;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use wormhole_ring::session::Run;
use wormhole_ring::status::EndCause;

pub use self::message::Work;
use self::message::{Done, MAX_RUNS, Order as Sent};
#[cfg(test)]
pub use self::process::bury;
pub use self::process::main;
use super::Id;
use super::datagram::{self, DESCRIPTORS};
use super::spawner::{Orders, SpawnerError};
use wormhole_link::channel::MAX_RECEIVED;

/// The account of connections that were refused. A process closes some of them by ending, for then no socket lingers that
/// a stranger has put into one.
pub const REFUSED: Id = 0;
/// Orders that a process has at the same time.
const WINDOW: usize = 8;
/// Orders to close a stream with all that one read of it can bring, and the few descriptors that were there before.
const STREAM: usize = (MAX_RECEIVED + DESCRIPTORS).div_ceil(DESCRIPTORS);
const _: () = assert!(STREAM <= WINDOW);
/// Processes that wait for the next tenant with work.
const IDLE: usize = 4;
/// How long until what failed for want of something is tried again.
const AGAIN: Duration = Duration::from_millis(100);

/// A notice to the event loop that an order is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// The run of a session that goes on may be granted again, unless it cannot be scrubbed.
    Scrubbed { session: Id, run: Run },
    /// The file that a session asked to let go of, by this number, is closed.
    Forgotten { session: Id, request: u32 },
    /// The records of these parties of the event with this token are complete.
    Buried { token: [u64; 2], parties: u32 },
    /// The window of a tenant has its bootstrap, unless it cannot be written.
    Attached { tenant: Id },
    /// A session's status word says why it has ended, unless it cannot be written.
    Status { session: Id },
}

/// Work for a tenant.
#[derive(Debug)]
struct Order {
    work: Work,
    files: Vec<OwnedFd>,
    told: Option<Told>,
}

impl Order {
    /// Somebody waits for it: it goes before others, however many the process has.
    fn is_urgent(&self) -> bool {
        matches!(
            self.told,
            Some(Told::Forgotten { .. } | Told::Status { .. })
        )
    }
}

/// A tenant's work that is not finished.
#[derive(Debug, Default)]
struct Account {
    waiting: VecDeque<Order>,
    /// By ticket: how many descriptors, and what is told.
    sent: BTreeMap<u64, (usize, Option<Told>)>,
    /// What no process takes.
    kept: Vec<OwnedFd>,
    /// Descriptors in all of these.
    held: usize,
    /// Those of them that this process has.
    here: usize,
    process: Option<u32>,
}

#[derive(Debug)]
struct Process {
    socket: OwnedFd,
    account: Option<Id>,
}

/// The event loop's handle on the processes.
#[derive(Debug)]
pub struct Scrubber {
    spawner: Orders,
    accounts: BTreeMap<Id, Account>,
    /// By token of the event loop.
    processes: BTreeMap<u32, Process>,
    /// Processes that were ordered and have not come.
    coming: usize,
    /// None could be had the last time.
    lacking: bool,
    next_ticket: u64,
    held: usize,
    finished: Vec<(Told, io::Result<()>)>,
    /// Tenants of whose descriptors this process has none any more.
    drained: Vec<Id>,
    /// When to try what could not be sent.
    again: Option<Instant>,
}

impl Scrubber {
    pub fn new(spawner: Orders) -> Self {
        Self {
            spawner,
            accounts: BTreeMap::new(),
            processes: BTreeMap::new(),
            coming: 0,
            lacking: false,
            next_ticket: 0,
            held: 0,
            finished: Vec::new(),
            drained: Vec::new(),
            again: None,
        }
    }

    /// Has a run of a session that goes on scrubbed; [`finished`](Self::finished) tells when that is done.
    pub fn scrub(&mut self, tenant: Id, session: Id, file: OwnedFd, run: Run) {
        let told = Some(Told::Scrubbed { session, run });
        self.order(tenant, Work::Scrub(vec![run]), vec![file], told);
    }

    /// Has the memory of a session that has ended given back.
    pub fn discard(&mut self, tenant: Id, file: OwnedFd) {
        self.order(tenant, Work::Discard(0), vec![file], None);
    }

    /// Has runs of a session scrubbed that nobody is granted.
    ///
    /// # Errors
    /// No descriptor is left for so many.
    pub fn scrub_all(&mut self, tenant: Id, file: &OwnedFd, runs: &[Run]) -> io::Result<()> {
        for runs in runs.chunks(MAX_RUNS) {
            let file = file.try_clone()?;
            self.order(tenant, Work::Scrub(runs.to_vec()), vec![file], None);
        }
        Ok(())
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

    /// Closes a connection that was refused.
    pub fn refuse(&mut self, connection: OwnedFd) {
        let waiting = self.accounts.get_mut(&REFUSED);
        match waiting.and_then(|account| {
            Some((
                account.waiting.back_mut()?,
                &mut account.held,
                &mut account.here,
            ))
        }) {
            Some((last, held, here)) if last.files.len() < DESCRIPTORS => {
                last.files.push(connection);
                (*held, *here) = (*held + 1, *here + 1);
                self.held += 1;
            }
            _ => self.order(REFUSED, Work::End, vec![connection], None),
        }
    }

    /// Whether a process that ends closes refused connections by that.
    pub fn closes_refused(&self, token: u32) -> bool {
        let process = self.processes.get(&token);
        process.is_some_and(|process| process.account == Some(REFUSED))
    }

    /// Closes one for a session that waits for it; [`finished`](Self::finished) tells when that is done.
    pub fn close_for(&mut self, tenant: Id, file: OwnedFd, session: Id, request: u32) {
        let told = Some(Told::Forgotten { session, request });
        self.order(tenant, Work::Close, vec![file], told);
    }

    /// Completes what parties have recorded of an event with its words in `file`.
    pub fn bury(&mut self, tenant: Id, file: OwnedFd, token: [u64; 2], parties: u32) {
        let told = Some(Told::Buried { token, parties });
        self.order(tenant, Work::Bury(parties), vec![file], told);
    }

    /// Writes the bootstrap of a window of so many bytes.
    pub fn write_bootstrap(&mut self, tenant: Id, file: OwnedFd, bytes: u64) {
        let told = Some(Told::Attached { tenant });
        self.order(tenant, Work::Bootstrap(bytes), vec![file], told);
    }

    /// Has a session's guest read why the session has ended; [`finished`](Self::finished) tells when it can.
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
        let told = Some(Told::Status { session });
        self.order(tenant, work, vec![file], told);
    }

    fn order(&mut self, tenant: Id, work: Work, files: Vec<OwnedFd>, told: Option<Told>) {
        let account = self.accounts.entry(tenant).or_default();
        account.held += files.len();
        account.here += files.len();
        self.held += files.len();
        let order = Order { work, files, told };
        if order.is_urgent() {
            account.waiting.push_front(order);
        } else {
            account.waiting.push_back(order);
        }
        self.serve(tenant);
    }

    /// Sends a tenant's process what it takes now.
    fn serve(&mut self, tenant: Id) {
        let Some(account) = self.accounts.get_mut(&tenant) else {
            return;
        };
        if account.process.is_none() && !account.waiting.is_empty() {
            let mut idle = self.processes.iter_mut();
            let idle = idle.find(|(_, process)| process.account.is_none());
            if let Some((token, process)) = idle {
                process.account = Some(tenant);
                account.process = Some(*token);
            }
        }
        let process = account.process.and_then(|token| self.processes.get(&token));
        let Some(process) = process else {
            self.order_processes();
            return;
        };
        while let Some(order) = account
            .waiting
            .pop_front_if(|order| account.sent.len() < WINDOW || order.is_urgent())
        {
            let ticket = self.next_ticket;
            let message = Sent::Do {
                ticket,
                work: order.work.clone(),
            };
            match datagram::send(&process.socket, &message.encode(), &order.files, false) {
                Ok(()) => {
                    self.next_ticket += 1;
                    account.here -= order.files.len();
                    account.sent.insert(ticket, (order.files.len(), order.told));
                    // Not the last copies: the process keeps its own until it is told that these are gone.
                    drop(order.files);
                    let released = Sent::Released.encode();
                    // When it has ended, so has the need to tell it.
                    let _ = datagram::send(&process.socket, &released, &[], false);
                }
                // Other processes of this user may have as many descriptors on their way as it may.
                Err(Errno::TOOMANYREFS | Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                    account.waiting.push_front(order);
                    self.again.get_or_insert_with(|| Instant::now() + AGAIN);
                    return;
                }
                // Its end is announced.
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    account.waiting.push_front(order);
                    return;
                }
                Err(error) => {
                    tracing::error!(
                        "tenant {tenant}: {} descriptors cannot be passed on to be closed: {error}",
                        order.files.len()
                    );
                    account.kept.extend(order.files);
                    let told = order.told.map(|told| (told, Err(error.into())));
                    self.finished.extend(told);
                }
            }
        }
        if account.here == 0 {
            self.drained.push(tenant);
        }
        let idle = account.sent.is_empty() && account.waiting.is_empty();
        if idle {
            let token = account.process.take();
            if account.kept.is_empty() {
                self.accounts.remove(&tenant);
            }
            if let Some(process) = token.and_then(|token| self.processes.get_mut(&token)) {
                process.account = None;
            }
            self.serve_next();
        }
    }

    /// Orders as many processes as there are tenants without one.
    fn order_processes(&mut self) {
        let without = |account: &&Account| account.process.is_none() && !account.waiting.is_empty();
        let wanted = self.accounts.values().filter(without).count();
        while self.coming < wanted {
            if !self.spawner.scrubber() {
                return self.failed(&SpawnerError::Ended.to_string());
            }
            self.coming += 1;
        }
    }

    /// Gives a process that waits for work to a tenant that has some.
    fn serve_next(&mut self) {
        let mut accounts = self.accounts.iter();
        let next = accounts
            .find(|(_, account)| account.process.is_none() && !account.waiting.is_empty())
            .map(|(tenant, _)| *tenant);
        if let Some(tenant) = next {
            self.serve(tenant);
        }
    }

    /// A process has come: the event loop watches its socket, by this token.
    pub fn add(&mut self, token: u32, socket: OwnedFd) {
        self.coming = self.coming.saturating_sub(1);
        self.lacking = false;
        let account = None;
        self.processes.insert(token, Process { socket, account });
        self.serve_next();
    }

    /// A process that was ordered cannot be had. It is ordered again in a while. Neither a launcher nor a guest waits for
    /// that: [`finished`](Self::finished) tells that the window or the status word is not written.
    pub fn failed(&mut self, reason: &str) {
        if !std::mem::replace(&mut self.lacking, true) {
            tracing::error!("no process can be had to give memory back: {reason}");
        }
        self.coming = self.coming.saturating_sub(1);
        self.again.get_or_insert_with(|| Instant::now() + AGAIN);
        let accounts = self.accounts.values_mut();
        let without = accounts.filter(|account| account.process.is_none());
        for order in without.flat_map(|account| &mut account.waiting) {
            let waits =
                |told: &mut Told| matches!(told, Told::Attached { .. } | Told::Status { .. });
            if let Some(told) = order.told.take_if(waits) {
                order.work = Work::Close;
                let reason = format!("no process can be had for that: {reason}");
                self.finished.push((told, Err(io::Error::other(reason))));
            }
        }
    }

    /// Reads what a process says. False if it has ended.
    #[must_use]
    pub fn read(&mut self, token: u32) -> bool {
        loop {
            let Some(process) = self.processes.get(&token) else {
                return true;
            };
            let (tenant, heard) = (process.account, datagram::receive(&process.socket, false));
            let done = match heard {
                Ok(Some((bytes, _))) => Done::decode(&bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                _ => None,
            };
            let (Some(done), Some(tenant)) = (done, tenant) else {
                return false;
            };
            self.finish(tenant, done);
        }
    }

    fn finish(&mut self, tenant: Id, done: Done) {
        let Some(account) = self.accounts.get_mut(&tenant) else {
            return;
        };
        let Some((count, told)) = account.sent.remove(&done.ticket) else {
            return;
        };
        account.held -= count;
        self.held -= count;
        self.finished.extend(told.map(|told| (told, done.result())));
        self.serve(tenant);
    }

    /// Removes a process that has ended; the kernel has closed its descriptors. Its unfinished orders have failed.
    pub fn remove(&mut self, token: u32) -> Option<OwnedFd> {
        let process = self.processes.remove(&token)?;
        if let Some(tenant) = process.account
            && let Some(account) = self.accounts.get_mut(&tenant)
        {
            account.process = None;
            for (count, told) in std::mem::take(&mut account.sent).into_values() {
                account.held -= count;
                self.held -= count;
                let lost = io::Error::from_raw_os_error(libc::ESRCH);
                self.finished.extend(told.map(|told| (told, Err(lost))));
            }
            self.serve(tenant);
        }
        Some(process.socket)
    }

    /// A process that is one too many while there is no work.
    pub fn surplus(&self) -> Option<u32> {
        let mut idle = self.processes.iter();
        let mut idle = idle
            .by_ref()
            .filter(|(_, process)| process.account.is_none());
        idle.nth(IDLE).map(|(token, _)| *token)
    }

    /// What was finished since the last call, and whether it could be done.
    pub fn finished(&mut self) -> Vec<(Told, io::Result<()>)> {
        std::mem::take(&mut self.finished)
    }

    /// When there is something to [try again](Self::try_again).
    pub fn deadline(&self) -> Option<Instant> {
        self.again
    }

    /// Tries what could not be sent.
    pub fn try_again(&mut self, now: Instant) {
        if self.again.take_if(|again| *again <= now).is_some() {
            let tenants: Vec<Id> = self.accounts.keys().copied().collect();
            for tenant in tenants {
                self.serve(tenant);
            }
            self.order_processes();
        }
    }

    /// Tenants of whose descriptors this process has passed on the last since the last call.
    pub fn drained(&mut self) -> Vec<Id> {
        std::mem::take(&mut self.drained)
    }

    /// Whether this process has descriptors of a tenant that it is to pass on.
    pub fn is_behind(&self, tenant: Id) -> bool {
        self.accounts
            .get(&tenant)
            .is_some_and(|account| account.here > 0)
    }

    /// Whether what one read of a tenant's stream brings is passed on, as soon as there is a process.
    pub fn takes_at_once(&self, tenant: Id) -> bool {
        self.accounts.get(&tenant).is_none_or(|account| {
            account.waiting.is_empty() && account.sent.len() + STREAM <= WINDOW
        })
    }

    /// Descriptors of a tenant that are not closed yet.
    pub fn held_for(&self, tenant: Id) -> usize {
        self.accounts.get(&tenant).map_or(0, |account| account.held)
    }

    /// Those of all tenants.
    pub fn held(&self) -> usize {
        self.held - self.held_for(REFUSED)
    }

    /// Whether there is work for a tenant, which may be gone.
    pub fn serves(&self, tenant: Id) -> bool {
        self.accounts.contains_key(&tenant)
    }
}

impl fmt::Display for Scrubber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} files are being given back", self.held)?;
        for (tenant, account) in &self.accounts {
            write!(f, ", {} of tenant {tenant}", account.held)?;
        }
        Ok(())
    }
}
