//! Connections that were refused, and what processes of tenants have left. A process sends the
//! refusals and closes the connections: sending, shutting down and closing may each take as long as
//! the launcher likes.
//!
//! Connections that hold descriptors are closed by the process's exit, which may never end. So one
//! process of a user is exiting at a time, and one more keeps the user's connections until the first
//! was reaped, or until it has no room for more.
//!
//! A refusal that its launcher leaves unread stays charged to the processes' cgroup, which all users share. So a user has
//! a budget of refusals with a sentence. Connections beyond it are shut down without one.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use wormhole_link::log_budget::{LogBudget, Verdict};
use wormhole_ring::control::Refusal;

use super::datagram::{self, DESCRIPTORS};
use super::scrubber::{self, Done, IN_FLIGHT, KEPT, WINDOW, Work};

/// Time until a failed operation is tried again.
const AGAIN: Duration = Duration::from_millis(100);

/// User whose connections were refused, or none for all users who may not connect.
type Owner = Option<u32>;

/// Process that has connections of an owner.
#[derive(Debug)]
struct Keeper {
    ticket: u64,
    /// Socket of the process, once the spawner has sent it.
    socket: Option<OwnedFd>,
    next_order: u64,
    /// Number of descriptors of each order that it has not answered.
    sent: BTreeMap<u64, usize>,
    /// Number of descriptors that it keeps until its exit.
    kept: usize,
}

impl Keeper {
    fn new(ticket: u64) -> Self {
        Self {
            ticket,
            socket: None,
            next_order: 0,
            sent: BTreeMap::new(),
            kept: 0,
        }
    }

    fn underway(&self) -> usize {
        self.sent.values().sum()
    }

    fn held(&self) -> usize {
        self.underway() + self.kept
    }

    /// Reads its answers. Returns false if it has ended, or is ending: its exit may take as long as the descriptors that it
    /// keeps.
    fn hear(&mut self) -> bool {
        let Some(socket) = &self.socket else {
            return true;
        };
        loop {
            let bytes = match datagram::receive(socket, false) {
                Ok(Some((bytes, _))) => bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Ok(None) | Err(_) => return false,
            };
            let Some(done) = Done::decode(&bytes) else {
                return true;
            };
            let count = self.sent.remove(&done.ticket).unwrap_or(0);
            if done.error == KEPT {
                self.kept += count;
            }
        }
    }

    /// Returns whether it may have an order with so many descriptors more.
    fn has_room(&self, count: usize) -> bool {
        let underway = self.underway();
        self.sent.len() < WINDOW && (underway == 0 || underway + count <= IN_FLIGHT)
    }

    /// Passes descriptors on.
    ///
    /// # Errors
    /// Returns them if that must be tried again later, unless the process has ended.
    fn pass_on(&mut self, work: Work, files: Vec<OwnedFd>) -> Result<(), (Work, Vec<OwnedFd>)> {
        let Some(socket) = self.socket.as_ref().filter(|_| self.has_room(files.len())) else {
            return Err((work, files));
        };
        let ticket = self.next_order;
        // Others may have used up the limit on descriptors in flight. The process's end is reported.
        if scrubber::pass_on(socket, ticket, &work, &files).is_err() {
            return Err((work, files));
        }
        self.next_order += 1;
        self.sent.insert(ticket, files.len());
        // These are not the last copies.
        drop(files);
        scrubber::release(socket);
        Ok(())
    }
}

/// Connections of an owner.
#[derive(Debug, Default)]
struct Account {
    /// Connections that no process has, with their refusal.
    waiting: Vec<(Work, Vec<OwnedFd>)>,
    /// Process that takes connections.
    keeper: Option<Keeper>,
    /// Processes that are exiting, in their turn or because they were killed.
    exiting: Vec<Keeper>,
}

impl Account {
    fn here(&self) -> usize {
        self.waiting.iter().map(|(_, files)| files.len()).sum()
    }

    fn held(&self) -> usize {
        let processes = self.keeper.iter().chain(&self.exiting);
        self.here() + processes.map(Keeper::held).sum::<usize>()
    }

    /// Moves a process that ends out of its turn to those that exit. Returns whether it has. Closes its ends of the
    /// sockets of exiting processes that have closed theirs: the rest of an exit may never end.
    fn leave_lost(&mut self) -> bool {
        for keeper in &mut self.exiting {
            if !keeper.hear() {
                keeper.socket = None;
            }
        }
        let lost = self.keeper.take_if(|keeper| !keeper.hear());
        let is_lost = lost.is_some();
        self.exiting.extend(lost.map(|keeper| Keeper {
            socket: None,
            ..keeper
        }));
        is_lost
    }

    /// Passes connections on. Returns whether it must be tried again later.
    fn serve(&mut self, room: usize) -> bool {
        let Some(keeper) = &mut self.keeper else {
            return false;
        };
        if keeper.socket.is_none() {
            return false;
        }
        while let Some((work, files)) = self.waiting.pop() {
            if let Err(left) = keeper.pass_on(work, files) {
                self.waiting.push(left);
                return true;
            }
        }
        if self.exiting.is_empty() || keeper.kept >= room {
            if keeper.pass_on(Work::End, Vec::new()).is_err() {
                return true;
            }
            self.exiting.extend(self.keeper.take());
        }
        false
    }
}

/// All refused connections that are not closed.
#[derive(Debug)]
pub struct Refusals {
    accounts: BTreeMap<Owner, Account>,
    /// Budgets of refusals with a sentence.
    sentences: BTreeMap<Owner, LogBudget>,
    /// Number of descriptors that a process may keep.
    room: usize,
    /// Time to pass on what a process had no room for.
    again: Option<Instant>,
    /// Time until which no process is ordered, because one has failed.
    pause: Option<Instant>,
}

impl Refusals {
    /// `room` is the number of descriptors that one process may keep.
    pub fn new(room: usize) -> Self {
        Self {
            accounts: BTreeMap::new(),
            sentences: BTreeMap::new(),
            room,
            again: None,
            pause: None,
        }
    }

    /// Refuses a connection of a user, or of one who may not connect.
    pub fn refuse(&mut self, owner: Owner, connection: OwnedFd, refusal: Refusal, reason: &str) {
        let now = Instant::now();
        let budget = self.sentences.entry(owner);
        let budget = budget.or_insert_with(|| LogBudget::of_refusals(now));
        let reason = match budget.spend(now) {
            Verdict::Drop => String::new(),
            _ => reason.to_owned(),
        };
        let code = refusal as u32;
        self.take(owner, Work::Refuse { code, reason }, connection);
    }

    /// Closes a descriptor that a user's tenant may have left something in.
    pub fn close(&mut self, owner: Owner, descriptor: OwnedFd) {
        self.take(owner, Work::Keep, descriptor);
    }

    fn take(&mut self, owner: Owner, work: Work, descriptor: OwnedFd) {
        let account = self.accounts.entry(owner).or_default();
        let is_alike = |(other, files): &&mut (Work, Vec<OwnedFd>)| {
            *other == work && files.len() < DESCRIPTORS
        };
        match account.waiting.iter_mut().find(is_alike) {
            Some((_, files)) => files.push(descriptor),
            None => account.waiting.push((work, vec![descriptor])),
        }
        self.serve(owner);
    }

    /// Returns whether all connections are closed.
    pub fn is_empty(&self) -> bool {
        self.accounts.is_empty()
    }

    /// Returns the number of descriptors that wait for a process.
    pub fn here(&self) -> usize {
        self.accounts.values().map(Account::here).sum()
    }

    /// Orders a process for each owner without one, unless one has failed a moment ago.
    /// `fork` returns its ticket.
    pub fn order(&mut self, mut fork: impl FnMut() -> Option<u64>) {
        if self.pause.is_some() {
            return;
        }
        for account in self.accounts.values_mut() {
            if account.keeper.is_none() && !account.waiting.is_empty() {
                account.keeper = fork().map(Keeper::new);
            }
        }
    }

    /// Adds a process that was ordered.
    pub fn add(&mut self, ticket: u64, socket: OwnedFd) {
        let is_its = |account: &Account| {
            let keeper = account.keeper.as_ref();
            keeper.is_some_and(|keeper| keeper.ticket == ticket)
        };
        let mut accounts = self.accounts.iter_mut();
        if let Some((owner, account)) = accounts.find(|(_, account)| is_its(account)) {
            let owner = *owner;
            if let Some(keeper) = &mut account.keeper {
                keeper.socket = Some(socket);
            }
            self.serve(owner);
        }
    }

    /// Handles the failure to start a process. It is ordered again after a while.
    pub fn failed(&mut self, ticket: u64) {
        self.reaped(ticket);
        self.pause();
    }

    fn pause(&mut self) {
        self.pause.get_or_insert_with(|| Instant::now() + AGAIN);
    }

    /// Handles the end of a process: its connections are closed.
    pub fn reaped(&mut self, ticket: u64) {
        let owners: Vec<Owner> = self.accounts.keys().copied().collect();
        let mut is_lost = false;
        for account in self.accounts.values_mut() {
            is_lost |= account
                .keeper
                .take_if(|keeper| keeper.ticket == ticket)
                .is_some();
            account.exiting.retain(|keeper| keeper.ticket != ticket);
        }
        if is_lost {
            self.pause();
        }
        owners.into_iter().for_each(|owner| self.serve(owner));
    }

    fn serve(&mut self, owner: Owner) {
        let Some(account) = self.accounts.get_mut(&owner) else {
            return;
        };
        let is_lost = account.leave_lost();
        if account.serve(self.room) {
            self.again.get_or_insert_with(|| Instant::now() + AGAIN);
        }
        if account.held() == 0 && account.keeper.is_none() && account.exiting.is_empty() {
            self.accounts.remove(&owner);
        }
        if is_lost {
            self.pause();
        }
    }

    /// Returns the time at which to [try again](Self::try_again), if any.
    pub fn deadline(&self) -> Option<Instant> {
        self.again.into_iter().chain(self.pause).min()
    }

    /// Retries failed operations if it is time to.
    pub fn try_again(&mut self, now: Instant) {
        self.pause.take_if(|pause| *pause <= now);
        if self.again.take_if(|again| *again <= now).is_some() {
            let owners: Vec<Owner> = self.accounts.keys().copied().collect();
            owners.into_iter().for_each(|owner| self.serve(owner));
        }
    }
}

impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held: usize = self.accounts.values().map(Account::held).sum();
        write!(f, "{held} refused connections are being closed")?;
        for (owner, account) in &self.accounts {
            match owner {
                Some(user) => write!(f, ", {} of user {user}", account.held())?,
                None => write!(f, ", {} of users who may not connect", account.held())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::scrubber::message::Order as Sent;

    const OWNER: Owner = Some(1000);

    /// Returns connections that were refused, and the process that has the first of them.
    fn refusals(room: usize) -> (Refusals, OwnedFd) {
        let mut refusals = Refusals::new(room);
        let (near, far) = datagram::pair().unwrap();
        refuse(&mut refusals);
        refusals.order(|| Some(1));
        refusals.add(1, near);
        (refusals, far)
    }

    fn refuse(refusals: &mut Refusals) {
        let (connection, _) = UnixStream::pair().unwrap();
        refusals.refuse(OWNER, connection.into(), Refusal::Quota, "too many");
    }

    fn next(process: &OwnedFd) -> Option<Sent> {
        let (bytes, _) = datagram::receive(process, false).ok()??;
        Sent::decode(&bytes)
    }

    #[test]
    fn a_slow_process_gets_each_order_with_its_release() {
        // The first process exits while the second one keeps connections.
        let (mut refusals, _first) = refusals(1 << 20);
        let (near, process) = datagram::pair().unwrap();
        refuse(&mut refusals);
        refusals.order(|| Some(2));
        refusals.add(2, near);
        let (mut orders, mut releases, mut ends) = (0, 0, false);
        let mut take = || {
            match next(&process) {
                Some(Sent::Do { work, ticket }) => {
                    orders += 1;
                    ends |= work == Work::End;
                    let done = Done { ticket, error: 0 };
                    datagram::send(&process, &done.encode(), &[], false).unwrap();
                }
                Some(Sent::Released) => releases += 1,
                None => return None,
            }
            Some((orders, releases, ends))
        };
        // More connections than the socket has room for.
        for round in 0..3000 {
            refuse(&mut refusals);
            if round % 3 == 0 {
                take();
            }
        }
        refusals.reaped(1);
        let mut last = None;
        for _ in 0..3000 {
            refusals.try_again(Instant::now() + AGAIN);
            while let Some(taken) = take() {
                last = Some(taken);
            }
        }
        let (orders, releases, ends) = last.unwrap();
        assert_eq!(orders, releases);
        assert!(ends, "it was never ordered to end");
    }

    #[test]
    fn a_user_who_is_refused_without_end_gets_no_more_sentences() {
        // The first process exits while the second one has the connections.
        let (mut refusals, _first) = refusals(1 << 20);
        let (near, process) = datagram::pair().unwrap();
        refuse(&mut refusals);
        refusals.order(|| Some(2));
        refusals.add(2, near);
        let (mut sentences, mut connections) = (0, 0);
        for _ in 0..3000 {
            refuse(&mut refusals);
            refusals.try_again(Instant::now() + AGAIN);
            while let Ok(Some((bytes, files))) = datagram::receive(&process, false) {
                let Some(Sent::Do { work, ticket }) = Sent::decode(&bytes) else {
                    continue;
                };
                connections += files.len();
                if matches!(work, Work::Refuse { reason, .. } if !reason.is_empty()) {
                    sentences += files.len();
                }
                let done = Done { ticket, error: 0 };
                datagram::send(&process, &done.encode(), &[], false).unwrap();
            }
        }
        assert!(connections > 2000, "{connections}");
        // The first process got one.
        assert_eq!(sentences, 999);
        // Another user still gets one.
        let (connection, _) = UnixStream::pair().unwrap();
        refusals.refuse(None, connection.into(), Refusal::Quota, "too many");
        let (near, other) = datagram::pair().unwrap();
        refusals.order(|| Some(9));
        refusals.add(9, near);
        let sent = next(&other);
        let is_said =
            |work: &Work| matches!(work, Work::Refuse { reason, .. } if reason == "too many");
        assert!(
            matches!(&sent, Some(Sent::Do { work, .. }) if is_said(work)),
            "{sent:?}"
        );
    }

    #[test]
    fn a_killed_process_that_never_exits_is_replaced() {
        let (mut refusals, process) = refusals(1 << 20);
        // Its socket is closed, and its exit waits for a descriptor that it keeps.
        drop(process);
        let (near, second) = datagram::pair().unwrap();
        refuse(&mut refusals);
        refusals.try_again(Instant::now() + AGAIN);
        refusals.order(|| Some(2));
        refusals.add(2, near);
        assert_eq!(refusals.here(), 0, "no process takes the connection");
        let mut orders = 0;
        while let Some(sent) = next(&second) {
            orders += usize::from(matches!(sent, Sent::Do { .. }));
        }
        assert_eq!(orders, 1);
    }

    #[test]
    fn a_process_without_room_delays_no_other_owner() {
        // The first process exits while the second one keeps connections, and answers nothing.
        let (mut refusals, _first) = refusals(1 << 20);
        let (near, _slow) = datagram::pair().unwrap();
        refuse(&mut refusals);
        refusals.order(|| Some(2));
        refusals.add(2, near);
        for _ in 0..2 * WINDOW {
            refuse(&mut refusals);
        }
        refusals.try_again(Instant::now() + AGAIN);
        assert!(refusals.again.is_some(), "the first has room");
        let (connection, _) = UnixStream::pair().unwrap();
        refusals.refuse(None, connection.into(), Refusal::Quota, "too many");
        let mut orders = 0;
        refusals.order(|| {
            orders += 1;
            Some(9)
        });
        assert_eq!(orders, 1);
    }

    #[test]
    fn a_process_that_never_exits_leaves_room_for_further_connections() {
        const ROOM: usize = 10;
        let (mut refusals, first) = refusals(ROOM);
        let mut ticket = 1;
        let mut processes = vec![first];
        // Each keeps what it gets, and none exits.
        for _ in 0..10 * ROOM {
            refuse(&mut refusals);
            refusals.order(|| {
                ticket += 1;
                Some(ticket)
            });
            if processes.len() < usize::try_from(ticket).unwrap() {
                let (near, far) = datagram::pair().unwrap();
                refusals.add(ticket, near);
                processes.push(far);
            }
            for process in &processes {
                while let Some(sent) = next(process) {
                    if let Sent::Do { ticket, .. } = sent {
                        let done = Done {
                            ticket,
                            error: KEPT,
                        };
                        datagram::send(process, &done.encode(), &[], false).unwrap();
                    }
                }
            }
        }
        assert_eq!(refusals.here(), 0);
        assert!((10..14).contains(&processes.len()), "{}", processes.len());
        // All of them have closed their sockets, and are not reaped.
        processes.clear();
        refusals.serve(OWNER);
        let exiting = &refusals.accounts[&OWNER].exiting;
        assert!(exiting.len() >= 10);
        assert!(exiting.iter().all(|keeper| keeper.socket.is_none()));
        for ticket in 1..=ticket {
            refusals.reaped(ticket);
        }
        assert!(refusals.accounts.is_empty());
    }
}
