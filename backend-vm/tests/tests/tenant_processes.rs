//! Each tenant has a process of its own. Its stop or death does not affect other tenants.

use std::collections::BTreeSet;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::Uid;
use wormhole_api::{MemGetInfo, PROTOCOL_HASH};
use wormhole_backend_tests::backend::{
    Backend, Tenant, Workers, is_running, is_stopped, kill, limit_descriptors, program, wait_until,
};
use wormhole_backend_tests::guest::{Guest, Reply};
use wormhole_ring::control::{Attach, Message, Stream};

/// A supervisor with two attached tenants, and the process of the second one.
struct Two {
    backend: Backend,
    second: Tenant,
    process: i32,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

fn two(arguments: &[&str]) -> Two {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("tenants");
    let arguments = [&["--listen", socket.to_str().unwrap()], arguments].concat();
    let mut backend = Backend::start(Workers::built(), &arguments);
    backend.attach(64, Attach::default()).unwrap();
    wait_until(
        || backend.tenant_processes().len() == 2,
        || "a process for the second tenant".into(),
    );
    let before = backend.tenant_processes();
    let mut second = Tenant::join(&socket);
    second.attach(64, Attach::default()).unwrap();
    let process = process_of_last(&backend, &before);
    Two {
        backend,
        second,
        process,
        socket,
        _folder: folder,
    }
}

/// Returns the process that serves the tenant which came last. It waited for a tenant before, when
/// these processes were there, and another one waits for the next tenant now.
fn process_of_last(backend: &Backend, before: &[i32]) -> i32 {
    wait_until(
        || backend.tenant_processes().len() == 3,
        || "a process for the next tenant".into(),
    );
    let now = backend.tenant_processes();
    *now.iter().rfind(|pid| before.contains(pid)).unwrap()
}

/// Checks that a tenant gets a session which works, and its memory back.
fn serves(tenant: &mut Tenant) {
    let mut guest: Guest = tenant.connect().open();
    assert_eq!(guest.call(&MemGetInfo {}).status, 0);
    let Reply::ArenaGrant(run) = guest.request_arena(1, 1) else {
        panic!("no arena");
    };
    guest.control.send(&Message::ArenaReturn(run)).unwrap();
    drop(guest);
    assert_eq!(tenant.report().end, "the guest process ended");
}

#[test]
fn a_tenants_process_that_stands_still_holds_up_no_other_tenant() {
    let mut two = two(&[]);
    kill(two.process, libc::SIGSTOP);
    wait_until(|| is_stopped(two.process), || "its stop".into());
    // It has messages that nothing reads, and a guest that waits.
    two.second
        .send(&Message::Stream(Stream { local: 1 }), Vec::new());
    for _ in 0..3 {
        serves(&mut two.backend);
        let mut new = Tenant::join(&two.socket);
        new.attach(64, Attach::default()).unwrap();
        serves(&mut new);
    }
    kill(two.process, libc::SIGCONT);
    assert!(two.second.hears("Stream"));
    serves(&mut two.second);
}

/// Returns where the descriptors of a process lead.
fn descriptors_of(process: u32) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let links = folder.map(|entry| std::fs::read_link(entry.unwrap().path()).unwrap());
    links.collect()
}

#[test]
fn a_tenants_process_has_no_descriptor_of_the_log_and_its_lines_have_its_name() {
    let mut two = two(&[]);
    let log = std::fs::read_link(format!("/proc/{}/fd/2", two.backend.child.id())).unwrap();
    assert!(descriptors_of(two.backend.child.id()).contains(&log));
    for process in two.backend.tenant_processes() {
        let held = descriptors_of(process.cast_unsigned());
        assert!(!held.contains(&log), "{log:?} in {held:?}");
    }
    two.second.send(
        &Message::Ready {
            protocol_hash: 0,
            device: "",
        },
        Vec::new(),
    );
    two.backend.wait_for_log("which launchers do not send");
    let log = two.backend.log();
    let line = log
        .lines()
        .find(|line| line.contains("which launchers do not send"));
    let (name, said) = line.unwrap().split_once(": ").unwrap();
    let tenant = name.strip_prefix(" WARN process of tenant ").unwrap();
    assert!(
        said.starts_with(&format!("tenant {tenant} sent Ready")),
        "{said}"
    );
}

#[test]
fn a_tenant_that_leaves_and_keeps_its_files_keeps_no_memory() {
    let Two {
        backend: _backend,
        mut second,
        ..
    } = two(&[]);
    let guest = second.connect().open();
    guest.arena[0].write(0, &vec![1; 2 << 20]);
    let memory = guest.memory();
    assert!(memory.held() >= 2 << 20);
    // The guest and its file stay. The status word tells the guest of the end.
    drop(second);
    guest.wait_for_status();
    wait_until(
        || memory.held() <= 4096,
        || format!("all but the status word's page, and not {}", memory.held()),
    );
}

#[test]
fn a_tenants_process_that_is_killed_ends_its_tenant_alone() {
    let mut two = two(&["--tenants-per-user", "2"]);
    let mut control = two.second.connect();
    control.hello(PROTOCOL_HASH, "");
    assert!(matches!(control.receive(), Reply::Grant(_)));
    let mut guest = two.backend.connect().open();
    let workers: BTreeSet<i32> = two.backend.workers().into_iter().collect();
    kill(two.process, libc::SIGKILL);
    two.backend.wait_for_log("was ended by signal 9");
    assert_eq!(control.receive(), Reply::Ended);
    assert!(!two.second.hears("no message"), "its stream has not ended");
    // Its worker ends with it.
    wait_until(
        || workers.iter().filter(|pid| !is_running(**pid)).count() == 1,
        || "its worker's end".into(),
    );
    assert_eq!(guest.call(&MemGetInfo {}).status, 0);
    // Another tenant may have its place.
    let join = || {
        let mut tenant = Tenant::join(&two.socket);
        tenant.attach(64, Attach::default()).map(|()| tenant)
    };
    let mut joined = join();
    wait_until(
        || {
            if joined.is_err() {
                joined = join();
            }
            joined.is_ok()
        },
        || "its place".into(),
    );
    serves(&mut joined.unwrap());
}

/// The kernel counts descriptors that were sent and not received for the sender's user, so that
/// tenants could keep the supervisor and other tenants' processes from sending theirs.
#[test]
fn tenants_that_read_nothing_leave_others_descriptors_in_flight() {
    const FILES: u64 = 2048;
    const HOSTILE: usize = 36;
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("tenants");
    let mut command = Command::new(program("supervisor"));
    // SAFETY: prlimit is safe between fork and exec.
    unsafe {
        command.pre_exec(|| limit_descriptors(0, FILES, FILES));
    }
    let listen = ["--listen", socket.to_str().unwrap()];
    let mut backend = Backend::start_as(command, Workers::built(), &listen);
    backend.attach(64, Attach::default()).unwrap();
    let hostile = (0..HOSTILE).map_while(|_| {
        let mut tenant = Tenant::join(&socket);
        // Where tenants' processes have one user, fewer may attach.
        tenant.attach(4, Attach::default()).ok()?;
        for _ in 0..60 {
            tenant.send(&Message::Stream(Stream { local: 1 }), Vec::new());
        }
        tenant.wait_until_read();
        Some(tenant)
    });
    let hostile: Vec<Tenant> = hostile.collect();
    serves(&mut backend);
    let is_root = rustix::process::geteuid().is_root();
    assert!(hostile.len() == HOSTILE || !is_root, "{}", hostile.len());
}

#[test]
fn each_tenants_processes_have_a_user_of_their_own_if_the_supervisor_is_root() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root gives processes a user of their own");
        return;
    }
    let mut two = two(&[]);
    serves(&mut two.second);
    let mut users = BTreeSet::new();
    let processes = [two.backend.tenant_processes(), two.backend.scrubbers()].concat();
    assert!(processes.len() > 3);
    for process in &processes {
        let user = user_of(*process);
        assert_ne!(user, 0);
        users.insert(user);
    }
    assert_eq!(users.len(), processes.len());
}

fn user_of(process: i32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let user = status.lines().find(|line| line.starts_with("Uid:"));
    let user = user.unwrap().split_whitespace().nth(1).unwrap();
    user.parse().unwrap()
}

/// Sends this many descriptors as a user. They are in flight until the result is dropped.
fn in_flight(user: u32, count: usize) -> (UnixStream, UnixStream) {
    const EACH: usize = 50;
    let (near, far) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            rustix::thread::set_thread_uid(Uid::from_raw(user)).unwrap();
            for _ in 0..count / EACH {
                let mut space =
                    [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(EACH))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                let descriptors = [near.as_fd(); EACH];
                assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
                let bytes = [IoSlice::new(&[0])];
                sendmsg(&near, &bytes, &mut control, SendFlags::empty()).unwrap();
            }
        });
    });
    (near, far)
}

#[test]
fn a_message_waits_while_its_sender_has_too_many_descriptors_in_flight() {
    const FILES: u64 = 600;
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can send as another user");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("tenants");
    let mut command = Command::new(program("supervisor"));
    // SAFETY: prlimit is safe between fork and exec.
    unsafe {
        command.pre_exec(|| limit_descriptors(0, FILES, FILES));
    }
    let listen = ["--listen", socket.to_str().unwrap()];
    let mut backend = Backend::start_as(command, Workers::built(), &listen);
    backend.attach(64, Attach::default()).unwrap();
    // The one forked first serves it.
    let process = *backend.tenant_processes().first().unwrap();
    let others = in_flight(user_of(process), 650);
    backend.send(&Message::Stream(Stream { local: 1 }), Vec::new());
    backend.wait_until_read();
    drop(others);
    assert!(backend.hears("Stream"));
    serves(&mut backend);
}

#[test]
fn a_process_that_has_ended_before_it_has_a_tenant_is_no_tenants_matter() {
    let two = two(&[]);
    let supervisor = two.backend.child.id().cast_signed();
    // The one forked last waits.
    let waits = *two.backend.tenant_processes().last().unwrap();
    kill(supervisor, libc::SIGSTOP);
    wait_until(
        || is_stopped(supervisor),
        || "a supervisor that stands".into(),
    );
    kill(waits, libc::SIGKILL);
    wait_until(|| !is_running(waits), || "its end".into());
    let mut new = Tenant::join(&two.socket);
    kill(supervisor, libc::SIGCONT);
    new.attach(4, Attach::default()).unwrap();
    let ended = "the process that waits for the next tenant was ended by signal 9";
    two.backend.wait_for_log(ended);
}

#[test]
fn connections_to_a_supervisor_that_ends_do_not_hold_it_up() {
    let mut two = two(&[]);
    let spawner = two.backend.spawner().unwrap();
    // Takes the process that waits. The next one is not forked while the spawner stands still.
    kill(spawner, libc::SIGSTOP);
    wait_until(|| is_stopped(spawner), || "a spawner that stands".into());
    let _third = Tenant::join(&two.socket);
    let mut waiting = Tenant::join(&two.socket);
    let is_waiting = || {
        two.backend.signal(libc::SIGUSR1);
        two.backend.log().contains(", 1 more wait for a process")
    };
    wait_until(is_waiting, || "a connection without a process".into());
    two.backend.signal(libc::SIGTERM);
    two.backend.wait_for_log("the supervisor ends");
    let _late = Tenant::join(&two.socket);
    kill(spawner, libc::SIGCONT);
    assert!(two.backend.wait_for_end().success());
    let reason = waiting.attached().unwrap_err();
    assert!(reason.contains("the supervisor ended"), "{reason}");
}

#[test]
fn no_tenants_process_outlives_a_killed_supervisor() {
    let mut two = two(&[]);
    let processes = two.backend.tenant_processes();
    assert!(processes.contains(&two.process));
    two.backend.signal(libc::SIGKILL);
    two.backend.wait_for_end();
    wait_until(
        || processes.iter().all(|pid| !is_running(*pid)),
        || "the processes' end".into(),
    );
    assert!(!two.second.hears("no message"), "its stream has not ended");
}

#[test]
fn tenants_processes_end_their_sessions_when_the_supervisor_is_asked_to_stop() {
    let mut two = two(&[]);
    let guest = two.second.connect().open();
    let processes = two.backend.tenant_processes();
    two.backend.signal(libc::SIGTERM);
    let cause = guest.wait_for_status();
    assert_eq!((cause.result, cause.cause), (802, 5));
    let end = two.second.report().end;
    assert!(end.contains("terminated"), "{end}");
    assert!(two.backend.wait_for_end().success());
    assert!(processes.iter().all(|pid| !is_running(*pid)));
}

#[test]
fn a_supervisor_of_one_tenant_serves_it_without_a_further_process() {
    let mut backend = Backend::with_window(64);
    serves(&mut backend);
    assert!(backend.tenant_processes().is_empty());
    assert_eq!(backend.scrubbers().len(), 1);
}

#[test]
fn a_tenant_that_leaves_takes_its_processes_with_it() {
    let mut two = two(&[]);
    serves(&mut two.second);
    drop(two.second);
    wait_until(|| !is_running(two.process), || "its process's end".into());
    // The first tenant has one, and one waits.
    let left = || {
        (
            two.backend.tenant_processes().len(),
            two.backend.scrubbers().len(),
        )
    };
    wait_until(
        || left().0 == 2 && left().1 <= 1,
        || format!("{:?}", left()),
    );
}
