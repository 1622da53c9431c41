//! A hostile worker executable reaches nothing but its own session.
//!
//! This executable plays three parts: started by a supervisor it is the worker, makes every attack,
//! and writes each outcome to its log; started by hand it is the test that reads that log; and
//! started by the test it is the control, which makes the same attacks unconfined. An attack that
//! fails there as well proves nothing about the confinement.

mod attacks;
mod calls;
mod rants;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixListener;

use attacks::{Attack, Control as Unconfined, Profile, Targets, WORKER_MEMORY};
use wormhole_api::{CuResult, PROTOCOL_HASH};
use wormhole_backend_tests::backend::{Backend, Tenant, Workers, is_running, wait_until};
use wormhole_backend_tests::guest::{Control, Guest, Reply};
use wormhole_backend_tests::stub::{self, Given, Stub};
use wormhole_link::memory::Mapping;
use wormhole_link::neighbours::Neighbours;
use wormhole_ring::control::{Attach, Message};
use wormhole_ring::layout::SEGMENT_BYTES;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some(CONTROL) => control(&Targets::parse(&arguments[2]).unwrap()),
        _ => stub::main(
            &[
                (
                    "the_control_reaches_what_workers_do_not",
                    the_control_reaches_what_workers_do_not,
                ),
                (
                    "a_hostile_worker_on_the_cpu_reaches_nothing_but_its_session",
                    a_hostile_worker_on_the_cpu_reaches_nothing_but_its_session,
                ),
                (
                    "a_hostile_worker_with_the_drivers_profile_reaches_nothing_but_its_session",
                    a_hostile_worker_with_the_drivers_profile_reaches_nothing_but_its_session,
                ),
                (
                    "a_hostile_worker_does_not_outlive_its_supervisor",
                    a_hostile_worker_does_not_outlive_its_supervisor,
                ),
                (
                    "a_worker_knows_while_its_tenant_has_neighbours",
                    a_worker_knows_while_its_tenant_has_neighbours,
                ),
                (
                    "workers_on_a_gpu_share_process_numbers_if_their_tenants_trust_each_other",
                    workers_on_a_gpu_share_process_numbers_if_their_tenants_trust_each_other,
                ),
                (
                    "what_a_dead_worker_wrote_beside_its_runs_is_given_back_at_once",
                    what_a_dead_worker_wrote_beside_its_runs_is_given_back_at_once,
                ),
                (
                    "a_worker_makes_the_system_calls_that_the_document_lists",
                    a_worker_makes_the_system_calls_that_the_document_lists,
                ),
                (
                    "the_document_names_attacks_that_are_made",
                    the_document_names_attacks_that_are_made,
                ),
                (
                    "whatever_a_worker_sends_ends_its_own_session_alone",
                    whatever_a_worker_sends_ends_its_own_session_alone,
                ),
                (
                    "workers_of_one_tenant_have_one_budget_of_log",
                    workers_of_one_tenant_have_one_budget_of_log,
                ),
                (
                    "a_worker_that_leaves_its_descriptors_behind_holds_nobody_up",
                    a_worker_that_leaves_its_descriptors_behind_holds_nobody_up,
                ),
            ],
            worker,
        ),
    }
}

/// Argument of the control.
const CONTROL: &str = "--control";

/// Environment of a guest whose worker exits with its descriptors in the supervisor's queue.
const LEAVE: &str = "CUDA_MODULE_LOADING=LEAVE\n";
/// Environment of a guest whose worker reports when it gets neighbours, and when it has none any
/// more.
const WATCH: &str = "CUDA_MODULE_LOADING=WATCH\n";
/// Words of that worker before the number of the file in which it reads that.
const FILE: &str = "it reads in file ";
/// Environment of a guest whose worker says its process number.
const NUMBER: &str = "CUDA_MODULE_LOADING=NUMBER\n";
/// Environment of a guest whose worker uses most of its tenant's log budget.
const WRITE: &str = "CUDA_MODULE_LOADING=WRITE\n";
/// Environment of a guest whose worker fills its session's file and exits.
const SPILL: &str = "CUDA_MODULE_LOADING=SPILL\n";
const PAGE: usize = 4096;
/// Name of a listening supervisor's socket, in its folder.
const SOCKET: &str = "socket";
/// Environment of a guest whose worker tries every system call.
const CALL: &str = "CUDA_MODULE_LOADING=CALL\n";
/// Status that a guest reads after its worker is lost.
const WORKER_LOST: u32 = CuResult::CONTEXT_IS_DESTROYED.0;
/// Prefix of the number of an invalid message that a worker is going to send.
const RANT: &str = "RANT";
/// Lines of a KiB each that a worker writes on [`WRITE`].
const LINES: usize = 200;
/// Environment variable that a guest may set for its worker; here it contains the targets.
const TARGETS: &str = "CUDA_CACHE_MAXSIZE";

/// A supervisor of hostile workers, and the targets of their attacks.
struct Scene {
    backend: Backend,
    targets: Targets,
    _sibling: Control,
    _abstract_socket: UnixListener,
}

impl Scene {
    fn new(device: &str) -> Self {
        let mut targets = Targets {
            supervisor: 0,
            sibling: 0,
            test: std::process::id().try_into().unwrap(),
            files: [None; 3],
        };
        let abstract_socket = UnixListener::bind_addr(&targets.abstract_socket()).unwrap();
        std::fs::create_dir_all(targets.folder()).unwrap();
        let listener = targets.listener();
        let memory = WORKER_MEMORY.to_string();
        let arguments = [
            ["--device", device],
            ["--listen", listener.to_str().unwrap()],
            ["--worker-memory", &memory],
        ];
        let me = std::env::current_exe().unwrap();
        let mut backend = Backend::start(Workers::of(&[&me]), arguments.as_flattened());
        backend.attach(256, Attach::default()).unwrap();
        let sibling = assign(&mut backend, NUMBER);
        targets.sibling = worker_that_said(&backend, "its number is ");
        targets.supervisor = backend.child.id().try_into().unwrap();
        Self {
            backend,
            targets,
            _sibling: sibling,
            _abstract_socket: abstract_socket,
        }
    }

    /// Opens a session whose worker attacks. Returns when the attacks are over.
    fn attack(&mut self) -> Control {
        let environment = format!("{TARGETS}={}\n", self.targets.text());
        let control = assign(&mut self.backend, &environment);
        self.backend.wait_for_log("attempts are over");
        control
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // The killed supervisor leaves its socket behind, and the control its program.
        let _ = std::fs::remove_dir_all(self.targets.folder());
        let _ = std::fs::remove_file(self.targets.program());
    }
}

fn assign(backend: &mut Backend, environment: &str) -> Control {
    let mut control = backend.connect();
    control.hello(PROTOCOL_HASH, environment);
    match control.receive() {
        Reply::Grant(_) => control,
        other => panic!("{other:?}"),
    }
}

/// Returns the process number of the worker that has said this. A list of the spawner's children may have processes in it
/// that are about to end, or are no workers.
fn worker_that_said(backend: &Backend, text: &str) -> i32 {
    backend.wait_for_log(text);
    let log = backend.log();
    let line = log.lines().find(|line| line.contains(text));
    let (_, worker) = line.unwrap().split_once("worker ").unwrap();
    worker.split_once(':').unwrap().0.parse().unwrap()
}

fn the_control_reaches_what_workers_do_not() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: the control run of calls that only root may make needs root");
        return;
    }
    let scene = Scene::new("cpu");
    let control = std::process::Command::new(std::env::current_exe().unwrap())
        .args([CONTROL, &scene.targets.text()])
        .output()
        .unwrap();
    print!("{}", String::from_utf8_lossy(&control.stdout));
    let said = String::from_utf8_lossy(&control.stderr);
    assert!(control.status.success(), "{said}");
    assert!(is_running(scene.targets.supervisor) && is_running(scene.targets.sibling));
}

/// Plays the control: makes the attacks unconfined, and fails if one of them does.
fn control(targets: &Targets) {
    let mut harmless = Vec::new();
    for (attack, outcome) in attacks::control(targets) {
        let error = std::io::Error::from_raw_os_error(outcome);
        let reaches = match attack.control {
            Unconfined::Succeeds => outcome == 0,
            Unconfined::GoesOn => !attack.is_refusal(outcome),
        };
        if attack.is_absence(outcome) {
            println!("not on this system: {} ({error})", attack.name);
        } else if !reaches {
            harmless.push(format!("{} ({error})", attack.name));
        }
    }
    assert!(harmless.is_empty(), "refused to anybody: {harmless:#?}");
}

fn a_hostile_worker_on_the_cpu_reaches_nothing_but_its_session() {
    reaches_nothing("cpu", Profile::Cpu);
}

fn a_hostile_worker_with_the_drivers_profile_reaches_nothing_but_its_session() {
    reaches_nothing("cuda:0", Profile::Cuda);
}

fn reaches_nothing(device: &str, profile: Profile) {
    let mut scene = Scene::new(device);
    let _control = scene.attack();
    let log = scene.backend.log();
    let outcomes: BTreeMap<&str, i32> = log
        .lines()
        .filter_map(|line| line.split_once("attempt: ")?.1.rsplit_once(": "))
        .map(|(name, outcome)| (name, outcome.parse().unwrap()))
        .collect();
    let wrong: Vec<String> = attacks::all()
        .iter()
        .filter_map(|attack| Some((attack, attack.refusal(profile)?)))
        .filter(|(attack, refusal)| outcomes.get(attack.name.as_str()) != Some(refusal))
        .map(|(attack, refusal)| {
            let outcome = outcomes.get(attack.name.as_str());
            format!("{}: {outcome:?}, not {refusal}", attack.name)
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(scene.backend.is_alive());
    assert!(is_running(scene.targets.sibling));

    let worker = worker_that_said(&scene.backend, "attempts are over");
    let file = |name| std::fs::read_to_string(format!("/proc/{worker}/{name}")).unwrap();
    assert_eq!(file("oom_score_adj").trim(), "500");
    let status = file("status");
    for line in ["NoNewPrivs:\t1", "CapPrm:\t0000000000000000"] {
        assert!(
            status.lines().any(|found| found == line),
            "{line}: {status}"
        );
    }
}

fn a_hostile_worker_does_not_outlive_its_supervisor() {
    let mut scene = Scene::new("cpu");
    let _control = scene.attack();
    let workers = [
        scene.targets.sibling,
        worker_that_said(&scene.backend, "attempts are over"),
    ];
    assert!(workers.iter().all(|worker| is_running(*worker)));
    scene.backend.signal(libc::SIGKILL);
    scene.backend.wait_for_end();
    wait_until(
        || workers.iter().all(|worker| !is_running(*worker)),
        || "the workers' end".into(),
    );
}

fn a_worker_that_leaves_its_descriptors_behind_holds_nobody_up() {
    let me = std::env::current_exe().unwrap();
    let mut backend = Backend::start(Workers::of(&[&me]), &[]);
    backend.attach(64, Attach::default()).unwrap();
    let control = assign(&mut backend, LEAVE);
    backend.wait_for_log("leaving");
    backend.wait_for_log("session 0.1: worker");
    drop(control);
    backend.report();
    let _control = assign(&mut backend, "");
    assert!(backend.is_alive());
}

/// Starts a supervisor that other tenants may join, with its first tenant. Returns it with the
/// folder of its socket.
fn listening(device: &str) -> (Backend, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join(SOCKET);
    let me = std::env::current_exe().unwrap();
    let listen = ["--listen", socket.to_str().unwrap(), "--device", device];
    let mut backend = Backend::start(Workers::of(&[&me]), &listen);
    backend.attach(64, Attach::default()).unwrap();
    (backend, folder)
}

fn a_worker_knows_while_its_tenant_has_neighbours() {
    let (mut backend, folder) = listening("cpu");
    let socket = folder.path().join(SOCKET);
    let _first = assign(&mut backend, WATCH);
    backend.wait_for_log("neighbours: false");
    // A tenant without a window does not count as neighbour.
    let mut neighbour = Tenant::join(&socket);
    neighbour.attach(64, Attach::default()).unwrap();
    backend.wait_for_log("neighbours: true");
    let mut control = neighbour.connect();
    control.hello(PROTOCOL_HASH, WATCH);
    assert!(matches!(control.receive(), Reply::Grant(_)));
    let said = |line| backend.log().matches(line).count();
    let waits = |line, count| {
        wait_until(
            || said(line) == count,
            || format!("{line} {count} times: {}", backend.log()),
        );
    };
    waits("neighbours: true", 2);
    let log = backend.log();
    let files = log.lines().filter_map(|line| line.split_once(FILE));
    let files: BTreeSet<&str> = files.map(|(_, number)| number).collect();
    assert_eq!(files.len(), 2, "workers of two tenants share one");
    drop((control, neighbour));
    waits("neighbours: false", 2);
    assert_eq!(said("neighbours: true"), 2);
}

fn workers_on_a_gpu_share_process_numbers_if_their_tenants_trust_each_other() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root makes the namespace that workers share");
        return;
    }
    assert_eq!(numbers_of_workers("cpu"), ["1", "1"]);
    let [first, second] = numbers_of_workers("cuda:0");
    assert!(
        first != "1" && second != "1" && first != second,
        "{first}, {second}"
    );
}

/// Returns the numbers that the workers of two tenants have in their PID namespaces.
fn numbers_of_workers(device: &str) -> [String; 2] {
    let (mut backend, folder) = listening(device);
    let _first = assign(&mut backend, NUMBER);
    let mut neighbour = Tenant::join(&folder.path().join(SOCKET));
    neighbour.attach(64, Attach::default()).unwrap();
    let mut control = neighbour.connect();
    control.hello(PROTOCOL_HASH, NUMBER);
    assert!(matches!(control.receive(), Reply::Grant(_)));
    let numbers = || -> Vec<String> {
        let log = backend.log();
        let said = log.split("its number is ").skip(1);
        let said = said.filter_map(|rest| rest.split_once('\n'));
        said.map(|(number, _)| number.to_owned()).collect()
    };
    wait_until(|| numbers().len() == 2, || backend.log());
    numbers().try_into().unwrap()
}

fn workers_of_one_tenant_have_one_budget_of_log() {
    let (mut backend, folder) = listening("cpu");
    let socket = folder.path().join(SOCKET);
    let _first = assign(&mut backend, WRITE);
    backend.wait_for_log("it has written");
    let _second = assign(&mut backend, WRITE);
    backend.wait_for_log("write too much");
    // The budget gains a line each second meanwhile.
    let written = backend.log().matches(&"x".repeat(1000)).count();
    assert!((LINES..2 * LINES - 40).contains(&written), "{written}");
    // Another tenant's lines are logged all the same.
    let mut neighbour = Tenant::join(&socket);
    neighbour.attach(64, Attach::default()).unwrap();
    let mut control = neighbour.connect();
    control.hello(PROTOCOL_HASH, WATCH);
    backend.wait_for_log("neighbours: true");
}

fn what_a_dead_worker_wrote_beside_its_runs_is_given_back_at_once() {
    let me = std::env::current_exe().unwrap();
    let mut backend = Backend::start(Workers::of(&[&me]), &[]);
    backend.attach(64, Attach::default()).unwrap();
    let mut control = backend.connect();
    control.hello(PROTOCOL_HASH, SPILL);
    let Reply::Grant(grant) = control.receive() else {
        panic!("not granted");
    };
    let file = File::from(control.descriptor().unwrap());
    let runs = u64::from(1 + grant.arena_count) * SEGMENT_BYTES as u64;
    backend.wait_for_log("session 0.1: worker");
    let held = || file.metadata().unwrap().blocks() * 512;
    // The guest still exists, and so does the memory that it may still read.
    wait_until(|| held() <= runs, || format!("{} bytes", held()));
    let mut byte = [0];
    let arena = u64::from(grant.arena_first) * SEGMENT_BYTES as u64;
    file.read_exact_at(&mut byte, arena).unwrap();
    assert_eq!(byte, [1], "the guest's own memory");
    drop(control);
    backend.report();
}

fn a_worker_makes_the_system_calls_that_the_document_lists() {
    for (device, profile) in [("cpu", Profile::Cpu), ("cuda:0", Profile::Cuda)] {
        let mut scene = Scene::new(device);
        let _control = assign(&mut scene.backend, CALL);
        scene.backend.wait_for_log("calls are over");
        let log = scene.backend.log();
        let made: BTreeSet<String> = log
            .lines()
            .filter_map(|line| Some(line.split_once("let through: ")?.1.to_owned()))
            .collect();
        assert_eq!(made, calls::documented(profile), "{device}");
    }
}

fn the_document_names_attacks_that_are_made() {
    let attacks = attacks::all();
    let named = calls::named_attacks();
    assert!(named.len() > 50, "{named:?}");
    for (name, profiles) in named {
        let found = attacks.iter().find(|attack| attack.name == name);
        let found = found.unwrap_or_else(|| panic!("no attack is called {name:?}"));
        for profile in profiles {
            assert!(found.refusal(*profile).is_some(), "{name}: {profile:?}");
        }
    }
}

fn whatever_a_worker_sends_ends_its_own_session_alone() {
    let mut scene = Scene::new("cpu");
    let mut neighbour = Tenant::join(&scene.targets.listener());
    neighbour.attach(64, Attach::default()).unwrap();
    let mut served = neighbour.connect();
    served.hello(PROTOCOL_HASH, "");
    assert!(matches!(served.receive(), Reply::Grant(_)));
    for number in 0..rants::COUNT {
        let mut control = scene.backend.connect();
        control.hello(
            PROTOCOL_HASH,
            &format!("CUDA_MODULE_LOADING={RANT}{number}\n"),
        );
        let Reply::Grant(grant) = control.receive() else {
            panic!("{number}: not granted");
        };
        let file = control.descriptor().unwrap();
        let guest = Guest::new(control, grant, file);
        // The worker's end alone: the stream is still open.
        assert_eq!(guest.wait_for_status().result, WORKER_LOST, "{number}");
        drop(guest);
        scene.backend.report();
        // A neighbour's guest is served as before.
        let mut another = neighbour.connect();
        another.hello(PROTOCOL_HASH, "");
        assert!(matches!(another.receive(), Reply::Grant(_)), "{number}");
    }
    assert!(scene.backend.is_alive());
    assert!(is_running(scene.targets.sibling));
}

/// Plays the worker.
fn worker(mut stub: Stub) {
    let Given {
        window,
        counters,
        neighbours,
    } = stub.take_session();
    match std::env::var("CUDA_MODULE_LOADING").as_deref() {
        Ok("LEAVE") => leave(stub, &window),
        Ok("WATCH") => watch(stub, &neighbours),
        Ok("NUMBER") => {
            stub.say(&format!("its number is {}", std::process::id()));
            stub::idle();
        }
        Ok("CALL") => {
            for call in calls::let_through() {
                stub.say(&format!("let through: {call}"));
            }
            stub.say("calls are over");
            stub::idle();
        }
        Ok(rant) if rant.starts_with(RANT) => {
            let number = rant[RANT.len()..].parse().unwrap();
            rants::send(number, stub);
        }
        Ok("SPILL") => {
            let file = File::from(window);
            let bytes = usize::try_from(rustix::fs::fstat(&file).unwrap().st_size).unwrap();
            let mapping = Mapping::new(&file, 0, bytes).unwrap();
            // After the header, which the supervisor writes to.
            for at in (PAGE..bytes).step_by(PAGE) {
                // SAFETY: inside the mapping of the whole file.
                unsafe { mapping.base().add(at).write_volatile(1) };
            }
            std::process::exit(1);
        }
        Ok("WRITE") => {
            for _ in 0..LINES {
                stub.say(&"x".repeat(1000));
            }
            stub.say("it has written");
            stub::idle();
        }
        _ => {}
    }
    let Some(targets) = std::env::var(TARGETS)
        .ok()
        .and_then(|text| Targets::parse(&text))
    else {
        stub::idle();
    };
    let targets = Targets {
        files: [&window, &counters, &neighbours].map(|file| Some(file.as_raw_fd())),
        ..targets
    };
    let is_driver = std::env::args().any(|argument| argument.starts_with("cuda"));
    let profile = if is_driver {
        Profile::Cuda
    } else {
        Profile::Cpu
    };
    attack(&mut stub.log, profile, &targets);
    writeln!(stub.log, "attempts are over").unwrap();
    // The worker ignores the end of its stream.
    stub::idle();
}

fn watch(mut stub: Stub, neighbours: &OwnedFd) -> ! {
    let file = rustix::fs::fstat(neighbours).unwrap();
    stub.say(&format!("{FILE}{}", file.st_ino));
    let neighbours = Neighbours::map(neighbours).unwrap();
    let mut said = None;
    loop {
        let has_neighbours = neighbours.has_some();
        if said.replace(has_neighbours) != Some(has_neighbours) {
            stub.say(&format!("neighbours: {has_neighbours}"));
        }
        std::thread::yield_now();
    }
}

fn leave(mut stub: Stub, window: &OwnedFd) -> ! {
    stub.say("leaving");
    // More messages than the supervisor reads of an ended worker, so that some stay in the queue.
    for _ in 0..100 {
        let copies = [stub.log.as_fd(), window.as_fd()].map(|fd| fd.try_clone_to_owned());
        stub.send(&Message::Doorbell, copies.map(Result::unwrap).into());
    }
    std::process::exit(0);
}

fn attack(log: &mut File, profile: Profile, targets: &Targets) {
    let is_one = |attack: &Attack| attack.refusal(profile).is_some();
    for attack in attacks::all().into_iter().filter(is_one) {
        let outcome = attack.make(targets);
        writeln!(log, "attempt: {}: {outcome}", attack.name).unwrap();
    }
}
