//! Drops the pages that the guest gives or reports as free.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use event_manager::EventOps;
use virtio_queue::{DescriptorChain, Reader};
use vm_memory::GuestAddress;

use crate::devices::virtio::{ActiveQueue, VirtioWorker};
use crate::ram::{self, GuestRam};

/// Queue of pages that the driver gives, as numbers.
const GIVEN: usize = 0;
/// Queue of free pages. The queue before it is of pages that the driver takes back. Drivers number the queues that
/// exist: the device offers neither statistics nor hints.
const REPORTED: usize = 2;
/// Bytes of a page, the unit of page numbers on the first two queues (virtio 1.2, 5.5.6).
const PAGE: u64 = 4096;
/// Largest number of page numbers that are read of one buffer. Linux gives 256 at a time.
const MOST_PAGES: usize = 1024;

/// Worker that drops pages, on a thread of its own: the kernel takes milliseconds for many.
#[derive(Debug)]
pub struct BalloonWorker {
    memory: GuestRam,
    queues: Vec<ActiveQueue>,
    dropped: Arc<AtomicU64>,
}

impl BalloonWorker {
    /// Creates a worker for a guest with this RAM. It counts the bytes that it drops in `dropped`.
    pub fn new(memory: GuestRam, dropped: Arc<AtomicU64>) -> Self {
        Self {
            memory,
            queues: Vec::new(),
            dropped,
        }
    }

    fn serve(&mut self, queue: usize) {
        let (memory, dropped) = (&self.memory, &self.dropped);
        let Some(active) = self.queues.get_mut(queue) else {
            return;
        };
        active.serve(memory, |chain| {
            let bytes = match queue {
                GIVEN => drop_given(memory, chain),
                REPORTED => drop_reported(memory, chain),
                // The pages come back with their first use.
                _ => 0,
            };
            dropped.fetch_add(bytes, Ordering::Relaxed);
            0
        });
    }
}

impl VirtioWorker for BalloonWorker {
    fn start(&mut self, queues: Vec<ActiveQueue>, _: u64) {
        self.queues = queues;
    }

    fn queue_ready(&mut self, queue: usize, _: &mut EventOps<'_>) {
        self.serve(queue);
    }

    fn stop(&mut self) {
        self.queues.clear();
    }
}

/// Drops the pages whose numbers a buffer holds, as little-endian words. Returns their bytes.
fn drop_given(memory: &GuestRam, chain: DescriptorChain<&GuestRam>) -> u64 {
    let Ok(mut buffer) = Reader::new(memory, chain) else {
        tracing::debug!("a buffer of page numbers is not in the guest's memory");
        return 0;
    };
    let numbers = std::iter::from_fn(|| {
        let mut number = [0; 4];
        buffer.read_exact(&mut number).ok()?;
        Some(u64::from(u32::from_le_bytes(number)))
    });
    let numbers = numbers.take(MOST_PAGES);
    numbers
        .map(|number| drop_range(memory, number * PAGE, PAGE))
        .sum()
}

/// Drops the buffers of a chain. Returns their bytes.
fn drop_reported(memory: &GuestRam, chain: DescriptorChain<&GuestRam>) -> u64 {
    let ranges = chain.writable();
    ranges
        .map(|range| drop_range(memory, range.addr().0, range.len().into()))
        .sum()
}

/// Drops a range of whole pages and returns its bytes; 0 if it is not in the guest's memory.
fn drop_range(memory: &GuestRam, start: u64, bytes: u64) -> u64 {
    match ram::discard(memory, GuestAddress(start), bytes) {
        Ok(()) => bytes,
        Err(error) => {
            tracing::debug!(%error, start, bytes, "a guest's free pages are not dropped");
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::device::QUEUE_SIZE;
    use super::*;
    use crate::devices::virtio::test_queue::{BUFFERS, NEXT, RAM, TestQueue, WRITE};
    use proptest::prelude::*;

    /// Length of a descriptor that covers a page.
    const LENGTH: u32 = 4096;

    /// A driver whose only queue is the device's queue of this number.
    fn fixture(number: usize) -> (TestQueue, BalloonWorker) {
        let guest = TestQueue::new(QUEUE_SIZE);
        let mut worker = BalloonWorker::new(guest.memory.clone(), Arc::default());
        worker.start((0..=number).map(|_| guest.active()).collect(), 0);
        (guest, worker)
    }

    /// Fills pages, so that the host has memory for them.
    fn filled(guest: &TestQueue, page: u64, pages: u64) {
        let bytes = vec![0x5a; usize::try_from(pages * PAGE).unwrap()];
        guest.write_bytes(page * PAGE, &bytes);
    }

    fn resident(guest: &TestQueue, page: u64) -> bool {
        ram::is_resident(&guest.memory, GuestAddress(page * PAGE))
    }

    #[test]
    fn reported_ranges_lose_their_memory_and_no_others() {
        let (guest, mut worker) = fixture(REPORTED);
        filled(&guest, 32, 8);
        let table = [
            (33 * PAGE, 2 * LENGTH, WRITE | NEXT, 1),
            (37 * PAGE, LENGTH, WRITE, 0),
        ];
        guest.offer(&table, &[0], 1);
        worker.serve(REPORTED);
        let left: Vec<u64> = (32..40).filter(|page| resident(&guest, *page)).collect();
        assert_eq!(left, [32, 35, 36, 38, 39]);
        assert_eq!(guest.bytes(33 * PAGE, 16), [0; 16]);
        assert_eq!(guest.bytes(35 * PAGE, 16), [0x5a; 16]);
        assert_eq!((guest.lengths(), guest.interrupts()), (vec![0], 1));
        assert_eq!(worker.dropped.load(Ordering::Relaxed), 3 * PAGE);
    }

    #[test]
    fn given_pages_lose_their_memory_and_no_others() {
        let (guest, mut worker) = fixture(GIVEN);
        filled(&guest, 32, 8);
        let numbers: Vec<u8> = [34_u32, 39, 0xffff_ffff].map(u32::to_le_bytes).concat();
        guest.write_bytes(BUFFERS, &numbers);
        guest.offer(&[(BUFFERS, 12, 0, 0)], &[0], 1);
        worker.serve(GIVEN);
        let left: Vec<u64> = (32..40).filter(|page| resident(&guest, *page)).collect();
        assert_eq!(left, [32, 33, 35, 36, 37, 38]);
        assert_eq!(guest.used(), 1);
    }

    #[test]
    fn ranges_that_are_no_pages_of_ram_keep_everything() {
        let (guest, mut worker) = fixture(REPORTED);
        filled(&guest, 32, 8);
        let ram = RAM as u64;
        let table = [
            (33 * PAGE + 1, LENGTH, WRITE, 0),
            (33 * PAGE, 100, WRITE, 0),
            (33 * PAGE, LENGTH, 0, 0),
            (ram - PAGE, 2 * LENGTH, WRITE, 0),
            (u64::MAX - PAGE + 1, LENGTH, WRITE, 0),
        ];
        guest.offer(&table, &[0, 1, 2, 3, 4], 5);
        worker.serve(REPORTED);
        assert!((32..40).all(|page| resident(&guest, page)));
        assert_eq!(worker.dropped.load(Ordering::Relaxed), 0);
        assert_eq!(guest.used(), 5);
    }

    #[test]
    fn pages_taken_back_are_acknowledged() {
        let (guest, mut worker) = fixture(1);
        guest.offer(&[(BUFFERS, 12, 0, 0)], &[0], 1);
        worker.serve(1);
        assert_eq!((guest.used(), guest.interrupts()), (1, 1));
    }

    #[test]
    fn a_driver_without_reports_has_two_queues() {
        let (guest, mut worker) = fixture(1);
        guest.offer(&[(BUFFERS, 12, 0, 0)], &[0], 1);
        worker.serve(REPORTED);
        assert_eq!(guest.used(), 0);
        worker.stop();
        worker.serve(GIVEN);
        assert_eq!(guest.used(), 0);
    }

    proptest! {
        /// Arbitrary contents of the queues cause no panic and no hang.
        #[test]
        fn hostile_queues_are_survived(
            queue in 0_usize..3,
            table in proptest::collection::vec((0_u64..RAM as u64 + 0x2_0000, 0_u32..0x2_0000, 0_u16..8, 0_u16..20), 1..17),
            heads in proptest::collection::vec(0_u16..20, 0..17),
            available in 0_u16..80,
        ) {
            let (guest, mut worker) = fixture(queue);
            guest.offer(&table, &heads, available);
            for _ in 0..4 {
                worker.serve(queue);
            }
        }
    }
}
