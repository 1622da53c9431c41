//! Implements the driver's side of one queue for device tests.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::collection::vec;
use proptest::prelude::Strategy;
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{ByteValued, Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::{ActiveQueue, Interrupt};
use crate::ram::GuestRam;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const RAM: usize = 2 << 20;
/// Start of the buffers, after the queue's own structures and the tests' guard page.
pub const BUFFERS: u64 = 0x1_0000;
const TABLE: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const VECTOR: u16 = 7;

/// Page between the queue's own structures and the buffers.
const GUARD: Range<u64> = 0x8000..0x9000;

/// Address, length, flags and next of a descriptor.
pub type Entry = (u64, u32, u16, u16);

/// Contents of a hostile driver's queue.
#[derive(Clone, Debug)]
pub struct Hostile {
    table: Vec<Entry>,
    heads: Vec<u16>,
    pub available: u16,
}

/// Returns arbitrary contents of a queue. No descriptor begins in the table or the rings.
pub fn hostile() -> impl Strategy<Value = Hostile> {
    let entry = (0..RAM as u64 + 0x2_0000, 0u32..0x2_0000, 0u16..8, 0u16..20);
    let entry = entry.prop_map(|(address, len, flags, next)| {
        let address = if address < GUARD.start {
            address + BUFFERS
        } else {
            address
        };
        (address, len, flags, next)
    });
    let contents = (vec(entry, 1..17), vec(0u16..20, 0..17), 0u16..40);
    contents.prop_map(|(table, heads, available)| Hostile {
        table,
        heads,
        available,
    })
}

#[derive(Debug, Default)]
struct Interrupts(AtomicUsize);

impl Interrupt for Interrupts {
    fn queue_used(&self, vector: u16) {
        assert_eq!(vector, VECTOR);
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A driver with its own RAM and one queue.
#[derive(Debug)]
pub struct TestQueue {
    pub memory: GuestRam,
    size: u16,
    /// Added to the addresses of table and rings.
    base: u64,
    interrupts: Arc<Interrupts>,
    kick: Arc<EventFd>,
}

impl TestQueue {
    /// Creates a queue of `size` buffers.
    pub fn new(size: u16) -> Self {
        Self {
            memory: crate::ram::test_ram(RAM),
            size,
            base: 0,
            interrupts: Arc::default(),
            kick: Arc::new(EventFd::new(libc::EFD_NONBLOCK).expect("eventfd")),
        }
    }

    /// Returns another queue in the same RAM.
    pub fn second(&self) -> Self {
        Self {
            memory: self.memory.clone(),
            base: 0x4000,
            ..Self::new(self.size)
        }
    }

    /// Returns the device's side of the queue.
    pub fn active(&self) -> ActiveQueue {
        let mut queue = Queue::new(self.size).expect("a power of two");
        let at = GuestAddress;
        queue
            .try_set_desc_table_address(at(self.base + TABLE))
            .expect("aligned");
        queue
            .try_set_avail_ring_address(at(self.base + AVAILABLE))
            .expect("aligned");
        queue
            .try_set_used_ring_address(at(self.base + USED))
            .expect("aligned");
        queue.set_ready(true);
        let interrupt = Arc::clone(&self.interrupts) as Arc<dyn Interrupt>;
        ActiveQueue::new(queue, VECTOR, interrupt, Arc::clone(&self.kick))
    }

    /// Writes the descriptor table and the available ring, and sets the available index.
    pub fn offer(&self, table: &[Entry], heads: &[u16], available: u16) {
        for (slot, (address, len, flags, next)) in (0u64..).zip(table.iter().copied()) {
            let raw = RawDescriptor::from(Descriptor::new(address, len, flags, next));
            self.write(self.base + TABLE + 16 * slot, Descriptor::from(raw));
        }
        for (slot, head) in (0u64..self.size.into()).zip(heads.iter().copied()) {
            self.write(self.base + AVAILABLE + 4 + 2 * slot, head);
        }
        self.write(self.base + AVAILABLE + 2, available);
    }

    pub fn offer_hostile(&self, hostile: &Hostile) {
        self.offer(&hostile.table, &hostile.heads, hostile.available);
    }

    /// Returns whether the guard page is untouched, if no descriptor can cover it.
    pub fn guards(&self, hostile: &Hostile) -> bool {
        let mut entries = hostile.table.iter();
        entries.any(|(address, ..)| *address < GUARD.end)
            || self.bytes(GUARD.start, 0x1000) == [0; 0x1000]
    }

    /// Returns the address of the descriptor table.
    pub fn table(&self) -> GuestAddress {
        GuestAddress(self.base + TABLE)
    }

    /// Writes the available ring's flags: 1 suppresses interrupts.
    pub fn suppress(&self, flags: u16) {
        self.write(self.base + AVAILABLE, flags);
    }

    /// Writes the word behind the available ring, which means something with VIRTIO_F_EVENT_IDX alone.
    pub fn set_used_event(&self, index: u16) {
        self.write(self.base + AVAILABLE + 4 + 2 * u64::from(self.size), index);
    }

    pub fn write<T: ByteValued>(&self, address: u64, value: T) {
        self.memory
            .write_obj(value, GuestAddress(address))
            .expect("ram");
    }

    pub fn write_bytes(&self, address: u64, bytes: &[u8]) {
        self.memory
            .write_slice(bytes, GuestAddress(address))
            .expect("ram");
    }

    pub fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory
            .read_slice(&mut bytes, GuestAddress(address))
            .expect("ram");
        bytes
    }

    /// Returns the address of the number of used buffers.
    pub fn used_index(&self) -> GuestAddress {
        GuestAddress(self.base + USED + 2)
    }

    /// Returns the number of used buffers so far.
    pub fn used(&self) -> u16 {
        self.memory.read_obj(self.used_index()).expect("ram")
    }

    /// Returns the head of each used buffer, in the order in which the device returned them.
    pub fn heads(&self) -> Vec<u32> {
        self.used_words(0)
    }

    /// Returns the length of each used buffer: the bytes that the device wrote.
    pub fn lengths(&self) -> Vec<u32> {
        self.used_words(4)
    }

    /// Returns the word at this offset of each used element.
    fn used_words(&self, offset: u64) -> Vec<u32> {
        let slots = (0..self.used()).map(|index| u64::from(index % self.size));
        slots
            .map(|slot| {
                let word = GuestAddress(self.base + USED + 4 + 8 * slot + offset);
                self.memory.read_obj(word).expect("ram")
            })
            .collect()
    }

    /// Returns the descriptor table and the available ring.
    pub fn drivers_part(&self) -> Vec<u8> {
        let len = usize::try_from(USED - TABLE).expect("few");
        self.bytes(self.base + TABLE, len)
    }

    /// Returns the used ring's flags, by which a device suppresses notifications.
    pub fn used_flags(&self) -> u16 {
        let flags = GuestAddress(self.base + USED);
        self.memory.read_obj(flags).expect("ram")
    }

    pub fn interrupts(&self) -> usize {
        self.interrupts.0.load(Ordering::Relaxed)
    }

    /// Returns whether the queue was notified since the last call.
    pub fn rung(&self) -> bool {
        self.kick.read().is_ok()
    }
}
