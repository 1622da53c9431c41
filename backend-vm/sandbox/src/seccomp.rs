//! The system calls a worker may make.

use wormhole_link::device::Profile;
use wormhole_privileges::{Calls, Denial, Filter, FilterError, at_most, equals, masked, within};

/// System calls of every worker: memory, threads, reading files, its descriptors, time.
const COMMON: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_close,
    libc::SYS_open,
    libc::SYS_openat,
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
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_lseek,
    libc::SYS_dup,
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_eventfd2,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fstatfs,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_mprotect,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_set_tid_address,
    libc::SYS_membarrier,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
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
    libc::SYS_prlimit64,
    libc::SYS_getrusage,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_time,
    libc::SYS_arch_prctl,
    libc::SYS_restart_syscall,
    libc::SYS_execve,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Further system calls of the NVIDIA driver.
const DRIVER: &[i64] = &[
    libc::SYS_pwrite64,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_mbind,
    libc::SYS_get_mempolicy,
    libc::SYS_set_mempolicy,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_getpriority,
    libc::SYS_getcpu,
    libc::SYS_pipe,
    libc::SYS_eventfd,
    libc::SYS_epoll_create,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_getdents,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_rename,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_rmdir,
    libc::SYS_chmod,
    libc::SYS_fchmod,
    libc::SYS_umask,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_statfs,
    libc::SYS_sched_setscheduler,
    libc::SYS_times,
    libc::SYS_timer_settime,
    libc::SYS_timer_delete,
    // `cuInit` names an abstract socket after its process, in the worker's own network namespace.
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_connect,
    libc::SYS_setsockopt,
];

/// Requests of the NVIDIA modules: those of the resource manager have this type (`NV_IOCTL_MAGIC`), those of the unified
/// memory module are small numbers but for the first and the last of a file (`UVM_INITIALIZE`, `UVM_DEINITIALIZE`; open
/// kernel modules, `nv-ioctl-numbers.h`, `uvm_linux_ioctl.h`, `uvm_ioctl.h`).
const NVIDIA_TYPE: u64 = (b'F' as u64) << 8;
const TYPE_BITS: u64 = 0xFF00;
const UVM_BITS: u64 = 0xFFFF_FF00;
/// Requests with any other descriptor: those of UVM's above, and what the C library asks of a descriptor.
const IOCTLS: &[u64] = &[
    0x3000_0001,
    0x3000_0002,
    libc::FIONBIO,
    libc::FIOCLEX,
    libc::FIONREAD,
    libc::TCGETS,
];

/// Commands of `fcntl`: copies and flags of a descriptor, and seals. Locks of files and leases are left out, since no
/// control group counts them. So are `F_NOTIFY`, which tells of others' accesses to a folder, and `F_SETOWN`.
const FCNTL: &[i32] = &[
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
];

/// Flags of `mmap`. `MAP_HUGETLB` is left out: its pages are no memory of a control group.
const MAPPED: i32 = libc::MAP_SHARED
    | libc::MAP_PRIVATE
    | libc::MAP_FIXED
    | libc::MAP_FIXED_NOREPLACE
    | libc::MAP_ANONYMOUS
    | libc::MAP_DENYWRITE
    | libc::MAP_NORESERVE
    | libc::MAP_POPULATE
    | libc::MAP_STACK;

/// System calls whose first argument is a clock. Greater numbers of clocks are other processes' time.
const CLOCKS: &[i64] = &[
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_timer_create,
];
const LAST_CLOCK: u64 = 15;

/// `prctl` operations that name a thread or a mapping. Among what is left out is the one that would let
/// a worker outlive its supervisor.
const PRCTL: &[u64] = &[15, 16, 0x5356_4d41];

/// The filter for a worker.
pub(super) fn filter(profile: Profile) -> Result<Filter, FilterError> {
    let mapped = MAPPED.unsigned_abs().into();
    let mut calls = Calls::any(COMMON).and_where(libc::SYS_mmap, vec![within(3, mapped)?]);
    for &command in FCNTL {
        let command = command.unsigned_abs().into();
        calls = calls.and_where(libc::SYS_fcntl, vec![equals(1, command)?]);
    }
    // The files that the CPU device's memory is in, and of a driver any but those of huge pages.
    let flags = (libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING).into();
    let file = match profile {
        Profile::Cpu => equals(1, flags)?,
        Profile::Cuda => within(1, flags)?,
    };
    calls = calls.and_where(libc::SYS_memfd_create, vec![file]);
    if profile == Profile::Cuda {
        calls = calls.and(DRIVER);
        // The driver locks the index of its cache and keeps nothing there where that fails: a second load of PTX would
        // take as long as the first. No other process has this index.
        let lock = equals(1, libc::F_SETLK.unsigned_abs().into())?;
        calls = calls.idle_where(libc::SYS_fcntl, vec![lock]);
        let nvidia = vec![masked(1, TYPE_BITS, NVIDIA_TYPE)?, masked(1, UVM_BITS, 0)?];
        let unix = equals(0, libc::AF_UNIX.unsigned_abs().into())?;
        calls = calls
            .and_where(libc::SYS_ioctl, nvidia)
            .and_where(libc::SYS_socket, vec![unix]);
        for &request in IOCTLS {
            calls = calls.and_where(libc::SYS_ioctl, vec![equals(1, request)?]);
        }
    }
    for &operation in PRCTL {
        calls = calls.and_where(libc::SYS_prctl, vec![equals(0, operation)?]);
    }
    for &call in CLOCKS {
        if profile == Profile::Cuda || call != libc::SYS_timer_create {
            calls = calls.and_where(call, vec![at_most(0, LAST_CLOCK)?]);
        }
    }
    calls.and_threads()?.compile(Denial::Fails(libc::EPERM))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_profiles_compile_to_filters_the_kernel_can_take() {
        for profile in [Profile::Cpu, Profile::Cuda] {
            filter(profile).expect("the filter compiles");
        }
    }
}
