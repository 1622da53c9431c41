//! Descriptors and exit statuses of a worker process.

use std::os::fd::RawFd;

/// Descriptor of the stream to the supervisor.
pub const CONTROL: RawFd = 3;
/// Descriptor of the worker's log; standard output and error belong to the device.
pub const LOG: RawFd = 4;
/// Variable of a worker: the number of processors that cgroups leave to its supervisor, and to all workers. Cgroups are out of a
/// worker's sight.
pub const PROCESSORS: &str = "WORMHOLE_PROCESSORS";
/// Exit status after the guest broke its ring.
pub const BROKEN: i32 = 3;
/// Exit status if arena segments cannot be mapped or unmapped.
pub const NO_ARENA: i32 = 4;

/// Sets SIGCHLD to its default action, so that ended children stay zombies until they are waited for. An ignored
/// SIGCHLD is inherited over execve(2), and the kernel would then reap the children itself.
pub fn keep_ended_children() {
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}
