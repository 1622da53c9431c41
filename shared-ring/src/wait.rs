//! How to wait for a word to change: spin, then yield, then sleep with growing intervals.

use core::time::Duration;

use crate::sync;

/// What a waiter does before it looks again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Look again at once: the pause has already been made.
    Spun,
    /// Give the processor to another thread, then look again.
    Yield,
    /// Sleep this long (or until something else wakes the waiter), then look again.
    Sleep(Duration),
}

/// How long each phase of a wait lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Looks with a PAUSE between them.
    pub spins: u32,
    /// Looks with a yield between them, after the spins.
    pub yields: u32,
    /// The first sleep; each later one is twice as long.
    pub first_sleep: Duration,
    /// The longest sleep.
    pub longest_sleep: Duration,
}

impl Policy {
    /// Some 50 µs of spinning, then yields, then sleeps of 20 µs to 1 ms.
    pub const DEFAULT: Self = Self {
        spins: 1000,
        yields: 50,
        first_sleep: Duration::from_micros(20),
        longest_sleep: Duration::from_millis(1),
    };
}

impl Default for Policy {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// One wait. Make a new one, or [`Backoff::reset`] it, when what was waited for has come.
///
/// ```
/// use core::time::Duration;
/// use wormhole_ring::wait::{Backoff, Policy, Step};
/// let policy = Policy {
///     spins: 1,
///     yields: 1,
///     first_sleep: Duration::from_micros(20),
///     longest_sleep: Duration::from_micros(30),
/// };
/// let mut backoff = Backoff::with(policy);
/// assert_eq!(backoff.step(), Step::Spun);
/// assert_eq!(backoff.step(), Step::Yield);
/// assert_eq!(backoff.step(), Step::Sleep(Duration::from_micros(20)));
/// assert_eq!(backoff.step(), Step::Sleep(Duration::from_micros(30)));
/// backoff.reset();
/// assert_eq!(backoff.step(), Step::Spun);
/// ```
#[derive(Clone, Debug)]
pub struct Backoff {
    policy: Policy,
    /// Steps made, at most `spins + yields`.
    steps: u32,
    /// The next sleep.
    sleep: Duration,
}

impl Backoff {
    /// A wait by [`Policy::DEFAULT`].
    #[must_use]
    pub const fn new() -> Self {
        Self::with(Policy::DEFAULT)
    }

    /// A wait by `policy`.
    #[must_use]
    pub const fn with(policy: Policy) -> Self {
        Self {
            policy,
            steps: 0,
            sleep: policy.first_sleep,
        }
    }

    /// Starts again from the first spin.
    pub fn reset(&mut self) {
        *self = Self::with(self.policy);
    }

    /// The next step of the wait. A spin is already done when this returns; the rest is the caller's,
    /// who knows what else may wake it.
    #[inline]
    pub fn step(&mut self) -> Step {
        if self.steps < self.policy.spins {
            self.steps += 1;
            sync::relax();
            return Step::Spun;
        }
        if self.steps - self.policy.spins < self.policy.yields {
            self.steps += 1;
            return Step::Yield;
        }
        let sleep = self.sleep.min(self.policy.longest_sleep);
        self.sleep = sleep.saturating_mul(2);
        Step::Sleep(sleep)
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}
