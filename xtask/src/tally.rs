//! Adds up what test runners report.

/// Tests that ran, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl Tally {
    /// One step that either holds or not.
    pub fn of(success: bool) -> Self {
        if success {
            Self {
                passed: 1,
                ..Self::default()
            }
        } else {
            Self {
                failed: 1,
                ..Self::default()
            }
        }
    }

    /// Sums libtest's closing lines; a runner that failed without a failed test counts as one failure.
    pub fn of_libtest(output: &str, success: bool) -> Self {
        let mut total = Self::default();
        for line in output
            .lines()
            .filter_map(|line| line.trim().strip_prefix("test result: "))
        {
            total.passed += count(line, "passed");
            total.failed += count(line, "failed");
            total.skipped += count(line, "ignored");
        }
        if !success && total.failed == 0 {
            total.failed = 1;
        }
        total
    }
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// The number before `word` in `ok. 12 passed; 0 failed; …`.
fn count(line: &str, word: &str) -> u64 {
    line.split([';', '.'])
        .filter_map(|part| part.trim().strip_suffix(word))
        .find_map(|number| number.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_of_several_binaries_add_up() {
        let output = "running 3 tests\n\
            test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s\n\
            test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out\n";
        assert_eq!(
            Tally::of_libtest(output, false),
            Tally {
                passed: 7,
                failed: 2,
                skipped: 1
            }
        );
    }

    #[test]
    fn a_runner_that_dies_counts_as_a_failure() {
        let output = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured\n";
        assert_eq!(
            Tally::of_libtest(output, false),
            Tally {
                passed: 3,
                failed: 1,
                skipped: 0
            }
        );
    }
}
