//! System calls that a filter should deny, for tests. Each is made in its own process, because a denied call ends the
//! process.
//!
//! [`all_are_denied`] starts the calling test again for each call. In that process [`asked`] returns the call, and the
//! test makes it with [`attempt`] on a thread with the filter.

use std::env;
use std::process::Command;

use crate::DENIED;

/// Environment variable with the call that a test process must make.
const VARIABLE: &str = "WORMHOLE_ATTEMPT";
/// Exit status of a process whose call was not denied by the filter.
const MADE: i32 = 3;

/// Name of a system call, behind which more may distinguish the attempt, and the call's number and arguments.
pub type Attempt = (&'static str, [i64; 6]);

/// An invalid address, which the kernel would read only if it makes the call.
const NOWHERE: i64 = 8;

/// Opens a file with these flags.
const fn open_with(flags: i32) -> [i64; 6] {
    let here = libc::AT_FDCWD as i64;
    [libc::SYS_openat, here, NOWHERE, flags as i64, 0, 0]
}

/// Calls that open a file and can change one. Filters that make these calls fail do not deny them.
pub const OPENS: [Attempt; 6] = [
    ("openat O_WRONLY", open_with(libc::O_WRONLY)),
    ("openat O_RDWR", open_with(libc::O_RDWR)),
    ("openat O_CREAT", open_with(libc::O_CREAT)),
    ("openat O_TRUNC", open_with(libc::O_TRUNC)),
    ("openat O_TMPFILE", open_with(libc::O_TMPFILE)),
    ("open", [libc::SYS_open, NOWHERE, 0, 0, 0, 0]),
];

/// Calls on standard output, for a filter that allows them on other descriptors alone.
pub const ON_OTHER_FILES: [Attempt; 3] = [
    ("write", [libc::SYS_write, 1, NOWHERE, 1, 0, 0]),
    ("sendto", [libc::SYS_sendto, 1, NOWHERE, 1, 0, 0]),
    ("recvfrom", [libc::SYS_recvfrom, 1, NOWHERE, 1, 0, 0]),
];

/// Calls that change more than the contents and entries of a folder, for a filter that allows those. A mode of 0o4000 makes
/// a program run with its owner's rights.
pub const BEYOND_CHANGES: [Attempt; 12] = [
    ("openat setuid", {
        let mut open = open_with(libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY);
        open[4] = 0o4755;
        open
    }),
    ("openat O_TRUNC", open_with(libc::O_TRUNC)),
    ("openat O_TMPFILE", open_with(libc::O_TMPFILE)),
    (
        "mkdirat setgid",
        [libc::SYS_mkdirat, -1, NOWHERE, 0o2755, 0, 0],
    ),
    ("fchmod setuid", [libc::SYS_fchmod, -1, 0o4755, 0, 0, 0]),
    ("fchmodat", [libc::SYS_fchmodat, -1, NOWHERE, 0, 0, 0]),
    ("fchownat", [libc::SYS_fchownat, -1, NOWHERE, 0, 0, 0]),
    (
        "mknodat",
        [libc::SYS_mknodat, -1, NOWHERE, 0o020_666, 0x103, 0],
    ),
    (
        "linkat AT_SYMLINK_FOLLOW",
        [libc::SYS_linkat, -1, NOWHERE, -1, NOWHERE, 0x400],
    ),
    (
        "renameat2 RENAME_WHITEOUT",
        [libc::SYS_renameat2, -1, NOWHERE, -1, NOWHERE, 4],
    ),
    ("utimensat", [libc::SYS_utimensat, -1, NOWHERE, 0, 0, 0]),
    ("execve", [libc::SYS_execve, NOWHERE, 0, 0, 0, 0]),
];

/// Returns the calls with which injected code would begin. Their arguments are harmless if a call is made after all.
fn attempts() -> [Attempt; 22] {
    const KVM_CREATE_VM: i64 = 0xae01;
    let fork = i64::from(libc::SIGCHLD);
    let collapse = i64::from(libc::MADV_COLLAPSE);
    let executable = i64::from(libc::PROT_READ | libc::PROT_EXEC);
    let memory = i64::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    [
        ("execve", [libc::SYS_execve, NOWHERE, 0, 0, 0, 0]),
        ("socket", [libc::SYS_socket, 1, 1, 0, 0, 0]),
        ("connect", [libc::SYS_connect, -1, 0, 0, 0, 0]),
        ("ptrace", [libc::SYS_ptrace, -1, 0, 0, 0, 0]),
        ("unlink", [libc::SYS_unlink, NOWHERE, 0, 0, 0, 0]),
        ("clone", [libc::SYS_clone, fork, 0, 0, 0, 0]),
        ("kill", [libc::SYS_kill, 1, 0, 0, 0, 0]),
        ("tgkill", [libc::SYS_tgkill, 1, 1, 0, 0, 0]),
        ("mmap", [libc::SYS_mmap, 0, 4096, executable, memory, -1]),
        ("ioctl", [libc::SYS_ioctl, -1, KVM_CREATE_VM, 0, 0, 0]),
        (
            "madvise",
            [libc::SYS_madvise, NOWHERE, 1 << 36, collapse, 0, 0],
        ),
        (
            "process_vm_writev",
            [libc::SYS_process_vm_writev, 1, 0, 0, 0, 0],
        ),
        ("openat2", [libc::SYS_openat2, -1, NOWHERE, NOWHERE, 24, 0]),
        (
            "renameat",
            [libc::SYS_renameat, -1, NOWHERE, -1, NOWHERE, 0],
        ),
        ("linkat", [libc::SYS_linkat, -1, NOWHERE, -1, NOWHERE, 0]),
        ("mkdirat", [libc::SYS_mkdirat, -1, NOWHERE, 0, 0, 0]),
        // A process that may read any file opens any by its number alone.
        (
            "open_by_handle_at",
            [libc::SYS_open_by_handle_at, -1, NOWHERE, 0, 0, 0],
        ),
        (
            "name_to_handle_at",
            [
                libc::SYS_name_to_handle_at,
                -1,
                NOWHERE,
                NOWHERE,
                NOWHERE,
                0,
            ],
        ),
        (
            "io_uring_setup",
            [libc::SYS_io_uring_setup, 1, NOWHERE, 0, 0, 0],
        ),
        (
            "io_uring_register",
            [libc::SYS_io_uring_register, -1, 0, NOWHERE, 0, 0],
        ),
        ("poll many", [libc::SYS_poll, NOWHERE, 257, 0, 0, 0]),
        ("ppoll many", [libc::SYS_ppoll, NOWHERE, 257, 0, 0, 0]),
    ]
}

/// Returns the call that this process must make.
pub fn asked() -> Option<String> {
    env::var(VARIABLE).ok()
}

/// Makes the call, and ends the process if the call returns.
///
/// # Panics
/// The list has no such call.
pub fn attempt(call: &str) -> ! {
    let mut all = attempts()
        .into_iter()
        .chain(OPENS)
        .chain(ON_OTHER_FILES)
        .chain(BEYOND_CHANGES);
    let found = all.find(|(name, _)| *name == call);
    let (_, [number, a, b, c, d, e]) = found.expect("a call of the list");
    // SAFETY: no argument is an address in this process; the process ends.
    unsafe {
        libc::syscall(number, a, b, c, d, e);
        libc::_exit(MADE)
    }
}

/// Asserts that each call ends the process in which `test`, the full name of a test of this program, makes it on
/// `thread`, with a line that names both.
///
/// # Panics
/// A call is made, or the line names another thread or call.
pub fn all_are_denied(test: &str, thread: &str) {
    are_denied(&attempts(), test, thread);
}

/// Asserts that a filter denies each of `attempts`.
///
/// # Panics
/// As [`all_are_denied`].
pub fn are_denied(attempts: &[Attempt], test: &str, thread: &str) {
    for (call, [number, ..]) in attempts {
        let name = call.split(' ').next().unwrap_or(call);
        let ended = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", test, "--nocapture"])
            .env(VARIABLE, call)
            .output()
            .expect("this program runs");
        let said = String::from_utf8_lossy(&ended.stderr);
        let line = format!(
            "wormhole: the filter denies system call {number} ({name}) to thread {thread}, and this process ends"
        );
        assert!(said.lines().any(|said| said == line), "{call}: {ended:?}");
        assert_eq!(ended.status.code(), Some(DENIED), "{call}");
    }
}
