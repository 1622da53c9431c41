//! The thread that asks the host's NVML: that can take milliseconds, and the event loop waits for nobody.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::{self, Receiver, Sender};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use wormhole_link::tasks;
use wormhole_ring::control::facts;

use crate::host_nvml::HostNvml;

/// What the host's NVML says of one device.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Facts that no tenant's work changes, a line each.
    pub facts: String,
    /// Facts of the moment, which tell of the work of whoever uses the device.
    pub live: String,
    /// Bytes that processes of the host hold, by their numbers.
    pub processes: BTreeMap<i32, u64>,
}

impl Sample {
    /// The facts for a tenant. Live facts, such as utilization, are among them only while it is alone: beside others they
    /// would show the neighbours' work.
    pub fn told(&self, has_neighbours: bool) -> impl Iterator<Item = &str> {
        let live = (!has_neighbours).then_some(self.live.as_str());
        std::iter::once(self.facts.as_str()).chain(live)
    }
}

/// The event loop's handle on the thread. It is readable when there is a sample.
#[derive(Debug)]
pub struct Sampler {
    orders: Sender<Vec<Option<String>>>,
    samples: Receiver<Vec<Sample>>,
    bell: EventFd,
    is_ordered: bool,
}

impl Sampler {
    /// Starts the thread, with the calling thread's signal mask. It ends with this value.
    ///
    /// # Errors
    /// No descriptor or no thread can be had.
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
        })
    }

    /// Has the devices with these descriptions asked, unless they are being asked already. False if nobody is left to
    /// ask them.
    pub fn order(&mut self, devices: &[String]) -> bool {
        if self.is_ordered {
            return true;
        }
        let uuid = |device: &String| facts::get(device, facts::UUID).map(str::to_owned);
        let uuids = devices.iter().map(uuid).collect();
        match self.orders.send(uuids) {
            Ok(()) => self.is_ordered = true,
            Err(_) => tracing::error!("the thread that asks the host's NVML has ended"),
        }
        self.is_ordered
    }

    /// What was found, by device; once.
    pub fn finished(&mut self) -> Option<Vec<Sample>> {
        // Empty when nothing was.
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
                    tracing::info!("guests are told nothing of the host's NVML: {why}");
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
    fn beside_neighbours_a_tenant_is_told_nothing_of_the_moment() {
        let sample = Sample {
            facts: "host.nvmlDeviceGetBrand=14\n".to_owned(),
            live: "host.nvmlDeviceGetPowerUsage=700000\nmemory.free=4096\n".to_owned(),
            processes: BTreeMap::new(),
        };
        let told = |has_neighbours| sample.told(has_neighbours).collect::<String>();
        assert_eq!(told(false), sample.facts.clone() + &sample.live);
        assert_eq!(told(true), sample.facts);
    }
}
