use std::fmt;
use std::sync::Arc;

/// Function that a device calls after a fence is written.
#[derive(Clone)]
pub struct AfterFence(Arc<dyn Fn() + Send + Sync>);

impl AfterFence {
    pub fn new(call: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(call))
    }

    pub fn call(&self) {
        (self.0)();
    }
}

impl fmt::Debug for AfterFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AfterFence")
    }
}
