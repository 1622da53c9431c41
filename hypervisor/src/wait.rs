//! Waits for descriptors with a limit of time.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Waits until a descriptor can be read, or its other end is gone. Returns false if `end` comes first.
///
/// # Errors
/// The descriptor cannot be waited for.
pub fn until_readable(file: &impl AsFd, end: Option<Instant>) -> io::Result<bool> {
    until(file, PollFlags::IN, end)
}

/// Waits until a descriptor can be written, or its other end is gone. Returns false if `end` comes first.
///
/// # Errors
/// The descriptor cannot be waited for.
pub fn until_writable(file: &impl AsFd, end: Instant) -> io::Result<bool> {
    until(file, PollFlags::OUT, Some(end))
}

fn until(file: &impl AsFd, event: PollFlags, end: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let left = left.map(Timespec::try_from).transpose();
        let left = left.map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(file, event)], left.as_ref()) {
            Err(Errno::INTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}
