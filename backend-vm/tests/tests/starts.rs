//! A slow start of a worker delays no other tenant or guest.

use std::ffi::OsString;
use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use wormhole_backend_tests::backend::{
    Backend, PATIENCE, Tenant, Workers, children_of, is_stopped, kill, wait_until,
};
use wormhole_backend_tests::guest::{Control, Reply};
use wormhole_backend_tests::stub::{self, Stub};
use wormhole_ring::control::Attach;
use wormhole_sandbox::{Command, Confinement, DeviceKind, Isolation, SpawnError};

fn main() {
    if std::env::args().nth(1).as_deref() == Some(IMPATIENT) {
        return impatient_supervisor();
    }
    stub::main(
        &[
            (
                "a_process_that_makes_threads_starts_workers",
                a_process_that_makes_threads_starts_workers,
            ),
            (
                "a_process_that_does_not_get_to_its_program_is_given_up",
                a_process_that_does_not_get_to_its_program_is_given_up,
            ),
            (
                "a_worker_adds_a_filter_before_it_is_ready",
                a_worker_adds_a_filter_before_it_is_ready,
            ),
            (
                "a_worker_that_is_being_started_holds_nobody_up",
                a_worker_that_is_being_started_holds_nobody_up,
            ),
            (
                "a_guest_that_leaves_before_its_worker_is_there_leaves_none_behind",
                a_guest_that_leaves_before_its_worker_is_there_leaves_none_behind,
            ),
            (
                "a_guest_that_leaves_while_its_worker_takes_the_session_breaks_no_protocol",
                a_guest_that_leaves_while_its_worker_takes_the_session_breaks_no_protocol,
            ),
            (
                "a_tenant_that_wants_many_workers_has_one_starting_and_others_their_turn",
                a_tenant_that_wants_many_workers_has_one_starting_and_others_their_turn,
            ),
            (
                "a_tenant_that_begins_sessions_together_has_as_many_workers_the_next_time",
                a_tenant_that_begins_sessions_together_has_as_many_workers_the_next_time,
            ),
            (
                "workers_that_never_have_a_device_give_up_their_places",
                workers_that_never_have_a_device_give_up_their_places,
            ),
            (
                "a_worker_that_is_never_reaped_keeps_no_other_from_starting",
                a_worker_that_is_never_reaped_keeps_no_other_from_starting,
            ),
            (
                "a_supervisor_ends_without_a_worker_that_is_never_reaped",
                a_supervisor_ends_without_a_worker_that_is_never_reaped,
            ),
            (
                "a_stream_without_a_hello_is_closed",
                a_stream_without_a_hello_is_closed,
            ),
            (
                "a_connection_without_a_window_is_closed",
                a_connection_without_a_window_is_closed,
            ),
        ],
        worker,
    );
}

/// Environment of a guest that needs a worker of its own.
const OWN: &str = "CUDA_MODULE_LOADING=EAGER\n";
/// Environment like [`OWN`], with which the worker never has a device.
const SILENT: &str = "CUDA_MODULE_LOADING=SILENT\n";
/// Number of a copy that never has a device.
const SILENT_COPY: u64 = 9;
/// Argument for the third part of this executable: a supervisor that gives guests little time, and
/// workers as many milliseconds as the next argument says.
const IMPATIENT: &str = "--impatient";
/// Environment variable with the path at which that supervisor listens, if it does.
const LISTENS: &str = "WORMHOLE_TEST_LISTENS";

fn worker(mut stub: Stub) {
    let told = std::env::var("CUDA_MODULE_LOADING").is_ok_and(|value| value == "SILENT");
    if told || stub.protocol == stub::protocol(SILENT_COPY) {
        stub::idle();
    }
    stub.take_session();
    stub::idle();
}

fn impatient_supervisor() {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let workers = std::env::args_os().next_back().unwrap();
    let limit = std::env::args().nth(2).unwrap().parse().unwrap();
    wormhole_supervisor::run(wormhole_supervisor::Options {
        device: "cpu".parse().unwrap(),
        workers: vec![workers.into()],
        listener: std::env::var_os(LISTENS)
            .map(|path| wormhole_supervisor::Listener::bind(Path::new(&path), &[]).unwrap()),
        // SAFETY: the test put the stream at this number, and nothing else here uses it.
        stream: Some(unsafe { OwnedFd::from_raw_fd(3) }),
        trusted_tenants: true,
        without_namespaces: false,
        limits: wormhole_supervisor::Limits::of(Some(1 << 30), None, (1, 1), (8, 512)),
        start_limit: Duration::from_millis(limit),
        hello_limit: Duration::from_secs(2),
        reap_limit: Duration::from_millis(600),
        quotas: wormhole_supervisor::Quotas::default(),
    })
    .unwrap();
}

/// Starts a supervisor with two protocols, and waits for a spare worker of each. Returns it with
/// the folder of its executables.
fn backend() -> (Backend, std::path::PathBuf) {
    let me = std::env::current_exe().unwrap();
    let workers = Workers::of(&[&me, &me]);
    let path = workers.path();
    let mut backend = Backend::start(workers, &[]);
    backend.attach(64, Attach::default()).unwrap();
    wait_until(
        || backend.log().matches("is ready on").count() == 2,
        || "two spare workers".into(),
    );
    (backend, path)
}

/// `F_SETSIG` of fcntl(2).
const F_SETSIG: i32 = 10;

/// A lease on a file: opening the file blocks until the lease is released.
struct Lease {
    file: File,
}

impl Lease {
    /// Replaces the executable by a copy that cannot be executed while the lease lives.
    fn on_copy_of(program: &Path) -> Self {
        let copy = program.with_extension("copy");
        std::fs::copy(program, &copy).unwrap();
        std::fs::rename(&copy, program).unwrap();
        let file = File::open(program).unwrap();
        // SAFETY: an open descriptor and integers. The kernel announces a blocked opener by a
        // signal that by default ends the process; SIGURG is ignored by default.
        unsafe {
            assert_eq!(libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG), 0);
            assert_eq!(
                libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK),
                0,
                "{}",
                std::io::Error::last_os_error()
            );
        }
        Self { file }
    }

    /// Returns whether an opener is blocked.
    fn is_waited_for(&self) -> bool {
        let inode = format!(":{} ", self.file.metadata().unwrap().ino());
        let is_listed = || {
            std::fs::read_to_string("/proc/locks")
                .unwrap()
                .lines()
                .any(|line| line.contains("BREAKING") && line.contains(&inode))
        };
        // The kernel may leave out a lock while the locks of other processes change.
        (0..10).any(|_| is_listed())
    }

    fn give_back(self) {
        // SAFETY: as above.
        let result = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
        assert_eq!(result, 0);
    }
}

fn ask(tenant: &mut Tenant, protocol: u64, environment: &str) -> Control {
    let mut control = tenant.connect();
    control.hello(protocol, environment);
    control
}

fn granted(control: &mut Control) {
    match control.receive() {
        Reply::Grant(_) => {}
        other => panic!("{other:?}"),
    }
}

fn confinement(execution_limit: Duration) -> Confinement {
    Confinement {
        isolation: Isolation::None,
        processes: None,
        kind: DeviceKind::Cpu,
        device_files: Vec::new(),
        memory: 1 << 30,
        threads: 16,
        cgroups: None,
        library_directories: Vec::new(),
        execution_limit,
    }
}

fn null() -> File {
    let mut options = File::options();
    options.read(true).write(true).open("/dev/null").unwrap()
}

fn command<'a>(program: &'a Path, null: &'a File, arguments: &'a [OsString]) -> Command<'a> {
    Command {
        program,
        arguments,
        environment: &[],
        stdin: null.as_fd(),
        output: null.as_fd(),
        descriptors: &[],
        lifeline: false,
    }
}

fn a_process_that_does_not_get_to_its_program_is_given_up() {
    let me = std::env::current_exe().unwrap();
    let workers = Workers::of(&[&me]);
    let program = workers.path().join("wormhole-worker-0");
    let lease = Lease::on_copy_of(&program);
    let arguments = ["--protocol".into()];
    let null = null();
    // Long enough for the start to reach the lease.
    let started = confinement(Duration::from_secs(2)).spawn(&command(&program, &null, &arguments));
    assert!(lease.is_waited_for(), "the kernel gave up the lease");
    assert!(
        matches!(started, Err(SpawnError::Late { .. })),
        "{started:?}"
    );
    let me = std::process::id();
    wait_until(|| children_of(me).is_empty(), || "its end".into());
    lease.give_back();
}

/// The filter denies to execute another program, as the test `sandbox` shows. The built worker has it beside those that any
/// program gets in its place.
fn a_worker_adds_a_filter_before_it_is_ready() {
    let filters = |pid: i32| -> u32 {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let filters = status.split_once("Seccomp_filters:").unwrap().1;
        filters.lines().next().unwrap().trim().parse().unwrap()
    };
    let null = null();
    let arguments = ["600".into()];
    let sleep = command(Path::new("/bin/sleep"), &null, &arguments);
    let other = confinement(PATIENCE).spawn(&sleep).unwrap();
    let given = filters(other.pid());
    other.kill();
    other.wait();
    let mut backend = Backend::start(Workers::built(), &[]);
    backend.attach(64, Attach::default()).unwrap();
    backend.wait_for_log("is ready on");
    let log = backend.log();
    let line = log.lines().find(|line| line.contains("is ready on"));
    let (_, worker) = line.unwrap().split_once("worker ").unwrap();
    let worker = worker.split(' ').next().unwrap().parse().unwrap();
    assert_eq!(filters(worker), given + 1);
}

/// The C library keeps a list of a process's threads, with the state of those being created. A
/// forked child has only a copy of the list, so it would wait for ever for a thread that is being
/// created.
fn a_process_that_makes_threads_starts_workers() {
    const STARTS: u32 = 100;
    let confinement = confinement(PATIENCE);
    let me = std::env::current_exe().unwrap();
    let null = null();
    let arguments = ["--protocol".into()];
    let started = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while started.load(Ordering::Relaxed) < STARTS {
                    std::thread::spawn(|| {}).join().unwrap();
                }
            });
        }
        scope.spawn(|| {
            while started.load(Ordering::Relaxed) < STARTS {
                let child = confinement.spawn(&command(&me, &null, &arguments));
                child.unwrap().wait();
                started.fetch_add(1, Ordering::Relaxed);
            }
        });
        let end = Instant::now() + PATIENCE;
        while started.load(Ordering::Relaxed) < STARTS {
            if Instant::now() > end {
                eprintln!("{started:?} of {STARTS} workers were started, the next waits in vain");
                for child in children_of(std::process::id()) {
                    kill(child, libc::SIGKILL);
                }
                std::process::exit(1);
            }
            std::thread::yield_now();
        }
    });
}

fn a_worker_that_is_being_started_holds_nobody_up() {
    let (mut backend, workers) = backend();
    let lease = Lease::on_copy_of(&workers.join("wormhole-worker-1"));
    let mut held = ask(&mut backend, stub::protocol(1), OWN);
    wait_until(|| lease.is_waited_for(), || "the start of a worker".into());
    let mut served = ask(&mut backend, stub::protocol(0), "");
    granted(&mut served);
    assert!(lease.is_waited_for(), "the kernel gave up the lease");
    lease.give_back();
    granted(&mut held);
}

fn a_guest_that_leaves_before_its_worker_is_there_leaves_none_behind() {
    let (mut backend, workers) = backend();
    let before = backend.workers();
    let lease = Lease::on_copy_of(&workers.join("wormhole-worker-1"));
    let held = ask(&mut backend, stub::protocol(1), OWN);
    wait_until(|| lease.is_waited_for(), || "the start of a worker".into());
    drop(held);
    assert_eq!(backend.report().end, "the guest process ended");
    assert!(lease.is_waited_for(), "the kernel gave up the lease");
    lease.give_back();
    wait_until(|| backend.workers() == before, || "the worker's end".into());
    let mut served = ask(&mut backend, stub::protocol(1), OWN);
    granted(&mut served);
}

/// The worker's message that it has the session crosses the end of its guest.
fn a_guest_that_leaves_while_its_worker_takes_the_session_breaks_no_protocol() {
    let (mut backend, _) = backend();
    let workers = backend.workers();
    for worker in &workers {
        kill(*worker, libc::SIGSTOP);
        wait_until(|| is_stopped(*worker), || "a worker's stop".into());
    }
    let leaves = ask(&mut backend, stub::protocol(0), "");
    // An answer to a later guest: by now the worker has the session.
    let mut stranger = ask(&mut backend, stub::protocol(SILENT_COPY), "");
    assert!(matches!(stranger.receive(), Reply::Refused(..)));
    let supervisor = i32::try_from(backend.child.id()).unwrap();
    kill(supervisor, libc::SIGSTOP);
    wait_until(|| is_stopped(supervisor), || "its stop".into());
    // The supervisor will read the guest's end first. Without the shutdown there would be none before the process that
    // closes the supervisor's copy of the guest's stream has done so.
    leaves.socket.shutdown(Shutdown::Both).unwrap();
    drop(leaves);
    let before: Vec<u64> = workers.iter().map(|worker| sleeps(*worker)).collect();
    for (worker, before) in workers.iter().zip(before) {
        kill(*worker, libc::SIGCONT);
        wait_until(
            || sleeps(*worker) > before,
            || "a worker that has said its word".into(),
        );
    }
    kill(supervisor, libc::SIGCONT);
    assert_eq!(backend.report().end, "the guest process ended");
    let log = backend.log();
    assert!(!log.contains("broke the protocol"), "{log}");
}

/// Returns how often a process has gone to sleep.
fn sleeps(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = |line: &str| {
        line.strip_prefix("voluntary_ctxt_switches:")?
            .trim()
            .parse()
            .ok()
    };
    status.lines().find_map(line).unwrap()
}

fn a_tenant_that_wants_many_workers_has_one_starting_and_others_their_turn() {
    let me = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let listen = ["--listen", socket.to_str().unwrap()];
    let mut backend = Backend::start(Workers::of(&[&me]), &listen);
    backend.attach(256, Attach::default()).unwrap();
    let mut neighbour = Tenant::join(&socket);
    neighbour.attach(64, Attach::default()).unwrap();
    // One for each of the two tenants.
    let spares = 2;
    wait_until(|| backend.workers().len() == spares, || "the spares".into());

    let protocol = stub::protocol(0);
    let greedy: Vec<Control> = (0..10)
        .map(|_| ask(&mut backend, protocol, SILENT))
        .collect();
    wait_until(
        || backend.workers().len() > spares,
        || "the first of ten workers".into(),
    );
    let mut served = ask(&mut neighbour, protocol, OWN);
    granted(&mut served);
    assert_eq!(backend.workers().len(), spares + 2);

    let sessions = greedy.len();
    drop(greedy);
    for _ in 0..sessions {
        assert_eq!(backend.report().end, "the guest process ended");
    }
    wait_until(
        || backend.workers().len() == spares + 1,
        || "the end of workers that nobody wants".into(),
    );
}

fn a_tenant_that_begins_sessions_together_has_as_many_workers_the_next_time() {
    const TOGETHER: usize = 4;
    let me = std::env::current_exe().unwrap();
    let mut backend = Backend::start(Workers::of(&[&me]), &[]);
    backend.attach(64, Attach::default()).unwrap();
    wait_until(|| backend.workers().len() == 1, || "the spare".into());
    for _ in 0..2 {
        let mut sessions: Vec<Control> = (0..TOGETHER)
            .map(|_| ask(&mut backend, stub::protocol(0), ""))
            .collect();
        sessions.iter_mut().for_each(granted);
        wait_until(
            || backend.workers().len() == 2 * TOGETHER,
            || "a spare for each session".into(),
        );
        drop(sessions);
        for _ in 0..TOGETHER {
            assert_eq!(backend.report().end, "the guest process ended");
        }
        wait_until(
            || backend.workers().len() == TOGETHER,
            || "the end of the sessions' workers".into(),
        );
    }
}

/// Starts a supervisor that gives workers and guests little time, with workers that never have a
/// device.
fn impatient_backend() -> Backend {
    let me = std::env::current_exe().unwrap();
    impatient(200, Workers::numbered(&[(SILENT_COPY, &me)]))
}

/// Starts a supervisor that gives workers `limit` milliseconds, and guests little time.
fn impatient(limit: u32, workers: Workers) -> Backend {
    let mut supervisor = std::process::Command::new(std::env::current_exe().unwrap());
    supervisor.args([IMPATIENT, &limit.to_string()]);
    Backend::start_as(supervisor, workers, &[])
}

/// A tracer: while it lives, it is notified of the process's exit, and the process's parent cannot
/// reap it. It stands for a process that the kernel holds.
struct Hold {
    release: Option<std::sync::mpsc::Sender<()>>,
    tracer: Option<std::thread::JoinHandle<()>>,
}

impl Hold {
    fn on(process: i32) -> Self {
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (seized, is_seized) = std::sync::mpsc::channel();
        let tracer = std::thread::spawn(move || {
            // SAFETY: a request without addresses.
            let result = unsafe { libc::ptrace(libc::PTRACE_SEIZE, process, 0, 0) };
            let result = (result == 0)
                .then_some(())
                .ok_or_else(std::io::Error::last_os_error);
            seized.send(result).unwrap();
            // The hold ends with the thread.
            let _ = released.recv();
        });
        is_seized.recv().unwrap().unwrap();
        Self {
            release: Some(release),
            tracer: Some(tracer),
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        drop(self.release.take());
        let _ = self.tracer.take().map(std::thread::JoinHandle::join);
    }
}

/// Waits for a worker that is not in `before`.
fn one_more_than(backend: &Backend, before: &[i32]) -> i32 {
    let more = || {
        backend
            .workers()
            .into_iter()
            .find(|pid| !before.contains(pid))
    };
    wait_until(|| more().is_some(), || "one more worker".into());
    more().unwrap()
}

fn a_worker_that_is_never_reaped_keeps_no_other_from_starting() {
    let me = std::env::current_exe().unwrap();
    let mut backend = impatient(4000, Workers::of(&[&me]));
    backend.attach(64, Attach::default()).unwrap();
    let spares = backend.workers();
    let mut late = ask(&mut backend, stub::protocol(0), SILENT);
    let pid = one_more_than(&backend, &spares);
    let hold = Hold::on(pid);
    // A tenant has one worker starting at a time.
    let mut next = ask(&mut backend, stub::protocol(0), OWN);
    granted(&mut next);
    backend.wait_for_log(&format!(
        "worker {pid} was killed and has not ended within 600ms: others start without it"
    ));
    // Its own session waits for its end, which comes.
    drop(hold);
    assert!(matches!(late.receive(), Reply::Refused(..)));
}

fn a_supervisor_ends_without_a_worker_that_is_never_reaped() {
    let me = std::env::current_exe().unwrap();
    let mut backend = impatient(60_000, Workers::of(&[&me]));
    backend.attach(64, Attach::default()).unwrap();
    let spares = backend.workers();
    let mut served = ask(&mut backend, stub::protocol(0), OWN);
    granted(&mut served);
    let pid = one_more_than(&backend, &spares);
    let _hold = Hold::on(pid);
    backend.signal(libc::SIGTERM);
    assert!(backend.wait_for_end().success());
    backend.wait_for_log("and are left: ");
    let log = backend.log();
    for line in [
        "although 1 sessions were not closed within 600ms; these workers were killed and have not ended: ",
        "these workers were killed and have not ended within 200ms, and are left: ",
    ] {
        let said = log.lines().find_map(|said| Some(said.split_once(line)?.1));
        let pids = said.unwrap_or_else(|| panic!("{log}"));
        assert!(pids.contains(&pid.to_string()), "{pids}");
    }
}

fn a_stream_without_a_hello_is_closed() {
    let mut backend = impatient_backend();
    let mut silent = backend.connect();
    let mut waits = ask(&mut backend, stub::protocol(SILENT_COPY), "");
    assert_eq!(silent.receive(), Reply::Ended);
    // The answer to the other comes later.
    assert!(matches!(waits.receive(), Reply::Refused(..)));
}

fn a_connection_without_a_window_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("tenants");
    let mut supervisor = std::process::Command::new(std::env::current_exe().unwrap());
    supervisor.args([IMPATIENT, "200"]).env(LISTENS, &socket);
    let me = std::env::current_exe().unwrap();
    let _backend = Backend::start_as(supervisor, Workers::of(&[&me]), &[]);
    let mut silent = Tenant::join(&socket);
    assert!(!silent.hears("Attached"));
}

fn workers_that_never_have_a_device_give_up_their_places() {
    let mut backend = impatient_backend();
    let late = |reason: &str| assert!(reason.contains("had no device after 200ms"), "{reason}");
    // Attaching starts a spare worker.
    late(&backend.attach(64, Attach::default()).unwrap_err());
    // Each starts after the one before has timed out, because they have one tenant.
    let mut waiting: Vec<Control> = (0..4)
        .map(|_| ask(&mut backend, stub::protocol(SILENT_COPY), OWN))
        .collect();
    for control in &mut waiting {
        match control.receive() {
            Reply::Refused(_, reason) => late(&reason),
            other => panic!("{other:?}"),
        }
    }
    wait_until(|| backend.workers().is_empty(), || "their ends".into());
}
