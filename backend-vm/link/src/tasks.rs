//! Names the limit that is reached when the system refuses a thread or a process.

use std::error::Error;
use std::fmt;
use std::io;
use std::thread::JoinHandle;

use rustix::process::{Resource, getrlimit};

/// Limits for which clone(2) and pthread_create(3) fail with `EAGAIN`. Displays as the end of a
/// sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskLimit {
    /// Whether this process has a limit on memory, which includes the stacks of threads.
    memory_is_limited: bool,
}

impl TaskLimit {
    fn here() -> Self {
        let is_limited = |resource| getrlimit(resource).current.is_some();
        Self {
            memory_is_limited: is_limited(Resource::Data) || is_limited(Resource::As),
        }
    }
}

impl fmt::Display for TaskLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the limit of processes and threads is reached (RLIMIT_NPROC, pids.max of a cgroup, or kernel.threads-max)",
        )?;
        if self.memory_is_limited {
            f.write_str(", or that of memory for their stacks (RLIMIT_DATA, RLIMIT_AS)")?;
        }
        Ok(())
    }
}

impl Error for TaskLimit {}

/// Replaces `EAGAIN` from the creation of a thread or a process by an error that names the limits.
#[must_use]
pub fn named(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EAGAIN) => io::Error::new(error.kind(), TaskLimit::here()),
        _ => error,
    }
}

/// Starts a thread with this name.
///
/// # Errors
/// The system refuses the thread; the error is [`named`].
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
