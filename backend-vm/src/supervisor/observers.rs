//! Guests that observe: they have no session, and ask what their tenant may know of its devices.
//!
//! The devices are described by a worker that had not met a guest yet; the host's NVML adds what it has to say. Of use
//! and processes a tenant is told its own alone.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use event_manager::EventOps;
use wormhole_ring::control::{Message, Observe, Refusal, facts};

use super::guests::GuestError;
use super::sampler::{Sample, Sampler};
use super::{Id, Supervisor};
use crate::channel::ChannelError;

/// Bytes of facts in one message.
const PART: usize = 4096;
/// How long what the host's NVML said is told to whoever asks: a guest that asks all the time shall not keep it busy.
const FRESH: Duration = Duration::from_millis(50);

/// What a guest that observes waits for.
#[derive(Debug)]
pub(super) struct Observer {
    /// The device that it asked about and was not told of yet.
    asked: Option<u32>,
}

/// Those that wait.
#[derive(Debug, Default)]
pub(super) struct Observers {
    waiting: BTreeSet<Id>,
    /// What the host's NVML said last, and when, by device.
    samples: Option<(Instant, Vec<Sample>)>,
}

/// The descriptions of a worker's devices, which an empty line sets apart.
pub(super) fn devices(text: &str) -> Vec<String> {
    let blocks = text.split("\n\n").filter(|block| !block.trim().is_empty());
    blocks.map(str::to_owned).collect()
}

impl Supervisor {
    /// A guest asks. It is answered at the end of the event loop's round, or when more is known, and may then ask
    /// again.
    pub(super) fn observe(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        observe: Observe,
    ) -> Result<(), GuestError> {
        self.check_version(ops, id, observe.bootstrap_version)?;
        let Some(guest) = self.guests.get_mut(&id) else {
            return Ok(());
        };
        let observer = guest.observer.get_or_insert(Observer { asked: None });
        if observer.asked.replace(observe.device).is_some() {
            return Err(GuestError::Impatient);
        }
        self.observers.waiting.insert(id);
        Ok(())
    }

    /// The host's NVML has answered.
    pub(super) fn device_sampled(&mut self) {
        if let Some(samples) = self.sampler.as_mut().and_then(Sampler::finished) {
            self.observers.samples = Some((Instant::now(), samples));
        }
    }

    /// Tells those who wait what has become known.
    pub(super) fn answer_observers(&mut self, ops: &mut EventOps<'_>) {
        if self.observers.waiting.is_empty() {
            return;
        }
        if !self.device_works {
            let starting = self.workers.values().any(|worker| !worker.is_settled());
            if !starting
                && self.starts.is_empty()
                && let Some(reason) = self.failures.values().next().cloned()
            {
                self.refuse_observers(ops, &reason);
            }
            return;
        }
        let samples = &mut self.observers.samples;
        samples.take_if(|(at, _)| at.elapsed() >= FRESH);
        if let Some(sampler) = &mut self.sampler
            && self.observers.samples.is_none()
            && sampler.order(&self.devices)
        {
            return;
        }
        let samples = self.observers.samples.clone();
        let samples = samples.map_or_else(Vec::new, |(_, samples)| samples);
        for id in std::mem::take(&mut self.observers.waiting) {
            if let Err(error) = self.tell_observer(ops, id, &samples) {
                let why = format!("the guest does not take its answer: {error}");
                self.end_guest(ops, id, &why, None);
            }
        }
    }

    fn refuse_observers(&mut self, ops: &mut EventOps<'_>, reason: &str) {
        for id in std::mem::take(&mut self.observers.waiting) {
            self.refuse(ops, id, Refusal::NoDevice, reason.to_owned());
            self.end_guest(ops, id, reason, None);
        }
    }

    fn tell_observer(
        &mut self,
        ops: &mut EventOps<'_>,
        id: Id,
        samples: &[Sample],
    ) -> Result<(), ChannelError> {
        let Some(guest) = self.guests.get_mut(&id) else {
            return Ok(());
        };
        let tenant = guest.tenant;
        let Some(device) = guest
            .observer
            .as_mut()
            .and_then(|observer| observer.asked.take())
        else {
            return Ok(());
        };
        let text = self.facts(tenant, device as usize, samples);
        let devices = u32::try_from(self.devices.len()).unwrap_or(u32::MAX);
        let Some(guest) = self.guests.get_mut(&id) else {
            return Ok(());
        };
        let mut rest = text.as_str();
        loop {
            let (part, after) = split(rest);
            let more = u32::from(!after.is_empty());
            let message = Message::Observation {
                device,
                devices,
                more,
                facts: part,
            };
            guest.peer.send(ops, &message, Vec::new())?;
            if more == 0 {
                return Ok(());
            }
            rest = after;
        }
    }

    /// What a tenant may know of a device; nothing of one that does not exist.
    fn facts(&self, tenant: Id, device: usize, samples: &[Sample]) -> String {
        let Some(description) = self.devices.get(device) else {
            return String::new();
        };
        let mut text = format!("{}\n", description.trim_end());
        let sample = samples.get(device);
        if let Some(sample) = sample {
            text.push_str(&sample.facts);
        }
        let mut used: u64 = 0;
        let sessions = self
            .sessions
            .values()
            .filter(|session| session.tenant == tenant);
        for session in sessions {
            // A worker that is gone holds nothing.
            if session.worker.is_none() {
                continue;
            }
            let bytes = sample
                .and_then(|sample| sample.processes.get(&session.worker_pid).copied())
                .unwrap_or_else(|| session.counters.device_memory(device));
            used = used.saturating_add(bytes);
            if let Some(pid) = session.process {
                let _ = writeln!(text, "{}={pid} {bytes}", facts::PROCESS);
            }
        }
        let _ = writeln!(text, "{}={used}", facts::USED_MEMORY);
        text
    }
}

/// As many whole lines as fit into one message, and the rest.
fn split(text: &str) -> (&str, &str) {
    if text.len() <= PART {
        return (text, "");
    }
    let end = text.as_bytes()[..PART]
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or_else(|| text.floor_char_boundary(PART), |at| at + 1);
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_sent_in_whole_lines() {
        let text: String = (0..2000).map(|at| format!("fact{at}={at}\n")).collect();
        let (mut rest, mut parts) = (text.as_str(), Vec::new());
        while !rest.is_empty() {
            let (part, after) = split(rest);
            assert!(part.len() <= PART && part.ends_with('\n'));
            parts.push(part);
            rest = after;
        }
        assert_eq!(parts.concat(), text);
    }

    #[test]
    fn a_line_without_an_end_is_sent_in_parts_all_the_same() {
        let text = "ä".repeat(PART);
        let (part, rest) = split(&text);
        assert_eq!((part.len(), rest.len()), (PART, PART));
    }

    #[test]
    fn devices_are_told_apart_by_empty_lines() {
        assert_eq!(
            devices("name=a\nuuid=0\n\nname=b\n"),
            ["name=a\nuuid=0", "name=b\n"]
        );
        assert!(devices("").is_empty());
    }
}
