//! Guard that aborts the process when its thread panics.

/// Aborts the process, and with it the session, if dropped during a panic. Threads whose panic
/// would leave a guest waiting for ever hold it.
#[derive(Debug)]
pub struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("a thread of the worker has panicked; the worker ends");
            std::process::abort();
        }
    }
}
