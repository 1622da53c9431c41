//! The device as the driver sees it, and the worker that fills its buffers.

use std::io::Write;

use event_manager::EventOps;
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use virtio_queue::Writer;

use crate::devices::virtio::{ActiveQueue, VirtioDevice, VirtioWorker};
use crate::ram::GuestRam;

/// Bytes that a buffer is given at most; a driver that wants more offers another one (virtio 1.2,
/// 5.4.6.2). Linux asks for 64 at a time.
pub const MAX_REQUEST: usize = 1024;
/// No class that PCI defines.
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

/// Fills the driver's buffers, on the device thread.
#[derive(Debug)]
pub struct RngWorker {
    memory: GuestRam,
    queue: Option<ActiveQueue>,
}

impl RngWorker {
    /// A worker for a guest with this RAM.
    pub fn new(memory: GuestRam) -> Self {
        Self {
            memory,
            queue: None,
        }
    }

    /// Fills buffers, at most a queue full.
    fn fill(&mut self) {
        let Some(queue) = &mut self.queue else {
            return;
        };
        let mut used = false;
        let mut left = queue.size();
        loop {
            if left == 0 {
                queue.again();
                break;
            }
            let Some(chain) = queue.pop(&self.memory) else {
                break;
            };
            left -= 1;
            let head = chain.head_index();
            let written = Writer::new(&self.memory, chain).map_or(0, fill_one);
            used |= queue.add_used(&self.memory, head, written);
        }
        if used {
            queue.interrupt(&self.memory);
        }
    }
}

impl VirtioWorker for RngWorker {
    fn start(&mut self, queues: Vec<ActiveQueue>) {
        self.queue = queues.into_iter().next();
    }

    fn queue_ready(&mut self, _: usize, _: &mut EventOps<'_>) {
        self.fill();
    }

    fn stop(&mut self) {
        self.queue = None;
    }
}

/// Writes random bytes to one buffer and returns how many; 0 for a buffer that cannot be written.
fn fill_one(mut buffer: Writer<'_>) -> u32 {
    let mut bytes = [0; MAX_REQUEST];
    let room = buffer.available_bytes().min(MAX_REQUEST);
    let filled = rustix::rand::getrandom(&mut bytes[..room], rustix::rand::GetRandomFlags::empty())
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
    use crate::devices::virtio::Interrupt;
    use proptest::prelude::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::desc::split::Descriptor;
    use virtio_queue::{Queue, QueueT};
    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::eventfd::EventFd;

    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const RAM: usize = 1 << 20;
    const TABLE: u64 = 0x1000;
    const AVAILABLE: u64 = 0x2000;
    const USED: u64 = 0x3000;
    const BUFFERS: u64 = 0x1_0000;
    const VECTOR: u16 = 7;

    /// Address, length, flags and next of a descriptor.
    type Entry = (u64, u32, u16, u16);

    #[derive(Debug, Default)]
    struct Interrupts(AtomicUsize);

    impl Interrupt for Interrupts {
        fn queue_used(&self, vector: u16) {
            assert_eq!(vector, VECTOR);
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A driver and the worker that serves its queue.
    struct Fixture {
        memory: GuestRam,
        worker: RngWorker,
        interrupts: Arc<Interrupts>,
        kick: Arc<EventFd>,
    }

    fn fixture() -> Fixture {
        let memory = crate::ram::test_ram(RAM);
        let mut queue = Queue::new(QUEUE_SIZE).expect("a power of two");
        let at = GuestAddress;
        queue
            .try_set_desc_table_address(at(TABLE))
            .expect("aligned");
        queue
            .try_set_avail_ring_address(at(AVAILABLE))
            .expect("aligned");
        queue.try_set_used_ring_address(at(USED)).expect("aligned");
        queue.set_ready(true);
        let interrupts = Arc::new(Interrupts::default());
        let kick = Arc::new(EventFd::new(libc::EFD_NONBLOCK).expect("eventfd"));
        let interrupt = Arc::clone(&interrupts) as Arc<dyn Interrupt>;
        let mut worker = RngWorker::new(memory.clone());
        worker.start(vec![ActiveQueue::new(
            queue,
            VECTOR,
            interrupt,
            Arc::clone(&kick),
        )]);
        Fixture {
            memory,
            worker,
            interrupts,
            kick,
        }
    }

    impl Fixture {
        /// Fills the descriptor table and the ring of heads, and announces `available` of them.
        fn offer(&self, table: &[Entry], heads: &[u16], available: u16) {
            for (slot, (address, len, flags, next)) in (0u64..).zip(table.iter().copied()) {
                let raw = RawDescriptor::from(Descriptor::new(address, len, flags, next));
                self.write(TABLE + 16 * slot, Descriptor::from(raw));
            }
            for (slot, head) in (0u64..QUEUE_SIZE.into()).zip(heads.iter().copied()) {
                self.write(AVAILABLE + 4 + 2 * slot, head);
            }
            self.write(AVAILABLE + 2, available);
        }

        fn write<T: vm_memory::ByteValued>(&self, address: u64, value: T) {
            self.memory
                .write_obj(value, GuestAddress(address))
                .expect("ram");
        }

        fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
            let mut bytes = vec![0; len];
            self.memory
                .read_slice(&mut bytes, GuestAddress(address))
                .expect("ram");
            bytes
        }

        /// Buffers that came back so far.
        fn used(&self) -> u16 {
            self.memory.read_obj(GuestAddress(USED + 2)).expect("ram")
        }

        /// Bytes that the device says it has written to each of them.
        fn lengths(&self) -> Vec<u32> {
            let slots = (0..self.used()).map(|index| u64::from(index % QUEUE_SIZE));
            slots
                .map(|slot| {
                    let len = GuestAddress(USED + 4 + 8 * slot + 4);
                    self.memory.read_obj(len).expect("ram")
                })
                .collect()
        }

        fn interrupts(&self) -> usize {
            self.interrupts.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn buffers_are_filled_with_different_bytes_and_announced() {
        let mut guest = fixture();
        let table = [(BUFFERS, 64, WRITE, 0), (BUFFERS + 64, 64, WRITE, 0)];
        guest.offer(&table, &[0, 1], 2);
        guest.worker.fill();
        assert_eq!(guest.lengths(), [64, 64]);
        assert_eq!(guest.interrupts(), 1);
        let [first, second] = [0, 64].map(|at| guest.bytes(BUFFERS + at, 64));
        assert_ne!(first, second);
        assert_ne!(first, [0; 64]);
        guest.worker.fill();
        assert_eq!(guest.interrupts(), 1);
    }

    #[test]
    fn a_request_is_bounded_and_may_be_spread() {
        let mut guest = fixture();
        let more = BUFFERS + 0x1000;
        let table = [(BUFFERS, 1000, WRITE | NEXT, 1), (more, 0x1000, WRITE, 0)];
        guest.offer(&table, &[0], 1);
        guest.worker.fill();
        assert_eq!(guest.lengths(), [1024]);
        assert_ne!(guest.bytes(more, 24), [0; 24]);
        assert_eq!(guest.bytes(more + 24, 64), [0; 64]);
    }

    #[test]
    fn buffers_that_cannot_be_written_come_back_empty() {
        let mut guest = fixture();
        let table = [
            (BUFFERS, 64, 0, 0),
            (RAM as u64, 64, WRITE, 0),
            (BUFFERS + 64, 64, WRITE, 0),
        ];
        guest.offer(&table, &[0, 1, 2], 3);
        guest.worker.fill();
        assert_eq!(guest.lengths(), [0, 0, 64]);
        assert_eq!(guest.bytes(BUFFERS, 64), [0; 64]);
    }

    #[test]
    fn a_turn_ends_after_a_queue_full_and_is_asked_for_again() {
        let mut guest = fixture();
        guest.offer(&[(BUFFERS, 8, WRITE, 0)], &[0; 16], QUEUE_SIZE);
        guest.worker.fill();
        assert_eq!(guest.used(), QUEUE_SIZE);
        assert_eq!(guest.kick.read().expect("another turn"), 1);
        guest.worker.fill();
        assert!(guest.kick.read().is_err());
    }

    #[test]
    fn a_reset_ends_the_use_of_the_queue() {
        let mut guest = fixture();
        guest.offer(&[(BUFFERS, 64, WRITE, 0)], &[0], 1);
        guest.worker.stop();
        guest.worker.fill();
        assert_eq!((guest.used(), guest.interrupts()), (0, 0));
    }

    proptest! {
        /// Whatever lies in the queue: no panic, no hang, and no byte changes that no descriptor names.
        #[test]
        fn hostile_queues_are_survived(
            table in proptest::collection::vec((0u64..0x12_0000, 0u32..0x2_0000, 0u16..8, 0u16..20), 1..17),
            heads in proptest::collection::vec(0u16..20, 0..17),
            available in 0u16..40,
        ) {
            const GUARD: std::ops::Range<u64> = 0x8000..0x9000;
            let mut guest = fixture();
            // Table and rings stay as the driver set them up.
            let table: Vec<Entry> = table
                .into_iter()
                .map(|(address, len, flags, next)| {
                    let address = if address < GUARD.start { address + BUFFERS } else { address };
                    (address, len, flags, next)
                })
                .collect();
            guest.offer(&table, &heads, available);
            for _ in 0..4 {
                guest.worker.fill();
            }
            prop_assert!(guest.used() <= available);
            prop_assert!(guest.lengths().iter().all(|len| *len <= 1024));
            if table.iter().all(|(address, ..)| *address >= GUARD.end) {
                prop_assert_eq!(guest.bytes(GUARD.start, 0x1000), vec![0; 0x1000]);
            }
        }
    }
}
