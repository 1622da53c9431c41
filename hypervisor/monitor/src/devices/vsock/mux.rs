//! All connections of a guest: takes its packets, and has packets for it.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;

use super::connection::{Connection, Fate, Interest, Key};
use super::packet::{Header, Op, TYPE_STREAM};
use super::{ConnectRequest, HOST_CID, VsockAcceptor};

/// Connections that a guest may have at a time.
pub const MAX_CONNECTIONS: usize = 1024;
/// Resets that may wait for room in the guest's receive queue before its packets have to wait.
const MAX_WAITING_RESETS: usize = 256;

/// A change of what the event loop watches.
#[derive(Debug)]
pub enum WatchChange {
    /// Watch a new socket.
    Add(RawFd, Key, Interest),
    /// Wait for something else.
    Modify(RawFd, Interest),
    /// Watch it no more.
    Remove(RawFd),
    /// Watch it no more, then close it.
    Close(Connection),
}

/// The connections.
pub struct Mux {
    guest_cid: u64,
    acceptor: Box<dyn VsockAcceptor>,
    connections: HashMap<Key, Connection>,
    /// Connections that have something to send, each once.
    ready: VecDeque<Key>,
    /// Resets for what is no connection.
    resets: VecDeque<Header>,
    /// Connections touched since the last look at what to watch.
    touched: Vec<Key>,
    closed: Vec<Connection>,
}

impl fmt::Debug for Mux {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mux")
            .field("guest_cid", &self.guest_cid)
            .field("connections", &self.connections.len())
            .field("ready", &self.ready.len())
            .field("resets", &self.resets.len())
            .finish_non_exhaustive()
    }
}

/// A header from the host to the guest, without credit.
pub(super) fn header_to_guest(guest_cid: u64, key: Key, op: Op, flags: u32, len: usize) -> Header {
    Header {
        src_cid: HOST_CID.into(),
        dst_cid: guest_cid.into(),
        src_port: key.host_port.into(),
        dst_port: key.guest_port.into(),
        len: u32::try_from(len).unwrap_or(0).into(),
        kind: TYPE_STREAM.into(),
        op: u16::from(op).into(),
        flags: flags.into(),
        ..Header::default()
    }
}

impl Mux {
    /// No connections yet.
    pub fn new(guest_cid: u64, acceptor: Box<dyn VsockAcceptor>) -> Self {
        Self {
            guest_cid,
            acceptor,
            connections: HashMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            touched: Vec::new(),
            closed: Vec::new(),
        }
    }

    /// The guest's context id.
    pub fn guest_cid(&self) -> u64 {
        self.guest_cid
    }

    /// Connections that stand.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Whether a packet of the guest may be taken now; if not, it waits until the guest has made
    /// room for the resets that it provoked.
    pub fn can_receive(&self) -> bool {
        self.resets.len() < MAX_WAITING_RESETS
    }

    /// A packet from the guest.
    pub fn receive(&mut self, header: &Header, payload: &[u8]) {
        if header.dst_cid.get() != HOST_CID || header.src_cid.get() != self.guest_cid {
            return;
        }
        let key = Key {
            guest_port: header.src_port.get(),
            host_port: header.dst_port.get(),
        };
        let op = header.op();
        if header.kind.get() != TYPE_STREAM {
            if op != Op::Reset {
                self.resets.push_back(Header {
                    kind: header.kind,
                    ..header_to_guest(self.guest_cid, key, Op::Reset, 0, 0)
                });
            }
            return;
        }
        match self.connections.get_mut(&key) {
            Some(connection) => {
                let fate = connection.receive(header, payload);
                self.settle(key, fate);
            }
            None if op == Op::Request => self.connect(key, header),
            None if op == Op::Reset => {}
            None => self.reset(key),
        }
    }

    fn connect(&mut self, key: Key, request: &Header) {
        match self.open(key, request) {
            Some(connection) => {
                self.connections.insert(key, connection);
                self.settle(key, Fate::Lives);
            }
            None => self.reset(key),
        }
    }

    fn open(&mut self, key: Key, request: &Header) -> Option<Connection> {
        if self.connections.len() >= MAX_CONNECTIONS {
            tracing::debug!(?key, "the guest has too many connections");
            return None;
        }
        let (ours, theirs) = UnixStream::pair()
            .and_then(|(ours, theirs)| ours.set_nonblocking(true).map(|()| (ours, theirs)))
            .inspect_err(|error| tracing::warn!(%error, "no socket for a guest's connection"))
            .ok()?;
        let wanted = ConnectRequest {
            port: key.host_port,
            peer_port: key.guest_port,
        };
        self.acceptor.accept(wanted, theirs).ok()?;
        Some(Connection::new(key, ours, request))
    }

    /// The event loop says that a socket is ready.
    pub fn host_ready(&mut self, key: Key, readable: bool, hung_up: bool) {
        if let Some(connection) = self.connections.get_mut(&key) {
            let fate = connection.host_ready(readable, hung_up);
            self.settle(key, fate);
        }
    }

    /// Acts on what a step did to a connection.
    fn settle(&mut self, key: Key, fate: Fate) {
        if fate == Fate::Lives {
            self.touched.push(key);
            if let Some(connection) = self.connections.get_mut(&key)
                && connection.has_packet()
                && !connection.queued
            {
                connection.queued = true;
                self.ready.push_back(key);
            }
            return;
        }
        if let Some(connection) = self.connections.remove(&key) {
            self.closed.push(connection);
        }
        if fate == Fate::Reset {
            self.reset(key);
        }
    }

    fn reset(&mut self, key: Key) {
        self.resets
            .push_back(header_to_guest(self.guest_cid, key, Op::Reset, 0, 0));
    }

    /// Whether [`Self::next_packet`] may have something.
    pub fn has_packets(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// The next packet for the guest: its header, and its payload in `payload`, which is not
    /// empty.
    pub fn next_packet(&mut self, payload: &mut [u8]) -> Option<Header> {
        if let Some(reset) = self.resets.pop_front() {
            return Some(reset);
        }
        while let Some(key) = self.ready.pop_front() {
            // A connection that is gone may still stand in the queue.
            let Some(connection) = self.connections.get_mut(&key) else {
                continue;
            };
            connection.queued = false;
            let produced = connection.produce(payload);
            let header =
                produced.map(|(op, flags, len)| connection.header(self.guest_cid, op, flags, len));
            self.settle(key, Fate::Lives);
            if header.is_some() {
                return header;
            }
        }
        None
    }

    /// What the event loop has to change since the last call.
    pub fn watch_changes(&mut self) -> Vec<WatchChange> {
        let mut changes: Vec<_> = self.closed.drain(..).map(WatchChange::Close).collect();
        for key in self.touched.drain(..) {
            let Some(connection) = self.connections.get_mut(&key) else {
                continue;
            };
            let wanted = connection.interest();
            let change = match (connection.watched, wanted) {
                (None, Some(interest)) => WatchChange::Add(connection.fd(), key, interest),
                (Some(_), None) => WatchChange::Remove(connection.fd()),
                (Some(old), Some(new)) if old != new => WatchChange::Modify(connection.fd(), new),
                _ => continue,
            };
            connection.watched = wanted;
            changes.push(change);
        }
        changes
    }

    /// Forgets everything: the driver reset the device.
    pub fn clear(&mut self) {
        self.closed
            .extend(self.connections.drain().map(|(_, connection)| connection));
        self.ready.clear();
        self.resets.clear();
        self.touched.clear();
    }
}
