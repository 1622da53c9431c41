//! Implements virtqueues: the registers that a driver writes, and the queue that a device serves.

use std::fmt::Debug;
use std::sync::Arc;

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vmm_sys_util::eventfd::EventFd;

use crate::devices::pci::NO_VECTOR;
use crate::ram::GuestRam;

/// Interrupt of a device.
pub trait Interrupt: Debug + Send + Sync {
    /// Raises the interrupt of a queue with this vector, which has used buffers.
    fn queue_used(&self, vector: u16);
}

/// An enabled queue with its notification and its interrupt.
#[derive(Debug)]
pub struct ActiveQueue {
    /// The queue, whose rings lie in guest RAM.
    pub(super) queue: Queue,
    /// The MSI-X vector, or `NO_VECTOR`.
    pub(super) vector: u16,
    interrupt: Arc<dyn Interrupt>,
    /// Eventfd of the driver's notifications.
    kick: Arc<EventFd>,
}

impl ActiveQueue {
    /// Creates a queue that raises `vector` of `interrupt` and is notified by `kick`.
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

    /// Returns the size of the queue in buffers.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Pops the next available buffer.
    pub fn pop<'m>(&mut self, memory: &'m GuestRam) -> Option<DescriptorChain<&'m GuestRam>> {
        self.queue.pop_descriptor_chain(memory)
    }

    /// Undoes the last [`Self::pop`].
    pub fn undo_pop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Returns a buffer with `written` written bytes to the driver; `false` if the used ring is not
    /// usable.
    pub fn add_used(&mut self, memory: &GuestRam, head: u16, written: u32) -> bool {
        self.queue
            .add_used(memory, head, written)
            .inspect_err(|error| tracing::debug!(%error, "the guest's used ring is not usable"))
            .is_ok()
    }

    /// Serves the available buffers, at most as many as the queue's size, and returns them as used. `serve` returns the
    /// number of bytes that it wrote to a buffer. Requests another turn if more buffers may be available.
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

    /// Interrupts the driver unless it suppresses interrupts.
    pub fn interrupt(&mut self, memory: &GuestRam) {
        if self.queue.needs_notification(memory).unwrap_or(true) {
            self.interrupt.queue_used(self.vector);
        }
    }

    /// Requests another turn at this queue, after those of the thread's other devices.
    pub fn again(&self) {
        ring(&self.kick);
    }
}

/// Signals an eventfd.
pub(super) fn ring(kick: &EventFd) {
    // A full counter means that it is signalled already.
    if let Err(error) = kick.write(1) {
        tracing::debug!(%error, "a queue's eventfd is full");
    }
}

/// Registers of one queue, as written by the driver.
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
    /// Returns the registers after reset.
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

    /// Builds the queue; `None` if it is not enabled or does not lie in guest memory.
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
