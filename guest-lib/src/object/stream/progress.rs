//! Numbers of a stream's operations, and of the kernels among them, in one word: a launch counts both at once.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of the number of operations. The number of kernels is above them, where it wraps.
const BITS: u32 = 48;

/// Numbers of operations and kernels, from the stream's creation on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress(u64);

impl Progress {
    pub const START: Self = Self(0);
    /// An operation that is no kernel.
    pub const OPERATION: Self = Self(1);
    pub const KERNEL: Self = Self(1 | 1 << BITS);

    /// Returns the number of operations.
    pub fn operations(self) -> u64 {
        self.0 & ((1 << BITS) - 1)
    }

    /// Returns whether there are kernels between this and a later progress. A stream has far fewer than 65,536 operations
    /// under way.
    pub fn lacks_kernels_of(self, later: Self) -> bool {
        self.0 >> BITS != later.0 >> BITS
    }
}

/// Progress that threads count on.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub fn load(&self) -> Progress {
        Progress(self.0.load(Ordering::Acquire))
    }

    pub fn store(&self, progress: Progress) {
        self.0.store(progress.0, Ordering::Release);
    }

    /// Counts an operation, and returns the progress with it.
    pub fn add(&self, operation: Progress) -> Progress {
        Progress(
            self.0
                .fetch_add(operation.0, Ordering::AcqRel)
                .wrapping_add(operation.0),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_and_other_operations_are_counted_at_once() {
        let counter = Counter::new();
        let start = counter.load();
        let copied = counter.add(Progress::OPERATION);
        assert_eq!(copied.operations(), 1);
        assert!(!start.lacks_kernels_of(copied));
        let launched = counter.add(Progress::KERNEL);
        assert_eq!(launched.operations(), 2);
        assert!(copied.lacks_kernels_of(launched));
        for _ in 0..65_535 {
            counter.add(Progress::KERNEL);
        }
        let last = counter.load();
        assert_eq!(
            last.operations(),
            65_537,
            "wrapped kernels add no operation"
        );
        assert!(launched.lacks_kernels_of(last));
    }
}
