//! Threads that somebody waits for.

/// Held by a thread whose panic would leave a guest waiting for ever: the process ends instead, and with it
/// the session.
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
