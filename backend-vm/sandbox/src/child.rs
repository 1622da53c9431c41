//! Confines the new process, in that process, between `clone` and `exec`.
//!
//! This module only makes system calls on data that the parent prepared. It does not allocate, lock or drop: another
//! thread of the parent may have held any lock at the moment of the clone. For the same reason it calls no function of
//! the C library that concerns all threads. `setresuid`, for example, waits in glibc for threads that the parent was
//! making, and the child never has them.

use std::ffi::{CStr, CString};
use std::os::fd::RawFd;

use rustix::process::{Gid, Resource, Rlimit, Uid, getrlimit, setrlimit};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use wormhole_privileges::Filter;

use super::root::Step;
use super::spawn::Isolation;

/// Data that the parent prepares for the child.
#[derive(Debug)]
pub(super) struct Plan {
    pub isolation: Isolation,
    pub steps: Vec<Step>,
    pub stage: CString,
    pub old_root: CString,
    /// Path of `/dev/null` in the new root, which is mounted over masked files.
    pub null: CString,
    pub uid_map: Vec<u8>,
    pub gid_map: Vec<u8>,
    /// Groups of the device files that not every user may open.
    pub groups: Vec<libc::gid_t>,
    /// Changes to a user of the worker's own, if the supervisor is root.
    pub change_user: bool,
    /// Numbers of each descriptor in the parent, at least 10, and in the child.
    pub descriptors: Vec<(RawFd, RawFd)>,
    /// Number, in the child, of its end of a stream. The other end is the supervisor's, and closes when that ends.
    pub lifeline: Option<RawFd>,
    pub open_files: u64,
    /// RLIMIT_DATA in bytes; RLIM_INFINITY if it cannot limit the worker.
    pub memory: u64,
    /// Limit of its threads, where it has a user of its own.
    pub threads: u64,
    pub filter: Filter,
    pub program: CString,
    pub arguments: Vec<*const libc::c_char>,
    pub environment: Vec<*const libc::c_char>,
}

/// Group ("nobody") of a worker whose supervisor is root, and its user inside a user namespace.
pub(super) const NOBODY: u32 = 65534;
/// First user of workers whose supervisor is root. No account has such a number. A worker's user is the sum of this and
/// its process number, so that limits that the kernel counts by user count by worker.
const FIRST_USER: u32 = 2_000_000_000;
/// Limit of a worker's timers and of its queued signals. The worker itself has neither; some are left to the driver, which
/// may have timers. Kernels before 6.13 run each at each tick of the host's clock, if its signal is ignored, and no cgroup
/// counts the time: a thousand took a tenth of a processor and more.
const SIGNALS: u64 = 64;
/// Limit of core dumps with which the kernel makes none. It is too small for a file, and 0 would not keep the kernel from
/// starting the program of `core_pattern`, as root and in no cgroup of the tenant's (`fs/coredump.c`).
const NO_DUMP: u64 = 1;
/// Limit of threads where all workers and other processes run as one user.
const SHARED_THREADS: u64 = 4096;
/// Number of the descriptor that reports failures, above all that a child is given.
pub(super) const REPORT: RawFd = 9;

/// Value of a worker's `oom_score_adj` (proc(5)): the OOM killer prefers workers. Otherwise a worker would inherit the
/// supervisor's value.
const EXPENDABLE: &[u8] = b"500";

/// Limits of the worker's network namespace. No cgroup counts the control data of a message whose sender waits, nor a part
/// of each connection that waits for its acceptance. The driver's sockets are for other processes in the namespace, and
/// there are none. Kernels before 6.8 have the first limit once for all namespaces, and 20 KiB by default.
const SOCKET_LIMITS: [(&CStr, &[u8]); 2] = [
    (c"/proc/sys/net/core/optmem_max", b"4096"),
    (c"/proc/sys/net/core/somaxconn", b"4"),
];

/// Names of the child's steps, for the parent's message about one that failed.
pub(super) const STAGES: &[&str] = &[
    "resetting signals",
    "mapping its user",
    "making its mounts private",
    "mounting its root",
    "binding a directory into its root",
    "entering its root",
    "placing its descriptors",
    "setting its resource limits",
    "dropping its privileges",
    "tying its life to the supervisor's",
    "installing its system call filter",
    "executing the worker",
];

type Outcome = Result<(), (u32, i32)>;

/// Confines the calling process and executes the worker. Does not return; reports a failure as its step and `errno`.
///
/// # Safety
/// The caller is a process that has just been cloned without sharing memory. `report` is the write end of a pipe and
/// closes on exec. The pointers in `plan` are valid C strings and arrays that end with a null pointer.
pub(super) unsafe fn become_worker(plan: &Plan, report: RawFd) -> ! {
    // SAFETY: the caller's promise.
    let failure = unsafe { prepare_and_execute(plan, report) };
    let (stage, errno) = failure.err().unwrap_or((0, 0));
    let mut message = [0u8; 8];
    message[..4].copy_from_slice(&stage.to_le_bytes());
    message[4..].copy_from_slice(&errno.to_le_bytes());
    // SAFETY: plain system calls on a local buffer; the process ends here.
    unsafe {
        for fd in [REPORT, report] {
            if libc::write(fd, message.as_ptr().cast(), message.len()) == 8 {
                break;
            }
        }
        libc::_exit(126)
    }
}

unsafe fn prepare_and_execute(plan: &Plan, report: RawFd) -> Outcome {
    // SAFETY: as promised by the caller; each callee makes system calls on memory of `plan` only.
    unsafe {
        reset_signals()?;
        // The OOM killer ends this process before those of the host. Without `/proc` the worker does without.
        let _ = write_file(c"/proc/self/oom_score_adj", EXPENDABLE);
        // Before the new root, whose `/proc` shows other numbers.
        let user = match plan.change_user {
            true => own_user()?,
            false => NOBODY,
        };
        if plan.isolation == Isolation::UserNamespace {
            map_user(plan)?;
        }
        if plan.isolation != Isolation::None {
            // The worker sees its own cgroup as the root. Kernels before 4.6 have no cgroup namespaces.
            libc::unshare(libc::CLONE_NEWCGROUP);
            // Before the new root, which covers `/proc`. Without it, or where it cannot be written, the worker does without.
            for (limit, value) in SOCKET_LIMITS {
                let _ = write_file(limit, value);
            }
            assemble_root(plan)?;
            enter_root(plan)?;
        }
        place_descriptors(plan, report)?;
        limit_resources(plan)?;
        drop_privileges(plan, user)?;
        tie_to_parent(plan)?;
        if plan.filter.install().is_err() {
            return Err((10, errno()));
        }
        libc::execve(
            plan.program.as_ptr(),
            plan.arguments.as_ptr(),
            plan.environment.as_ptr(),
        );
    }
    Err((11, errno()))
}

unsafe fn reset_signals() -> Outcome {
    // SAFETY: a local signal set; SIGPIPE back to its default.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        check(
            0,
            i64::from(libc::sigprocmask(
                libc::SIG_SETMASK,
                &raw const none,
                std::ptr::null_mut(),
            )),
        )?;
        libc::setsid();
        libc::umask(0o022);
    }
    Ok(())
}

unsafe fn map_user(plan: &Plan) -> Outcome {
    // SAFETY: paths and contents are prepared byte strings.
    unsafe {
        // Kernels before 3.19 have no `setgroups` file, and need no denial.
        let _ = write_file(c"/proc/self/setgroups", b"deny");
        write_file(c"/proc/self/uid_map", &plan.uid_map).map_err(|errno| (1, errno))?;
        write_file(c"/proc/self/gid_map", &plan.gid_map).map_err(|errno| (1, errno))
    }
}

unsafe fn write_file(path: &CStr, content: &[u8]) -> Result<(), i32> {
    // SAFETY: `path` is a C string, `content` a live buffer.
    unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd < 0 {
            return Err(errno());
        }
        let written = libc::write(fd, content.as_ptr().cast(), content.len());
        let failure = errno();
        libc::close(fd);
        if usize::try_from(written) == Ok(content.len()) {
            Ok(())
        } else {
            Err(failure)
        }
    }
}

unsafe fn assemble_root(plan: &Plan) -> Outcome {
    // SAFETY: every path is a C string of `plan`.
    unsafe {
        check(
            2,
            i64::from(libc::mount(
                c"none".as_ptr(),
                c"/".as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            )),
        )?;
        let options = c"mode=755,size=16m";
        check(3, mount_new(c"tmpfs", &plan.stage, options))?;
        for step in &plan.steps {
            take_step(plan, step)?;
        }
    }
    Ok(())
}

unsafe fn take_step(plan: &Plan, step: &Step) -> Outcome {
    // SAFETY: every path is a C string of the step or of the plan.
    unsafe {
        match step {
            Step::Directory(at) => {
                if libc::mkdir(at.as_ptr(), 0o755) != 0 && errno() != libc::EEXIST {
                    return Err((3, errno()));
                }
            }
            Step::File(at) => {
                let fd = libc::open(
                    at.as_ptr(),
                    libc::O_CREAT | libc::O_WRONLY | libc::O_CLOEXEC,
                    0o644,
                );
                if fd < 0 {
                    return Err((3, errno()));
                }
                libc::close(fd);
            }
            Step::Link { target, at } => {
                check(3, i64::from(libc::symlink(target.as_ptr(), at.as_ptr())))?;
            }
            Step::Bind {
                source,
                at,
                optional,
                writable,
                recursive,
            } => {
                let depth = if *recursive { libc::MS_REC } else { 0 };
                let bound = libc::mount(
                    source.as_ptr(),
                    at.as_ptr(),
                    std::ptr::null(),
                    libc::MS_BIND | depth,
                    std::ptr::null(),
                );
                if bound != 0 {
                    return if *optional { Ok(()) } else { Err((4, errno())) };
                }
                let mut flags = MOUNT_ATTR_NOSUID;
                if !writable {
                    flags |= MOUNT_ATTR_RDONLY;
                }
                check(4, set_mount_flags(at, flags, true))?;
            }
            Step::Temporary(at) => {
                check(3, mount_new(c"tmpfs", at, c"mode=1777,size=64m"))?;
            }
            Step::Proc(at) => {
                // The kernel refuses a fresh /proc in a container that masks parts of its own; a worker needs none.
                // hidepid=2 hides the processes of other users.
                let _ = mount_new(c"proc", at, c"hidepid=2");
            }
            Step::Mask(at) => {
                let masked = libc::mount(
                    plan.null.as_ptr(),
                    at.as_ptr(),
                    std::ptr::null(),
                    libc::MS_BIND,
                    std::ptr::null(),
                );
                // Some kernels lack some of these files.
                if masked != 0 && errno() != libc::ENOENT {
                    return Err((3, errno()));
                }
            }
            Step::MaskFolder(at) => {
                let masked = mount_new(c"tmpfs", at, c"mode=555,size=4k");
                if masked != 0 && errno() != libc::ENOENT {
                    return Err((3, errno()));
                }
                if masked == 0 {
                    check(3, set_mount_flags(at, MOUNT_ATTR_RDONLY, false))?;
                }
            }
        }
    }
    Ok(())
}

unsafe fn mount_new(kind: &CStr, at: &CStr, options: &CStr) -> i64 {
    // SAFETY: C strings.
    i64::from(unsafe {
        libc::mount(
            kind.as_ptr(),
            at.as_ptr(),
            kind.as_ptr(),
            libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC,
            options.as_ptr().cast(),
        )
    })
}

const MOUNT_ATTR_RDONLY: u64 = 1;
const MOUNT_ATTR_NOSUID: u64 = 2;

unsafe fn set_mount_flags(at: &CStr, flags: u64, recursive: bool) -> i64 {
    // struct mount_attr: attr_set, attr_clr, propagation, userns_fd.
    let attributes = [flags, 0, 0, 0];
    let recursive = if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: a C string and a complete `struct mount_attr`.
    unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            at.as_ptr(),
            recursive,
            attributes.as_ptr(),
            size_of_val(&attributes),
        )
    }
}

unsafe fn enter_root(plan: &Plan) -> Outcome {
    // SAFETY: C strings of `plan` or literals.
    unsafe {
        check(5, i64::from(libc::chdir(plan.stage.as_ptr())))?;
        let pivoted = libc::syscall(
            libc::SYS_pivot_root,
            plan.stage.as_ptr(),
            plan.old_root.as_ptr(),
        );
        if pivoted == 0 {
            check(5, i64::from(libc::chdir(c"/".as_ptr())))?;
            check(
                5,
                i64::from(libc::umount2(c"/old".as_ptr(), libc::MNT_DETACH)),
            )?;
        } else {
            // pivot_root fails on an initramfs. MS_MOVE then covers it by the new root.
            check(
                5,
                i64::from(libc::mount(
                    c".".as_ptr(),
                    c"/".as_ptr(),
                    std::ptr::null(),
                    libc::MS_MOVE,
                    std::ptr::null(),
                )),
            )?;
            check(5, i64::from(libc::chroot(c".".as_ptr())))?;
            check(5, i64::from(libc::chdir(c"/".as_ptr())))?;
        }
        libc::rmdir(c"/old".as_ptr());
        check(
            5,
            set_mount_flags(c"/", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, false),
        )?;
        let name = "worker";
        libc::sethostname(name.as_ptr().cast(), name.len());
    }
    Ok(())
}

unsafe fn place_descriptors(plan: &Plan, report: RawFd) -> Outcome {
    // SAFETY: system calls on descriptor numbers.
    unsafe {
        for &(source, target) in &plan.descriptors {
            check(6, i64::from(libc::dup2(source, target)))?;
        }
        check(6, i64::from(libc::dup3(report, REPORT, libc::O_CLOEXEC)))?;
        let first_given = 3 + plan.descriptors.iter().filter(|(_, at)| *at >= 3).count();
        for fd in first_given..REPORT.unsigned_abs() as usize {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_possible_wrap,
                reason = "below 10"
            )]
            libc::close(fd as i32);
        }
        let above = u32::try_from(REPORT + 1).unwrap_or(10);
        check(6, libc::syscall(libc::SYS_close_range, above, u32::MAX, 0))
    }
}

/// Sets both values of a limit.
fn limit(resource: Resource, value: Option<u64>) -> rustix::io::Result<()> {
    let limit = Rlimit {
        current: value,
        maximum: value,
    };
    setrlimit(resource, limit)
}

fn limit_resources(plan: &Plan) -> Outcome {
    // Only root may raise limits. A failure does no harm: the driver does not count pinned memory as locked, and RLIMIT_CORE
    // is 0 then.
    for (resource, value) in [(Resource::Memlock, None), (Resource::Core, Some(NO_DUMP))] {
        let _ = limit(resource, value);
    }
    let limits = [
        (Resource::Nofile, plan.open_files),
        (Resource::Data, plan.memory),
        (Resource::Msgqueue, 0),
        (Resource::Rtprio, 0),
        (Resource::Nice, 0),
        (Resource::Sigpending, SIGNALS),
        (
            Resource::Nproc,
            if plan.change_user {
                plan.threads
            } else {
                SHARED_THREADS
            },
        ),
    ];
    for (resource, value) in limits {
        let most = getrlimit(resource).maximum;
        let value = most.map_or(value, |most| value.min(most));
        limit(resource, Some(value)).map_err(|error| (7, error.raw_os_error()))?;
    }
    Ok(())
}

/// Returns a user that no other process has: the sum of `FIRST_USER` and this process's number in the supervisor's PID
/// namespace, as the supervisor's `/proc` shows it. Fails if `/proc/self` cannot be read: workers with one user could reach
/// each other.
unsafe fn own_user() -> Result<u32, (u32, i32)> {
    let mut digits = [0u8; 16];
    // SAFETY: a C string and a local buffer of the length given.
    let length = unsafe {
        libc::readlink(
            c"/proc/self".as_ptr(),
            digits.as_mut_ptr().cast(),
            digits.len(),
        )
    };
    let digits = usize::try_from(length)
        .ok()
        .and_then(|length| digits.get(..length))
        .ok_or_else(|| (8, errno()))?;
    let mut number = 0u32;
    for digit in digits {
        number = number
            .wrapping_mul(10)
            .wrapping_add(u32::from(digit.wrapping_sub(b'0')));
    }
    // Process numbers are below 2^22.
    Ok(FIRST_USER + (number & ((1 << 22) - 1)))
}

/// Switches a forked process of root to a user and a group that no other process has. The kernel then counts the
/// process's descriptors in flight and its epoll watches by themselves, and it may signal no other process.
///
/// # Errors
/// The process may not change its user.
pub fn become_own_user() -> std::io::Result<()> {
    // Workers have the numbers below.
    let user = FIRST_USER + (1 << 22) + (std::process::id() & ((1 << 22) - 1));
    // Not by the C library, which would have all threads of the process that was forked from change.
    set_thread_groups(&[])?;
    let group = Gid::from_raw(NOBODY);
    set_thread_res_gid(group, group, group)?;
    let user = Uid::from_raw(user);
    Ok(set_thread_res_uid(user, user, user)?)
}

unsafe fn drop_privileges(plan: &Plan, user: u32) -> Outcome {
    // SAFETY: system calls on integers and on `plan.groups`.
    unsafe {
        // The kernel refuses numbers beyond its last capability. Such a refusal needs no handling.
        for capability in 0..64 {
            libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
        if plan.change_user {
            check(
                8,
                libc::syscall(libc::SYS_setgroups, plan.groups.len(), plan.groups.as_ptr()),
            )?;
            check(
                8,
                libc::syscall(libc::SYS_setresgid, NOBODY, NOBODY, NOBODY),
            )?;
            check(8, libc::syscall(libc::SYS_setresuid, user, user, user))?;
        }
        // _LINUX_CAPABILITY_VERSION_3, this thread; two sets of effective, permitted, inheritable.
        let header = [0x2008_0522_u32, 0];
        let none = [0u32; 6];
        check(
            8,
            libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()),
        )
    }
}

unsafe fn tie_to_parent(plan: &Plan) -> Outcome {
    // SAFETY: system calls on integers and a local buffer.
    unsafe {
        check(
            9,
            i64::from(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0)),
        )?;
        // PR_SET_PDEATHSIG has no effect if the supervisor died before it. Its end of the stream is closed then.
        if let Some(lifeline) = plan.lifeline {
            let mut byte = 0u8;
            let got = libc::recv(
                lifeline,
                (&raw mut byte).cast(),
                1,
                libc::MSG_PEEK | libc::MSG_DONTWAIT,
            );
            if got == 0 {
                return Err((9, libc::EPIPE));
            }
        }
    }
    Ok(())
}

fn check(stage: u32, result: i64) -> Outcome {
    if result < 0 {
        Err((stage, errno()))
    } else {
        Ok(())
    }
}

fn errno() -> i32 {
    // SAFETY: the C library's per-thread error number is always readable.
    unsafe { *libc::__errno_location() }
}
