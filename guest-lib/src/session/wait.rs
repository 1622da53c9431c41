//! Waits for a word to change, while the session lives.

use std::time::{Duration, Instant};

use rustix::thread::{gettid, sched_getcpu};
use wormhole_ring::status::EndCause;
use wormhole_ring::wait::{Backoff, Policy, Step};
use wormhole_ring::waits::{Note, Wait};

use super::Session;
use super::transport::Way;
use crate::error::{CuError, Result};
use crate::log;

/// Error of every call after the backend is gone without a cause in the status word.
pub const BACKEND_LOST: CuError = CuError::SYSTEM_NOT_READY;

/// Time allowed for an answer after the context has died.
const ANSWER_GRACE: Duration = Duration::from_secs(10);

/// Longest sleep of a thread that the backend wakes.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);
const DEFAULT_SPINS: u32 = Policy::DEFAULT.spins;
/// Longest sleep of a thread that leaves its processor to the executor.
const HAND_OVER: Duration = Duration::from_micros(100);
/// Spins, some 2 µs, after which a waiting thread looks again whether the executor needs its processor.
const SPINS_TO_A_LOOK: u32 = 40;

/// Manners of waiting. A program chooses one by the flags of its contexts and events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// As this library chooses: for answers, and for what the program does not wait for.
    Short,
    /// As CUDA chooses: spins as long as a device with processors of its own is busy.
    Auto,
    /// Sleeps for short times, without being woken: for a wait whose end is far from the end of the device's work.
    Nap,
    /// Spins to the end (`CU_CTX_SCHED_SPIN`).
    Spin,
    /// Leaves the processor to other threads between looks (`CU_CTX_SCHED_YIELD`).
    Yield,
    /// Sleeps at once (`CU_CTX_SCHED_BLOCKING_SYNC`).
    Block,
}

const SPINNING: Policy = Policy {
    spins: u32::MAX,
    ..Policy::DEFAULT
};
const YIELDING: Policy = Policy {
    spins: 0,
    yields: u32::MAX,
    ..Policy::DEFAULT
};
const NAPPING: Policy = Policy {
    spins: SPINS_TO_A_LOOK,
    yields: 0,
    ..Policy::DEFAULT
};
const ASLEEP: Policy = Policy {
    spins: 0,
    yields: 0,
    ..Policy::DEFAULT
};

/// State of one wait.
struct Progress<'a> {
    backoff: Backoff,
    spun: u32,
    note: Option<Note<'a>>,
    /// Longest duration of the sleep that was announced, with which the next step begins.
    announced: Option<Duration>,
}

impl Progress<'_> {
    const fn new(policy: Policy) -> Self {
        Self {
            backoff: Backoff::with(policy),
            spun: 0,
            note: None,
            announced: None,
        }
    }
}

/// Returns whether the calling thread runs on this processor.
fn is_here(processor: u32) -> bool {
    u32::try_from(sched_getcpu()) == Ok(processor)
}

impl Session {
    /// Fails with the error that ended the session, if it has ended.
    #[inline]
    pub fn alive(&self) -> Result {
        match self.status.load() {
            None => Ok(()),
            Some(cause) => Err(self.ended(cause.result, cause.cause)),
        }
    }

    /// Returns the error of a context that died of a fault of the program.
    pub fn fault(&self) -> Option<CuError> {
        let cause = self.status.load()?;
        (EndCause::from_code(cause.cause) == Some(EndCause::ContextDead))
            .then_some(CuError(cause.result))
    }

    #[cold]
    fn ended(&self, result: u32, cause: u32) -> CuError {
        let error = if result == 0 {
            BACKEND_LOST
        } else {
            CuError(result)
        };
        let known = EndCause::from_code(cause);
        if known == Some(EndCause::ContextDead) {
            self.show_last_output();
        } else {
            self.end_logged.call_once(|| {
                let why = known.map_or("an unknown cause", EndCause::describe);
                log::error!("the session has ended: {why}; every further call returns {error}");
            });
        }
        error
    }

    /// Waits for an answer. The worker of a dead context still answers, with the error, so this waits up to
    /// [`ANSWER_GRACE`] after the end.
    pub fn wait_for_answer<T>(&self, wait: Wait, mut done: impl FnMut() -> Option<T>) -> Result<T> {
        let answered = self.wait(wait, &mut done);
        let Err(error) = answered else {
            return answered;
        };
        let context_dead = self.fault().is_some();
        if !context_dead {
            return Err(error);
        }
        let deadline = Instant::now() + ANSWER_GRACE;
        let mut progress = Progress::new(Policy::DEFAULT);
        while Instant::now() < deadline {
            if let Some(value) = done() {
                return Ok(value);
            }
            if !self.step(&mut progress, wait) {
                break;
            }
        }
        Err(error)
    }

    /// Performs one step of a wait, which is noted before its first sleep; returns false if the control stream has
    /// ended.
    #[inline]
    fn step<'a>(&'a self, progress: &mut Progress<'a>, wait: Wait) -> bool {
        if let (Some(limit), Some(note)) = (progress.announced.take(), &progress.note) {
            // The limit is for a backend that is gone, or for an executor that does not need this processor any more.
            return note.sleep(limit) || self.control.sleep(Duration::ZERO);
        }
        match progress.backoff.step() {
            Step::Spun => {
                let spun = progress.spun;
                progress.spun = spun.wrapping_add(1);
                !spun.is_multiple_of(SPINS_TO_A_LOOK) || self.look(progress, wait)
            }
            Step::Yield => {
                std::thread::yield_now();
                true
            }
            Step::Sleep(duration) => self.sleep(progress, wait, LONGEST_SLEEP, duration),
        }
    }

    /// Notes a wait that has become long, and leaves the processor to the executor if it needs this one. Returns false
    /// if the control stream has ended.
    fn look<'a>(&'a self, progress: &mut Progress<'a>, wait: Wait) -> bool {
        if progress.spun > DEFAULT_SPINS && progress.note.is_none() {
            progress.note = self.note(wait);
        }
        let in_the_way = self.is_local
            && self.status.executor().processor.is_some_and(is_here)
            && !self.producer.is_consumer_parked();
        if !in_the_way {
            return true;
        }
        // The next spin looks again.
        progress.spun = 0;
        self.sleep(progress, wait, HAND_OVER, Policy::DEFAULT.first_sleep)
    }

    /// Announces a sleep of at most `limit`, before which the caller looks once more. If the backend wakes nobody who
    /// waits so, sleeps for `blind` at once.
    #[cold]
    fn sleep<'a>(
        &'a self,
        progress: &mut Progress<'a>,
        wait: Wait,
        limit: Duration,
        blind: Duration,
    ) -> bool {
        if progress.note.is_none() {
            progress.note = self.note(wait);
        }
        match &progress.note {
            Some(note) if self.is_local && wait.is_woken() => {
                note.announce();
                progress.announced = Some(limit);
                true
            }
            _ => self.control.sleep(blind),
        }
    }

    #[cold]
    fn note(&self, wait: Wait) -> Option<Note<'_>> {
        self.waits.note(gettid().as_raw_pid().cast_unsigned(), wait)
    }

    /// Waits until `done` returns a value: spins, then yields, then sleeps. The end of the control stream or of the
    /// session ends the wait. The supervisor's dump shows `wait` while this sleeps.
    #[inline]
    pub fn wait<T>(&self, wait: Wait, done: impl FnMut() -> Option<T>) -> Result<T> {
        self.wait_in(Manner::Short, wait, done)
    }

    /// Waits in a manner of its own.
    #[inline]
    pub fn wait_in<T>(
        &self,
        manner: Manner,
        wait: Wait,
        mut done: impl FnMut() -> Option<T>,
    ) -> Result<T> {
        if let Some(value) = done() {
            return Ok(value);
        }
        let mut progress = Progress::new(self.policy(manner));
        loop {
            if let Err(error) = self.alive() {
                // The value may have come just before the end.
                return done().ok_or(error);
            }
            if !self.step(&mut progress, wait) {
                self.end_of_stream();
            }
            if let Some(value) = done() {
                return Ok(value);
            }
        }
    }

    fn policy(&self, manner: Manner) -> Policy {
        if !matches!(self.way, Way::Poll) {
            return ASLEEP;
        }
        match manner {
            Manner::Block => ASLEEP,
            Manner::Spin => SPINNING,
            Manner::Yield => YIELDING,
            // In a VM a sleep stops the processor, by an exit.
            Manner::Nap if self.is_local => NAPPING,
            // Where the device computes on the system's processors, a thread that spins takes one from it.
            Manner::Auto | Manner::Nap if self.status.executor().device_is_apart => SPINNING,
            Manner::Auto | Manner::Nap | Manner::Short => Policy::DEFAULT,
        }
    }
}
