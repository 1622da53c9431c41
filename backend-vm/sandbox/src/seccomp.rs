//! The system calls a worker may make.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use wormhole_link::device::Profile;

/// What any worker needs: memory, threads, reading files, its descriptors, time.
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
    libc::SYS_fcntl,
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
    libc::SYS_mmap,
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
    // Answered with "no such system call" by a second filter, so that libc falls back to `clone`,
    // whose flags a filter can read.
    libc::SYS_clone3,
];

/// What the NVIDIA driver adds.
const DRIVER: &[i64] = &[
    libc::SYS_pwrite64,
    libc::SYS_memfd_create,
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
    libc::SYS_flock,
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

/// What takes a clock first. Numbers of clocks from here on are other processes' time.
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

/// What `pthread_create` asks of `clone`: a thread of this process, in no new namespace.
const THREAD_FLAGS: u64 = (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND) as u64;
const NAMESPACE_FLAGS: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP) as u64;

/// The filters to install, in order. Each must agree for a call to happen.
pub(super) fn filters(profile: Profile) -> Result<Vec<BpfProgram>, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for &call in COMMON {
        rules.insert(call, Vec::new());
    }
    if profile == Profile::Cpu {
        // The files that its memory is in.
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        rules.insert(libc::SYS_memfd_create, vec![argument(1, flags.into())?]);
    }
    if profile == Profile::Cuda {
        for &call in DRIVER {
            rules.insert(call, Vec::new());
        }
        let masked = |bits, value| {
            let kind = SeccompCmpOp::MaskedEq(bits);
            SeccompRule::new(vec![SeccompCondition::new(
                1,
                SeccompCmpArgLen::Dword,
                kind,
                value,
            )?])
        };
        let mut ioctls = vec![masked(TYPE_BITS, NVIDIA_TYPE)?, masked(UVM_BITS, 0)?];
        for &request in IOCTLS {
            ioctls.push(argument(1, request)?);
        }
        rules.insert(libc::SYS_ioctl, ioctls);
        rules.insert(
            libc::SYS_socket,
            vec![argument(0, libc::AF_UNIX.unsigned_abs().into())?],
        );
    }
    let mut prctl = Vec::new();
    for &operation in PRCTL {
        prctl.push(argument(0, operation)?);
    }
    rules.insert(libc::SYS_prctl, prctl);
    for &call in CLOCKS {
        if profile == Profile::Cuda || call != libc::SYS_timer_create {
            let own =
                SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Le, LAST_CLOCK)?;
            rules.insert(call, vec![SeccompRule::new(vec![own])?]);
        }
    }
    rules.insert(
        libc::SYS_clone,
        vec![SeccompRule::new(vec![SeccompCondition::new(
            0,
            SeccompCmpArgLen::Qword,
            SeccompCmpOp::MaskedEq(THREAD_FLAGS | NAMESPACE_FLAGS),
            THREAD_FLAGS,
        )?])?],
    );
    let allowed = SeccompFilter::new(
        rules,
        SeccompAction::Errno(errno(libc::EPERM)),
        SeccompAction::Allow,
        std::env::consts::ARCH.try_into()?,
    )?;
    let missing = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_clone3, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(errno(libc::ENOSYS)),
        std::env::consts::ARCH.try_into()?,
    )?;
    // The list of what is allowed comes last: nothing can be installed after it.
    Ok(vec![missing.try_into()?, allowed.try_into()?])
}

/// Allows a call with `value` for an argument.
fn argument(index: u8, value: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    let equal = SeccompCondition::new(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)?;
    SeccompRule::new(vec![equal])
}

fn errno(value: i32) -> u32 {
    value.unsigned_abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_profiles_compile_to_filters_the_kernel_can_take() {
        for profile in [Profile::Cpu, Profile::Cuda] {
            let programs = filters(profile).expect("the filter compiles");
            assert_eq!(programs.len(), 2);
            for program in programs {
                assert!(program.len() < 4096, "{} instructions", program.len());
            }
        }
    }
}
