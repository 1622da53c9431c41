//! Usage of a backend by its tenants, for `wormhole stats` and `wormhole ps`.

use serde::{Deserialize, Serialize};
use wormhole_api::{GraphLaunch, LaunchKernel, Message as _};

use crate::counters::{Counter, Counts};

/// Usage of a backend by one tenant, over all of its sessions unless a field says otherwise.
///
/// Workers wrote the numbers, and the guest wrote `local_calls`; hostile ones may have written anything. No decision
/// depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Number of open sessions.
    pub sessions: u64,
    /// Number of sessions that have ended.
    pub ended_sessions: u64,
    /// Calls that programs have answered without the backend, as they last reported.
    pub local_calls: u64,
    /// Messages without an answer.
    pub records: u64,
    /// Messages that were answered.
    pub requests: u64,
    /// Fences submitted to the device.
    pub fences: u64,
    /// Launches of a kernel, without those by graphs.
    pub launches: u64,
    pub graph_launches: u64,
    /// Bytes from the guest to the device.
    pub bytes_to_device: u64,
    /// Bytes from the device to the guest.
    pub bytes_from_device: u64,
    /// Bytes from device memory to device memory.
    pub bytes_on_device: u64,
    /// Calls that were refused or failed.
    pub failures: u64,
    /// Bytes of device memory that open sessions have allocated.
    pub device_memory: u64,
    /// Exits of the guest's vCPUs since it booted; none without a guest, or where its monitor does not tell.
    pub vm_exits: Option<u64>,
}

/// Number of a [`Usage`]'s fields that are numbers.
const NUMBERS: usize = 13;
/// Number of words of an encoded [`Usage`].
pub const WORDS: usize = NUMBERS + 2;

impl Usage {
    /// Adds the counts of a session's worker, and the calls that its guest has answered.
    pub fn add(&mut self, counts: &Counts, local_calls: u64) {
        let message = |id| {
            let mut messages = counts.messages();
            messages
                .find(|(found, _)| *found == id)
                .map_or(0, |(_, count)| count)
        };
        let sums = [
            (&mut self.local_calls, local_calls),
            (&mut self.records, counts.get(Counter::Records)),
            (&mut self.requests, counts.get(Counter::Requests)),
            (&mut self.fences, counts.get(Counter::Fences)),
            (&mut self.launches, message(LaunchKernel::ID)),
            (&mut self.graph_launches, message(GraphLaunch::ID)),
            (
                &mut self.bytes_to_device,
                counts.get(Counter::BytesToDevice),
            ),
            (
                &mut self.bytes_from_device,
                counts.get(Counter::BytesToHost),
            ),
            (
                &mut self.bytes_on_device,
                counts.get(Counter::BytesOnDevice),
            ),
            (&mut self.failures, counts.get(Counter::Failures)),
        ];
        for (sum, more) in sums {
            *sum = sum.saturating_add(more);
        }
    }

    /// Returns the fields that are numbers, in the order of the words.
    fn numbers(&mut self) -> [&mut u64; NUMBERS] {
        [
            &mut self.sessions,
            &mut self.ended_sessions,
            &mut self.local_calls,
            &mut self.records,
            &mut self.requests,
            &mut self.fences,
            &mut self.launches,
            &mut self.graph_launches,
            &mut self.bytes_to_device,
            &mut self.bytes_from_device,
            &mut self.bytes_on_device,
            &mut self.failures,
            &mut self.device_memory,
        ]
    }

    /// Encodes it for [`Self::of_words`].
    #[must_use]
    pub fn words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        let mut usage = *self;
        for (word, number) in words.iter_mut().zip(usage.numbers()) {
            *word = *number;
        }
        words[NUMBERS] = self.vm_exits.is_some().into();
        words[NUMBERS + 1] = self.vm_exits.unwrap_or_default();
        words
    }

    /// Returns none if the words are no output of [`Self::words`].
    #[must_use]
    pub fn of_words(words: &[u64]) -> Option<Self> {
        let words: &[u64; WORDS] = words.try_into().ok()?;
        let (numbers, [has_exits, exits]) = words.split_last_chunk()?;
        let mut usage = Self {
            vm_exits: match (has_exits, exits) {
                (0, 0) => None,
                (1, exits) => Some(*exits),
                _ => return None,
            },
            ..Self::default()
        };
        for (field, number) in usage.numbers().into_iter().zip(numbers) {
            *field = *number;
        }
        Some(usage)
    }
}

/// A tenant and its usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantUsage {
    /// Number of the tenant, by which the supervisor's log names it.
    pub tenant: u32,
    /// User who attached it.
    pub user: u32,
    /// Process that attached it, 0 if its PID namespace is another one.
    pub process: i32,
    /// Seconds since it attached.
    pub seconds: u64,
    /// Whether the figures are of this moment. False if the tenant's process has not answered in time: then they are
    /// those of its last answer.
    pub is_current: bool,
    #[serde(flatten)]
    pub usage: Usage,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::tests::page;

    #[test]
    fn usage_is_the_sum_of_its_sessions() {
        let (file, counters) = page();
        counters.add(Counter::Records, 7);
        counters.add(Counter::BytesToDevice, 1 << 40);
        counters.message(LaunchKernel::ID);
        counters.message(LaunchKernel::ID);
        counters.message(GraphLaunch::ID);
        let mut usage = Usage::default();
        usage.add(&file.read(), 5);
        usage.add(&file.read(), u64::MAX);
        let sum = Usage {
            local_calls: u64::MAX,
            records: 14,
            launches: 4,
            graph_launches: 2,
            bytes_to_device: 2 << 40,
            ..Usage::default()
        };
        assert_eq!(usage, sum);
    }

    #[test]
    fn usage_is_read_as_it_was_written() {
        let words: [u64; WORDS] = std::array::from_fn(|at| match at {
            13 => 1,
            at => at as u64 + 100,
        });
        let usage = Usage::of_words(&words).unwrap();
        assert_eq!(usage.words(), words);
        assert_eq!(usage.vm_exits, Some(114));
        let none = Usage::default();
        assert_eq!(Usage::of_words(&none.words()), Some(none));
        for bad in [&words[1..], &[2; WORDS], &[words[0]; WORDS + 1]] {
            assert_eq!(Usage::of_words(bad), None);
        }
    }
}
