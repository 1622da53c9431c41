//! Usage of a backend by its tenants: the figures that each user gets.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use wormhole_backend_tests::backend::{
    Backend, Tenant, Workers, is_running, kill, open_to_all, wait_until,
};
use wormhole_link::usage::TenantUsage;
use wormhole_ring::control::{Attach, Exits, Message};

/// A user that may attach beside the operator.
const USER: u32 = 1234;

/// Starts a supervisor that listens, and whose first tenant has a window.
fn listening(folder: &tempfile::TempDir) -> (Backend, PathBuf) {
    let open = Permissions::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).unwrap();
    let socket = folder.path().join("socket");
    let user = USER.to_string();
    let arguments = ["--listen", socket.to_str().unwrap(), "--tenant-user", &user];
    let mut backend = Backend::start(Workers::built(), &arguments);
    backend.attach(64, Attach::default()).unwrap();
    open_to_all(&socket);
    (backend, socket)
}

/// Asks for usage. These tenants' launchers are told that they are asked, and answer in turn.
fn ask(client: &mut Tenant, launchers: &mut [(&mut Tenant, Option<u64>)]) -> Vec<TenantUsage> {
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| client.usage().expect("an answer"));
        for (launcher, exits) in launchers {
            launcher.tell_exits(*exits);
        }
        answer.join().unwrap()
    })
}

#[test]
fn stats_show_a_user_its_own_tenants_and_the_operator_all() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can be another user");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (mut backend, socket) = listening(&folder);
    let mut guest = backend.connect().open();
    guest.round_trip(&[7; 5000]);
    let mut other = Tenant::join_as(USER, &socket);
    other.attach(64, Attach::default()).unwrap();

    let mut client = Tenant::join_as(USER, &socket);
    let told = ask(&mut client, &mut [(&mut other, Some(9))]);
    let [theirs] = told[..] else {
        panic!("{told:?}");
    };
    assert_eq!((theirs.user, theirs.usage.vm_exits), (USER, Some(9)));
    assert_eq!((theirs.usage.sessions, theirs.usage.requests), (0, 0));
    assert!(theirs.is_current);

    let mut operator = Tenant::join(&socket);
    let told = ask(
        &mut operator,
        &mut [(&mut backend, None), (&mut other, Some(10))],
    );
    let [own, theirs] = told[..] else {
        panic!("{told:?}");
    };
    assert_eq!((own.user, own.usage.vm_exits), (0, None));
    assert_eq!((theirs.user, theirs.usage.vm_exits), (USER, Some(10)));
    let pid = i32::try_from(std::process::id()).unwrap();
    assert_eq!((own.process, theirs.process), (pid, pid));
    assert_eq!(own.usage.sessions, 1);
    assert!(own.usage.bytes_to_device >= 5000 && own.usage.bytes_from_device >= 5000);

    drop(guest);
    let report = backend.report();
    let told = ask(
        &mut operator,
        &mut [(&mut backend, None), (&mut other, None)],
    );
    let usage = told[0].usage;
    assert_eq!((usage.sessions, usage.ended_sessions), (0, 1));
    let counted = (
        usage.records,
        usage.requests,
        usage.fences,
        usage.local_calls,
    );
    let reported = (
        report.records,
        report.requests,
        report.fences,
        report.local_calls,
    );
    assert_eq!(counted, reported);
    assert_eq!(usage.bytes_to_device, report.bytes_in);
    assert_eq!((usage.device_memory, told[1].usage.vm_exits), (0, None));
}

#[test]
fn a_launcher_that_does_not_answer_holds_up_none_of_its_sessions_figures() {
    let folder = tempfile::tempdir().unwrap();
    let (mut backend, socket) = listening(&folder);
    let mut guest = backend.connect().open();
    let mut client = Tenant::join(&socket);
    let mut told = || {
        let told = client.usage().expect("an answer")[0];
        assert!(told.is_current);
        assert_eq!(told.usage.sessions, 1);
        (told.usage.bytes_to_device, told.usage.vm_exits)
    };
    for bytes in [5000, 10_000] {
        guest.round_trip(&[7; 5000]);
        assert_eq!(told(), (bytes, None));
    }
    backend.tell_exits(Some(3));
    wait_until(
        || told() == (10_000, Some(3)),
        || "the launcher's answer".into(),
    );
}

#[test]
fn a_tenants_process_that_stands_delays_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    let (mut backend, socket) = listening(&folder);
    let mut client = Tenant::join(&socket);
    ask(&mut client, &mut [(&mut backend, Some(4))]);
    let standing = backend.tenant_processes();
    // The client's own process has to go on. It is the later one of the two that serve.
    let tenants = standing[0];
    kill(tenants, libc::SIGSTOP);
    let told = client.usage().expect("an answer");
    kill(tenants, libc::SIGCONT);
    assert!(!told[0].is_current);
    assert_eq!(told[0].usage.vm_exits, Some(4));
    assert!(is_running(tenants));
}

#[test]
fn a_launcher_that_attaches_is_asked_for_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (_backend, socket) = listening(&folder);
    let mut tenant = Tenant::join(&socket);
    let _window = tenant.begin_attaching(64, Attach::default()).unwrap();
    tenant.send(&Message::AskUsage, Vec::new());
    let (more, usage) = tenant.answered().expect("an answer");
    assert_eq!(more, 0, "{usage}");
    tenant.attached().unwrap();
}

#[test]
fn a_client_has_no_window_and_a_tenant_asks_for_nothing_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let (mut backend, socket) = listening(&folder);
    let mut guest = backend.connect().open();

    let mut client = Tenant::join(&socket);
    ask(&mut client, &mut [(&mut backend, None)]);
    let reason = client.attach(64, Attach::default()).unwrap_err();
    assert!(reason.contains("has no window"), "{reason}");

    let mut tenant = Tenant::join(&socket);
    tenant.attach(64, Attach::default()).unwrap();
    let own = tenant.own_usage(Some(12));
    assert_eq!(own.map(|usage| usage.vm_exits), [None, Some(12)]);
    assert_eq!(
        own.map(|usage| usage.sessions),
        [0, 0],
        "not that of others"
    );
    // A question that comes sooner is not answered.
    tenant.send(&Message::AskUsage, Vec::new());
    std::thread::sleep(Duration::from_millis(100));
    let again = tenant.own_usage(Some(13));
    assert_eq!(again.map(|usage| usage.vm_exits), [Some(12), Some(13)]);

    let mut liar = Tenant::join(&socket);
    liar.attach(64, Attach::default()).unwrap();
    liar.send(&Message::Exits(Exits::default()), Vec::new());
    assert!(!liar.hears("AskExits"));
    guest.round_trip(&[3; 100]);
}
