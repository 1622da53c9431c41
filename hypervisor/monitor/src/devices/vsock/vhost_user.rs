//! Serves the vsock device of a guest of another monitor, such as QEMU, by vhost-user. The other monitor answers the guest's
//! registers and shares the guest's memory; the queues and the connections are served here.

#[cfg(feature = "fuzzing")]
mod attached;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vhost::vhost_user::Listener;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{
    Error, VhostUserBackendMut, VhostUserDaemon, VringMutex, VringState, VringT,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use wormhole_lock::Mutex;

use super::VsockAcceptor;
use super::connection::{Interest, Key};
use super::mux::{Mux, WatchChange};
use super::turn::{self, MAX_PAYLOAD, Ring, Turn};

#[cfg(feature = "fuzzing")]
pub use self::attached::Attached;

type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

/// Queues: to the guest, and from it. The other monitor has the event queue.
const QUEUES: usize = 2;
/// Most buffers of a queue.
const QUEUE_SIZE: usize = 1024;
/// Event of the sockets. Lower numbers are those of the queues and of the crate.
const SOCKETS: u16 = 3;
/// Event of another turn at the queues.
const AGAIN: u16 = 4;
/// Event of the end of the connection.
const END: u16 = 5;
/// Most sockets whose events are read at once.
const EVENTS: usize = 64;

struct Backend {
    memory: Memory,
    guest_cid: u64,
    /// The crate asks for a value that threads can share.
    mux: Mutex<Mux>,
    /// Whether the other end speaks the protocol.
    is_monitor: AtomicBool,
    sockets: Epoll,
    /// Signalled for another turn, so that requests of the monitor are served between two of them.
    again: EventFd,
    keys: HashMap<RawFd, Key>,
    payload: Vec<u8>,
}

impl Backend {
    fn new(memory: Memory, mux: Mux) -> io::Result<Self> {
        Ok(Self {
            memory,
            guest_cid: mux.guest_cid(),
            mux: Mutex::new(mux),
            is_monitor: AtomicBool::new(false),
            sockets: Epoll::new()?,
            again: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            keys: HashMap::new(),
            payload: vec![0; MAX_PAYLOAD],
        })
    }

    fn transmit(&mut self, ring: &VringMutex) -> Turn {
        let memory = self.memory.memory();
        let mut mux = self.mux.lock();
        turn::transmit(&mut *ring.get_mut(), &memory, &mut mux, &mut self.payload)
    }

    fn receive(&mut self, ring: &VringMutex) -> Turn {
        let memory = self.memory.memory();
        let mut mux = self.mux.lock();
        turn::receive(&mut *ring.get_mut(), &memory, &mut mux, &mut self.payload)
    }

    /// Passes the sockets that are ready to the mux.
    fn sockets_ready(&mut self) -> io::Result<()> {
        let mut events = vec![EpollEvent::default(); EVENTS];
        let count = match self.sockets.wait(0, &mut events) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            waited => waited?,
        };
        let mut mux = self.mux.lock();
        for event in &events[..count] {
            let Some(key) = self.keys.get(&event.fd()) else {
                continue;
            };
            let set = event.event_set();
            let hung_up = set.intersects(EventSet::HANG_UP | EventSet::ERROR);
            mux.host_ready(*key, set.contains(EventSet::IN), hung_up);
        }
        Ok(())
    }

    /// Applies the mux's changes to the watched sockets.
    fn watch(&mut self) {
        let changes = self.mux.lock().watch_changes();
        for change in changes {
            let (operation, fd, interest) = match &change {
                WatchChange::Add(fd, key, interest) => {
                    self.keys.insert(*fd, *key);
                    (ControlOperation::Add, *fd, Some(*interest))
                }
                WatchChange::Modify(fd, interest) => {
                    (ControlOperation::Modify, *fd, Some(*interest))
                }
                WatchChange::Remove(fd) => (ControlOperation::Delete, *fd, None),
                // Dropped after its watch is removed, which closes the socket.
                WatchChange::Close(connection) if connection.watched.is_some() => {
                    (ControlOperation::Delete, connection.fd(), None)
                }
                WatchChange::Close(_) => continue,
            };
            if interest.is_none() {
                self.keys.remove(&fd);
            }
            let set = interest.map_or(EventSet::empty(), event_set);
            let data = fd.unsigned_abs().into();
            if let Err(error) = self.sockets.ctl(operation, fd, EpollEvent::new(set, data)) {
                tracing::warn!(%error, "cannot change the sockets that a vsock device waits for");
            }
        }
    }
}

impl Ring<GuestMemoryMmap> for VringState<Memory> {
    fn size(&self) -> u16 {
        self.get_queue().size()
    }

    /// Returns no buffer of a queue that is stopped.
    fn pop<'m>(
        &mut self,
        memory: &'m GuestMemoryMmap,
    ) -> Option<DescriptorChain<&'m GuestMemoryMmap>> {
        let queue = self.get_queue_mut();
        queue.ready().then(|| queue.pop_descriptor_chain(memory))?
    }

    fn undo_pop(&mut self) {
        self.get_queue_mut().go_to_previous_position();
    }

    fn add_used(&mut self, _: &GuestMemoryMmap, head: u16, written: u32) -> bool {
        self.add_used(head, written)
            .inspect_err(|error| tracing::debug!(%error, "the guest's used ring is not usable"))
            .is_ok()
    }

    fn interrupt(&mut self, _: &GuestMemoryMmap) {
        if let Err(error) = self.signal_used_queue() {
            tracing::debug!(%error, "the guest's interrupt cannot be raised");
        }
    }
}

fn event_set(interest: Interest) -> EventSet {
    let mut set = EventSet::empty();
    set.set(EventSet::IN, interest.read);
    set.set(EventSet::OUT, interest.write);
    set
}

impl VhostUserBackendMut for Backend {
    type Bitmap = ();
    type Vring = VringMutex;

    fn num_queues(&self) -> usize {
        QUEUES
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        self.is_monitor.store(true, Ordering::Relaxed);
        1 << VIRTIO_F_VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::REPLY_ACK
    }

    fn set_event_idx(&mut self, _: bool) {}

    /// Returns bytes of the device's configuration (virtio 1.2, section 5.10.4).
    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let config = self.guest_cid.to_le_bytes();
        let (start, size) = (offset as usize, size as usize);
        let bytes = config.iter().skip(start).take(size);
        bytes.copied().collect()
    }

    fn update_memory(&mut self, memory: Memory) -> io::Result<()> {
        self.memory = memory;
        Ok(())
    }

    /// Closes all connections: the guest has restarted or ended, and its processes with it.
    fn stop_vring(&mut self, _: u32) -> io::Result<()> {
        self.mux.lock().clear();
        self.keys.clear();
        // A closed socket is no longer watched.
        Ok(())
    }

    fn handle_event(
        &mut self,
        event: u16,
        _: EventSet,
        rings: &[VringMutex],
        _: usize,
    ) -> io::Result<()> {
        let [receive, transmit] = rings else {
            return Ok(());
        };
        match event {
            SOCKETS => self.sockets_ready()?,
            // An empty counter means that an earlier read consumed the signal.
            AGAIN => drop(self.again.read()),
            // An error ends the thread of the queues.
            END => return Err(io::ErrorKind::ConnectionAborted.into()),
            _ => {}
        }
        let sent = self.transmit(transmit);
        let received = self.receive(receive);
        self.watch();
        let is_due = [sent, received].contains(&Turn::Unfinished)
            || (sent == Turn::Waits && self.mux.lock().can_receive());
        if is_due {
            self.again.write(1)?;
        }
        Ok(())
    }
}

/// Serves the monitor that connects first, until it closes its connection. Returns false if the other end asked for
/// nothing.
///
/// # Errors
/// The monitor breaks the protocol, or the process has no descriptor or thread left.
pub fn serve(
    listener: &UnixListener,
    guest_cid: u64,
    acceptor: Box<dyn VsockAcceptor>,
) -> io::Result<bool> {
    // The crate's own event for the end is a descriptor that it never closes.
    let end = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
    let memory = Memory::new(GuestMemoryMmap::new());
    let backend = Backend::new(memory.clone(), Mux::new(guest_cid, acceptor))?;
    let (sockets, again) = (backend.sockets.as_raw_fd(), backend.again.as_raw_fd());
    let backend = Arc::new(std::sync::Mutex::new(backend));
    let failed = |error: Error| io::Error::other(error.to_string());
    let daemon = VhostUserDaemon::new("vsock".to_owned(), Arc::clone(&backend), memory);
    let mut daemon = daemon.map_err(failed)?;
    let start = |daemon: &mut VhostUserDaemon<_>| {
        for handler in daemon.get_epoll_handlers() {
            handler.register_listener(end.as_raw_fd(), EventSet::IN, END.into())?;
            handler.register_listener(sockets, EventSet::IN, SOCKETS.into())?;
            handler.register_listener(again, EventSet::IN, AGAIN.into())?;
        }
        let mut listener = Listener::from(listener.try_clone()?);
        daemon.start(&mut listener).map_err(failed)
    };
    let ended = start(&mut daemon).and_then(|()| match daemon.wait() {
        Err(Error::HandleRequest(
            vhost::vhost_user::Error::Disconnected | vhost::vhost_user::Error::PartialMessage,
        )) => Ok(()),
        ended => ended.map_err(failed),
    });
    // `daemon` waits for its thread when it is dropped.
    end.write(1)?;
    drop(daemon);
    ended.map(|()| {
        let backend = backend.lock();
        backend.is_ok_and(|backend| backend.is_monitor.load(Ordering::Relaxed))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::vsock::packet::{Header, Op, TYPE_STREAM};
    use crate::devices::vsock::{ConnectRequest, HOST_CID, Refused};
    use std::os::unix::net::UnixStream;
    use vhost_user_backend::VringT;
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::desc::split::Descriptor;
    use virtio_queue::mock::MockSplitQueue;
    use vm_memory::{Bytes, GuestAddress};
    use zerocopy::IntoBytes;

    const SIZE: u16 = 16;
    const BUFFER: u64 = 0x1_0000;

    fn header(op: Op) -> Header {
        Header {
            src_cid: 3.into(),
            dst_cid: HOST_CID.into(),
            src_port: 1000.into(),
            dst_port: 9000.into(),
            kind: TYPE_STREAM.into(),
            op: u16::from(op).into(),
            buf_alloc: 4096.into(),
            ..Header::default()
        }
    }

    /// Returns a device with memory, and the ring of its transmit queue, each of whose buffers has this packet.
    fn device(op: Op) -> (Backend, GuestMemoryMmap, VringMutex) {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).expect("memory");
        let shared = Memory::new(memory.clone());
        let accept = |_: ConnectRequest| {
            let (guest, _) = UnixStream::pair().map_err(|_| Refused)?;
            Ok(guest)
        };
        let backend = Backend::new(shared.clone(), Mux::new(3, Box::new(accept))).expect("epoll");
        memory
            .write_slice(header(op).as_bytes(), GuestAddress(BUFFER))
            .expect("memory");
        let mock = MockSplitQueue::create(&memory, GuestAddress(0), SIZE);
        let buffer = Descriptor::new(BUFFER, 44, 0, 0);
        for index in 0..SIZE {
            mock.desc_table()
                .store(index, RawDescriptor::from(buffer))
                .expect("memory");
        }
        let ring = VringMutex::new(shared, SIZE).expect("a ring");
        ring.set_queue_size(SIZE);
        let [table, available, used] =
            [mock.desc_table_addr(), mock.avail_addr(), mock.used_addr()].map(|address| address.0);
        ring.set_queue_info(table, available, used)
            .expect("addresses");
        ring.set_queue_ready(true);
        (backend, memory, ring)
    }

    /// Offers the buffers with these numbers.
    fn offer(memory: &GuestMemoryMmap, ring: &VringMutex, heads: &[u16]) {
        let at = ring.get_ref().get_queue().avail_ring();
        for (slot, head) in (0u64..).zip(heads) {
            memory
                .write_obj(*head, GuestAddress(at + 4 + 2 * slot))
                .expect("memory");
        }
        let count = u16::try_from(heads.len()).expect("few");
        memory
            .write_obj(count, GuestAddress(at + 2))
            .expect("memory");
    }

    #[test]
    fn a_connection_that_asks_for_nothing_is_no_guest_and_leaves_no_descriptor() {
        // In a process of its own, because descriptors of other tests come and go.
        const NAME: &str = "devices::vsock::vhost_user::tests::a_connection_that_asks_for_nothing_is_no_guest_and_leaves_no_descriptor";
        const ALONE: &str = "WORMHOLE_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let program = std::env::current_exe().expect("this program");
            let status = std::process::Command::new(program)
                .args(["--exact", NAME])
                .env(ALONE, "1")
                .status();
            assert!(status.expect("this program runs").success());
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("vsock");
        let listener = UnixListener::bind(&path).expect("a socket");
        let descriptors = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let mut counts = (0..3).map(|_| {
            drop(UnixStream::connect(&path).expect("a connection"));
            let acceptor = Box::new(|_: ConnectRequest| Err::<UnixStream, _>(Refused));
            assert!(!serve(&listener, 3, acceptor).expect("it is served"));
            descriptors()
        });
        let first = counts.next();
        assert!(counts.all(|count| Some(count) == first));
    }

    #[test]
    fn a_buffer_that_is_none_ends_no_device() {
        let (mut backend, memory, ring) = device(Op::Request);
        offer(&memory, &ring, &[0xffff, 0]);
        assert_eq!(backend.transmit(&ring), Turn::Done);
        assert_eq!(backend.mux.lock().connections(), 1);
    }

    #[test]
    fn a_guest_that_adds_packets_without_end_gets_turns() {
        let (mut backend, memory, ring) = device(Op::CreditUpdate);
        offer(&memory, &ring, &(0..SIZE).collect::<Vec<_>>());
        let (available, used) = {
            let ring = ring.get_ref();
            (ring.get_queue().avail_ring(), ring.get_queue().used_ring())
        };
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    let used: u16 = memory.read_obj(GuestAddress(used + 2)).expect("memory");
                    let next = used.wrapping_add(SIZE - 1);
                    memory
                        .write_obj(next, GuestAddress(available + 2))
                        .expect("memory");
                }
            });
            for _ in 0..100 {
                backend.transmit(&ring);
                backend.mux.lock().forget_resets();
            }
            ended.store(true, Ordering::Relaxed);
        });
        let taken: u16 = memory.read_obj(GuestAddress(used + 2)).expect("memory");
        assert!(taken <= 100 * SIZE, "{taken}");
    }
}
