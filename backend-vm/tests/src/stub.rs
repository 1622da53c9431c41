//! A worker executable that does what a test wants: the test's own, which so plays both parts.

use std::fs::File;
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use wormhole_api::PROTOCOL_HASH;
use wormhole_link::channel::{self, Incoming, Outgoing};
use wormhole_ring::control::{ArenaRun, Fetch, Message};

/// The number of events among the kinds of what workers share.
const EVENT: u32 = 2;

/// What the executable does: started by a supervisor it is `worker`, otherwise it runs those of `tests` whose
/// names hold an argument.
pub fn main(tests: &[(&str, fn())], worker: fn(Stub)) {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("--protocol") => println!("{:016x}", protocol_of(Path::new(&arguments[0]))),
        // A supervisor that runs in this executable sees so whether processes can be confined.
        Some("--version") => {}
        Some("--device") => worker(Stub::inherited(protocol_of(Path::new(&arguments[0])))),
        // What `cargo test` may ask of a test executable.
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

/// Each installed copy speaks another protocol.
fn protocol_of(program: &Path) -> u64 {
    let name = program.file_name().unwrap().to_str().unwrap();
    let index = name.strip_prefix("wormhole-worker-").unwrap_or("0");
    protocol(index.parse().unwrap())
}

/// The protocol of the copy with this number.
pub fn protocol(index: u64) -> u64 {
    PROTOCOL_HASH.wrapping_add(index)
}

/// What comes with a session.
pub struct Given {
    pub window: OwnedFd,
    pub counters: OwnedFd,
    pub neighbours: OwnedFd,
}

/// What a worker is started with.
pub struct Stub {
    pub protocol: u64,
    socket: OwnedFd,
    pub log: File,
    incoming: Incoming,
    outgoing: Outgoing,
}

impl Stub {
    fn inherited(protocol: u64) -> Self {
        // SAFETY: the supervisor put the stream and the log there, and nothing else here uses the numbers.
        let (socket, log) = unsafe { (OwnedFd::from_raw_fd(3), OwnedFd::from_raw_fd(4)) };
        Self {
            protocol,
            socket,
            log: log.into(),
            incoming: Incoming::new(true),
            outgoing: Outgoing::default(),
        }
    }

    /// The stream, for what serves sessions itself.
    pub fn into_socket(self) -> OwnedFd {
        self.socket
    }

    pub fn send(&mut self, message: &Message<'_>, descriptors: Vec<OwnedFd>) {
        self.outgoing
            .send(&self.socket, message, descriptors)
            .unwrap();
    }

    /// Says that it is ready, waits for its session and takes it.
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

    /// The socket for files that came with the session, if one came.
    pub fn take_files(&mut self) -> Option<UnixDatagram> {
        self.incoming.descriptor().map(UnixDatagram::from)
    }

    /// Reads messages until one is what is waited for. Descriptors that come are closed.
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

    /// A run that it is asked to let go of, if there is one.
    pub fn take_removal(&mut self) -> Option<ArenaRun> {
        self.incoming.fill(&self.socket).unwrap();
        match self.incoming.take() {
            Ok(Some(Message::ArenaRemove(run))) => Some(run),
            Ok(_) => None,
            // The supervisor is gone.
            Err(_) => std::process::exit(0),
        }
    }

    /// The file of the words of the event that has this token.
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

/// Does nothing, whatever happens to its stream.
pub fn idle() -> ! {
    loop {
        std::thread::park();
    }
}
