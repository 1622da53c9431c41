//! Waits for a word to change, while the session lives.

use std::time::{Duration, Instant};

use wormhole_ring::status::EndCause;
use wormhole_ring::wait::{Backoff, Step};
use wormhole_ring::waits::{Note, Wait};

use super::Session;
use crate::error::{CuError, Result};
use crate::log;

/// Error of every call after the backend is gone without a cause in the status word.
pub const BACKEND_LOST: CuError = CuError::SYSTEM_NOT_READY;

/// Time allowed for an answer after the context has died.
const ANSWER_GRACE: Duration = Duration::from_secs(10);

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
        if known != Some(EndCause::ContextDead) {
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
        let (mut backoff, mut note) = (Backoff::new(), None);
        while Instant::now() < deadline {
            if let Some(value) = done() {
                return Ok(value);
            }
            if !self.step(&mut backoff, wait, &mut note) {
                break;
            }
        }
        Err(error)
    }

    /// Performs one step of a wait, which is noted before its first sleep; returns false if the control stream has
    /// ended.
    #[inline]
    fn step<'a>(&'a self, backoff: &mut Backoff, wait: Wait, note: &mut Option<Note<'a>>) -> bool {
        match backoff.step() {
            Step::Spun => {}
            Step::Yield => std::thread::yield_now(),
            Step::Sleep(duration) => {
                if note.is_none() {
                    *note = self.note(wait);
                }
                return self.control.sleep(duration);
            }
        }
        true
    }

    #[cold]
    fn note(&self, wait: Wait) -> Option<Note<'_>> {
        // SAFETY: the call reads the calling thread's number.
        let thread = unsafe { libc::gettid() };
        self.waits.note(thread.cast_unsigned(), wait)
    }

    /// Waits until `done` returns a value: spins, then yields, then sleeps on the control stream. The end of the
    /// control stream or of the session ends the wait. The supervisor's dump shows `wait` while this sleeps.
    #[inline]
    pub fn wait<T>(&self, wait: Wait, mut done: impl FnMut() -> Option<T>) -> Result<T> {
        let (mut backoff, mut note) = (Backoff::new(), None);
        loop {
            if let Some(value) = done() {
                return Ok(value);
            }
            if let Err(error) = self.alive() {
                // The value may have come just before the end.
                return done().ok_or(error);
            }
            if !self.step(&mut backoff, wait, &mut note) {
                self.end_of_stream();
            }
        }
    }
}
