//! Confinement of the process that serves a guest's vsock queues, or its port.

use wormhole_monitor::confinement as monitor;
use wormhole_privileges::{Denial, Filter, FilterError, equals, equals_one_of, masked};

use crate::confinement::{self, ConfinementError};

/// Calls beyond those of the monitor's threads: the other monitor's messages with descriptors, its guest's memory,
/// threads, signals, and the end of the process that removes names.
const CALLS: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_dup,
    libc::SYS_shutdown,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_wait4,
    libc::SYS_waitid,
];

fn filter() -> Result<Filter, FilterError> {
    let commands = [
        libc::F_GETFL,
        libc::F_SETFL,
        libc::F_DUPFD_CLOEXEC,
        libc::F_GETFD,
    ];
    let commands = commands.map(|command| command.unsigned_abs().into());
    let executable = libc::PROT_EXEC.unsigned_abs().into();
    let name = equals(0, libc::PR_SET_NAME.unsigned_abs().into())?;
    monitor::calls()?
        .and(CALLS)
        .and_threads()?
        .and_where(libc::SYS_fcntl, equals_one_of(1, commands)?)
        .and_where(libc::SYS_mmap, vec![masked(2, executable, 0)?])
        .and_where(libc::SYS_prctl, vec![name])
        .compile(Denial::Signal)
}

/// Confines the process. Call it before any thread reads bytes that the guest writes.
///
/// # Errors
/// The kernel does not support filters.
pub fn enter() -> Result<(), ConfinementError> {
    confinement::enter(&filter()?)
}

#[cfg(test)]
mod tests {
    use std::thread::Builder;

    use wormhole_privileges::attempts::{all_are_denied, asked, attempt};

    use super::*;

    #[test]
    fn the_process_has_its_calls_and_no_others() {
        if let Some(call) = asked() {
            let confined = Builder::new().name("attach".to_owned());
            let confined = confined.spawn(move || {
                enter().expect("confined");
                attempt(&call)
            });
            let _ = confined.expect("a thread").join();
        }
        all_are_denied(
            "attach::confinement::tests::the_process_has_its_calls_and_no_others",
            "attach",
        );
    }
}
