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

/// One of the victim's operations, again and again: nanoseconds, and how often it was refused.
#[derive(Debug, Default)]
struct Operation {
    took: Vec<u64>,
    refused: usize,
}

impl Operation {
    fn add(&mut self, outcome: Result<Duration, Refused>) {
        match outcome {
            Ok(duration) => self.took.push(nanoseconds(duration)),
            Err(Refused) => self.refused += 1,
        }
    }
}

/// The victim did not get what it asked for.
struct Refused;

/// The victim's operations in order: the answer to a doorbell, hello to grant, an arena request.
#[derive(Debug, Default)]
pub struct Samples([Operation; 3]);

/// The same as quantiles.
#[derive(Debug)]
pub struct Figures([Quantiles; 3]);

impl Samples {
    pub fn figures(&self) -> Figures {
        Figures([0, 1, 2].map(|index| Quantiles::of(self.0[index].took.clone(), 1.0, 1.0)))
    }

    /// Which operations were refused and how often, if any was.
    pub fn refusals(&self) -> Option<String> {
        let names = ["doorbells", "hellos", "arena requests"];
        let refused = self.0.iter().zip(names).filter(|(one, _)| one.refused > 0);
        let refused: Vec<String> = refused
            .map(|(one, name)| {
                let all = one.took.len() + one.refused;
                format!("{} of {all} {name}", one.refused)
            })
            .collect();
        (!refused.is_empty()).then(|| refused.join(", "))
    }
}

impl Figures {
    /// One line of the table. Where others are given: p50 and p99 against alone, and p99 against the control.
    pub fn line(&self, alone: Option<&Self>, control: Option<&Self>) -> String {
        let cell = |index: usize| {
            let own = self.0[index];
            let times = format!("{:.0} / {:.0}", own.median_ns / 1e3, own.p99_ns / 1e3);
            let Some(alone) = alone.map(|alone| alone.0[index]) else {
                return format!("{times}, {} samples", own.count);
            };
            let (median, p99) = (own.median_ns / alone.median_ns, own.p99_ns / alone.p99_ns);
            let to_control = control.map_or_else(String::new, |control| {
                format!(", {:.2}", own.p99_ns / control.0[index].p99_ns)
            });
            format!("{times} ({median:.2}, {p99:.2}{to_control})")
        };
        format!("{:36} {:36} {:36}", cell(0), cell(1), cell(2))
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
            samples.0[0].add(Ok(self.doorbell()));
            samples.0[1].add(self.hello());
            samples.0[2].add(self.arena());
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
    fn arena(&mut self) -> Result<Duration, Refused> {
        self.next_request += 1;
        let start = Instant::now();
        let reply = self.guest.request_arena(self.next_request, 1);
        let took = start.elapsed();
        match reply {
            Reply::ArenaGrant(run) => {
                let returned = Message::ArenaReturn(run);
                self.guest.control.send(&returned).expect("the supervisor");
                Ok(took)
            }
            Reply::ArenaDenied(..) => Err(Refused),
            other => panic!("the victim asks for arena and gets {other:?}"),
        }
    }

    /// From hello on a new control stream to the grant; then the session ends.
    fn hello(&mut self) -> Result<Duration, Refused> {
        let mut control = self.backend.connect();
        let start = Instant::now();
        control.hello(PROTOCOL_HASH, "");
        let reply = control.receive();
        let took = start.elapsed();
        match reply {
            Reply::Grant(_) => {
                drop(control);
                self.backend.report();
                Ok(took)
            }
            // Or the stream is closed without a word.
            Reply::Refused(..) | Reply::Ended => Err(Refused),
            other => panic!("the victim says hello and gets {other:?}"),
        }
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
