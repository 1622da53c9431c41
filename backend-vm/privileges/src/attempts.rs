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

/// Returns the calls with which injected code would begin. Their arguments are harmless if a call is made after all.
fn attempts() -> [(&'static str, [i64; 6]); 11] {
    /// An invalid address, which the kernel would read only if it makes the call.
    const NOWHERE: i64 = 8;
    const KVM_CREATE_VM: i64 = 0xae01;
    let fork = i64::from(libc::SIGCHLD);
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
            "process_vm_writev",
            [libc::SYS_process_vm_writev, 1, 0, 0, 0, 0],
        ),
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
    let found = attempts().into_iter().find(|(name, _)| *name == call);
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
    for (call, [number, ..]) in attempts() {
        let ended = Command::new(env::current_exe().expect("this program"))
            .args(["--exact", test, "--nocapture"])
            .env(VARIABLE, call)
            .output()
            .expect("this program runs");
        let said = String::from_utf8_lossy(&ended.stderr);
        let line = format!(
            "wormhole: the filter denies system call {number} ({call}) to thread {thread}, and this process ends"
        );
        assert!(said.lines().any(|said| said == line), "{call}: {ended:?}");
        assert_eq!(ended.status.code(), Some(DENIED), "{call}");
    }
}
