//! Serves a guest of a monitor that speaks vhost-user, such as QEMU. The monitor shares the guest's memory, and this
//! process serves the guest's queues.

use std::io::{self, Read, Write};
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

use crate::server::{MOST_REQUEST, Server};

type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

/// Queues: the high priority queue, and one for requests.
const QUEUES: usize = 2;
/// Most buffers of a queue.
const QUEUE_SIZE: usize = 1024;

struct Backend {
    server: Server,
    memory: Memory,
    request: Vec<u8>,
}

impl Backend {
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
        let Some(vring) = vrings.get(usize::from(queue)) else {
            return Ok(());
        };
        let memory = self.memory.memory();
        let memory: &GuestMemoryMmap = &memory;
        let mut used = false;
        let mut state = vring.get_mut();
        while let Some(chain) = state.get_queue_mut().pop_descriptor_chain(memory) {
            let head = chain.head_index();
            let written = self.serve(memory, chain);
            state.add_used(head, written).map_err(io::Error::other)?;
            used = true;
        }
        match used {
            true => state.signal_used_queue(),
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
    let backend = Backend {
        server,
        memory: memory.clone(),
        request: vec![0; MOST_REQUEST],
    };
    let backend = Arc::new(Mutex::new(backend));
    let mut daemon = VhostUserDaemon::new("vhost-user".to_owned(), backend, memory)?;
    daemon.start(&mut Listener::from(listener))?;
    match daemon.wait() {
        Err(Error::HandleRequest(
            vhost::vhost_user::Error::Disconnected | vhost::vhost_user::Error::PartialMessage,
        )) => Ok(()),
        ended => ended,
    }
}
