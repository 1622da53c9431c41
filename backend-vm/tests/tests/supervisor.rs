//! Guarantees of the supervisor against processes that die, lie or ask for too much.

use std::fs::{File, Permissions};
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use wormhole_api::{DevicePtr, Handle, MemCopy, MemGetInfo, PROTOCOL_HASH};
use wormhole_backend_tests::backend::{
    Backend, PATIENCE, Tenant, Workers, is_running, kill, limit_descriptors, open_to_all,
    wait_until,
};
use wormhole_backend_tests::guest::{Control, Guest, Reply};
use wormhole_backend_tests::random::Random;
use wormhole_link::channel::Outgoing;
use wormhole_ring::bootstrap;
use wormhole_ring::control::{
    ArenaRequest, ArenaRun, ArenaWithin, Attach, Grant, HEADER_BYTES, MAX_FRAME, Message, Observe,
    Refusal,
};
use wormhole_ring::fence::FenceIndex;
use wormhole_ring::waits::Wait;

fn attach(session_limit: u32, segment_limit: u32) -> Attach {
    Attach {
        session_limit,
        segment_limit,
        ..Attach::default()
    }
}

/// Checks a neighbour's work, byte for byte.
fn works(guest: &mut Guest) {
    let bytes: Vec<u8> = (0..10_000u32).map(|at| (at * 31 % 253) as u8).collect();
    guest.round_trip(&bytes);
}

#[test]
fn a_killed_worker_becomes_an_error_and_leaves_nothing() {
    let mut backend = Backend::with_window(64);
    let mut neighbour = backend.connect().open();
    let guest = backend.connect().open();
    guest.arena[0].write(0, &vec![1; 2 << 20]);
    let memory = guest.memory();
    assert!(memory.held() >= 2 << 20);
    // The worker that got its session last serves this guest; the spare has no session.
    let victim = worker_in_order(&backend, 1);
    assert!(backend.workers().contains(&victim));
    kill(victim, libc::SIGKILL);
    let cause = guest.wait_for_status();
    assert_eq!((cause.result, cause.cause), (709, 2));
    works(&mut neighbour);
    drop(guest);
    let report = backend.report();
    assert_eq!(report.worker, victim);
    assert_eq!(report.end, format!("worker {victim} was ended by signal 9"));
    memory.wait_until_scrubbed();
    assert!(!is_running(victim));
}

#[test]
fn the_supervisor_maps_no_file_that_a_tenant_or_worker_can_punch() {
    let mut alone = Backend::with_window(64);
    maps_no_file_of_others(&mut alone);
    let folder = tempfile::tempdir().unwrap();
    let (mut listening, _) = listening_backend(&folder, 4096, 4096);
    maps_no_file_of_others(&mut listening);
    assert!(!listening.tenant_processes().is_empty());
}

fn maps_no_file_of_others(backend: &mut Backend) {
    let maps_its_own_alone = |backend: &Backend| {
        let shared = |pid: i32| {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
            let is_shared = |line: &&str| line.split(' ').nth(1).unwrap().ends_with('s');
            let shared = maps.lines().filter(is_shared).map(str::to_owned);
            shared.collect::<Vec<String>>()
        };
        let supervisor = backend.child.id().cast_signed();
        let processes = [vec![supervisor], backend.tenant_processes()].concat();
        let all: Vec<String> = processes.into_iter().flat_map(shared).collect();
        // The process that serves the tenant, which may be the supervisor, has one.
        assert!(
            matches!(&all[..], [one] if one.contains("/memfd:wormhole-neighbours")),
            "{all:#?}"
        );
    };
    maps_its_own_alone(backend);
    let mut guest = backend.connect().open();
    works(&mut guest);
    assert!(matches!(guest.request_arena(1, 4), Reply::ArenaGrant(_)));
    maps_its_own_alone(backend);
    backend.signal(libc::SIGUSR1);
    backend.wait_for_log("bytes of its ring are not taken");
    kill(worker_in_order(backend, 0), libc::SIGKILL);
    assert_eq!(guest.wait_for_status().result, 709);
    maps_its_own_alone(backend);
}

#[test]
fn a_dump_says_who_waits_for_whom() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    works(&mut guest);
    let dumped = |text: &str| {
        backend.signal(libc::SIGUSR1);
        backend.log().lines().any(|line| line.contains(text))
    };
    wait_until(|| dumped("executor sleeps"), || "its sleep".into());
    wait_until(|| dumped(" s before"), || "a second look".into());
    assert!(dumped(
        "; 0 bytes of its ring are not taken, and the doorbell is awaited"
    ));
    // The worker logs the state of its device's queues, at the level of the dump.
    let queues = format!(
        "WARN worker {}: WARN dump: 0 streams have work; ",
        worker_in_order(&backend, 0)
    );
    wait_until(|| dumped(&queues), || queues.clone());
    // The guest notes the fence that it waits for.
    let note = guest
        .waits
        .note(77, Wait::Fence(FenceIndex::new(3).unwrap(), 9));
    wait_until(
        || dumped("; guest thread 77 waits for fence 3 to become 9: "),
        || "the guest's wait".into(),
    );
    drop(note);
    // A worker that does not take the records in its ring is named.
    let worker = worker_in_order(&backend, 0);
    kill(worker, libc::SIGSTOP);
    guest.record(&MemCopy {
        destination: DevicePtr(guest.arena[0].address),
        source: DevicePtr(guest.arena[0].address),
        bytes: 1,
        stream: Handle::LEGACY,
    });
    let text = format!("with worker {worker} is granted; 64 bytes of its ring are not taken");
    wait_until(|| dumped(&text), || text.clone());
    kill(worker, libc::SIGCONT);
}

#[test]
fn a_dump_that_is_asked_of_all_processes_of_the_name_ends_none() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    works(&mut guest);
    kill(backend.spawner().unwrap(), libc::SIGUSR1);
    // Another worker can be started.
    works(&mut backend.connect().open());
    works(&mut guest);
}

#[test]
fn a_request_for_arena_is_answered_though_the_worker_dies_of_it() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let victim = worker_in_order(&backend, 0);
    kill(victim, libc::SIGSTOP);
    let request = |id, segments| Message::ArenaRequest(ArenaRequest { id, segments });
    guest.control.send(&request(7, 1)).unwrap();
    // Once this one is denied, the request before it has been sent to the worker.
    let denied = |id, refusal: Refusal| Reply::ArenaDenied(id, refusal as u32);
    assert_eq!(guest.request_arena(8, 1000), denied(8, Refusal::Quota));
    kill(victim, libc::SIGKILL);
    assert_eq!(guest.control.receive(), denied(7, Refusal::NoDevice));
    let cause = guest.wait_for_status();
    assert_eq!((cause.result, cause.cause), (709, 2));
    assert_eq!(guest.request_arena(9, 1), denied(9, Refusal::NoDevice));
}

#[test]
fn arena_is_granted_in_the_part_of_the_window_that_a_guest_names_or_denied() {
    const SEGMENTS: u64 = 64;
    let mut backend = Backend::with_window(SEGMENTS);
    let mut guest = backend.connect().open();
    let full = |id| Reply::ArenaDenied(id, Refusal::WindowFull as u32);
    let quota = |id| Reply::ArenaDenied(id, Refusal::Quota as u32);
    let run = |id, first, count| Reply::ArenaGrant(ArenaRun { id, first, count });
    for (id, segments, first, end, answer) in [
        (1, 2, 20, 30, run(1, 20, 2)),
        (2, 2, 20, 30, run(2, 22, 2)),
        (3, 7, 20, 30, full(3)),
        (4, 6, 20, 30, run(4, 24, 6)),
        (5, 1, 20, 30, full(5)),
        // A part that is no part of the window.
        (6, 1, 30, 20, full(6)),
        (7, 1, u32::MAX - 1, u32::MAX, full(7)),
        (8, 1, 64, u32::MAX, full(8)),
        (9, 2, 63, u32::MAX, full(9)),
        (10, 1, 63, u32::MAX, run(10, 63, 1)),
        (11, u32::MAX, 0, u32::MAX, quota(11)),
        (12, u32::MAX, 1, u32::MAX, quota(12)),
    ] {
        let within = ArenaWithin {
            id,
            segments,
            first,
            end,
        };
        guest.control.send(&Message::ArenaWithin(within)).unwrap();
        let found = guest.control.receive();
        assert_eq!(found, answer);
        if let Reply::ArenaGrant(run) = found {
            guest.map_arena(run);
        }
    }
    // Segments in the part are granted to any request, once it is given back.
    let returned = ArenaRun {
        id: 0,
        first: 24,
        count: 6,
    };
    guest.control.send(&Message::ArenaReturn(returned)).unwrap();
    works(&mut guest);
    guest.more_arena();
    works(&mut guest);
}

/// Returns the worker that the supervisor started after `others` others. Its log lines may come a
/// little later.
fn worker_in_order(backend: &Backend, others: usize) -> i32 {
    let started = || {
        let log = backend.log();
        let mut workers = log.lines().filter_map(|line| {
            line.split_once("worker ")?
                .1
                .strip_suffix(&format!(" starts on cpu for protocol {PROTOCOL_HASH:016x}"))?
                .parse()
                .ok()
        });
        workers.nth(others)
    };
    wait_until(|| started().is_some(), || "the worker's start".into());
    started().unwrap()
}

#[test]
fn a_killed_guest_process_frees_its_session_and_no_other() {
    let mut backend = Backend::with_window(64);
    let mut neighbour = backend.connect().open();
    let guest = backend.connect().open();
    guest.arena[0].write(0, &vec![1; 2 << 20]);
    let memory = guest.memory();
    assert!(memory.held() >= 2 << 20);
    // The stream belongs to a process now, as a guest's does.
    let stream: OwnedFd = guest.control.socket.try_clone().unwrap().into();
    let mut process = Command::new("sleep")
        .arg("1000")
        .stdin(Stdio::from(stream))
        .spawn()
        .unwrap();
    drop(guest);
    works(&mut neighbour);
    assert!(backend.ready_report().is_none(), "the process lives");
    process.kill().unwrap();
    process.wait().unwrap();
    let report = backend.report();
    assert_eq!(report.end, "the guest process ended");
    memory.wait_until_scrubbed();
    wait_until(|| !is_running(report.worker), || "the worker's end".into());
    works(&mut neighbour);
}

#[test]
fn guests_that_break_the_protocol_in_a_loop_do_not_fill_the_log() {
    let mut backend = Backend::with_window(64);
    for _ in 0..500 {
        let mut control = backend.connect();
        // Invalid without a session.
        control.send(&Message::Mapped).unwrap();
        assert_eq!(control.receive(), Reply::Ended);
    }
    backend.wait_for_log("causes too many lines");
    let log = backend.log();
    let told = log.matches("broke the protocol").count();
    assert!((60..200).contains(&told), "{told} lines");
    works(&mut backend.connect().open());
}

#[test]
fn a_log_that_is_not_read_holds_nobody_up() {
    let supervisor = Command::new(env!("CARGO_BIN_EXE_supervisor"));
    let (mut backend, log) = Backend::start_unheard(supervisor, Workers::built(), &[]);
    // SAFETY: an open descriptor and an integer.
    let size = unsafe { libc::fcntl(log.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
    assert_eq!(size, 4096);
    backend.attach(64, Attach::default()).unwrap();
    // At this log level each connection logs more than twenty bytes.
    for _ in 0..300 {
        drop(backend.connect());
    }
    // A tenant may have few streams without a hello. Its process reads the ends of these later than requests for more.
    let mut control = backend.connect();
    wait_until(
        || {
            let is_open = control.send(&HELLO).is_ok();
            if !is_open {
                control = backend.connect();
            }
            is_open
        },
        || "a stream that is not refused".into(),
    );
    works(&mut control.map().0);
    let mut lines = BufReader::new(log).lines();
    let end = Instant::now() + PATIENCE;
    // Each line that is read makes room for later ones.
    while !lines.next().unwrap().unwrap().ends_with("lines are lost") {
        assert!(Instant::now() < end, "no line says so");
        drop(backend.connect());
    }
}

const HELLO: Message<'_> = Message::Hello {
    bootstrap_version: bootstrap::VERSION,
    protocol_hash: PROTOCOL_HASH,
    features: 0,
    environment: "",
};

/// Starts a supervisor that also listens, with limits on its descriptors.
fn listening_backend(folder: &tempfile::TempDir, soft: u64, hard: u64) -> (Backend, PathBuf) {
    let socket = folder.path().join("socket");
    let mut command = Command::new(env!("CARGO_BIN_EXE_supervisor"));
    // SAFETY: prlimit is safe between fork and exec.
    unsafe {
        command.pre_exec(move || limit_descriptors(0, soft, hard));
    }
    let listen = ["--listen", socket.to_str().unwrap()];
    let mut backend = Backend::start_as(command, Workers::built(), &listen);
    backend.attach(256, Attach::default()).unwrap();
    (backend, socket)
}

#[test]
fn a_tenant_with_streams_and_sessions_without_end_leaves_descriptors_to_others() {
    let folder = tempfile::tempdir().unwrap();
    let (mut backend, socket) = listening_backend(&folder, 64, 1600);
    let silent: Vec<Control> = (0..500).map(|_| backend.connect()).collect();
    let said: Vec<Control> = (0..40)
        .map(|_| {
            let mut control = backend.connect();
            // The supervisor may have closed the stream.
            let _ = control.send(&HELLO);
            control
        })
        .collect();
    let mut neighbour = Tenant::join(&socket);
    neighbour.attach(64, Attach::default()).unwrap();
    works(&mut neighbour.connect().open());
    backend.wait_for_log("no control stream: the tenant has too many");
    let log = backend.log();
    assert!(!log.contains("Too many open files"), "{log}");
    drop((silent, said));
    // The supervisor may reuse the descriptors that it has closed.
    let end = Instant::now() + PATIENCE;
    loop {
        let mut control = backend.connect();
        let _ = control.send(&HELLO);
        if matches!(control.receive(), Reply::Grant(_)) {
            break;
        }
        assert!(
            Instant::now() < end,
            "the first tenant gets no session any more"
        );
    }
}

#[test]
fn a_session_takes_no_descriptors_that_others_need() {
    let folder = tempfile::tempdir().unwrap();
    let (mut backend, socket) = listening_backend(&folder, 1600, 1600);
    let mut sessions = Vec::new();
    let reason = loop {
        let mut control = backend.connect();
        control.hello(PROTOCOL_HASH, "");
        match control.receive() {
            Reply::Grant(_) => sessions.push(control),
            Reply::Refused(code, reason) => {
                assert_eq!(code, Refusal::Quota as u32, "{reason}");
                break reason;
            }
            other => panic!("{other:?}"),
        }
    };
    assert!(reason.contains("no descriptors are left"), "{reason}");
    let mut neighbour = Tenant::join(&socket);
    neighbour.attach(64, Attach::default()).unwrap();
    works(&mut neighbour.connect().open());
}

#[test]
fn a_tenant_that_cannot_be_accepted_is_logged_once_and_accepted_later() {
    let folder = tempfile::tempdir().unwrap();
    let (mut backend, socket) = listening_backend(&folder, 4096, 4096);
    let mut guest = backend.connect().open();
    let pid = backend.child.id();
    // The spare that follows needs descriptors, too.
    wait_until(
        || backend.log().matches("is ready on").count() == 2,
        || "the spare worker".into(),
    );
    limit_descriptors(pid, 3, 4096).unwrap();
    let mut waiting = Tenant::join(&socket);
    backend.wait_for_log("tenants are kept waiting");
    for _ in 0..100 {
        guest.control.send(&Message::Doorbell).unwrap();
        works(&mut guest);
    }
    limit_descriptors(pid, 4096, 4096).unwrap();
    guest.control.send(&Message::Doorbell).unwrap();
    waiting.attach(64, Attach::default()).unwrap();
    assert_eq!(backend.log().matches("are kept waiting").count(), 1);
    assert_eq!(backend.log().matches("Too many open files").count(), 1);
}

#[test]
fn connections_without_end_hold_up_no_tenant() {
    let folder = tempfile::tempdir().unwrap();
    let (mut backend, socket) = listening_backend(&folder, 4096, 4096);
    let mut guest = backend.connect().open();
    let (over, connected) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        // Most are refused, because the user has too many tenants.
        for _ in 0..3 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    UnixStream::connect(&socket).unwrap();
                    connected.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let reached = |count| connected.load(Ordering::Relaxed) >= count;
        let served = std::panic::catch_unwind(AssertUnwindSafe(|| {
            for round in 1..=10 {
                wait_until(|| reached(round * 500), || "connections".into());
                guest.control.send(&Message::Doorbell).unwrap();
                let reply = guest.request_arena(1, 1);
                let Reply::ArenaGrant(run) = reply else {
                    panic!("{reply:?}");
                };
                guest.control.send(&Message::ArenaReturn(run)).unwrap();
            }
        }));
        over.store(true, Ordering::Relaxed);
        served.unwrap();
    });
    works(&mut guest);
}

/// Returns how many of these messages a sender can write to a stream that is never read, including
/// those it queues.
fn unread(message: &Message<'_>) -> usize {
    let (near, _far) = UnixStream::pair().unwrap();
    let mut outgoing = Outgoing::default();
    let sent = (0..).take_while(|_| outgoing.send(&near, message, Vec::new()).is_ok());
    sent.count()
}

#[test]
fn a_launcher_that_cannot_be_sent_the_segments_its_guest_has_lost_is_cut_off() {
    let mut backend = Backend::with_window(64);
    let mut open = || {
        let mut guest = backend.connect_remote();
        guest.hello(PROTOCOL_HASH, "");
        backend.show_run();
        backend.show_run();
        assert!(matches!(guest.receive(), Reply::Grant(_)));
        guest
    };
    // The second session's segments lie between runs of the first one.
    let (mut guest, neighbour) = (open(), open());
    for id in 1..4 {
        let request = ArenaRequest { id, segments: 1 };
        guest.send(&Message::ArenaRequest(request)).unwrap();
        backend.show_run();
        assert!(matches!(guest.receive(), Reply::ArenaGrant(_)));
    }
    let mut observer = backend.connect();
    // The tenant attaches again and again, and reads no answer.
    let answer = Message::Refused {
        code: Refusal::Protocol as u32,
        reason: "the window is attached already",
    };
    for _ in 0..unread(&answer) {
        // Without a descriptor of its own, each message would take that of a later one.
        let file = File::open("/dev/null").unwrap().into();
        backend.send(&Message::Attach(Attach::default()), vec![file]);
    }
    // These are handled in turns, beside the observer's messages.
    backend.wait_until_read();
    for _ in 0..MAX_FRAME / HEADER_BYTES {
        let observe = Observe {
            bootstrap_version: bootstrap::VERSION,
            device: 0,
        };
        observer.send(&Message::Observe(observe)).unwrap();
        assert!(matches!(observer.receive(), Reply::Observation(..)));
    }
    drop(guest);
    backend.wait_for_log("session 0.1 ended");
    assert!(!backend.hears("no message"), "its stream has not ended");
    drop((neighbour, observer));
    assert!(backend.wait_for_end().success());
    // The tenant has caused many lines before, so that even this one may be left out.
    let lines = backend.log().matches("cannot be taken from it").count();
    assert!(lines <= 1, "{lines} lines");
}

/// A request, and the end of a session, may cost the event loop time for each run.
#[test]
fn a_session_has_a_limited_number_of_runs_of_arena() {
    let mut backend = Backend::start(Workers::built(), &["--window-limit", "16G"]);
    backend.attach(5000, attach(0, 0)).unwrap();
    let mut guest = backend.connect().open();
    let runs = (1..5000).take_while(|id| match guest.request_arena(*id, 1) {
        Reply::ArenaGrant(_) => true,
        reply => {
            assert_eq!(reply, Reply::ArenaDenied(*id, Refusal::Quota as u32));
            false
        }
    });
    // The session started with one.
    assert_eq!(runs.count(), 4095);
    backend.wait_for_log("a session has at most 4096 runs of arena");
}

#[test]
fn workers_do_not_outlive_a_killed_supervisor() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let workers = backend.workers();
    assert!(!workers.is_empty());
    backend.signal(libc::SIGKILL);
    backend.wait_for_end();
    wait_until(
        || workers.iter().all(|worker| !is_running(*worker)),
        || "the workers' end".into(),
    );
    assert_eq!(guest.control.receive(), Reply::Ended);
}

#[test]
fn without_its_spawner_the_supervisor_ends_and_says_why() {
    let mut backend = Backend::with_window(64);
    let guest = backend.connect().open();
    let workers = backend.workers();
    kill(backend.spawner().unwrap(), libc::SIGKILL);
    let cause = guest.wait_for_status();
    assert_eq!((cause.result, cause.cause), (709, 2));
    assert_eq!(backend.wait_for_end().code(), Some(2));
    wait_until(
        || workers.iter().all(|worker| !is_running(*worker)),
        || "the workers' end".into(),
    );
    backend.wait_for_log("the process that starts workers has ended");
}

/// Every process that reads a guest's messages has no privileges. The test checks most where it
/// runs as root.
#[test]
fn the_supervisor_serves_guests_without_privileges_and_under_a_filter() {
    let folder = tempfile::tempdir().unwrap();
    let (mut backend, _) = listening_backend(&folder, 4096, 4096);
    let mut guest = backend.connect().open();
    works(&mut guest);
    wait_until(
        || backend.tenant_processes().len() == 2,
        || "the tenant's process, and one for the next tenant".into(),
    );
    let statuses = || -> Vec<String> {
        let own = backend.scrubbers().into_iter();
        let processes = own
            .chain(backend.tenant_processes())
            .map(i32::cast_unsigned)
            .chain([backend.child.id()]);
        let tasks =
            processes.flat_map(|pid| std::fs::read_dir(format!("/proc/{pid}/task")).unwrap());
        let status = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("status"));
        tasks.flatten().map(|task| status(task).unwrap()).collect()
    };
    // The process for the next tenant has just begun.
    wait_until(
        || statuses().iter().all(|status| is_confined(status)),
        || statuses().concat(),
    );
    assert!(
        statuses().len() >= 4,
        "the supervisor, two processes for tenants and a scrubber"
    );
}

/// Returns whether a thread's status (proc(5)) has no capability, no way to new privileges, and a filter.
fn is_confined(status: &str) -> bool {
    let is = |name: &str, value: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.is_some_and(|found| found.trim() == value)
    };
    ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"]
        .iter()
        .all(|set| is(set, "0000000000000000"))
        && is("NoNewPrivs:", "1")
        && is("Seccomp:", "2")
}

#[test]
fn a_supervisor_does_not_listen_in_place_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, "kept").unwrap();
    let listen = ["--listen", path.to_str().unwrap()];
    let mut backend = Backend::start(Workers::built(), &listen);
    assert_eq!(backend.wait_for_end().code(), Some(2));
    backend.wait_for_log("is there already and is not a socket");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "kept");
}

#[test]
fn the_socket_is_removed_in_the_end_and_another_file_in_its_place_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let (backend, socket) = listening_backend(&folder, 4096, 4096);
    assert!(socket.exists());
    backend.signal(libc::SIGTERM);
    let mut backend = backend;
    assert!(backend.wait_for_end().success());
    assert!(!socket.exists());

    let (mut backend, socket) = listening_backend(&folder, 4096, 4096);
    std::fs::remove_file(&socket).unwrap();
    std::fs::write(&socket, "another's").unwrap();
    backend.signal(libc::SIGTERM);
    assert!(backend.wait_for_end().success());
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "another's");
}

#[test]
fn who_serves_several_tenants_without_cgroups_is_told_to_say_so() {
    let has_cgroups = std::fs::read_to_string("/proc/self/cgroup")
        .is_ok_and(|text| text.lines().any(|line| line.starts_with("0::")));
    if has_cgroups {
        println!("skipped: this system has cgroups of version 2, which may be delegated");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let workers = Workers::built();
    let mut command = Command::new(env!("CARGO_BIN_EXE_supervisor"));
    command.args(["--listen", socket.to_str().unwrap(), "--workers"]);
    let refused = command.arg(workers.path()).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("--trusted-tenants"), "{said}");
    assert!(!socket.exists());
    // With `--trusted-tenants` it serves, and warns about the missing limits.
    let listen = ["--listen", socket.to_str().unwrap()];
    let mut backend = Backend::start(workers, &listen);
    backend.attach(64, Attach::default()).unwrap();
    backend.wait_for_log("WARN");
    backend.wait_for_log("a tenant's memory and processors are not limited");
    // A supervisor of a single tenant does not need `--trusted-tenants`.
    let mut alone = Backend::start(Workers::built(), &[]);
    alone.attach(64, Attach::default()).unwrap();
}

#[test]
fn workers_are_killed_before_others_where_memory_is_short() {
    let mut backend = Backend::with_window(64);
    let _guest = backend.connect().open();
    let score = |process: i32| -> i32 {
        let path = format!("/proc/{process}/oom_score_adj");
        std::fs::read_to_string(path)
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    };
    // The guest's worker and the spare. Both have executed their program, which a starting worker
    // has not.
    for worker in [0, 1].map(|others| worker_in_order(&backend, others)) {
        assert_eq!(score(worker), 500);
    }
    let own: i32 = score(std::process::id().try_into().unwrap());
    let supervisor = score(backend.child.id().try_into().unwrap());
    let spawner = score(backend.spawner().unwrap());
    // The score is lower only if the system lets root lower it.
    let lowered = std::fs::write("/proc/self/oom_score_adj", (own - 1).to_string());
    let expected = if lowered.is_ok() { -900 } else { own };
    assert_eq!([supervisor, spawner], [expected; 2]);
}

#[test]
fn another_users_tenant_is_refused_unless_it_is_named() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can be another user");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let open = Permissions::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).unwrap();
    let socket = folder.path().join("socket");
    let arguments = [
        "--listen",
        socket.to_str().unwrap(),
        "--tenant-user",
        "1234",
    ];
    let mut backend = Backend::start(Workers::built(), &arguments);
    backend.attach(64, Attach::default()).unwrap();
    open_to_all(&socket);
    let reason = Tenant::join_as(4321, &socket).attached().unwrap_err();
    assert!(reason.contains("user 4321 may not attach"), "{reason}");
    Tenant::join_as(1234, &socket)
        .attach(64, Attach::default())
        .unwrap();
}

#[test]
fn a_supervisor_that_is_asked_to_stop_ends_every_session_in_order() {
    let mut backend = Backend::with_window(64);
    let mut guest = backend.connect().open();
    let workers = backend.workers();
    backend.signal(libc::SIGTERM);
    let cause = guest.wait_for_status();
    assert_eq!((cause.result, cause.cause), (802, 5));
    assert_eq!(guest.control.receive(), Reply::Ended);
    let report = backend.report();
    assert!(report.end.contains("terminated"), "{}", report.end);
    assert!(backend.wait_for_end().success());
    assert!(workers.iter().all(|worker| !is_running(*worker)));
}

#[test]
fn the_supervisor_ends_with_its_tenant() {
    let mut backend = Backend::with_window(64);
    let _guest = backend.connect().open();
    let spawner = backend.spawner().unwrap();
    let workers = backend.workers();
    assert!(!workers.is_empty());
    assert!(backend.finish().success());
    assert!(workers.iter().all(|worker| !is_running(*worker)));
    assert!(!is_running(spawner));
}

#[test]
fn an_unknown_protocol_is_refused_naming_both() {
    let mut backend = Backend::with_window(64);
    let mut control = backend.connect();
    control.hello(0x0123_4567_89ab_cdef, "");
    let Reply::Refused(code, reason) = control.receive() else {
        panic!("not refused");
    };
    assert_eq!(code, Refusal::Version as u32);
    assert!(reason.contains("0123456789abcdef"), "{reason}");
    assert!(
        reason.contains(&format!("{PROTOCOL_HASH:016x}")),
        "{reason}"
    );
    assert_eq!(control.receive(), Reply::Ended);

    let mut control = backend.connect();
    control
        .send(&Message::Hello {
            bootstrap_version: 77,
            protocol_hash: PROTOCOL_HASH,
            features: 0,
            environment: "",
        })
        .unwrap();
    let Reply::Refused(code, reason) = control.receive() else {
        panic!("not refused");
    };
    assert_eq!(code, Refusal::Version as u32);
    assert!(reason.contains("version 77") && reason.contains("version 1"));
}

#[test]
fn a_limit_of_file_sizes_is_named_and_ends_nobody() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_supervisor"));
    let limit = libc::rlimit {
        rlim_cur: 4096,
        rlim_max: 4096,
    };
    // SAFETY: one system call, with a local structure.
    unsafe {
        command.pre_exec(
            move || match libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            },
        );
    }
    let mut backend = Backend::start_as(command, Workers::built(), &[]);
    // The CPU device's memory is a file.
    let reason = backend.attach(64, Attach::default()).unwrap_err();
    assert!(reason.contains("RLIMIT_FSIZE"), "{reason}");
    assert!(backend.is_alive());
    assert!(backend.finish().success());
}

#[test]
fn the_operators_quotas_hold_whatever_a_launcher_asks_for() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let listen = ["--listen", socket.to_str().unwrap()];
    let quotas = ["--tenants-per-user", "2", "--sessions", "1"];
    let window = ["--window-limit", "128M"];
    let arguments = [&listen[..], &quotas, &window].concat();
    let mut backend = Backend::start(Workers::built(), &arguments);
    // The window may be larger than the limit, which bounds the use of it.
    backend.attach(4096, attach(0, 0)).unwrap();
    let mut guest = backend.connect().open();
    let full = Reply::ArenaDenied(1, Refusal::Quota as u32);
    assert_eq!(guest.request_arena(1, 63), full);
    backend
        .wait_for_log("may use 128 MiB of its window, and wormhole backend start --window-limit");
    let Reply::ArenaGrant(run) = guest.request_arena(2, 62) else {
        panic!("62 are free beside the two of the session");
    };
    guest.map_arena(run);
    let mut second = backend.connect();
    second.hello(PROTOCOL_HASH, "");
    let Reply::Refused(code, reason) = second.receive() else {
        panic!("not refused");
    };
    assert_eq!(code, Refusal::Quota as u32, "{reason}");
    assert!(reason.contains("--sessions"), "{reason}");
    let mut neighbour = Tenant::join(&socket);
    neighbour.attach(64, attach(0, 0)).unwrap();
    let refused = Tenant::join(&socket).attached().unwrap_err();
    assert!(refused.contains("--tenants-per-user"), "{refused}");
    works(&mut guest);
    works(&mut neighbour.connect().open());
}

#[test]
fn quotas_are_kept() {
    let mut backend = Backend::start(Workers::built(), &[]);
    backend.attach(64, attach(2, 12)).unwrap();
    let mut first = backend.connect().open();
    let second = backend.connect().open();
    assert_eq!(first.grant.arena_count, 1);
    assert_eq!(second.grant.arena_count, 1);
    let Reply::ArenaGrant(run) = first.request_arena(5, 8) else {
        panic!("8 of 12 segments are free");
    };
    first.map_arena(run);
    let mut third = backend.connect();
    third.hello(PROTOCOL_HASH, "");
    let Reply::Refused(code, reason) = third.receive() else {
        panic!("not refused");
    };
    assert_eq!(code, Refusal::Quota as u32, "{reason}");
    assert!(reason.contains("limit is 2"), "{reason}");
    let quota = Refusal::Quota as u32;
    assert_eq!(first.request_arena(1, 1), Reply::ArenaDenied(1, quota));
    assert_eq!(
        first.request_arena(2, u32::MAX),
        Reply::ArenaDenied(2, quota)
    );
    let protocol = Refusal::Protocol as u32;
    assert_eq!(first.request_arena(3, 0), Reply::ArenaDenied(3, protocol));
    drop(second);
    backend.report();
    let Reply::ArenaGrant(run) = first.request_arena(4, 2) else {
        panic!("the freed segments are not granted");
    };
    assert_eq!((run.id, run.count), (4, 2));
    works(&mut first);
}

#[test]
fn sessions_start_small_and_a_full_window_is_named_with_its_flag() {
    const SEGMENTS: u64 = 17;
    let mut backend = Backend::with_window(SEGMENTS);
    // One segment is the bootstrap's. Sessions have two each, and one once half of the rest is
    // used.
    let mut guests: Vec<Guest> = (0..4).map(|_| backend.connect().open()).collect();
    assert!(guests.iter().all(|guest| guest.grant.arena_count == 1));
    guests.extend((0..3).map(|_| backend.connect().open()));
    let arenas = guests.iter().map(|guest| guest.grant.arena_count);
    assert_eq!(arenas.sum::<u32>(), 4);
    // Five segments are free, and three of them are reserved for the sessions without arena.
    let full = Refusal::WindowFull as u32;
    assert_eq!(guests[0].request_arena(1, 3), Reply::ArenaDenied(1, full));
    let Reply::ArenaGrant(_) = guests[0].request_arena(2, 2) else {
        panic!("two are free");
    };
    assert_eq!(guests[1].request_arena(1, 1), Reply::ArenaDenied(1, full));
    backend.wait_for_log("the window of 34 MiB is full, and wormhole run --window makes it larger");
    for guest in &mut guests[4..] {
        let Reply::ArenaGrant(run) = guest.request_arena(1, 1) else {
            panic!("one was kept for each");
        };
        guest.map_arena(run);
    }
    let mut control = backend.connect();
    control.hello(PROTOCOL_HASH, "");
    let Reply::Refused(code, reason) = control.receive() else {
        panic!("the window is full");
    };
    assert_eq!(code, full);
    assert!(
        reason.contains("window of 34 MiB") && reason.contains("--window"),
        "{reason}"
    );
    works(&mut guests[6]);
}

#[test]
fn hostile_bytes_end_their_own_stream_with_one_line() {
    use std::io::Write;
    let mut backend = Backend::with_window(64);
    let mut neighbour = backend.connect().open();
    let random = Random::new(1);
    for round in 0..200 {
        let mut control = backend.connect();
        let mut bytes: Vec<u8> = (0..64 + random.below(2000))
            .map(|_| random.byte())
            .collect();
        // Half of them begin like a message, so that the decoders of bodies are reached too.
        if round % 2 == 0 {
            let honest = Message::ArenaRequest(ArenaRequest { id: 1, segments: 1 });
            let frame = honest.to_vec().unwrap();
            bytes[..frame.len()].copy_from_slice(&frame);
            bytes[4] = random.byte() % 64;
        }
        // The supervisor may have closed the stream before all of it is written.
        let _ = control.socket.write_all(&bytes);
        loop {
            match control.receive() {
                Reply::Ended => break,
                Reply::Refused(..) => {}
                other => panic!("round {round}: {other:?}"),
            }
        }
    }
    assert!(backend.is_alive());
    works(&mut neighbour);
    let lines = backend
        .log()
        .lines()
        .filter(|line| line.contains("broke the protocol"))
        .count();
    assert!(lines <= 200, "{lines} lines for 200 streams");
}

#[test]
fn messages_out_of_turn_end_the_session() {
    let mut backend = Backend::with_window(64);
    let mut neighbour = backend.connect().open();
    let run = ArenaRun {
        id: 0,
        first: 0,
        count: 1,
    };
    for message in [
        Message::Doorbell,
        Message::Mapped,
        Message::ArenaReturn(run),
        Message::Grant(Grant::default()),
        Message::Assigned,
    ] {
        let mut control = backend.connect();
        control.send(&message).unwrap();
        assert_eq!(control.receive(), Reply::Ended, "{message:?} before hello");
    }
    let returns: [fn(&Grant) -> ArenaRun; 3] = [
        // The bootstrap's segment, the session's own, and more than an extent.
        |_| ArenaRun {
            id: 0,
            first: 0,
            count: 1,
        },
        |grant| ArenaRun {
            id: 0,
            first: grant.session_segment,
            count: 1,
        },
        |grant| ArenaRun {
            id: 0,
            first: grant.arena_first,
            count: 2,
        },
    ];
    for run in returns {
        let mut guest = backend.connect().open();
        let run = run(&guest.grant);
        guest.control.send(&Message::ArenaReturn(run)).unwrap();
        assert_eq!(guest.control.receive(), Reply::Ended);
        let end = backend.report().end;
        assert!(end.contains("returned"), "{end}");
    }
    let mut guest = backend.connect().open();
    guest.control.hello(PROTOCOL_HASH, "");
    assert_eq!(guest.control.receive(), Reply::Ended);
    let end = backend.report().end;
    assert!(end.contains("hello message twice"), "{end}");
    works(&mut neighbour);
}

#[test]
fn a_guest_with_an_environment_of_its_own_gets_a_worker_of_its_own() {
    let mut backend = Backend::with_window(64);
    let spare = backend.workers();
    let mut control: Control = backend.connect();
    control.hello(PROTOCOL_HASH, "CUDA_MODULE_LOADING=EAGER\nLD_PRELOAD=x\n");
    let Reply::Grant(_) = control.receive() else {
        panic!("not granted");
    };
    let added: Vec<i32> = backend
        .workers()
        .into_iter()
        .filter(|worker| !spare.contains(worker))
        .collect();
    assert_eq!(added.len(), 1, "the spare worker is kept for another guest");
    let environment = std::fs::read_to_string(format!("/proc/{}/environ", added[0])).unwrap();
    assert!(environment.contains("CUDA_MODULE_LOADING=EAGER"));
    assert!(!environment.contains("LD_PRELOAD"));
}

#[test]
fn a_window_that_cannot_serve_is_refused_with_a_sentence() {
    let mut backend = Backend::start(Workers::built(), &[]);
    let refused = backend.attach(1, Attach::default()).unwrap_err();
    assert!(refused.contains("too small"), "{refused}");
    let file = tempfile::tempfile().unwrap();
    file.set_len(64 << 20).unwrap();
    let message = Message::Attach(Attach {
        window_size: 64 << 20,
        ..Attach::default()
    });
    backend.send(&message, vec![file.into()]);
    assert!(backend.attached().unwrap_err().contains("seal"));
    backend.send(&message, Vec::new());
    assert!(backend.attached().unwrap_err().contains("descriptor"));
    backend.attach(64, Attach::default()).unwrap();
}

#[test]
fn a_device_that_cannot_be_used_is_refused_before_any_session() {
    let mut backend = Backend::start(Workers::built(), &["--device", "cuda:4000"]);
    let refused = backend.attach(64, Attach::default()).unwrap_err();
    assert!(refused.contains("cuda:4000"), "{refused}");
}

#[test]
fn a_guest_that_comes_before_its_window_is_refused() {
    let mut backend = Backend::start(Workers::built(), &[]);
    let mut control = backend.connect();
    control.hello(PROTOCOL_HASH, "");
    let Reply::Refused(_, reason) = control.receive() else {
        panic!("not refused");
    };
    assert!(reason.contains("window"), "{reason}");
}

#[test]
fn numbers_and_segments_are_used_again_with_another_generation() {
    let mut backend = Backend::with_window(16);
    let mut generations = Vec::new();
    for _ in 0..5 {
        let mut guest = backend.connect().open();
        assert_eq!(guest.grant.session, 0);
        assert_eq!(guest.status.generation(), guest.grant.generation);
        assert_eq!(guest.arena[0].read(0, 4096), [0; 4096], "scrubbed");
        guest.arena[0].write(0, &[0xAA; 4096]);
        assert_eq!(guest.call(&MemGetInfo {}).status, 0);
        generations.push(guest.grant.generation);
        drop(guest);
        backend.report();
    }
    assert_eq!(generations, [1, 2, 3, 4, 5]);
}

/// Returns the message and the exit status of an executable started by hand.
fn by_hand(program: &str, arguments: &[&str]) -> (String, Option<i32>) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.stdout.is_empty());
    (
        String::from_utf8(output.stderr).unwrap(),
        output.status.code(),
    )
}

#[test]
fn mistakes_in_the_arguments_are_reported_in_one_line() {
    for (program, arguments) in [
        (env!("CARGO_BIN_EXE_supervisor"), &["--device", "gpu"][..]),
        (env!("CARGO_BIN_EXE_supervisor"), &["--fd", "3"]),
        (
            env!("CARGO_BIN_EXE_supervisor"),
            &["--listen", "/nowhere/socket", "--workers", "/"],
        ),
        (env!("CARGO_BIN_EXE_worker"), &["--device", "gpu"]),
        (env!("CARGO_BIN_EXE_worker"), &["--nonsense"]),
        (env!("CARGO_BIN_EXE_worker"), &[]),
    ] {
        let (said, status) = by_hand(program, arguments);
        assert_eq!(said.lines().count(), 1, "{said}");
        assert_eq!(status, Some(2), "{said}");
    }
    let (said, _) = by_hand(env!("CARGO_BIN_EXE_worker"), &[]);
    assert!(
        said.contains("only wormhole-supervisor starts this program"),
        "{said}"
    );
}

#[test]
fn a_limit_of_open_files_that_is_too_low_is_named() {
    for files in [8, 12, 24, 48, 100] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_supervisor"));
        // SAFETY: prlimit is safe between fork and exec.
        unsafe {
            command.pre_exec(move || limit_descriptors(0, files, files));
        }
        let mut backend = Backend::start_as(command, Workers::built(), &[]);
        assert_eq!(backend.wait_for_end().code(), Some(2));
        backend.wait_for_log("RLIMIT_NOFILE");
        let log = backend.log();
        assert_eq!(log.lines().count(), 1, "{log}");
        assert!(!log.contains("sandbox"), "{log}");
    }
}

#[test]
fn a_limit_of_address_space_is_named() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_supervisor"));
    let limit = libc::rlimit {
        rlim_cur: 8 << 30,
        rlim_max: 8 << 30,
    };
    // SAFETY: setrlimit is safe between fork and exec.
    unsafe {
        command.pre_exec(
            move || match libc::setrlimit(libc::RLIMIT_AS, &raw const limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            },
        );
    }
    let mut backend = Backend::start_as(command, Workers::built(), &[]);
    let reason = backend.attach(64, Attach::default()).unwrap_err();
    assert!(reason.contains("RLIMIT_AS"), "{reason}");
}

#[test]
fn tenants_of_a_gpu_need_root_unless_they_trust_each_other() {
    let folder = tempfile::tempdir().unwrap();
    if std::fs::metadata(folder.path()).unwrap().uid() != 0 {
        eprintln!("skipped: only root can become another user");
        return;
    }
    // Other users may not be able to reach the built file.
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
    let program = folder.path().join("wormhole-supervisor");
    std::fs::copy(env!("CARGO_BIN_EXE_supervisor"), &program).unwrap();
    let said = |more: &[&str]| {
        let output = Command::new(&program)
            .args(["--device", "cuda:0", "--workers", "/nowhere", "--listen"])
            .arg(folder.path().join("socket"))
            .args(more)
            .uid(65534)
            .gid(65534)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let refused = said(&[]);
    assert!(refused.contains("--trusted-tenants"), "{refused}");
    let trusted = said(&["--trusted-tenants"]);
    assert!(!trusted.contains("--trusted-tenants"), "{trusted}");
}

/// In a user namespace of root's its workers would be root outside.
#[test]
fn root_that_can_make_no_namespaces_starts_no_workers() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root has rights to give up");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::built();
    let said = |more: &[&str]| {
        let output = Command::new("setpriv")
            .arg("--bounding-set=-sys_admin")
            .arg(env!("CARGO_BIN_EXE_supervisor"))
            .arg("--workers")
            .arg(workers.path())
            .arg("--listen")
            .arg(folder.path().join("socket"))
            .args(more)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let refused = said(&["--trusted-tenants"]);
    assert!(refused.contains("workers cannot be confined"), "{refused}");
    assert!(!refused.contains("user namespace"), "{refused}");
    // A filter alone keeps no strangers apart.
    let refused = said(&["--sandbox", "filter"]);
    assert!(refused.contains("tenants who are strangers"), "{refused}");
}
