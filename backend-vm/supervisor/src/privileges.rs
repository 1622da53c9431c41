//! What the supervisor gives up before it hears a guest: all capabilities, and the system calls that it does not need.
//!
//! A call outside the list ends the supervisor, with the call's number in the log: the list is wrong, or the process is
//! not the supervisor's any more. Where the host's NVML is asked, such a call fails with EPERM: its libraries make others
//! with each driver.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// Why there is no filter.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    #[error("the filter does not compile")]
    Compile(#[from] seccompiler::BackendError),
    #[error("the kernel does not take the filter")]
    Install(#[from] seccompiler::Error),
    #[error("denied calls cannot be reported")]
    Handler(#[source] io::Error),
}

/// Calls with any arguments: memory, descriptors that are there, sockets that are connected, waiting.
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
    libc::SYS_socketpair,
    libc::SYS_getsockopt,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_lseek,
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
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
    // The allocator asks for the number of processors.
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
    libc::SYS_tgkill,
    libc::SYS_restart_syscall,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    // The end of the spawner.
    libc::SYS_wait4,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// What loading and asking the host's NVML adds: its libraries, its device files, a thread.
const NVML: &[i64] = &[
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_statfs,
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
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

/// `AT_STATX_DONT_SYNC`, as statx(2) has it: the answer is what the kernel knows, without asking the file system.
const DONT_SYNC: u64 = 0x4000;

/// Calls that fail as on a system without them. The libraries make them for what they have another way to learn: the size
/// of a file, the number of processors, the lines of a backtrace. `statx` is made that waits for no file system.
const ABSENT: &[i64] = &[libc::SYS_statx, libc::SYS_open, libc::SYS_openat];

/// Gives up all capabilities for good, those of programs that this process could execute included. To be called before
/// there are other threads.
///
/// # Errors
/// As `prctl` and `capset`.
pub fn drop_all() -> io::Result<()> {
    let check = |result: i64| match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // _LINUX_CAPABILITY_VERSION_3, this thread; two sets of effective, permitted, inheritable.
    let header = [0x2008_0522_u32, 0];
    let none = [0u32; 6];
    // SAFETY: system calls on integers and on complete local structures.
    unsafe {
        // An ordinary user may not, and has none. Numbers beyond the last capability are refused.
        for capability in 0..64 {
            libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
        check(
            libc::prctl(
                libc::PR_CAP_AMBIENT,
                libc::PR_CAP_AMBIENT_CLEAR_ALL,
                0,
                0,
                0,
            )
            .into(),
        )?;
        check(libc::syscall(
            libc::SYS_capset,
            header.as_ptr(),
            none.as_ptr(),
        ))?;
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())
    }
}

/// Leaves all threads of this process the calls of the list, and those of the host's NVML if it is asked.
///
/// # Errors
/// The kernel has no filters.
pub fn filter(asks_nvml: bool) -> Result<(), FilterError> {
    report_denied_calls().map_err(FilterError::Handler)?;
    for program in programs(asks_nvml)? {
        seccompiler::apply_filter_all_threads(&program)?;
    }
    Ok(())
}

/// The filters to install, in order. Each must agree for a call to happen.
fn programs(asks_nvml: bool) -> Result<Vec<BpfProgram>, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let nvml = if asks_nvml { NVML } else { &[] };
    for call in CALLS.iter().chain(nvml).chain(ABSENT) {
        rules.insert(*call, Vec::new());
    }
    if !asks_nvml {
        // No memory to execute, new or old.
        let executes = libc::PROT_EXEC.unsigned_abs().into();
        for call in [libc::SYS_mmap, libc::SYS_mprotect] {
            rules.insert(call, vec![rule(2, SeccompCmpOp::MaskedEq(executes), 0)?]);
        }
        // Sockets and files of the standard library that are not to wait, what a socket's reader has left, and what its
        // writer has brought.
        let calls = [libc::FIONBIO, libc::TIOCOUTQ, libc::FIONREAD];
        let calls = calls.map(|call| rule(1, SeccompCmpOp::Eq, call));
        let calls: Result<_, _> = calls.into_iter().collect();
        rules.insert(libc::SYS_ioctl, calls?);
    }
    let level = condition(1, SeccompCmpOp::Eq, libc::SOL_SOCKET.unsigned_abs().into())?;
    let option = condition(
        2,
        SeccompCmpOp::Eq,
        libc::SO_OOBINLINE.unsigned_abs().into(),
    )?;
    rules.insert(
        libc::SYS_setsockopt,
        vec![SeccompRule::new(vec![level, option])?],
    );
    rules.insert(
        libc::SYS_prctl,
        vec![rule(
            0,
            SeccompCmpOp::Eq,
            libc::PR_SET_NAME.unsigned_abs().into(),
        )?],
    );
    let architecture = std::env::consts::ARCH.try_into()?;
    // Which calls the libraries of NVML try differs by driver. They go on without most of them.
    let denied = if asks_nvml {
        SeccompAction::Errno(libc::EPERM.unsigned_abs())
    } else {
        SeccompAction::Trap
    };
    let allowed = SeccompFilter::new(rules, denied, SeccompAction::Allow, architecture)?;
    let absent = ABSENT.iter().filter(|call| !nvml.contains(call));
    let mut absent: BTreeMap<i64, Vec<SeccompRule>> =
        absent.map(|call| (*call, Vec::new())).collect();
    let waits = rule(2, SeccompCmpOp::MaskedEq(DONT_SYNC), 0)?;
    absent.insert(libc::SYS_statx, vec![waits]);
    let absent = SeccompFilter::new(
        absent,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS.unsigned_abs()),
        architecture,
    )?;
    // The list of what is allowed comes last: nothing can be installed after it.
    Ok(vec![absent.try_into()?, allowed.try_into()?])
}

/// A rule of one condition.
fn rule(
    argument: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompRule, seccompiler::BackendError> {
    SeccompRule::new(vec![condition(argument, operator, value)?])
}

fn condition(
    argument: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
}

/// `siginfo_t` of SIGSYS (sigaction(2)), as far as it is read.
#[repr(C)]
struct DeniedCall {
    signal: [i32; 3],
    /// Where the call was made.
    address: u64,
    number: i32,
    architecture: u32,
}

fn report_denied_calls() -> io::Result<()> {
    // SAFETY: all zeros are a valid value of this structure.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(i32, *const DeniedCall, *const libc::c_void) = denied;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: a complete structure, and a handler that makes system calls on its own memory alone.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Exit status after a denied call: as a shell's for SIGSYS.
const DENIED: i32 = 128 + libc::SIGSYS;

extern "C" fn denied(_: i32, call: *const DeniedCall, _: *const libc::c_void) {
    // SAFETY: the kernel passes the structure of this signal.
    let number = unsafe { (*call).number };
    let mut line =
        *b"wormhole-supervisor: the filter denies system call 0000, and this process ends\n";
    let mut left = number.unsigned_abs();
    for at in (51..55).rev() {
        let digit = (left % 10) as u8;
        line[at] = b'0' + digit;
        left /= 10;
    }
    // SAFETY: system calls on a local buffer; the process ends here.
    unsafe {
        libc::write(2, line.as_ptr().cast(), line.len());
        libc::_exit(DENIED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_compile_to_programs_that_the_kernel_can_take() {
        for asks_nvml in [false, true] {
            for program in programs(asks_nvml).unwrap() {
                assert!(program.len() < 4096, "{} instructions", program.len());
            }
        }
    }

    /// What a process says and how it ends that makes a call under the filter.
    fn under_filter(make: impl FnOnce()) -> (String, i32) {
        use std::io::Read;
        let (mut said, end) = io::pipe().unwrap();
        let programs = programs(false).unwrap();
        // SAFETY: the child makes system calls on what is prepared, and ends.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "{}", io::Error::last_os_error());
        if pid == 0 {
            use std::os::fd::AsRawFd;
            // SAFETY: system calls on integers; the process ends here.
            unsafe {
                libc::dup2(end.as_raw_fd(), 2);
                libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
                let mut status = 0;
                if report_denied_calls().is_err() {
                    status = 1;
                }
                for program in &programs {
                    if seccompiler::apply_filter(program).is_err() {
                        status = 2;
                    }
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
            ("0041", [libc::SYS_socket, 1, 1, 0, 0, 0]),
            ("0087", [libc::SYS_unlink, path.cast_signed(), 0, 0, 0, 0]),
            ("0059", [libc::SYS_execve, path.cast_signed(), 0, 0, 0, 0]),
            // Private, anonymous, executable.
            ("0009", [libc::SYS_mmap, 0, 4096, 5, 0x22, -1]),
        ];
        for (number, [call, a, b, c, d, e]) in denied {
            // SAFETY: integers and a literal; the call is not made.
            let (said, status) = under_filter(|| unsafe {
                libc::syscall(call, a, b, c, d, e, 0);
            });
            let line = format!(
                "wormhole-supervisor: the filter denies system call {number}, and this process ends\n"
            );
            assert_eq!((said, status), (line, DENIED));
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
