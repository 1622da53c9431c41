//! Adds up the results of test runners.

/// Number of tests by outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TestResults {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
    /// Failed tests, each with its output but backtraces.
    pub failures: Vec<String>,
}

impl TestResults {
    /// Creates the results of a single step, `what`, that passed or failed.
    pub fn of(what: &str, success: bool) -> Self {
        if success {
            Self {
                passed: 1,
                ..Self::default()
            }
        } else {
            Self {
                failed: 1,
                failures: vec![what.to_owned()],
                ..Self::default()
            }
        }
    }

    /// Sums libtest's closing lines. A runner that fails without a failed test counts as one failure of `what`.
    pub fn of_libtest(what: &str, output: &str, success: bool) -> Self {
        let mut total = Self {
            failures: failures(output),
            ..Self::default()
        };
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
            total.failures.push(what.to_owned());
        }
        total
    }
}

impl std::ops::AddAssign for TestResults {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.failures.extend(other.failures);
    }
}

/// Returns libtest's output of each failed test: a section that a line `---- NAME stdout ----` opens and the list of
/// failed names, or the next section, ends. Backtraces are left out: the log has them.
fn failures(output: &str) -> Vec<String> {
    let mut sections: Vec<String> = Vec::new();
    let (mut open, mut in_backtrace) = (false, false);
    for line in output.lines() {
        if line.starts_with("---- ") && line.ends_with(" ----") {
            sections.push(String::new());
            (open, in_backtrace) = (true, false);
        } else if line == "failures:" {
            open = false;
        } else if line == "stack backtrace:" {
            in_backtrace = true;
        } else if in_backtrace && !line.starts_with(' ') {
            // The note behind the last frame.
            in_backtrace = false;
            continue;
        }
        if let (true, false, Some(section)) = (open, in_backtrace, sections.last_mut()) {
            section.push_str(line);
            section.push('\n');
        }
    }
    sections
}

/// Returns the number before `word` in `ok. 12 passed; 0 failed; …`.
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
            TestResults::of_libtest("tests", output, false),
            TestResults {
                passed: 7,
                failed: 2,
                skipped: 1,
                failures: Vec::new(),
            }
        );
    }

    #[test]
    fn a_runner_that_dies_counts_as_a_failure() {
        let output = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured\n";
        assert_eq!(
            TestResults::of_libtest("tests", output, false),
            TestResults {
                passed: 3,
                failed: 1,
                skipped: 0,
                failures: vec!["tests".to_owned()],
            }
        );
    }

    #[test]
    fn each_failed_test_keeps_its_output_without_backtraces() {
        let output = "test a ... ok\ntest b ... FAILED\ntest c ... FAILED\n\nfailures:\n\n\
            ---- b stdout ----\none\nstack backtrace:\n   0: a::b\n             at ./c.rs:1:2\nnote: Some\n\n\
            ---- c stdout ----\ntwo\n\n\nfailures:\n    b\n    c\n\n\
            test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured\n";
        assert_eq!(
            TestResults::of_libtest("tests", output, false).failures,
            [
                "---- b stdout ----\none\n\n",
                "---- c stdout ----\ntwo\n\n\n"
            ]
        );
    }
}
