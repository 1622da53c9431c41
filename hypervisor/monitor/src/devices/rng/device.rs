//! Implements the entropy device's registers and the worker that fills its buffers.

use std::io::Write;

use event_manager::EventOps;
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use virtio_queue::Writer;

use crate::devices::virtio::{ActiveQueue, VirtioDevice, VirtioWorker};
use crate::ram::GuestRam;

/// Maximum bytes written to one buffer. A driver that needs more provides another buffer (virtio 1.2,
/// 5.4.6.2). Linux requests 64 at a time.
pub const MAX_REQUEST: usize = 1024;
/// Class 0xff: a device that fits no defined class.
const PCI_CLASS: [u8; 3] = [0xff, 0, 0];
const QUEUE_SIZE: u16 = 16;

/// The entropy device: one queue, no configuration.
#[derive(Debug)]
pub struct Rng;

impl VirtioDevice for Rng {
    fn id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn pci_class(&self) -> [u8; 3] {
        PCI_CLASS
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }
}

/// Worker that fills the driver's buffers on the device thread.
#[derive(Debug)]
pub struct RngWorker {
    memory: GuestRam,
    queue: Option<ActiveQueue>,
}

impl RngWorker {
    /// Creates a worker for a guest with this RAM.
    pub fn new(memory: GuestRam) -> Self {
        Self {
            memory,
            queue: None,
        }
    }

    /// Fills buffers, at most as many as the queue's size.
    fn fill(&mut self) {
        let Some(queue) = &mut self.queue else {
            return;
        };
        queue.serve(&self.memory, |chain| {
            Writer::new(&self.memory, chain).map_or(0, fill_one)
        });
    }
}

impl VirtioWorker for RngWorker {
    fn start(&mut self, queues: Vec<ActiveQueue>, _: u64) {
        self.queue = queues.into_iter().next();
    }

    fn queue_ready(&mut self, _: usize, _: &mut EventOps<'_>) {
        self.fill();
    }

    fn stop(&mut self) {
        self.queue = None;
    }
}

/// Writes random bytes to one buffer and returns their number; 0 if the buffer is not writable.
fn fill_one(mut buffer: Writer<'_>) -> u32 {
    let mut bytes = [0; MAX_REQUEST];
    let room = buffer.available_bytes().min(MAX_REQUEST);
    let flags = rustix::rand::GetRandomFlags::empty();
    let bytes_for = |bytes: &mut [u8]| rustix::rand::getrandom(bytes, flags);
    let filled = rustix::io::retry_on_intr(|| bytes_for(&mut bytes[..room]))
        .inspect_err(|error| tracing::warn!(%error, "the host has no random bytes for a guest"))
        .unwrap_or(0);
    match buffer.write_all(&bytes[..filled]) {
        Ok(()) => u32::try_from(filled).unwrap_or(0),
        Err(error) => {
            tracing::debug!(%error, "a buffer for random bytes is not writable");
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::virtio::test_queue::{BUFFERS, NEXT, RAM, TestQueue, WRITE, hostile};
    use proptest::prelude::*;

    fn fixture() -> (TestQueue, RngWorker) {
        let queue = TestQueue::new(QUEUE_SIZE);
        let mut worker = RngWorker::new(queue.memory.clone());
        worker.start(vec![queue.active()], 0);
        (queue, worker)
    }

    #[test]
    fn buffers_are_filled_with_different_bytes_and_announced() {
        let (guest, mut worker) = fixture();
        let table = [(BUFFERS, 64, WRITE, 0), (BUFFERS + 64, 64, WRITE, 0)];
        guest.offer(&table, &[0, 1], 2);
        worker.fill();
        assert_eq!(guest.lengths(), [64, 64]);
        assert_eq!(guest.interrupts(), 1);
        let [first, second] = [0, 64].map(|at| guest.bytes(BUFFERS + at, 64));
        assert_ne!(first, second);
        assert_ne!(first, [0; 64]);
        worker.fill();
        assert_eq!(guest.interrupts(), 1);
    }

    #[test]
    fn a_request_is_bounded_and_may_be_spread() {
        let (guest, mut worker) = fixture();
        let more = BUFFERS + 0x1000;
        let table = [(BUFFERS, 1000, WRITE | NEXT, 1), (more, 0x1000, WRITE, 0)];
        guest.offer(&table, &[0], 1);
        worker.fill();
        assert_eq!(guest.lengths(), [1024]);
        assert_ne!(guest.bytes(more, 24), [0; 24]);
        assert_eq!(guest.bytes(more + 24, 64), [0; 64]);
    }

    #[test]
    fn buffers_that_cannot_be_written_come_back_empty() {
        let (guest, mut worker) = fixture();
        let table = [
            (BUFFERS, 64, 0, 0),
            (RAM as u64, 64, WRITE, 0),
            (BUFFERS + 64, 64, WRITE, 0),
        ];
        guest.offer(&table, &[0, 1, 2], 3);
        worker.fill();
        assert_eq!(guest.lengths(), [0, 0, 64]);
        assert_eq!(guest.bytes(BUFFERS, 64), [0; 64]);
    }

    #[test]
    fn nothing_changes_but_writable_buffers_and_the_used_ring() {
        let (guest, mut worker) = fixture();
        let table = [(BUFFERS, 64, NEXT, 1), (BUFFERS + 64, 64, WRITE, 0)];
        guest.offer(&table, &[0], 1);
        let before = guest.drivers_part();
        worker.fill();
        assert_eq!(guest.lengths(), [64]);
        assert!(guest.drivers_part() == before);
        assert_eq!(guest.bytes(BUFFERS, 64), [0; 64]);
        assert_ne!(guest.bytes(BUFFERS + 64, 64), [0; 64]);
        assert_eq!(guest.used_flags(), 0);
    }

    #[test]
    fn a_turn_ends_after_a_queue_full_and_is_asked_for_again() {
        let (guest, mut worker) = fixture();
        guest.offer(&[(BUFFERS, 8, WRITE, 0)], &[0; 16], QUEUE_SIZE);
        worker.fill();
        assert_eq!(guest.used(), QUEUE_SIZE);
        assert!(guest.rung());
        worker.fill();
        assert!(!guest.rung());
    }

    #[test]
    fn a_reset_ends_the_use_of_the_queue() {
        let (guest, mut worker) = fixture();
        guest.offer(&[(BUFFERS, 64, WRITE, 0)], &[0], 1);
        worker.stop();
        worker.fill();
        assert_eq!((guest.used(), guest.interrupts()), (0, 0));
    }

    proptest! {
        /// Arbitrary queue contents cause no panic, no hang and no write outside the descriptors' buffers.
        #[test]
        fn hostile_queues_are_survived(
            hostile in hostile(),
        ) {
            let (guest, mut worker) = fixture();
            guest.offer_hostile(&hostile);
            for _ in 0..4 {
                worker.fill();
            }
            prop_assert!(guest.used() <= hostile.available);
            prop_assert!(guest.lengths().iter().all(|len| *len <= 1024));
            prop_assert!(guest.guards(&hostile));
        }
    }
}
