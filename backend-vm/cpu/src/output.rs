//! Buffers for text that kernels print.
//!
//! `printf` text goes to a ring buffer, as on a GPU: a synchronization flushes it, and it loses its oldest text when
//! full. The text of `assert` is visible at once (CUDA programming guide, "Formatted output", "Assertion").

use std::collections::VecDeque;

use wormhole_device::DeviceOutput;
use wormhole_lock::Mutex;

#[derive(Debug, Default)]
struct State {
    printed: VecDeque<u8>,
    visible: DeviceOutput,
}

/// Printed text of one context.
#[derive(Debug, Default)]
pub struct Output {
    state: Mutex<State>,
}

impl Output {
    /// Appends text of `printf` and drops the oldest bytes beyond `capacity`.
    pub fn print(&self, text: &[u8], capacity: u64) {
        let capacity = usize::try_from(capacity).unwrap_or(usize::MAX);
        let mut state = self.state.lock();
        state.printed.extend(text);
        let excess = state.printed.len().saturating_sub(capacity);
        state.printed.drain(..excess);
    }

    /// Appends text of `assert`, which is visible at once.
    pub fn complain(&self, text: &[u8]) {
        self.state.lock().visible.stderr.extend_from_slice(text);
    }

    /// Makes all text printed so far visible. Called at synchronizations.
    pub fn flush(&self) {
        let state = &mut *self.state.lock();
        state.visible.stdout.extend(state.printed.drain(..));
    }

    /// Takes the visible text.
    pub fn take(&self) -> DeviceOutput {
        std::mem::take(&mut self.state.lock().visible)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_text_waits_for_a_synchronization_and_the_oldest_is_lost() {
        let output = Output::default();
        output.print(b"abcdef", 4);
        output.complain(b"no");
        assert_eq!(
            (output.take().stderr, output.take().stdout),
            (b"no".to_vec(), Vec::new())
        );
        output.flush();
        assert_eq!(output.take().stdout, b"cdef");
        assert!(output.take().stdout.is_empty());
    }
}
