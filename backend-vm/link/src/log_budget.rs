//! Limits on the log lines that a tenant causes, so that a guest that fails in a loop, or starts
//! one process after another, does not fill the disk, and on the refusals that a user is sent. A tenant has one budget of lines of the
//! supervisor, and one of bytes for the logs of its workers. A backend VM has one of bytes for its whole log, and a guest's
//! launcher one of lines about the backend that the guest has lost. Lines that are left out are counted.

use std::time::Instant;

/// Rate of the supervisor's lines.
const LINES: Rate = Rate {
    burst: 64,
    refill: 1,
    seconds: 1,
};
/// Rate of bytes of workers' logs.
const BYTES: Rate = Rate {
    burst: 256 << 10,
    refill: 1 << 10,
    seconds: 1,
};
/// Rate of bytes of the logs of the processes that serve a user's tenants: more than they write by themselves.
const PROCESSES: Rate = Rate {
    burst: 512 << 10,
    refill: 1 << 10,
    seconds: 1,
};
/// Rate of bytes of the log of one of these processes when the others have spent those of all.
const PROCESS: Rate = Rate {
    burst: 6 << 10,
    refill: 64,
    seconds: 1,
};
/// Rate of bytes of the log of a backend VM, caused by its supervisor and the tenants of all slots together.
const MACHINE: Rate = Rate {
    burst: 2 << 20,
    refill: 4 << 10,
    seconds: 1,
};
/// Rate of lines about a guest whose backend has ended, in the log of the guest's launcher.
const LAUNCHER: Rate = Rate {
    burst: 64,
    refill: 1,
    seconds: 60,
};
/// Rate of refusals with a sentence. A launcher may leave each of them unread for good.
const REFUSALS: Rate = Rate {
    burst: 1000,
    refill: 1,
    seconds: 60,
};

/// Units available at once, and units added each so many seconds up to that.
#[derive(Clone, Copy, Debug)]
struct Rate {
    burst: u32,
    refill: u32,
    seconds: u64,
}

/// Decision on a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Log,
    /// Logs the line, and a note that those that follow are left out.
    Last,
    /// Logs the number of lines that were left out, and the line.
    After(u64),
    Drop,
}

/// Remaining budget of one tenant.
#[derive(Debug)]
pub struct LogBudget {
    rate: Rate,
    left: u32,
    refilled: Instant,
    /// Number of lines left out since one was logged.
    left_out: u64,
}

impl LogBudget {
    /// Creates a budget of lines.
    pub fn of_lines(now: Instant) -> Self {
        Self::new(LINES, now)
    }

    /// Creates a budget of bytes of workers' logs.
    pub fn of_workers(now: Instant) -> Self {
        Self::new(BYTES, now)
    }

    /// Bytes that a line of a process costs at least.
    pub const LEAST_LINE: u32 = 256;

    /// Creates a budget of bytes of the logs of all processes of a user's tenants.
    pub fn of_processes(now: Instant) -> Self {
        Self::new(PROCESSES, now)
    }

    /// Creates a budget of bytes of the log of one of these processes.
    pub fn of_process(now: Instant) -> Self {
        Self::new(PROCESS, now)
    }

    /// Creates a budget of bytes of the log of a backend VM.
    pub fn of_machine(now: Instant) -> Self {
        Self::new(MACHINE, now)
    }

    /// Creates a budget of lines about a guest whose backend has ended.
    pub fn of_launcher(now: Instant) -> Self {
        Self::new(LAUNCHER, now)
    }

    /// Creates a budget of refusals.
    pub fn of_refusals(now: Instant) -> Self {
        Self::new(REFUSALS, now)
    }

    fn new(rate: Rate, now: Instant) -> Self {
        Self {
            rate,
            left: rate.burst,
            refilled: now,
            left_out: 0,
        }
    }

    /// Spends one line, if one is left.
    pub fn spend(&mut self, now: Instant) -> Verdict {
        self.spend_all(1, now)
    }

    /// Spends `cost` units, or all that are left.
    pub fn spend_all(&mut self, cost: u32, now: Instant) -> Verdict {
        if self.left(now) == 0 {
            self.left_out += 1;
            return Verdict::Drop;
        }
        self.left = self.left.saturating_sub(cost);
        match self.take_left_out() {
            0 if self.left == 0 => Verdict::Last,
            0 => Verdict::Log,
            count => Verdict::After(count),
        }
    }

    /// Returns the number of units left.
    pub fn left(&mut self, now: Instant) -> u32 {
        let passed = now.saturating_duration_since(self.refilled).as_secs() / self.rate.seconds;
        if passed > 0 {
            let passed = u32::try_from(passed).unwrap_or(u32::MAX);
            let gained = passed.saturating_mul(self.rate.refill);
            self.left = self.left.saturating_add(gained).min(self.rate.burst);
            self.refilled = now;
        }
        self.left
    }

    /// Returns the number of lines left out since one was logged, and begins anew.
    pub fn take_left_out(&mut self) -> u64 {
        std::mem::take(&mut self.left_out)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const BURST: u32 = LINES.burst;
    const REFILL: Duration = Duration::from_secs(1);

    #[test]
    fn workers_bytes_come_in_a_burst_and_then_at_their_rate() {
        let start = Instant::now();
        let mut budget = LogBudget::of_workers(start);
        assert_eq!(budget.spend_all(BYTES.burst - 1, start), Verdict::Log);
        // The last line is written whole.
        assert_eq!(budget.spend_all(1000, start), Verdict::Last);
        assert_eq!(budget.spend_all(1, start), Verdict::Drop);
        let later = start + REFILL;
        assert_eq!(budget.spend_all(BYTES.refill, later), Verdict::After(1));
        assert_eq!(budget.spend_all(1, later), Verdict::Drop);
    }

    #[test]
    fn a_burst_is_refused_in_words_and_then_one_each_minute() {
        let start = Instant::now();
        let mut budget = LogBudget::of_refusals(start);
        for _ in 0..REFUSALS.burst {
            assert_ne!(budget.spend(start), Verdict::Drop);
        }
        assert_eq!(budget.spend(start + Duration::from_secs(59)), Verdict::Drop);
        let later = start + Duration::from_secs(60);
        assert_eq!(budget.spend(later), Verdict::After(1));
        assert_eq!(budget.spend(later), Verdict::Drop);
    }

    #[test]
    fn a_burst_is_logged_and_then_a_line_each_second() {
        let start = Instant::now();
        let mut budget = LogBudget::of_lines(start);
        for _ in 1..BURST {
            assert_eq!(budget.spend(start), Verdict::Log);
        }
        assert_eq!(budget.spend(start), Verdict::Last);
        assert_eq!(budget.spend(start), Verdict::Drop);
        assert_eq!(budget.spend(start), Verdict::Drop);
        let later = start + REFILL;
        assert_eq!(budget.spend(later), Verdict::After(2));
        assert_eq!(budget.spend(later), Verdict::Drop);
        let rested = later + REFILL * 1000;
        assert_eq!(budget.spend(rested), Verdict::After(1));
        for _ in 2..BURST {
            assert_eq!(budget.spend(rested), Verdict::Log);
        }
        assert_eq!(budget.spend(rested), Verdict::Last);
    }
}
