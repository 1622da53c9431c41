//! Usage of the backend by its tenants.
//!
//! A client of `wormhole stats` connects as a launcher does, and sends `AskUsage` instead of a window. Its process asks the
//! supervisor, which has the tenants' processes count and collects their answers. Root and the supervisor's own user see
//! all tenants, other users their own. A process that has asked can have no window any more, and one that has a window
//! cannot ask: a guest that has taken over its tenant's process learns of no other tenant.
//!
//! Launchers know the number of exits of their guests' vCPUs. A tenant's process reports its counts at once, asks its
//! launcher, and reports again. While the launcher owes an answer, the last known number stays.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use event_manager::EventOps;
use wormhole_link::channel::ChannelError;
use wormhole_link::usage::{TenantUsage, Usage};
use wormhole_ring::control::{Exits, Message};

use super::pair::{Order, Report};
use super::tenant_loop::TenantLoop;
use super::{Id, Supervisor};

/// Time in which tenants' processes count. The answer has the last known figures of one that takes longer.
const LIMIT: Duration = Duration::from_millis(500);
/// Largest number of bytes in a part of an answer.
const PART: usize = 4096;

/// A client's question that is not answered yet.
#[derive(Debug)]
struct Question {
    client: Id,
    /// Tenants that have not counted yet.
    waits: BTreeSet<Id>,
    end: Instant,
}

/// The open questions.
#[derive(Debug, Default)]
pub(super) struct Questions(Vec<Question>);

impl Questions {
    /// Returns the time at which the next question is answered at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        self.0.iter().map(|question| question.end).min()
    }
}

/// Usage of a tenant, as its process has told it last.
#[derive(Debug, Default)]
pub(super) struct Told {
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

impl Told {
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

/// Splits the text of an answer into parts.
fn parts(text: &str) -> Vec<Order> {
    let (mut rest, mut orders) = (text, Vec::new());
    loop {
        let (part, after) = rest.split_at(rest.floor_char_boundary(PART));
        let is_last = after.is_empty();
        let part = part.to_owned();
        orders.push(Order::Usage { is_last, part });
        if is_last {
            return orders;
        }
        rest = after;
    }
}

impl Supervisor {
    /// Returns the tenants that a client may see.
    fn seen_by(&self, client: Id) -> Vec<Id> {
        let Some(user) = self.tenants.get(&client).map(|client| client.user) else {
            return Vec::new();
        };
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
        if let Some(tenant) = self.tenants.get_mut(&client) {
            if tenant.has_window {
                return Err("it asks for the usage of others and has a window");
            }
            tenant.is_client = true;
        }
        if self.questions.0.iter().any(|one| one.client == client) {
            return Err("it asks for usage twice");
        }
        let seen = self.seen_by(client);
        for id in &seen {
            if let Some(tenant) = self.tenants.get_mut(id)
                && tenant.told.owed != Owed::All
            {
                tenant.told.owed = Owed::All;
                tenant.order(&Order::CountUsage);
            }
        }
        self.questions.0.push(Question {
            client,
            waits: seen.into_iter().collect(),
            end: Instant::now() + LIMIT,
        });
        self.answer_questions(Instant::now());
        Ok(())
    }

    /// Handles a tenant's usage.
    pub(super) fn usage_told(&mut self, id: Id, usage: Usage, is_last: bool) {
        if let Some(tenant) = self.tenants.get_mut(&id) {
            tenant.told.usage = usage;
            tenant.told.owed = match is_last {
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
        for question in &mut self.questions.0 {
            question.waits.remove(&id);
        }
        self.answer_questions(Instant::now());
    }

    /// Forgets a tenant or client whose process serves it no more.
    pub(super) fn forget_usage(&mut self, id: Id) {
        self.questions.0.retain(|question| question.client != id);
        self.await_no_more(id);
    }

    /// Answers the questions for which all tenants have counted, and those that have waited long.
    pub(super) fn answer_questions(&mut self, now: Instant) {
        let is_over = |question: &mut Question| question.waits.is_empty() || question.end <= now;
        let over: Vec<Question> = self.questions.0.extract_if(.., is_over).collect();
        for Question { client, .. } in over {
            let seen = self.seen_by(client);
            let usages = seen.iter().filter_map(|id| {
                let tenant = self.tenants.get(id)?;
                let since = tenant.told.since?;
                Some(TenantUsage {
                    tenant: *id,
                    user: tenant.user,
                    process: tenant.launcher,
                    seconds: now.saturating_duration_since(since).as_secs(),
                    is_current: tenant.told.owed != Owed::All,
                    usage: tenant.told.usage,
                })
            });
            // Numbers by name: nothing that cannot be written.
            let text = serde_json::to_string(&usages.collect::<Vec<_>>()).unwrap_or_default();
            if let Some(client) = self.tenants.get_mut(&client) {
                parts(&text).iter().for_each(|part| client.order(part));
            }
        }
    }
}

impl TenantLoop {
    /// Handles a client's question.
    ///
    /// # Errors
    /// The client has a window, or has not waited for the last answer.
    pub(super) fn usage_asked(&mut self, id: Id) -> Result<(), ChannelError> {
        let Some(tenant) = self.tenants.get_mut(&id) else {
            return Ok(());
        };
        if !tenant.begin_question() {
            if self.may_log(id) {
                tracing::warn!("tenant {id} asks for usage beside a window or another question");
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

    /// Reports the usage, and asks the launcher for its guest's exits unless it cannot answer.
    pub(super) fn count_usage(&mut self, ops: &mut EventOps<'_>) {
        let Some((id, tenant)) = self.tenants.iter_mut().next() else {
            return;
        };
        let id = *id;
        let asks = tenant.is_attached() && !std::mem::replace(&mut tenant.owes_exits, true);
        self.report_usage(id, !asks);
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
    pub(super) fn exits_told(&mut self, id: Id, exits: Exits) -> Result<(), ChannelError> {
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
        self.report_usage(id, true);
        Ok(())
    }

    fn report_usage(&self, id: Id, is_last: bool) {
        let Some(tenant) = self.tenants.get(&id) else {
            return;
        };
        let mut usage = Usage {
            vm_exits: tenant.exits,
            ..tenant.ended
        };
        for session in self.sessions.values().filter(|one| one.tenant == id) {
            session.add_usage(&mut usage);
        }
        self.supervisor.report(&Report::Usage { usage, is_last });
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
    fn a_long_answer_is_sent_in_parts() {
        let text = format!("x{}", "ä".repeat(PART));
        let orders = parts(&text);
        assert!(orders.len() > 2);
        let mut whole = String::new();
        for order in &orders {
            let Order::Usage { is_last, part } = order else {
                panic!("{order:?}");
            };
            assert!(part.len() <= PART);
            assert_eq!(*is_last, Some(order) == orders.last());
            whole.push_str(part);
        }
        assert_eq!(whole, text);
        let empty = Order::Usage {
            is_last: true,
            part: String::new(),
        };
        assert_eq!(parts(""), [empty]);
    }
}
