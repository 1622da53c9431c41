//! Worker executable controlled by a test. The test executable itself plays both parts.

use std::fs::File;
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use wormhole_api::PROTOCOL_HASH;
use wormhole_link::channel::{self, Incoming, Outgoing};
use wormhole_link::device::DeviceChoice;
use wormhole_ring::control::{ArenaRun, Fetch, Message};

/// Kind of events among the kinds of shared objects.
const EVENT: u32 = 2;

/// Runs the executable: as `worker` if a supervisor started it, otherwise those of `tests` whose
/// names contain an argument.
pub fn main(tests: &[(&str, fn())], worker: fn(Stub)) {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("--protocol") => println!("{:016x}", protocol_of(Path::new(&arguments[0]))),
        // A supervisor in this executable probes with this argument whether processes can be
        // confined.
        Some("--version") => {}
        Some("--device") => {
            let device: DeviceChoice = arguments[2].parse().unwrap();
            wormhole_worker::confine(device.kind()).unwrap();
            worker(Stub::inherited(protocol_of(Path::new(&arguments[0]))));
        }
        // Argument of `cargo test` that lists the tests.
        Some("--list") => {
            for (name, _) in tests {
                println!("{name}: test");
            }
        }
        _ => run(tests, &arguments[1..]),
    }
}

fn run(tests: &[(&str, fn())], arguments: &[String]) {
    let names: Vec<&String> = arguments
        .iter()
        .filter(|argument| !argument.starts_with('-'))
        .collect();
    let wanted = |name: &str| names.is_empty() || names.iter().any(|part| name.contains(*part));
    let (chosen, left): (Vec<_>, Vec<_>) = tests.iter().partition(|(name, _)| wanted(name));
    println!("\nrunning {} tests", chosen.len());
    for (name, test) in &chosen {
        test();
        println!("test {name} ... ok");
    }
    println!(
        "\ntest result: ok. {} passed; 0 failed; 0 ignored; 0 measured; {} filtered out\n",
        chosen.len(),
        left.len()
    );
}

/// Returns the protocol hash of an installed copy. Each copy has another one.
fn protocol_of(program: &Path) -> u64 {
    let name = program.file_name().unwrap().to_str().unwrap();
    let index = name.strip_prefix("wormhole-worker-").unwrap_or("0");
    protocol(index.parse().unwrap())
}

/// Returns the protocol hash of the copy with this number.
pub fn protocol(index: u64) -> u64 {
    PROTOCOL_HASH.wrapping_add(index)
}

/// Descriptors that come with a session.
pub struct Given {
    pub window: OwnedFd,
    pub counters: OwnedFd,
    pub neighbours: OwnedFd,
}

/// State of a stub worker.
pub struct Stub {
    pub protocol: u64,
    socket: OwnedFd,
    pub log: File,
    incoming: Incoming,
    outgoing: Outgoing,
}

impl Stub {
    fn inherited(protocol: u64) -> Self {
        // SAFETY: the supervisor put the stream and the log at these numbers, and nothing else here
        // uses them.
        let (socket, log) = unsafe { (OwnedFd::from_raw_fd(3), OwnedFd::from_raw_fd(4)) };
        Self {
            protocol,
            socket,
            log: log.into(),
            incoming: Incoming::new(true),
            outgoing: Outgoing::default(),
        }
    }

    /// Returns the stream, for a real worker's session loop.
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }

    pub fn send(&mut self, message: &Message<'_>, descriptors: Vec<OwnedFd>) {
        self.outgoing
            .send(&self.socket, message, descriptors)
            .unwrap();
    }

    /// Reports ready, waits for the session and acknowledges it.
    pub fn take_session(&mut self) -> Given {
        let ready = Message::Ready {
            protocol_hash: self.protocol,
            device: "stub",
        };
        self.send(&ready, Vec::new());
        loop {
            channel::wait_readable(&self.socket).unwrap();
            self.incoming.fill(&self.socket).unwrap();
            match self.incoming.take() {
                Ok(Some(Message::Assign(_))) => break,
                Ok(_) => {}
                // The supervisor is gone.
                Err(_) => std::process::exit(0),
            }
        }
        let mut descriptor = || self.incoming.descriptor().unwrap();
        let given = Given {
            window: descriptor(),
            counters: descriptor(),
            neighbours: descriptor(),
        };
        self.send(&Message::Assigned, Vec::new());
        given
    }

    /// Takes the socket for files that came with the session, if one did.
    pub fn take_files(&mut self) -> Option<UnixDatagram> {
        self.incoming.descriptor().map(UnixDatagram::from)
    }

    /// Reads messages until `found` accepts one. Closes descriptors that come with them.
    pub fn wait_for<T>(&mut self, mut found: impl FnMut(&Message<'_>) -> Option<T>) -> T {
        loop {
            match self.incoming.take() {
                Ok(Some(message)) => {
                    if let Some(found) = found(&message) {
                        return found;
                    }
                }
                Ok(None) => {
                    while self.incoming.descriptor().is_some() {}
                    channel::wait_readable(&self.socket).unwrap();
                    self.incoming.fill(&self.socket).unwrap();
                }
                // The supervisor is gone.
                Err(_) => std::process::exit(0),
            }
        }
    }

    /// Returns a run that the supervisor asks the worker to release, if there is one.
    pub fn take_removal(&mut self) -> Option<ArenaRun> {
        self.incoming.fill(&self.socket).unwrap();
        match self.incoming.take() {
            Ok(Some(Message::ArenaRemove(run))) => Some(run),
            Ok(_) => None,
            // The supervisor is gone.
            Err(_) => std::process::exit(0),
        }
    }

    /// Fetches the file with the words of the event that this token names.
    pub fn fetch_event(&mut self, token: u128) -> OwnedFd {
        #[expect(clippy::cast_possible_truncation, reason = "its two halves")]
        let token = [token as u64, (token >> 64) as u64];
        let fetch = Fetch {
            id: 1,
            what: EVENT,
            token,
        };
        self.send(&Message::Fetch(fetch), Vec::new());
        loop {
            channel::wait_readable(&self.socket).unwrap();
            self.incoming.fill(&self.socket).unwrap();
            match self.incoming.take() {
                Ok(Some(Message::Fetched(fetched))) => {
                    assert_eq!((fetched.id, fetched.result), (1, 0));
                    return self.incoming.descriptor().unwrap();
                }
                Ok(_) => {}
                Err(_) => std::process::exit(0),
            }
        }
    }

    pub fn say(&mut self, line: &str) {
        writeln!(self.log, "{line}").unwrap();
    }
}

/// Sleeps for ever, even after the stream ends.
pub fn idle() -> ! {
    loop {
        std::thread::park();
    }
}
