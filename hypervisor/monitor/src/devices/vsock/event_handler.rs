//! Moves packets between the virtqueues and the connections, on the device thread.

use std::collections::HashMap;
use std::io::Write;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events};
use virtio_queue::{DescriptorChain, Writer};

use super::connection::{Interest, Key};
use super::device::QUEUES;
use super::mux::{Mux, WatchChange};
use super::turn::{self, MAX_PAYLOAD, Ring, Turn};
use crate::devices::virtio::{ActiveQueue, VirtioWorker};
use crate::ram::GuestRam;
use crate::snapshot::OpenConnection;

/// Event that ends all connections of the guest (virtio 1.2, 5.10.6.7), and its size.
const VIRTIO_VSOCK_EVENT_TRANSPORT_RESET: u32 = 0;
const EVENT_LEN: u32 = 4;

/// Time limit for the host to read the data that a guest sent before it ended.
const LAST_BYTES: Duration = Duration::from_secs(10);

impl Ring<GuestRam> for ActiveQueue {
    fn size(&self) -> u16 {
        self.size()
    }

    fn pop<'m>(&mut self, memory: &'m GuestRam) -> Option<DescriptorChain<&'m GuestRam>> {
        self.pop(memory)
    }

    fn undo_pop(&mut self) {
        self.undo_pop();
    }

    fn add_used(&mut self, memory: &GuestRam, head: u16, written: u32) -> bool {
        self.add_used(memory, head, written)
    }

    fn interrupt(&mut self, memory: &GuestRam) {
        self.interrupt(memory);
    }
}

#[derive(Debug)]
struct Active {
    receive: ActiveQueue,
    transmit: ActiveQueue,
    events: ActiveQueue,
}

/// Serves the vsock queues on the device thread.
#[derive(Debug)]
pub struct VsockWorker {
    memory: GuestRam,
    mux: Mux,
    active: Option<Active>,
    keys: HashMap<RawFd, Key>,
    payload: Vec<u8>,
    /// Whether packets wait in the transmit queue because the guest provides no buffers for resets.
    transmit_waits: bool,
    /// Whether the driver still has to learn that its connections are gone.
    reset_due: bool,
}

impl VsockWorker {
    /// Creates a worker without queues.
    pub fn new(memory: GuestRam, mux: Mux) -> Self {
        Self {
            memory,
            mux,
            active: None,
            keys: HashMap::new(),
            payload: vec![0; MAX_PAYLOAD],
            transmit_waits: false,
            reset_due: false,
        }
    }

    /// Tells the driver that its connections are gone, once it has a buffer for that: its event queue has some always.
    fn tell_reset(&mut self) {
        let Some(active) = self.active.as_mut().filter(|_| self.reset_due) else {
            return;
        };
        let (queue, memory) = (&mut active.events, &self.memory);
        let Some(chain) = queue.pop(memory) else {
            return;
        };
        self.reset_due = false;
        let head = chain.head_index();
        let event = VIRTIO_VSOCK_EVENT_TRANSPORT_RESET.to_le_bytes();
        let mut buffer = Writer::new(memory, chain).ok();
        let written = buffer
            .as_mut()
            .and_then(|buffer| buffer.write_all(&event).ok());
        let bytes = written.map_or(0, |()| EVENT_LEN);
        if queue.add_used(memory, head, bytes) {
            queue.interrupt(memory);
        }
    }

    fn transmit(&mut self) {
        let Some(active) = &mut self.active else {
            return;
        };
        let queue = &mut active.transmit;
        let turn = turn::transmit(queue, &self.memory, &mut self.mux, &mut self.payload);
        self.transmit_waits = turn == Turn::Waits;
        if turn == Turn::Unfinished {
            queue.again();
        }
    }

    fn receive(&mut self) {
        let Some(active) = &mut self.active else {
            return;
        };
        let queue = &mut active.receive;
        let turn = turn::receive(queue, &self.memory, &mut self.mux, &mut self.payload);
        if turn == Turn::Unfinished {
            queue.again();
        }
        if self.transmit_waits && self.mux.can_receive() {
            active.transmit.again();
        }
    }

    /// Applies changes to the event manager's watches.
    fn apply(changes: Vec<WatchChange>, ops: &mut EventOps<'_>) {
        for change in changes {
            let result = match change {
                WatchChange::Add(fd, _, interest) => {
                    ops.add(Events::new_raw(fd, event_set(interest)))
                }
                WatchChange::Modify(fd, interest) => {
                    ops.modify(Events::new_raw(fd, event_set(interest)))
                }
                WatchChange::Remove(fd) => ops.remove(Events::empty_raw(fd)),
                // Dropping the connection closes its socket, after its watch is removed.
                WatchChange::Close(connection) if connection.watched.is_some() => {
                    ops.remove(Events::empty_raw(connection.fd()))
                }
                WatchChange::Close(_) => Ok(()),
            };
            if let Err(error) = result {
                tracing::warn!(%error, "cannot change what the vsock device waits for");
            }
        }
    }

    fn sync_watches(&mut self, ops: &mut EventOps<'_>) {
        let changes = self.mux.watch_changes();
        for change in &changes {
            match change {
                WatchChange::Add(fd, key, _) => {
                    self.keys.insert(*fd, *key);
                }
                WatchChange::Remove(fd) => {
                    self.keys.remove(fd);
                }
                // Only a watched connection has an entry.
                WatchChange::Close(connection) if connection.watched.is_some() => {
                    self.keys.remove(&connection.fd());
                }
                WatchChange::Modify(..) | WatchChange::Close(_) => {}
            }
        }
        Self::apply(changes, ops);
    }
}

impl VirtioWorker for VsockWorker {
    fn start(&mut self, queues: Vec<ActiveQueue>, _: u64) {
        let queues = <[ActiveQueue; QUEUES]>::try_from(queues);
        self.active = queues.ok().map(|[receive, transmit, events]| Active {
            receive,
            transmit,
            events,
        });
    }

    fn restored(&mut self) {
        self.reset_due = true;
    }

    fn connections(&self) -> Vec<OpenConnection> {
        self.mux.open_connections()
    }

    fn queue_ready(&mut self, _: usize, ops: &mut EventOps<'_>) {
        self.tell_reset();
        self.transmit();
        self.receive();
        self.sync_watches(ops);
    }

    fn descriptor_ready(&mut self, events: Events, ops: &mut EventOps<'_>) {
        if let Some(key) = self.keys.get(&events.fd()) {
            let set = events.event_set();
            let hung_up = set.intersects(EventSet::HANG_UP | EventSet::ERROR);
            self.mux
                .host_ready(*key, set.contains(EventSet::IN), hung_up);
        }
        self.receive();
        self.sync_watches(ops);
    }

    fn stop(&mut self) {
        self.active = None;
        self.transmit_waits = false;
        self.reset_due = false;
        self.keys.clear();
        self.mux.clear();
    }

    /// Delivers the packets that the guest put into its transmit queue before it ended.
    fn finish(&mut self) {
        let deadline = Instant::now() + LAST_BYTES;
        // One round processes a full queue, and the ended guest does not refill it.
        for _ in 0..2 {
            self.transmit();
            self.mux.forget_resets();
        }
        self.active = None;
        self.mux.finish(deadline);
    }
}

fn event_set(interest: Interest) -> EventSet {
    let mut set = EventSet::empty();
    set.set(EventSet::IN, interest.read);
    set.set(EventSet::OUT, interest.write);
    set
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::virtio::Interrupt;
    use crate::devices::vsock::packet::{HEADER_LEN, Header, Op, TYPE_STREAM};
    use crate::devices::vsock::{ConnectRequest, HOST_CID, Refused};
    use proptest::prelude::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::desc::split::Descriptor;
    use virtio_queue::mock::MockSplitQueue;
    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::eventfd::EventFd;
    use wormhole_lock::Mutex;
    use zerocopy::IntoBytes;

    const SIZE: u16 = 16;
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const QUEUE_ADDRESSES: [u64; 3] = [0x0, 0x1000, 0x2000];
    const BUFFERS: u64 = 0x1_0000;

    #[derive(Debug, Default)]
    struct Log(Mutex<Vec<u16>>);

    impl Interrupt for Log {
        fn queue_used(&self, vector: u16) {
            self.0.lock().push(vector);
        }
    }

    fn memory() -> GuestRam {
        crate::ram::test_ram(1 << 20)
    }

    fn mocks(memory: &GuestRam) -> [MockSplitQueue<'_, GuestRam>; 3] {
        QUEUE_ADDRESSES.map(|at| MockSplitQueue::create(memory, GuestAddress(at), SIZE))
    }

    /// Returns a worker on active queues with the vectors 10, 11 and 12, which accepts every connection.
    fn worker(memory: &GuestRam) -> (VsockWorker, Arc<Log>, Arc<Mutex<Vec<UnixStream>>>) {
        let accepted = Arc::new(Mutex::new(Vec::new()));
        let streams = Arc::clone(&accepted);
        let accept = move |_: ConnectRequest| {
            let (guest, host) = UnixStream::pair().map_err(|_| Refused)?;
            streams.lock().push(host);
            Ok(guest)
        };
        let mux = Mux::new(3, Box::new(accept));
        let mut worker = VsockWorker::new(memory.clone(), mux);
        let log = Arc::new(Log::default());
        let queues = (10..)
            .zip(mocks(memory))
            .map(|(vector, mock)| {
                let queue = mock.create_queue().expect("queue");
                let interrupt = Arc::clone(&log) as Arc<dyn Interrupt>;
                let kick = EventFd::new(libc::EFD_NONBLOCK).expect("eventfd");
                ActiveQueue::new(queue, vector, interrupt, Arc::new(kick))
            })
            .collect();
        worker.start(queues, 0);
        (worker, log, accepted)
    }

    fn header(op: Op, len: u32) -> Header {
        Header {
            src_cid: 3.into(),
            dst_cid: HOST_CID.into(),
            src_port: 1000.into(),
            dst_port: 9000.into(),
            len: len.into(),
            kind: TYPE_STREAM.into(),
            op: u16::from(op).into(),
            buf_alloc: 4096.into(),
            ..Header::default()
        }
    }

    fn descriptor(address: u64, len: u32, flags: u16, next: u16) -> RawDescriptor {
        RawDescriptor::from(Descriptor::new(address, len, flags, next))
    }

    /// Writes to the guest's buffers.
    fn write(memory: &GuestRam, offset: u64, bytes: &[u8]) {
        memory
            .write_slice(bytes, GuestAddress(BUFFERS + offset))
            .expect("ram");
    }

    /// Sends the guest's request for a connection.
    fn request(memory: &GuestRam, transmit: &MockSplitQueue<'_, GuestRam>) {
        write(memory, 0, header(Op::Request, 0).as_bytes());
        transmit
            .add_desc_chains(&[descriptor(BUFFERS, 44, 0, 0)], 0)
            .expect("ram");
    }

    #[test]
    fn a_connection_is_made_and_answered_through_the_queues() {
        let memory = memory();
        let [receive, transmit, _] = mocks(&memory);
        let (mut worker, log, accepted) = worker(&memory);
        request(&memory, &transmit);
        worker.transmit();
        worker.receive();
        // The response waits for a receive buffer.
        assert_eq!(log.0.lock()[..], [11]);
        assert_eq!(accepted.lock().len(), 1);
        receive
            .add_desc_chains(&[descriptor(BUFFERS + 0x1000, 4096, WRITE, 0)], 0)
            .expect("ram");
        worker.receive();
        assert_eq!(log.0.lock()[..], [11, 10]);
        let mut bytes = [0; HEADER_LEN];
        memory
            .read_slice(&mut bytes, GuestAddress(BUFFERS + 0x1000))
            .expect("ram");
        let answer: Header = zerocopy::transmute!(bytes);
        assert_eq!(answer.op(), Op::Response);
        assert_eq!(answer.dst_port.get(), 1000);
    }

    #[test]
    fn a_restored_driver_learns_once_that_its_connections_are_gone() {
        let memory = memory();
        let [_, _, events] = mocks(&memory);
        let (mut worker, log, _) = worker(&memory);
        worker.restored();
        worker.tell_reset();
        assert!(log.0.lock().is_empty());
        write(&memory, 0, &[0xff; 8]);
        events
            .add_desc_chains(&[descriptor(BUFFERS, 8, WRITE, 0)], 0)
            .expect("ram");
        worker.tell_reset();
        worker.tell_reset();
        assert_eq!(log.0.lock()[..], [12]);
        assert_eq!(events.used().idx().load(), 1);
        let mut bytes = [0; 8];
        memory
            .read_slice(&mut bytes, GuestAddress(BUFFERS))
            .expect("ram");
        assert_eq!(bytes, [0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    }

    #[test]
    fn open_connections_are_found_by_their_ports() {
        let memory = memory();
        let [_, transmit, _] = mocks(&memory);
        let (mut worker, _, _accepted) = worker(&memory);
        assert_eq!(worker.connections(), []);
        request(&memory, &transmit);
        worker.transmit();
        let open = OpenConnection {
            guest_port: 1000,
            host_port: 9000,
        };
        assert_eq!(worker.connections(), [open]);
    }

    /// Writes a request, and at 100 the header and at 200 the payload of data.
    fn write_request_and_data(memory: &GuestRam) {
        write(memory, 0, header(Op::Request, 0).as_bytes());
        write(memory, 100, header(Op::Data, 8).as_bytes());
        write(memory, 200, b"abcdefgh");
    }

    #[test]
    fn payload_may_be_spread_and_must_be_there() {
        let memory = memory();
        let [_, transmit, _] = mocks(&memory);
        let (mut worker, _, accepted) = worker(&memory);
        write_request_and_data(&memory);
        transmit
            .add_desc_chains(
                &[
                    descriptor(BUFFERS, 44, 0, 0),
                    descriptor(BUFFERS + 100, 44, NEXT, 2),
                    descriptor(BUFFERS + 200, 3, NEXT, 3),
                    descriptor(BUFFERS + 203, 5, 0, 0),
                    // Header with a length of 8 and without payload.
                    descriptor(BUFFERS + 100, 44, 0, 0),
                ],
                0,
            )
            .expect("ram");
        worker.transmit();
        let mut streams = accepted.lock();
        streams[0].set_nonblocking(true).expect("socket");
        let mut buffer = [0; 64];
        let len = streams[0].read(&mut buffer).expect("data");
        assert_eq!(&buffer[..len], b"abcdefgh");
        assert_eq!(transmit.used().idx().load(), 3);
    }

    #[test]
    fn a_payload_outside_of_ram_resets_its_connection_and_the_queue_goes_on() {
        let memory = memory();
        let [receive, transmit, _] = mocks(&memory);
        let (mut worker, _, accepted) = worker(&memory);
        write_request_and_data(&memory);
        transmit
            .add_desc_chains(
                &[
                    descriptor(BUFFERS, 44, 0, 0),
                    descriptor(BUFFERS + 100, 44, NEXT, 2),
                    descriptor(BUFFERS + 200, 8, 0, 0),
                    // The same header, in two parts, with a payload far from RAM.
                    descriptor(BUFFERS + 100, 20, NEXT, 4),
                    descriptor(BUFFERS + 120, 24, NEXT, 5),
                    descriptor(1 << 40, 8, 0, 0),
                    descriptor(BUFFERS + 100, 44, NEXT, 7),
                    descriptor(BUFFERS + 200, 8, 0, 0),
                ],
                0,
            )
            .expect("ram");
        receive
            .add_desc_chains(
                &[
                    descriptor(BUFFERS + 0x1000, 64, WRITE, 0),
                    descriptor(BUFFERS + 0x2000, 64, WRITE, 0),
                ],
                0,
            )
            .expect("ram");
        worker.transmit();
        assert_eq!(transmit.used().idx().load(), 4);
        assert_eq!(worker.mux.connections(), 0);
        worker.receive();
        let mut bytes = [0; HEADER_LEN];
        for at in [0x1000, 0x2000] {
            memory
                .read_slice(&mut bytes, GuestAddress(BUFFERS + at))
                .expect("ram");
            let answer: Header = zerocopy::transmute!(bytes);
            assert_eq!((answer.op(), answer.dst_port.get()), (Op::Reset, 1000));
        }
        // The host has what came before, and nothing behind the gap.
        drop(worker);
        let mut received = Vec::new();
        accepted.lock()[0]
            .read_to_end(&mut received)
            .expect("end of file");
        assert_eq!(received, b"abcdefgh");
    }

    #[test]
    fn a_reset_drops_connections_and_touches_no_queue_any_more() {
        let memory = memory();
        let [receive, transmit, _] = mocks(&memory);
        let (mut worker, _, accepted) = worker(&memory);
        request(&memory, &transmit);
        worker.transmit();
        worker.stop();
        let mut end = Vec::new();
        accepted.lock()[0]
            .read_to_end(&mut end)
            .expect("end of file");
        receive
            .add_desc_chains(&[descriptor(BUFFERS + 0x1000, 4096, WRITE, 0)], 0)
            .expect("ram");
        worker.receive();
        assert_eq!(receive.used().idx().load(), 0);
    }

    #[test]
    fn what_was_sent_before_the_end_is_delivered() {
        let memory = memory();
        let [_, transmit, _] = mocks(&memory);
        let (mut worker, _, accepted) = worker(&memory);
        write(&memory, 0, header(Op::Request, 0).as_bytes());
        write(&memory, 0x100, header(Op::Data, 0x8000).as_bytes());
        let data = descriptor(BUFFERS + 0x100, 44 + 0x8000, 0, 0);
        transmit
            .add_desc_chains(&[descriptor(BUFFERS, 44, 0, 0), data, data], 0)
            .expect("ram");
        worker.finish();
        let mut all = Vec::new();
        accepted.lock()[0]
            .read_to_end(&mut all)
            .expect("end of file");
        assert_eq!(all.len(), 2 * 0x8000);
    }

    proptest! {
        /// Arbitrary queue contents cause neither a panic nor a hang.
        #[test]
        fn hostile_queues_are_survived(
            tables in proptest::collection::vec(
                (0usize..2, 0u64..0x11_0000, 0u32..0x2_0000, 0u16..8, 0u16..20), 1..32),
            heads in proptest::collection::vec(0u16..20, 0..64),
            available in any::<[u16; 2]>(),
            junk in proptest::collection::vec(any::<u8>(), 0..4096),
            op in 0u16..9,
        ) {
            let memory = memory();
            let mocks = mocks(&memory);
            let (mut worker, _, _) = worker(&memory);
            write(&memory, 0, &junk);
            write(&memory, 0, header(Op::Request, 0).as_bytes());
            write(&memory, 0x100, header(Op::from(op), 40).as_bytes());
            for (index, (queue, address, len, flags, next)) in (0u16..).zip(tables) {
                let address = if address % 3 == 0 { BUFFERS + 0x100 * (address % 2) } else { address };
                let slot = GuestAddress(QUEUE_ADDRESSES[queue] + 16 * u64::from(index % SIZE));
                let bytes: Descriptor = descriptor(address, len, flags, next).into();
                memory.write_obj(bytes, slot).expect("ram");
            }
            for (queue, mock) in mocks.iter().enumerate().take(2) {
                for (index, head) in heads.iter().enumerate() {
                    let at = mock.avail_addr().0 + 4 + 2 * (index as u64 % u64::from(SIZE));
                    memory.write_obj(*head, GuestAddress(at)).expect("ram");
                }
                let idx = available[queue] % 40;
                memory.write_obj(idx, GuestAddress(mock.avail_addr().0 + 2)).expect("ram");
            }
            for _ in 0..4 {
                worker.transmit();
                worker.receive();
            }
            prop_assert!(worker.mux.connections() <= 1);
        }
    }
}
