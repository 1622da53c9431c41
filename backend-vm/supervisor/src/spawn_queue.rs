//! Queue of workers to start: their order, and how many start at once.
//!
//! A tenant that opens many sessions has one worker starting at a time. Users take turns, and each
//! user's tenants: a user with many tenants has no more turns than one with a single tenant. A user
//! without a worker that is starting does not wait for those of one other user, whatever their number.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::fmt;
use std::time::Instant;

use super::Id;
use super::spawner::Spawner;

/// Largest number of workers of one user that start at once, from the clone to the ready device.
const AT_ONCE: usize = 4;
/// Largest number of workers of all users that start at once. Beyond [`AT_ONCE`] each is its user's
/// only one.
const ALL_AT_ONCE: usize = 2 * AT_ONCE;

/// A session that wants a worker: its tenant, and its number there.
pub type Wanted = (Id, Id);

/// A requested worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    pub hash: u64,
    /// Environment beyond that of every worker.
    pub environment: Vec<(OsString, OsString)>,
    /// Session that waits for it, with its tenant; none for a spare.
    pub session: Option<Wanted>,
    /// Tenant that caused it; none for the supervisor itself.
    pub account: Option<Id>,
    /// User of that tenant.
    pub user: Option<u32>,
}

/// User and tenant that caused a start.
pub type Cause = (Option<u32>, Option<Id>);

impl Start {
    /// Returns whether it is a spare worker for a protocol.
    fn is_spare_of(&self, hash: u64) -> bool {
        self.session.is_none() && self.environment.is_empty() && self.hash == hash
    }

    fn cause(&self) -> Cause {
        (self.user, self.account)
    }
}

/// Requested workers that wait for their turn.
#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Start>,
    /// Last turn of each user.
    users: BTreeMap<Option<u32>, u64>,
    /// Last turn of each account.
    turns: BTreeMap<Option<Id>, u64>,
    turn: u64,
}

impl Queue {
    /// A new account has its first turn after the accounts that are waiting now: tenants that come and go without end
    /// would be served before one that stays.
    fn add(&mut self, start: Start) {
        self.users.entry(start.user).or_insert(self.turn);
        self.turns.entry(start.account).or_insert(self.turn);
        self.waiting.push_back(start);
    }

    /// Withdraws the spares of a protocol that were requested last, so that at most so many are left.
    fn withdraw_spares(&mut self, hash: u64, most: usize) {
        let mut spares = 0;
        self.waiting.retain(|start| {
            spares += usize::from(start.is_spare_of(hash));
            !start.is_spare_of(hash) || spares <= most
        });
    }

    /// Takes the next worker to start. The user whose last turn is the longest ago comes first, then the
    /// account of that user whose last turn is. `starting` holds the causes of starts under way.
    fn next(&mut self, starting: &[Cause]) -> Option<Start> {
        let limit = |user| match starting.iter().any(|(of, _)| *of == user) {
            true => AT_ONCE,
            false => ALL_AT_ONCE,
        };
        let has_none = |account| starting.iter().all(|(_, of)| *of != account);
        let index = self
            .waiting
            .iter()
            .enumerate()
            .filter(|(_, start)| has_none(start.account) && starting.len() < limit(start.user))
            .min_by_key(|(index, start)| {
                let user = self.users.get(&start.user).copied();
                (user, self.turns.get(&start.account).copied(), *index)
            })?
            .0;
        let start = self.waiting.remove(index)?;
        self.turn += 1;
        self.users.insert(start.user, self.turn);
        self.turns.insert(start.account, self.turn);
        Some(start)
    }
}

/// Starts of workers, from the request to the process.
#[derive(Debug)]
pub struct SpawnQueue {
    queue: Queue,
    underway: BTreeMap<u64, Start>,
    /// Time since which an order has been at the spawner without another one being finished.
    busy_since: Option<Instant>,
    next_ticket: u64,
    spawner: Spawner,
}

impl SpawnQueue {
    pub fn new(spawner: Spawner) -> Self {
        Self {
            queue: Queue::default(),
            underway: BTreeMap::new(),
            busy_since: None,
            next_ticket: 0,
            spawner,
        }
    }

    pub fn spawner(&self) -> &Spawner {
        &self.spawner
    }

    pub fn spawner_mut(&mut self) -> &mut Spawner {
        &mut self.spawner
    }

    pub fn add(&mut self, start: Start) {
        self.queue.add(start);
    }

    /// Drops requests of sessions and accounts that do not exist any more. Returns the dropped ones:
    /// a session may have claimed a spare.
    pub fn retain(
        &mut self,
        wanted: impl Fn(Wanted) -> bool,
        is_tenant: impl Fn(Id) -> bool,
    ) -> Vec<Start> {
        let waiting = std::mem::take(&mut self.queue.waiting).into_iter();
        let (kept, dropped) = waiting.partition(|start| start.session.is_none_or(&wanted));
        self.queue.waiting = kept;
        self.queue
            .turns
            .retain(|account, _| account.is_none_or(&is_tenant));
        dropped.into()
    }

    /// Returns the number of sessions that wait for a worker of a protocol which has no process yet.
    pub fn sessions(&self, hash: u64) -> usize {
        let starts = self.queue.waiting.iter().chain(self.underway.values());
        let sessions = starts.filter(|start| start.hash == hash && start.session.is_some());
        sessions.count()
    }

    /// Takes the next worker to [`order`](Self::order). `starting` holds the causes of workers that have a
    /// process and no device yet.
    pub fn next(&mut self, starting: impl Iterator<Item = Cause>) -> Option<Start> {
        let underway = self.underway.values().map(Start::cause);
        let starting: Vec<Cause> = starting.chain(underway).collect();
        self.queue.next(&starting)
    }

    /// Orders a process from the spawner.
    ///
    /// # Errors
    /// Returns the start if the spawner has ended.
    pub fn order(&mut self, start: Start) -> Result<(), Start> {
        let ticket = self.next_ticket;
        let lines: Vec<String> = start
            .environment
            .iter()
            .map(|(name, value)| format!("{}={}", name.display(), value.display()))
            .collect();
        if !self.spawner.start(ticket, start.hash, lines.join("\n")) {
            return Err(start);
        }
        self.underway.insert(ticket, start);
        self.busy_since.get_or_insert_with(Instant::now);
        self.next_ticket += 1;
        Ok(())
    }

    /// Removes a finished order.
    pub fn finish(&mut self, ticket: u64) -> Option<Start> {
        let start = self.underway.remove(&ticket);
        self.busy_since = (!self.underway.is_empty()).then(Instant::now);
        start
    }

    /// Removes all orders, because the spawner has ended.
    pub fn abandon(&mut self) -> Vec<Start> {
        self.busy_since = None;
        std::mem::take(&mut self.underway).into_values().collect()
    }

    /// Assigns a session a requested spare of one of the `accounts`. It is the session's tenant's from
    /// then on. Returns whether there was one.
    pub fn claim(&mut self, wanted: &Start, accounts: impl Fn(Option<Id>) -> bool) -> bool {
        let matches = |start: &Start| {
            start.session.is_none()
                && start.hash == wanted.hash
                && start.environment == wanted.environment
                && accounts(start.account)
        };
        if let Some(spare) = self.underway.values_mut().find(|start| matches(start)) {
            spare.clone_from(wanted);
            return true;
        }
        let spare = self.queue.waiting.iter().position(matches);
        if let Some(index) = spare {
            self.queue.waiting.remove(index);
            self.queue.add(wanted.clone());
        }
        spare.is_some()
    }

    /// Returns the accounts of the requested spare workers for this protocol.
    pub fn spares(&self, hash: u64) -> impl Iterator<Item = Option<Id>> {
        let spares = self.underway.values().chain(&self.queue.waiting);
        let spares = spares.filter(move |start| start.is_spare_of(hash));
        spares.map(|start| start.account)
    }

    /// Withdraws the spare workers for this protocol that were requested last and have no process yet, so that at most so
    /// many are left.
    pub fn withdraw_spares(&mut self, hash: u64, most: usize) {
        let underway = self.underway.values();
        let underway = underway.filter(|start| start.is_spare_of(hash)).count();
        self.queue
            .withdraw_spares(hash, most.saturating_sub(underway));
    }

    /// Returns whether a worker is requested on behalf of a user.
    pub fn has_any_of(&self, user: u32) -> bool {
        let mut requested = self.underway.values().chain(&self.queue.waiting);
        requested.any(|start| start.user == Some(user))
    }

    /// Returns whether a session of the account waits for the turn of its worker's start.
    pub fn has_waiting_session(&self, account: Option<Id>) -> bool {
        let mut waiting = self.queue.waiting.iter();
        waiting.any(|start| start.account == account && start.session.is_some())
    }

    /// Returns whether no worker is requested.
    pub fn is_empty(&self) -> bool {
        self.underway.is_empty() && self.queue.waiting.is_empty()
    }

    /// Drops all requests, and ends all workers.
    pub fn end(&mut self) {
        self.queue.waiting.clear();
        self.spawner.end();
    }
}

impl fmt::Display for SpawnQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (waiting, underway) = (self.queue.waiting.len(), self.underway.len());
        write!(
            f,
            "{waiting} workers wait for their start, {underway} are being started"
        )?;
        match self.busy_since {
            Some(since) => write!(f, ", one for {:.1} s", since.elapsed().as_secs_f64()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(accounts: &[Id]) -> Queue {
        let mut queue = Queue::default();
        for (session, account) in (0..).zip(accounts) {
            queue.add(start(*account, session));
        }
        queue
    }

    fn start(account: Id, session: Id) -> Start {
        Start {
            hash: 0,
            environment: Vec::new(),
            session: Some((account, session)),
            account: Some(account),
            user: Some(1000),
        }
    }

    fn cause(account: Id) -> Cause {
        start(account, 0).cause()
    }

    /// Returns the accounts served when each start is over before the next.
    fn one_by_one(queue: &mut Queue, count: usize) -> Vec<Id> {
        (0..count)
            .map(|_| queue.next(&[]).unwrap().account.unwrap())
            .collect()
    }

    #[test]
    fn what_was_requested_last_is_withdrawn_first() {
        let mut queue = queue(&[1]);
        for (account, hash) in [(2, 0), (3, 1), (4, 0), (5, 0)] {
            queue.add(Start {
                hash,
                session: None,
                ..start(account, 0)
            });
        }
        let accounts = |queue: &Queue| -> Vec<Id> {
            let starts = queue.waiting.iter();
            starts.filter_map(|start| start.account).collect()
        };
        queue.withdraw_spares(0, 1);
        assert_eq!(accounts(&queue), [1, 2, 3]);
        queue.withdraw_spares(0, 0);
        assert_eq!(accounts(&queue), [1, 3]);
    }

    #[test]
    fn a_tenant_has_one_worker_starting_at_a_time() {
        let mut queue = queue(&[1, 1, 1]);
        let first = queue.next(&[]).unwrap();
        assert_eq!(first.session, Some((1, 0)));
        assert_eq!(queue.next(&[cause(1)]), None);
        assert_eq!(queue.next(&[]).unwrap().session, Some((1, 1)));
    }

    #[test]
    fn so_many_start_at_once_and_no_more() {
        let mut queue = queue(&[9]);
        let others = [1, 2, 3, 4].map(cause);
        assert_eq!(queue.next(&others[..AT_ONCE]), None);
        assert!(queue.next(&others[..AT_ONCE - 1]).is_some());
    }

    #[test]
    fn a_user_who_starts_many_keeps_no_other_from_starting_one() {
        let mut queue = queue(&[9]);
        let mut starting = [1, 2, 3, 4].map(cause).to_vec();
        let other = |user: u32| {
            let start = start(user, 0);
            Start {
                user: Some(user),
                ..start
            }
        };
        for user in 2000.. {
            queue.add(other(user));
            match queue.next(&starting) {
                Some(start) => starting.push(start.cause()),
                None => break,
            }
            queue.add(start(user, 1));
            queue.waiting.back_mut().unwrap().user = Some(user);
            assert_eq!(queue.next(&starting), None, "a second one");
            queue.waiting.pop_back();
        }
        assert_eq!(starting.len(), ALL_AT_ONCE);
    }

    #[test]
    fn tenants_take_turns_however_much_one_of_them_wants() {
        let mut queue = queue(&[1, 1, 1, 1, 2, 2, 3]);
        assert_eq!(one_by_one(&mut queue, 7), [1, 2, 3, 1, 2, 1, 1]);
    }

    #[test]
    fn tenants_that_come_and_go_leave_one_that_stays_its_turns() {
        let mut queue = queue(&[1]);
        assert_eq!(one_by_one(&mut queue, 1), [1]);
        queue.add(start(1, 1));
        for newcomer in 2..10 {
            queue.add(start(newcomer, 0));
            if one_by_one(&mut queue, 1) == [1] {
                return;
            }
            queue.add(start(newcomer + 100, 0));
        }
        panic!("newcomers were served before it");
    }

    #[test]
    fn a_user_with_many_tenants_has_no_more_turns_than_one_with_a_single_tenant() {
        let mut queue = queue(&[1, 2, 3, 4, 5]);
        for session in 0..3 {
            let user = Some(2000);
            let start = start(9, session);
            queue.add(Start { user, ..start });
        }
        assert_eq!(one_by_one(&mut queue, 8), [1, 9, 2, 9, 3, 9, 4, 5]);
    }

    #[test]
    fn a_tenant_that_comes_back_for_more_has_had_its_turn() {
        let mut queue = queue(&[1, 2]);
        assert_eq!(one_by_one(&mut queue, 1), [1]);
        queue.waiting.push_front(Start {
            hash: 0,
            environment: Vec::new(),
            session: None,
            account: Some(1),
            user: Some(1000),
        });
        assert_eq!(one_by_one(&mut queue, 2), [2, 1]);
    }
}
