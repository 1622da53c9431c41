//! Usage of the backend by its tenants.
//!
//! A client of `wormhole stats` connects as a launcher does, and sends `AskUsage` instead of a window. Its process asks the
//! supervisor, which has the tenants' processes count and collects their answers. Root and the supervisor's own user see
//! all tenants, other users their own. A process that has asked can have no window any more, and one that has a window
//! cannot ask that: a guest that has taken over its tenant's process learns of no other tenant.
//!
//! A launcher with a window can send `AskUsage` as well. Its tenant's process then sends it the usage of that tenant alone. In
//! a backend VM all launchers are one process, so the monitor outside asks each tenant in this way for its own clients.
//!
//! Each count takes time of the supervisor and of the tenants' processes. So the questions of a user that come within
//! [`INTERVAL`] of its last count wait for the next one, and share it.
//!
//! Launchers know the number of exits of their guests' vCPUs. A tenant's process reports its counts at once, asks its
//! launcher, and reports again. While the launcher owes an answer, the last known number stays.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use event_manager::EventOps;
use wormhole_link::channel::ChannelError;
use wormhole_link::usage::{self, TenantUsage, Usage};
use wormhole_ring::control::{Exits, Message};

use super::pair::{Order, Report};
use super::tenant_loop::TenantLoop;
use super::{Id, Supervisor};

/// Time in which tenants' processes count. The answer has the last known figures of one that takes longer.
const LIMIT: Duration = Duration::from_millis(500);
/// Least time between two counts for one user, whatever its clients ask, and between two questions of a launcher for its
/// own tenant that are answered.
const INTERVAL: Duration = Duration::from_millis(100);

/// A client's question that is not answered yet.
#[derive(Debug)]
struct Question {
    client: Id,
    user: u32,
    /// The count that answers it, once it has begun.
    count: Option<Count>,
}

#[derive(Clone, Debug)]
struct Count {
    /// Tenants that have not counted yet.
    waits: BTreeSet<Id>,
    end: Instant,
}

/// The open questions.
#[derive(Debug, Default)]
pub(super) struct Questions {
    open: Vec<Question>,
    /// Start of the last count of each user, for [`INTERVAL`].
    begun: BTreeMap<u32, Instant>,
}

impl Questions {
    /// Returns the time at which the next question is answered at the latest, or the next count begins.
    pub fn deadline(&self) -> Option<Instant> {
        let times = self.open.iter().filter_map(|question| {
            let begun = self.begun.get(&question.user);
            match &question.count {
                Some(count) => Some(count.end),
                None => begun.map(|at| *at + INTERVAL),
            }
        });
        times.min()
    }

    /// Adds a client's question. Returns false if the client has another one.
    fn add(&mut self, client: Id, user: u32) -> bool {
        let is_first = self.open.iter().all(|question| question.client != client);
        if is_first {
            self.open.push(Question {
                client,
                user,
                count: None,
            });
        }
        is_first
    }

    /// Returns the users whose questions wait for a count that may begin.
    fn due(&mut self, now: Instant) -> BTreeSet<u32> {
        self.begun.retain(|_, at| now < *at + INTERVAL);
        let waiting = self.open.iter().filter(|one| one.count.is_none());
        let users = waiting.map(|question| question.user);
        users
            .filter(|user| !self.begun.contains_key(user))
            .collect()
    }

    /// Begins a count of these tenants for all questions of a user that wait for one.
    fn begin(&mut self, user: u32, waits: &BTreeSet<Id>, now: Instant) {
        self.begun.insert(user, now);
        let count = Count {
            waits: waits.clone(),
            end: now + LIMIT,
        };
        for question in self.open.iter_mut().filter(|one| one.user == user) {
            question.count.get_or_insert_with(|| count.clone());
        }
    }

    /// Waits no longer for a tenant's usage.
    fn await_no_more(&mut self, tenant: Id) {
        for count in self.open.iter_mut().filter_map(|one| one.count.as_mut()) {
            count.waits.remove(&tenant);
        }
    }

    /// Removes the questions for which all tenants have counted, and those that have waited long. Returns their clients
    /// by user.
    fn take_over(&mut self, now: Instant) -> BTreeMap<u32, Vec<Id>> {
        let is_over = |question: &mut Question| {
            let count = question.count.as_ref();
            count.is_some_and(|count| count.waits.is_empty() || count.end <= now)
        };
        let mut over = BTreeMap::<_, Vec<_>>::new();
        for question in self.open.extract_if(.., is_over) {
            over.entry(question.user).or_default().push(question.client);
        }
        over
    }
}

/// Usage of a tenant, as its process has reported it last.
#[derive(Debug, Default)]
pub(super) struct LastUsage {
    usage: Usage,
    owed: Owed,
    /// Time of the attachment.
    since: Option<Instant>,
}

/// Part of an answer that a tenant's process still owes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Owed {
    #[default]
    Nothing,
    /// The exits of the guest, which its launcher knows.
    Exits,
    All,
}

impl LastUsage {
    /// Starts with the tenant's attachment.
    pub fn attached() -> Self {
        Self {
            since: Some(Instant::now()),
            ..Self::default()
        }
    }
}

/// Returns whether a user may see the usage of a tenant of another one.
fn may_see(user: u32, own: u32, tenant: u32) -> bool {
    user == 0 || user == own || user == tenant
}

impl Supervisor {
    /// Returns the tenants that a user may see.
    fn seen_by(&self, user: u32) -> BTreeSet<Id> {
        let listener = self.acceptor.listener.as_ref();
        let own = listener.map_or(0, |listener| listener.own_user());
        let seen = self
            .tenants
            .iter()
            .filter(|(_, tenant)| tenant.has_window && may_see(user, own, tenant.user));
        seen.map(|(id, _)| *id).collect()
    }

    /// Handles a client's question.
    ///
    /// # Errors
    /// The client's process has a window, or has not waited for the last answer.
    pub(super) fn ask_usage(&mut self, client: Id) -> Result<(), &'static str> {
        let Some(tenant) = self.tenants.get_mut(&client) else {
            return Ok(());
        };
        if tenant.has_window {
            return Err("it asks for the usage of others and has a window");
        }
        tenant.is_client = true;
        if !self.questions.add(client, tenant.user) {
            return Err("it asks for usage twice");
        }
        self.answer_questions(Instant::now());
        Ok(())
    }

    /// Has the tenants counted for whom a user asks.
    fn begin_count(&mut self, user: u32, now: Instant) {
        let seen = self.seen_by(user);
        for id in &seen {
            if let Some(tenant) = self.tenants.get_mut(id)
                && tenant.last_usage.owed != Owed::All
            {
                tenant.last_usage.owed = Owed::All;
                tenant.order(&Order::CountUsage);
            }
        }
        self.questions.begin(user, &seen, now);
    }

    /// Handles a tenant's usage.
    pub(super) fn usage_reported(&mut self, id: Id, usage: Usage, is_last: bool) {
        if let Some(tenant) = self.tenants.get_mut(&id) {
            tenant.last_usage.usage = usage;
            tenant.last_usage.owed = match is_last {
                true => Owed::Nothing,
                false => Owed::Exits,
            };
        }
        if is_last {
            self.await_no_more(id);
        }
    }

    /// Waits no longer for a tenant's usage.
    fn await_no_more(&mut self, id: Id) {
        self.questions.await_no_more(id);
        self.answer_questions(Instant::now());
    }

    /// Forgets a tenant or client whose process serves it no more.
    pub(super) fn forget_usage(&mut self, id: Id) {
        self.questions.open.retain(|one| one.client != id);
        self.await_no_more(id);
    }

    /// Begins the counts that are due, and answers the questions whose counts are over.
    pub(super) fn answer_questions(&mut self, now: Instant) {
        for user in self.questions.due(now) {
            self.begin_count(user, now);
        }
        for (user, clients) in self.questions.take_over(now) {
            let answer = self.usages(user, now);
            for client in clients {
                if let Some(client) = self.tenants.get_mut(&client) {
                    for (more, part) in usage::parts(&answer) {
                        let (is_last, part) = (more == 0, part.to_owned());
                        client.order(&Order::Usage { is_last, part });
                    }
                }
            }
        }
    }

    /// Returns the usage of the tenants that a user may see, as JSON.
    fn usages(&self, user: u32, now: Instant) -> String {
        let seen = self.seen_by(user);
        let usages = seen.iter().filter_map(|id| {
            let tenant = self.tenants.get(id)?;
            let since = tenant.last_usage.since?;
            Some(TenantUsage {
                tenant: *id,
                user: tenant.user,
                process: tenant.launcher,
                seconds: now.saturating_duration_since(since).as_secs(),
                is_current: tenant.last_usage.owed != Owed::All,
                usage: tenant.last_usage.usage,
            })
        });
        // Numbers by name: nothing that cannot be written.
        serde_json::to_string(&usages.collect::<Vec<_>>()).unwrap_or_default()
    }
}

impl TenantLoop {
    /// Handles the question of a client, or of a launcher for its own tenant.
    ///
    /// # Errors
    /// The client has not waited for the last answer, or a launcher does not read its answers.
    pub(super) fn usage_asked(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
    ) -> Result<(), ChannelError> {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return Ok(());
        };
        if tenant.window.is_some() {
            let now = Instant::now();
            // The process has reported it a moment ago.
            if tenant.asked_usage.is_none_or(|at| at + INTERVAL <= now) {
                tenant.asked_usage = Some(now);
                tenant.asks_usage = true;
                self.tell_usage(ops, id);
            }
            return Ok(());
        }
        if !tenant.begin_question() {
            if self.may_log(id) {
                tracing::warn!("tenant {id} asks for usage beside another question");
            }
            return Err(ChannelError::Cut);
        }
        self.supervisor.report(&Report::AskUsage);
        Ok(())
    }

    /// Passes a part of the supervisor's answer on to the client.
    pub(super) fn usage_answered(&mut self, ops: &mut EventOps<'_>, is_last: bool, part: &str) {
        let mut tenants = self.tenants.iter_mut();
        let Some((id, client)) = tenants.find(|(_, tenant)| tenant.awaits_usage()) else {
            return;
        };
        let id = *id;
        if is_last {
            client.end_question();
        }
        let message = Message::Usage {
            more: u32::from(!is_last),
            tenants: part,
        };
        if self.tell_tenant(ops, id, &message, Vec::new()).is_err() {
            self.cut_off(id);
        }
    }

    /// Handles the supervisor's order to count.
    pub(super) fn count_usage(&mut self, ops: &mut EventOps<'_>) {
        let Some((id, tenant)) = self.tenants.iter_mut().next() else {
            return;
        };
        tenant.owes_usage = true;
        let id = *id;
        self.tell_usage(ops, id);
    }

    /// Tells the usage, and asks the launcher for its guest's exits unless it cannot answer.
    fn tell_usage(&mut self, ops: &mut EventOps<'_>, id: Id) {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        let asks = tenant.takes_questions() && !std::mem::replace(&mut tenant.owes_exits, true);
        self.report_usage(ops, id, !asks);
        if asks
            && self
                .tell_tenant(ops, id, &Message::AskExits, Vec::new())
                .is_err()
        {
            self.cut_off(id);
        }
    }

    /// Handles a launcher's answer.
    ///
    /// # Errors
    /// The launcher was not asked.
    pub(super) fn exits_reported(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        exits: Exits,
    ) -> Result<(), ChannelError> {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return Ok(());
        };
        if !std::mem::take(&mut tenant.owes_exits) {
            if self.may_log(id) {
                tracing::warn!("tenant {id} tells of its guest's exits without a question");
            }
            return Err(ChannelError::Cut);
        }
        tenant.exits = (exits.is_known == 1).then_some(exits.count);
        self.report_usage(ops, id, true);
        Ok(())
    }

    /// Tells the usage to those that wait for it: the supervisor, and the launcher.
    fn report_usage(&mut self, ops: &mut EventOps<'_>, id: Id, is_last: bool) {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return;
        };
        let (owes, asks) = (tenant.owes_usage, tenant.asks_usage);
        tenant.owes_usage &= !is_last;
        tenant.asks_usage &= !is_last;
        let mut usage = Usage {
            vm_exits: tenant.exits,
            ..tenant.ended
        };
        for session in self.sessions.values().filter(|one| one.tenant == id) {
            session.add_usage(&mut usage);
        }
        if owes {
            let usage = Box::new(usage);
            self.supervisor.report(&Report::Usage { usage, is_last });
        }
        let message = Message::Usage {
            more: u32::from(!is_last),
            // Numbers by name: nothing that cannot be written.
            tenants: &serde_json::to_string(&usage).unwrap_or_default(),
        };
        if asks && self.tell_tenant(ops, id, &message, Vec::new()).is_err() {
            self.cut_off(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_sees_its_own_tenants_and_the_operator_all() {
        let (operator, user, other) = (1000, 1001, 1002);
        let may = |user, tenant| may_see(user, operator, tenant);
        assert!(may(user, user) && may(operator, user) && may(0, user));
        assert!(!may(user, other) && !may(user, operator) && !may(user, 0));
    }

    #[test]
    fn a_user_that_asks_in_a_loop_has_one_count_an_interval() {
        let (user, other, start) = (1, 2, Instant::now());
        let (mut questions, mut counts, mut answers) = (Questions::default(), 0, 0);
        let tenants = BTreeSet::from([7]);
        for time in 0..1000 {
            let now = start + INTERVAL * time / 100;
            // Clients whose last question was answered. All others wait.
            for client in 100..110 {
                questions.add(client, user);
            }
            for user in questions.due(now) {
                counts += 1;
                questions.begin(user, &tenants, now);
            }
            questions.await_no_more(7);
            let over = questions.take_over(now);
            answers += over.values().map(Vec::len).sum::<usize>();
            assert!(questions.deadline().is_none_or(|next| next > now));
        }
        assert_eq!((counts, answers), (10, 100));
        let last = start + INTERVAL * 999 / 100;
        assert!(questions.add(1, other) && !questions.add(1, other));
        assert_eq!(questions.due(last), [other].into(), "others do not wait");
        assert_eq!(questions.due(start + INTERVAL * 10), [user, other].into());
    }

    #[test]
    fn a_count_that_takes_long_is_answered_in_time() {
        let (user, start) = (1, Instant::now());
        let mut questions = Questions::default();
        questions.add(100, user);
        assert_eq!(questions.due(start), [user].into());
        questions.begin(user, &[7, 8].into(), start);
        questions.await_no_more(7);
        assert!(questions.take_over(start).is_empty());
        assert_eq!(questions.deadline(), Some(start + LIMIT));
        questions.add(101, user);
        assert_eq!(questions.deadline(), Some(start + INTERVAL));
        questions.begin(user, &[8].into(), start + INTERVAL);
        let over = questions.take_over(start + LIMIT);
        assert_eq!(over, [(user, vec![100])].into(), "the later one waits on");
    }
}
