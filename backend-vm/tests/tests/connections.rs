//! Connections, from any user and in any number, take no resources from tenants of another user.

use std::collections::VecDeque;
use std::fs::{File, Permissions};
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::Uid;
use wormhole_api::{MemGetInfo, PROTOCOL_HASH};
use wormhole_backend_tests::attack::{EndlessWrite, lingering};
use wormhole_backend_tests::backend::{
    Backend, Tenant, Workers, is_running, is_stopped, kill, limit_descriptors, open_to_all,
    wait_until,
};
use wormhole_backend_tests::guest::Reply;
use wormhole_ring::control::{Attach, Message};

/// A user who may attach, and one who may not.
const HOSTILE: u32 = 65534;
const STRANGER: u32 = 65533;

/// Starts a supervisor that may have `files` open files, listens, and serves root and [`HOSTILE`].
/// Returns it with its socket, or none unless this test runs as root.
fn backend(folder: &tempfile::TempDir, files: u64) -> Option<(Backend, PathBuf)> {
    backend_with(folder, files, &[])
}

/// Starts a supervisor as [`backend`] does, with further arguments.
fn backend_with(
    folder: &tempfile::TempDir,
    files: u64,
    more: &[&str],
) -> Option<(Backend, PathBuf)> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return None;
    }
    let open = Permissions::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).unwrap();
    let socket = folder.path().join("tenants");
    let mut command = Command::new(env!("CARGO_BIN_EXE_supervisor"));
    // SAFETY: prlimit is safe between fork and exec.
    unsafe {
        command.pre_exec(move || limit_descriptors(0, files, files));
    }
    let user = HOSTILE.to_string();
    let arguments = ["--listen", socket.to_str().unwrap(), "--tenant-user", &user];
    let arguments = [&arguments, more].concat();
    let mut backend = Backend::start_as(command, Workers::built(), &arguments);
    backend.attach(64, Attach::default()).unwrap();
    Some((backend, socket))
}

/// Sets the calling thread's user.
fn become_user(user: u32) {
    rustix::thread::set_thread_uid(Uid::from_raw(user)).unwrap();
}

/// Executes `work` as [`HOSTILE`].
fn as_hostile<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            become_user(HOSTILE);
            work()
        });
        thread.join().unwrap()
    })
}

/// Checks that an attached tenant and a new one each get a session.
fn serves(backend: &mut Backend, socket: &Path) {
    let mut new = Tenant::join(socket);
    new.attach(64, Attach::default()).unwrap();
    for tenant in [&mut **backend, &mut new] {
        let mut control = tenant.connect();
        control.hello(PROTOCOL_HASH, "");
        let reply = control.receive();
        assert!(matches!(reply, Reply::Grant(_)), "{reply:?}");
        drop(control);
        assert_eq!(tenant.report().end, "the guest process ended");
    }
}

#[test]
fn connections_of_one_user_without_end_have_no_other_user_refused() {
    let folder = tempfile::tempdir().unwrap();
    let Some((mut backend, socket)) = backend(&folder, 4096) else {
        return;
    };
    let mut guest = backend.connect().open();
    let (over, connected) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for brings in [false, false, true] {
            let (socket, over, connected) = (&socket, &over, &connected);
            scope.spawn(move || {
                become_user(HOSTILE);
                let mut connections = VecDeque::new();
                while !over.load(Ordering::Relaxed) {
                    let mut connection = UnixStream::connect(socket).unwrap();
                    if brings {
                        // The supervisor may have closed it already.
                        let _ = connection.write(&[0]);
                    }
                    connections.push_back(connection);
                    if connections.len() > 256 {
                        connections.pop_front();
                    }
                    connected.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let reached = |count| connected.load(Ordering::Relaxed) >= count;
        let served = std::panic::catch_unwind(AssertUnwindSafe(|| {
            for round in 1..=10 {
                wait_until(|| reached(round * 500), || "connections".into());
                serves(&mut backend, &socket);
                assert_eq!(guest.call(&MemGetInfo {}).status, 0);
            }
        }));
        over.store(true, Ordering::Relaxed);
        served.unwrap();
    });
}

#[test]
fn refused_connections_with_what_lingers_in_them_hold_up_no_tenant() {
    let folder = tempfile::tempdir().unwrap();
    let Some((mut backend, socket)) = backend(&folder, 4096) else {
        return;
    };
    open_to_all(&socket);
    let (descriptor, _far) = lingering();
    let supervisor = backend.child.id().cast_signed();
    kill(supervisor, libc::SIGSTOP);
    let is_stopped = || is_stopped(supervisor);
    wait_until(is_stopped, || "a supervisor that stands".into());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            become_user(STRANGER);
            let connection = UnixStream::connect(&socket).unwrap();
            send(&connection, descriptor);
            // More connections than may wait to be closed at a time.
            for _ in 0..300 {
                let mut connection = UnixStream::connect(&socket).unwrap();
                connection.write_all(&[0]).unwrap();
            }
        });
    });
    kill(supervisor, libc::SIGCONT);
    serves(&mut backend, &socket);
}

#[test]
fn refused_connections_that_are_never_closed_leave_few_processes_and_hold_up_no_other_user() {
    const WAVES: usize = 4;
    /// As many as wait at the same time for the end of another tenant.
    const EACH: usize = 4;
    const TENANTS: usize = 8;
    let folder = tempfile::tempdir().unwrap();
    let most = TENANTS.to_string();
    let Some((mut backend, socket)) = backend_with(&folder, 4096, &["--tenants-per-user", &most])
    else {
        return;
    };
    // Closing a reading end waits for a write to the pipe.
    let (reader, writer) = std::io::pipe().unwrap();
    let again = format!("/proc/self/fd/{}", reader.as_raw_fd());
    let readers: Vec<OwnedFd> = (0..WAVES * EACH)
        .map(|_| File::open(&again).unwrap().into())
        .collect();
    let Some(write) = EndlessWrite::start(writer.into()) else {
        eprintln!("skipped: this process may not have the kernel wait for memory");
        return;
    };
    let tenants = [(); TENANTS].map(|()| {
        as_hostile(|| {
            let mut tenant = Tenant::join(&socket);
            tenant.attach(4, Attach::default()).unwrap();
            tenant
        })
    });
    let supervisor = backend.child.id().cast_signed();
    let mut readers = readers.into_iter();
    for _ in 0..WAVES {
        kill(supervisor, libc::SIGSTOP);
        wait_until(
            || is_stopped(supervisor),
            || "a supervisor that stands".into(),
        );
        let wave = readers.by_ref().take(EACH);
        let connections: Vec<UnixStream> = as_hostile(|| {
            wave.map(|reader| {
                let connection = UnixStream::connect(&socket).unwrap();
                send(&connection, reader);
                connection
            })
            .collect()
        });
        kill(supervisor, libc::SIGCONT);
        for mut connection in connections {
            let mut refusal = Vec::new();
            // Fails in the end, since the connection is closed with the descriptor unread.
            let _ = connection.read_to_end(&mut refusal);
            assert!(!refusal.is_empty());
        }
        serves(&mut backend, &socket);
    }
    // One exits, and one keeps the others.
    let refusers = backend.refusers();
    assert!(refusers.len() <= 2, "{} processes", refusers.len());
    drop(write);
    let ended = || refusers.iter().filter(|pid| !is_running(**pid)).count();
    wait_until(|| ended() >= 2, || "the end of what was kept".into());
    drop(tenants);
    serves(&mut backend, &socket);
}

/// Sends a descriptor and drops this process's copy.
fn send(socket: &UnixStream, descriptor: OwnedFd) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let message = Message::Doorbell.to_vec().unwrap();
    let sent = sendmsg(
        socket,
        &[IoSlice::new(&message)],
        &mut control,
        SendFlags::empty(),
    );
    assert_eq!(sent, Ok(message.len()));
}

#[test]
fn a_user_has_no_more_sessions_in_all_its_tenants_than_the_operator_says() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("tenants");
    let path = socket.to_str().unwrap();
    let arguments = ["--listen", path, "--sessions-per-user", "2"];
    let mut first = Backend::start(Workers::built(), &arguments);
    first.attach(64, Attach::default()).unwrap();
    let mut second = Tenant::join(&socket);
    second.attach(64, Attach::default()).unwrap();
    let guest = first.connect().open();
    let _other = second.connect().open();
    for tenant in [&mut *first, &mut second] {
        let mut control = tenant.connect();
        control.hello(PROTOCOL_HASH, "");
        let reply = control.receive();
        let Reply::Refused(_, reason) = &reply else {
            panic!("{reply:?}");
        };
        assert!(reason.contains("--sessions-per-user allows 2"), "{reason}");
    }
    // Segments that one tenant releases are available to another.
    drop(guest);
    first.report();
    let _third = second.connect().open();
}

#[test]
fn connections_without_a_window_share_a_budget_of_lines() {
    let folder = tempfile::tempdir().unwrap();
    let Some((backend, socket)) = backend(&folder, 4096) else {
        return;
    };
    for _ in 0..100 {
        let mut tenant = Tenant::join(&socket);
        tenant.send(&Message::Attached, Vec::new());
        assert!(!tenant.hears("Attached"));
    }
    let lines = backend.log();
    let lines = lines.lines().filter(|line| line.contains(" WARN ")).count();
    // Without a limit, two for each connection. With it, 64 at once, and one for each second of the
    // test.
    assert!(lines < 150, "{lines} lines");
    assert!(backend.log().contains("causes too many lines"));
}
