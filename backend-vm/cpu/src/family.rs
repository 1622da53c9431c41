//! The devices of one process: what each knows of the memory of the others.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use wormhole_device::Access;

use crate::memory::{Memory, Use};

/// What devices may do with memory, by their numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accesses {
    readable: u64,
    writable: u64,
}

impl Accesses {
    pub fn set(&mut self, device: usize, access: Access) {
        let bit = 1 << device;
        let put = |word: &mut u64, allowed| {
            if allowed {
                *word |= bit;
            } else {
                *word &= !bit;
            }
        };
        put(&mut self.readable, access != Access::None);
        put(&mut self.writable, access == Access::ReadWrite);
    }

    pub fn allows(self, device: usize, intent: Use) -> bool {
        let word = match intent {
            Use::Read => self.readable,
            Use::Write => self.writable,
        };
        word & 1 << device != 0
    }
}

/// A device's place among the devices of its process. One that was opened alone has no others.
#[derive(Debug, Default)]
pub struct Family {
    place: OnceLock<Place>,
    /// The others whose allocations kernels may reach, by number.
    reached: AtomicU64,
}

#[derive(Debug)]
struct Place {
    number: usize,
    /// By number. They hold each other weakly: a device holds the memories of all.
    memories: Box<[Weak<Memory>]>,
}

impl Family {
    /// Makes devices know each other.
    pub fn join(memories: &[Arc<Memory>]) {
        for (number, memory) in memories.iter().enumerate() {
            let place = Place {
                number,
                memories: memories.iter().map(Arc::downgrade).collect(),
            };
            // Only devices that were just opened are joined.
            let _ = memory.family().place.set(place);
        }
    }

    /// The device's number among them.
    pub fn number(&self) -> usize {
        self.place.get().map_or(0, |place| place.number)
    }

    /// The memory of a device of them.
    pub fn member(&self, number: usize) -> Option<Arc<Memory>> {
        self.place.get()?.memories.get(number)?.upgrade()
    }

    /// The memory of the first of them, for another.
    pub fn first(&self) -> Option<Arc<Memory>> {
        match self.number() {
            0 => None,
            _ => self.member(0),
        }
    }

    /// The memories of the others, with their numbers.
    pub fn others(&self) -> impl Iterator<Item = (usize, Arc<Memory>)> {
        let place = self.place.get();
        let memories = place.map_or(&[][..], |place| &place.memories);
        let own = self.number();
        memories
            .iter()
            .enumerate()
            .filter(move |(number, _)| *number != own)
            .filter_map(|(number, memory)| Some((number, memory.upgrade()?)))
    }

    /// Whether kernels may reach the allocations of another device.
    pub fn reaches(&self, number: usize) -> bool {
        self.reached.load(Ordering::Acquire) & 1 << number != 0
    }

    pub fn set_reaches(&self, number: usize, reaches: bool) {
        let bit = 1 << number;
        if reaches {
            self.reached.fetch_or(bit, Ordering::AcqRel);
        } else {
            self.reached.fetch_and(!bit, Ordering::AcqRel);
        }
    }

    /// Nothing of the others is reached any more.
    pub fn forget(&self) {
        self.reached.store(0, Ordering::Release);
    }
}
