//! How much of what a tenant causes is logged: a guest that fails in a loop fills nobody's disk.

use std::time::{Duration, Instant};

/// Lines that may come at once.
const BURST: u32 = 64;
/// How long until another line may come.
const REFILL: Duration = Duration::from_secs(1);

/// Whether a line may be logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Log,
    /// It may, and it is the last for a while: that is to be said too.
    Last,
    Drop,
}

/// The lines that one tenant may still cause.
#[derive(Debug)]
pub struct LogBudget {
    left: u32,
    refilled: Instant,
}

impl LogBudget {
    pub fn new(now: Instant) -> Self {
        Self {
            left: BURST,
            refilled: now,
        }
    }

    /// Spends a line, if one is left.
    pub fn spend(&mut self, now: Instant) -> Verdict {
        let passed = now.saturating_duration_since(self.refilled).as_secs() / REFILL.as_secs();
        if passed > 0 {
            let gained = u32::try_from(passed).unwrap_or(BURST);
            self.left = self.left.saturating_add(gained).min(BURST);
            self.refilled = now;
        }
        let Some(left) = self.left.checked_sub(1) else {
            return Verdict::Drop;
        };
        self.left = left;
        if left == 0 {
            Verdict::Last
        } else {
            Verdict::Log
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_logged_and_then_a_line_each_second() {
        let start = Instant::now();
        let mut budget = LogBudget::new(start);
        for _ in 1..BURST {
            assert_eq!(budget.spend(start), Verdict::Log);
        }
        assert_eq!(budget.spend(start), Verdict::Last);
        assert_eq!(budget.spend(start), Verdict::Drop);
        let later = start + REFILL;
        assert_eq!(budget.spend(later), Verdict::Last);
        assert_eq!(budget.spend(later), Verdict::Drop);
        let rested = later + REFILL * 1000;
        for _ in 1..BURST {
            assert_eq!(budget.spend(rested), Verdict::Log);
        }
        assert_eq!(budget.spend(rested), Verdict::Last);
    }
}
