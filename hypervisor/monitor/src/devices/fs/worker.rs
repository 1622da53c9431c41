//! Moves requests to the server and replies to the guest, on the device's thread.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};

use event_manager::{EventOps, EventSet, Events};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::device::{QUEUE_SIZE, QUEUES};
use crate::devices::virtio::{ActiveQueue, VirtioWorker};
use crate::ram::GuestRam;

/// Most bytes of a request: a write of 128 KiB, and its headers.
const MOST_REQUEST: usize = (128 << 10) + 80;
/// Most bytes of a reply: 128 KiB of contents, and its header.
const MOST_REPLY: usize = (128 << 10) + size_of::<OutHeader>();
/// Most buffers of a request.
const MOST_BUFFERS: usize = QUEUE_SIZE as usize;
/// Most requests of a queue that wait for their replies: the queue full.
const MOST_PENDING: usize = QUEUE_SIZE as usize;
/// Bytes of `struct fuse_in_header`.
const IN_HEADER: usize = 40;
/// Bytes of the request's operation in its header.
const OPCODE: std::ops::Range<usize> = 4..8;
/// FORGET and BATCH_FORGET, which have no reply.
const FORGETS: [u32; 2] = [2, 42];
/// Bytes of the request's number in its header.
const UNIQUE: std::ops::Range<usize> = 8..16;

/// `struct fuse_out_header`: starts each reply.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct OutHeader {
    len: u32,
    /// 0, or an error number, negated.
    error: i32,
    unique: u64,
}

/// Buffers for a reply.
type Room = Vec<(GuestAddress, usize)>;

/// A request without a reply yet.
#[derive(Debug)]
struct Pending {
    queue: usize,
    head: u16,
    /// The driver's number of the request.
    unique: u64,
    room: Room,
}

/// Serves the queues of a file system.
#[derive(Debug)]
pub struct FsWorker {
    memory: GuestRam,
    /// Socket of the server; `None` once that is gone.
    server: Option<OwnedFd>,
    queues: Vec<ActiveQueue>,
    /// Requests by the numbers that the server gets. A driver could give two requests the same number.
    pending: HashMap<u64, Pending>,
    last: u64,
    /// Buffers of the request that is being taken.
    buffers: Vec<Descriptor>,
    request: Box<[u8]>,
    reply: Box<[u8]>,
}

impl FsWorker {
    /// Creates a worker with the socket of its server.
    pub fn new(memory: GuestRam, server: OwnedFd) -> Self {
        Self {
            memory,
            server: Some(server),
            queues: Vec::new(),
            pending: HashMap::new(),
            last: 0,
            buffers: Vec::with_capacity(MOST_BUFFERS),
            request: vec![0; MOST_REQUEST].into(),
            reply: vec![0; MOST_REPLY].into(),
        }
    }

    /// Moves all that can be moved: replies first, since they make room for requests.
    fn turn(&mut self) {
        let mut used = vec![false; self.queues.len()];
        self.receive(&mut used);
        for queue in 0..self.queues.len() {
            self.forward(queue, &mut used);
        }
        for (queue, used) in self.queues.iter_mut().zip(used) {
            if used {
                queue.interrupt(&self.memory);
            }
        }
    }

    /// Moves requests of a queue to the server, at most as many as the queue's size.
    fn forward(&mut self, number: usize, used: &mut [bool]) {
        let Some(queue) = self.queues.get_mut(number) else {
            return;
        };
        let mut left = queue.size();
        while left > 0 {
            let of_queue = |pending: &&Pending| pending.queue == number;
            if self.pending.len() >= MOST_PENDING
                && self.pending.values().filter(of_queue).count() >= MOST_PENDING
            {
                break;
            }
            let Some(chain) = queue.pop(&self.memory) else {
                break;
            };
            left -= 1;
            let head = chain.head_index();
            let taken = match copied(chain, &mut self.buffers) {
                true => taken(&self.memory, &self.buffers, &mut self.request),
                false => Err(0),
            };
            let (request, room) = match taken {
                Ok(taken) => taken,
                Err(written) => {
                    used[number] |= queue.add_used(&self.memory, head, written);
                    continue;
                }
            };
            let waits = has_reply(request) && bytes_of(&room) >= size_of::<OutHeader>();
            self.last += 1;
            let tag = self.last;
            let pending = Pending {
                queue: number,
                head,
                unique: tagged(request, tag),
                room,
            };
            let sent = match &self.server {
                Some(server) => send_whole(server, request),
                None => Err(Errno::PIPE),
            };
            match sent {
                Ok(()) if !waits => used[number] |= queue.add_used(&self.memory, head, 0),
                Ok(()) => drop(self.pending.insert(tag, pending)),
                // The socket is full. It becomes writable when the server has taken a request.
                Err(Errno::AGAIN) => {
                    queue.undo_pop();
                    left += 1;
                    break;
                }
                Err(_) => {
                    self.server = None;
                    let written = fail(&self.memory, &pending.room, pending.unique);
                    used[number] |= queue.add_used(&self.memory, head, written);
                }
            }
        }
        if left == 0 {
            queue.again();
        }
        if self.server.is_none() {
            self.fail_all(used);
        }
    }

    /// Moves replies to the guest, at most as many as requests can wait.
    fn receive(&mut self, used: &mut [bool]) {
        for _ in 0..QUEUES * MOST_PENDING {
            let Some(server) = &self.server else {
                return;
            };
            let len = match recv(server, &mut self.reply[..], RecvFlags::DONTWAIT) {
                Ok((len @ 1.., _)) => len,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => continue,
                Ok((0, _)) | Err(_) => {
                    tracing::warn!("the server of a guest's files has ended");
                    self.server = None;
                    return self.fail_all(used);
                }
            };
            let reply = &mut self.reply[..len];
            let Ok((mut header, _)) = OutHeader::read_from_prefix(reply) else {
                continue;
            };
            // A reply to a driver that has reset the device meanwhile has no request any more.
            let Some(pending) = self.pending.remove(&header.unique) else {
                continue;
            };
            header.unique = pending.unique;
            let whole = usize::try_from(header.len) == Ok(len);
            let written = match header.write_to_prefix(reply) {
                Ok(()) if whole && len <= bytes_of(&pending.room) => {
                    scatter(&self.memory, &pending.room, reply)
                }
                _ => fail(&self.memory, &pending.room, pending.unique),
            };
            if let Some(queue) = self.queues.get_mut(pending.queue) {
                used[pending.queue] |= queue.add_used(&self.memory, pending.head, written);
            }
        }
        // The loop is told of the next packet only.
        if let Some(queue) = self.queues.first() {
            queue.again();
        }
    }

    /// Answers all waiting requests with an error, since the server never will.
    fn fail_all(&mut self, used: &mut [bool]) {
        for (_, pending) in self.pending.drain() {
            let written = fail(&self.memory, &pending.room, pending.unique);
            if let Some(queue) = self.queues.get_mut(pending.queue) {
                used[pending.queue] |= queue.add_used(&self.memory, pending.head, written);
            }
        }
    }
}

impl VirtioWorker for FsWorker {
    fn start(&mut self, queues: Vec<ActiveQueue>, _: u64) {
        self.queues = queues;
    }

    /// Watches the server's socket.
    fn watch(&mut self, ops: &mut EventOps<'_>) {
        let Some(server) = &self.server else {
            return;
        };
        // Edge-triggered, so that a writable socket does not keep the loop awake.
        let events = EventSet::IN | EventSet::OUT | EventSet::EDGE_TRIGGERED;
        if let Err(error) = ops.add(Events::new(server, events)) {
            tracing::error!(%error, "a file system cannot wait for its server");
        }
    }

    fn queue_ready(&mut self, _: usize, _: &mut EventOps<'_>) {
        self.turn();
    }

    fn descriptor_ready(&mut self, events: Events, _: &mut EventOps<'_>) {
        let server = self.server.as_ref();
        if server.is_some_and(|server| server.as_raw_fd() == events.fd()) {
            self.turn();
        }
    }

    fn stop(&mut self) {
        self.queues.clear();
        self.pending.clear();
    }
}

/// Sends a request without blocking.
fn send_whole(server: &OwnedFd, request: &[u8]) -> Result<(), Errno> {
    loop {
        match send(server, request, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Copies the buffers of a chain, which is read once, since the driver can change it meanwhile. Returns whether a queue can
/// have that many: a chain can have a table of its own, with more, though no device offers such tables.
fn copied(chain: impl Iterator<Item = Descriptor>, buffers: &mut Vec<Descriptor>) -> bool {
    buffers.clear();
    for buffer in chain {
        if buffers.len() == MOST_BUFFERS {
            return false;
        }
        buffers.push(buffer);
    }
    true
}

/// Takes a request from the guest, and the buffers for its reply. If a buffer is not RAM, such as memory of the window for a
/// read without the guest's page cache, answers with an error instead: the server does not see the request, and a driver
/// could take its own zeroes for a reply. The error is the answer's length; 0 if there is no request or no reply to it.
fn taken<'r>(
    memory: &GuestRam,
    buffers: &[Descriptor],
    request: &'r mut [u8],
) -> Result<(&'r mut [u8], Room), u32> {
    let room = room(buffers);
    let (bytes, is_whole) = gather(memory, buffers, request);
    let request = request.get_mut(..bytes).ok_or(0_u32)?;
    if bytes < IN_HEADER {
        return Err(0);
    }
    let mut replies = room.iter();
    if is_whole && replies.all(|(address, len)| memory.check_range(*address, *len)) {
        return Ok((request, room));
    }
    tracing::debug!("a buffer of a request for files is not in the guest's memory");
    Err(match has_reply(request) {
        true => fail(memory, &room, unique_of(request)),
        false => 0,
    })
}

/// Returns whether the server answers a request.
fn has_reply(request: &[u8]) -> bool {
    let opcode = u32::read_from_bytes(&request[OPCODE]).unwrap_or(0);
    !FORGETS.contains(&opcode)
}

/// Copies a request from the guest. Returns its bytes, and whether they are all: buffers can be larger than requests are, or
/// not be RAM.
fn gather(memory: &GuestRam, buffers: &[Descriptor], request: &mut [u8]) -> (usize, bool) {
    let mut bytes = 0_usize;
    for buffer in buffers.iter().filter(|buffer| !buffer.is_write_only()) {
        let end = bytes.saturating_add(len(buffer));
        let place = request.get_mut(bytes..end);
        if place.is_none_or(|place| memory.read_slice(place, buffer.addr()).is_err()) {
            return (bytes, false);
        }
        bytes = end;
    }
    (bytes, true)
}

fn len(buffer: &Descriptor) -> usize {
    usize::try_from(buffer.len()).unwrap_or(usize::MAX)
}

/// Replaces the number of a request, and returns the driver's.
fn tagged(request: &mut [u8], tag: u64) -> u64 {
    let unique = unique_of(request);
    request[UNIQUE].copy_from_slice(&tag.to_ne_bytes());
    unique
}

/// Returns the number of a request.
fn unique_of(request: &[u8]) -> u64 {
    u64::read_from_bytes(&request[UNIQUE]).unwrap_or(0)
}

/// Returns the buffers that the device may write.
fn room(buffers: &[Descriptor]) -> Room {
    buffers
        .iter()
        .filter(|buffer| buffer.is_write_only())
        .map(|buffer| (buffer.addr(), len(buffer)))
        .collect()
}

fn bytes_of(room: &[(GuestAddress, usize)]) -> usize {
    room.iter()
        .fold(0, |sum, (_, len)| sum.saturating_add(*len))
}

/// Writes a reply that fits to its buffers. Returns its length; 0 if a buffer is not in memory.
fn scatter(memory: &GuestRam, room: &[(GuestAddress, usize)], mut reply: &[u8]) -> u32 {
    let len = u32::try_from(reply.len()).unwrap_or(0);
    for &(address, room) in room {
        let (now, later) = reply.split_at(room.min(reply.len()));
        if now.is_empty() {
            continue;
        }
        if let Err(error) = memory.write_slice(now, address) {
            tracing::debug!(%error, "a buffer for a reply is not in the guest's memory");
            return 0;
        }
        reply = later;
    }
    len
}

/// Answers a request with an error, if it has room for that. Returns the answer's length.
fn fail(memory: &GuestRam, room: &[(GuestAddress, usize)], unique: u64) -> u32 {
    let header = OutHeader {
        len: u32::try_from(size_of::<OutHeader>()).unwrap_or(0),
        error: -Errno::IO.raw_os_error(),
        unique,
    };
    match bytes_of(room) >= size_of::<OutHeader>() {
        true => scatter(memory, room, header.as_bytes()),
        false => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::devices::virtio::test_queue::{
        BUFFERS, Entry, NEXT, RAM, TestQueue, WRITE, hostile,
    };
    use proptest::prelude::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    /// Buffers of request `n` and of its reply.
    const STEP: u64 = 0x1000;
    const REPLIES: u64 = BUFFERS + 0x10_0000;

    fn fixture() -> (TestQueue, FsWorker, OwnedFd) {
        let kind = SocketType::SEQPACKET;
        let flags = SocketFlags::CLOEXEC;
        let (ours, server) = socketpair(AddressFamily::UNIX, kind, flags, None).expect("sockets");
        let guest = TestQueue::new(QUEUE_SIZE);
        let mut worker = FsWorker::new(guest.memory.clone(), ours);
        worker.start(vec![guest.active()], 0);
        (guest, worker, server)
    }

    /// Writes requests with these numbers, each with room of `room` bytes for its reply.
    fn ask(guest: &TestQueue, uniques: &[u64], room: u32) {
        let mut table: Vec<Entry> = Vec::new();
        let mut heads = Vec::new();
        for (at, unique) in (0u16..).zip(uniques) {
            let address = BUFFERS + STEP * u64::from(at);
            guest.write_bytes(address, &[0x11; IN_HEADER + 8]);
            guest.write(address + 8, *unique);
            heads.push(2 * at);
            let flags = if room > 0 { NEXT } else { 0 };
            table.push((address, 48, flags, 2 * at + 1));
            table.push((REPLIES + STEP * u64::from(at), room, WRITE, 0));
        }
        guest.offer(&table, &heads, u16::try_from(uniques.len()).expect("few"));
    }

    /// Receives a request, and returns its number.
    fn take(server: &OwnedFd) -> Option<u64> {
        let mut request = [0; 64];
        let (len, _) = recv(server, &mut request, RecvFlags::DONTWAIT).ok()?;
        assert_eq!((len, request[0], request[47]), (48, 0x11, 0x11));
        Some(u64::from_ne_bytes(
            request[UNIQUE].try_into().expect("8 bytes"),
        ))
    }

    fn reply(server: &OwnedFd, unique: u64, body: &[u8]) {
        let len = u32::try_from(size_of::<OutHeader>() + body.len()).expect("short");
        let header = OutHeader {
            len,
            error: 0,
            unique,
        };
        let packet = [header.as_bytes(), body].concat();
        send(server, &packet, SendFlags::NOSIGNAL).expect("sent");
    }

    /// Returns error, number and body of the reply to request `n`.
    fn replied(guest: &TestQueue, n: u64, body: usize) -> (i32, u64, Vec<u8>) {
        let bytes = guest.bytes(REPLIES + STEP * n, size_of::<OutHeader>() + body);
        let (header, body) = OutHeader::read_from_prefix(&bytes).expect("a header");
        assert_eq!(header.len as usize, bytes.len());
        (header.error, header.unique, body.to_vec())
    }

    const EIO: i32 = -libc::EIO;

    #[test]
    fn replies_reach_their_requests_in_any_order() {
        let (guest, mut worker, server) = fixture();
        // A driver may use a number twice.
        ask(&guest, &[7, 7], 64);
        worker.turn();
        assert_eq!(guest.used(), 0);
        let [first, second] = [0; 2].map(|_| take(&server).expect("a request"));
        assert_ne!(first, second);
        reply(&server, second, b"second");
        reply(&server, first, b"first");
        worker.turn();
        assert_eq!(guest.lengths(), [22, 21]);
        assert_eq!(guest.interrupts(), 1);
        assert_eq!(replied(&guest, 0, 5), (0, 7, b"first".to_vec()));
        assert_eq!(replied(&guest, 1, 6), (0, 7, b"second".to_vec()));
        // A second reply to a request is none.
        reply(&server, first, b"again");
        worker.turn();
        assert_eq!(guest.used(), 2);
    }

    #[test]
    fn a_request_without_room_for_a_reply_is_used_at_once() {
        let (guest, mut worker, server) = fixture();
        ask(&guest, &[1, 2], 0);
        worker.turn();
        assert_eq!(guest.lengths(), [0, 0]);
        let taken = [0; 2].map(|_| take(&server).expect("a request"));
        // A later request does not get the reply that the server sends nevertheless.
        ask(&guest, &[1, 2, 3], 64);
        reply(&server, taken[1], b"");
        worker.turn();
        reply(&server, taken[1], b"");
        worker.turn();
        assert_eq!((guest.used(), guest.interrupts()), (2, 1));
    }

    #[test]
    fn a_request_that_has_no_reply_is_used_at_once_whatever_its_room() {
        let (guest, mut worker, server) = fixture();
        let opcodes = [FORGETS[0], FORGETS[1], 15];
        let mut table = Vec::new();
        for (at, opcode) in (0u16..).zip(opcodes) {
            let address = BUFFERS + STEP * u64::from(at);
            guest.write_bytes(address, &[0; 48]);
            guest.write_bytes(address + 4, &opcode.to_ne_bytes());
            table.push((address, 48, NEXT, 2 * at + 1));
            table.push((REPLIES + STEP * u64::from(at), 64, WRITE, 0));
        }
        guest.offer(&table, &[0, 2, 4], 3);
        worker.turn();
        assert_eq!(guest.lengths(), [0, 0]);
        assert_eq!(worker.pending.len(), 1);
        let mut request = [0; 64];
        for opcode in opcodes {
            let (len, _) = recv(&server, &mut request, RecvFlags::DONTWAIT).expect("a request");
            assert_eq!((len, &request[OPCODE]), (48, &opcode.to_ne_bytes()[..]));
        }
    }

    #[test]
    fn a_chain_of_more_buffers_than_a_queue_has_is_no_request() {
        const INDIRECT: u16 = 4;
        let (guest, mut worker, server) = fixture();
        guest.write_bytes(BUFFERS, &[0x11; 48]);
        // A table of its own, of a buffer for the request and others for the reply.
        let tables = [QUEUE_SIZE, QUEUE_SIZE + 1].map(|buffers| {
            let at = BUFFERS + STEP * u64::from(buffers);
            for index in 0..buffers {
                let last = index + 1 == buffers;
                let (address, len, flags) = match index {
                    0 => (BUFFERS, 48u32, NEXT),
                    _ => (REPLIES, 16, WRITE | if last { 0 } else { NEXT }),
                };
                let entry = at + 16 * u64::from(index);
                guest.write_bytes(entry, &address.to_le_bytes());
                guest.write_bytes(entry + 8, &len.to_le_bytes());
                guest.write_bytes(entry + 12, &flags.to_le_bytes());
                guest.write_bytes(entry + 14, &(index + 1).to_le_bytes());
            }
            (at, 16 * u32::from(buffers), INDIRECT, 0)
        });
        guest.offer(&tables, &[0, 1], 2);
        worker.turn();
        assert_eq!(guest.lengths(), [0]);
        assert!(take(&server).is_some() && take(&server).is_none());
        let room = worker.pending.values().map(|pending| pending.room.len());
        assert_eq!(room.collect::<Vec<_>>(), [usize::from(QUEUE_SIZE) - 1]);
    }

    #[test]
    fn a_chain_is_read_no_further_than_a_queue_has_buffers() {
        let buffer = || Descriptor::new(BUFFERS, 48, NEXT, 0);
        let mut buffers = Vec::new();
        for (there, taken, fits) in [
            (0, 0, true),
            (3, 3, true),
            (MOST_BUFFERS, MOST_BUFFERS, true),
            (MOST_BUFFERS + 1, MOST_BUFFERS + 1, false),
            (65_535, MOST_BUFFERS + 1, false),
        ] {
            let mut read = 0;
            let chain = std::iter::repeat_with(buffer).take(there);
            let chain = chain.inspect(|_| read += 1);
            assert_eq!(copied(chain, &mut buffers), fits, "{there}");
            assert_eq!((read, buffers.len()), (taken, taken.min(MOST_BUFFERS)));
        }
    }

    /// Another processor of the guest changes the table of a request between a short and a long one.
    #[test]
    fn a_chain_that_changes_meanwhile_has_no_more_buffers_than_a_queue() {
        const INDIRECT: u16 = 4;
        const LONG: u16 = 2048;
        /// Changes that the device has seen.
        const CHANGES: usize = 200;
        let (guest, mut worker, server) = fixture();
        guest.write_bytes(BUFFERS, &[0x11; 48]);
        let tables = [BUFFERS + STEP, BUFFERS + 0x8_0000];
        for (at, buffers) in tables.into_iter().zip([2, LONG]) {
            for index in 0..buffers {
                let (address, len, flags) = match index {
                    0 => (BUFFERS, 48u32, NEXT),
                    _ => (REPLIES, 16, WRITE | NEXT),
                };
                let flags = if index + 1 == buffers { WRITE } else { flags };
                let entry = at + 16 * u64::from(index);
                guest.write(entry, address);
                guest.write(entry + 8, len);
                guest.write(entry + 12, flags);
                guest.write(entry + 14, index + 1);
            }
        }
        guest.offer(&[(tables[0], 16 * u32::from(LONG), INDIRECT, 0)], &[0], 0);
        let is_over = AtomicBool::new(false);
        let (memory, table) = (guest.memory.clone(), guest.table());
        let longest = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    for at in tables {
                        memory.store(at, table, Ordering::Relaxed).expect("ram");
                    }
                }
            });
            let (mut longest, mut last, mut changes, mut round) = (0, 0, 0, 0_u16);
            while changes < CHANGES {
                round = round.wrapping_add(1);
                guest.offer(&[], &[0], round);
                worker.turn();
                let room = worker.pending.drain().map(|(_, pending)| pending.room);
                let buffers = room.map(|room| room.len()).max().unwrap_or(0);
                take(&server);
                changes += usize::from(buffers != last);
                last = buffers;
                longest = longest.max(buffers);
            }
            is_over.store(true, Ordering::Relaxed);
            longest
        });
        assert_eq!(longest, 1);
    }

    #[test]
    fn a_reply_that_does_not_fit_or_lies_about_its_length_is_an_error() {
        let (guest, mut worker, server) = fixture();
        ask(&guest, &[1, 2], 24);
        worker.turn();
        let [first, second] = [0; 2].map(|_| take(&server).expect("a request"));
        reply(&server, first, &[1; 9]);
        let lie = OutHeader {
            len: 99,
            error: 0,
            unique: second,
        };
        send(&server, lie.as_bytes(), SendFlags::NOSIGNAL).expect("sent");
        worker.turn();
        assert_eq!(guest.lengths(), [16, 16]);
        assert_eq!(replied(&guest, 0, 0), (EIO, 1, Vec::new()));
        assert_eq!(replied(&guest, 1, 0), (EIO, 2, Vec::new()));
    }

    #[test]
    fn requests_with_buffers_outside_of_ram_fail_and_the_queue_goes_on() {
        let (guest, mut worker, server) = fixture();
        // Writes the requests' headers. Their buffers are those below.
        ask(&guest, &[1, 2, 3, 4, 5], 16);
        let request = |n: u64| (BUFFERS + STEP * n, 48, NEXT);
        let reply_of = |n: u64| (REPLIES + STEP * n, 16, WRITE);
        let [far, across] = [(1 << 40, 4096), (RAM as u64 - 512, 1024)];
        let read = |n, (address, len)| {
            let (reply, room, _) = reply_of(n);
            [
                request(n),
                (reply, room, WRITE | NEXT),
                (address, len, WRITE),
            ]
        };
        let write = |n, (address, len)| [request(n), (address, len, NEXT), reply_of(n)];
        let outside = [
            read(0, far),
            read(1, across),
            write(2, far),
            write(3, across),
        ];
        let buffers = outside
            .concat()
            .into_iter()
            .chain([request(4), reply_of(4)]);
        let table: Vec<Entry> = (1..)
            .zip(buffers)
            .map(|(next, (address, len, flags))| (address, len, flags, next))
            .collect();
        guest.offer(&table, &[0, 3, 6, 9, 12], 5);
        worker.turn();
        assert_eq!(guest.lengths(), [16; 4]);
        for n in 0..4 {
            assert_eq!(replied(&guest, n, 0), (EIO, n + 1, Vec::new()));
        }
        // The server has the one whose buffers are all RAM, and no other.
        let tag = take(&server).expect("a request");
        assert_eq!(take(&server), None);
        reply(&server, tag, b"");
        worker.turn();
        assert_eq!(replied(&guest, 4, 0), (0, 5, Vec::new()));
        assert_eq!(guest.lengths(), [16; 5]);
    }

    #[test]
    fn a_request_that_has_no_reply_gets_none_if_it_lies_outside_of_ram() {
        let (guest, mut worker, server) = fixture();
        guest.write_bytes(BUFFERS, &[0; 48]);
        guest.write_bytes(BUFFERS + 4, &FORGETS[1].to_ne_bytes());
        let table = [
            (BUFFERS, 40, NEXT, 1),
            (RAM as u64, 16, NEXT, 2),
            (REPLIES, 16, WRITE, 0),
        ];
        guest.offer(&table, &[0], 1);
        worker.turn();
        assert_eq!(guest.lengths(), [0]);
        assert_eq!(guest.bytes(REPLIES, 16), [0; 16]);
        assert_eq!(take(&server), None);
    }

    #[test]
    fn requests_fail_once_the_server_is_gone() {
        let (guest, mut worker, server) = fixture();
        ask(&guest, &[1, 2], 64);
        worker.turn();
        take(&server).expect("a request");
        drop(server);
        worker.turn();
        assert_eq!(guest.lengths(), [16, 16]);
        assert_eq!(replied(&guest, 1, 0), (EIO, 2, Vec::new()));
        // So do later ones.
        worker.stop();
        let guest = TestQueue::new(QUEUE_SIZE);
        worker.memory = guest.memory.clone();
        worker.start(vec![guest.active()], 0);
        ask(&guest, &[3], 64);
        worker.turn();
        assert_eq!(replied(&guest, 0, 0), (EIO, 3, Vec::new()));
    }

    #[test]
    fn a_server_that_ends_between_two_requests_fails_both() {
        let (guest, mut worker, server) = fixture();
        drop(server);
        ask(&guest, &[1, 2], 64);
        let mut used = [false];
        worker.forward(0, &mut used);
        assert_eq!(guest.lengths(), [16, 16]);
        assert_eq!(replied(&guest, 0, 0), (EIO, 1, Vec::new()));
    }

    #[test]
    fn requests_wait_while_the_server_is_slow() {
        let (guest, mut worker, server) = fixture();
        let small = 4096;
        rustix::net::sockopt::set_socket_send_buffer_size(
            worker.server.as_ref().expect("a socket"),
            small,
        )
        .expect("set");
        let uniques: Vec<u64> = (1..=60).collect();
        ask(&guest, &uniques, 64);
        worker.turn();
        let mut taken = 0;
        assert!(worker.pending.len() < uniques.len());
        while let Some(tag) = take(&server) {
            reply(&server, tag, b"");
            taken += 1;
            worker.turn();
        }
        assert_eq!(taken, uniques.len());
        assert_eq!(usize::from(guest.used()), uniques.len());
    }

    #[test]
    fn a_driver_that_offers_a_buffer_again_and_again_waits() {
        let (guest, mut worker, server) = fixture();
        ask(&guest, &[1], 64);
        let mut taken = 0;
        for round in 1..=8u16 {
            guest.offer(&[], &[0; QUEUE_SIZE as usize], round * QUEUE_SIZE);
            worker.turn();
            while take(&server).is_some() {
                taken += 1;
            }
        }
        assert_eq!((taken, worker.pending.len()), (MOST_PENDING, MOST_PENDING));
        assert_eq!(guest.used(), 0);
    }

    #[test]
    fn requests_that_wait_hold_no_message_of_high_priority_up() {
        let (guest, mut worker, server) = fixture();
        let urgent = guest.second();
        worker.stop();
        worker.start(vec![urgent.active(), guest.active()], 0);
        ask(&guest, &[1], 64);
        let mut taken = 0;
        for round in 1..=2u16 {
            guest.offer(&[], &[0; QUEUE_SIZE as usize], round * QUEUE_SIZE);
            worker.turn();
            while take(&server).is_some() {
                taken += 1;
            }
        }
        assert_eq!(taken, MOST_PENDING);
        ask(&urgent, &[2], 64);
        worker.turn();
        let tag = take(&server).expect("the urgent message");
        reply(&server, tag, b"");
        worker.turn();
        assert_eq!((urgent.used(), guest.used()), (1, 0));
    }

    #[test]
    fn a_reset_ends_the_use_of_the_queue() {
        let (guest, mut worker, server) = fixture();
        ask(&guest, &[1], 64);
        worker.turn();
        let tag = take(&server).expect("a request");
        worker.stop();
        worker.start(vec![guest.active()], 0);
        guest.offer(&[], &[], 0);
        reply(&server, tag, b"late");
        worker.turn();
        assert_eq!((guest.used(), guest.interrupts()), (0, 0));
    }

    #[test]
    fn what_is_no_request_is_used_and_goes_nowhere() {
        let (guest, mut worker, server) = fixture();
        let table = [
            (BUFFERS, 39, NEXT, 1),
            (REPLIES, 64, WRITE, 0),
            (
                BUFFERS,
                u32::try_from(MOST_REQUEST).expect("short") + 1,
                0,
                0,
            ),
            (RAM as u64, 64, 0, 0),
            (BUFFERS, 48, WRITE, 0),
        ];
        guest.offer(&table, &[0, 2, 3, 4], 4);
        worker.turn();
        assert_eq!(guest.lengths(), [0; 4]);
        assert_eq!(take(&server), None);
    }

    proptest! {
        /// Arbitrary queue contents and replies cause no panic, no hang and no write outside the descriptors' buffers.
        #[test]
        fn hostile_queues_and_servers_are_survived(
            hostile in hostile(),
            replies in proptest::collection::vec((0u64..20, proptest::collection::vec(any::<u8>(), 0..100)), 0..20),
        ) {
            let (guest, mut worker, server) = fixture();
            guest.offer_hostile(&hostile);
            worker.turn();
            for (unique, body) in &replies {
                if unique % 4 == 0 {
                    if !body.is_empty() {
                        send(&server, body, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).expect("sent");
                    }
                } else {
                    reply(&server, *unique, body);
                }
                worker.turn();
            }
            drop(server);
            worker.turn();
            prop_assert!(guest.used() <= hostile.available);
            prop_assert!(worker.pending.is_empty());
            prop_assert!(guest.guards(&hostile));
        }
    }
}
