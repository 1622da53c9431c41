//! The device without another monitor, for the fuzz target: the caller is the guest, and its turns are those of the thread.

use std::fmt;

use vhost_user_backend::{VhostUserBackendMut, VringMutex, VringT};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

use super::{AGAIN, Backend, Memory, QUEUES, SOCKETS};
use crate::devices::vsock::Mux;

/// A device with active queues.
pub struct Attached {
    /// The guest's memory.
    pub memory: GuestMemoryMmap,
    backend: Backend,
    rings: [VringMutex; QUEUES],
    notified: [bool; QUEUES],
}

impl Attached {
    /// Buffers of each queue.
    pub const SIZE: u16 = 16;

    /// Creates a device for a guest with `size` bytes of memory. `rings` returns the addresses of a queue's descriptor
    /// table, available ring and used ring.
    ///
    /// # Panics
    /// No memory or descriptor is left, or a ring is not within the memory.
    pub fn new(size: usize, mux: Mux, rings: impl Fn(usize) -> [u64; 3]) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)]).expect("memory");
        let shared = Memory::new(memory.clone());
        let ring = |index| {
            let ring = VringMutex::new(shared.clone(), Self::SIZE).expect("a ring");
            let [descriptors, available, used] = rings(index);
            ring.set_queue_size(Self::SIZE);
            ring.set_queue_info(descriptors, available, used)
                .expect("addresses");
            ring
        };
        let mut attached = Self {
            memory,
            backend: Backend::new(shared.clone(), mux).expect("descriptors"),
            rings: [ring(0), ring(1)],
            notified: [false; QUEUES],
        };
        attached.restart();
        attached
    }

    /// Stops the queues and starts them anew, as a guest that restarts has its monitor do.
    ///
    /// # Panics
    /// Never.
    pub fn restart(&mut self) {
        for (index, ring) in (0..).zip(&self.rings) {
            ring.set_queue_ready(false);
            self.backend.stop_vring(index).expect("it stops");
            ring.set_queue_next_avail(0);
            ring.set_queue_next_used(0);
            ring.set_queue_ready(true);
        }
    }

    /// Notifies a queue, as the driver does.
    pub fn notify(&mut self, queue: usize) {
        self.notified[queue] = true;
    }

    /// Handles each event once.
    ///
    /// # Panics
    /// An event ends the device.
    pub fn turn(&mut self) {
        let notified = std::mem::take(&mut self.notified).into_iter();
        let queues = (0..).zip(notified).filter(|(_, notified)| *notified);
        let events = queues.map(|(queue, _)| queue).chain([SOCKETS, AGAIN]);
        for event in events {
            self.backend
                .handle_event(event, EventSet::IN, &self.rings, 0)
                .expect("no guest ends the device");
        }
    }
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attached").finish_non_exhaustive()
    }
}
