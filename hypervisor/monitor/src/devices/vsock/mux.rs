//! Multiplexes a guest's connections: dispatches its packets and produces packets for it.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::RawFd;
use std::time::Instant;

use super::connection::{Connection, Fate, Interest, Key};
use super::packet::{Header, Op, TYPE_STREAM};
use super::{ConnectRequest, HOST_CID, VsockAcceptor};
use crate::snapshot::OpenConnection;

/// Maximum number of connections of a guest at a time.
pub const MAX_CONNECTIONS: usize = 1024;
/// Maximum number of resets that wait for receive buffers before the guest's packets are held back.
const MAX_WAITING_RESETS: usize = 256;

/// A change of the event loop's watches.
#[derive(Debug)]
pub enum WatchChange {
    /// Adds a watch of a socket.
    Add(RawFd, Key, Interest),
    /// Changes the awaited events.
    Modify(RawFd, Interest),
    /// Removes a watch.
    Remove(RawFd),
    /// Removes the watch, if any, then closes the socket.
    Close(Connection),
}

/// All connections of a guest.
pub struct Mux {
    guest_cid: u64,
    acceptor: Box<dyn VsockAcceptor>,
    connections: HashMap<Key, Connection>,
    /// Connections with a packet for the guest, each once.
    ready: VecDeque<Key>,
    /// Resets for the guest, which do not belong to an open connection.
    resets: VecDeque<Header>,
    /// Connections changed since the last call of [`Self::watch_changes`].
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

/// Returns a header from the host to the guest, without credit.
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
    /// Creates a mux without connections.
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

    /// Returns the guest's context id.
    pub fn guest_cid(&self) -> u64 {
        self.guest_cid
    }

    /// Returns the open connections, by the guest's port.
    pub fn open_connections(&self) -> Vec<OpenConnection> {
        let mut open: Vec<_> = self
            .connections
            .keys()
            .map(|key| OpenConnection {
                guest_port: key.guest_port,
                host_port: key.host_port,
            })
            .collect();
        open.sort_unstable_by_key(|connection| (connection.guest_port, connection.host_port));
        open
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Returns whether a packet of the guest may be processed now. If not, it waits until the guest
    /// provides buffers for the resets that it caused.
    pub fn can_receive(&self) -> bool {
        self.resets.len() < MAX_WAITING_RESETS
    }

    /// Processes a packet from the guest.
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
                self.apply(key, fate);
            }
            None if op == Op::Request => self.connect(key, header),
            None if op == Op::Reset => {}
            None => self.reset(key),
        }
    }

    /// Resets the connection of a packet whose payload cannot be read: its stream must not go on with a gap.
    pub fn lose(&mut self, header: &Header) {
        tracing::debug!(
            ?header,
            "a guest's packet has a payload that cannot be read"
        );
        // VIRTIO_VSOCK_OP_INVALID.
        let op = u16::from(Op::Unknown(0)).into();
        self.receive(&Header { op, ..*header }, &[]);
    }

    fn connect(&mut self, key: Key, request: &Header) {
        match self.open(key, request) {
            Some(connection) => {
                self.connections.insert(key, connection);
                self.apply(key, Fate::Lives);
            }
            None => self.reset(key),
        }
    }

    fn open(&mut self, key: Key, request: &Header) -> Option<Connection> {
        if self.connections.len() >= MAX_CONNECTIONS {
            tracing::debug!(?key, "the guest has too many connections");
            return None;
        }
        let wanted = ConnectRequest {
            port: key.host_port,
            peer_port: key.guest_port,
        };
        let accepted = self.acceptor.accept(wanted).ok()?;
        Connection::new(key, accepted, request)
            .inspect_err(|error| tracing::warn!(%error, "no socket for a guest's connection"))
            .ok()
    }

    /// Handles an event of a connection's socket.
    pub fn host_ready(&mut self, key: Key, readable: bool, hung_up: bool) {
        let Some(connection) = self.connections.get_mut(&key) else {
            return;
        };
        let fate = match connection.opened() {
            Some(opened) => {
                self.closed.extend(self.connections.insert(key, opened));
                Fate::Lives
            }
            None => connection.host_ready(readable, hung_up),
        };
        self.apply(key, fate);
    }

    /// Applies the result of a step to a connection.
    fn apply(&mut self, key: Key, fate: Fate) {
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
        if let Some(mut connection) = self.connections.remove(&key) {
            if fate == Fate::Reset {
                let reset = connection.header(self.guest_cid, Op::Reset, 0, 0);
                self.resets.push_back(reset);
            }
            if connection.queued {
                // Otherwise a guest that connects and resets repeatedly would make the queue grow.
                self.ready.retain(|waiting| *waiting != key);
            }
            self.closed.push(connection);
        }
    }

    fn reset(&mut self, key: Key) {
        self.resets
            .push_back(header_to_guest(self.guest_cid, key, Op::Reset, 0, 0));
    }

    /// Returns whether [`Self::next_packet`] may return a packet.
    pub fn has_packets(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// Returns the header of the next packet for the guest and writes its payload to `payload`, which
    /// must not be empty.
    pub fn next_packet(&mut self, payload: &mut [u8]) -> Option<Header> {
        if let Some(reset) = self.resets.pop_front() {
            return Some(reset);
        }
        while let Some(key) = self.ready.pop_front() {
            let Some(connection) = self.connections.get_mut(&key) else {
                continue;
            };
            connection.queued = false;
            let produced = connection.produce(payload);
            let header =
                produced.map(|(op, flags, len)| connection.header(self.guest_cid, op, flags, len));
            self.apply(key, Fate::Lives);
            if header.is_some() {
                return header;
            }
        }
        None
    }

    /// Returns the changes of watches since the last call.
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

    /// Ends all connections after the guest has ended: discards data for the guest and delivers the data
    /// that it sent, waiting for slow hosts until `deadline`.
    pub fn finish(&mut self, deadline: Instant) {
        for (_, connection) in self.connections.drain() {
            connection.finish(deadline);
        }
        self.clear();
    }

    /// Discards resets, which an ended guest does not receive.
    pub fn forget_resets(&mut self) {
        self.resets.clear();
    }

    /// Drops all connections and packets after the driver reset the device. No socket is watched any more.
    pub fn clear(&mut self) {
        self.connections.clear();
        self.closed.clear();
        self.ready.clear();
        self.resets.clear();
        self.touched.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::vsock::Refused;
    use crate::devices::vsock::connection::BUFFER;
    use crate::devices::vsock::opening::{Holders, Opener, Opening};
    use crate::devices::vsock::packet::{SHUTDOWN_BOTH, SHUTDOWN_SEND};
    use proptest::prelude::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{Receiver, channel};

    const CID: u64 = 3;
    const KEY: Key = Key {
        guest_port: 1000,
        host_port: 9000,
    };

    /// Returns a mux and a receiver of its accepted streams. Port 1 is refused.
    fn mux() -> (Mux, Receiver<UnixStream>) {
        let (sender, receiver) = channel();
        let accept = move |request: ConnectRequest| {
            if request.port == 1 {
                return Err(Refused);
            }
            let (guest, host) = UnixStream::pair().map_err(|_| Refused)?;
            sender.send(host).map_err(|_| Refused)?;
            Ok(guest)
        };
        (Mux::new(CID, Box::new(accept)), receiver)
    }

    fn packet(key: Key, op: Op, flags: u32, buf_alloc: u32) -> Header {
        Header {
            src_cid: CID.into(),
            dst_cid: HOST_CID.into(),
            src_port: key.guest_port.into(),
            dst_port: key.host_port.into(),
            kind: TYPE_STREAM.into(),
            op: u16::from(op).into(),
            flags: flags.into(),
            buf_alloc: buf_alloc.into(),
            ..Header::default()
        }
    }

    fn next(mux: &mut Mux) -> Option<(Op, u32, Vec<u8>)> {
        let mut payload = [0; 4096];
        let header = mux.next_packet(&mut payload)?;
        let len = usize::try_from(header.len.get()).expect("small");
        Some((header.op(), header.flags.get(), payload[..len].to_vec()))
    }

    /// Returns an open connection whose guest has a buffer of `buf_alloc` bytes.
    fn connected(buf_alloc: u32) -> (Mux, UnixStream) {
        let (mut mux, streams) = mux();
        mux.receive(&packet(KEY, Op::Request, 0, buf_alloc), &[]);
        let stream = streams.recv().expect("accepted");
        assert_eq!(next(&mut mux), Some((Op::Response, 0, vec![])));
        assert_eq!(next(&mut mux), None);
        (mux, stream)
    }

    fn ready(mux: &mut Mux) {
        mux.host_ready(KEY, true, false);
    }

    #[test]
    fn data_flows_both_ways() {
        let (mut mux, mut stream) = connected(1 << 16);
        mux.receive(&packet(KEY, Op::Data, 0, 1 << 16), b"to the host");
        let mut buffer = [0; 11];
        stream.read_exact(&mut buffer).expect("data");
        assert_eq!(&buffer, b"to the host");
        stream.write_all(b"to the guest").expect("room");
        ready(&mut mux);
        assert_eq!(
            next(&mut mux),
            Some((Op::Data, 0, b"to the guest".to_vec()))
        );
        assert_eq!(next(&mut mux), None);
    }

    /// Returns a mux whose connections are opened by the opener that the receiver returns.
    fn slow_mux() -> (Mux, Receiver<Opener>) {
        let (sender, receiver) = channel();
        let accept = move |_: ConnectRequest| {
            let (opening, opener) = Opening::new().map_err(|_| Refused)?;
            sender.send(opener).map_err(|_| Refused)?;
            Ok(opening)
        };
        (Mux::new(CID, Box::new(accept)), receiver)
    }

    #[test]
    fn a_connection_is_answered_once_it_is_open() {
        let (mut mux, openers) = slow_mux();
        mux.receive(&packet(KEY, Op::Request, 0, 4096), &[]);
        assert_eq!(next(&mut mux), None);
        let watched = mux.watch_changes();
        let [WatchChange::Add(bell, KEY, Interest { read: true, .. })] = watched[..] else {
            panic!("{watched:?}");
        };
        ready(&mut mux);
        assert_eq!(next(&mut mux), None, "it is not open yet");
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        openers.recv().expect("an opener").open(ours);
        mux.host_ready(KEY, true, true);
        assert_eq!(next(&mut mux), Some((Op::Response, 0, vec![])));
        let changes = mux.watch_changes();
        let [WatchChange::Close(closed), WatchChange::Add(..)] = &changes[..] else {
            panic!("{changes:?}");
        };
        assert_eq!(closed.fd(), bell);
        theirs.write_all(b"x").expect("room");
        ready(&mut mux);
        assert_eq!(next(&mut mux), Some((Op::Data, 0, b"x".to_vec())));
    }

    #[test]
    fn a_held_connection_is_the_guests_to_close() {
        let (holders, (sender, openers)) = (Holders::default(), channel());
        let held = holders.clone();
        let accept = move |_: ConnectRequest| {
            let (opening, opener) = Opening::new().map_err(|_| Refused)?;
            sender.send(opener).map_err(|_| Refused)?;
            Ok(opening.held(held.add()))
        };
        let mut mux = Mux::new(CID, Box::new(accept));
        for last in [SHUTDOWN_BOTH, 0] {
            mux.receive(&packet(KEY, Op::Request, 0, 4096), &[]);
            let (ours, theirs) = UnixStream::pair().expect("sockets");
            openers.recv().expect("an opener").open(ours);
            mux.host_ready(KEY, true, true);
            assert_eq!(next(&mut mux), Some((Op::Response, 0, vec![])));
            drop(theirs);
            mux.host_ready(KEY, true, true);
            assert_eq!(next(&mut mux), Some((Op::Shutdown, SHUTDOWN_SEND, vec![])));
            mux.receive(&packet(KEY, Op::Data, 0, 4096), b"lost");
            assert_eq!(next(&mut mux), None);
            drop(mux.watch_changes());
            assert_eq!(holders.count(), 1);
            let op = [Op::Reset, Op::Shutdown][usize::from(last != 0)];
            mux.receive(&packet(KEY, op, last, 4096), &[]);
            let answer = (last != 0).then_some((Op::Reset, 0, vec![]));
            assert_eq!(next(&mut mux), answer);
            drop(mux.watch_changes());
            assert_eq!(holders.count(), 0);
        }
    }

    #[test]
    fn a_connection_that_cannot_be_opened_or_breaks_the_order_is_reset() {
        let (mut mux, openers) = slow_mux();
        mux.receive(&packet(KEY, Op::Request, 0, 4096), &[]);
        drop(openers.recv().expect("an opener"));
        mux.host_ready(KEY, true, true);
        assert_eq!(next(&mut mux), Some((Op::Reset, 0, vec![])));
        mux.receive(&packet(KEY, Op::Request, 0, 4096), &[]);
        mux.receive(&packet(KEY, Op::Data, 0, 4096), b"x");
        assert_eq!(next(&mut mux), Some((Op::Reset, 0, vec![])));
        mux.receive(&packet(KEY, Op::Request, 0, 4096), &[]);
        mux.receive(&packet(KEY, Op::Reset, 0, 4096), &[]);
        assert_eq!((next(&mut mux), mux.connections()), (None, 0));
    }

    #[test]
    fn a_refused_port_and_an_unknown_connection_are_reset() {
        let (mut mux, _streams) = mux();
        let refused = Key {
            host_port: 1,
            ..KEY
        };
        mux.receive(&packet(refused, Op::Request, 0, 4096), &[]);
        assert_eq!(next(&mut mux), Some((Op::Reset, 0, vec![])));
        mux.receive(&packet(KEY, Op::Data, 0, 4096), b"x");
        assert_eq!(next(&mut mux), Some((Op::Reset, 0, vec![])));
        mux.receive(&packet(KEY, Op::Reset, 0, 4096), &[]);
        assert_eq!(next(&mut mux), None);
        assert_eq!(mux.connections(), 0);
    }

    #[test]
    fn packets_of_another_guest_are_ignored() {
        let (mut mux, streams) = mux();
        let mut forged = packet(KEY, Op::Request, 0, 4096);
        forged.src_cid = 4.into();
        mux.receive(&forged, &[]);
        assert!(streams.try_recv().is_err());
        assert!(!mux.has_packets());
    }

    #[test]
    fn a_datagram_is_reset_with_its_own_type() {
        let (mut mux, _streams) = mux();
        let mut datagram = packet(KEY, Op::Data, 0, 4096);
        datagram.kind = 3.into();
        mux.receive(&datagram, b"x");
        let header = mux.next_packet(&mut [0; 64]).expect("reset");
        assert_eq!((header.op(), header.kind.get()), (Op::Reset, 3));
    }

    #[test]
    fn the_guests_end_is_the_hosts_end_of_file() {
        for op in [Op::Reset, Op::Shutdown] {
            let (mut mux, mut stream) = connected(4096);
            mux.receive(&packet(KEY, Op::Data, 0, 4096), b"last words");
            mux.receive(&packet(KEY, op, SHUTDOWN_BOTH, 4096), &[]);
            assert_eq!(mux.connections(), 0);
            drop(mux.watch_changes());
            let mut all = Vec::new();
            stream.read_to_end(&mut all).expect("end of file");
            assert_eq!(all, b"last words");
            let answer = (op == Op::Shutdown).then_some((Op::Reset, 0, vec![]));
            assert_eq!(next(&mut mux), answer);
        }
    }

    #[test]
    fn the_hosts_end_is_reported_after_its_last_data() {
        let (mut mux, mut stream) = connected(4096);
        stream.write_all(b"bye").expect("room");
        drop(stream);
        mux.host_ready(KEY, true, true);
        assert_eq!(next(&mut mux), Some((Op::Data, 0, b"bye".to_vec())));
        assert_eq!(next(&mut mux), Some((Op::Shutdown, SHUTDOWN_BOTH, vec![])));
        assert_eq!(next(&mut mux), None);
        mux.receive(&packet(KEY, Op::Reset, 0, 4096), &[]);
        assert_eq!(mux.connections(), 0);
    }

    #[test]
    fn half_closes_leave_the_other_half_open() {
        let (mut mux, mut stream) = connected(4096);
        stream.shutdown(std::net::Shutdown::Write).expect("open");
        ready(&mut mux);
        assert_eq!(next(&mut mux), Some((Op::Shutdown, SHUTDOWN_SEND, vec![])));
        mux.receive(&packet(KEY, Op::Data, 0, 4096), b"still");
        mux.receive(&packet(KEY, Op::Shutdown, SHUTDOWN_SEND, 4096), &[]);
        let mut all = Vec::new();
        stream.read_to_end(&mut all).expect("end of file");
        assert_eq!(all, b"still");
        assert_eq!(mux.connections(), 1);
    }

    #[test]
    fn no_more_is_sent_than_the_guest_has_room_for() {
        let (mut mux, mut stream) = connected(4);
        stream.write_all(b"123456").expect("room");
        ready(&mut mux);
        assert_eq!(next(&mut mux), Some((Op::Data, 0, b"1234".to_vec())));
        assert_eq!(next(&mut mux), Some((Op::CreditRequest, 0, vec![])));
        assert_eq!(next(&mut mux), None);
        let mut update = packet(KEY, Op::CreditUpdate, 0, 4);
        update.fwd_cnt = 4.into();
        mux.receive(&update, &[]);
        assert_eq!(next(&mut mux), Some((Op::Data, 0, b"56".to_vec())));
        assert_eq!(next(&mut mux), None);
    }

    #[test]
    fn every_packet_of_a_connection_tells_the_room_for_the_guests_data() {
        let (mut mux, mut stream) = connected(4096);
        mux.receive(&packet(KEY, Op::Data, 0, 4096), b"12345");
        stream.write_all(b"x").expect("room");
        ready(&mut mux);
        mux.receive(&packet(KEY, Op::CreditRequest, 0, 4096), &[]);
        // A second request for the connection ends it.
        let mut expected = vec![Op::CreditUpdate, Op::Data];
        let mut told = Vec::new();
        while let Some(header) = mux.next_packet(&mut [0; 64]) {
            told.push((header.op(), header.buf_alloc.get(), header.fwd_cnt.get()));
        }
        mux.receive(&packet(KEY, Op::Request, 0, 4096), &[]);
        expected.push(Op::Reset);
        while let Some(header) = mux.next_packet(&mut [0; 64]) {
            told.push((header.op(), header.buf_alloc.get(), header.fwd_cnt.get()));
        }
        let expected: Vec<_> = expected.iter().map(|op| (*op, BUFFER, 5)).collect();
        assert_eq!(told, expected);
    }

    #[test]
    fn a_guest_that_sends_more_than_there_is_room_for_is_reset() {
        let (mut mux, _stream) = connected(4096);
        // The host does not read: the socket's buffer fills, then the connection's.
        let chunk = vec![0; BUFFER as usize];
        let mut sent = 0;
        while mux.connections() == 1 {
            mux.receive(&packet(KEY, Op::Data, 0, 4096), &chunk);
            sent += 1;
            assert!(sent < 100, "the buffer grows without bound");
        }
        assert_eq!(next(&mut mux), Some((Op::Reset, 0, vec![])));
    }

    #[test]
    fn connections_are_bounded() {
        let (mut mux, streams) = mux();
        for port in 0..u32::try_from(MAX_CONNECTIONS).expect("small") + 1 {
            let key = Key {
                guest_port: port,
                ..KEY
            };
            mux.receive(&packet(key, Op::Request, 0, 4096), &[]);
        }
        assert_eq!(mux.connections(), MAX_CONNECTIONS);
        assert_eq!(next(&mut mux), Some((Op::Reset, 0, vec![])));
        assert_eq!(streams.try_iter().count(), MAX_CONNECTIONS);
    }

    #[test]
    fn connecting_and_resetting_leaves_nothing_behind() {
        let (mut mux, _streams) = mux();
        for _ in 0..5000 {
            mux.receive(&packet(KEY, Op::Request, 0, 4096), &[]);
            mux.receive(&packet(KEY, Op::Reset, 0, 4096), &[]);
            drop(mux.watch_changes());
        }
        assert_eq!((mux.ready.len(), mux.resets.len()), (0, 0));
        assert!(!mux.has_packets());
    }

    #[test]
    fn watching_follows_what_is_wanted() {
        let (mut mux, mut stream) = connected(4);
        let changes = mux.watch_changes();
        let [WatchChange::Add(fd, KEY, interest)] = changes[..] else {
            panic!("{changes:?}");
        };
        assert!(interest.read && !interest.write);
        stream.write_all(b"12345").expect("room");
        ready(&mut mux);
        while next(&mut mux).is_some() {}
        // Without credit of the guest the host's socket is not read.
        let changes = mux.watch_changes();
        assert!(
            matches!(changes[..], [WatchChange::Modify(same, Interest { read: false, .. })] if same == fd),
            "{changes:?}"
        );
        mux.clear();
        assert!(mux.watch_changes().is_empty());
        stream.write_all(b"6").expect_err("the other end is closed");
    }

    proptest! {
        /// Arbitrary packets of the guest and arbitrary actions of the host cause no panic and exceed no
        /// limit.
        #[test]
        fn hostile_packets_stay_within_bounds(
            steps in proptest::collection::vec(
                (0u16..9, 0u32..4, 0u32..3, any::<u32>(), any::<u32>(), 0usize..3000, 0u8..6, 0u16..4),
                0..300,
            )
        ) {
            let (mut mux, streams) = mux();
            let mut held = Vec::new();
            for (op, guest_port, host_port, word, fwd_cnt, len, act, kind) in steps {
                let key = Key { guest_port, host_port };
                let mut header = packet(key, Op::from(op), word, word >> (word % 32));
                header.fwd_cnt = fwd_cnt.into();
                header.kind = if kind == 0 { 3 } else { TYPE_STREAM }.into();
                header.dst_cid = if word % 16 == 0 { u64::from(word) } else { HOST_CID }.into();
                if mux.can_receive() {
                    mux.receive(&header, &vec![0xaa; len]);
                }
                held.extend(streams.try_iter());
                match act {
                    0 => { held.pop(); }
                    1 => if let Some(stream) = held.last_mut() {
                        stream.set_nonblocking(true).expect("socket");
                        // The result does not matter: the socket may be full.
                        let _ = stream.write(&[1; 100]).is_ok();
                    },
                    2 => mux.host_ready(key, true, word % 3 == 0),
                    3 => { next(&mut mux); }
                    4 => drop(mux.watch_changes()),
                    _ => mux.host_ready(key, false, false),
                }
                prop_assert!(mux.connections() <= 12);
                prop_assert!(mux.resets.len() <= MAX_WAITING_RESETS + MAX_CONNECTIONS);
                prop_assert!(mux.ready.len() <= mux.connections());
            }
            // The guest can always drain its packets.
            let mut drained = 0;
            while next(&mut mux).is_some() {
                drained += 1;
                prop_assert!(drained < 10_000);
            }
        }
    }
}
