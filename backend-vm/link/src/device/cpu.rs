//! Choice of CPU devices, which execute PTX.

use std::fmt;

use super::MOST;

/// Syntax of the choice, for error messages.
pub(super) const FORM: &str =
    "cpu, cpu:N for N devices of the CPU, either with ,check to have kernels checked";

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CpuChoice {
    /// Number of devices, from 1 to [`MOST`].
    pub count: u8,
    /// Whether kernels are checked for races and uninitialised shared memory.
    pub check: bool,
}

impl CpuChoice {
    pub(super) fn read(text: &str) -> Option<Self> {
        let rest = text.strip_prefix("cpu")?;
        let (rest, check) = match rest.strip_suffix(",check") {
            Some(rest) => (rest, true),
            None => (rest, false),
        };
        let count = match rest.strip_prefix(':') {
            Some(count) => count.parse().ok()?,
            None if rest.is_empty() => 1,
            None => return None,
        };
        let known = (1..=MOST).contains(&usize::from(count));
        known.then_some(Self { count, check })
    }
}

impl fmt::Display for CpuChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cpu")?;
        if self.count != 1 {
            write!(f, ":{}", self.count)?;
        }
        f.write_str(if self.check { ",check" } else { "" })
    }
}
