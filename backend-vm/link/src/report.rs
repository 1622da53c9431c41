//! Report of a session that has ended.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::counters::{Counter, Counts};

/// Summary of a session, as sent to the launcher.
///
/// The worker wrote the numbers, and the guest wrote `local_calls`; hostile ones may have written anything. No decision
/// depends on them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionReport {
    /// Index and generation of the session, as `index.generation`.
    pub session: String,
    /// Process id of the worker in the supervisor's PID namespace.
    pub worker: i32,
    /// Messages without an answer.
    pub records: u64,
    /// Messages that were answered.
    pub requests: u64,
    /// Fences submitted to the device.
    pub fences: u64,
    /// Chains of launches that the device got by one call each, and the launches in them.
    #[serde(default)]
    pub chains: u64,
    #[serde(default)]
    pub chained_launches: u64,
    /// Calls that the guest claims to have answered by itself.
    pub local_calls: u64,
    /// Number of executions of each message, by name.
    pub messages: BTreeMap<String, u64>,
    /// Number of executions of each class of message: record, request, blocking.
    pub classes: BTreeMap<String, u64>,
    /// Bytes from the guest to the device.
    pub bytes_in: u64,
    /// Bytes from the device to the guest.
    pub bytes_out: u64,
    /// Bytes from device memory to device memory.
    pub bytes_on_device: u64,
    /// Calls that were refused or failed.
    pub failures: u64,
    /// Handles that name no object.
    pub invalid_handles: u64,
    /// Ranges outside the session's memory.
    pub invalid_addresses: u64,
    /// Number of refusals of the guest's records, by reason; only reasons that occurred.
    pub refusals: BTreeMap<String, u64>,
    /// Number of times that the worker's executor went to sleep.
    pub parks: u64,
    /// Cause of the session's end, as a sentence.
    pub end: String,
}

impl SessionReport {
    /// Creates the report of `counts`. Messages that this build's table does not contain are named by their id.
    pub fn new(
        session: String,
        worker: i32,
        counts: &Counts,
        local_calls: u64,
        end: String,
    ) -> Self {
        let mut messages = BTreeMap::new();
        let mut classes: BTreeMap<String, u64> = BTreeMap::new();
        for (id, count) in counts.messages() {
            let known = wormhole_api::MESSAGES.iter().find(|info| info.id == id);
            let (name, class) = match known {
                Some(info) => (
                    info.name.to_owned(),
                    match info.kind {
                        wormhole_api::Kind::Record => "record",
                        wormhole_api::Kind::Request => "request",
                        wormhole_api::Kind::Blocking => "blocking",
                    },
                ),
                None => (format!("message {id}"), "unknown"),
            };
            messages.insert(name, count);
            let class = classes.entry(class.to_owned()).or_default();
            *class = class.saturating_add(count);
        }
        Self {
            session,
            worker,
            records: counts.get(Counter::Records),
            requests: counts.get(Counter::Requests),
            fences: counts.get(Counter::Fences),
            chains: counts.get(Counter::Chains),
            chained_launches: counts.get(Counter::ChainedLaunches),
            local_calls,
            messages,
            classes,
            bytes_in: counts.get(Counter::BytesToDevice),
            bytes_out: counts.get(Counter::BytesToHost),
            bytes_on_device: counts.get(Counter::BytesOnDevice),
            failures: counts.get(Counter::Failures),
            invalid_handles: counts.get(Counter::InvalidHandles),
            invalid_addresses: counts.get(Counter::InvalidAddresses),
            refusals: Counter::REFUSALS
                .iter()
                .map(|&(counter, reason)| (reason.to_owned(), counts.get(counter)))
                .filter(|(_, count)| *count > 0)
                .collect(),
            parks: counts.get(Counter::Parks),
            end,
        }
    }

    /// Adds the numbers of another report. Session, worker and end stay.
    fn add(&mut self, other: &Self) {
        let sums = [
            (&mut self.records, other.records),
            (&mut self.requests, other.requests),
            (&mut self.fences, other.fences),
            (&mut self.chains, other.chains),
            (&mut self.chained_launches, other.chained_launches),
            (&mut self.local_calls, other.local_calls),
            (&mut self.bytes_in, other.bytes_in),
            (&mut self.bytes_out, other.bytes_out),
            (&mut self.bytes_on_device, other.bytes_on_device),
            (&mut self.failures, other.failures),
            (&mut self.invalid_handles, other.invalid_handles),
            (&mut self.invalid_addresses, other.invalid_addresses),
            (&mut self.parks, other.parks),
        ];
        for (sum, more) in sums {
            *sum = sum.saturating_add(more);
        }
        let maps = [
            (&mut self.messages, &other.messages),
            (&mut self.classes, &other.classes),
            (&mut self.refusals, &other.refusals),
        ];
        for (sums, more) in maps {
            for (name, count) in more {
                let is_new = !sums.contains_key(name);
                let has_room = sums.len() < MOST_NAMES && name.len() <= LONGEST_NAME;
                let name = if is_new && !has_room { OTHERS } else { name };
                let sum = sums.entry(name.to_owned()).or_default();
                *sum = sum.saturating_add(*count);
            }
        }
    }
}

/// Number of the newest reports that are stored in full.
pub const KEPT: usize = 64;

/// Most names in each map of the sums, which is more than this build has.
const MOST_NAMES: usize = 1024;

/// Longest name in the sums, in bytes.
const LONGEST_NAME: usize = 64;

/// Name in the sums of all that have no room there.
const OTHERS: &str = "others";

/// Reports of a tenant's sessions, in bounded memory: the newest [`KEPT`] in full, and the sums of the earlier ones.
#[derive(Clone, Debug, Default)]
pub struct SessionReports {
    kept: VecDeque<SessionReport>,
    /// Number of earlier sessions, and the sums of their reports.
    earlier: Option<(u64, SessionReport)>,
}

impl SessionReports {
    pub fn push(&mut self, report: SessionReport) {
        self.kept.push_back(report);
        if self.kept.len() > KEPT
            && let Some(oldest) = self.kept.pop_front()
        {
            let (count, sums) = self.earlier.get_or_insert_default();
            *count += 1;
            sums.add(&oldest);
        }
    }

    /// Returns the number of sessions and the reports. If there are earlier sessions, the first report holds their
    /// sums.
    pub fn into_parts(self) -> (u64, Vec<SessionReport>) {
        let kept = self.kept.len() as u64;
        let (earlier, sums) = match self.earlier {
            Some((count, sums)) => {
                let session = format!("{count} earlier sessions");
                let end = "only their sums are kept".to_owned();
                (
                    count,
                    Some(SessionReport {
                        session,
                        end,
                        ..sums
                    }),
                )
            }
            None => (0, None),
        };
        (earlier + kept, sums.into_iter().chain(self.kept).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(number: u64) -> SessionReport {
        SessionReport {
            session: number.to_string(),
            records: 1,
            requests: u64::MAX,
            messages: BTreeMap::from([("LaunchKernel".to_owned(), number)]),
            end: "x".repeat(1 << 10),
            ..SessionReport::default()
        }
    }

    #[test]
    fn reports_of_any_number_of_sessions_are_bounded_and_add_up() {
        let count = 10 * KEPT as u64;
        let mut reports = SessionReports::default();
        for number in 0..count {
            reports.push(report(number));
        }
        let (sessions, parts) = reports.into_parts();
        assert_eq!((sessions, parts.len()), (count, KEPT + 1));
        let sum = |of: fn(&SessionReport) -> u64| parts.iter().map(of).sum::<u64>();
        assert_eq!(sum(|report| report.records), count);
        assert_eq!(
            sum(|report| report.messages["LaunchKernel"]),
            count * (count - 1) / 2
        );
        assert_eq!(
            parts[0].session,
            format!("{} earlier sessions", count - KEPT as u64)
        );
        assert_eq!(parts[0].requests, u64::MAX);
        assert_eq!(parts[KEPT].session, (count - 1).to_string());
    }

    #[test]
    fn names_that_a_hostile_backend_invents_take_no_more_room() {
        let count = 2 * MOST_NAMES as u64;
        let invented = |number: u64| {
            let long = "x".repeat(LONGEST_NAME);
            BTreeMap::from([(number.to_string(), 1), (format!("{long}{number}"), 1)])
        };
        let mut reports = SessionReports::default();
        for number in 0..count {
            reports.push(SessionReport {
                messages: invented(number),
                classes: invented(number),
                refusals: invented(number),
                ..report(number)
            });
        }
        let (_, parts) = reports.into_parts();
        let sums = &parts[0];
        for names in [&sums.messages, &sums.classes, &sums.refusals] {
            assert!(names.len() <= MOST_NAMES + 1, "{}", names.len());
            assert!(names.keys().all(|name| name.len() <= LONGEST_NAME));
            let all: u64 = names.values().sum();
            assert_eq!(all, 2 * (count - KEPT as u64));
        }
    }

    #[test]
    fn few_reports_are_kept_as_they_came() {
        let mut reports = SessionReports::default();
        reports.push(report(1));
        reports.push(report(2));
        let (sessions, parts) = reports.into_parts();
        assert_eq!((sessions, parts), (2, vec![report(1), report(2)]));
    }
}
