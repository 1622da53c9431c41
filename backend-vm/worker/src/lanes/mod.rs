//! Lanes: threads that make the driver's calls of launches, so that independent streams are launched side by side.
//!
//! The executor alone reads the ring, decodes, checks and admits. Where launches of several streams interleave it hands the
//! driver's call of an admitted launch, and fences behind it, to the lane of the stream. A stream has one lane as long
//! as a call of it is left there, and a lane makes its calls in order, so the order of each stream is kept. The executor
//! makes every other call itself, after it has waited for the lanes whose calls come before it:
//!
//! - for the calls of the stream and of the guest's thread, where the message only adds work to one stream;
//! - for the calls of all blocking streams, where that stream is the legacy stream. The device orders the two kinds by
//!   the time of submission, and the legacy stream has no lane;
//! - for all calls, before every other message, and before the executor handles an event of another thread.
//!
//! Calls of one thread of the guest are made in its order too: a launch whose thread has calls left in another lane waits for them.
//! So only what different threads launch on different streams is submitted side by side, as native threads do.

mod entry;
mod lane;
mod pace;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use rustix::thread::{CpuSet, sched_getaffinity};
use wormhole_device::{Launch, RawStream};
use wormhole_link::process::PROCESSORS;
use wormhole_link::tasks;
use wormhole_lock::Mutex;
use wormhole_ring::queue::Gauge;
use wormhole_ring::status::Status;

use self::lane::Lane;
use self::pace::Pace;
use super::devices::Devices;
use super::objects::StreamObject;
use super::session::Event;
use super::wake::Notifier;

/// Most lanes of a session. The sandbox's limits of threads count them.
const MOST: usize = 8;
/// Processors that the program's thread, the executor and other work take. With no more than these a session has no lanes.
const TAKEN: usize = 4;

/// Number of lanes that a session may have, and when launches go to them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plan {
    pub most: usize,
    /// Whether every launch that may go to a lane does, for tests.
    pub always: bool,
}

impl Plan {
    /// Returns the plan for the processors of this process, or for fewer where those of its supervisor are fewer.
    #[must_use]
    pub fn affordable() -> Self {
        // The call fails where there are more processors than a set has.
        let processors =
            sched_getaffinity(None).map_or(CpuSet::MAX_CPU, |set| set.count() as usize);
        let told = std::env::var(PROCESSORS).ok();
        let told = told.and_then(|number| number.parse().ok());
        Self::of(processors.min(told.unwrap_or(usize::MAX)))
    }

    /// Returns the plan for so many processors: one lane for two of them.
    fn of(processors: usize) -> Self {
        Self {
            most: match processors {
                ..=TAKEN => 0,
                _ => MOST.min(processors / 2),
            },
            always: false,
        }
    }

    /// Returns a plan without lanes.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            most: 0,
            always: false,
        }
    }
}

/// Lane of a stream. The executor alone reads and writes it.
#[derive(Debug, Default)]
pub struct Placement {
    /// Round in which the stream got the lane; 0 before the first one.
    round: AtomicU64,
    lane: AtomicUsize,
    /// Place behind the stream's last call in the lane's queue.
    last: AtomicU64,
}

impl Placement {
    #[inline]
    fn lane(&self) -> Option<usize> {
        (self.round.load(Ordering::Relaxed) > 0).then(|| self.lane.load(Ordering::Relaxed))
    }

    #[inline]
    fn last(&self) -> u64 {
        self.last.load(Ordering::Relaxed)
    }
}

/// Number of threads of the guest that are told apart. Others are ordered as one of these.
const THREADS: usize = 256;

/// Place behind a thread's last call in a lane's queue.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    lane: usize,
    place: u64,
}

/// State that the lanes' threads share.
#[derive(Debug)]
struct Shared {
    devices: Devices,
    status: Status,
    stop: AtomicBool,
    /// Views of the lanes' queues, for a dump.
    gauges: Mutex<Vec<Gauge>>,
}

/// A view of the lanes, for a dump.
#[derive(Clone, Debug)]
pub struct Report(Arc<Shared>);

impl Report {
    /// Describes the lanes that have calls left, one line each.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let gauges = self.0.gauges.lock();
        let read = gauges.iter().map(Gauge::read).enumerate();
        read.filter(|(_, (left, _))| *left > 0)
            .map(|(number, (left, written))| {
                format!("lane {number} executes, with {left} of {written} words left")
            })
            .collect()
    }
}

/// The lanes of a session, each started at first use.
#[derive(Debug)]
pub struct Lanes {
    plan: Plan,
    pace: Pace,
    lanes: Vec<Lane>,
    /// Last calls of the guest's threads, by the number of the thread.
    threads: Box<[Last; THREADS]>,
    /// Round of the lanes' numbers of streams.
    round: u64,
    /// Whether a lane may have calls left.
    holds: bool,
    notifier: Notifier<Event>,
    shared: Arc<Shared>,
}

impl Lanes {
    pub fn new(devices: Devices, status: Status, notifier: Notifier<Event>) -> Self {
        Self {
            plan: Plan::none(),
            pace: Pace::new(false),
            lanes: Vec::new(),
            threads: Box::new([Last::default(); THREADS]),
            round: 0,
            holds: false,
            notifier,
            shared: Arc::new(Shared {
                devices,
                status,
                stop: AtomicBool::new(false),
                gauges: Mutex::default(),
            }),
        }
    }

    /// Sets the plan, before the first launch.
    pub fn set_plan(&mut self, plan: Plan) {
        self.plan = plan;
        self.pace = Pace::new(plan.always);
    }

    pub fn report(&self) -> Report {
        Report(Arc::clone(&self.shared))
    }

    /// Returns whether launches may go to lanes at all.
    #[inline]
    pub fn are_planned(&self) -> bool {
        self.plan.most > 0
    }

    /// Counts a launch. Returns whether it is for a lane.
    #[inline]
    pub fn want(&mut self, stream: &StreamObject, thread: u16, launch: &Launch<'_>) -> bool {
        let key = (stream.device.number(), stream.raw);
        // An event that a launch records may be named by any later call.
        self.are_planned()
            && self.pace.launched(key, thread)
            && stream.raw != RawStream::LEGACY
            && launch.events.is_empty()
    }

    /// Hands a launch that is for a lane to the stream's. Returns false if there is none.
    #[inline]
    pub fn launch(&mut self, stream: &StreamObject, thread: u16, launch: &Launch<'_>) -> bool {
        let Some(index) = self.deal(stream) else {
            return false;
        };
        if self.last_of(thread).lane != index {
            self.settle_thread(thread);
        }
        let lane = &mut self.lanes[index];
        lane.wait_for_room(entry::launch_words(launch));
        lane.push_launch(stream.device.number(), launch);
        self.placed(index, stream);
        let place = self.lanes[index].tail();
        *self.last_of(thread) = Last { lane: index, place };
        true
    }

    #[inline]
    fn last_of(&mut self, thread: u16) -> &mut Last {
        &mut self.threads[usize::from(thread) % THREADS]
    }

    /// Hands a fence to the stream's lane if the work before it is there. If it returns false, the caller has to write
    /// it, and the calls before it are made.
    #[inline]
    pub fn fence(&mut self, stream: &StreamObject, address: u64, value: u64) -> bool {
        let index = match stream.placement.lane() {
            Some(index) if self.holds => index,
            _ => {
                self.settle_stream(stream);
                return false;
            }
        };
        let lane = &mut self.lanes[index];
        if lane.has_done(stream.placement.last()) {
            return false;
        }
        lane.wait_for_room(entry::FENCE_WORDS);
        lane.push_fence(stream.device.number(), stream.raw, address, value);
        self.placed(index, stream);
        true
    }

    /// Waits until the lanes have made the calls that come before work of the thread on the stream.
    #[inline]
    pub fn settle(&mut self, stream: &StreamObject, thread: u16) {
        if self.holds {
            self.settle_stream(stream);
            self.settle_thread(thread);
        }
    }

    /// Waits until the thread's own calls are made: the program submits what one thread does in that order.
    #[inline]
    fn settle_thread(&mut self, thread: u16) {
        let last = *self.last_of(thread);
        let lane = self.lanes.get_mut(last.lane).filter(|_| thread > 0);
        if lane.is_some_and(|lane| lane.wait(last.place)) {
            self.pace.waited();
        }
    }

    fn settle_stream(&mut self, stream: &StreamObject) {
        if !self.holds {
            return;
        }
        let mut waited = false;
        if stream.raw == RawStream::LEGACY {
            for lane in &mut self.lanes {
                waited |= lane.wait(lane.blocking);
            }
        } else if let Some(index) = stream.placement.lane() {
            waited = self.lanes[index].wait(stream.placement.last());
        }
        if waited {
            self.pace.waited();
        }
    }

    /// Waits until the lanes have made all their calls.
    #[inline]
    pub fn settle_all(&mut self) {
        if !self.holds {
            return;
        }
        let mut waited = false;
        for lane in &mut self.lanes {
            waited |= lane.wait(lane.tail());
        }
        self.holds = false;
        if waited {
            self.pace.waited();
        }
    }

    /// Notes a message that is neither a launch nor a fence.
    #[inline]
    pub fn other(&mut self) {
        self.pace.other();
    }

    /// Notes that the ring is empty.
    #[inline]
    pub fn idle(&mut self) {
        if !self.are_planned() {
            return;
        }
        self.holds = self.holds && !self.lanes.iter_mut().all(|lane| lane.has_done(lane.tail()));
        self.pace.idle(self.holds);
    }

    /// Returns the stream's lane for its next call: the one that has calls of it left, or the one with the fewest streams.
    #[inline]
    fn deal(&mut self, stream: &StreamObject) -> Option<usize> {
        if self.round != self.pace.round() {
            self.round = self.pace.round();
            for lane in &mut self.lanes {
                lane.streams = u32::from(!lane.has_done(lane.tail()));
            }
        }
        let placement = &stream.placement;
        let lane = placement.lane();
        if placement.round.load(Ordering::Relaxed) == self.round {
            return lane;
        }
        let kept = lane.filter(|index| {
            let lane = &mut self.lanes[*index];
            lane.streams == 0 || !lane.has_done(placement.last())
        });
        let index = kept.or_else(|| self.emptiest())?;
        self.lanes[index].streams += 1;
        placement.lane.store(index, Ordering::Relaxed);
        placement.round.store(self.round, Ordering::Relaxed);
        Some(index)
    }

    /// Returns the lane with the fewest streams of this round, which is a new one while there may be more.
    fn emptiest(&mut self) -> Option<usize> {
        let lanes = self.lanes.iter().enumerate();
        let found = lanes.min_by_key(|(_, lane)| lane.streams);
        let found = found.map(|(index, lane)| (index, lane.streams));
        if let Some((index, 0)) = found {
            return Some(index);
        }
        if self.lanes.len() < self.plan.most {
            let number = self.lanes.len();
            match Lane::start(number, &self.shared, &self.notifier) {
                Ok(lane) => {
                    self.shared.gauges.lock().push(lane.gauge());
                    self.lanes.push(lane);
                    return Some(number);
                }
                Err(error) => {
                    let error = tasks::named(error);
                    tracing::warn!("launches have {number} threads and get no more: {error}");
                    self.plan.most = number;
                }
            }
        }
        found.map(|(index, _)| index)
    }

    /// Notes that the lane has got a call of the stream.
    #[inline]
    fn placed(&mut self, index: usize, stream: &StreamObject) {
        let lane = &mut self.lanes[index];
        let tail = lane.tail();
        stream.placement.last.store(tail, Ordering::Relaxed);
        if stream.blocking {
            lane.blocking = tail;
        }
        self.holds = true;
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // The threads use the session's memory, which may be unmapped afterwards.
        self.lanes.iter_mut().for_each(Lane::end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_has_a_lane_for_two_processors_of_those_that_it_may_use() {
        let most = |processors| Plan::of(processors).most;
        assert_eq!([1, 4, 5, 8, 64].map(most), [0, 0, 2, 4, MOST]);
        assert_eq!(Plan::affordable().most, most(processors()));
    }

    /// Returns the number of processors of this process.
    fn processors() -> usize {
        sched_getaffinity(None).map_or(usize::MAX, |set| set.count() as usize)
    }
}
