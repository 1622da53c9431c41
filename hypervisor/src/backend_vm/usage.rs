//! Usage of a backend VM by its tenants, for `wormhole stats` and `wormhole ps`.
//!
//! The supervisor in the VM sees one launcher, the relay. So a client's question is not passed to it. Each tenant's stream
//! brings the question for that tenant alone, and its answer. Clients are root and the user of the VM, who see all tenants. The process and the user of a tenant are those of the
//! launcher outside, as the kernel tells.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wormhole_link::usage::{TenantUsage, Usage};
use wormhole_link::users::{Peer, peer_of};
use wormhole_lock::{Condvar, Mutex};
use wormhole_ring::control::Message;

use super::send_within;
use crate::backend::{BackendError, send};

/// Time in which tenants count. The answer has the last known figures of one that takes longer.
const LIMIT: Duration = Duration::from_millis(500);
/// Time for which an answer also serves further questions. A supervisor answers no more often than half of it.
pub const FRESH: Duration = Duration::from_millis(200);
/// Pause before a tenant is asked whose stream takes no question.
const AGAIN: Duration = Duration::from_millis(10);

/// The stream to the relay of a slot. Messages of several threads do not mix.
#[derive(Debug)]
pub struct Relay {
    stream: UnixStream,
    sending: Mutex<()>,
}

impl Relay {
    /// Takes the stream of a slot's offer.
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            sending: Mutex::default(),
        }
    }

    /// Returns the stream.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a message, if the stream has room for it in time.
    pub fn send(&self, message: &Message<'_>, limit: Duration) -> Result<(), BackendError> {
        let _sending = self.sending.lock();
        send_within(&self.stream, message, limit)
    }

    /// Sends a question. Returns false if the stream does not take one at the moment.
    fn ask(&self) -> bool {
        let mut room = [PollFd::new(&self.stream, PollFlags::OUT)];
        let Some(_sending) = self.sending.try_lock() else {
            return false;
        };
        // The tenant of a stream that has ended leaves.
        poll(&mut room, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
            && send(&self.stream, &Message::AskUsage, &[]).is_ok()
    }
}

#[derive(Debug)]
struct Tenant {
    /// Number among all tenants that have been here.
    number: u64,
    relay: Arc<Relay>,
    launcher: Peer,
    since: Instant,
    usage: Usage,
    /// Time of the question that is not answered.
    asked: Option<Instant>,
    /// Time of the last answer, and of the last one with the exits of the guest.
    answer: Option<Instant>,
    complete_answer: Option<Instant>,
}

/// The tenants by their slots.
#[derive(Debug, Default)]
struct Tenants {
    by_slot: BTreeMap<u32, Tenant>,
    entered: u64,
}

/// The tenants of a backend VM and their usage.
#[derive(Debug, Default)]
pub struct Usages {
    tenants: Mutex<Tenants>,
    changed: Condvar,
}

impl Usages {
    /// Adds the tenant of a slot, whose window is attached.
    pub fn enter(&self, slot: u32, launcher: &UnixStream, relay: &Arc<Relay>) {
        // As for a process without a number.
        let unknown = Peer {
            user: u32::MAX,
            process: 0,
        };
        let mut tenants = self.tenants.lock();
        tenants.entered += 1;
        let tenant = Tenant {
            number: tenants.entered,
            relay: Arc::clone(relay),
            launcher: peer_of(launcher).unwrap_or(unknown),
            since: Instant::now(),
            usage: Usage::default(),
            asked: None,
            answer: None,
            complete_answer: None,
        };
        tenants.by_slot.insert(slot, tenant);
    }

    /// Removes the tenant of a slot.
    pub fn leave(&self, slot: u32) {
        self.tenants.lock().by_slot.remove(&slot);
        self.changed.notify_all();
    }

    /// Takes the answer of a slot's tenant. The VM may send one without a question, or text that is no answer.
    pub fn answered(&self, slot: u32, more: u32, text: &str) {
        if let Ok(usage) = serde_json::from_str(text)
            && let Some(tenant) = self.tenants.lock().by_slot.get_mut(&slot)
        {
            tenant.usage = usage;
            tenant.asked = None;
            tenant.answer = Some(Instant::now());
            if more == 0 {
                tenant.complete_answer = tenant.answer;
            }
        }
        self.changed.notify_all();
    }

    /// Asks the tenants and waits for their answers. Clients that ask at the same time share them.
    pub fn ask(&self) -> Vec<TenantUsage> {
        let begin = Instant::now();
        let is_since = |time: Option<Instant>| time.is_some_and(|time| begin < time + FRESH);
        let end = begin + LIMIT;
        let mut tenants = self.tenants.lock();
        // Tenants that enter later are the next client's.
        let last = tenants.entered;
        loop {
            let now = Instant::now();
            let mut left = end.saturating_duration_since(now);
            let mut is_complete = true;
            for tenant in tenants.by_slot.values_mut() {
                if tenant.number > last || is_since(tenant.complete_answer) {
                    continue;
                }
                is_complete = false;
                let is_asked = tenant.asked.is_some_and(|at| now < at + LIMIT);
                if is_since(tenant.answer) || is_asked {
                    continue;
                }
                match tenant.relay.ask() {
                    true => tenant.asked = Some(now),
                    false => left = left.min(AGAIN),
                }
            }
            if is_complete || end <= now {
                break;
            }
            tenants = self.changed.wait_timeout(tenants, left);
        }
        let seen = tenants.by_slot.iter();
        let seen = seen.filter(|(_, tenant)| tenant.number <= last);
        let usage = |(slot, tenant): (&u32, &Tenant)| TenantUsage {
            tenant: *slot,
            user: tenant.launcher.user,
            process: tenant.launcher.process,
            seconds: tenant.since.elapsed().as_secs(),
            is_current: is_since(tenant.answer),
            usage: tenant.usage,
        };
        seen.map(usage).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::receive;

    /// A slot's tenant with its end of the stream, and its launcher's.
    fn enter(usages: &Usages, slot: u32) -> (UnixStream, UnixStream) {
        let (relay, there) = UnixStream::pair().unwrap();
        let (launcher, tenant) = UnixStream::pair().unwrap();
        usages.enter(slot, &tenant, &Arc::new(Relay::new(relay)));
        (there, launcher)
    }

    fn is_asked(relay: &UnixStream) -> bool {
        let mut body = Vec::new();
        matches!(
            receive(relay, &mut body),
            Ok(Some((Message::AskUsage, None)))
        )
    }

    fn text(requests: u64) -> String {
        let usage = Usage {
            requests,
            ..Usage::default()
        };
        serde_json::to_string(&usage).unwrap()
    }

    /// Requests of the tenants, and whether they are current.
    fn figures(usages: &[TenantUsage]) -> Vec<(u64, bool)> {
        let figures = usages
            .iter()
            .map(|one| (one.usage.requests, one.is_current));
        figures.collect()
    }

    #[test]
    fn each_tenant_is_asked_and_answers() {
        let usages = Usages::default();
        assert_eq!(usages.ask(), []);
        let relays = [3, 5].map(|slot| (slot, enter(&usages, slot)));
        let answers = std::thread::scope(|scope| {
            let asking = scope.spawn(|| usages.ask());
            for (slot, (relay, _)) in &relays {
                assert!(is_asked(relay));
                usages.answered(*slot, 1, &text(1));
                usages.answered(*slot, 0, &text(u64::from(*slot)));
            }
            asking.join().unwrap()
        });
        assert_eq!(figures(&answers), [(3, true), (5, true)]);
        let own = (rustix::process::geteuid().as_raw(), std::process::id());
        for usage in answers {
            assert_eq!((usage.user, u32::try_from(usage.process).unwrap()), own);
        }
        usages.leave(3);
        usages.answered(3, 0, &text(9));
        assert_eq!(usages.tenants.lock().by_slot.len(), 1);
    }

    #[test]
    fn a_tenant_that_does_not_answer_has_its_last_figures_for_each_client() {
        let usages = Usages::default();
        let (relay, _launcher) = enter(&usages, 0);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| usages.ask());
            assert!(is_asked(&relay));
            // It asks while the first one waits.
            let second = scope.spawn(|| usages.ask());
            for client in [first, second] {
                assert_eq!(figures(&client.join().unwrap()), [(0, false)]);
            }
        });
        usages.answered(0, 0, &text(4));
        std::thread::sleep(FRESH);
        // A stream that takes nothing blocks no client, and other text is no answer.
        let stream = Arc::clone(&usages.tenants.lock().by_slot[&0].relay);
        let sending = stream.sending.lock();
        usages.answered(0, 0, "[]");
        assert_eq!(figures(&usages.ask()), [(4, false)]);
        drop(sending);
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| usages.ask());
            assert!(is_asked(&relay), "it is asked again");
            usages.answered(0, 0, &text(5));
            assert_eq!(figures(&asking.join().unwrap()), [(5, true)]);
        });
    }

    #[test]
    fn an_answer_without_the_exits_is_current() {
        let usages = Usages::default();
        let (relay, _launcher) = enter(&usages, 0);
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| usages.ask());
            assert!(is_asked(&relay));
            usages.answered(0, 1, &text(7));
            assert_eq!(figures(&asking.join().unwrap()), [(7, true)]);
        });
    }
}
