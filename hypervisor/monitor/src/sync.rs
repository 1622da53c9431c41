//! Tells threads that the VM ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag that the VM ends. Long work looks at it between its steps.
#[derive(Debug, Clone, Default)]
pub struct Ending(Arc<AtomicBool>);

impl Ending {
    /// Sets the flag.
    pub fn begin(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub fn has_begun(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
