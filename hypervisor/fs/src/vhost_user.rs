//! Serves a guest of a monitor that speaks vhost-user, such as QEMU. The monitor shares the guest's memory, and this
//! process serves the guest's queues.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};

use vhost::vhost_user::Listener;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost_user_backend::{Error, VhostUserBackendMut, VhostUserDaemon, VringMutex, VringT};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::{DescriptorChain, QueueT, Reader, Writer};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};
use vmm_sys_util::eventfd::EventFd;

use crate::server::{MOST_REQUEST, Server};

type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

/// Queues: the high priority queue, and one for requests.
const QUEUES: usize = 2;
/// Most buffers of a queue.
const QUEUE_SIZE: usize = 1024;
/// Event of another turn at the queues. Lower numbers are those of the queues and of the crate.
const AGAIN: u16 = 3;

struct Backend {
    server: Server,
    memory: Memory,
    request: Vec<u8>,
    /// Signalled for another turn, so that requests of the monitor are served between two of them.
    again: EventFd,
}

impl Backend {
    fn new(server: Server, memory: Memory) -> io::Result<Self> {
        Ok(Self {
            server,
            memory,
            request: vec![0; MOST_REQUEST],
            again: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        })
    }

    /// Serves a queue's requests, at most as many as the queue has buffers: a guest may add some for as long as they are
    /// taken. Returns whether another turn is due.
    fn turn(&mut self, vring: &VringMutex) -> io::Result<bool> {
        let memory = self.memory.memory();
        let memory: &GuestMemoryMmap = &memory;
        let mut state = vring.get_mut();
        let (mut left, mut used) = (state.get_queue().size(), false);
        while left > 0 {
            let queue = state.get_queue_mut();
            // A queue that is stopped has no buffers.
            let Some(chain) = queue
                .ready()
                .then(|| queue.pop_descriptor_chain(memory))
                .flatten()
            else {
                break;
            };
            left -= 1;
            let head = chain.head_index();
            let written = self.serve(memory, chain);
            // The guest's used ring may lie anywhere.
            used |= state.add_used(head, written).is_ok();
        }
        if used {
            state.signal_used_queue()?;
        }
        Ok(left == 0)
    }

    /// Serves a request, and returns the length of its reply.
    fn serve(&mut self, memory: &GuestMemoryMmap, chain: DescriptorChain<&GuestMemoryMmap>) -> u32 {
        let Ok(mut reader) = Reader::new(memory, chain.clone()) else {
            return 0;
        };
        let Some(request) = self.request.get_mut(..reader.available_bytes()) else {
            return 0;
        };
        if reader.read_exact(request).is_err() {
            return 0;
        }
        let Some(reply) = self.server.serve(request) else {
            return 0;
        };
        let Ok(mut writer) = Writer::new(memory, chain) else {
            return 0;
        };
        // A driver without room for the reply gets none of it.
        match writer.available_bytes() >= reply.len() && writer.write_all(reply).is_ok() {
            true => u32::try_from(reply.len()).unwrap_or(0),
            false => 0,
        }
    }
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
        1 << VIRTIO_F_VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK
    }

    fn set_event_idx(&mut self, _: bool) {}

    fn update_memory(&mut self, memory: Memory) -> io::Result<()> {
        self.memory = memory;
        Ok(())
    }

    /// Ends the thread of the queues with the connection.
    fn exit_event(&self, _: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::NONBLOCK | EventFlag::CLOEXEC).ok()
    }

    fn handle_event(
        &mut self,
        queue: u16,
        _: EventSet,
        vrings: &[VringMutex],
        _: usize,
    ) -> io::Result<()> {
        let due = match vrings.get(usize::from(queue)) {
            Some(vring) => self.turn(vring)?,
            None => {
                // An empty counter means that an earlier read consumed the signal.
                drop(self.again.read());
                let mut due = false;
                for vring in vrings {
                    due |= self.turn(vring)?;
                }
                due
            }
        };
        match due {
            true => self.again.write(1),
            false => Ok(()),
        }
    }
}

/// Serves the first connection to `listener` until its other end is closed.
///
/// # Errors
/// The monitor breaks the protocol.
pub fn serve(server: Server, listener: UnixListener) -> Result<(), Error> {
    let memory = Memory::new(GuestMemoryMmap::new());
    let backend = Backend::new(server, memory.clone()).map_err(Error::StartDaemon)?;
    let again = backend.again.as_raw_fd();
    let backend = Arc::new(Mutex::new(backend));
    let mut daemon = VhostUserDaemon::new("vhost-user".to_owned(), backend, memory)?;
    for handler in daemon.get_epoll_handlers() {
        let watched = handler.register_listener(again, EventSet::IN, AGAIN.into());
        watched.map_err(Error::StartDaemon)?;
    }
    daemon.start(&mut Listener::from(listener))?;
    match daemon.wait() {
        Err(Error::HandleRequest(
            vhost::vhost_user::Error::Disconnected | vhost::vhost_user::Error::PartialMessage,
        )) => Ok(()),
        ended => ended,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;
    use std::sync::atomic::{AtomicBool, Ordering};
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::desc::split::Descriptor;
    use virtio_queue::mock::MockSplitQueue;
    use vm_memory::{Bytes, GuestAddress};

    const SIZE: u16 = 16;

    /// Returns a server, its guest's memory, and a queue whose buffers contain no request.
    fn server() -> (Backend, GuestMemoryMmap, VringMutex, [u64; 3]) {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).expect("memory");
        let shared = Memory::new(memory.clone());
        let folder = tempfile::tempdir().expect("a folder");
        let tree = Tree::open(folder.path(), 16).expect("a folder");
        let backend = Backend::new(Server::new(tree), shared.clone()).expect("a descriptor");
        let mock = MockSplitQueue::create(&memory, GuestAddress(0), SIZE);
        for index in 0..SIZE {
            let buffer = RawDescriptor::from(Descriptor::new(0x1_0000, 44, 0, 0));
            mock.desc_table().store(index, buffer).expect("memory");
        }
        let places = [mock.desc_table_addr(), mock.avail_addr(), mock.used_addr()];
        let ring = VringMutex::new(shared, SIZE).expect("a ring");
        ring.set_queue_size(SIZE);
        (backend, memory, ring, places.map(|place| place.0))
    }

    fn start(ring: &VringMutex, [table, available, used]: [u64; 3]) {
        ring.set_queue_info(table, available, used)
            .expect("addresses");
        ring.set_queue_ready(true);
    }

    #[test]
    fn a_guest_without_a_used_ring_does_not_end_its_server() {
        let (mut backend, memory, ring, [table, available, _]) = server();
        start(&ring, [table, available, 1 << 30]);
        memory
            .write_obj(3u16, GuestAddress(available + 2))
            .expect("memory");
        let served = backend.handle_event(0, EventSet::IN, &[ring], 0);
        served.expect("the server goes on");
    }

    #[test]
    fn a_guest_that_adds_requests_without_end_gets_turns() {
        let (mut backend, memory, ring, places) = server();
        start(&ring, places);
        let [_, available, used] = places.map(|place| GuestAddress(place + 2));
        memory.write_obj(SIZE, available).expect("memory");
        let ended = AtomicBool::new(false);
        let is_due = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    let used: u16 = memory.read_obj(used).expect("memory");
                    // All buffers, so that a turn takes them even if this thread has had no processor since.
                    let next = used.wrapping_add(SIZE);
                    memory.write_obj(next, available).expect("memory");
                }
            });
            let rings = [ring];
            for _ in 0..100 {
                let served = backend.handle_event(0, EventSet::IN, &rings, 0);
                served.expect("the server goes on");
            }
            ended.store(true, Ordering::Relaxed);
            backend.again.read().is_ok()
        });
        assert!(is_due, "another turn is due");
        let taken: u16 = memory.read_obj(used).expect("memory");
        assert!(taken <= 100 * SIZE, "{taken}");
    }
}
