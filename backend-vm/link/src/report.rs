//! What is told of a session when it has ended.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::counters::{Counter, Counts};

/// A session's summary, as it goes to the launcher.
///
/// The numbers are the worker's own, and `local_calls` the guest's: a hostile one may have written
/// anything there. Nothing is decided by them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionReport {
    /// The session's number and generation, as `index.generation`.
    pub session: String,
    /// The worker's process number in the supervisor's PID namespace.
    pub worker: i32,
    /// Messages that nobody waited for.
    pub records: u64,
    /// Messages that were answered.
    pub requests: u64,
    /// Fences handed to the device.
    pub fences: u64,
    /// Calls that the guest says it answered by itself.
    pub local_calls: u64,
    /// How often each message was executed, by name.
    pub messages: BTreeMap<String, u64>,
    /// How often each class of message was executed: record, request, blocking.
    pub classes: BTreeMap<String, u64>,
    /// Bytes from the guest to the device.
    pub bytes_in: u64,
    /// Bytes from the device to the guest.
    pub bytes_out: u64,
    /// Bytes from device memory to device memory.
    pub bytes_on_device: u64,
    /// Calls that were refused or failed.
    pub failures: u64,
    /// Handles that named nothing.
    pub invalid_handles: u64,
    /// Ranges outside everything the session held.
    pub invalid_addresses: u64,
    /// How often something the guest wrote was refused, by reason; those that occurred.
    pub refusals: BTreeMap<String, u64>,
    /// How often the worker's executor went to sleep.
    pub parks: u64,
    /// Why the session ended, in a sentence.
    pub end: String,
}

impl SessionReport {
    /// The report of `counts`; messages that this build's table does not know go by their number.
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
                let sum = sums.entry(name.clone()).or_default();
                *sum = sum.saturating_add(*count);
            }
        }
    }
}

/// Reports that are kept in full, the newest ones.
pub const KEPT: usize = 64;

/// The reports of a tenant's sessions, in memory that does not grow with their number: the newest [`KEPT`] in full, and
/// the sums of the earlier ones.
#[derive(Clone, Debug, Default)]
pub struct SessionReports {
    kept: VecDeque<SessionReport>,
    /// The number of earlier sessions, and their sums.
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

    /// The number of sessions, and one report for each of them; that of the earlier ones, if there are any, comes first
    /// and holds their sums.
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
    fn few_reports_are_kept_as_they_came() {
        let mut reports = SessionReports::default();
        reports.push(report(1));
        reports.push(report(2));
        let (sessions, parts) = reports.into_parts();
        assert_eq!((sessions, parts), (2, vec![report(1), report(2)]));
    }
}
