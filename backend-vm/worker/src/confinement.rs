//! Confinement that the worker adds to what it was started with.

use wormhole_privileges::{Filter, FilterError};

/// Denies all threads of this process to execute another program, and to add further filters. The kernel kills a worker
/// whose supervisor dies because its first thread has asked for that (`PR_SET_PDEATHSIG`). A thread that executes a program
/// takes the place of the first one, and has not asked.
///
/// # Errors
/// The kernel refuses the filter.
pub fn execute_nothing_else() -> Result<(), FilterError> {
    Filter::against(&[libc::SYS_execve, libc::SYS_seccomp])?.install_on_all_threads()
}
