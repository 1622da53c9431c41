//! The victim: a tenant whose guest calls, begins sessions and asks for arena.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use wormhole_api::{MemGetInfo, PROTOCOL_HASH};
use wormhole_backend_tests::backend::{Backend, LOG, Workers, program, wait_until};
use wormhole_backend_tests::guest::{Guest, Reply};
use wormhole_benches::samples::Quantiles;
use wormhole_ring::control::{Attach, Message};

use crate::attacks::{HOSTILE_USER, is_root};

/// Segments of the victim's window.
const SEGMENTS: u64 = 64;
/// Descriptors that the supervisor may have beside those it has alone: those of workers that start and end.
const PASSING: usize = 32;

/// Durations of the victim's operations, in nanoseconds.
#[derive(Debug, Default)]
pub struct Samples {
    doorbell: Vec<u64>,
    hello: Vec<u64>,
    arena: Vec<u64>,
}

/// The same in order: the answer to a doorbell, hello to grant, an arena request.
#[derive(Debug)]
pub struct Figures([Quantiles; 3]);

impl Samples {
    pub fn figures(&self) -> Figures {
        let of = |samples: &Vec<u64>| Quantiles::of(samples.clone(), 1.0, 1.0);
        Figures([of(&self.doorbell), of(&self.hello), of(&self.arena)])
    }
}

impl Figures {
    /// One line of the table, with ratios to `alone` where that is given.
    pub fn line(&self, alone: Option<&Self>) -> String {
        let cell = |index: usize| {
            let own = self.0[index];
            let times = format!("{:.0} / {:.0}", own.median_ns / 1e3, own.p99_ns / 1e3);
            let Some(alone) = alone.map(|alone| alone.0[index]) else {
                return format!("{times}, {} samples", own.count);
            };
            let (median, p99) = (own.median_ns / alone.median_ns, own.p99_ns / alone.p99_ns);
            format!("{times} ({median:.2} × / {p99:.2} ×)")
        };
        format!("{:32} {:32} {:32}", cell(0), cell(1), cell(2))
    }
}

/// A supervisor that listens, and its first tenant.
pub struct Victim {
    backend: Backend,
    guest: Guest,
    socket: PathBuf,
    /// Descriptors of the supervisor while it serves the victim alone.
    descriptors: usize,
    next_request: u32,
    _folder: tempfile::TempDir,
}

impl Victim {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder for the socket");
        let socket = folder.path().join("tenants");
        let mut command = Command::new(program("supervisor"));
        command.env(LOG, "warn");
        let path = socket.to_str().expect("a path of temporary files");
        let user = HOSTILE_USER.to_string();
        let mut arguments = vec!["--listen", path];
        if is_root() {
            let open = Permissions::from_mode(0o755);
            std::fs::set_permissions(folder.path(), open).expect("a folder of our own");
            arguments.extend(["--tenant-user", &user]);
        }
        let mut backend = Backend::start_as(command, Workers::built(), &arguments);
        backend
            .attach(SEGMENTS, Attach::default())
            .expect("the victim attaches");
        let guest = backend.connect().open();
        let mut victim = Self {
            backend,
            guest,
            socket,
            descriptors: 0,
            next_request: 0,
            _folder: folder,
        };
        // First touches of everything are not measured.
        victim.run(Duration::from_millis(500), &mut Samples::default());
        victim.descriptors = victim.held();
        victim
    }

    /// Where other tenants attach.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Does each operation in turn for a while.
    pub fn run(&mut self, slice: Duration, samples: &mut Samples) {
        let end = Instant::now() + slice;
        while Instant::now() < end {
            samples.doorbell.push(nanoseconds(self.doorbell()));
            samples.arena.push(nanoseconds(self.arena()));
            samples.hello.push(nanoseconds(self.hello()));
        }
    }

    /// From a request, which finds the worker parked and rings, to its answer.
    fn doorbell(&mut self) -> Duration {
        let producer = &self.guest.producer;
        wait_until(|| producer.consumer_parked(), || "a parked worker".into());
        let start = Instant::now();
        let answer = self.guest.call(&MemGetInfo {});
        let took = start.elapsed();
        assert_eq!(answer.status, 0, "the victim's call failed");
        took
    }

    /// From a request for a segment of arena to its grant.
    fn arena(&mut self) -> Duration {
        self.next_request += 1;
        let start = Instant::now();
        let reply = self.guest.request_arena(self.next_request, 1);
        let took = start.elapsed();
        let Reply::ArenaGrant(run) = reply else {
            panic!("the victim asks for arena and gets {reply:?}");
        };
        let returned = Message::ArenaReturn(run);
        self.guest.control.send(&returned).expect("the supervisor");
        took
    }

    /// From hello on a new control stream to the grant; then the session ends.
    fn hello(&mut self) -> Duration {
        let mut control = self.backend.connect();
        let start = Instant::now();
        control.hello(PROTOCOL_HASH, "");
        let reply = control.receive();
        let took = start.elapsed();
        assert!(
            matches!(reply, Reply::Grant(_)),
            "the victim says hello and gets {reply:?}"
        );
        drop(control);
        self.backend.report();
        took
    }

    /// Waits until the supervisor has forgotten the other tenants.
    pub fn wait_until_alone(&self) {
        let most = self.descriptors + PASSING;
        wait_until(
            || self.held() <= most,
            || format!("{} descriptors to become {most}", self.held()),
        );
    }

    /// Descriptors that the supervisor holds.
    fn held(&self) -> usize {
        let folder = format!("/proc/{}/fd", self.backend.child.id());
        std::fs::read_dir(folder).map_or(0, Iterator::count)
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
