//! Backoff for waits on a shared word: spin, then yield, then sleep for growing intervals.

use core::time::Duration;

use crate::sync;

/// Action of a waiter before it checks the word again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Check again at once: the spin was done by [`Backoff::step`].
    Spun,
    /// Yield the processor to another thread, then check again.
    Yield,
    /// Sleep this long (or until another event wakes the waiter), then check again.
    Sleep(Duration),
}

/// Lengths of the phases of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Number of checks with a PAUSE between them.
    pub spins: u32,
    /// Number of checks with a yield between them, after the spins.
    pub yields: u32,
    /// Length of the first sleeps.
    pub first_sleep: Duration,
    /// Divisor, not 0: a later sleep is the sum of all earlier sleeps divided by this number. A wait therefore ends late by
    /// at most that part of its length.
    pub part: u32,
    /// Length of the longest sleep.
    pub longest_sleep: Duration,
}

impl Policy {
    /// About 50 µs of spinning, then yields, then sleeps of 20 µs to 1 ms.
    pub const DEFAULT: Self = Self {
        spins: 1000,
        yields: 50,
        first_sleep: Duration::from_micros(20),
        part: 128,
        longest_sleep: Duration::from_millis(1),
    };
}

impl Default for Policy {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// State of one wait. Create a new one or call [`Backoff::reset`] for the next wait.
///
/// ```
/// use core::time::Duration;
/// use wormhole_ring::wait::{Backoff, Policy, Step};
/// let policy = Policy {
///     spins: 1,
///     yields: 1,
///     first_sleep: Duration::from_micros(20),
///     part: 2,
///     longest_sleep: Duration::from_micros(30),
/// };
/// let mut backoff = Backoff::with(policy);
/// assert_eq!(backoff.step(), Step::Spun);
/// assert_eq!(backoff.step(), Step::Yield);
/// assert_eq!(backoff.step(), Step::Sleep(Duration::from_micros(20)));
/// assert_eq!(backoff.step(), Step::Sleep(Duration::from_micros(20)));
/// assert_eq!(backoff.step(), Step::Sleep(Duration::from_micros(20)));
/// assert_eq!(backoff.step(), Step::Sleep(Duration::from_micros(30)));
/// assert_eq!(backoff.step(), Step::Sleep(Duration::from_micros(30)));
/// backoff.reset();
/// assert_eq!(backoff.step(), Step::Spun);
/// ```
#[derive(Clone, Debug)]
pub struct Backoff {
    policy: Policy,
    /// Steps done so far, at most `spins + yields`.
    steps: u32,
    /// Length of all sleeps so far.
    slept: Duration,
}

impl Backoff {
    /// Creates a wait with [`Policy::DEFAULT`].
    #[must_use]
    pub const fn new() -> Self {
        Self::with(Policy::DEFAULT)
    }

    /// Creates a wait with `policy`.
    #[must_use]
    pub const fn with(policy: Policy) -> Self {
        Self {
            policy,
            steps: 0,
            slept: Duration::ZERO,
        }
    }

    /// Starts again from the first spin.
    pub fn reset(&mut self) {
        *self = Self::with(self.policy);
    }

    /// Returns the next step of the wait. A spin is already done on return; the caller yields or sleeps, because it
    /// knows which other events may wake it.
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
        let sleep = (self.slept / self.policy.part)
            .max(self.policy.first_sleep)
            .min(self.policy.longest_sleep);
        self.slept = self.slept.saturating_add(sleep);
        Step::Sleep(sleep)
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}
