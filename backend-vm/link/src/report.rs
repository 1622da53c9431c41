//! What is told of a session when it has ended.

use std::collections::BTreeMap;

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
}
