//! passt(1): a process that is a guest's network, with the rights of the user. It opens the guest's connections as its own.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{ChildStderr, Command, Stdio};
use std::time::Duration;

use wormhole_images::{Network, SocketServer};
use wormhole_monitor::{FrameStream, MacAddress};

use super::files;
use crate::confinement;
use crate::say;

/// The guest's network.
pub const NETWORK: &str = "address=10.0.2.15/24,gateway=10.0.2.2,dns=10.0.2.3";

/// Time in which passt answers the first frame.
const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes of the longest frame.
const LONGEST: usize = 1 << 16;

/// Reason why a guest cannot have a network by passt.
#[derive(Debug, thiserror::Error)]
pub enum PasstError {
    #[error(
        "passt is not installed: install Debian's package passt, or give the guest a tap interface"
    )]
    Missing,
    #[error("passt cannot be started")]
    Start(#[source] io::Error),
    #[error("passt ended at once: {0}")]
    Ended(String),
    #[error("passt did not answer in {} seconds", PATIENCE.as_secs())]
    Silent,
}

/// passt for a guest with this network and hardware address.
#[derive(Clone, Debug)]
pub struct Passt {
    network: Network,
    mac: MacAddress,
}

impl Passt {
    /// Prepares passt for a guest with this hardware address.
    pub fn new(mac: MacAddress) -> Result<Self, PasstError> {
        let network = NETWORK.parse::<Network>();
        let network = network.map_err(|error| PasstError::Start(io::Error::other(error)))?;
        Ok(Self { network, mac })
    }

    /// Starts passt, and returns its socket once it serves. It ends when the socket is closed.
    fn start(&self) -> Result<UnixStream, PasstError> {
        let (mut ours, theirs) = UnixStream::pair().map_err(PasstError::Start)?;
        let mut command = Command::new("passt");
        command
            .args(["--foreground", "--quiet", "--ipv4-only"])
            .args(["--address", &self.network.address().to_string()])
            .args(["--netmask", &self.network.mask().to_string()]);
        for (flag, address) in [
            ("--gateway", self.network.gateway()),
            ("--dns-forward", self.network.dns()),
        ] {
            let address = address.map(|address| address.to_string());
            command.args(
                address
                    .map(|address| [flag.to_owned(), address])
                    .iter()
                    .flatten(),
            );
        }
        command
            // The gateway would lead to what listens on this machine's loopback interface.
            .arg("--no-map-gw")
            .args(["--fd", "0"])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stderr(Stdio::piped());
        let child = files::spawn(&mut command, None);
        // passt alone has its end of the socket from here on.
        drop(command);
        let child = child.map_err(|source| match source.kind() {
            ErrorKind::NotFound => PasstError::Missing,
            _ => PasstError::Start(source),
        })?;
        let words = confinement::spawn("passt", move || child.stderr.map(last_line));
        let words = words.map_err(PasstError::Start)?;
        match self.greet(&mut ours) {
            Ok(()) => Ok(ours),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Err(PasstError::Silent),
            Err(_) => {
                drop(ours);
                let words = words.join().ok().flatten().flatten();
                let words = words.unwrap_or_else(|| "it did not say why".to_owned());
                Err(PasstError::Ended(words))
            }
        }
    }

    /// Asks for the gateway's hardware address, and waits for the answer.
    fn greet(&self, socket: &mut UnixStream) -> io::Result<()> {
        socket.set_read_timeout(Some(PATIENCE))?;
        let gateway = self.network.gateway().unwrap_or(Ipv4Addr::UNSPECIFIED);
        socket.write_all(&request(self.mac, self.network.address(), gateway))?;
        let mut length = [0; 4];
        socket.read_exact(&mut length)?;
        let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
        if length > LONGEST {
            return Err(ErrorKind::InvalidData.into());
        }
        socket.read_exact(&mut vec![0; length])
    }

    /// Starts passt as the host's end of a guest's interface.
    pub fn end(&self) -> Result<FrameStream, PasstError> {
        let socket = self.start()?;
        FrameStream::new(socket.into(), |why| {
            say::line(format_args!(
                "the guest has lost its network by passt: {why}"
            ));
        })
        .map_err(PasstError::Start)
    }
}

impl SocketServer for Passt {
    fn start(&self) -> io::Result<OwnedFd> {
        Self::start(self)
            .map(OwnedFd::from)
            .map_err(io::Error::other)
    }
}

/// Returns a request of ARP (RFC 826) as a broadcast frame behind its length.
fn request(mac: MacAddress, own: Ipv4Addr, wanted: Ipv4Addr) -> Vec<u8> {
    const LENGTH: [u8; 4] = 42u32.to_be_bytes();
    /// Ethernet and IPv4, with the lengths of their addresses; a request.
    const KINDS: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
    let mac = mac.bytes();
    [
        &LENGTH[..],
        &[0xff; 6],
        &mac,
        &[8, 6],
        &KINDS,
        &mac,
        &own.octets(),
        &[0; 6],
        &wanted.octets(),
    ]
    .concat()
}

/// Reads what passt says to its end, which keeps its pipe empty. Returns the last line.
fn last_line(said: ChildStderr) -> Option<String> {
    let mut said = BufReader::new(said);
    let (mut line, mut last) = (Vec::new(), None);
    while matches!((&mut said).take(4096).read_until(b'\n', &mut line), Ok(1..)) {
        let text = String::from_utf8_lossy(&line).trim().to_owned();
        last = Some(text).filter(|text| !text.is_empty()).or(last);
        line.clear();
    }
    last
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};
    use vm_memory::VolatileSlice;
    use wormhole_monitor::{GuestFrame, HostEnd};

    use super::*;

    /// Bytes of virtio's header before a frame.
    const HEADER: usize = 12;

    fn passt() -> Passt {
        Passt::new(MacAddress::local(1)).expect("a network")
    }

    #[test]
    fn the_own_network_is_one() {
        assert_eq!(passt().network.to_string(), NETWORK);
    }

    #[test]
    fn passt_answers_the_guests_frames() {
        let mut end = match passt().end() {
            Ok(end) => end,
            Err(PasstError::Missing | PasstError::Ended(_)) => {
                println!("skipped: passt needs its package, and a default route of this machine");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let own = passt().network.address();
        let name_server = passt().network.dns().expect("a name server");
        let mut frame = vec![0; HEADER];
        frame.extend_from_slice(&request(passt().mac, own, name_server)[4..]);
        let frame = GuestFrame::new(vec![VolatileSlice::from(&mut frame[..])]).expect("a frame");
        end.send(&frame).expect("passt takes it");
        assert!(!end.is_blocked());
        let mut answer = vec![0; LONGEST];
        // A frame may come in pieces.
        let length = loop {
            poll(&mut [PollFd::new(&end, PollFlags::IN)], None).expect("an answer");
            match end.receive(&mut answer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                received => break received.expect("a frame"),
            }
        };
        let frame = &answer[HEADER..length];
        assert_eq!(frame[..6], passt().mac.bytes());
        assert_eq!(frame[12..22], [8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
        assert_eq!(frame[28..32], name_server.octets());
    }

    #[test]
    fn the_greeting_is_a_frame() {
        let network = passt().network;
        let gateway = network.gateway().expect("a gateway");
        let frame = request(passt().mac, network.address(), gateway);
        assert_eq!(frame.len(), 4 + 42);
        assert_eq!(frame[..4], [0, 0, 0, 42]);
        assert_eq!(frame[frame.len() - 4..], [10, 0, 2, 2]);
    }
}
