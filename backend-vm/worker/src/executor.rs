//! Executor: serves a session's records in order and never blocks on the device.
//!
//! Each record is copied out of the ring, decoded and passed to the [`Session`], which hands calls
//! that may block to the job threads. Their results return through the inbox. When idle, the
//! executor spins, then yields, then announces itself parked and sleeps until the doorbell.

use std::sync::Arc;
use std::time::{Duration, Instant};

use wormhole_api::{CuResult, DecodeError, Dispatched, Kind, LaunchKernel, Message};
use wormhole_link::counters::Counter;
use wormhole_ring::layout::SLOTS;
use wormhole_ring::ring::{Consumer, RecordBuf, RecordHead, Violation};
use wormhole_ring::slot::{AnswerSlots, SlotIndex};
use wormhole_ring::status::EndCause;
use wormhole_ring::wait::{Backoff, Policy, Step};

use super::chains;
use super::exchange::Exchange;
use super::lanes::Plan;
use super::session::{Answer, Call, Event, FileSource, Session};
use super::sleepers::Sleepers;
use super::wake::Inbox;
use super::window::Window;

/// Result of every call after the guest corrupted its ring.
pub const VIOLATION_RESULT: u32 = CuResult::UNKNOWN.0;

/// Spins for some 50 µs and yields for a few hundred before it parks and needs the doorbell.
const IDLE: Policy = Policy {
    spins: 1000,
    yields: 1000,
    first_sleep: Duration::ZERO,
    part: 1,
    longest_sleep: Duration::ZERO,
};

/// Cause of a session's end that lies in what its guest wrote.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    #[error("the ring is corrupt")]
    Ring(#[from] Violation),
    #[error("a record is malformed: {0}")]
    Record(DecodeError),
    #[error("slot {slot} was used for {message} while an answer to it was pending")]
    SlotBusy { slot: u16, message: &'static str },
    #[error("{0} came without a slot for its answer")]
    NoSlot(&'static str),
}

/// Serves one session's ring, on one thread.
#[derive(Debug)]
pub struct Executor {
    consumer: Consumer,
    buffer: Box<RecordBuf>,
    answers: AnswerSlots,
    session: Session,
    inbox: Inbox<Event>,
    sleepers: Sleepers,
    /// Slots whose request a job thread is executing.
    pending: [bool; SLOTS],
    /// Beginning of each slot's request that is measured.
    began: [Option<Instant>; SLOTS],
    /// Whether the last look into the ring found a record.
    busy: bool,
    /// Number of requests, to measure one in [`MEASURED`].
    requests: u32,
    /// Steps of a wait for the next record, until it lingers.
    idle: Policy,
    /// Time to stay awake without work, by yielding.
    linger: Duration,
    /// The same while the guest may be waiting for the device.
    linger_for_device: Duration,
}

/// One request in so many is measured: reading the clock twice takes as long as a twentieth of a short request.
const MEASURED: u32 = 16;
const LINGER_FACTOR: u32 = 25;
/// Divisor of `linger` for job threads: there are many of them, so each lingers for a fraction.
const JOB_FRACTION: u32 = 20;

impl Executor {
    pub fn new(
        consumer: Consumer,
        answers: AnswerSlots,
        session: Session,
        inbox: Inbox<Event>,
        sleepers: Sleepers,
    ) -> Self {
        inbox.sleeps_by(consumer.doorbell());
        Self {
            consumer,
            buffer: Box::new(RecordBuf::new()),
            answers,
            session,
            inbox,
            sleepers,
            pending: [false; SLOTS],
            began: [None; SLOTS],
            busy: false,
            requests: 0,
            idle: IDLE,
            linger: Duration::ZERO,
            linger_for_device: Duration::ZERO,
        }
    }

    /// Sets the time to stay awake without work. Pays off where the device has processors of its
    /// own: a doorbell costs the guest more than a launch does.
    #[must_use]
    pub fn lingering(mut self, linger: Duration) -> Self {
        self.linger = linger;
        self.linger_for_device = linger * LINGER_FACTOR;
        self.session.let_jobs_linger(linger / JOB_FRACTION);
        self
    }

    /// Sleeps as soon as the ring is empty and the device idle, where the guest rings for each record.
    #[must_use]
    pub fn rung(mut self, for_each_record: bool) -> Self {
        if for_each_record {
            self.idle = Policy {
                spins: 0,
                yields: 0,
                ..IDLE
            };
            self.linger = Duration::ZERO;
            self.session.let_jobs_linger(Duration::ZERO);
        }
        self
    }

    /// Lets launches that lie in the ring together go into chains.
    #[must_use]
    pub fn launching_in_chains(mut self, plan: chains::Plan) -> Self {
        self.session.launch_in_chains(plan);
        self
    }

    /// Lets launches of independent streams go to lanes.
    #[must_use]
    pub fn launching_in_lanes(mut self, plan: Plan) -> Self {
        self.session.launch_in_lanes(plan);
        self
    }

    /// Sets the way in which the guest names files, if it has one.
    #[must_use]
    pub fn taking_files_from(mut self, source: Option<FileSource>) -> Self {
        if let Some(source) = source {
            self.session.take_files_from(source);
        }
        self
    }

    /// Connects the session to the exchange by which it shares device objects with the tenant's
    /// other processes.
    #[must_use]
    pub fn sharing_by(mut self, exchange: Exchange) -> Self {
        self.session.share_by(exchange);
        self
    }

    /// Lets the session put memory of the device at addresses of arena, which lies in this window.
    #[must_use]
    pub(super) fn placing_in(mut self, window: Arc<Window>) -> Self {
        self.session.place_in(window);
        self
    }

    /// Serves the ring until the guest breaks it; the session's status word is set before this
    /// returns.
    pub fn run(&mut self) -> Broken {
        let mut backoff = Backoff::with(self.idle);
        let mut idle_since = None;
        loop {
            match self.turn() {
                Ok(true) => {
                    backoff.reset();
                    idle_since = None;
                }
                Ok(false) => match backoff.step() {
                    Step::Spun => {}
                    Step::Yield => std::thread::yield_now(),
                    Step::Sleep(_) if self.lingers(&mut idle_since) => std::thread::yield_now(),
                    Step::Sleep(_) => {
                        if let Err(violation) = self.park() {
                            return self.end(violation.into());
                        }
                        backoff.reset();
                        idle_since = None;
                    }
                },
                Err(broken) => return self.end(broken),
            }
        }
    }

    fn lingers(&self, idle_since: &mut Option<Instant>) -> bool {
        if self.linger_for_device.is_zero() {
            return false;
        }
        let idle = idle_since.get_or_insert_with(Instant::now).elapsed();
        idle < self.linger || (idle < self.linger_for_device && self.session.expects_fences())
    }

    /// Executes one record, or handles the events in the inbox. Returns false if there was neither.
    pub fn turn(&mut self) -> Result<bool, Broken> {
        if self.session.is_resetting() {
            return Ok(self.drain_inbox());
        }
        let Some(head) = self.consumer.take(&mut self.buffer)? else {
            self.busy = false;
            self.sleepers.look(self.session.status());
            self.session.idle();
            return Ok(self.drain_inbox());
        };
        self.sleepers.executes(self.session.status());
        // Events sent before the guest wrote this record take effect before it.
        self.drain_inbox();
        self.execute(head)?;
        self.session.counters().progress().end();
        self.busy = true;
        Ok(true)
    }

    /// Returns the session, for inspection.
    pub fn session(&self) -> &Session {
        &self.session
    }

    fn execute(&mut self, head: RecordHead) -> Result<(), Broken> {
        let counters = self.session.counters();
        counters.progress().begin(head.message, head.slot);
        counters.add(
            match head.slot {
                Some(_) => Counter::Requests,
                None => Counter::Records,
            },
            1,
        );
        let request = match wormhole_api::decode(head.message, self.buffer.body()) {
            Ok(request) => request,
            Err(error) => {
                counters.add(reason_of(&error), 1);
                let Some(result) = error.result() else {
                    return Err(Broken::Record(error));
                };
                return self.refuse(head, error, result);
            }
        };
        counters.message(head.message);
        let Some(device) = self.session.device_number(head.device) else {
            self.session.counters().add(Counter::NoDevice, 1);
            let result = CuResult::INVALID_DEVICE;
            return self.refuse(head, "a message is for a device that is not there", result);
        };
        let info = request.info();
        // The slots bound the number of requests that can wait on the job threads.
        if head.slot.is_none() && info.kind != Kind::Record {
            return Err(Broken::NoSlot(info.name));
        }
        if let Some(slot) = head.slot {
            let pending = &mut self.pending[usize::from(slot.get())];
            if *pending {
                return Err(Broken::SlotBusy {
                    slot: slot.get(),
                    message: info.name,
                });
            }
            *pending = true;
            if self.requests.is_multiple_of(MEASURED) {
                self.began[usize::from(slot.get())] = Some(Instant::now());
            }
            self.requests = self.requests.wrapping_add(1);
        }
        let call = Call {
            slot: head.slot,
            sequence: head.sequence,
            device,
            thread: head.thread,
            // The line is the guest's to write until the record is there, so it is not looked at without need.
            more: self.busy && head.message == LaunchKernel::ID && self.consumer.is_ready(),
            brief: false,
        };
        self.session.keep_order(&call, &request);
        let answers = &self.answers;
        let mut failure = None;
        let dispatched = wormhole_api::dispatch(
            &mut self.session,
            &call,
            &request,
            |result, parts| match head.slot {
                Some(slot) => publish(answers, slot, head.sequence, result, parts),
                None if result != CuResult::SUCCESS => failure = Some(result),
                None => {}
            },
        );
        debug_assert!(
            dispatched == Dispatched::Answered || info.kind != Kind::Request,
            "{} is answered in its turn, says the table",
            info.name
        );
        if let (Dispatched::Answered, Some(slot)) = (dispatched, head.slot) {
            self.answered(slot);
        }
        if let Some(result) = failure {
            self.unheard(info.name, result);
        }
        Ok(())
    }

    /// Refuses a record for its content. The session goes on.
    fn refuse(
        &mut self,
        head: RecordHead,
        error: impl std::fmt::Display,
        result: CuResult,
    ) -> Result<(), Broken> {
        self.session.settle();
        match head.slot {
            Some(slot) if self.pending[usize::from(slot.get())] => {
                return Err(Broken::SlotBusy {
                    slot: slot.get(),
                    message: "a malformed record",
                });
            }
            Some(slot) => {
                publish(&self.answers, slot, head.sequence, result, &[]);
                self.session.counters().progress().answered(slot);
            }
            None => {
                tracing::warn!("a record is refused: {error}");
                self.session.make_sticky(result);
            }
        }
        Ok(())
    }

    /// Handles a failure that no answer carries. The program went on as if the call had worked, so
    /// the error becomes sticky.
    fn unheard(&mut self, name: &str, result: CuResult) {
        // The first failure is the one that the program learns.
        self.session.settle();
        self.session.fail(name, result);
    }

    /// Handles the events in the inbox. Returns false if there were none.
    fn drain_inbox(&mut self) -> bool {
        if !self.inbox.is_pending() {
            return false;
        }
        // An event may destroy objects, and give memory back.
        self.session.settle();
        self.inbox.acknowledge();
        while let Some(event) = self.inbox.next() {
            match event {
                Event::Finished {
                    slot,
                    sequence,
                    finish,
                } => {
                    let Answer { result, payload } = finish(&mut self.session);
                    self.session.count_memory();
                    self.answer(slot, sequence, result, &payload);
                    for (call, error) in self.session.job_finished() {
                        if let Some(slot) = call.slot {
                            self.answer(slot, call.sequence, error, &[]);
                        }
                    }
                }
                Event::ExtentAdded { address, bytes } => self.session.add_extent(address, bytes),
                Event::ExtentRemoved { address, release } => {
                    self.session.remove_extent(address, release);
                }
                Event::LaneFailed => self.session.counters().add(Counter::Failures, 1),
            }
        }
        self.session.sweep();
        true
    }

    /// Answers a deferred request.
    fn answer(&mut self, slot: SlotIndex, sequence: u64, result: CuResult, payload: &[u8]) {
        publish(&self.answers, slot, sequence, result, &[payload]);
        self.answered(slot);
    }

    /// Notes that a slot's request is answered.
    fn answered(&mut self, slot: SlotIndex) {
        let place = usize::from(slot.get());
        self.pending[place] = false;
        let counters = self.session.counters();
        counters.progress().answered(slot);
        if let Some(began) = self.began[place].take() {
            counters.time(began.elapsed());
        }
    }

    /// Sleeps until the doorbell rings or another thread sends an event.
    fn park(&mut self) -> Result<(), Violation> {
        self.session.sweep();
        self.session.count_memory();
        if !self.inbox.announce_sleep() {
            return Ok(());
        }
        self.sleepers.last_look();
        self.session.counters().progress().park(true);
        // During a reset no record may be taken, so records in the ring must not prevent the sleep.
        if self.session.is_resetting() {
            self.inbox.sleep();
        } else if self.consumer.park()? {
            self.session.counters().add(Counter::Parks, 1);
            if !self.inbox.is_pending() {
                self.consumer.sleep();
            }
            self.consumer.unpark();
        }
        self.session.counters().progress().park(false);
        self.inbox.awake();
        Ok(())
    }

    fn end(&mut self, broken: Broken) -> Broken {
        let counters = self.session.counters();
        match &broken {
            Broken::Ring(violation) => counters.add(kind_of(violation), 1),
            Broken::SlotBusy { .. } => counters.add(Counter::SlotBusy, 1),
            Broken::NoSlot(_) => counters.add(Counter::NoSlot, 1),
            // Counted when decoding failed.
            Broken::Record(_) => {}
        }
        self.session
            .status()
            .set_once(VIOLATION_RESULT, EndCause::Violation);
        broken
    }
}

fn publish(
    answers: &AnswerSlots,
    slot: SlotIndex,
    sequence: u64,
    result: CuResult,
    parts: &[&[u8]],
) {
    if let Err(error) = answers.publish(slot, sequence, result.0, parts) {
        tracing::error!("{error}");
        let _ = answers.publish(slot, sequence, CuResult::NOT_SUPPORTED.0, &[]);
    }
}

fn kind_of(violation: &Violation) -> Counter {
    match violation {
        Violation::Commit { .. } => Counter::RingCommit,
        Violation::Lap { .. } => Counter::RingLap,
        Violation::Overrun { .. } => Counter::RingOverrun,
        Violation::Body { .. } => Counter::RingBody,
        Violation::Slot { .. } => Counter::RingSlot,
        Violation::Tail { .. } => Counter::RingTail,
    }
}

fn reason_of(error: &DecodeError) -> Counter {
    match error {
        DecodeError::UnknownMessage { .. } => Counter::UnknownMessage,
        DecodeError::Short { .. } => Counter::ShortBody,
        DecodeError::Long { .. } => Counter::LongBody,
        DecodeError::Limit { .. } => Counter::CountAboveLimit,
        DecodeError::Cut { .. } => Counter::CountAboveBody,
        DecodeError::Handle { .. } => Counter::HandleType,
        DecodeError::Value { .. } => Counter::ExcludedValue,
    }
}
