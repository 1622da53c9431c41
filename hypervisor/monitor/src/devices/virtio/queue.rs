//! Virtqueues: what a driver says about one, and the queue that a device serves.

use std::fmt::Debug;
use std::sync::Arc;

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vmm_sys_util::eventfd::EventFd;

use crate::devices::pci::NO_VECTOR;
use crate::ram::GuestRam;

/// How a device interrupts the guest.
pub trait Interrupt: Debug + Send + Sync {
    /// A queue with this vector has used buffers.
    fn queue_used(&self, vector: u16);
}

/// A queue that the driver has set up, with its notification and its interrupt.
#[derive(Debug)]
pub struct ActiveQueue {
    /// The queue; its rings lie in RAM.
    pub(super) queue: Queue,
    /// The MSI-X vector, or `NO_VECTOR`.
    pub(super) vector: u16,
    interrupt: Arc<dyn Interrupt>,
    /// The eventfd that the driver's notifications ring.
    kick: Arc<EventFd>,
}

impl ActiveQueue {
    /// A queue that interrupts by `vector` of `interrupt` and is notified by `kick`.
    pub fn new(
        queue: Queue,
        vector: u16,
        interrupt: Arc<dyn Interrupt>,
        kick: Arc<EventFd>,
    ) -> Self {
        Self {
            queue,
            vector,
            interrupt,
            kick,
        }
    }

    /// Number of buffers that the queue has room for.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// The next buffer that the driver has made available.
    pub fn pop<'m>(&mut self, memory: &'m GuestRam) -> Option<DescriptorChain<&'m GuestRam>> {
        self.queue.pop_descriptor_chain(memory)
    }

    /// Makes the last buffer that was taken the next one again.
    pub fn undo_pop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Returns a buffer, of which `written` bytes were written, to the driver; `false` if the ring is
    /// not usable.
    pub fn add_used(&mut self, memory: &GuestRam, head: u16, written: u32) -> bool {
        self.queue
            .add_used(memory, head, written)
            .inspect_err(|error| tracing::debug!(%error, "the guest's used ring is not usable"))
            .is_ok()
    }

    /// Serves the buffers that the driver has made available, at most a queue full, and returns them as used; `serve`
    /// says how many bytes it wrote to each. Asks for another turn where there may be more.
    pub fn serve(
        &mut self,
        memory: &GuestRam,
        mut serve: impl FnMut(DescriptorChain<&GuestRam>) -> u32,
    ) {
        let mut used = false;
        let mut left = self.size();
        while let Some(chain) = self.pop(memory) {
            let head = chain.head_index();
            let written = serve(chain);
            used |= self.add_used(memory, head, written);
            left -= 1;
            if left == 0 {
                self.again();
                break;
            }
        }
        if used {
            self.interrupt(memory);
        }
    }

    /// Interrupts the driver, if it wants to hear of used buffers.
    pub fn interrupt(&mut self, memory: &GuestRam) {
        if self.queue.needs_notification(memory).unwrap_or(true) {
            self.interrupt.queue_used(self.vector);
        }
    }

    /// Asks for another turn at this queue, after the other devices of the thread had theirs.
    pub fn again(&self) {
        ring(&self.kick);
    }
}

/// Rings an eventfd.
pub(super) fn ring(kick: &EventFd) {
    // A full counter means that it is rung already.
    if let Err(error) = kick.write(1) {
        tracing::debug!(%error, "a queue's eventfd is full");
    }
}

/// The registers of one queue, as the driver has written them.
#[derive(Debug, Clone)]
pub(super) struct QueueSetup {
    pub max_size: u16,
    pub size: u16,
    pub vector: u16,
    pub enabled: bool,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
}

impl QueueSetup {
    /// A queue after reset.
    pub fn new(max_size: u16) -> Self {
        Self {
            max_size,
            size: max_size,
            vector: NO_VECTOR,
            enabled: false,
            descriptors: 0,
            available: 0,
            used: 0,
        }
    }

    /// The queue, if the driver enabled one that lies in guest memory.
    pub fn build(&self, memory: &GuestRam) -> Option<Queue> {
        if !self.enabled {
            return None;
        }
        let mut queue = Queue::new(self.max_size).ok()?;
        queue.try_set_size(self.size).ok()?;
        queue
            .try_set_desc_table_address(vm_memory::GuestAddress(self.descriptors))
            .ok()?;
        queue
            .try_set_avail_ring_address(vm_memory::GuestAddress(self.available))
            .ok()?;
        queue
            .try_set_used_ring_address(vm_memory::GuestAddress(self.used))
            .ok()?;
        queue.set_ready(true);
        queue.is_valid(memory).then_some(queue)
    }
}
