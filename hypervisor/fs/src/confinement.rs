//! Drops what the process does not need before it reads the guest's requests.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, umask};
use wormhole_privileges::{
    Calls, Denial, FilesError, Filter, FilterError, READ_ANY_FILE, all_masked, equals,
    keep_capabilities, masked, only_change_below, only_read_below, report_denied_calls, within,
};

use crate::tree::{CHANGE_FLAGS, MOST_HANDLES, MOST_OPEN, OPEN_FLAGS, PRIVILEGES};

/// Limit of open files: two caches, the guest's files, and what a request and the process itself hold.
const MOST_FILES: u64 = 2 * MOST_OPEN as u64 + MOST_HANDLES as u64 + 64;

/// Error from confining the process.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
    #[error(transparent)]
    Filter(#[from] FilterError),
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error("capabilities cannot be dropped")]
    Capabilities(#[source] io::Error),
    #[error("denied system calls cannot be reported")]
    Report(#[source] io::Error),
    #[error("the number of open files cannot be limited")]
    Limit(#[source] rustix::io::Errno),
}

/// System calls with any arguments: the socket, reading files and listing folders, memory, the end. None of them
/// changes a file.
const CALLS: &[i64] = &[
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_newfstatat,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_lseek,
    libc::SYS_getdents64,
    libc::SYS_pread64,
    libc::SYS_readlinkat,
    libc::SYS_write,
    libc::SYS_close,
    libc::SYS_futex,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_brk,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Further system calls of a process that serves queues: its threads, the monitor's messages with descriptors, and
/// eventfds. A shared mapping of the guest's memory is an `mmap` of one of these.
const OF_QUEUES: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_read,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_dup,
];

/// Further system calls of a process whose guest may write: entries of folders, contents and times. Others have rules.
const OF_CHANGES: &[i64] = &[
    libc::SYS_pwrite64,
    libc::SYS_ftruncate,
    libc::SYS_unlinkat,
    libc::SYS_symlinkat,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
];

/// Access of a guest to the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Change,
}

/// Server of the guest's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queues {
    /// The monitor, which sends packets.
    Monitor,
    /// This process, by vhost-user.
    Own,
}

fn filter(queues: Queues, access: Access) -> Result<Filter, FilterError> {
    let executable = libc::PROT_EXEC.unsigned_abs().into();
    let own = std::process::id().into();
    let mut calls = Calls::any(CALLS).and_advice()?;
    if queues == Queues::Own {
        let name = equals(0, libc::PR_SET_NAME.unsigned_abs().into())?;
        let copy = equals(1, libc::F_DUPFD_CLOEXEC.unsigned_abs().into())?;
        calls = calls
            .and(OF_QUEUES)
            .and_threads()?
            .and_where(libc::SYS_prctl, vec![name])
            .and_where(libc::SYS_fcntl, vec![copy]);
    }
    calls = match access {
        // No flag that writes, truncates or creates.
        Access::Read => {
            calls.and_where(libc::SYS_openat, vec![within(2, OPEN_FLAGS.bits().into())?])
        }
        Access::Change => and_changes(calls)?,
    };
    calls
        .and_where(libc::SYS_mmap, vec![masked(2, executable, 0)?])
        .and_where(libc::SYS_mprotect, vec![masked(2, executable, 0)?])
        .and_where(libc::SYS_tgkill, vec![equals(0, own)?])
        // The report of a denied call names the thread.
        .and_where(
            libc::SYS_prctl,
            vec![equals(0, libc::PR_GET_NAME.unsigned_abs().into())?],
        )
        // A debug build's standard library checks that a descriptor is open before it closes it.
        .and_where(
            libc::SYS_fcntl,
            vec![equals(1, libc::F_GETFD.unsigned_abs().into())?],
        )
        .compile(Denial::Signal)
}

/// Adds the calls that change files. No mode has the bits of [`PRIVILEGES`], and what names a path does not follow a link.
fn and_changes(calls: Calls) -> Result<Calls, FilterError> {
    let all = u64::from(u32::MAX);
    let privileges = u64::from(PRIVILEGES);
    let opens = OPEN_FLAGS.union(CHANGE_FLAGS).bits();
    // The mode follows the flags.
    let opens = all_masked(&[(2, !u64::from(opens) & all, 0), (3, privileges, 0)])?;
    let no_replace = u64::from(libc::RENAME_NOREPLACE);
    Ok(calls
        .and(OF_CHANGES)
        .and_where(libc::SYS_openat, vec![opens])
        .and_where(libc::SYS_mkdirat, vec![masked(2, privileges, 0)?])
        .and_where(libc::SYS_fchmod, vec![masked(1, privileges, 0)?])
        .and_where(libc::SYS_linkat, vec![equals(4, 0)?])
        .and_where(libc::SYS_renameat2, vec![within(4, no_replace)?])
        // Of a descriptor, not of a path.
        .and_where(libc::SYS_utimensat, vec![masked(1, u64::MAX, 0)?]))
}

/// Confines this process, which has one thread so far, to `access` below `folder` and to its open socket.
///
/// # Errors
/// The kernel does not support filters, or refuses a limit.
pub fn enter(
    folder: BorrowedFd<'_>,
    queues: Queues,
    access: Access,
) -> Result<(), ConfinementError> {
    report_denied_calls().map_err(ConfinementError::Report)?;
    let limit = getrlimit(Resource::Nofile);
    let most = limit
        .maximum
        .map_or(MOST_FILES, |most| most.min(MOST_FILES));
    let limit = Rlimit {
        current: Some(most),
        maximum: Some(most),
    };
    setrlimit(Resource::Nofile, limit).map_err(ConfinementError::Limit)?;
    keep_capabilities(READ_ANY_FILE).map_err(ConfinementError::Capabilities)?;
    match access {
        Access::Read => only_read_below(folder)?,
        Access::Change => {
            // The guest's kernel has applied the mask of the program.
            umask(Mode::empty());
            only_change_below(folder)?;
        }
    }
    Ok(filter(queues, access)?.install()?)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use wormhole_privileges::attempts::{
        BEYOND_CHANGES, all_are_denied, are_denied, asked, attempt,
    };

    use super::*;

    /// Makes the call that this process must make, if any.
    fn attempt_asked(queues: Queues, access: Access) {
        if let Some(call) = asked() {
            let confined = std::thread::Builder::new().name("fs".to_owned());
            let confined = confined.spawn(move || {
                let root = std::fs::File::open("/").expect("a root");
                enter(root.as_fd(), queues, access).expect("confined");
                attempt(&call)
            });
            let _ = confined.expect("a thread").join();
        }
    }

    #[test]
    fn the_process_has_its_calls_and_no_others() {
        attempt_asked(Queues::Monitor, Access::Read);
        let test = "confinement::tests::the_process_has_its_calls_and_no_others";
        all_are_denied(test, "fs");
    }

    #[test]
    fn a_process_that_serves_queues_has_its_calls_and_no_others() {
        attempt_asked(Queues::Own, Access::Read);
        let test = "confinement::tests::a_process_that_serves_queues_has_its_calls_and_no_others";
        all_are_denied(test, "fs");
    }

    #[test]
    fn a_process_whose_guest_may_write_makes_no_devices_and_gives_no_rights_away() {
        attempt_asked(Queues::Own, Access::Change);
        let test = "confinement::tests::a_process_whose_guest_may_write_makes_no_devices_and_gives_no_rights_away";
        are_denied(&BEYOND_CHANGES, test, "fs");
    }
}
