//! Privileges that the supervisor drops before it reads a guest's message: all capabilities, and
//! the system calls that it does not need.
//!
//! A call outside the list ends the supervisor, with the call's name in the log: either the list is
//! wrong, or an attacker controls the process. With the host's NVML, such a call fails with EPERM
//! instead, because its libraries make different calls with each driver.

use std::io;

use wormhole_privileges::{
    Calls, Denial, Filter, all_equal, all_masked, equals, masked, report_denied_calls, within,
};

pub use wormhole_privileges::drop_capabilities;

/// Reason why the filter cannot be installed.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    #[error(transparent)]
    Filter(#[from] wormhole_privileges::FilterError),
    #[error("denied calls cannot be reported")]
    Handler(#[source] io::Error),
}

/// Calls permitted with any arguments: memory, open descriptors, connected sockets, waiting.
const CALLS: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_newfstatat,
    libc::SYS_lseek,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_brk,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    // The allocator queries the number of processors.
    libc::SYS_sched_getaffinity,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    // Waiting for the spawner, and the end of the process.
    libc::SYS_wait4,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Calls added for loading and querying the host's NVML: its libraries, its device files, a thread.
const NVML: &[i64] = &[
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_statfs,
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fcntl,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_ioctl,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_dup2,
    libc::SYS_pipe2,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getppid,
    libc::SYS_prlimit64,
    libc::SYS_sched_getaffinity,
    libc::SYS_gettimeofday,
    libc::SYS_time,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setscheduler,
    libc::SYS_set_tid_address,
];

/// Commands of fcntl(2) that act on this process's descriptors alone. Others could have the kernel
/// send signals to any process of this user.
const COMMANDS: &[i32] = &[
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_GET_SEALS,
];

/// Seals that this process adds. For `F_SEAL_WRITE` the kernel waits for all processors under a lock of its own.
const SEALS: i32 =
    libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE;

/// `AT_STATX_DONT_SYNC` of statx(2): the kernel answers from its cache without asking the file
/// system.
const DONT_SYNC: u64 = 0x4000;

/// Calls that fail as on a system without them. The libraries then use other calls for the size of
/// a file, the number of processors or a backtrace. `statx` is permitted only with `DONT_SYNC`.
const ABSENT: &[i64] = &[libc::SYS_open, libc::SYS_openat];

/// Restricts all threads of this process to the calls of the list, and those of the host's NVML if
/// it is queried.
///
/// # Errors
/// The kernel does not support filters.
pub fn filter(asks_nvml: bool) -> Result<(), FilterError> {
    report_denied_calls().map_err(FilterError::Handler)?;
    compiled(asks_nvml)?.install_on_all_threads()?;
    Ok(())
}

fn compiled(asks_nvml: bool) -> Result<Filter, wormhole_privileges::FilterError> {
    let nvml = if asks_nvml { NVML } else { &[] };
    let absent: Vec<i64> = ABSENT
        .iter()
        .copied()
        .filter(|call| !nvml.contains(call))
        .collect();
    let mut calls = Calls::any(CALLS)
        .and_advice()?
        .and(nvml)
        .and_where(
            libc::SYS_prctl,
            vec![
                equals(0, libc::PR_SET_NAME.unsigned_abs().into())?,
                equals(0, libc::PR_GET_NAME.unsigned_abs().into())?,
            ],
        )
        // Signals for this process alone: others of the same user serve other tenants.
        .and_where(
            libc::SYS_tgkill,
            vec![equals(0, std::process::id().into())?],
        )
        // Huge pages are left out: no cgroup counts them. So are families of sockets for which the kernel would load
        // a module.
        .and_where(
            libc::SYS_memfd_create,
            vec![within(
                1,
                u64::from(libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING),
            )?],
        )
        .and_where(
            libc::SYS_socketpair,
            vec![equals(0, libc::AF_UNIX.unsigned_abs().into())?],
        )
        .without(&absent)
        .and(&[libc::SYS_statx])
        .without_where(libc::SYS_statx, vec![masked(2, DONT_SYNC, 0)?]);
    if !asks_nvml {
        // No mapping may be or become executable.
        let executes = (2, libc::PROT_EXEC.unsigned_abs().into(), 0);
        let huge = (3, libc::MAP_HUGETLB.unsigned_abs().into(), 0);
        calls = calls
            .and_where(libc::SYS_mmap, vec![all_masked(&[executes, huge])?])
            .and_where(libc::SYS_mprotect, vec![all_masked(&[executes])?]);
        for command in COMMANDS {
            let command = command.unsigned_abs().into();
            calls = calls.and_where(libc::SYS_fcntl, vec![equals(1, command)?]);
        }
        let add = (
            1,
            u64::from(u32::MAX),
            libc::F_ADD_SEALS.unsigned_abs().into(),
        );
        let seals = all_masked(&[add, (2, !u64::from(SEALS.unsigned_abs()), 0)])?;
        calls = calls.and_where(libc::SYS_fcntl, vec![seals]);
        // Non-blocking mode of the standard library's sockets and files; bytes unread by a socket's
        // reader; bytes available from its writer.
        for request in [libc::FIONBIO, libc::TIOCOUTQ, libc::FIONREAD] {
            calls = calls.and_where(libc::SYS_ioctl, vec![equals(1, request)?]);
        }
    }
    let level = (1, libc::SOL_SOCKET.unsigned_abs().into());
    let option = (2, libc::SO_OOBINLINE.unsigned_abs().into());
    calls = calls.and_where(libc::SYS_setsockopt, vec![all_equal(&[level, option])?]);
    // The calls that NVML's libraries try vary by driver. The libraries work without most of them.
    calls.compile(if asks_nvml {
        Denial::Fails(libc::EPERM)
    } else {
        Denial::Signal
    })
}

#[cfg(test)]
mod tests {
    use wormhole_privileges::DENIED;

    use super::*;

    #[test]
    fn filters_compile_to_programs_that_the_kernel_can_take() {
        for asks_nvml in [false, true] {
            compiled(asks_nvml).unwrap();
        }
    }

    /// Runs a call under the filter in a child. Returns the child's output and exit status.
    fn under_filter(make: impl FnOnce()) -> (String, i32) {
        use std::io::Read;
        let _alone = crate::alone::alone();
        let (mut said, end) = io::pipe().unwrap();
        let filter = compiled(false).unwrap();
        // SAFETY: the child makes system calls on prepared data, and ends.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "{}", io::Error::last_os_error());
        if pid == 0 {
            use std::os::fd::AsRawFd;
            // SAFETY: system calls on integers; the process ends here.
            unsafe {
                libc::dup2(end.as_raw_fd(), 2);
                let mut status = 0;
                if report_denied_calls().is_err() {
                    status = 1;
                }
                if filter.install().is_err() {
                    status = 2;
                }
                make();
                libc::_exit(status)
            }
        }
        drop(end);
        let mut text = String::new();
        said.read_to_string(&mut text).unwrap();
        let mut status = 0;
        // SAFETY: a child of this process, and a local integer.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert!(libc::WIFEXITED(status), "{status:#x}");
        (text, libc::WEXITSTATUS(status))
    }

    #[test]
    fn a_denied_call_ends_the_process_with_its_number() {
        let path = c"/etc/passwd".as_ptr() as u64;
        let denied = [
            ("41 (socket)", [libc::SYS_socket, 1, 1, 0, 0, 0]),
            (
                "87 (unlink)",
                [libc::SYS_unlink, path.cast_signed(), 0, 0, 0, 0],
            ),
            (
                "59 (execve)",
                [libc::SYS_execve, path.cast_signed(), 0, 0, 0, 0],
            ),
            // Signals to another process, at once or when a descriptor has data.
            ("234 (tgkill)", [libc::SYS_tgkill, 1, 1, 9, 0, 0]),
            ("72 (fcntl)", [libc::SYS_fcntl, 2, 8, 1, 0, 0]),
            // Private, anonymous, executable.
            ("9 (mmap)", [libc::SYS_mmap, 0, 4096, 5, 0x22, -1]),
            // Huge pages.
            ("9 (mmap)", [libc::SYS_mmap, 0, 4096, 3, 0x40022, -1]),
            (
                "319 (memfd_create)",
                [libc::SYS_memfd_create, path.cast_signed(), 4, 0, 0, 0],
            ),
            ("53 (socketpair)", [libc::SYS_socketpair, 30, 5, 0, 0, 0]),
        ];
        for (name, [call, a, b, c, d, e]) in denied {
            // SAFETY: integers and a literal; the call is not made.
            let (said, status) = under_filter(|| unsafe {
                libc::syscall(call, a, b, c, d, e, 0);
            });
            let start = format!("wormhole: the filter denies system call {name} to thread ");
            assert!(said.starts_with(&start), "{said}");
            assert!(said.ends_with(", and this process ends\n"), "{said}");
            assert_eq!(status, DENIED);
        }
    }

    #[test]
    fn calls_of_the_list_are_made() {
        let (said, status) = under_filter(|| {
            // SAFETY: a literal.
            unsafe {
                libc::write(2, c"said".as_ptr().cast(), 4);
            }
        });
        assert_eq!((said.as_str(), status), ("said", 0));
    }
}
