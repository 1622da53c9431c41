//! Chains: launches on one stream that lie in the ring already go to the device by one call.
//!
//! The driver needs several microseconds to launch a kernel, and a tenth of that for a kernel of an executable graph whose
//! functions stay the same. So the executor collects launches while the next record lies in the ring, and gives them to the
//! device as such a graph, a chain, with their own grids and parameters. No launch waits for a record that is not there yet.
//!
//! A chain is used again for launches of the same functions in the same order, whatever their parameters, and changed for
//! others. Each stream has chains of its own, since launches of one chain wait for each other.
//!
//! These launches stay single: with attributes or events, with many bytes of parameters, on a stream that has attributes or a
//! green context, of a kernel that the driver takes in no chain.

mod costs;
mod links;
mod pending;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use wormhole_device::{Device, Launch, RawFunction, Result};
use wormhole_link::counters::{Counter, Counters};

use self::costs::Costs;
use self::links::{Key, Links};
use self::pending::Pending;
use super::devices::Devices;
use super::objects::StreamObject;

/// Environment variable of a program that has no chains if its value is 0.
pub const SWITCH: &str = "WORMHOLE_CHAINS";

/// Most launches of a chain. A longer one takes hardly less time for each of them.
const LONGEST: usize = 16;
/// Streams that have chains.
const STREAMS: usize = 8;
/// Kernels that are known to go into no chain.
const REFUSED: usize = 64;

/// When launches go into chains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Plan {
    #[default]
    Never,
    /// Where chains have been measured to be cheaper, on streams with many launches.
    Measured,
    /// Wherever they may, for devices on which nothing is to be gained, so that all their work tests chains.
    Always,
}

/// Chains of a session, and the launches that the executor has collected.
#[derive(Debug)]
pub struct Chains {
    plan: Plan,
    devices: Devices,
    counters: Arc<Counters>,
    pending: Pending,
    streams: Vec<Links>,
    refused: Vec<RawFunction>,
    costs: Costs,
}

impl Chains {
    pub fn new(devices: Devices, counters: Arc<Counters>) -> Self {
        Self {
            plan: Plan::Never,
            devices,
            counters,
            pending: Pending::new(),
            streams: Vec::new(),
            refused: Vec::new(),
            costs: Costs::default(),
        }
    }

    pub fn set_plan(&mut self, plan: Plan) {
        self.plan = plan;
    }

    /// Returns whether launches have been collected that the device does not have yet.
    #[inline]
    pub fn are_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Collects a launch. `more` says that another record lies in the ring. If this returns false, the caller has to launch,
    /// and the launches before it are done.
    ///
    /// # Errors
    /// A launch that had been collected failed. The caller's own is not done then.
    #[inline]
    pub fn take(&mut self, stream: &StreamObject, more: bool, launch: &Launch<'_>) -> Result<bool> {
        if self.plan == Plan::Never {
            return Ok(false);
        }
        let key = (stream.device.number(), stream.raw);
        let continues = self.are_pending() && self.pending.key() == key;
        let fits = (continues || more) && self.may_chain(stream, launch);
        if !continues {
            self.flush()?;
        }
        if !fits || !(continues || self.has_links(key)) {
            self.flush()?;
            return Ok(false);
        }
        self.pending.push(key, launch);
        if !more || self.pending.len() == LONGEST {
            self.flush()?;
        }
        Ok(true)
    }

    fn may_chain(&self, stream: &StreamObject, launch: &Launch<'_>) -> bool {
        launch.attributes.is_empty()
            && launch.events.is_empty()
            && launch.parameters.len() <= pending::PARAMETERS
            && stream.green.is_none()
            && !stream.has_attributes.load(Ordering::Relaxed)
            && !self.refused.contains(&launch.function)
    }

    /// Counts a launch of a stream. Returns whether its launches are worth collecting.
    fn has_links(&mut self, key: Key) -> bool {
        let known = self.streams.iter().position(|links| links.key() == key);
        let place = match known {
            Some(place) => place,
            None if self.streams.len() == STREAMS => return false,
            None => {
                self.streams.push(Links::new(key));
                self.streams.len() - 1
            }
        };
        self.streams[place].earn() || self.plan == Plan::Always
    }

    /// Launches what has been collected.
    ///
    /// # Errors
    /// The first failure of a launch. The others are done.
    #[inline]
    pub fn flush(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.launch_pending()
    }

    fn launch_pending(&mut self) -> Result<()> {
        let (number, _) = self.pending.key();
        let device = self.devices[number].clone();
        let measured = self.plan == Plan::Measured && self.costs.is_due();
        let (mut outcome, mut from) = (Ok(()), 0);
        while from < self.pending.len() {
            let length = part(self.pending.len() - from);
            let began = measured.then(Instant::now);
            let (launched, length) = match self.chained(&*device, from, length) {
                Some(launched) => (launched, length),
                None => (device.launch(&self.pending.launch(from)), 1),
            };
            if let Some(began) = began {
                self.costs.note(length, began.elapsed());
            }
            outcome = outcome.and(launched);
            from += length;
        }
        self.pending.clear();
        outcome
    }

    /// Launches a part of what has been collected as a chain. Returns `None` if its first launch has to go by itself.
    fn chained(&mut self, device: &dyn Device, from: usize, length: usize) -> Option<Result<()>> {
        if length == 1 || (self.plan == Plan::Measured && !self.costs.pay_off(length)) {
            return None;
        }
        let key = self.pending.key();
        let links = self.streams.iter_mut().find(|links| links.key() == key)?;
        let always = self.plan == Plan::Always;
        let chain = links.chain(device, &self.pending, from..from + length, always)?;
        if let Err(function) = chain.set(device, &self.pending, from) {
            if self.refused.len() == REFUSED {
                self.refused.clear();
            }
            self.refused.push(function);
            return None;
        }
        let launched = chain.launch(device, key.1);
        self.counters.add(Counter::Chains, 1);
        self.counters.add(Counter::ChainedLaunches, length as u64);
        Some(launched)
    }

    /// Forgets the chains of a stream that is to be destroyed.
    pub fn forget(&mut self, stream: &StreamObject) {
        let key = (stream.device.number(), stream.raw);
        self.forget_where(|links| links.key() == key);
    }

    /// Forgets all chains: functions that they have are to be unloaded.
    pub fn forget_all(&mut self) {
        self.forget_where(|_| true);
        // The driver may give their numbers to other kernels.
        self.refused.clear();
    }

    fn forget_where(&mut self, gone: impl Fn(&Links) -> bool) {
        debug_assert!(self.pending.is_empty(), "work that comes behind launches");
        for links in self.streams.extract_if(.., |links| gone(links)) {
            let (number, _) = links.key();
            links.end(&*self.devices[number]);
        }
    }
}

/// Returns the length of the chain that the first of so many launches go into: the largest power of two among them.
fn part(left: usize) -> usize {
    LONGEST.min(1 << left.ilog2())
}
