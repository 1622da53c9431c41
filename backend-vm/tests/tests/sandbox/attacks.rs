//! Attacks of a hostile worker, and the refusal expected for each.
//!
//! Every attempt is harmless where it succeeds, because the control run makes it unconfined:
//! signals are number 0, invalid arguments end a permitted call before it changes anything, and
//! created objects are removed.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use wormhole_link::process::CONTROL;

/// Targets of the attempts.
#[derive(Clone, Debug)]
pub struct Targets {
    pub supervisor: i32,
    /// Worker of the same tenant.
    pub sibling: i32,
    /// Process of the test.
    pub test: i32,
    /// Descriptors of the session's files.
    pub files: [Option<i32>; 3],
}

impl Targets {
    /// Parses the text that [`text`](Self::text) writes.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split('.').map(|number| number.parse().ok());
        let mut next = || numbers.next().flatten();
        Some(Self {
            supervisor: next()?,
            sibling: next()?,
            test: next()?,
            files: [None; 3],
        })
    }

    /// Formats the process numbers, in characters that a variable of a worker's environment may
    /// contain.
    pub fn text(&self) -> String {
        format!("{}.{}.{}", self.supervisor, self.sibling, self.test)
    }

    /// Returns the address of an abstract socket on which the test listens.
    pub fn abstract_socket(&self) -> SocketAddr {
        SocketAddr::from_abstract_name(format!("wormhole-sandbox-{}", self.test)).unwrap()
    }

    /// Returns the folder of the socket on which the supervisor listens.
    pub fn folder(&self) -> PathBuf {
        std::env::temp_dir().join(format!("wormhole-sandbox-{}", self.test))
    }

    /// Returns the path of a file that an attack writes and executes.
    pub fn program(&self) -> PathBuf {
        PathBuf::from(format!("/tmp/wormhole-sandbox-{}.code", self.test))
    }

    pub fn listener(&self) -> PathBuf {
        self.folder().join("socket")
    }
}

/// Memory limit of the workers in this test, in bytes.
pub const WORKER_MEMORY: usize = 1 << 30;

/// Smallest huge page of the processor.
const HUGE_PAGE: usize = 2 << 20;

/// 0, or the error number.
type Outcome = i32;

/// Profile of a worker's confinement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    Cpu,
    Cuda,
}

enum Attempt {
    /// A system call with its first arguments. If permitted, it fails by its arguments.
    Call(i64, [i64; 3]),
    /// Opening the file.
    Open(&'static str, i32),
    /// Reading the contents of the file.
    Read(&'static str),
    /// Sending so many bytes of control data.
    Control(usize),
    Other(fn(&Targets) -> Outcome),
}

/// Outcome of an attempt in the control run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    Succeeds,
    /// Fails with an error that is no refusal.
    GoesOn,
}

pub struct Attack {
    pub name: String,
    pub control: Control,
    attempt: Attempt,
    /// Error that refuses it on the CPU and under the driver's profile; none where it is no attack.
    refusals: [Option<i32>; 2],
}

impl Attack {
    /// Returns the error that refuses a worker of this profile. Files that this system lacks do not
    /// exist for a worker on a GPU either.
    pub fn refusal(&self, profile: Profile) -> Option<i32> {
        let [cpu, cuda] = self.refusals;
        match (profile, &self.attempt) {
            (Profile::Cpu, _) => cpu,
            (Profile::Cuda, Attempt::Open(path, _)) if !Path::new(path).exists() => {
                cuda.and(Some(libc::ENOENT))
            }
            (Profile::Cuda, _) => cuda,
        }
    }

    pub fn is_refusal(&self, outcome: Outcome) -> bool {
        self.refusals.contains(&Some(outcome))
    }

    /// Returns whether this outcome means that the system lacks the target.
    pub fn is_absence(&self, outcome: Outcome) -> bool {
        match self.attempt {
            Attempt::Call(..) => outcome == libc::ENOSYS,
            Attempt::Open(..) => matches!(outcome, libc::ENOENT | libc::ENXIO | libc::ENODEV),
            Attempt::Read(_) => outcome == libc::ENOENT,
            // By default, kernels before 6.8 refuse control data of this size to every process.
            Attempt::Control(_) => outcome == libc::ENOBUFS,
            Attempt::Other(_) => false,
        }
    }

    pub fn make(&self, targets: &Targets) -> Outcome {
        match self.attempt {
            Attempt::Call(number, arguments) => {
                let [first, second, third] = arguments.map(|argument| match argument {
                    SUPERVISOR => i64::from(targets.supervisor),
                    other => other,
                });
                // SAFETY: refused before the arguments are read, or permitted with arguments that
                // the table's author has chosen to be harmless; no memory of this process is
                // written.
                let result = unsafe { libc::syscall(number, first, second, third, 0, 0) };
                if result == 0
                    && matches!(number, libc::SYS_fork | libc::SYS_vfork | libc::SYS_clone)
                {
                    // SAFETY: a child that should not exist.
                    unsafe { libc::_exit(0) };
                }
                outcome(result)
            }
            Attempt::Open(path, flags) => open(Path::new(path), flags),
            Attempt::Read(path) => reads(path),
            Attempt::Control(bytes) => send_control(bytes),
            Attempt::Other(attempt) => attempt(targets),
        }
    }
}

/// Placeholder for the supervisor's process number in an argument.
const SUPERVISOR: i64 = i64::MIN;

/// System calls that no worker may make.
const CALLS: &[(&str, i64, [i64; 3])] = &[
    ("ptrace traceme", libc::SYS_ptrace, [0, 0, 0]),
    ("ptrace seize", libc::SYS_ptrace, [0x4206, SUPERVISOR, 0]),
    (
        "process_vm_writev",
        libc::SYS_process_vm_writev,
        [SUPERVISOR, 0, 0],
    ),
    ("signal everybody", libc::SYS_kill, [-1, 0, 0]),
    ("signal the group", libc::SYS_kill, [0, 0, 0]),
    ("tkill", libc::SYS_tkill, [SUPERVISOR, 0, 0]),
    ("pidfd_open", libc::SYS_pidfd_open, [SUPERVISOR, 0, 0]),
    ("pidfd_getfd", libc::SYS_pidfd_getfd, [1000, 0, 0]),
    ("kcmp", libc::SYS_kcmp, [SUPERVISOR, SUPERVISOR, 0]),
    ("socket inet", libc::SYS_socket, [2, 1, 0]),
    ("socket netlink", libc::SYS_socket, [16, 3, 0]),
    ("socket packet", libc::SYS_socket, [17, 3, 0]),
    ("socket vsock", libc::SYS_socket, [40, 1, 0]),
    ("accept", libc::SYS_accept, [1000, 0, 0]),
    ("mount", libc::SYS_mount, [0, 0, 0]),
    ("mount_setattr", libc::SYS_mount_setattr, [-100, 0, 0]),
    ("move_mount", libc::SYS_move_mount, [-100, 0, -100]),
    ("umount", libc::SYS_umount2, [0, 0, 0]),
    ("pivot_root", libc::SYS_pivot_root, [0, 0, 0]),
    ("chroot", libc::SYS_chroot, [0, 0, 0]),
    ("open_tree", libc::SYS_open_tree, [-100, 0, 0]),
    ("fsopen", libc::SYS_fsopen, [0, 0, 0]),
    (
        "unshare a user namespace",
        libc::SYS_unshare,
        [0x1000_0000, 0, 0],
    ),
    (
        "unshare a mount namespace",
        libc::SYS_unshare,
        [0x0002_0000, 0, 0],
    ),
    ("setns", libc::SYS_setns, [1000, 0, 0]),
    ("keyctl", libc::SYS_keyctl, [0, 0, 0]),
    ("add_key", libc::SYS_add_key, [0, 0, 0]),
    ("request_key", libc::SYS_request_key, [0, 0, 0]),
    ("bpf", libc::SYS_bpf, [0, 0, 0]),
    ("perf_event_open", libc::SYS_perf_event_open, [0, 0, 0]),
    ("userfaultfd", libc::SYS_userfaultfd, [0, 0, 0]),
    ("io_uring_setup", libc::SYS_io_uring_setup, [8, 0, 0]),
    ("io_uring_enter", libc::SYS_io_uring_enter, [1000, 0, 0]),
    (
        "io_uring_register",
        libc::SYS_io_uring_register,
        [1000, 0, 0],
    ),
    ("fanotify_init", libc::SYS_fanotify_init, [0, 0, 0]),
    ("kexec_load", libc::SYS_kexec_load, [0, 0, 0]),
    ("init_module", libc::SYS_init_module, [0, 0, 0]),
    ("finit_module", libc::SYS_finit_module, [1000, 0, 0]),
    ("delete_module", libc::SYS_delete_module, [0, 0, 0]),
    ("reboot", libc::SYS_reboot, [0, 0, 0]),
    ("swapon", libc::SYS_swapon, [0, 0, 0]),
    ("sethostname", libc::SYS_sethostname, [0, -1, 0]),
    ("settimeofday", libc::SYS_settimeofday, [0, 0, 0]),
    ("syslog", libc::SYS_syslog, [10, 0, 0]),
    ("iopl", libc::SYS_iopl, [3, 0, 0]),
    (
        "name_to_handle_at",
        libc::SYS_name_to_handle_at,
        [-100, 0, 0],
    ),
    (
        "open_by_handle_at",
        libc::SYS_open_by_handle_at,
        [-100, 0, 0],
    ),
    ("setuid root", libc::SYS_setuid, [0, 0, 0]),
    ("setresuid root", libc::SYS_setresuid, [0, 0, 0]),
    ("capset", libc::SYS_capset, [0, 0, 0]),
    ("poll many descriptors", libc::SYS_poll, [0, 257, 0]),
    ("ppoll many descriptors", libc::SYS_ppoll, [0, 257, 0]),
    ("select many descriptors", libc::SYS_select, [257, 8, 0]),
    ("merge equal pages", libc::SYS_madvise, [0, 4096, 12]),
    (
        "seal a file against writes",
        libc::SYS_fcntl,
        [1000, libc::F_ADD_SEALS as i64, libc::F_SEAL_WRITE as i64],
    ),
    (
        "have others write behind the end of a file",
        libc::SYS_fcntl,
        [1000, libc::F_SETFL as i64, libc::O_APPEND as i64],
    ),
    ("search a file for a hole", libc::SYS_lseek, [0, 0, 4]),
    (
        "replace pages by a huge page",
        libc::SYS_madvise,
        [0, 1 << 21, 25],
    ),
    ("free pages of a file", libc::SYS_madvise, [0, 4096, 9]),
    ("take pages out of memory", libc::SYS_madvise, [0, 4096, 21]),
    (
        "attach a filter of packets",
        libc::SYS_setsockopt,
        [1000, 1, 26],
    ),
    ("fork", libc::SYS_fork, [0, 0, 0]),
    ("vfork", libc::SYS_vfork, [0, 0, 0]),
    ("fork by clone", libc::SYS_clone, [17, 0, 0]),
    (
        "clone into namespaces",
        libc::SYS_clone,
        [0x1000_0011, 0, 0],
    ),
    ("seccomp", libc::SYS_seccomp, [1, 0, 0]),
    ("outlive the supervisor", libc::SYS_prctl, [1, 0, 0]),
    ("be given huge pages", libc::SYS_prctl, [41, 0, 0]),
    ("become dumpable", libc::SYS_prctl, [4, 1, 0]),
    ("execveat", libc::SYS_execveat, [1000, 0, 0]),
    ("shmget", libc::SYS_shmget, [0x5748, 0, 0]),
    ("msgget", libc::SYS_msgget, [0x5748, 0, 0]),
    ("mq_open", libc::SYS_mq_open, [0, 0, 0]),
    ("mknod", libc::SYS_mknod, [0, 0, 0]),
    ("symlink", libc::SYS_symlink, [0, 0, 0]),
    ("link", libc::SYS_link, [0, 0, 0]),
    ("setpriority", libc::SYS_setpriority, [0, 0, -1]),
    (
        "wait for a lock",
        libc::SYS_fcntl,
        [1000, libc::F_SETLKW as i64, 0],
    ),
    (
        "lock a part of an open file",
        libc::SYS_fcntl,
        [1000, libc::F_OFD_SETLK as i64, 0],
    ),
    (
        "wait for a lock of an open file",
        libc::SYS_fcntl,
        [1000, libc::F_OFD_SETLKW as i64, 0],
    ),
    (
        "lease a file",
        libc::SYS_fcntl,
        [1000, libc::F_SETLEASE as i64, 0],
    ),
    (
        "be signalled when others use a folder",
        libc::SYS_fcntl,
        [1000, libc::F_NOTIFY as i64, 0],
    ),
    ("flock", libc::SYS_flock, [1000, 2, 0]),
    (
        "make a file of huge pages",
        libc::SYS_memfd_create,
        [0, libc::MFD_HUGETLB as i64, 0],
    ),
    ("ioctl TIOCSTI", libc::SYS_ioctl, [1000, 0x5412, 0]),
    ("ioctl SIOCGIFCONF", libc::SYS_ioctl, [1000, 0x8912, 0]),
    ("ioctl of a disk", libc::SYS_ioctl, [1000, 0x125D, 0]),
];

/// System calls that the driver makes and the CPU device does not.
const DRIVER_CALLS: &[(&str, i64, [i64; 3])] = &[
    ("ioctl of UVM", libc::SYS_ioctl, [1000, 1, 0]),
    (
        "ioctl of the resource manager",
        libc::SYS_ioctl,
        [1000, 0xC020_462A, 0],
    ),
    ("socket unix", libc::SYS_socket, [1, 1, 0]),
    ("connect", libc::SYS_connect, [1000, 0, 0]),
    ("bind", libc::SYS_bind, [1000, 0, 0]),
    ("listen", libc::SYS_listen, [1000, 0, 0]),
    ("chmod", libc::SYS_chmod, [0, 0, 0]),
    ("unlink", libc::SYS_unlink, [0, 0, 0]),
    ("discard a large range", libc::SYS_madvise, [1, 1 << 30, 4]),
    (
        "memfd_create of another kind",
        libc::SYS_memfd_create,
        [0, 0, 0],
    ),
];

const READ: i32 = libc::O_RDONLY | libc::O_NONBLOCK;

/// Files of the host, of other processes, and of the system, with the error for a worker on a GPU. On the CPU device no file
/// is opened by its path.
const FILES: &[(&str, i32, Option<i32>)] = &[
    ("/etc/passwd", READ, Some(libc::ENOENT)),
    ("/etc/shadow", READ, Some(libc::ENOENT)),
    ("/root/.bashrc", READ, Some(libc::ENOENT)),
    ("/home", READ, Some(libc::ENOENT)),
    ("/var", READ, Some(libc::ENOENT)),
    ("/run", READ, Some(libc::ENOENT)),
    ("/srv", READ, Some(libc::ENOENT)),
    ("/dev/kvm", READ, Some(libc::ENOENT)),
    ("/dev/mem", READ, Some(libc::ENOENT)),
    ("/dev/kmsg", READ, Some(libc::ENOENT)),
    ("/dev/ptmx", READ, Some(libc::ENOENT)),
    ("/dev/shm", READ, None),
    ("/sys/fs", READ, Some(libc::ENOENT)),
    ("/sys/fs/cgroup", READ, Some(libc::ENOENT)),
    ("/sys/kernel", READ, Some(libc::ENOENT)),
    ("/sys/class", READ, Some(libc::ENOENT)),
    ("/sys/devices", READ, None),
    ("/sys/devices/virtual", READ, Some(libc::ENOENT)),
    ("/sys/devices/system/cpu/cpu0", READ, Some(libc::ENOENT)),
    ("/sys/devices/system/cpu/cpufreq", READ, Some(libc::ENOENT)),
    (
        "/sys/devices/system/node/node0/meminfo",
        READ,
        Some(libc::ENOENT),
    ),
    ("/proc/pressure/cpu", READ, Some(libc::ENOENT)),
    ("/proc/sys/kernel/osrelease", READ, None),
    ("/proc/irq/0", READ, Some(libc::ENOENT)),
    ("/proc/self/smaps", READ, None),
    ("/proc/kcore", READ, Some(libc::EACCES)),
    (
        "/proc/sys/kernel/core_pattern",
        libc::O_WRONLY,
        Some(libc::EACCES),
    ),
    ("/proc/sysrq-trigger", libc::O_WRONLY, Some(libc::EACCES)),
    ("/sys/bus/pci/rescan", libc::O_WRONLY, Some(libc::EACCES)),
];

const fn both(errno: i32) -> [Option<i32>; 2] {
    [Some(errno), Some(errno)]
}

type Row = (
    &'static str,
    fn(&Targets) -> Outcome,
    [Option<i32>; 2],
    Control,
);

/// Errors for process numbers: workers of a GPU share a PID namespace with each other.
const NUMBERED: [Option<i32>; 2] = [Some(libc::ESRCH), Some(libc::EPERM)];

const OTHERS: &[Row] = &[
    (
        "signal the supervisor",
        |targets| signal(targets.supervisor),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "signal a sibling",
        |targets| signal(targets.sibling),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "signal the supervisor's thread",
        signal_thread,
        both(libc::ESRCH),
        Control::Succeeds,
    ),
    (
        "signal whatever process has a number",
        |_| any_other(signal_by_number),
        NUMBERED,
        Control::Succeeds,
    ),
    (
        "see the limits of whatever process has a number",
        |_| any_other(limits_by_number),
        NUMBERED,
        Control::Succeeds,
    ),
    (
        "read the time of whatever process has a number",
        |_| any_other(time_by_number),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "move whatever process has a number to a processor",
        |_| any_other(move_by_number),
        // On a GPU the call returns success and does nothing.
        [Some(libc::ESRCH), Some(0)],
        Control::Succeeds,
    ),
    (
        "have the kernel signal the supervisor",
        own_descriptor,
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "ptrace a sibling",
        seize_sibling,
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "read the supervisor's memory",
        |targets| read_memory(targets.supervisor),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "read a sibling's memory",
        |targets| read_memory(targets.sibling),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "open the supervisor's memory",
        |targets| open_memory(targets.supervisor),
        [Some(libc::EPERM), Some(libc::ENOENT)],
        Control::Succeeds,
    ),
    (
        "open a sibling's memory",
        |targets| open_memory(targets.sibling),
        [Some(libc::EPERM), Some(libc::ENOENT)],
        Control::Succeeds,
    ),
    (
        "look into the supervisor's root",
        |targets| {
            let path = format!("/proc/{}/root/etc/passwd", targets.supervisor);
            open(Path::new(&path), READ)
        },
        [Some(libc::EPERM), Some(libc::ENOENT)],
        Control::Succeeds,
    ),
    (
        "move the supervisor to a processor",
        move_supervisor,
        both(libc::ESRCH),
        Control::Succeeds,
    ),
    (
        "read the supervisor's limits",
        limits_of_supervisor,
        both(libc::ESRCH),
        Control::Succeeds,
    ),
    (
        "raise its limit of descriptors",
        |_| raise(libc::RLIMIT_NOFILE, 4097),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "raise its limit of threads",
        |_| raise(libc::RLIMIT_NPROC, 1025),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "have more than 64 timers",
        |_| make_timers(65),
        [Some(libc::EPERM), Some(libc::EAGAIN)],
        Control::Succeeds,
    ),
    (
        "dump core",
        |_| raise(libc::RLIMIT_CORE, 2),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "start the system's program for dumps of core",
        |_| found(core_limit() != 1),
        both(libc::ENOENT),
        Control::Succeeds,
    ),
    (
        "lower its limit of core dumps",
        |_| raise(libc::RLIMIT_CORE, 0),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "wait by a set of descriptors",
        // SAFETY: the call takes no address.
        |_| outcome(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }.into()),
        [Some(libc::EPERM), None],
        Control::Succeeds,
    ),
    (
        "list a folder",
        |_| result_of(std::fs::read_dir("/usr").and_then(|mut all| all.next().transpose())),
        [Some(libc::EPERM), None],
        Control::Succeeds,
    ),
    (
        "read without end",
        // SAFETY: the descriptor is none.
        |_| outcome(unsafe { libc::syscall(libc::SYS_read, -1, 0, 1 << 24) }),
        [Some(libc::EPERM), None],
        Control::GoesOn,
    ),
    // Under the driver's profile only a cgroup could limit it, if there is one.
    (
        "have more memory than workers may have",
        |_| map(2 * WORKER_MEMORY, 0),
        [Some(libc::ENOMEM), None],
        Control::Succeeds,
    ),
    (
        "map huge pages",
        |_| map(HUGE_PAGE, libc::MAP_HUGETLB),
        both(libc::EPERM),
        Control::GoesOn,
    ),
    (
        "connect to an abstract socket of the host",
        |targets| connect(&targets.abstract_socket()),
        [Some(libc::EPERM), Some(libc::ECONNREFUSED)],
        Control::Succeeds,
    ),
    (
        "connect to the supervisor's listener",
        |targets| connect(&SocketAddr::from_pathname(targets.listener()).unwrap()),
        [Some(libc::EPERM), Some(libc::ENOENT)],
        Control::Succeeds,
    ),
    (
        "take a name of an abstract socket of the host",
        take_name,
        both(libc::ENOENT),
        Control::Succeeds,
    ),
    (
        "queue connections that nobody accepts",
        |_| queue_connections(),
        [Some(libc::EPERM), Some(libc::EAGAIN)],
        Control::Succeeds,
    ),
    (
        "write into the workers' executable",
        |_| {
            let own = std::fs::read_link("/proc/self/exe");
            open(&own.unwrap_or_else(|_| "/worker".into()), libc::O_WRONLY)
        },
        [Some(libc::EPERM), Some(libc::EACCES)],
        Control::GoesOn,
    ),
    (
        "make a file in the root",
        |targets| create("/", targets),
        [Some(libc::EPERM), Some(libc::EROFS)],
        Control::Succeeds,
    ),
    (
        "make a file among the libraries",
        |targets| create("/usr", targets),
        [Some(libc::EPERM), Some(libc::EROFS)],
        Control::Succeeds,
    ),
    (
        "make a file among the devices",
        |targets| create("/dev", targets),
        [Some(libc::EPERM), Some(libc::EROFS)],
        Control::Succeeds,
    ),
    (
        "make a file in shared memory",
        |targets| create("/dev/shm", targets),
        [Some(libc::EPERM), None],
        Control::Succeeds,
    ),
    (
        "execute a file that it wrote",
        map_own_file,
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "execute another program",
        |_| execute("/usr/bin/true"),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "resize the window",
        |targets| resize(targets.files[0]),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "resize the counters",
        |targets| resize(targets.files[1]),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "write the word on neighbours",
        |targets| write_first_word(targets.files[2]),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "punch the word on neighbours",
        |targets| punch(targets.files[2]),
        both(libc::EPERM),
        Control::Succeeds,
    ),
    (
        "see another process",
        |_| found(other_process()),
        both(libc::ENOENT),
        Control::Succeeds,
    ),
    (
        "hold another descriptor",
        |_| found(descriptors() > 8),
        both(libc::ENOENT),
        Control::Succeeds,
    ),
    (
        "read how busy the processors are",
        |_| reads("/proc/stat"),
        both(libc::ENOENT),
        Control::Succeeds,
    ),
    (
        "read how busy the memory is",
        |_| reads("/proc/vmstat"),
        both(libc::ENOENT),
        Control::Succeeds,
    ),
    (
        "read how much the system has to do",
        |_| reads("/proc/loadavg"),
        both(libc::ENOENT),
        Control::Succeeds,
    ),
    (
        "read how long the processors had nothing to do",
        |_| reads("/proc/uptime"),
        both(libc::ENOENT),
        Control::Succeeds,
    ),
    (
        "read how many files are open",
        |_| reads("/proc/sys/fs/file-nr"),
        both(libc::ENOENT),
        Control::Succeeds,
    ),
    (
        "read how many terminals are open",
        |_| reads("/proc/sys/kernel/pty/nr"),
        both(libc::ENOENT),
        Control::Succeeds,
    ),
    (
        "read how many control groups there are",
        |_| reads("/proc/cgroups"),
        both(libc::ENOENT),
        Control::Succeeds,
    ),
    (
        "read which interrupts there were",
        |_| reads("/proc/interrupts"),
        both(libc::ENOENT),
        Control::Succeeds,
    ),
    (
        "be root",
        // SAFETY: the calls cannot fail.
        |_| found(unsafe { libc::getuid() == 0 || libc::geteuid() == 0 }),
        both(libc::ENOENT),
        Control::Succeeds,
    ),
];

/// Files of `/proc` that have contents, unless the kernel lacks them.
const READS: [(&str, &str); 1] = [(
    "read how many devices and virtual machines there are",
    "/proc/modules",
)];

/// Returns every attack, for all profiles.
pub fn all() -> Vec<Attack> {
    let refused = |call: i64| {
        // ENOSYS makes libc fall back to `clone`, whose flags a filter can read.
        if call == libc::SYS_clone3 {
            libc::ENOSYS
        } else {
            libc::EPERM
        }
    };
    let call = |&(name, number, arguments): &(&str, i64, [i64; 3]), cuda| Attack {
        name: name.to_owned(),
        control: Control::GoesOn,
        attempt: Attempt::Call(number, arguments),
        refusals: [Some(refused(number)), cuda],
    };
    let mut attacks: Vec<Attack> = CALLS
        .iter()
        .map(|row| call(row, Some(refused(row.1))))
        .collect();
    attacks.push(call(
        &("clone3", libc::SYS_clone3, [0, 0, 0]),
        Some(libc::ENOSYS),
    ));
    // The call returns success to the driver, although not even the file exists.
    attacks.push(call(
        &(
            "lock a part of a file",
            libc::SYS_fcntl,
            [1000, i64::from(libc::F_SETLK), 0],
        ),
        Some(0),
    ));
    // The call returns success to the driver, although not even the address is one of a page.
    attacks.push(call(
        &("give pages a policy", libc::SYS_mbind, [1, 4096, 0]),
        Some(0),
    ));
    // The call returns success to any library, although not even the address is one of a page.
    attacks.push(Attack {
        refusals: both(0),
        ..call(&("name pages", libc::SYS_prctl, [0x5356_4d41, 0, 1]), None)
    });
    attacks.extend(DRIVER_CALLS.iter().map(|row| call(row, None)));
    attacks.extend(FILES.iter().map(|&(path, flags, refusal)| Attack {
        name: format!("open {path}"),
        control: Control::Succeeds,
        attempt: Attempt::Open(path, flags),
        refusals: [Some(libc::EPERM), refusal],
    }));
    attacks.extend(READS.iter().map(|&(name, path)| Attack {
        name: name.to_owned(),
        control: Control::Succeeds,
        attempt: Attempt::Read(path),
        refusals: both(libc::ENOENT),
    }));
    attacks.push(Attack {
        name: "send much control data".to_owned(),
        control: Control::GoesOn,
        attempt: Attempt::Control(32 << 10),
        refusals: [Some(libc::EPERM), Some(libc::ENOBUFS)],
    });
    attacks.extend(
        OTHERS
            .iter()
            .map(|&(name, attempt, refusals, control)| Attack {
                name: name.to_owned(),
                control,
                attempt: Attempt::Other(attempt),
                refusals,
            }),
    );
    attacks
}

fn outcome(result: i64) -> Outcome {
    if result < 0 {
        io::Error::last_os_error().raw_os_error().unwrap_or(-1)
    } else {
        0
    }
}

fn result_of<T>(result: io::Result<T>) -> Outcome {
    match result {
        Ok(_) => 0,
        Err(error) => error.raw_os_error().unwrap_or(-1),
    }
}

/// Returns whether the file has contents to read.
fn reads(path: &str) -> Outcome {
    found(std::fs::read(path).is_ok_and(|text| !text.is_empty()))
}

fn found(there: bool) -> Outcome {
    if there { 0 } else { libc::ENOENT }
}

fn open(path: &Path, flags: i32) -> Outcome {
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a C string; the descriptor is closed at once.
    unsafe {
        let fd = libc::open(path.as_ptr(), flags | libc::O_CLOEXEC);
        let outcome = outcome(fd.into());
        if fd >= 0 {
            libc::close(fd);
        }
        outcome
    }
}

fn signal(pid: i32) -> Outcome {
    // SAFETY: no pointer; signal 0 only checks.
    outcome(unsafe { libc::kill(pid, 0) }.into())
}

fn signal_thread(targets: &Targets) -> Outcome {
    let pid = i64::from(targets.supervisor);
    // SAFETY: no pointer; signal 0 only checks.
    outcome(unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, 0) })
}

/// Tries the attempt on each process with a low number but this one. Returns success if any
/// succeeded, or else the refusal.
fn any_other(attempt: fn(i32) -> Outcome) -> Outcome {
    let own = i32::try_from(std::process::id()).unwrap();
    let outcomes: Vec<Outcome> = (1..1000).filter(|pid| *pid != own).map(attempt).collect();
    let found = |wanted| outcomes.contains(&wanted).then_some(wanted);
    let refused = outcomes
        .iter()
        .copied()
        .find(|outcome| *outcome != libc::ESRCH);
    found(0).or(refused).unwrap_or(libc::ESRCH)
}

fn signal_by_number(pid: i32) -> Outcome {
    // SAFETY: no pointer; signal 0 only checks.
    outcome(unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, 0) })
}

fn limits_by_number(pid: i32) -> Outcome {
    // SAFETY: a local structure that the kernel fills.
    outcome(unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut limit).into()
    })
}

fn time_by_number(pid: i32) -> Outcome {
    // clock_getcpuclockid(3): CPU time of a process.
    let clock = (!pid << 3) | 2;
    // SAFETY: a local structure that the kernel fills.
    outcome(unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(clock, &raw mut time).into()
    })
}

/// Sets a process's CPU affinity to the present one.
fn move_by_number(pid: i32) -> Outcome {
    // SAFETY: a local structure of the size given.
    outcome(unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(pid, size_of_val(&set), &raw mut set) != 0 {
            return outcome(-1);
        }
        libc::sched_setaffinity(pid, size_of_val(&set), &raw const set).into()
    })
}

fn own_descriptor(targets: &Targets) -> Outcome {
    let file = wormhole_link::memory::anonymous_file(c"own").unwrap();
    // SAFETY: an open descriptor and an integer; nothing is announced on it.
    outcome(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETOWN, targets.supervisor) }.into())
}

fn seize_sibling(targets: &Targets) -> Outcome {
    // PTRACE_SEIZE does not stop the process, and ends with the tracer.
    // SAFETY: no memory of this process is involved.
    outcome(unsafe {
        libc::syscall(
            libc::SYS_ptrace,
            0x4206_i64,
            i64::from(targets.sibling),
            0,
            0,
        )
    })
}

fn read_memory(pid: i32) -> Outcome {
    // If the address is unknown, any other will do: the attempt is refused before the address
    // matters.
    let address = std::fs::read_to_string(format!("/proc/{pid}/maps"))
        .ok()
        .and_then(|maps| usize::from_str_radix(maps.split('-').next()?, 16).ok())
        .unwrap_or(0x40_0000);
    let mut buffer = [0u8; 8];
    let local = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let remote = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(address),
        iov_len: buffer.len(),
    };
    // SAFETY: one local buffer of the length given.
    let count =
        unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    outcome(i64::try_from(count).unwrap())
}

fn open_memory(pid: i32) -> Outcome {
    open(Path::new(&format!("/proc/{pid}/mem")), libc::O_RDWR)
}

fn move_supervisor(targets: &Targets) -> Outcome {
    // SAFETY: a local set that the kernel fills and reads.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let size = size_of_val(&set);
        if libc::sched_getaffinity(targets.supervisor, size, &raw mut set) != 0 {
            return outcome(-1);
        }
        outcome(libc::sched_setaffinity(targets.supervisor, size, &raw const set).into())
    }
}

fn limits_of_supervisor(targets: &Targets) -> Outcome {
    // SAFETY: a local structure that the kernel fills.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        let none = std::ptr::null();
        outcome(
            libc::prlimit(
                targets.supervisor,
                libc::RLIMIT_NOFILE,
                none,
                &raw mut limit,
            )
            .into(),
        )
    }
}

/// Returns the limit of core dumps. With any but 1 the kernel starts the program that `core_pattern` names.
fn core_limit() -> u64 {
    // SAFETY: a local structure that the kernel fills.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_CORE, &raw mut limit);
        limit.rlim_cur
    }
}

/// Sets a limit to one more than workers have, which is less than other processes have.
fn raise(resource: libc::__rlimit_resource_t, value: u64) -> Outcome {
    let limit = libc::rlimit {
        rlim_cur: value,
        rlim_max: value,
    };
    // SAFETY: a local structure that the kernel reads.
    outcome(unsafe { libc::setrlimit(resource, &raw const limit) }.into())
}

/// Makes timers, and deletes them again.
fn make_timers(count: usize) -> Outcome {
    let mut timers = Vec::new();
    let mut made = 0;
    while timers.len() < count && made == 0 {
        let mut timer: libc::c_int = 0;
        let (call, clock) = (libc::SYS_timer_create, libc::CLOCK_MONOTONIC);
        // SAFETY: the kernel fills a local number. The timer is not started.
        made = outcome(unsafe { libc::syscall(call, clock, 0, &raw mut timer) });
        if made == 0 {
            timers.push(timer);
        }
    }
    for timer in timers {
        // SAFETY: a number of a timer of this process.
        unsafe { libc::syscall(libc::SYS_timer_delete, timer) };
    }
    made
}

/// Maps private memory with further flags, and unmaps it again.
fn map(bytes: usize, flags: i32) -> Outcome {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the kernel chooses a free address; nothing refers to it when it is unmapped.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0);
        if at == libc::MAP_FAILED {
            return outcome(-1);
        }
        outcome(libc::munmap(at, bytes).into())
    }
}

fn connect(address: &SocketAddr) -> Outcome {
    result_of(UnixStream::connect_addr(address))
}

/// Finds that a name is taken by a socket of the host. The socket that it is tried with is one that it was given, if it can
/// make none.
fn take_name(targets: &Targets) -> Outcome {
    let name = targets.abstract_socket();
    let address = SocketAddrUnix::new_abstract_name(name.as_abstract_name().unwrap()).unwrap();
    let taken = match UnixStream::pair() {
        Ok((socket, _)) => rustix::net::bind(&socket, &address),
        // SAFETY: the stream to the supervisor, which stays open.
        Err(_) => rustix::net::bind(unsafe { BorrowedFd::borrow_raw(CONTROL) }, &address),
    };
    found(taken == Err(rustix::io::Errno::ADDRINUSE))
}

/// Sends a message with control data of a level that sockets do not know, to nobody.
fn send_control(bytes: usize) -> Outcome {
    let socket = match rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None) {
        Ok(socket) => socket,
        Err(error) => return error.raw_os_error(),
    };
    // The header's length, and the level 0.
    let mut control = vec![0_u64; bytes / 8];
    control[0] = bytes as u64;
    // SAFETY: all zeros are a valid value, and the control data are a live buffer of the length given.
    outcome(unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = bytes;
        libc::sendmsg(socket.as_raw_fd(), &raw const message, 0) as i64
    })
}

/// Connects to a socket of its own that accepts nobody, and closes each connection.
fn queue_connections() -> Outcome {
    let name = format!("wormhole-sandbox-queue-{}", std::process::id());
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let kind = SocketType::STREAM;
    let queue = || {
        let listener = rustix::net::socket(AddressFamily::UNIX, kind, None)?;
        rustix::net::bind(&listener, &address)?;
        rustix::net::listen(&listener, 4096)?;
        for _ in 0..100 {
            let flags = SocketFlags::NONBLOCK;
            let client = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
            rustix::net::connect(&client, &address)?;
        }
        Ok(())
    };
    result_of(queue().map_err(|error: rustix::io::Errno| error.into()))
}

fn create(folder: &str, targets: &Targets) -> Outcome {
    let path = Path::new(folder).join(format!("wormhole-sandbox-{}", targets.test));
    let made = result_of(File::options().write(true).create_new(true).open(&path));
    if made == 0 {
        std::fs::remove_file(path).unwrap();
    }
    made
}

/// Maps a file with code that it wrote.
fn map_own_file(targets: &Targets) -> Outcome {
    let path = targets.program();
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(true);
    let mut file = match options.open(&path) {
        Ok(file) => file,
        Err(error) => return result_of(Err::<(), _>(error)),
    };
    file.write_all(&[0xc3]).unwrap();
    let protection = libc::PROT_READ | libc::PROT_EXEC;
    let flags = libc::MAP_PRIVATE;
    // SAFETY: the kernel chooses a free address, at which nothing is executed.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            1,
            protection,
            flags,
            file.as_raw_fd(),
            0,
        )
    };
    outcome(if at == libc::MAP_FAILED { -1 } else { 0 })
}

/// Executes another program. Returns the error if that is refused.
fn execute(path: &str) -> Outcome {
    let path = CString::new(path).unwrap();
    let arguments = [path.as_ptr(), std::ptr::null()];
    let environment = [std::ptr::null()];
    // SAFETY: a C string, and arrays that end with a null pointer.
    unsafe { libc::execve(path.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
    outcome(-1)
}

fn resize(file: Option<i32>) -> Outcome {
    // SAFETY: a descriptor and sizes; the file is this process's own.
    unsafe {
        let fd = file.unwrap();
        let larger = libc::ftruncate(fd, 1 << 40);
        let smaller = libc::ftruncate(fd, 0);
        outcome(larger.min(smaller).into())
    }
}

fn write_first_word(file: Option<i32>) -> Outcome {
    // SAFETY: a descriptor and local bytes.
    unsafe { outcome(libc::write(file.unwrap(), [0_u8; 8].as_ptr().cast(), 8) as i64) }
}

fn punch(file: Option<i32>) -> Outcome {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: a descriptor and integers.
    unsafe { outcome(libc::fallocate(file.unwrap(), mode, 0, 4096).into()) }
}

/// Returns whether another process is visible.
fn other_process() -> bool {
    let own = std::process::id();
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .any(|name| name.parse::<u32>().is_ok_and(|pid| pid != own))
}

/// Returns the number of open descriptors. Expected are 8: standard input, output and error,
/// stream, log, window, counters, and the word on neighbours.
fn descriptors() -> usize {
    // SAFETY: the call changes nothing.
    let is_open = |fd: &i32| unsafe { libc::fcntl(*fd, libc::F_GETFD) } != -1;
    (0..4096).filter(is_open).count()
}

/// Makes every attack in a child process, unconfined.
pub fn control(targets: &Targets) -> Vec<(Attack, Outcome)> {
    let resizable: Vec<OwnedFd> = (0..3)
        .map(|_| wormhole_link::memory::anonymous_file(c"control").unwrap())
        .collect();
    let targets = Targets {
        files: [0, 1, 2].map(|at| Some(resizable[at].as_raw_fd())),
        ..targets.clone()
    };
    let _more: Vec<File> = (0..8)
        .map(|_| {
            wormhole_link::memory::anonymous_file(c"more")
                .unwrap()
                .into()
        })
        .collect();
    all()
        .into_iter()
        .map(|attack| {
            let outcome = in_child(|| attack.make(&targets));
            (attack, outcome)
        })
        .collect()
}

/// Runs `attempt` in a copy of this process and returns its outcome; 0 if the copy executes another
/// program.
fn in_child(attempt: impl FnOnce() -> Outcome) -> Outcome {
    let mut ends = [0; 2];
    // SAFETY: the process has one thread, so its copy may do anything; it ends with `_exit`. The
    // pipe is local.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            let bytes = attempt().to_le_bytes();
            libc::write(ends[1], bytes.as_ptr().cast(), bytes.len());
            libc::_exit(0);
        }
        libc::close(ends[1]);
        let mut bytes = [0u8; 4];
        let count = libc::read(ends[0], bytes.as_mut_ptr().cast(), bytes.len());
        libc::close(ends[0]);
        let mut status = 0;
        libc::waitpid(child, &raw mut status, 0);
        match count {
            4 => i32::from_le_bytes(bytes),
            _ if status == 0 => 0,
            _ => panic!("an attempt ended with status {status}"),
        }
    }
}
