//! How a worker process is started, and what its exit status says.

use std::os::fd::RawFd;

/// The descriptor of the stream to the supervisor.
pub const CONTROL: RawFd = 3;
/// The descriptor that the worker's log goes to; standard output and error belong to the device.
pub const LOG: RawFd = 4;
/// Exit status after the guest broke its ring.
pub const BROKEN: i32 = 3;
/// Exit status when arena cannot be mapped or unmapped.
pub const NO_ARENA: i32 = 4;

/// Has ended children wait to be collected, and announce themselves. A parent that ignores SIGCHLD hands that down over
/// execve(2), and then the kernel collects them itself.
pub fn keep_ended_children() {
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}
