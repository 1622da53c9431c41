//! Cgroups limit the memory and processors of workers and tenants, and are removed afterwards.
//!
//! Not every system delegates cgroups, so this runs in the emulated host. There this executable
//! plays a third part beside test and worker: it is the only program that runs.

use std::ffi::CString;
use std::fmt::Display;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use wormhole_backend_tests::backend::{Backend, PATIENCE, Tenant, Workers, wait_until};
use wormhole_backend_tests::guest::{Control, Reply};
use wormhole_backend_tests::stub::{self, Stub};
use wormhole_images::{EmulatedHost, Ending, HostRun, Image, Kernel, host_overlay};
use wormhole_link::memory;
use wormhole_link::operator::LEAST_MEMORY;
use wormhole_ring::bootstrap;
use wormhole_ring::control::{Attach, FEATURE_FILES, Message, Observe};
use wormhole_ring::layout::SEGMENT_BYTES;

fn main() {
    if std::env::args().nth(1).as_deref() == Some(MACHINE) {
        return in_machine();
    }
    stub::main(
        &[(
            "workers_are_held_to_their_memory_by_cgroups_that_do_not_stay",
            workers_are_held_to_their_memory_by_cgroups_that_do_not_stay,
        )],
        worker,
    );
}

const MACHINE: &str = "--machine";
/// Environment of a guest whose worker uses more memory than allowed.
const EAT: &str = "CUDA_MODULE_LOADING=EAT\n";
/// Environment of a guest whose worker uses a part of the allowed memory.
const SIP: &str = "CUDA_MODULE_LOADING=SIP\n";
/// Environment of a guest whose worker says its process number.
const NUMBER: &str = "CUDA_MODULE_LOADING=NUMBER\n";
const MEMORY: usize = 96 << 20;
/// Bytes that a sipping worker uses: two such workers exceed a tenant's limit.
const SIPPED: usize = 72 << 20;
const TENANT_MEMORY: usize = 128 << 20;

fn workers_are_held_to_their_memory_by_cgroups_that_do_not_stay() {
    let folders = ["WORMHOLE_IMAGES", "WORMHOLE_STAGE"].map(std::env::var_os);
    let [Some(images), Some(stage)] = folders.map(|folder| folder.map(PathBuf::from)) else {
        println!("skipped: there is no emulated host without `cargo xtask test`");
        return;
    };
    let overlay = host_overlay(&HostRun {
        init: stage.join("lib/wormhole/wormhole-init"),
        wormhole: std::env::current_exe().unwrap(),
        parts: Vec::new(),
        images: vec![Image::guest(&images, Kernel::V6_1).unwrap()],
        arguments: vec![MACHINE.into()],
        stdin: false,
        terminal: None,
        variables: Vec::new(),
        programs: vec![env!("CARGO_BIN_EXE_supervisor").into()],
        has_files: false,
        volumes: Vec::new(),
        taps: 0,
        collect: Vec::new(),
    })
    .unwrap();
    let host = EmulatedHost {
        image: &Image::emulated_host(&images, Kernel::V6_1).unwrap(),
        overlay: &overlay,
        memory: 2 << 30,
        processors: 2,
        disks: &[],
        nvme_disks: &[],
        networks: &[],
        files: &[],
        timeout: Some(Duration::from_secs(240)),
        stdin: None,
        signals: None,
    };
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let report = host.run(&mut stdout, &mut stderr).unwrap();
    let said = String::from_utf8_lossy(&stdout) + String::from_utf8_lossy(&stderr);
    assert_eq!(report.ending, Ending::Exited(0), "{said}");
    println!("{said}");
}

/// Plays the worker.
fn worker(mut stub: Stub) {
    stub.take_session();
    let bytes = match std::env::var("CUDA_MODULE_LOADING").as_deref() {
        Ok("EAT") => 4 * MEMORY,
        Ok("SIP") => SIPPED,
        Ok("NUMBER") => {
            stub.say(&format!("its number is {}", std::process::id()));
            stub::idle();
        }
        _ => stub::idle(),
    };
    // Shared memory, which no resource limit counts.
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a mapping of its own, written within its size.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        at.cast::<u8>().write_bytes(1, bytes);
    }
    stub.say("it has eaten");
    stub::idle();
}

const ROOT: &str = "/sys/fs/cgroup";

fn in_machine() {
    // SAFETY: C strings.
    let mounted = unsafe {
        libc::mount(
            c"cgroup2".as_ptr(),
            c"/sys/fs/cgroup".as_ptr(),
            c"cgroup2".as_ptr(),
            0,
            std::ptr::null(),
        )
    };
    assert_eq!(mounted, 0, "{}", std::io::Error::last_os_error());
    let root = Path::new(ROOT);
    a_worker_that_takes_too_much_ends_alone(root);
    what_a_killed_supervisor_leaves_is_removed_by_the_next(root);
    assert!(
        !root.join("supervisor").exists(),
        "the root need not be empty"
    );

    let delegated = cgroup(&root.join("delegated"));
    mark(&delegated);
    enter(&delegated);
    a_worker_that_takes_too_much_ends_alone(&delegated);
    what_a_killed_supervisor_leaves_is_removed_by_the_next(&delegated);
    assert_eq!(names(&delegated), ["supervisor"]);
    let own = fs::read_to_string("/proc/self/cgroup").unwrap();
    assert_eq!(own, "0::/delegated/supervisor\n");

    tenants_are_held_to_their_memory_together(&delegated);
    tenants_share_the_memory_that_the_operator_does_not_divide(&delegated);
    a_tenant_counts_until_the_last_page_of_its_memory_is_free(&delegated);
    what_tenants_leave_one_after_the_other_counts_for_their_user(&delegated);
    workers_of_strangers_on_a_gpu_have_a_namespace_each();
    workers_of_strangers_take_no_files();

    let other = cgroup(&root.join("other"));
    enter(&other);
    what_is_not_delegated_is_left_alone(&other);
    strangers_are_not_served("is not delegated");
    println!("without cgroups several tenants are not served");

    without_shares_of_the_processors_one_tenant_is_served_and_strangers_are_not(root);
}

fn a_worker_that_takes_too_much_ends_alone(base: &Path) {
    let mut backend = start();
    let place = workers_of(base, &backend);
    let mut neighbour = assign(&mut backend, "");
    let doomed = assign(&mut backend, EAT);
    backend.wait_for_log("more memory than workers may have");
    drop(doomed);
    let end = backend.report().end;
    assert!(end.contains("more memory than workers may have"), "{end}");
    assert!(!backend.log().contains("it has eaten"));
    neighbour.hello(stub::protocol(0), "");
    assert_eq!(neighbour.receive(), Reply::Ended);
    let end = backend.report().end;
    assert!(end.contains("hello message twice"), "{end}");

    // Returns the process in each cgroup.
    let processes = || -> Vec<String> {
        let read = |worker: PathBuf| fs::read_to_string(worker.join("cgroup.procs")).ok();
        let text = workers_below(&place).into_iter().map(read);
        text.map(|text| text.unwrap_or_default().trim().to_owned())
            .collect()
    };
    let workers = || -> Vec<String> { backend.workers().iter().map(i32::to_string).collect() };
    wait_until(
        || {
            let (mut processes, mut workers) = (processes(), workers());
            processes.sort();
            workers.sort();
            processes == workers
        },
        || {
            format!(
                "a cgroup for each worker and no more: {:?} for {:?}",
                processes(),
                workers()
            )
        },
    );
    for worker in workers_below(&place) {
        let read = |file| fs::read_to_string(worker.join(file)).unwrap();
        assert_eq!(read("memory.max"), format!("{MEMORY}\n"));
        assert_eq!(read("pids.max"), format!("{}\n", threads_of_worker()));
    }
    assert_ne!(
        fs::read_to_string(place.join("memory.max")).unwrap(),
        "max\n"
    );
    assert!(backend.finish().success());
    assert!(!place.exists());
    println!(
        "{}: a worker that takes too much ends alone",
        base.display()
    );
}

/// Returns the threads that a worker on one CPU device may have: 128 for its answer slots, 133 for streams, two for each
/// processor, 8 lanes, 16 others.
fn threads_of_worker() -> u64 {
    let processors = std::thread::available_parallelism().unwrap();
    128 + 133 + 2 * processors.get() as u64 + 8 + 16
}

/// Returns the cgroup of a supervisor's workers.
fn workers_of(base: &Path, backend: &Backend) -> PathBuf {
    base.join(format!("workers-{}.0", backend.spawner().unwrap()))
}

/// Returns the cgroup of the tenants of root, the user of these tests.
fn tenants_of(place: &Path) -> PathBuf {
    place.join("user-0")
}

/// The driver's handle of memory names a process by its number, and a worker with the number 1 offers no such handles.
fn workers_of_strangers_on_a_gpu_have_a_namespace_each() {
    let socket = std::env::temp_dir().join("numbers");
    let mut backend = start_for_strangers(&socket, MEMORY, &["--device", "cuda:0"]);
    let mut neighbour = Tenant::join(&socket);
    neighbour.attach(64, Attach::default()).unwrap();
    let _theirs = ask(&mut neighbour, NUMBER);
    let _first = assign(&mut backend, NUMBER);
    wait_until(
        || backend.log().matches("its number is 1\n").count() == 2,
        || format!("both workers' numbers: {}", backend.log()),
    );
    backend.signal(libc::SIGTERM);
    assert!(backend.wait_for_end().success());
    println!("workers of strangers on a GPU have a namespace each");
}

fn workers_of_strangers_take_no_files() {
    let offered = |backend: &mut Backend| {
        let mut guest = backend.connect();
        guest
            .send(&Message::Hello {
                bootstrap_version: bootstrap::VERSION,
                protocol_hash: stub::protocol(0),
                features: FEATURE_FILES,
                environment: "",
            })
            .unwrap();
        match guest.receive() {
            Reply::Grant(grant) => grant.features,
            other => panic!("no grant but {other:?}"),
        }
    };
    let mut alone = start();
    assert_eq!(offered(&mut alone), FEATURE_FILES);
    assert!(alone.finish().success());
    let socket = std::env::temp_dir().join("files");
    let mut strangers = start_for_strangers(&socket, MEMORY, &[]);
    assert_eq!(offered(&mut strangers), 0);
    strangers.signal(libc::SIGTERM);
    assert!(strangers.wait_for_end().success());
    println!("workers of strangers take no files");
}

fn wait_until_two_have_eaten(backend: &Backend) {
    wait_until(
        || backend.log().matches("it has eaten").count() >= 2,
        || format!("the second tenant's worker: {}", backend.log()),
    );
}

/// Starts a supervisor with a socket at this path, whose tenants do not trust each other.
fn start_for_strangers(socket: &Path, memory: impl Display, arguments: &[&str]) -> Backend {
    // In one word: the harness says of all others that their tenants trust each other.
    let listen = format!("--listen={}", socket.display());
    start_with(memory, &[&[listen.as_str()], arguments].concat())
}

fn number(file: PathBuf) -> u64 {
    let text = fs::read_to_string(&file).unwrap();
    text.trim()
        .parse()
        .unwrap_or_else(|_| panic!("{}: {text}", file.display()))
}

/// Returns the names of the tenants' cgroups.
fn tenants_below(place: &Path) -> Vec<String> {
    let mut levels = names(place);
    levels.retain(|name| name.starts_with("tenant-"));
    levels
}

fn tenants_are_held_to_their_memory_together(base: &Path) {
    let socket = std::env::temp_dir().join("tenants");
    let limit = TENANT_MEMORY.to_string();
    let mut backend = start_for_strangers(&socket, MEMORY, &["--tenant-memory", &limit]);
    let place = workers_of(base, &backend);
    let user = tenants_of(&place);
    let all = |file| number(place.join(file));
    let whole = number("/proc/sys/kernel/pid_max".into())
        .min(number("/proc/sys/kernel/threads-max".into()));
    assert_eq!(all("pids.max"), whole / 4 * 3);
    // The threads of a worker for each of 128 sessions, and at most half of all.
    let threads = (all("pids.max") / 2).min(threads_of_worker() * 128);
    let mut neighbour = Tenant::join(&socket);
    neighbour.attach(64, Attach::default()).unwrap();
    let _first = assign(&mut backend, SIP);
    backend.wait_for_log("it has eaten");
    let _second = assign(&mut backend, SIP);
    // Two workers exceed the limit, so at least one ends.
    backend.wait_for_log("more memory than workers may have");
    // The neighbour has a limit of its own.
    let theirs = ask(&mut neighbour, SIP);
    wait_until_two_have_eaten(&backend);
    let levels = tenants_below(&user);
    // The first tenant's cgroup exists while one of its workers does.
    assert!(!levels.is_empty());
    for level in &levels {
        let read = |file| fs::read_to_string(user.join(level).join(file)).unwrap();
        let limit = |file| number(user.join(level).join(file));
        assert_eq!(limit("memory.max"), TENANT_MEMORY as u64);
        assert_eq!(limit("pids.max"), threads);
        assert_eq!(read("cpu.weight"), "100\n");
        let processes = read("loop/cgroup.procs");
        let served = backend.tenant_processes().into_iter();
        let served = served.filter(|pid| processes.lines().any(|line| line == pid.to_string()));
        assert_eq!(served.count(), 1, "{processes}");
        assert_eq!(read("loop/cpu.weight"), "10000\n");
        // To make a cgroup with a limit of memory charges the tenant, which may be at its own.
        for below in names(&user.join(level)) {
            let file = user.join(level).join(below).join("memory.max");
            assert!(!file.exists(), "{}", file.display());
        }
    }
    let own = fs::read_to_string(base.join("supervisor/cpu.weight")).unwrap();
    assert_eq!(own, "10000\n");
    drop((theirs, neighbour));
    wait_until(
        || tenants_below(&user).len() < levels.len(),
        || format!("the neighbour's cgroup to go: {:?}", names(&user)),
    );
    backend.signal(libc::SIGTERM);
    assert!(backend.wait_for_end().success());
    assert!(!place.exists());
    println!("tenants are held to their memory together");
}

fn tenants_share_the_memory_that_the_operator_does_not_divide(base: &Path) {
    let socket = std::env::temp_dir().join("shares");
    // The machine has room for two tenants of 512 MiB, so that no third of the six is served.
    let mut backend = start_for_strangers(&socket, MEMORY, &["--tenants-per-user", "6"]);
    let place = workers_of(base, &backend);
    let user = tenants_of(&place);
    let _first = assign(&mut backend, SIP);
    backend.wait_for_log("it has eaten");
    let mut second = Tenant::join(&socket);
    second.attach(64, Attach::default()).unwrap();
    let theirs = ask(&mut second, SIP);
    wait_until_two_have_eaten(&backend);
    let half = number(place.join("memory.max")) / 2;
    let levels = tenants_below(&user);
    // The process that waits for the next tenant has one too.
    assert_eq!(levels.len(), 3, "{levels:?}");
    for level in levels {
        let limit = number(user.join(level).join("memory.max"));
        // The kernel counts whole pages.
        assert!(half - limit < 4096, "{limit} of {half}");
    }
    let refused = Tenant::join(&socket).attach(64, Attach::default());
    let reason = refused.unwrap_err();
    assert!(reason.contains("memory for 2 of 512 MiB each"), "{reason}");
    drop((theirs, second));
    backend.signal(libc::SIGTERM);
    assert!(backend.wait_for_end().success());
    println!("tenants share the memory that the operator does not divide");
}

fn a_tenant_counts_until_the_last_page_of_its_memory_is_free(base: &Path) {
    let socket = std::env::temp_dir().join("left");
    let limit = TENANT_MEMORY.to_string();
    let quotas = ["--tenants-per-user", "3", "--tenant-memory", &limit];
    let mut backend = start_for_strangers(&socket, MEMORY, &quotas);
    let place = workers_of(base, &backend);
    let user = tenants_of(&place);
    // Keeps a page: a process of its tenant writes the first one of the window.
    let window = File::from(memory::anonymous_file(c"window").unwrap());
    let window_size = 64 * SEGMENT_BYTES as u64;
    window.set_len(window_size).unwrap();
    memory::seal_size(&window).unwrap();
    let attach = Attach {
        window_size,
        ..Attach::default()
    };
    let mut second = Tenant::join(&socket);
    let theirs = window.try_clone().unwrap().into();
    second.send(&Message::Attach(attach), vec![theirs]);
    second.attached().unwrap();
    drop(second);
    // Its process has sent messages that the test leaves unread.
    let mut third = Tenant::join(&socket);
    third.attach(64, Attach::default()).unwrap();
    let unread = leave_unread(&mut third, 200);
    let levels = tenants_below(&user).into_iter();
    let most = levels.map(|level| kernel_of(&user.join(level))).max();
    assert!(most > Some(2 << 20), "{most:?} bytes of the kernel's own");
    drop(third);
    let refusal = |until: &str| {
        let end = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < end, "no refusal with {until}");
            let refused = Tenant::join(&socket).attached();
            let reason = refused.expect_err("the memory of another tenant is not free");
            if reason.contains(until) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    refusal("2 have ended and count until");
    // The kernel's own counts are exact by then.
    std::thread::sleep(Duration::from_secs(3));
    refusal("2 have ended and count until");
    // Of the three tenants, and of the process that waits for the next.
    assert_eq!(tenants_below(&user).len(), 4);
    drop(window);
    let left = |count| {
        wait_until(
            || tenants_below(&user).len() == count,
            || format!("a tenant's cgroup to go: {:?}", names(&user)),
        );
    };
    left(3);
    drop(unread);
    left(2);
    Tenant::join(&socket).attach(64, Attach::default()).unwrap();
    backend.signal(libc::SIGTERM);
    assert!(backend.wait_for_end().success());
    assert!(!place.exists());
    println!("a tenant counts until the last page of its memory is free");
}

fn what_tenants_leave_one_after_the_other_counts_for_their_user(base: &Path) {
    let socket = std::env::temp_dir().join("one-after-the-other");
    let limit = LEAST_MEMORY.to_string();
    let quotas = ["--tenants-per-user", "2", "--tenant-memory", &limit];
    let mut backend = start_for_strangers(&socket, LEAST_MEMORY, &quotas);
    let user = tenants_of(&workers_of(base, &backend));
    let mut kept = Vec::new();
    let mut last = Instant::now();
    let mut refusal = String::new();
    // The kernel's own counts are exact by then, so that the one before counts no longer.
    while last.elapsed() < Duration::from_secs(4) {
        let mut tenant = Tenant::join(&socket);
        match tenant.attach(64, Attach::default()) {
            // Less than the kernel's own memory of a tenant that has left nothing.
            Ok(_) => {
                kept.push(leave_unread(&mut tenant, 48));
                last = Instant::now();
            }
            Err(reason) => {
                refusal = reason;
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        assert!(kept.len() < 24, "{} tenants leave memory", kept.len());
    }
    let left = kernel_of(&user) >> 10;
    println!("{} tenants left {left} KiB: {refusal}", kept.len());
    assert!(kept.len() > 1, "the second counts for its own memory");
    assert!(
        refusal.contains("; of these 1 have ended and count until"),
        "{refusal}"
    );
    drop(kept);
    wait_until(
        || Tenant::join(&socket).attach(64, Attach::default()).is_ok(),
        || "a tenant once the messages are gone".into(),
    );
    backend.signal(libc::SIGTERM);
    assert!(backend.wait_for_end().success());
    println!("memory that tenants leave one after the other counts for their user");
}

/// Has a tenant's process send so many messages to each of 16 streams, in which they stay. 200 are more than 1 MiB of the
/// kernel's own memory.
fn leave_unread(tenant: &mut Tenant, messages: usize) -> Vec<Control> {
    let mut streams: Vec<Control> = (0..16).map(|_| tenant.connect()).collect();
    let observe = Message::Observe(Observe {
        bootstrap_version: bootstrap::VERSION,
        device: 0,
    });
    let unread = |stream: &Control| rustix::io::ioctl_fionread(&stream.socket).unwrap();
    for _ in 0..messages {
        let before: Vec<u64> = streams.iter().map(unread).collect();
        for stream in &mut streams {
            stream.send(&observe).unwrap();
        }
        // A guest may ask again once it has an answer.
        let have_answers =
            || std::iter::zip(&streams, &before).all(|(one, was)| unread(one) > *was);
        wait_until(have_answers, || "answers".into());
    }
    streams
}

/// Returns the bytes of the kernel's own memory that are charged to a cgroup.
fn kernel_of(cgroup: &Path) -> u64 {
    let stat = fs::read_to_string(cgroup.join("memory.stat")).unwrap_or_default();
    let mut lines = stat.lines().filter_map(|line| line.strip_prefix("kernel "));
    lines.next().map_or(0, |bytes| bytes.parse().unwrap())
}

/// Gives no cgroup the `cpu` controller any more.
fn without_shares_of_the_processors_one_tenant_is_served_and_strangers_are_not(root: &Path) {
    // A cgroup that passes a controller on cannot lose it.
    for parent in [&root.join("delegated"), root] {
        fs::write(parent.join("cgroup.subtree_control"), "-cpu +memory +pids").unwrap();
    }
    let without = cgroup(&root.join("nocpu"));
    mark(&without);
    enter(&without);
    let reason = "the cgroup /sys/fs/cgroup/nocpu has no cpu controller";
    strangers_are_not_served(reason);
    assert_eq!(names(&without), ["supervisor"]);
    let backend = start();
    backend.wait_for_log(reason);
    assert!(backend.finish().success());
    println!("without shares of the processors strangers are not served");
}

/// Checks that a supervisor refuses to serve tenants who are strangers for this reason.
fn strangers_are_not_served(reason: &str) {
    let socket = std::env::temp_dir().join("refused");
    let supervisor = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_supervisor"));
        command.args(["--listen", socket.to_str().unwrap(), "--workers"]);
        command.arg(Workers::of(&[&std::env::current_exe().unwrap()]).path());
        command
    };
    let refused = supervisor().output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("--trusted-tenants"), "{said}");
    assert!(said.contains(reason), "{said}");
}

fn what_a_killed_supervisor_leaves_is_removed_by_the_next(base: &Path) {
    let mut killed = start();
    let left = workers_of(base, &killed);
    killed.signal(libc::SIGKILL);
    killed.wait_for_end();
    assert!(left.exists());
    let next = start();
    assert!(!left.exists());
    let living = workers_of(base, &next);
    let third = start();
    assert!(living.exists(), "its supervisor lives");
    assert!(third.finish().success());
    assert!(next.finish().success());
    println!("{}: all cgroups are removed", base.display());
}

fn what_is_not_delegated_is_left_alone(base: &Path) {
    let mut backend = start();
    let _control = assign(&mut backend, "");
    assert!(names(base).is_empty());
    backend.wait_for_log("by a resource limit: the cgroup /sys/fs/cgroup/other is not delegated");
    assert!(backend.finish().success());
    println!("{}: left alone", base.display());
}

fn start() -> Backend {
    start_with(MEMORY, &[])
}

/// Starts a supervisor whose workers have so much memory each.
fn start_with(memory: impl Display, arguments: &[&str]) -> Backend {
    let me = std::env::current_exe().unwrap();
    let memory = memory.to_string();
    let mut backend = Backend::start_as(
        // Exists at the same path in the emulated host.
        Command::new(env!("CARGO_BIN_EXE_supervisor")),
        Workers::of(&[&me]),
        &[&["--worker-memory", &memory], arguments].concat(),
    );
    backend.attach(64, Attach::default()).unwrap();
    backend
}

/// Returns the cgroups of workers, in all tenants' cgroups.
fn workers_below(place: &Path) -> Vec<PathBuf> {
    let levels = names(place).into_iter().map(|level| place.join(level));
    levels
        .flat_map(|level| names(&level).into_iter().map(move |name| level.join(name)))
        .collect()
}

fn assign(backend: &mut Backend, environment: &str) -> Control {
    ask(backend, environment)
}

fn ask(tenant: &mut Tenant, environment: &str) -> Control {
    let mut control = tenant.connect();
    control.hello(stub::protocol(0), environment);
    match control.receive() {
        Reply::Grant(_) => control,
        other => panic!("{other:?}"),
    }
}

fn cgroup(path: &Path) -> PathBuf {
    fs::create_dir(path).unwrap();
    path.to_owned()
}

/// Marks a cgroup as delegated, as systemd does.
fn mark(path: &Path) {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: C strings, and one byte.
    let result = unsafe {
        libc::setxattr(
            path.as_ptr(),
            c"trusted.delegate".as_ptr(),
            c"1".as_ptr().cast(),
            1,
            0,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

fn enter(path: &Path) {
    fs::write(path.join("cgroup.procs"), std::process::id().to_string()).unwrap();
}

/// Returns the names of the cgroups in a cgroup.
fn names(path: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(path) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect()
}
