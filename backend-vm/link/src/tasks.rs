//! Threads and processes that the system refuses, by the limit that is reached.

use std::error::Error;
use std::fmt;
use std::io;
use std::thread::JoinHandle;

/// The limits that clone(2) answers with `EAGAIN`, as a sentence's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskLimit;

impl fmt::Display for TaskLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the limit of processes and threads is reached (RLIMIT_NPROC, pids.max of a cgroup, or kernel.threads-max)",
        )
    }
}

impl Error for TaskLimit {}

/// The error of a thread or a process that could not be made, with its cause named.
#[must_use]
pub fn named(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EAGAIN) => io::Error::new(error.kind(), TaskLimit),
        _ => error,
    }
}

/// Starts a thread with this name.
///
/// # Errors
/// The system refuses it; the limit that is reached is [`named`].
pub fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(body).map_err(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eagain_is_the_limit_and_other_errors_stay_what_they_are() {
        let limit = named(io::Error::from_raw_os_error(libc::EAGAIN));
        assert!(limit.to_string().contains("pids.max"), "{limit}");
        let other = named(io::Error::from_raw_os_error(libc::ENOMEM));
        assert_eq!(other.raw_os_error(), Some(libc::ENOMEM));
    }
}
