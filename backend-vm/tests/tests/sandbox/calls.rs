//! System calls that a worker's filter permits, found by trying every number.
//!
//! The arguments are invalid everywhere, so that a permitted call changes nothing; calls that would
//! end the worker are left out. A call that the kernel itself refuses for want of a capability
//! counts as refused.

use std::collections::BTreeSet;

use super::attacks::Profile;

macro_rules! names {
    ($($name:ident)*) => {
        &[$((stringify!($name), libc::$name)),*]
    };
}

/// Names of the calls that any worker may make, and of those that the driver adds.
const NAMES: &[(&str, i64)] = names![
    SYS_access
    SYS_arch_prctl
    SYS_bind
    SYS_brk
    SYS_chmod
    SYS_close
    SYS_connect
    SYS_dup
    SYS_dup2
    SYS_dup3
    SYS_epoll_create
    SYS_epoll_create1
    SYS_epoll_ctl
    SYS_epoll_pwait
    SYS_epoll_wait
    SYS_eventfd
    SYS_eventfd2
    SYS_exit
    SYS_exit_group
    SYS_faccessat
    SYS_faccessat2
    SYS_fallocate
    SYS_fchmod
    SYS_fdatasync
    SYS_fstat
    SYS_fstatfs
    SYS_fsync
    SYS_ftruncate
    SYS_futex
    SYS_get_mempolicy
    SYS_getcpu
    SYS_getcwd
    SYS_getdents
    SYS_getdents64
    SYS_getegid
    SYS_geteuid
    SYS_getgid
    SYS_getpid
    SYS_getppid
    SYS_getpriority
    SYS_getrandom
    SYS_getrlimit
    SYS_getrusage
    SYS_gettid
    SYS_gettimeofday
    SYS_getuid
    SYS_listen
    SYS_lseek
    SYS_lstat
    SYS_mbind
    SYS_membarrier
    SYS_mincore
    SYS_mkdir
    SYS_mkdirat
    SYS_mlock
    SYS_mlock2
    SYS_mprotect
    SYS_mremap
    SYS_msync
    SYS_munlock
    SYS_munmap
    SYS_nanosleep
    SYS_newfstatat
    SYS_open
    SYS_openat
    SYS_pipe
    SYS_pipe2
    SYS_pread64
    SYS_prlimit64
    SYS_pwrite64
    SYS_read
    SYS_readlink
    SYS_readlinkat
    SYS_readv
    SYS_recvfrom
    SYS_recvmsg
    SYS_rename
    SYS_restart_syscall
    SYS_rmdir
    SYS_rseq
    SYS_rt_sigaction
    SYS_rt_sigprocmask
    SYS_rt_sigreturn
    SYS_sched_get_priority_max
    SYS_sched_get_priority_min
    SYS_sched_getaffinity
    SYS_sched_getparam
    SYS_sched_getscheduler
    SYS_sched_setaffinity
    SYS_sched_setscheduler
    SYS_sched_yield
    SYS_sendmsg
    SYS_sendto
    SYS_set_mempolicy
    SYS_set_robust_list
    SYS_set_tid_address
    SYS_shutdown
    SYS_sigaltstack
    SYS_stat
    SYS_statfs
    SYS_statx
    SYS_sysinfo
    SYS_tgkill
    SYS_time
    SYS_timer_delete
    SYS_timer_settime
    SYS_times
    SYS_umask
    SYS_uname
    SYS_unlink
    SYS_unlinkat
    SYS_write
    SYS_writev
];

/// Calls that end the process, or jump to an address that its stack does not hold.
const ENDS: [i64; 5] = [
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_rt_sigreturn,
    // uretprobe and uprobe, the kernel's entries for its own probes, which seccomp filters do not
    // see (Linux 6.14). From other callers they raise SIGILL.
    335,
    336,
];
/// One more than the last call of Linux 6.18, with room.
const END: i64 = 512;
/// Bit of calls of the x32 ABI.
const X32: i64 = 0x4000_0000;

/// Returns the names of the permitted calls; the number for a call without a name here.
pub fn let_through() -> BTreeSet<String> {
    let numbers = (0..END).chain((0..END).map(|number| number | X32));
    numbers
        .filter(|number| !ENDS.contains(number) && is_let_through(*number))
        .map(name)
        .collect()
}

fn name(number: i64) -> String {
    let found = NAMES.iter().find(|(_, known)| *known == number);
    match found {
        Some((name, _)) => name.trim_start_matches("SYS_").to_owned(),
        None => format!("number {number:#x}"),
    }
}

fn is_let_through(number: i64) -> bool {
    // An unknown operation would fail like an unknown call, so futex gets FUTEX_WAKE, which wakes
    // no thread.
    let second = if number == libc::SYS_futex { 1 } else { -1 };
    // SAFETY: no descriptor, address, process or size in the arguments is valid.
    let result = unsafe { libc::syscall(number, -1_i64, second, -1_i64, -1_i64, -1_i64, -1_i64) };
    let error = std::io::Error::last_os_error().raw_os_error();
    result >= 0 || !matches!(error, Some(libc::EPERM | libc::ENOSYS))
}

/// Returns the calls that the document permits a worker of this profile with any arguments.
pub fn documented(profile: Profile) -> BTreeSet<String> {
    let document = include_str!("../../../../docs/taken-over-worker.md");
    let wanted: &[&str] = match profile {
        Profile::Cpu => &["Any worker: "],
        Profile::Cuda => &["Any worker: ", "A worker on a GPU: "],
    };
    let lines = document.split("\n\n").filter_map(|paragraph| {
        let start = wanted.iter().find(|start| paragraph.starts_with(**start))?;
        Some(&paragraph[start.len()..])
    });
    lines
        .flat_map(|calls| calls.split([',', ' ', '\n', '.']))
        .filter(|call| !call.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Returns the attacks that the document names, with the profiles for which it says that they fail.
pub fn named_attacks() -> Vec<(&'static str, &'static [Profile])> {
    let document = include_str!("../../../../docs/taken-over-worker.md");
    let rows = document.lines().filter(|line| line.starts_with("| "));
    rows.flat_map(|row| {
        let cells: Vec<&str> = row.split('|').collect();
        let attacks = cells.get(3).map_or("", |cell| cell);
        let profiles: &[Profile] = match cells.get(1) {
            Some(cell) if cell.contains("on the CPU device") => &[Profile::Cpu],
            _ => &[Profile::Cpu, Profile::Cuda],
        };
        let names = attacks.split('`').skip(1).step_by(2);
        names.map(move |name| (name, profiles))
    })
    .collect()
}
