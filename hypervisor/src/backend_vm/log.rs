//! Log of a backend VM: the output of its standard error, within a budget. The VM may be in the hands of a tenant, and the
//! file lies on the host's disk.

use std::io::{self, Write};
use std::time::Instant;

use wormhole_link::log_budget::{LogBudget, Verdict};

/// Longest part of a line that is written at once, in bytes.
const LONGEST: usize = 4096;

/// Writes whole lines, and leaves out those beyond the budget. The number of these precedes the next line.
#[derive(Debug)]
pub struct Log<W: Write> {
    to: W,
    budget: LogBudget,
    /// Begin of a line whose end has not come.
    line: Vec<u8>,
    now: fn() -> Instant,
}

impl<W: Write> Log<W> {
    pub fn new(to: W) -> Self {
        Self::at(to, Instant::now)
    }

    fn at(to: W, now: fn() -> Instant) -> Self {
        Self {
            to,
            budget: LogBudget::of_machine(now()),
            line: Vec::new(),
            now,
        }
    }

    fn end_line(&mut self) -> io::Result<()> {
        let line = std::mem::take(&mut self.line);
        let cost = u32::try_from(line.len()).unwrap_or(u32::MAX);
        match self.budget.spend_all(cost, (self.now)()) {
            Verdict::Drop => return Ok(()),
            Verdict::After(count) => {
                writeln!(self.to, "backend VM: {count} lines of its log are left out")?;
            }
            Verdict::Log => {}
            Verdict::Last => {
                self.to.write_all(&line)?;
                return writeln!(self.to, "backend VM: further lines of its log are left out");
            }
        }
        self.to.write_all(&line)
    }
}

impl<W: Write> Drop for Log<W> {
    /// Writes the last line, which has no end if the VM was ended within it.
    fn drop(&mut self) {
        if !self.line.is_empty() {
            self.line.push(b'\n');
            // The log ends here, so that no later line can name an error.
            let _ = self.end_line();
        }
    }
}

impl<W: Write> Write for Log<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for &byte in bytes {
            self.line.push(byte);
            if byte == b'\n' || self.line.len() == LONGEST {
                self.end_line()?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    /// A clock that stands.
    fn always() -> Instant {
        static NOW: LazyLock<Instant> = LazyLock::new(Instant::now);
        *NOW
    }

    #[test]
    fn a_backend_vm_that_writes_without_end_does_not_fill_the_log() {
        const BUDGET: usize = 2 << 20;
        for line in [&b"a line\n"[..], b"no end of a line "] {
            let mut log = Log::at(Vec::new(), always);
            for _ in 0..2 * BUDGET / line.len() {
                log.write_all(line).unwrap();
            }
            let size = log.to.len();
            assert!((BUDGET..=BUDGET + 2 * LONGEST).contains(&size), "{size}");
        }
    }

    #[test]
    fn a_backend_vm_that_writes_little_is_logged_whole() {
        let mut log = Log::at(Vec::new(), always);
        for part in ["one\ntw", "o\n", "\n"] {
            log.write_all(part.as_bytes()).unwrap();
        }
        assert_eq!(log.to, b"one\ntwo\n\n");
    }

    #[test]
    fn the_last_line_of_a_vm_that_ends_within_it_is_logged() {
        let mut kept = Vec::new();
        let mut log = Log::at(&mut kept, always);
        log.write_all(b"one\ntw").unwrap();
        drop(log);
        assert_eq!(kept, b"one\ntw\n");
    }
}
