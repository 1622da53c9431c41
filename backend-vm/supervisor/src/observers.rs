//! Observers: guest processes that use NVML. They have no session, and query facts about their
//! tenant's devices.
//!
//! A process that uses NVML need not use CUDA, so `libnvidia-ml.so.1` opens a control stream of its own and sends `Observe`
//! instead of the hello. The supervisor answers, without a worker. `shared-ring/api/nvml.idl` declares every function and
//! the source of its answer. Answers travel as facts, `name=value`. A missing fact is `NVML_ERROR_NOT_SUPPORTED`.
//!
//! - A worker that has not met a guest yet has described the device. The host's NVML adds live values, which a thread reads
//!   ([`super::sampler`]).
//! - The memory of the tenant's sessions comes from the pages in which their workers count, plus what the driver keeps for
//!   each process where the host's NVML knows that. A tenant gets its own memory and processes only, with the process
//!   numbers that the guest's processes have reported.
//! - While several tenants are attached, live answers (`live` in the table) and the host's free memory are missing, since
//!   they depend on neighbours' work. After a tenant has left they stay missing until its work shows no more, and counters
//!   for good once a second tenant has begun a session ([`super::visibility`]). Workers read that there are neighbours from a file that they cannot write, and leave
//!   the device's free memory out of `cuMemGetInfo`.
//! - NVLinks to switches and to the tenant's own devices are active, all others inactive. A switch has no PCI place.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use event_manager::EventOps;
use wormhole_link::channel::ChannelError;
use wormhole_link::neighbours::NeighboursFile;
use wormhole_ring::control::{Message, Observe, Refusal, facts};

use super::Id;
use super::guests::GuestError;
use super::pair::Report;
use super::sampler::Sample;
use super::tenant_loop::TenantLoop;

/// Largest number of bytes of facts in one message.
const PART: usize = 4096;
/// Time for which an answer of the host's NVML is reused, so that guests cannot keep it busy.
pub(super) const FRESH: Duration = Duration::from_millis(50);

/// State of a guest that observes.
#[derive(Debug)]
pub(super) struct Observer {
    /// Device in the question that is not answered yet.
    asked: Option<u32>,
}

/// Guests with an unanswered question.
#[derive(Debug, Default)]
pub(super) struct Observers {
    waiting: BTreeSet<Id>,
    heard: Option<Heard>,
    /// Whether the supervisor was asked for the figures of the host's NVML.
    asks: bool,
    /// The part of its answer that has come.
    part: String,
}

/// Last answer of the host's NVML.
#[derive(Clone, Debug)]
struct Heard {
    at: Instant,
    /// Samples, by device.
    samples: Vec<Sample>,
    /// Bytes that workers had counted at that time, by process and device.
    counted: BTreeMap<(i32, usize), u64>,
}

impl Observers {
    /// Discards the host's last answer, because there is a process that it may not include.
    pub(super) fn ask_anew(&mut self) {
        self.heard = None;
    }
}

impl Heard {
    /// Returns the bytes that a process holds on a device now, if the host's NVML knows the
    /// process: the reported bytes, plus the change in its worker's count since then. The worker's
    /// count alone would be less, because it excludes the driver's own memory.
    fn bytes(&self, process: i32, device: usize, counts: u64) -> Option<u64> {
        let said = *self.samples.get(device)?.processes.get(&process)?;
        let then = self.counted.get(&(process, device)).copied();
        Some(
            said.saturating_add(counts)
                .saturating_sub(then.unwrap_or(0)),
        )
    }
}

/// Splits the descriptions of a worker's devices at empty lines.
pub(super) fn devices(text: &str) -> Vec<String> {
    let blocks = text.split("\n\n").filter(|block| !block.trim().is_empty());
    blocks.map(str::to_owned).collect()
}

impl TenantLoop {
    /// Handles a guest's question. It is answered at the end of the event, or when
    /// more is known, and the guest may then ask again.
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
        // A tenant counts as a neighbour of others from its window on, so before that it may not
        // see live values that reveal their work.
        let tenant = self.tenants.get(&guest.tenant);
        if tenant.is_none_or(|tenant| tenant.window.is_none()) {
            return Err(GuestError::NoWindow);
        }
        let observer = guest.observer.get_or_insert(Observer { asked: None });
        if observer.asked.replace(observe.device).is_some() {
            return Err(GuestError::Impatient);
        }
        self.observers.waiting.insert(id);
        Ok(())
    }

    /// Handles a part of the supervisor's answer: the figures of the host's NVML.
    pub(super) fn figures(&mut self, ops: &mut EventOps<'_>, is_last: bool, part: &str) {
        self.observers.part.push_str(part);
        if !is_last {
            return;
        }
        self.observers.asks = false;
        let text = std::mem::take(&mut self.observers.part);
        // The supervisor has encoded them.
        let samples: Vec<Sample> = serde_json::from_str(&text).unwrap_or_default();
        let mut counted = BTreeMap::new();
        for session in self.sessions.values().filter(|one| one.worker.is_some()) {
            for device in 0..samples.len() {
                let bytes = session.counters.device_memory(device);
                counted.insert((session.worker_pid, device), bytes);
            }
        }
        self.observers.heard = Some(Heard {
            at: Instant::now(),
            samples,
            counted,
        });
        self.answer_observers(ops);
    }

    /// Answers waiting observers whose facts are known.
    pub(super) fn answer_observers(&mut self, ops: &mut EventOps<'_>) {
        if self.observers.waiting.is_empty() {
            return;
        }
        match &self.devices {
            None => return,
            Some(Err(reason)) => {
                let reason = reason.clone();
                return self.refuse_observers(ops, &reason);
            }
            Some(Ok(_)) => {}
        }
        let heard = &mut self.observers.heard;
        heard.take_if(|heard| heard.at.elapsed() >= FRESH);
        if self.observers.heard.is_none() && self.service.as_ref().is_some_and(|one| one.has_driver)
        {
            if !std::mem::replace(&mut self.observers.asks, true) {
                self.supervisor.report(&Report::Figures);
            }
            return;
        }
        let heard = self.observers.heard.clone();
        let mut facts = BTreeMap::new();
        for id in std::mem::take(&mut self.observers.waiting) {
            if let Err(error) = self.tell_observer(ops, id, heard.as_ref(), &mut facts) {
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
        heard: Option<&Heard>,
        facts: &mut BTreeMap<(Id, u32), String>,
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
        let text = facts
            .entry((tenant, device))
            .or_insert_with(|| self.facts(tenant, device as usize, heard));
        let count = self.descriptions().len();
        let devices = u32::try_from(count).unwrap_or(u32::MAX);
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

    /// Returns the facts on each device.
    fn descriptions(&self) -> &[String] {
        match &self.devices {
            Some(Ok(devices)) => devices,
            _ => &[],
        }
    }

    /// Returns whether other tenants use the devices, as the supervisor has said last.
    fn has_neighbours(&self) -> bool {
        let file = self.neighbours.as_ref();
        file.is_none_or(NeighboursFile::is_set)
    }

    /// Returns the facts on a device that a tenant may see; none for a device that does not exist.
    fn facts(&self, tenant: Id, device: usize, heard: Option<&Heard>) -> String {
        let Some(description) = self.descriptions().get(device) else {
            return String::new();
        };
        let mut text = format!("{}\n", description.trim_end());
        if let Some(sample) = heard.and_then(|heard| heard.samples.get(device)) {
            text.extend(sample.visible_facts(self.has_neighbours()));
        }
        let mut used: u64 = 0;
        let sessions = self
            .sessions
            .values()
            .filter(|session| session.tenant == tenant);
        for session in sessions {
            // A dead worker holds no memory.
            if session.worker.is_none() {
                continue;
            }
            let counts = session.counters.device_memory(device);
            let bytes = heard
                .and_then(|heard| heard.bytes(session.worker_pid, device, counts))
                .unwrap_or(counts);
            used = used.saturating_add(bytes);
            if let Some(pid) = session.process {
                let _ = writeln!(text, "{}={pid} {bytes}", facts::PROCESS);
            }
        }
        let _ = writeln!(text, "{}={used}", facts::USED_MEMORY);
        text
    }
}

/// Splits off as many whole lines as fit into one message.
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
    fn what_a_process_holds_is_what_was_said_of_it_and_what_it_has_counted_since() {
        let sample = Sample {
            processes: BTreeMap::from([(7, 600), (8, 500)]),
            ..Sample::default()
        };
        let heard = Heard {
            at: Instant::now(),
            samples: vec![Sample::default(), sample],
            counted: BTreeMap::from([((7, 1), 100)]),
        };
        let bytes = |process, counts| heard.bytes(process, 1, counts);
        assert_eq!(bytes(7, 100), Some(600));
        assert_eq!(bytes(7, 164), Some(664));
        assert_eq!(bytes(7, 0), Some(500));
        // The process had no session yet when the host's NVML was queried.
        assert_eq!(bytes(8, 64), Some(564));
        assert_eq!(bytes(8, u64::MAX), Some(u64::MAX));
        assert_eq!(bytes(9, 64), None);
        assert_eq!((heard.bytes(7, 0, 64), heard.bytes(7, 2, 64)), (None, None));
    }

    #[test]
    fn devices_are_separated_by_empty_lines() {
        assert_eq!(
            devices("name=a\nuuid=0\n\nname=b\n"),
            ["name=a\nuuid=0", "name=b\n"]
        );
        assert!(devices("").is_empty());
    }
}
