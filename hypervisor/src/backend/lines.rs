//! Lines about a guest whose backend has ended, within a budget. A hostile guest may cause them without end, and the log of a
//! guest in the background lies in memory.

use std::time::Instant;

use wormhole_link::log_budget::{LogBudget, Verdict};

use crate::say;

/// Says lines, and leaves out those beyond the budget. The number of these precedes the next line.
#[derive(Debug)]
pub struct Lines {
    budget: LogBudget,
    last: String,
}

impl Lines {
    pub fn new(now: Instant) -> Self {
        Self {
            budget: LogBudget::of_launcher(now),
            last: String::new(),
        }
    }

    /// Says a line, unless it is the same as the last one.
    pub fn say(&mut self, line: String) {
        for line in self.take(line, Instant::now()) {
            say::line(format_args!("{line}"));
        }
    }

    /// Returns the lines to be said.
    fn take(&mut self, line: String, now: Instant) -> Vec<String> {
        if line == self.last {
            return Vec::new();
        }
        self.last.clone_from(&line);
        match self.budget.spend(now) {
            Verdict::Log => vec![line],
            Verdict::Last => vec![line, "further lines of this kind are left out".to_owned()],
            Verdict::After(count) => vec![format!("{count} lines are left out"), line],
            Verdict::Drop => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_guest_that_alternates_two_reasons_does_not_fill_the_log() {
        let start = Instant::now();
        let mut lines = Lines::new(start);
        let hours = 10;
        let attempts = hours * 60 * 60 * 2;
        let said = (0..attempts).map(|attempt| {
            let now = start + Duration::from_millis(500) * attempt;
            let reason = format!("reason {}", attempt % 2);
            lines.take(reason, now).len()
        });
        let said: usize = said.sum();
        assert!((100..2000).contains(&said), "{said}");
    }

    #[test]
    fn a_line_is_said_once_until_another_comes() {
        let now = Instant::now();
        let mut lines = Lines::new(now);
        let mut take = |line: &str| lines.take(line.to_owned(), now);
        assert_eq!(take("one"), ["one"]);
        assert!(take("one").is_empty());
        assert_eq!(take("two"), ["two"]);
        assert_eq!(take("one"), ["one"]);
    }
}
