//! Implements the victim: a tenant whose guest makes calls, starts sessions and requests arena segments.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use wormhole_api::{MemGetInfo, PROTOCOL_HASH};
use wormhole_backend_tests::backend::{Backend, LOG, Workers, program, wait_until};
use wormhole_backend_tests::guest::{Guest, Reply};
use wormhole_benches::samples::nanoseconds;
use wormhole_ring::control::{Attach, Message};

use crate::attacks::{HOSTILE_USER, is_root};

/// Number of segments of the victim's window.
const SEGMENTS: u64 = 64;
/// Maximum number of the supervisor's additional descriptors when it serves the victim alone again. Workers that start
/// and end use them.
const PASSING: usize = 32;

/// Durations in nanoseconds of one of the victim's operations, and the number of its refusals.
#[derive(Debug, Default)]
struct Operation {
    took: Vec<u64>,
    refused: usize,
}

impl Operation {
    fn add(&mut self, outcome: Result<Duration, Refused>) {
        match outcome {
            Ok(duration) => self.took.push(whole_nanoseconds(duration)),
            Err(Refused) => self.refused += 1,
        }
    }
}

/// The supervisor refused a request of the victim.
struct Refused;

/// Samples of the victim's operations, in order: doorbell to response, hello to grant, arena request.
#[derive(Debug, Default)]
pub struct Samples([Operation; 3]);

/// Names of the operations, in their order.
pub const OPERATIONS: [&str; 3] = ["doorbell to answer", "hello to grant", "arena request"];

impl Samples {
    /// Returns the samples of one operation, in nanoseconds.
    pub fn of(&self, operation: usize) -> Vec<f64> {
        nanoseconds(&self.0[operation].took, 1.0, 1.0)
    }

    /// Returns the refused operations and their numbers; `None` if none was refused.
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

/// A listening supervisor and its first tenant.
pub struct Victim {
    backend: Backend,
    guest: Guest,
    socket: PathBuf,
    /// Number of the supervisor's descriptors while it serves the victim alone.
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
        // Warms up: first accesses are not measured.
        victim.run(Duration::from_millis(500), &mut Samples::default());
        victim.descriptors = victim.held();
        victim
    }

    /// Returns the socket to which other tenants attach.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Runs the operations in turn for the duration of a slice.
    pub fn run(&mut self, slice: Duration, samples: &mut Samples) {
        let end = Instant::now() + slice;
        while Instant::now() < end {
            samples.0[0].add(Ok(self.doorbell()));
            samples.0[1].add(self.hello());
            samples.0[2].add(self.arena());
        }
    }

    /// Measures the time from a request, which rings the parked worker's doorbell, to the response.
    fn doorbell(&mut self) -> Duration {
        let producer = &self.guest.producer;
        wait_until(|| producer.consumer_parked(), || "a parked worker".into());
        let start = Instant::now();
        let answer = self.guest.call(&MemGetInfo {});
        let took = start.elapsed();
        assert_eq!(answer.status, 0, "the victim's call failed");
        took
    }

    /// Measures the time from a request for an arena segment to its grant.
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

    /// Measures the time from hello on a new control stream to the grant, then ends the session.
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
            // The supervisor may also close the stream without a reply.
            Reply::Refused(..) | Reply::Ended => Err(Refused),
            other => panic!("the victim says hello and gets {other:?}"),
        }
    }

    /// Waits until the supervisor has closed the other tenants' descriptors.
    pub fn wait_until_alone(&self) {
        let most = self.descriptors + PASSING;
        wait_until(
            || self.held() <= most,
            || format!("{} descriptors to become {most}", self.held()),
        );
    }

    /// Returns the number of the supervisor's open descriptors.
    fn held(&self) -> usize {
        let folder = format!("/proc/{}/fd", self.backend.child.id());
        std::fs::read_dir(folder).map_or(0, Iterator::count)
    }
}

fn whole_nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
