//! Descriptors that a tenant sends delay that tenant alone, however long closing them takes.

use std::fs::File;
use std::io::{IoSlice, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use wormhole_api::MemGetInfo;
use wormhole_backend_tests::attack::{EndlessWrite, lingering};
use wormhole_backend_tests::backend::{
    Backend, Tenant, Workers, is_stopped, kill, limit_descriptors, wait_until,
};
use wormhole_backend_tests::guest::{Control, Guest, Reply};
use wormhole_ring::bootstrap;
use wormhole_ring::control::{Attach, Fetch, Message, Observe, Share, Stream};

/// A supervisor with two tenants: the victim, and the hostile one, which connects to the socket.
struct Two {
    backend: Backend,
    hostile: Tenant,
    _folder: tempfile::TempDir,
}

/// Descriptors of a worker of the hostile tenant, and its guest.
struct Taken {
    guest: Guest,
    pid: i32,
    stream: Control,
    log: OwnedFd,
}

/// Limit on open files, with room for both tenants.
const FILES: u64 = 4096;

fn two() -> Two {
    let folder = tempfile::tempdir().unwrap();
    let socket: PathBuf = folder.path().join("tenants");
    let mut command = Command::new(env!("CARGO_BIN_EXE_supervisor"));
    // SAFETY: prlimit is safe between fork and exec.
    unsafe {
        command.pre_exec(|| limit_descriptors(0, FILES, FILES));
    }
    let listen = ["--listen", socket.to_str().unwrap()];
    let mut backend = Backend::start_as(command, Workers::built(), &listen);
    backend.attach(64, Attach::default()).unwrap();
    Two {
        backend,
        hostile: Tenant::join(&socket),
        _folder: folder,
    }
}

/// Sends a byte out of band, with a descriptor.
fn send_out_of_band(socket: &UnixStream, descriptor: &OwnedFd) {
    send(socket, &[0], descriptor, SendFlags::OOB);
}

/// Sends bytes with a descriptor.
fn send(socket: impl AsFd, bytes: &[u8], descriptor: &OwnedFd, flags: SendFlags) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags);
    assert_eq!(sent, Ok(bytes.len()));
}

impl Two {
    /// Sends a descriptor that takes an hour to close, and returns the peer. Its reader is
    /// stopped meanwhile, so that it has the last copy; otherwise closing this test's copy would
    /// take that hour.
    fn sends_a_lingering(&mut self, send: impl FnOnce(&mut Self, OwnedFd)) -> TcpStream {
        let (descriptor, far) = lingering();
        self.while_it_stands(|two| send(two, descriptor));
        far
    }

    /// Sends a lingering descriptor from the hostile tenant on a control stream, so that the
    /// supervisor closes it.
    fn attacks_by_a_control_stream(&mut self) -> TcpStream {
        let mut guest = self.hostile.connect();
        let far = self.sends_a_lingering(|_, descriptor| {
            guest
                .send_with(&Message::Doorbell, vec![descriptor])
                .unwrap();
        });
        assert_eq!(guest.receive(), Reply::Ended);
        far
    }

    /// Stops the processes that serve tenants, executes `work` and lets the processes go on.
    fn while_it_stands<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let processes = self.backend.tenant_processes();
        for process in &processes {
            kill(*process, libc::SIGSTOP);
            wait_until(|| is_stopped(*process), || "a process that stands".into());
        }
        let result = work(self);
        for process in processes {
            kill(process, libc::SIGCONT);
        }
        result
    }

    /// Opens a session of the hostile tenant, and copies its worker's log.
    fn takes_a_log(&mut self) -> Option<(Guest, File)> {
        let worker = self.takes_a_worker()?;
        Some((worker.guest, worker.log.into()))
    }

    /// Opens a session of the hostile tenant. Returns its worker's descriptors, as code in the worker has
    /// them; none unless this test runs as root.
    fn takes_a_worker(&mut self) -> Option<Taken> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can copy a descriptor of a worker");
            return None;
        }
        self.hostile.attach(64, Attach::default()).unwrap();
        let guest = self.hostile.connect().open();
        let has_session = |pid: &i32| {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"));
            maps.unwrap_or_default().contains("wormhole-session")
        };
        let workers = self.backend.workers();
        let mut serving = workers.into_iter().filter(has_session);
        let pid = serving.next().unwrap();
        assert_eq!(serving.next(), None, "another tenant's worker");
        let worker = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        // The numbers of a worker's stream and of its log.
        let [stream, log] =
            [3, 4].map(|number| pidfd_getfd(&worker, number, PidfdGetfdFlags::empty()).unwrap());
        Some(Taken {
            guest,
            pid,
            stream: Control::new(stream.into()),
            log,
        })
    }

    /// Checks that every request of the victim succeeds.
    fn serves_the_victim(&mut self) {
        let mut guest = self.backend.connect().open();
        assert_eq!(guest.call(&MemGetInfo {}).status, 0);
        let Reply::ArenaGrant(run) = guest.request_arena(1, 1) else {
            panic!("the victim is refused arena");
        };
        guest.control.send(&Message::ArenaReturn(run)).unwrap();
        drop(guest);
        assert_eq!(self.backend.report().end, "the guest process ended");
        let log = self.backend.log();
        assert!(!log.contains("Too many open files"), "{log}");
    }
}

#[test]
fn a_descriptor_on_a_control_stream_that_is_never_closed_holds_up_its_tenant_alone() {
    let mut two = two();
    two.hostile.attach(64, Attach::default()).unwrap();
    let _far = two.attacks_by_a_control_stream();
    two.serves_the_victim();
}

#[test]
fn a_descriptor_beside_a_byte_out_of_band_holds_up_its_tenant_alone() {
    let mut two = two();
    two.hostile.attach(64, Attach::default()).unwrap();
    let guest = two.hostile.connect();
    two.hostile.wait_until_read();
    let _far = two.sends_a_lingering(|_, descriptor| {
        send_out_of_band(&guest.socket, &descriptor);
    });
    two.serves_the_victim();
}

#[test]
fn a_worker_whose_write_to_its_log_does_not_end_holds_up_nobody() {
    let mut two = two();
    let Some((_guest, mut log)) = two.takes_a_log() else {
        return;
    };
    let write = two.while_it_stands(|_| {
        // The first line makes the supervisor read the log.
        log.write_all(b"a line\n").unwrap();
        EndlessWrite::start(log.into())
    });
    let Some(_write) = write else {
        eprintln!("skipped: this process may not have the kernel wait for memory");
        return;
    };
    two.backend.wait_for_log("a line");
    two.serves_the_victim();
}

#[test]
fn descriptors_on_a_workers_log_that_are_never_closed_hold_up_its_tenant_alone() {
    // A message without bytes looks like the log's end.
    let attacks: [&[&[u8]]; 3] = [&[b"x"], &[b""], &[b"", b"x"]];
    for messages in attacks {
        let mut two = two();
        let Some((_guest, mut log)) = two.takes_a_log() else {
            return;
        };
        let _far = two.sends_a_lingering(|_, descriptor| {
            let (last, others) = messages.split_last().unwrap();
            for message in others {
                rustix::net::send(&log, message, SendFlags::empty()).unwrap();
            }
            send(&log, last, &descriptor, SendFlags::empty());
        });
        two.serves_the_victim();
        // The supervisor reads the log no more.
        wait_until(|| log.write(b"x").is_err(), || "the log's end".into());
    }
}

#[test]
fn descriptors_on_a_workers_stream_that_are_never_closed_hold_up_its_tenant_alone() {
    let share = |descriptor| {
        Message::Share(Share {
            descriptor,
            ..Share::default()
        })
    };
    // Only the first of these takes the descriptor that comes with it.
    for message in [share(1), share(0), Message::Fetch(Fetch::default())] {
        let mut two = two();
        let Some(mut worker) = two.takes_a_worker() else {
            return;
        };
        // Opened first: later streams wait for the descriptors that are never closed.
        let mut other = two.hostile.connect();
        let _far = two.sends_a_lingering(|_, descriptor| {
            worker.stream.send_with(&message, vec![descriptor]).unwrap();
        });
        two.serves_the_victim();
        kill(worker.pid, libc::SIGKILL);
        two.backend.wait_for_log("was ended by signal 9");
        two.serves_the_victim();
        // The tenant's own process closes nothing that its worker has sent.
        let observe = Message::Observe(Observe {
            bootstrap_version: bootstrap::VERSION,
            device: 0,
        });
        other.send(&observe).unwrap();
        assert!(matches!(other.receive(), Reply::Observation(..)));
    }
}

#[test]
fn a_worker_that_sends_descriptors_on_its_log_is_killed() {
    let mut two = two();
    let Some((_guest, log)) = two.takes_a_log() else {
        return;
    };
    let (descriptor, _) = std::io::pipe().unwrap();
    send(&log, b"x", &descriptor.into(), SendFlags::empty());
    two.backend.wait_for_log("it sent descriptors on its log");
    two.backend.wait_for_log("was ended by signal 9");
    two.serves_the_victim();
}

#[test]
fn a_byte_out_of_band_is_received_whatever_options_the_guests_end_has() {
    let mut two = two();
    two.hostile.attach(64, Attach::default()).unwrap();
    let mut guest = two.hostile.connect();
    rustix::net::sockopt::set_socket_oobinline(&guest.socket, false).unwrap();
    let _far = two.sends_a_lingering(|_, descriptor| {
        send_out_of_band(&guest.socket, &descriptor);
    });
    // Guests send no descriptors, so a received one ends the stream.
    assert_eq!(guest.receive(), Reply::Ended);
    two.serves_the_victim();
}

#[test]
fn a_stream_that_a_launcher_brings_is_never_read() {
    let mut two = two();
    two.hostile.attach(64, Attach::default()).unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    let observe = Message::Observe(Observe {
        bootstrap_version: bootstrap::VERSION,
        device: 0,
    });
    Control::new(near.try_clone().unwrap())
        .send(&observe)
        .unwrap();
    let unread = rustix::io::ioctl_fionread(&far).unwrap();
    assert!(unread > 0);
    let brought = far.try_clone().unwrap().into();
    let mut guest = two.hostile.connect_with(vec![brought]);
    guest.send(&observe).unwrap();
    assert!(matches!(guest.receive(), Reply::Observation(..)));
    assert_eq!(rustix::io::ioctl_fionread(&far).unwrap(), unread);
    let _end = two.sends_a_lingering(|two, descriptor| {
        let request = Message::Stream(Stream { local: 1 });
        two.hostile.send(&request, vec![descriptor]);
    });
    two.serves_the_victim();
}

#[test]
fn a_window_that_is_none_and_never_closed_holds_up_its_tenant_alone() {
    let mut two = two();
    let _far = two.sends_a_lingering(|two, descriptor| {
        let attach = Message::Attach(Attach::default());
        two.hostile.send(&attach, vec![descriptor]);
    });
    let refused = two.hostile.attached().unwrap_err();
    assert!(refused.contains("anonymous file"), "{refused}");
    two.serves_the_victim();
}

#[test]
fn what_waits_in_the_streams_of_a_tenant_that_goes_holds_up_nobody() {
    let mut two = two();
    two.hostile.attach(64, Attach::default()).unwrap();
    let mut far = Vec::new();
    let guests: Vec<_> = (0..4).map(|_| two.hostile.connect()).collect();
    for mut guest in guests {
        far.push(two.sends_a_lingering(|_, descriptor| {
            guest
                .send_with(&Message::Doorbell, vec![descriptor])
                .unwrap();
        }));
    }
    // The descriptor stays in the stream's queue until the stream is closed.
    far.push(two.sends_a_lingering(|two, descriptor| {
        two.hostile.send(&Message::Doorbell, vec![descriptor]);
    }));
    two.backend.wait_for_log("launchers do not send");
    two.serves_the_victim();
}

/// Returns the largest number of descriptors that the supervisor or a tenant's process holds.
fn most_descriptors(backend: &Backend) -> usize {
    let processes = backend.tenant_processes().into_iter();
    let processes = processes.chain([backend.child.id().cast_signed()]);
    let counts = processes.map(|pid| {
        let folder = format!("/proc/{pid}/fd");
        // A process may have ended meanwhile.
        std::fs::read_dir(folder).map_or(0, Iterator::count)
    });
    counts.max().unwrap()
}

#[test]
fn descriptors_without_end_leave_others_theirs_while_none_is_closed() {
    let mut two = two();
    two.hostile.attach(64, Attach::default()).unwrap();
    // Opened first: later requests wait for the descriptors that are never closed.
    let mut guests: Vec<Control> = (0..70).map(|_| two.hostile.connect()).collect();
    let _far = two.attacks_by_a_control_stream();
    let (pipe, _writer) = std::io::pipe().unwrap();
    for guest in &mut guests {
        let descriptors = (0..28).map(|_| pipe.try_clone().unwrap().into());
        guest
            .send_with(&Message::Doorbell, descriptors.collect())
            .unwrap();
        let held = most_descriptors(&two.backend);
        assert!((held as u64) < FILES - 300, "{held} descriptors");
    }
    two.serves_the_victim();
}

#[test]
fn a_process_that_closed_one_tenants_descriptors_closes_anothers() {
    let mut two = two();
    two.hostile.attach(64, Attach::default()).unwrap();
    for _ in 0..20 {
        drop(two.hostile.connect());
        drop(two.backend.connect());
        two.hostile.wait_until_read();
        two.backend.wait_until_read();
    }
    let count = || most_descriptors(&two.backend);
    wait_until(|| count() < 32, || format!("{} descriptors", count()));
    let scrubbers = two.backend.scrubbers().len();
    assert!((1..=6).contains(&scrubbers), "{scrubbers} processes");
}
