//! Chains: launches on one stream that lie in the ring already go to the device by one call.
//!
//! The driver needs several microseconds to launch a kernel, and a tenth of that for a kernel of an executable graph whose
//! functions stay the same. So the executor collects launches while the next record lies in the ring, and gives them to the
//! device as such a graph, a chain, with their own grids and parameters. No launch waits for a record that is not there yet.
//!
//! A chain is used again for launches of the same functions in the same order, whatever their parameters, and changed for
//! others. Each stream has chains of its own, since launches of one chain wait for each other.
//!
//! Launches of different threads of the guest on different streams are collected side by side, as native threads launch them.
//! The order of each stream and of each thread is kept, and so is that between the legacy stream and blocking ones: collected
//! launches go to the device before any call that comes behind them.
//!
//! These launches stay single: of kernels with clusters, since a node that is given another kernel keeps the clusters of the
//! first one (driver 580); with attributes or events, with many bytes of parameters, on a stream that has attributes or a
//! green context, of a kernel that the driver takes in no chain.

mod costs;
mod links;
mod pending;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use wormhole_device::{CuError, Launch, RawFunction, Result};
use wormhole_link::counters::{Counter, Counters};

use self::costs::Costs;
use self::links::{Key, Links};
use self::pending::Pending;
use super::devices::Devices;
use super::objects::StreamObject;
use super::session::Call;

/// Environment variable of a program: `0` for no chains, `always` for chains wherever they may be.
const SWITCH: &str = "WORMHOLE_CHAINS";

/// Most launches of a chain. A longer one takes hardly less time for each of them.
const LONGEST: usize = 16;
/// Streams that have chains.
const STREAMS: usize = 8;
/// Records after which all that has been collected is launched, whatever lies in the ring.
const OLDEST: usize = STREAMS * LONGEST;
/// Kernels that are known to go into no chain.
const REFUSED: usize = 64;

/// When launches go into chains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Plan {
    #[default]
    Never,
    /// On streams with many launches, while chains are measured to be cheaper than single launches.
    Measured,
    /// Wherever they may, for devices on which nothing is to be gained, so that all their work tests chains.
    Always,
}

impl Plan {
    /// Returns what the program's environment asks for, or `usual`.
    #[must_use]
    pub fn wanted(usual: Self) -> Self {
        match std::env::var(SWITCH).as_deref() {
            Ok("0") => Self::Never,
            Ok("always") => Self::Always,
            _ => usual,
        }
    }
}

/// A stream with its chains, and its launches that the executor has collected.
#[derive(Debug)]
struct Collector {
    links: Links,
    pending: Pending,
}

/// Chains of a session.
#[derive(Debug)]
pub struct Chains {
    plan: Plan,
    devices: Devices,
    counters: Arc<Counters>,
    streams: Vec<Collector>,
    /// Records since all that had been collected was launched.
    age: usize,
    refused: Vec<RawFunction>,
    costs: Costs,
    /// Whether chains may be made.
    quiet: bool,
}

impl Chains {
    pub fn new(devices: Devices, counters: Arc<Counters>) -> Self {
        Self {
            plan: Plan::Never,
            devices,
            counters,
            streams: Vec::new(),
            age: 0,
            refused: Vec::new(),
            costs: Costs::default(),
            quiet: false,
        }
    }

    pub fn set_plan(&mut self, plan: Plan) {
        self.plan = plan;
    }

    /// Returns the time before a launch that goes by itself, if it is measured.
    #[inline]
    pub fn begin_single(&mut self) -> Option<Instant> {
        (self.plan == Plan::Measured && self.costs.is_due()).then(Instant::now)
    }

    /// Notes the time of a launch that went by itself.
    #[inline]
    pub fn end_single(&mut self, began: Option<Instant>) {
        if let Some(began) = began {
            self.costs.note(1, began.elapsed());
        }
    }

    /// Counts a launch, and returns the place of its stream if it is to be collected. `more` says that another record lies in
    /// the ring.
    #[inline]
    pub fn place(
        &mut self,
        stream: &StreamObject,
        more: bool,
        launch: &Launch<'_>,
    ) -> Option<usize> {
        if self.plan == Plan::Never || !self.may_chain(stream, launch) {
            return None;
        }
        let known = self.find(stream);
        if let Some(place) = known
            && !self.streams[place].pending.is_empty()
        {
            return known;
        }
        if !more {
            return None;
        }
        let place = match known {
            Some(place) => place,
            None => {
                self.make_room()?;
                self.streams.push(Collector {
                    links: Links::new(key(stream)),
                    pending: Pending::new(),
                });
                self.streams.len() - 1
            }
        };
        let earned = self.streams[place].links.earn();
        let pays_off = match self.plan {
            Plan::Never => false,
            Plan::Measured => earned && self.costs.pay_off(LONGEST),
            Plan::Always => true,
        };
        pays_off.then_some(place)
    }

    /// Returns the place of a stream.
    fn find(&self, stream: &StreamObject) -> Option<usize> {
        let key = key(stream);
        self.streams
            .iter()
            .position(|known| known.links.key() == key)
    }

    /// Makes room for another stream. One that has earned no chains yet gives its place up.
    fn make_room(&mut self) -> Option<()> {
        if self.streams.len() == STREAMS {
            let unused = |known: &Collector| known.links.is_unused() && known.pending.is_empty();
            let place = self.streams.iter().position(unused)?;
            self.streams.swap_remove(place);
        }
        Some(())
    }

    fn may_chain(&self, stream: &StreamObject, launch: &Launch<'_>) -> bool {
        launch.attributes.is_empty()
            && launch.events.is_empty()
            && launch.parameters.len() <= pending::PARAMETERS
            && stream.green.is_none()
            && !stream.has_attributes.load(Ordering::Relaxed)
            && !self.refused.contains(&launch.function)
    }

    /// Collects the launch of a call for the stream at this place. Launches what comes before it elsewhere, and all that has been
    /// collected if no other record lies in the ring. `quiet` says that no other thread may hold a lock of the driver's for long.
    ///
    /// # Errors
    /// A launch failed that had been collected, this one or another.
    #[inline]
    pub fn collect(
        &mut self,
        place: usize,
        stream: &StreamObject,
        call: &Call,
        quiet: bool,
        launch: &Launch<'_>,
    ) -> Result<()> {
        self.quiet = quiet;
        let before = self.flush_others(Some(place), stream, call.thread);
        let pending = &mut self.streams[place].pending;
        pending.push(call.thread, stream.blocking, launch);
        self.age += 1;
        let now = if !call.more || self.age >= OLDEST {
            self.flush()
        } else if self.streams[place].pending.len() == LONGEST {
            self.launch_pending(place)
        } else {
            Ok(())
        };
        before.and(now)
    }

    /// Launches what comes before a call of the thread on the stream.
    ///
    /// # Errors
    /// The first failure of a launch. The others are done.
    #[inline]
    pub fn flush_before(&mut self, stream: &StreamObject, thread: u16) -> Result<()> {
        self.age += 1;
        if self.age >= OLDEST {
            return self.flush();
        }
        let own = self.find(stream);
        let before = self.flush_others(own, stream, thread);
        match own {
            Some(place) => before.and(self.launch_pending(place)),
            None => before,
        }
    }

    /// Launches what comes before a call of the thread on the stream, but for the collector at `own`.
    #[inline]
    fn flush_others(
        &mut self,
        own: Option<usize>,
        stream: &StreamObject,
        thread: u16,
    ) -> Result<()> {
        let mut outcome = Ok(());
        for place in 0..self.streams.len() {
            let pending = &self.streams[place].pending;
            if Some(place) != own && pending.comes_before(stream, thread) {
                outcome = outcome.and(self.launch_pending(place));
            }
        }
        outcome
    }

    /// Launches all that has been collected.
    ///
    /// # Errors
    /// The first failure of a launch. The others are done.
    #[inline]
    pub fn flush(&mut self) -> Result<()> {
        if self.age == 0 {
            return Ok(());
        }
        self.age = 0;
        let mut outcome = Ok(());
        for place in 0..self.streams.len() {
            outcome = outcome.and(self.launch_pending(place));
        }
        outcome
    }

    fn launch_pending(&mut self, place: usize) -> Result<()> {
        if self.streams[place].pending.is_empty() {
            return Ok(());
        }
        let (number, stream) = self.streams[place].links.key();
        let measured = self.plan == Plan::Measured && self.costs.is_due();
        let (mut outcome, mut from) = (Ok(()), 0);
        while from < self.streams[place].pending.len() {
            let made = self.streams[place].links.made();
            let began = measured.then(Instant::now);
            let (launched, length) = match self.launch_chained(place, from) {
                // The device has done none of them. A launch by itself needs no memory.
                None | Some((Err(CuError::OUT_OF_MEMORY), _)) => {
                    let pending = &self.streams[place].pending;
                    let launch = pending.launch(stream, from);
                    (self.devices[number].launch(&launch), 1)
                }
                Some((launched, length)) => {
                    self.counters.add(Counter::Chains, 1);
                    self.counters.add(Counter::ChainedLaunches, length as u64);
                    (launched, length)
                }
            };
            if let Some(began) = began
                && self.streams[place].links.made() == made
            {
                self.costs.note(length, began.elapsed());
            }
            outcome = outcome.and(launched);
            from += length;
        }
        self.streams[place].pending.clear();
        outcome
    }

    /// Launches collected launches, from one on, as the longest chain that there is for them. Returns the outcome and the length,
    /// or `None` if the first of them has to go by itself.
    fn launch_chained(&mut self, place: usize, from: usize) -> Option<(Result<()>, usize)> {
        let Collector { links, pending } = &mut self.streams[place];
        let (number, stream) = links.key();
        let device = &*self.devices[number];
        let always = self.plan == Plan::Always;
        let (chain, length) = lengths(pending.len() - from).find_map(|length| {
            if !always && !self.costs.pay_off(length) {
                return None;
            }
            let may_make = self.quiet && (always || links.affords(length));
            let chain = links.place(device, pending, from..from + length, may_make)?;
            Some((chain, length))
        })?;
        let chain = links.chain(chain);
        if let Err(function) = chain.set(device, pending, from) {
            if self.refused.len() == REFUSED {
                self.refused.clear();
            }
            self.refused.push(function);
            return None;
        }
        Some((chain.launch(device, stream), length))
    }

    /// Forgets the chains of a stream that is to be destroyed.
    pub fn forget(&mut self, stream: &StreamObject) {
        let key = key(stream);
        self.forget_where(|links| links.key() == key);
    }

    /// Forgets all chains: functions that they have are to be unloaded.
    pub fn forget_all(&mut self) {
        self.forget_where(|_| true);
        // The driver may give their numbers to other kernels.
        self.refused.clear();
    }

    fn forget_where(&mut self, gone: impl Fn(&Links) -> bool) {
        for Collector { links, pending } in self.streams.extract_if(.., |known| gone(&known.links))
        {
            debug_assert!(pending.is_empty(), "work that comes behind launches");
            let (number, _) = links.key();
            links.end(&*self.devices[number]);
        }
    }
}

fn key(stream: &StreamObject) -> Key {
    (stream.device.number(), stream.raw)
}

/// Returns the lengths of chains that the first of so many launches may go into, the longest first.
fn lengths(left: usize) -> impl Iterator<Item = usize> {
    let longest = LONGEST.min(left).ilog2();
    (1..=longest).rev().map(|power| 1 << power)
}
