//! Code in a tenant's process can write to its log socket, and cannot delay or silence other tenants by it.

use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use wormhole_api::MemGetInfo;
use wormhole_backend_tests::attack::lingering;
use wormhole_backend_tests::backend::{
    Backend, Tenant, Workers, is_running, is_stopped, kill, wait_until,
};
use wormhole_ring::control::{Attach, Message};

/// Message that launchers do not send, for which the tenant's process logs a line.
const WRONG: Message<'_> = Message::Ready {
    protocol_hash: 0,
    device: "",
};

/// A supervisor with two tenants of one user. The process of the second was taken over.
struct Taken {
    backend: Backend,
    _hostile: Tenant,
    process: i32,
    /// The process's end of its log.
    log: UnixStream,
    _folder: tempfile::TempDir,
}

impl Taken {
    /// Returns none unless this test runs as root.
    fn new() -> Option<Self> {
        /// Number of the log in a tenant's process.
        const LOG: i32 = 2;
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can copy a descriptor of a tenant's process");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let socket: PathBuf = folder.path().join("tenants");
        let listen = ["--listen", socket.to_str().unwrap()];
        let mut backend = Backend::start(Workers::built(), &listen);
        backend.attach(64, Attach::default()).unwrap();
        wait_until(
            || backend.tenant_processes().len() == 2,
            || "a process for the second tenant".into(),
        );
        let process = *backend.tenant_processes().last().unwrap();
        let mut hostile = Tenant::join(&socket);
        hostile.attach(64, Attach::default()).unwrap();
        let taken = pidfd_open(Pid::from_raw(process).unwrap(), PidfdFlags::empty()).unwrap();
        let log = pidfd_getfd(taken, LOG, PidfdGetfdFlags::empty()).unwrap();
        Some(Self {
            backend,
            _hostile: hostile,
            process,
            log: log.into(),
            _folder: folder,
        })
    }

    /// Sends a byte out of band, with a descriptor if there is one.
    fn send_out_of_band(&self, byte: u8, descriptor: Option<&OwnedFd>) {
        let files: Vec<_> = descriptor.into_iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(&files)));
        let bytes = [byte];
        sendmsg(
            &self.log,
            &[IoSlice::new(&bytes)],
            &mut control,
            SendFlags::OOB,
        )
        .unwrap();
    }

    fn end_process(&self) {
        kill(self.process, libc::SIGKILL);
        wait_until(|| !is_running(self.process), || "its end".into());
    }

    /// Checks that the other tenant is served, and its process's lines are logged.
    fn serves_the_other(&mut self) {
        let mut guest = self.backend.connect().open();
        assert_eq!(guest.call(&MemGetInfo {}).status, 0);
        drop(guest);
        assert_eq!(self.backend.report().end, "the guest process ended");
        self.backend.send(&WRONG, Vec::new());
        self.backend.wait_for_log("which launchers do not send");
    }
}

#[test]
fn a_process_that_writes_without_end_leaves_the_users_other_tenants_their_lines() {
    const LINES: usize = 20_000;
    let Some(mut taken) = Taken::new() else {
        return;
    };
    let line = format!(" INFO of the hostile process {:180}.\n", "");
    let logged = |taken: &Taken| {
        taken
            .backend
            .log()
            .matches("of the hostile process")
            .count()
    };
    for written in 1..=LINES {
        taken.log.write_all(line.as_bytes()).unwrap();
        // The supervisor's own log loses lines that come faster than this test reads them. Later ones are left out.
        if written <= 2000 && written % 100 == 0 {
            wait_until(|| logged(&taken) == written, || "lines in the log".into());
        }
    }
    taken.end_process();
    taken.serves_the_other();
    // Each line was logged or is counted.
    let counts = || {
        let log = taken.backend.log();
        let left_out = log.lines().filter_map(|line| {
            let (count, _) = line.split_once(" lines of the process of tenant ")?;
            count.split_whitespace().last()?.parse::<usize>().ok()
        });
        (logged(&taken), left_out.sum::<usize>())
    };
    wait_until(
        || counts().0 + counts().1 == LINES,
        || format!("{:?} of {LINES} lines", counts()),
    );
    assert!(counts().1 > LINES / 2, "{:?}", counts());
}

#[test]
fn a_byte_out_of_band_is_a_byte_of_the_line() {
    let Some(mut taken) = Taken::new() else {
        return;
    };
    taken.log.write_all(b" INFO said out of ban").unwrap();
    taken.send_out_of_band(b'd', None);
    taken.log.write_all(b" and after\n").unwrap();
    taken.backend.wait_for_log("said out of band and after");
    taken.serves_the_other();
}

#[test]
fn descriptors_on_the_log_of_a_process_that_are_never_closed_hold_nobody_up() {
    for is_out_of_band in [false, true] {
        let Some(mut taken) = Taken::new() else {
            return;
        };
        let (descriptor, _far) = lingering();
        // The supervisor reads nothing until the last copy is in the log.
        let supervisor = taken.backend.child.id().cast_signed();
        kill(supervisor, libc::SIGSTOP);
        wait_until(
            || is_stopped(supervisor),
            || "a supervisor that stands".into(),
        );
        if is_out_of_band {
            taken.send_out_of_band(0, Some(&descriptor));
        } else {
            let files = [descriptor.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
            let bytes = [IoSlice::new(b"x")];
            sendmsg(&taken.log, &bytes, &mut control, SendFlags::empty()).unwrap();
        }
        drop(descriptor);
        kill(supervisor, libc::SIGCONT);
        taken.serves_the_other();
        taken.end_process();
        drop(std::mem::replace(
            &mut taken.log,
            UnixStream::pair().unwrap().0,
        ));
        taken.backend.wait_for_log("was ended by signal 9");
    }
}
