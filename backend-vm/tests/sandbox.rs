//! A worker executable that is itself hostile reaches nothing but its own session.
//!
//! This executable plays both parts: started by a supervisor it is the worker, tries everything, and writes
//! to its log what happened; started by hand it is the test that reads that log.

mod support;

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use support::backend::{Backend, Workers, is_running, wait_until};
use support::guest::{Control, Reply};
use wormhole_api::PROTOCOL_HASH;
use wormhole_backend::channel::{self, Incoming, Outgoing};
use wormhole_ring::control::{Attach, Message};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("--protocol") => println!("{PROTOCOL_HASH:016x}"),
        Some("--device") => hostile::run(),
        // What `cargo test` may ask of a test executable.
        Some("--list") => println!("a_hostile_worker_reaches_nothing: test"),
        _ => {
            let tests: [(&str, fn()); 3] = [
                (
                    "a_hostile_worker_reaches_nothing_but_its_session",
                    a_hostile_worker_reaches_nothing_but_its_session,
                ),
                (
                    "a_hostile_worker_does_not_outlive_its_supervisor",
                    a_hostile_worker_does_not_outlive_its_supervisor,
                ),
                (
                    "a_worker_that_leaves_its_descriptors_behind_holds_nobody_up",
                    a_worker_that_leaves_its_descriptors_behind_holds_nobody_up,
                ),
            ];
            println!("\nrunning {} tests", tests.len());
            for (name, test) in tests {
                test();
                println!("test {name} ... ok");
            }
            println!(
                "\ntest result: ok. {} passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n",
                tests.len()
            );
        }
    }
}

fn hostile_backend() -> Backend {
    let me = std::env::current_exe().unwrap();
    let mut backend = Backend::start(Workers::of(&[Path::new(&me)]), &[]);
    backend.attach(64, Attach::default()).unwrap();
    backend
}

/// What a guest says for its worker to leave with its descriptors in the supervisor's queue.
const LEAVE: &str = "CUDA_MODULE_LOADING=LEAVE\n";

fn assign(backend: &mut Backend, environment: &str) -> Control {
    let mut control = backend.connect();
    control.hello(PROTOCOL_HASH, environment);
    match control.receive() {
        Reply::Grant(_) => control,
        other => panic!("{other:?}"),
    }
}

fn a_hostile_worker_reaches_nothing_but_its_session() {
    let mut backend = hostile_backend();
    let _control = assign(&mut backend, "");
    backend.wait_for_log("attempts are over");
    let log = backend.log();
    let attempts: Vec<&str> = log
        .lines()
        .filter_map(|line| Some(line.split_once("attempt: ")?.1))
        .collect();
    for attempt in &attempts {
        println!("{attempt}");
    }
    assert!(attempts.len() >= 60, "{} attempts", attempts.len());
    let successes: Vec<&&str> = attempts
        .iter()
        .filter(|attempt| attempt.contains("SUCCEEDED"))
        .collect();
    assert!(successes.is_empty(), "{successes:#?}");
    assert!(backend.is_alive());
}

fn a_hostile_worker_does_not_outlive_its_supervisor() {
    let mut backend = hostile_backend();
    let _control = assign(&mut backend, "");
    backend.wait_for_log("attempts are over");
    let workers = backend.workers();
    assert!(workers.iter().all(|worker| is_running(*worker)));
    backend.signal(libc::SIGKILL);
    backend.wait_for_end();
    wait_until(
        || workers.iter().all(|worker| !is_running(*worker)),
        || "the workers' end".into(),
    );
}

fn a_worker_that_leaves_its_descriptors_behind_holds_nobody_up() {
    let mut backend = hostile_backend();
    let control = assign(&mut backend, LEAVE);
    backend.wait_for_log("leaving");
    backend.wait_for_log("session 0.1: worker");
    drop(control);
    backend.report();
    let _control = assign(&mut backend, "");
    assert!(backend.is_alive());
}

/// The worker's part.
mod hostile {
    use super::*;

    /// Numbers of system calls that do not exist for this process, with arguments that would do harm.
    const CALLS: &[(&str, i64, [i64; 3])] = &[
        ("ptrace attach", libc::SYS_ptrace, [16, 1, 0]),
        ("ptrace traceme", libc::SYS_ptrace, [0, 0, 0]),
        ("process_vm_readv", libc::SYS_process_vm_readv, [1, 0, 0]),
        ("process_vm_writev", libc::SYS_process_vm_writev, [1, 0, 0]),
        ("kill everybody", libc::SYS_kill, [-1, 9, 0]),
        ("kill the parent", libc::SYS_kill, [0, 9, 0]),
        ("pidfd_open", libc::SYS_pidfd_open, [1, 0, 0]),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, [3, 0, 0]),
        ("kcmp", libc::SYS_kcmp, [1, 1, 0]),
        ("socket inet", libc::SYS_socket, [2, 1, 0]),
        ("socket unix", libc::SYS_socket, [1, 1, 0]),
        ("socket netlink", libc::SYS_socket, [16, 3, 0]),
        ("socket vsock", libc::SYS_socket, [40, 1, 0]),
        ("connect", libc::SYS_connect, [3, 0, 0]),
        ("bind", libc::SYS_bind, [3, 0, 0]),
        ("mount", libc::SYS_mount, [0, 0, 0]),
        ("umount", libc::SYS_umount2, [0, 0, 0]),
        ("pivot_root", libc::SYS_pivot_root, [0, 0, 0]),
        ("chroot", libc::SYS_chroot, [0, 0, 0]),
        ("open_tree", libc::SYS_open_tree, [-100, 0, 0]),
        ("fsopen", libc::SYS_fsopen, [0, 0, 0]),
        ("unshare", libc::SYS_unshare, [0x1000_0000, 0, 0]),
        ("setns", libc::SYS_setns, [3, 0, 0]),
        ("keyctl", libc::SYS_keyctl, [0, 0, 0]),
        ("add_key", libc::SYS_add_key, [0, 0, 0]),
        ("bpf", libc::SYS_bpf, [0, 0, 0]),
        ("perf_event_open", libc::SYS_perf_event_open, [0, 0, 0]),
        ("userfaultfd", libc::SYS_userfaultfd, [0, 0, 0]),
        ("io_uring_setup", libc::SYS_io_uring_setup, [8, 0, 0]),
        ("kexec_load", libc::SYS_kexec_load, [0, 0, 0]),
        ("init_module", libc::SYS_init_module, [0, 0, 0]),
        ("finit_module", libc::SYS_finit_module, [3, 0, 0]),
        ("delete_module", libc::SYS_delete_module, [0, 0, 0]),
        ("reboot", libc::SYS_reboot, [0, 0, 0]),
        ("swapon", libc::SYS_swapon, [0, 0, 0]),
        ("sethostname", libc::SYS_sethostname, [0, 0, 0]),
        ("settimeofday", libc::SYS_settimeofday, [0, 0, 0]),
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
        ("fork", libc::SYS_fork, [0, 0, 0]),
        ("vfork by clone", libc::SYS_clone, [17, 0, 0]),
        (
            "clone into namespaces",
            libc::SYS_clone,
            [0x1000_0011, 0, 0],
        ),
        ("clone3", libc::SYS_clone3, [0, 0, 0]),
        ("seccomp", libc::SYS_seccomp, [0, 0, 0]),
        ("outlive the supervisor", libc::SYS_prctl, [1, 0, 0]),
        ("become dumpable", libc::SYS_prctl, [4, 1, 0]),
        ("shmget", libc::SYS_shmget, [0, 4096, 0o1666]),
        ("msgget", libc::SYS_msgget, [0, 0o1666, 0]),
        ("mq_open", libc::SYS_mq_open, [0, 0, 0]),
        ("mknod", libc::SYS_mknod, [0, 0, 0]),
        ("setpriority", libc::SYS_setpriority, [0, 0, -20]),
    ];

    /// Files of the host, of other processes, and of the system.
    const FILES: &[&str] = &[
        "/etc/passwd",
        "/etc/shadow",
        "/root",
        "/home",
        "/var",
        "/run",
        "/srv",
        "/dev/kvm",
        "/dev/mem",
        "/dev/vda",
        "/dev/shm",
        "/old",
        "/sys/kernel",
        "/proc/2/mem",
        "/proc/1/root/etc/passwd",
        "/proc/kcore",
    ];

    pub fn run() {
        // SAFETY: the supervisor put the stream and the log there.
        let (socket, log) = unsafe { (OwnedFd::from_raw_fd(3), OwnedFd::from_raw_fd(4)) };
        let mut log = std::fs::File::from(log);
        let (mut incoming, mut outgoing) = (Incoming::new(true), Outgoing::default());
        let mut send = |message: &Message<'_>, descriptors: Vec<OwnedFd>| {
            outgoing.send(&socket, message, descriptors).unwrap();
        };
        let ready = Message::Ready {
            protocol_hash: PROTOCOL_HASH,
            device: "hostile",
        };
        send(&ready, Vec::new());
        loop {
            channel::wait_readable(&socket).unwrap();
            incoming.fill(&socket).unwrap();
            if let Ok(Some(Message::Assign(_))) = incoming.take() {
                break;
            }
        }
        let window = incoming.descriptor().unwrap();
        let counters = incoming.descriptor().unwrap();
        send(&Message::Assigned, Vec::new());
        if std::env::var("CUDA_MODULE_LOADING").is_ok_and(|value| value == "LEAVE") {
            writeln!(log, "leaving").unwrap();
            // More messages than are read of a worker that has ended, so that some stay in the queue.
            for _ in 0..100 {
                let copies = [log.as_fd(), window.as_fd()].map(|fd| fd.try_clone_to_owned());
                send(&Message::Doorbell, copies.map(Result::unwrap).into());
            }
            std::process::exit(0);
        }

        for &(name, number, [first, second, third]) in CALLS {
            // SAFETY: each is refused before its arguments are looked at; that is what is tested.
            let result = unsafe { libc::syscall(number, first, second, third, 0, 0) };
            if result == 0 && matches!(number, libc::SYS_fork | libc::SYS_clone) {
                // SAFETY: a child that should not exist; its parent tells the test.
                unsafe { libc::_exit(0) };
            }
            // Any other error would come from the arguments: the call itself would have been let through.
            let refusal = if number == libc::SYS_clone3 {
                libc::ENOSYS
            } else {
                libc::EPERM
            };
            let error = std::io::Error::last_os_error().raw_os_error();
            report(&mut log, name, result >= 0 || error != Some(refusal));
        }
        for file in FILES {
            report(
                &mut log,
                &format!("open {file}"),
                std::fs::metadata(file).is_ok(),
            );
        }
        for place in [
            "/x",
            "/usr/x",
            "/dev/x",
            "/worker",
            "/proc/sys/kernel/core_pattern",
        ] {
            let opened = std::fs::File::options()
                .write(true)
                .create(true)
                .truncate(true)
                .open(place);
            report(&mut log, &format!("write {place}"), opened.is_ok());
        }
        for (name, file) in [("window", &window), ("counters", &counters)] {
            for bytes in [0, 1 << 40] {
                // SAFETY: a descriptor of this process.
                let result = unsafe { libc::ftruncate(file.as_raw_fd(), bytes) };
                report(
                    &mut log,
                    &format!("resize the {name} to {bytes}"),
                    result == 0,
                );
            }
        }
        report(&mut log, "see another process", others().is_some());
        report(
            &mut log,
            "hold another descriptor",
            extra_descriptor().is_some(),
        );
        report(&mut log, "dump core", core_limit() > 0);
        report(&mut log, "be root", unsafe_ids());
        report(&mut log, "use a network", interfaces() > 1);
        writeln!(log, "attempts are over").unwrap();
        // It ignores that its stream ends.
        loop {
            std::thread::park();
        }
    }

    fn report(log: &mut std::fs::File, name: &str, succeeded: bool) {
        let error = std::io::Error::last_os_error();
        let outcome = if succeeded {
            format!("SUCCEEDED, or was let through ({error})")
        } else {
            format!("refused ({error})")
        };
        writeln!(log, "attempt: {name}: {outcome}").unwrap();
    }

    /// A process that is not this one.
    fn others() -> Option<String> {
        std::fs::read_dir("/proc")
            .expect("/proc can be read")
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .find(|name| {
                name.parse::<u32>()
                    .is_ok_and(|pid| pid != std::process::id())
            })
    }

    /// A descriptor beyond stdio, stream, log, window, counters and the directory that is being read.
    fn extra_descriptor() -> Option<String> {
        let names: Vec<String> = std::fs::read_dir("/proc/self/fd")
            .expect("/proc can be read")
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        (names.len() > 8).then(|| names.join(" "))
    }

    fn core_limit() -> u64 {
        // SAFETY: a local structure that the kernel fills.
        unsafe {
            let mut limit: libc::rlimit = std::mem::zeroed();
            libc::getrlimit(libc::RLIMIT_CORE, &raw mut limit);
            limit.rlim_max
        }
    }

    fn unsafe_ids() -> bool {
        // SAFETY: they cannot fail.
        unsafe { libc::getuid() == 0 || libc::geteuid() == 0 }
    }

    fn interfaces() -> usize {
        let text = std::fs::read_to_string("/proc/net/dev").expect("/proc can be read");
        text.lines().skip(2).count()
    }
}
