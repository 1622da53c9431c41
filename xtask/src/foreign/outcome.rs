//! Outcome of a program of another project.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Exit status with which cuda-samples say that they cannot run here (`EXIT_WAIVED`).
const WAIVED: i32 = 2;
/// Exit statuses of `timeout`: when the time was over, and when the program had to be killed.
const OVER: [i32; 2] = [124, 137];
/// Words by which programs that exit with 0 say that a result is wrong.
const FAILURES: [&str; 3] = ["FAIL", "Test failed", "CUDA error"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Passed,
    Waived,
    /// Exited with 0, and this line of its output says that a result is wrong.
    Wrong(String),
    Failed(i32),
    Signal(i32),
    TooSlow,
}

impl Outcome {
    pub fn of(status: ExitStatus, output: &str) -> Self {
        let signal = |number: i32| Self::Signal(number);
        match status.code() {
            None => status.signal().map_or(Self::Failed(-1), signal),
            Some(0) => {
                let mut lines = output.lines().map(str::trim);
                let wrong = lines.find(|line| FAILURES.iter().any(|word| line.contains(word)));
                wrong.map_or(Self::Passed, |line| Self::Wrong(line.to_owned()))
            }
            Some(WAIVED) => Self::Waived,
            Some(code) if OVER.contains(&code) => Self::TooSlow,
            // The launcher's status for a program that a signal ended, as a shell's.
            Some(code @ 129..160) => signal(code - 128),
            Some(code) => Self::Failed(code),
        }
    }

    /// Returns whether two runs of a program ended alike. The words of wrong results may differ.
    pub fn is_like(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Wrong(_), Self::Wrong(_))) || self == other
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passes"),
            Self::Waived => f.write_str("says that it cannot run here"),
            Self::Wrong(line) => write!(f, "says `{}`", line.replace('|', "\\|")),
            Self::Failed(code) => write!(f, "status {code}"),
            Self::Signal(number) => write!(f, "signal {number}"),
            Self::TooSlow => f.write_str("too slow"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_distinguished_by_status_and_words() {
        let of = |code: i32, text: &str| Outcome::of(ExitStatus::from_raw(code << 8), text);
        assert_eq!(of(0, "Test PASSED\n"), Outcome::Passed);
        assert_eq!(of(0, "0 errors\n"), Outcome::Passed);
        assert_eq!(
            of(0, "ok\n  Result = FAIL \n"),
            Outcome::Wrong("Result = FAIL".to_owned())
        );
        assert_eq!(of(2, ""), Outcome::Waived);
        assert_eq!(of(1, "PASS"), Outcome::Failed(1));
        assert_eq!(of(124, ""), Outcome::TooSlow);
        assert_eq!(of(137, ""), Outcome::TooSlow);
        assert_eq!(of(139, ""), Outcome::Signal(11));
        assert_eq!(Outcome::of(ExitStatus::from_raw(6), ""), Outcome::Signal(6));
        assert!(of(0, "FAIL 1").is_like(&of(0, "FAIL 2")));
        assert!(!of(0, "FAIL").is_like(&Outcome::Passed));
    }
}
