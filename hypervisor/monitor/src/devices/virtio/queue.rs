//! Implements virtqueues: the registers that a driver writes, and the queue that a device serves.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use crate::devices::pci::NO_VECTOR;
use crate::ram::GuestRam;

/// Offset of the index in the used ring, bytes before its elements, and bytes of an element (virtio 1.2, 2.7.8).
const USED_INDEX: u64 = 2;
const USED_HEADER: u64 = 4;
const USED_ELEMENT: u64 = 8;

/// Interrupt of a device.
pub trait Interrupt: Debug + Send + Sync {
    /// Raises the interrupt of a queue with this vector, which has used buffers.
    fn queue_used(&self, vector: u16);
}

/// Decision of a device on an available buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Returns the buffer to the driver, with this number of bytes written.
    Used(u32),
    /// Keeps the buffer. The device calls [`ActiveQueue::add_used`] later.
    Held,
    /// Leaves the buffer available.
    Available,
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

    /// Returns the number of buffers that were returned so far, modulo 2^16.
    pub fn next_used(&self) -> u16 {
        self.queue.next_used()
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

    /// Returns buffers, each with its written bytes, to the driver together: a driver that sees one of them as used sees
    /// all. `false` if the used ring is not usable or one of the heads is none; then the driver sees no buffer.
    pub fn add_used_together(&mut self, memory: &GuestRam, buffers: &[(u16, u32)]) -> bool {
        let size = self.queue.size();
        let Ok(count) = u16::try_from(buffers.len()) else {
            return false;
        };
        if count > size || buffers.iter().any(|(head, _)| *head >= size) {
            tracing::debug!("a guest offers buffers that are none");
            return false;
        }
        let (ring, next) = (self.queue.used_ring(), self.queue.next_used());
        for (after, (head, written)) in (0..count).zip(buffers) {
            let slot = u64::from(next.wrapping_add(after) % size);
            let element = u64::from(*head) | u64::from(*written) << 32;
            let place = GuestAddress(ring + USED_HEADER + USED_ELEMENT * slot);
            if memory.write_obj(element.to_le(), place).is_err() {
                return false;
            }
        }
        let next = next.wrapping_add(count);
        let index = GuestAddress(ring + USED_INDEX);
        self.queue.set_next_used(next);
        memory.store(next.to_le(), index, Ordering::Release).is_ok()
    }

    /// Serves the available buffers, at most as many as the queue's size, and returns them as used. `serve` returns the
    /// number of bytes that it wrote to a buffer. Requests another turn if more buffers may be available.
    pub fn serve(
        &mut self,
        memory: &GuestRam,
        mut serve: impl FnMut(DescriptorChain<&GuestRam>) -> u32,
    ) {
        self.serve_while(memory, |chain| Some(serve(chain)));
    }

    /// Serves the available buffers as [`Self::serve`] does, until `serve` returns `None`: then that buffer stays
    /// available.
    pub fn serve_while(
        &mut self,
        memory: &GuestRam,
        mut serve: impl FnMut(DescriptorChain<&GuestRam>) -> Option<u32>,
    ) {
        let used = self.take_while(memory, |chain| {
            serve(chain).map_or(Fate::Available, Fate::Used)
        });
        if used {
            self.interrupt(memory);
        }
    }

    /// Takes the available buffers, at most as many as the queue's size, until one stays available. Requests another turn if
    /// more may be available. Meanwhile the driver need not notify the device of further buffers, which would cost a VM exit
    /// each. Returns whether a buffer was used, so that the driver needs an interrupt.
    pub fn take_while(
        &mut self,
        memory: &GuestRam,
        mut take: impl FnMut(DescriptorChain<&GuestRam>) -> Fate,
    ) -> bool {
        let mut used = false;
        let mut left = self.size();
        let mut awaits = true;
        loop {
            let Some(chain) = self.pop(memory) else {
                if awaits {
                    break;
                }
                // The driver may have added a buffer before it saw this.
                self.await_notifications(memory);
                awaits = true;
                continue;
            };
            if awaits {
                self.suppress_notifications(memory);
                awaits = false;
            }
            let head = chain.head_index();
            match take(chain) {
                Fate::Used(written) => used |= self.add_used(memory, head, written),
                Fate::Held => {}
                Fate::Available => {
                    self.undo_pop();
                    self.await_notifications(memory);
                    break;
                }
            }
            left -= 1;
            if left == 0 {
                self.await_notifications(memory);
                self.again();
                break;
            }
        }
        used
    }

    /// Tells the driver that it need not notify the device of further buffers.
    pub fn suppress_notifications(&mut self, memory: &GuestRam) {
        // A driver that does not read this notifies the device needlessly.
        let _ = self.queue.disable_notification(memory);
    }

    /// Asks the driver for a notification of each further buffer. It may not have notified the device of those that it
    /// added before, which the next [`Self::pop`] finds.
    pub fn await_notifications(&mut self, memory: &GuestRam) {
        if let Err(error) = self.queue.enable_notification(memory) {
            tracing::debug!(%error, "the guest's rings are not usable");
        }
    }

    /// Interrupts the driver unless it suppresses interrupts.
    pub fn interrupt(&mut self, memory: &GuestRam) {
        // virtio-queue does not read the driver's flags. They are read after the used index is written: a driver that
        // clears them reads the index afterwards.
        fence(Ordering::SeqCst);
        let flags: Result<u16, _> =
            memory.load(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed);
        let is_suppressed = flags
            .is_ok_and(|flags| u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT != 0);
        if !is_suppressed {
            self.interrupt.queue_used(self.vector);
        }
    }

    /// Goes on where another device stopped, which had returned all buffers that it took: at the index of the used ring.
    /// Interrupts the driver for those whose interrupt may be lost. `false` if the ring is not usable.
    pub(crate) fn go_on(&mut self, memory: &GuestRam) -> bool {
        let index = GuestAddress(self.queue.used_ring() + USED_INDEX);
        let Ok(index) = memory.load::<u16>(index, Ordering::Acquire) else {
            return false;
        };
        let index = u16::from_le(index);
        self.queue.set_next_avail(index);
        self.queue.set_next_used(index);
        self.interrupt(memory);
        true
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

    /// Builds the queue; `None` if it is not enabled or does not lie in guest memory. Address 0 is RAM, but virtio-queue
    /// takes an available ring there for one that was never set.
    pub fn build(&self, memory: &GuestRam) -> Option<Queue> {
        if !self.enabled || self.available == 0 {
            return None;
        }
        let mut queue = Queue::new(self.max_size).ok()?;
        queue.try_set_size(self.size).ok()?;
        queue
            .try_set_desc_table_address(GuestAddress(self.descriptors))
            .ok()?;
        queue
            .try_set_avail_ring_address(GuestAddress(self.available))
            .ok()?;
        queue
            .try_set_used_ring_address(GuestAddress(self.used))
            .ok()?;
        queue.set_ready(true);
        queue.is_valid(memory).then_some(queue)
    }
}

#[cfg(test)]
mod tests {
    use virtio_bindings::virtio_ring::VRING_USED_F_NO_NOTIFY;

    use crate::devices::virtio::test_queue::{BUFFERS, TestQueue, WRITE};

    /// Serves one more buffer.
    fn serve(guest: &TestQueue, queue: &mut super::ActiveQueue, available: u16) {
        guest.offer(&[(BUFFERS, 64, WRITE, 0)], &[0; 16], available);
        queue.serve(&guest.memory, |_| 0);
        assert_eq!(guest.used(), available);
    }

    #[test]
    fn a_driver_that_suppresses_interrupts_gets_none() {
        let guest = TestQueue::new(16);
        let mut queue = guest.active();
        guest.suppress(1);
        serve(&guest, &mut queue, 1);
        assert_eq!(guest.interrupts(), 0);
        guest.suppress(0);
        serve(&guest, &mut queue, 2);
        assert_eq!(guest.interrupts(), 1);
    }

    #[test]
    fn a_driver_notifies_only_while_the_device_does_not_serve() {
        let guest = TestQueue::new(16);
        let mut queue = guest.active();
        let table = [(BUFFERS, 64, WRITE, 0)];
        guest.offer(&table, &[0; 16], 1);
        let mut served = 0;
        queue.serve_while(&guest.memory, |_| {
            assert_eq!(u32::from(guest.used_flags()), VRING_USED_F_NO_NOTIFY);
            served += 1;
            // Buffers that come meanwhile are served without a notification, until one has to wait.
            guest.offer(&table, &[0; 16], served + 1);
            (served < 4).then_some(0)
        });
        assert_eq!((guest.used(), guest.used_flags()), (3, 0));
        guest.offer(&table, &[0; 16], u16::MAX);
        queue.serve(&guest.memory, |_| {
            panic!("the driver offers more buffers than there are")
        });
        assert_eq!((guest.used(), guest.used_flags()), (3, 0));
    }

    #[test]
    fn the_drivers_used_event_suppresses_nothing() {
        let guest = TestQueue::new(16);
        let mut queue = guest.active();
        for (available, event) in (1..).zip([0, 7, u16::MAX]) {
            guest.set_used_event(event);
            serve(&guest, &mut queue, available);
            assert_eq!(guest.interrupts(), usize::from(available));
        }
    }
}
