//! Confinement of a guest's launcher once the guest runs.
//!
//! The monitor's threads are in this process and share its memory, so a restriction of one thread
//! is only as strong as that of the others. Therefore one system call filter applies to all
//! threads. No call on its list opens a file, connects, or starts or signals another process.

use wormhole_link::raise_descriptor_limit;
use wormhole_monitor::confinement as monitor;
use wormhole_privileges::{Calls, Denial, Filter, FilterError, equals, equals_one_of};

use crate::confinement::{self, ConfinementError};

/// Calls that the launcher makes beyond the monitor's: threads, signals, the window's files, the
/// end of its children.
const CALLS: &[i64] = &[
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_fallocate,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_lseek,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_wait4,
    libc::SYS_waitid,
];

/// Calls that the standard library tries for copying streams, with a fallback.
const ABSENT: &[i64] = &[
    libc::SYS_splice,
    libc::SYS_sendfile,
    libc::SYS_copy_file_range,
];

/// Further calls of a process that serves tenants on a socket: their connections and users, and whether their window is a
/// file of huge pages.
const LISTENING: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_fstatfs,
];

fn filter(vm: Calls, more: &[i64]) -> Result<Filter, FilterError> {
    let commands = [libc::F_GETFL, libc::F_SETFL, libc::F_GET_SEALS];
    let commands = commands.map(|command| command.unsigned_abs().into());
    let name = equals(0, libc::PR_SET_NAME.unsigned_abs().into())?;
    vm.and(CALLS)
        .and(more)
        .and_threads()?
        .and_where(libc::SYS_fcntl, equals_one_of(1, commands)?)
        .and_where(libc::SYS_prctl, vec![name])
        // The size of the caller's terminal.
        .and_where(libc::SYS_ioctl, vec![equals(1, libc::TIOCGWINSZ)?])
        .without(ABSENT)
        .compile(Denial::Signal)
}

/// Confines the process. Call it before any thread reads bytes that the guest writes.
///
/// From here on the process may have as many descriptors as its hard limit allows: each control stream of a guest takes
/// some. Programs that it has started have the limit of its starter, and it starts no others.
///
/// # Errors
/// The kernel does not support filters.
pub fn enter() -> Result<(), ConfinementError> {
    confine(monitor::calls()?, &[])
}

/// Confines a process that serves tenants on a socket, as [`enter`] does. Its VM may have devices of the host.
///
/// # Errors
/// The kernel does not support filters.
pub fn enter_listening(has_devices: bool) -> Result<(), ConfinementError> {
    let calls = match has_devices {
        true => monitor::calls_with_devices()?,
        false => monitor::calls()?,
    };
    confine(calls, LISTENING)
}

fn confine(vm: Calls, more: &[i64]) -> Result<(), ConfinementError> {
    // With fewer descriptors, streams beyond them are refused.
    let _ = raise_descriptor_limit();
    confinement::enter(&filter(vm, more)?)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use wormhole_privileges::attempts::{all_are_denied, asked, attempt};
    use wormhole_privileges::report_denied_calls;

    use super::*;

    #[test]
    fn no_thread_of_the_launcher_has_other_calls() {
        if let Some(call) = asked() {
            let (confined, wait) = channel();
            let before = thread::Builder::new().name("before".to_owned());
            let before = before.spawn(move || {
                wait.recv().expect("the test goes on");
                attempt(&call)
            });
            enter().expect("confined");
            confined.send(()).expect("the thread waits");
            let _ = before.expect("a thread").join();
        }
        all_are_denied(
            "run::confinement::tests::no_thread_of_the_launcher_has_other_calls",
            "before",
        );
    }

    #[test]
    fn a_confined_launcher_has_more_descriptors_than_its_starter() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        const ASKED: &str = "WORMHOLE_TEST_OF_DESCRIPTORS";
        if std::env::var_os(ASKED).is_some() {
            let maximum = getrlimit(Resource::Nofile).maximum;
            let current = Some(32);
            setrlimit(Resource::Nofile, Rlimit { current, maximum }).expect("it is lower");
            enter().expect("confined");
            let pairs = (0..64).map(|_| std::os::unix::net::UnixStream::pair());
            let streams: Vec<_> = pairs.map(|pair| pair.expect("two descriptors")).collect();
            std::process::exit(if streams.len() == 64 { 0 } else { 1 });
        }
        let test =
            "run::confinement::tests::a_confined_launcher_has_more_descriptors_than_its_starter";
        let ended = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", test, "--nocapture"])
            .env(ASKED, "1")
            .output()
            .expect("this program runs");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success(), "{said}");
    }

    #[test]
    fn a_confined_thread_binds_itself_to_processors() {
        use rustix::thread::{sched_getaffinity, sched_setaffinity};
        let confined = thread::spawn(|| {
            let allowed = sched_getaffinity(None).expect("the kernel tells");
            filter(monitor::calls().expect("a list"), &[])
                .expect("it compiles")
                .install()
                .expect("installed");
            sched_setaffinity(None, &allowed)
        });
        report_denied_calls().expect("a handler");
        assert_eq!(confined.join().expect("no panic"), Ok(()));
    }

    #[test]
    fn a_confined_thread_starts_threads() {
        // Run in a thread of its own, because the filter cannot be removed from the thread.
        let confined = thread::spawn(|| {
            filter(monitor::calls().expect("a list"), &[])
                .expect("it compiles")
                .install()
                .expect("installed");
            let value = thread::Builder::new()
                .name("later".to_owned())
                .spawn(|| vec![1u8; 1 << 20].len());
            value.expect("a thread").join().expect("no panic")
        });
        report_denied_calls().expect("a handler");
        assert_eq!(confined.join().expect("no panic"), 1 << 20);
    }
}
