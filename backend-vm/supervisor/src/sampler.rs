//! Thread that queries the host's NVML. A query can take milliseconds, and the event loop never
//! blocks.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::{self, Receiver, Sender};

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use wormhole_link::tasks;
use wormhole_ring::control::facts;

use crate::host_nvml::HostNvml;
use crate::visibility::Visible;

/// Values of one device from the host's NVML.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Facts that do not depend on any tenant's work, one line each.
    pub facts: String,
    /// Live facts, which depend on the work of all users of the device at the moment.
    pub live: String,
    /// Live facts that depend on all work so far.
    pub counters: String,
    /// Bytes held by processes of the host, by process number.
    pub processes: BTreeMap<i32, u64>,
}

impl Sample {
    /// Returns the sample for a tenant with these workers.
    pub fn for_tenant(&self, visible: Visible, own: &BTreeSet<i32>) -> Self {
        let processes = self.processes.iter();
        let processes = processes.filter(|(pid, _)| own.contains(pid));
        let (live, counters) = match visible {
            Visible::Fixed => ("", ""),
            Visible::Momentary => (self.live.as_str(), ""),
            Visible::All => (self.live.as_str(), self.counters.as_str()),
        };
        Self {
            facts: self.facts.clone(),
            live: live.to_owned(),
            counters: counters.to_owned(),
            processes: processes.map(|(pid, bytes)| (*pid, *bytes)).collect(),
        }
    }

    /// Returns the facts for a tenant. Live facts, such as utilization, are included only while it
    /// has no neighbours, because they would reveal the neighbours' work.
    pub fn visible_facts(&self, has_neighbours: bool) -> impl Iterator<Item = &str> {
        let live = [self.live.as_str(), self.counters.as_str()];
        let live = live.into_iter().filter(move |_| !has_neighbours);
        std::iter::once(self.facts.as_str()).chain(live)
    }
}

/// Event loop's handle on the thread. Readable when a sample is ready.
#[derive(Debug)]
pub struct Sampler {
    orders: Sender<Vec<Option<String>>>,
    samples: Receiver<Vec<Sample>>,
    bell: EventFd,
    is_ordered: bool,
    /// Whether the thread has ended.
    has_ended: bool,
}

impl Sampler {
    /// Starts the thread, with the calling thread's signal mask. The thread ends when this value is
    /// dropped.
    ///
    /// # Errors
    /// No descriptor or thread can be created.
    pub fn new() -> io::Result<Self> {
        let bell = EventFd::new(EFD_NONBLOCK)?;
        let theirs = bell.try_clone()?;
        let (orders, inbox) = mpsc::channel();
        let (outbox, samples) = mpsc::channel();
        tasks::spawn("sampler", move || serve(&inbox, &outbox, &theirs))?;
        Ok(Self {
            orders,
            samples,
            bell,
            is_ordered: false,
            has_ended: false,
        })
    }

    /// Orders a query of the devices with these descriptions, unless one is running. Returns false
    /// if the thread has ended.
    pub fn order(&mut self, devices: &[String]) -> bool {
        if self.is_ordered {
            return true;
        }
        let uuid = |device: &String| facts::get(device, facts::UUID).map(str::to_owned);
        let uuids = devices.iter().map(uuid).collect();
        self.is_ordered = self.orders.send(uuids).is_ok();
        let has_ended = !self.is_ordered;
        if !std::mem::replace(&mut self.has_ended, has_ended) && has_ended {
            tracing::error!("the thread that asks the host's NVML has ended");
        }
        self.is_ordered
    }

    /// Returns new samples, by device, once.
    pub fn finished(&mut self) -> Option<Vec<Sample>> {
        // The read fails if there is no sample.
        let _ = self.bell.read();
        let samples = self.samples.try_iter().last();
        self.is_ordered &= samples.is_none();
        samples
    }
}

impl AsRawFd for Sampler {
    fn as_raw_fd(&self) -> RawFd {
        self.bell.as_raw_fd()
    }
}

fn serve(orders: &Receiver<Vec<Option<String>>>, samples: &Sender<Vec<Sample>>, bell: &EventFd) {
    let mut nvml = None;
    while let Ok(uuids) = orders.recv() {
        let nvml = nvml.get_or_insert_with(|| {
            HostNvml::load()
                .inspect_err(|error| {
                    let why = wormhole_link::chain(error);
                    tracing::info!("NVML of the host is unavailable to guests: {why}");
                })
                .ok()
        });
        let found = match nvml {
            Some(nvml) => nvml.sample(&uuids),
            None => vec![Sample::default(); uuids.len()],
        };
        if samples.send(found).is_err() || bell.write(1).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beside_neighbours_a_tenant_is_told_nothing_of_the_moment_and_no_counters_after_them() {
        let sample = Sample {
            facts: "host.nvmlDeviceGetBrand=14\n".to_owned(),
            live: "host.nvmlDeviceGetPowerUsage=700000\nmemory.free=4096\n".to_owned(),
            counters: "host.nvmlDeviceGetTotalEnergyConsumption=1\n".to_owned(),
            processes: BTreeMap::new(),
        };
        let facts = |has_neighbours| sample.visible_facts(has_neighbours).collect::<String>();
        let momentary = sample.facts.clone() + &sample.live;
        let all = momentary.clone() + &sample.counters;
        assert_eq!(
            (facts(false), facts(true)),
            (all.clone(), sample.facts.clone())
        );
        let facts = |visible| {
            let sample = sample.for_tenant(visible, &BTreeSet::new());
            sample.visible_facts(false).collect::<String>()
        };
        assert_eq!(facts(Visible::All), all);
        assert_eq!(facts(Visible::Momentary), momentary);
        assert_eq!(facts(Visible::Fixed), sample.facts);
    }
}
