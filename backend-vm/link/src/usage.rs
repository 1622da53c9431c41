//! Usage of a backend by its tenants, for `wormhole stats` and `wormhole ps`.

use serde::{Deserialize, Serialize};
use wormhole_api::{GraphLaunch, LaunchKernel, Message as _};

use crate::counters::{Counter, Counts, TIMES, time_of};

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
    /// Times of requests in their workers.
    #[serde(default)]
    pub times: Times,
    /// Exits of the guest's vCPUs since it booted; none without a guest, or where its monitor does not tell.
    pub vm_exits: Option<u64>,
}

/// Numbers of requests by class of their time, from the moment in which a worker takes one out of the ring to its answer.
/// One request in 16 is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times([u64; TIMES]);

impl Times {
    /// Returns the nanoseconds below which this share of the measured requests were answered, a power of two; none if no
    /// request was measured.
    #[must_use]
    pub fn quantile(&self, percent: u64) -> Option<u64> {
        let sum = |counts: &[u64]| counts.iter().fold(0, |sum, &count| sum + u128::from(count));
        let all = sum(&self.0);
        let wanted = (all * u128::from(percent)).div_ceil(100).max(1);
        let class = (0..TIMES).find(|&class| sum(&self.0[..=class]) >= wanted)?;
        Some(time_of(class))
    }
}

/// Number of a [`Usage`]'s fields that are numbers.
const NUMBERS: usize = 13 + TIMES;
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
        for (sum, more) in self.times.0.iter_mut().zip(counts.times()) {
            *sum = sum.saturating_add(more);
        }
    }

    /// Returns the fields that are numbers, in the order of the words.
    fn numbers(&mut self) -> impl Iterator<Item = &mut u64> {
        let sums = [
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
        ];
        sums.into_iter().chain(&mut self.times.0)
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
        for (field, number) in usage.numbers().zip(numbers) {
            *field = *number;
        }
        Some(usage)
    }
}

/// Largest number of bytes in a part of an answer.
const PART: usize = 4096;

/// Splits the text of an answer into the parts of its messages, at least one. The number beside a part is that of the
/// message's `more`: 1 if another part follows.
pub fn parts(text: &str) -> impl Iterator<Item = (u32, &str)> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest.take()?;
        let (part, after) = text.split_at(text.floor_char_boundary(PART));
        rest = (!after.is_empty()).then_some(after);
        Some((rest.is_some().into(), part))
    })
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
    use std::time::Duration;

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
    fn a_quantile_is_the_time_that_so_many_requests_took() {
        let (file, counters) = page();
        assert_eq!(Times::default().quantile(50), None);
        for _ in 0..98 {
            counters.time(Duration::from_nanos(1_000));
        }
        for _ in 0..2 {
            counters.time(Duration::from_millis(1));
        }
        let mut usage = Usage::default();
        usage.add(&file.read(), 0);
        let times = [1, 50, 98, 99, 100].map(|percent| usage.times.quantile(percent).unwrap());
        assert_eq!(times, [1 << 10, 1 << 10, 1 << 10, 1 << 20, 1 << 20]);
        let hostile = Times([u64::MAX; TIMES]);
        assert_eq!(hostile.quantile(100), Some(time_of(TIMES - 1)));
    }

    #[test]
    fn a_long_answer_is_sent_in_parts() {
        let text = format!("x{}", "ä".repeat(PART));
        let parts_of: Vec<_> = parts(&text).collect();
        assert!(parts_of.len() > 2);
        assert!(parts_of.iter().all(|(_, part)| part.len() <= PART));
        let (last, before) = parts_of.split_last().unwrap();
        assert!(last.0 == 0 && before.iter().all(|(more, _)| *more == 1));
        let whole: String = parts_of.iter().map(|(_, part)| *part).collect();
        assert_eq!(whole, text);
        assert_eq!(parts("").collect::<Vec<_>>(), [(0, "")]);
    }

    #[test]
    fn usage_is_read_as_it_was_written() {
        let words: [u64; WORDS] = std::array::from_fn(|at| match at {
            NUMBERS => 1,
            at => at as u64 + 100,
        });
        let usage = Usage::of_words(&words).unwrap();
        assert_eq!(usage.words(), words);
        assert_eq!(usage.vm_exits, Some(101 + NUMBERS as u64));
        let none = Usage::default();
        assert_eq!(Usage::of_words(&none.words()), Some(none));
        for bad in [&words[1..], &[2; WORDS], &[words[0]; WORDS + 1]] {
            assert_eq!(Usage::of_words(bad), None);
        }
    }
}
