//! Implements the hostile tenants, each a process that attacks until it is killed, and the control: a process that
//! occupies the processors and does not use the supervisor.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::Uid;
use wormhole_api::{CuResult, EventDestroy, ShareEvent, SharedEventCreate};
use wormhole_backend_tests::attack::lingering;
use wormhole_backend_tests::backend::Tenant;
use wormhole_backend_tests::guest::{Control, Reply};
use wormhole_ring::bootstrap;
use wormhole_ring::control::{ArenaRequest, Attach, Message, Observe};

/// User id of hostile tenants if root runs the benchmark: `nobody` on Debian.
pub const HOSTILE_USER: u32 = 65534;
/// Number of segments of a hostile tenant's window.
const SEGMENTS: u64 = 64;
/// Time that it takes to close a lingering socket.
const LINGERS: Duration = Duration::from_millis(50);
/// Number of sessions that ring. Each writes [`RINGS`] doorbells at once.
const RINGING: usize = 4;
const RINGS: usize = 300;
/// Number of concurrent hellos.
const HELLOS: usize = 8;
/// Number of arena requests of a session, written without waiting for responses.
const ARENA_REQUESTS: u32 = 20_000;
/// Number of segments of the window of a hostile tenant whose requests cannot be granted: 1 TiB.
const LARGE_SEGMENTS: u64 = 1 << 19;
/// Bytes of each memory file sent out of band.
const FILE: usize = 64 << 20;
/// Number of events shared at a time, each by a request with its own answer slot.
const SHARES: u16 = 64;
/// Number of streams that ask for figures.
const OBSERVERS: usize = 16;
/// Maximum number of connections at a time. Each new one replaces the oldest.
const CONNECTIONS: usize = 256;
/// Time between attempts of a hostile tenant to attach.
const BETWEEN_CONNECTIONS: Duration = Duration::from_millis(10);
/// Time within which the supervisor admits a hostile tenant.
const ADMISSION: Duration = Duration::from_secs(60);

/// Kind of attack.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Attack {
    Processors,
    Descriptors,
    Doorbells,
    Hellos,
    Arena,
    Ungrantable,
    OutOfBand,
    Shares,
    Connections,
    Observers,
    Log,
}

/// Error from running an attack.
#[derive(Debug, thiserror::Error)]
pub enum Lost {
    #[error("the attack \"{attack}\" cannot be started")]
    Start {
        attack: &'static str,
        #[source]
        cause: io::Error,
    },
    #[error(
        "the attack \"{attack}\" ended by itself with {status}: nothing was measured beside it"
    )]
    Ended {
        attack: &'static str,
        status: ExitStatus,
    },
    #[error("the victim was refused {0}")]
    Refused(String),
}

/// Returns whether the benchmark can switch to another user.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Counts an attack's steps and periodically writes the count to the parent, one line each.
struct Steps {
    count: u64,
    told: Option<Instant>,
}

impl Steps {
    const BETWEEN: Duration = Duration::from_millis(50);

    fn add(&mut self, steps: u64) {
        self.count += steps;
        if self.told.is_none_or(|told| told.elapsed() > Self::BETWEEN) {
            self.told = Some(Instant::now());
            let mut output = io::stdout().lock();
            let told = writeln!(output, "{}", self.count).and_then(|()| output.flush());
            told.expect("the parent");
        }
    }
}

impl Attack {
    /// All attacks, the control first.
    pub const ALL: [Self; 11] = [
        Self::Processors,
        Self::Descriptors,
        Self::Doorbells,
        Self::Hellos,
        Self::Arena,
        Self::Ungrantable,
        Self::OutOfBand,
        Self::Shares,
        Self::Connections,
        Self::Observers,
        Self::Log,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Processors => "control: busy processors",
            Self::Descriptors => "slow closes",
            Self::Doorbells => "doorbell flood",
            Self::Hellos => "hello flood",
            Self::Arena => "20,000 arena requests",
            Self::Ungrantable => "arena beyond 1 TiB",
            Self::OutOfBand => "64 MiB out of band",
            Self::Shares => "share flood",
            Self::Connections => "unattached connections",
            Self::Observers => "observer flood",
            Self::Log => "log flood",
        }
    }

    /// Returns the number of segments of the hostile tenant's window.
    fn segments(self) -> u64 {
        match self {
            Self::Ungrantable => LARGE_SEGMENTS,
            _ => SEGMENTS,
        }
    }

    /// Attacks until the process ends, as [`HOSTILE_USER`] if root runs it.
    pub fn play(self, socket: &Path) -> ! {
        if is_root() {
            rustix::thread::set_thread_uid(Uid::from_raw(HOSTILE_USER)).expect("another user");
        }
        let mut steps = Steps {
            count: 0,
            told: None,
        };
        match self {
            Self::Processors => processors(&mut steps),
            Self::Connections => connections(socket, &mut steps),
            _ => {}
        }
        let mut tenant = admitted(socket, self.segments());
        match self {
            Self::Descriptors => descriptors(&mut tenant, &mut steps),
            Self::Doorbells => doorbells(&mut tenant, &mut steps),
            Self::Hellos => hellos(&mut tenant, &mut steps),
            Self::Arena => arena(&mut tenant, &mut steps),
            Self::Ungrantable => ungrantable(&mut tenant, &mut steps),
            Self::OutOfBand => out_of_band(&mut tenant, &mut steps),
            Self::Shares => shares(&mut tenant, &mut steps),
            Self::Observers => observers(&mut tenant, &mut steps),
            Self::Log => log(&mut tenant, &mut steps),
            Self::Processors | Self::Connections => unreachable!("it has no tenant"),
        }
    }
}

/// Attaches a hostile tenant. The supervisor may still count connections of the attack before.
fn admitted(socket: &Path, segments: u64) -> Tenant {
    let end = Instant::now() + ADMISSION;
    loop {
        let mut tenant = Tenant::join(socket);
        match tenant.attach(segments, Attach::default()) {
            Ok(()) => return tenant,
            Err(reason) => assert!(Instant::now() < end, "no hostile tenant: {reason}"),
        }
        std::thread::sleep(BETWEEN_CONNECTIONS);
    }
}

/// Spins on every processor.
fn processors(steps: &mut Steps) -> ! {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    for _ in 1..threads {
        std::thread::spawn(|| {
            loop {
                std::hint::spin_loop();
            }
        });
    }
    loop {
        for _ in 0..100_000 {
            std::hint::spin_loop();
        }
        steps.add(1);
    }
}

/// Sends sockets whose close takes [`LINGERS`], with messages on control streams.
fn descriptors(tenant: &mut Tenant, steps: &mut Steps) -> ! {
    let slow = || {
        let (descriptor, end) = lingering();
        std::thread::spawn(move || {
            std::thread::sleep(LINGERS);
            drop(end);
        });
        let sent = descriptor.try_clone().expect("a descriptor");
        close_aside(descriptor);
        sent
    };
    loop {
        let mut guest = tenant.connect();
        // The supervisor may have closed the stream.
        let _ = guest.send_with(&Message::Doorbell, vec![slow()]);
        steps.add(1);
    }
}

/// Closes the sender's copy of a lingering socket on a thread. If the supervisor has closed its copy already, this is
/// the
/// last one, and the close blocks until the other end is closed.
fn close_aside(descriptor: OwnedFd) {
    std::thread::spawn(|| drop(descriptor));
}

/// Writes doorbells as fast as the streams accept them.
fn doorbells(tenant: &mut Tenant, steps: &mut Steps) -> ! {
    let mut guests: Vec<_> = (0..RINGING).map(|_| tenant.connect().open()).collect();
    let frames = Message::Doorbell.to_vec().expect("a frame").repeat(RINGS);
    loop {
        for guest in &mut guests {
            guest.control.send_raw(&frames);
            steps.add(RINGS as u64);
        }
    }
}

/// Starts sessions and drops each when it is granted or refused.
fn hellos(tenant: &mut Tenant, steps: &mut Steps) -> ! {
    loop {
        let mut guests: Vec<Control> = (0..HELLOS).map(|_| tenant.connect()).collect();
        for guest in &mut guests {
            guest.hello(wormhole_api::PROTOCOL_HASH, "");
        }
        for guest in &mut guests {
            guest.receive();
            steps.add(1);
        }
        drop(guests);
        // The supervisor disconnects a launcher that does not read its reports.
        while tenant.ready_report().is_some() {}
    }
}

/// Requests more than the whole arena, repeatedly.
fn arena(tenant: &mut Tenant, steps: &mut Steps) -> ! {
    let request = |id| Message::ArenaRequest(ArenaRequest { id, segments: 1 });
    let frames: Vec<u8> = (0..ARENA_REQUESTS)
        .flat_map(|id| request(id).to_vec().expect("a frame"))
        .collect();
    loop {
        let mut guest = tenant.connect().open();
        let mut socket = guest.control.socket.try_clone().expect("a descriptor");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The supervisor may close the stream.
                let _ = socket.write_all(&frames);
            });
            for _ in 0..ARENA_REQUESTS {
                if guest.control.receive() == Reply::Ended {
                    break;
                }
                steps.add(1);
            }
        });
        drop(guest);
        // The session holds its arena segments until the report.
        tenant.report();
    }
}

/// Requests one segment more than are free in a window of 1 TiB, repeatedly.
fn ungrantable(tenant: &mut Tenant, steps: &mut Steps) -> ! {
    let mut guest = tenant.connect();
    guest.hello(wormhole_api::PROTOCOL_HASH, "");
    assert!(matches!(guest.receive(), Reply::Grant(_)), "no session");
    let segments = u32::try_from(LARGE_SEGMENTS - 2).expect("small");
    let request = Message::ArenaRequest(ArenaRequest { id: 1, segments });
    let frames = request.to_vec().expect("a frame").repeat(RINGS);
    loop {
        guest.send_raw(&frames);
        for _ in 0..RINGS {
            assert!(matches!(guest.receive(), Reply::ArenaDenied(..)));
        }
        steps.add(RINGS as u64);
    }
}

/// Sends bytes out of band on control streams, each with the last descriptor of a file in memory.
fn out_of_band(tenant: &mut Tenant, steps: &mut Steps) -> ! {
    loop {
        let guest = tenant.connect();
        // Has no effect on the supervisor's end.
        let _ = rustix::net::sockopt::set_socket_oobinline(&guest.socket, false);
        let file = memfd_create("hostile", MemfdFlags::CLOEXEC).expect("a file");
        ftruncate(&file, FILE as u64).expect("room");
        let file = File::from(file);
        file.write_all_at(&vec![1; FILE], 0).expect("memory");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [file.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        // The supervisor may have closed the stream.
        let _ = sendmsg(
            &guest.socket,
            &[IoSlice::new(&[0])],
            &mut control,
            SendFlags::OOB,
        );
        steps.add(1);
    }
}

/// Shares and destroys events, many at a time.
fn shares(tenant: &mut Tenant, steps: &mut Steps) -> ! {
    let mut guest = tenant.connect().open();
    loop {
        let events: Vec<_> = (0..SHARES).map(|_| guest.mint()).collect();
        let mut underway = Vec::with_capacity(events.len());
        for (slot, new) in (0..).zip(&events) {
            let created = guest.start(slot, &SharedEventCreate { new: *new });
            underway.push(created);
        }
        for (slot, sequence) in (0..).zip(underway.drain(..)) {
            let answer = guest.wait(slot, sequence).expect("the hostile session");
            assert_eq!(answer.status, 0, "no event");
        }
        for (slot, event) in (0..).zip(&events) {
            underway.push(guest.start(slot, &ShareEvent { event: *event }));
        }
        for (slot, sequence) in (0..).zip(underway) {
            let answer = guest.wait(slot, sequence).expect("the hostile session");
            // The tenant's limit refuses shares while earlier events are still being destroyed.
            let full = CuResult::OUT_OF_MEMORY.0;
            assert!([0, full].contains(&answer.status), "no share");
            steps.add(u64::from(answer.status == 0));
        }
        for event in events {
            guest.record(&EventDestroy { event });
        }
    }
}

/// Asks for figures of the device on many streams, on each as soon as it has an answer.
fn observers(tenant: &mut Tenant, steps: &mut Steps) -> ! {
    let mut streams: Vec<Control> = (0..OBSERVERS).map(|_| tenant.connect()).collect();
    let observe = Message::Observe(Observe {
        bootstrap_version: bootstrap::VERSION,
        device: 0,
    });
    loop {
        for stream in &mut streams {
            stream.send(&observe).expect("the supervisor");
        }
        for stream in &mut streams {
            let reply = stream.receive();
            assert!(matches!(reply, Reply::Observation(..)), "no figures");
            steps.add(1);
        }
    }
}

/// Breaks the protocol on one stream after the other. The supervisor has a line to log about each.
fn log(tenant: &mut Tenant, steps: &mut Steps) -> ! {
    loop {
        let mut guest = tenant.connect();
        guest.send_raw(&[0xff; 64]);
        assert_eq!(guest.receive(), Reply::Ended, "it breaks the protocol");
        steps.add(1);
    }
}

/// Connects without sending anything.
fn connections(socket: &Path, steps: &mut Steps) -> ! {
    let mut connections = VecDeque::new();
    loop {
        connections.push_back(UnixStream::connect(socket).expect("the supervisor listens"));
        steps.add(1);
        if connections.len() > CONNECTIONS {
            connections.pop_front();
        }
    }
}

/// A process that runs an attack.
pub struct Attacker {
    attack: &'static str,
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Attacker {
    pub fn start(attack: Attack, socket: &Path) -> Result<Self, Lost> {
        let name = attack.name();
        let failed = |cause| Lost::Start {
            attack: name,
            cause,
        };
        let value = attack.to_possible_value();
        let value = value.as_ref().map_or("", |value| value.get_name());
        let mut child = Command::new(std::env::current_exe().map_err(failed)?)
            .args(["--attack", value, "--socket"])
            .arg(socket)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let output = child.stdout.take();
        let output = output.ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        Ok(Self {
            attack: name,
            child,
            output: BufReader::new(output),
        })
    }

    /// Waits for the attack's first step.
    pub fn wait_until_under_way(&mut self) -> Result<(), Lost> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(count) if count > 0 => Ok(()),
            _ => Err(self.ended()),
        }
    }

    fn ended(&mut self) -> Lost {
        match self.child.wait() {
            Ok(status) => Lost::Ended {
                attack: self.attack,
                status,
            },
            Err(cause) => Lost::Start {
                attack: self.attack,
                cause,
            },
        }
    }

    /// Kills the process and returns its number of steps. Returns an error if it ended before.
    pub fn end(mut self) -> Result<u64, Lost> {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return Err(self.ended());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        let lines = (&mut self.output).lines().map_while(Result::ok);
        Ok(lines.last().and_then(|line| line.parse().ok()).unwrap_or(0))
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
