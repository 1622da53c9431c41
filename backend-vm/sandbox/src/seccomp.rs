//! Compiles the system call filter of workers.

use wormhole_link::device::DeviceKind;
use wormhole_privileges::{
    Calls, Denial, Filter, FilterError, all_masked, at_most, equals, equals_one_of, within,
};

use crate::device::needs;

/// System calls of every worker: memory, threads, reading files, its descriptors, time.
const COMMON: &[i64] = &[
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_stat,
    libc::SYS_fstat,
    libc::SYS_lstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_getcwd,
    libc::SYS_dup,
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_eventfd2,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fstatfs,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_mprotect,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_set_tid_address,
    libc::SYS_sched_yield,
    libc::SYS_getcpu,
    libc::SYS_sched_getaffinity,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getrandom,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_time,
    libc::SYS_arch_prctl,
    libc::SYS_restart_syscall,
    // The worker's program. It gives these calls up before it reads a byte of a guest's.
    libc::SYS_execve,
    libc::SYS_seccomp,
    libc::SYS_mseal,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Commands of `fcntl`: copies and flags of a descriptor, and questions for seals. Locks of files and leases are left out, since no
/// cgroup counts them. So are `F_NOTIFY`, which reports other processes' accesses to a folder, and `F_SETOWN`.
const FCNTL: &[i32] = &[
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_GET_SEALS,
];

/// Flags of an open file that a worker may set, beside those that `fcntl` ignores. Others who have the same open file would
/// write behind its end (`O_APPEND`).
const FILE_FLAGS: i32 = libc::O_ACCMODE | libc::O_NONBLOCK | LARGEFILE;
/// `O_LARGEFILE`, as `F_GETFL` returns it. The C library has 0 for it.
const LARGEFILE: i32 = 0o100_000;

/// Seals that a worker adds. For one against writes the kernel waits for all processors under a lock of its own.
const SEALS: i32 = libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// Flags of `mmap`. `MAP_HUGETLB` is left out: the memory controller of cgroups does not count huge pages.
const MAPPED: i32 = libc::MAP_SHARED
    | libc::MAP_PRIVATE
    | libc::MAP_FIXED
    | libc::MAP_FIXED_NOREPLACE
    | libc::MAP_ANONYMOUS
    | libc::MAP_DENYWRITE
    | libc::MAP_NORESERVE
    | libc::MAP_POPULATE
    | libc::MAP_STACK;

/// System calls whose first argument is a clock. Numbers above `LAST_CLOCK` name the CPU clocks of other processes.
const CLOCKS: &[i64] = &[
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
];
const LAST_CLOCK: u64 = 15;

/// `prctl` operations that name a thread (PR_SET_NAME, PR_GET_NAME), or come before a filter (PR_SET_NO_NEW_PRIVS).
/// PR_SET_PDEATHSIG is left out: a worker could use it to outlive its supervisor.
const PRCTL: &[u64] = &[15, 16, 38];
/// `prctl` operation (PR_SET_DUMPABLE) by which a worker keeps the kernel from dumping its memory.
const DUMPABLE: u64 = 4;
/// `prctl` operation (PR_SET_VMA) by which libraries name mappings. It does nothing: the kernel goes through all mappings of a
/// range, also after the process was killed.
const NAMES_MAPPING: u64 = 0x5356_4d41;

/// Advice that a library may give, and that does nothing. Some of it splits a mapping, also one that is sealed, under a lock of
/// the mapped file. Huge pages are made by a thread of the kernel, also of shared memory and by a setting of libraries, while
/// others who have the same pages wait.
const IDLE_ADVICE: [i32; 13] = [
    libc::MADV_DONTFORK,
    libc::MADV_DOFORK,
    libc::MADV_NOHUGEPAGE,
    libc::MADV_DONTDUMP,
    libc::MADV_DODUMP,
    libc::MADV_WIPEONFORK,
    libc::MADV_KEEPONFORK,
    libc::MADV_NORMAL,
    libc::MADV_RANDOM,
    libc::MADV_SEQUENTIAL,
    libc::MADV_WILLNEED,
    libc::MADV_FREE,
    libc::MADV_HUGEPAGE,
];

/// Advice to have pages.
const TOUCHED: [i32; 2] = [libc::MADV_POPULATE_READ, libc::MADV_POPULATE_WRITE];

/// Advice to discard pages. Each kind of device says in what range.
pub(super) const DISCARDS: u64 = libc::MADV_DONTNEED.unsigned_abs() as u64;

/// Flags of `memfd_create`. `MFD_HUGETLB` is left out, as `MAP_HUGETLB` is.
pub(super) const MEMORY_FILE: u64 = (libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) as u64;

/// Compiles the filter for a worker on a kind of device.
pub(super) fn filter(kind: DeviceKind) -> Result<Filter, FilterError> {
    let mapped = MAPPED.unsigned_abs().into();
    // A search for data or holes goes through all pages of a file in one RCU read section.
    const END: u64 = libc::SEEK_END as u64;
    let mut calls = Calls::any(COMMON)
        .and_where(libc::SYS_mmap, vec![within(3, mapped)?])
        .and_where(libc::SYS_lseek, vec![at_most(2, END)?]);
    for &command in FCNTL {
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
    let set = (1, u64::from(u32::MAX), libc::F_SETFL.unsigned_abs().into());
    let others = u64::from(!FILE_FLAGS.unsigned_abs());
    let flags = all_masked(&[set, (2, others, 0)])?;
    calls = calls.and_where(libc::SYS_fcntl, vec![flags]);
    for &operation in PRCTL {
        calls = calls.and_where(libc::SYS_prctl, vec![equals(0, operation)?]);
    }
    let not_dumpable = all_masked(&[(0, u64::from(u32::MAX), DUMPABLE), (1, u64::MAX, 0)])?;
    calls = calls.and_where(libc::SYS_prctl, vec![not_dumpable]);
    for &call in CLOCKS {
        calls = with_clock(calls, call)?;
    }
    // It reads limits. A lower one of core dumps would have the kernel start a program.
    let read = all_masked(&[(2, u64::MAX, 0)])?;
    calls = calls
        .and_where(
            libc::SYS_madvise,
            equals_one_of(2, TOUCHED.map(|advice| u64::from(advice.unsigned_abs())))?,
        )
        .idle_where(libc::SYS_prctl, vec![equals(0, NAMES_MAPPING)?])
        .idle_where(
            libc::SYS_madvise,
            equals_one_of(
                2,
                IDLE_ADVICE.map(|advice| u64::from(advice.unsigned_abs())),
            )?,
        )
        .and_where(libc::SYS_prlimit64, vec![read]);
    for call in [libc::SYS_poll, libc::SYS_ppoll] {
        calls = calls.and_waits(call, 1)?;
    }
    let calls = (needs(kind).calls)(calls)?;
    calls.and_threads()?.compile(Denial::Fails(libc::EPERM))
}

/// Adds a system call whose first argument is a clock.
pub(super) fn with_clock(calls: Calls, call: i64) -> Result<Calls, FilterError> {
    Ok(calls.and_where(call, vec![at_most(0, LAST_CLOCK)?]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filters_of_all_kinds_compile() {
        for kind in DeviceKind::ALL {
            filter(kind).expect("the filter compiles");
        }
    }
}
