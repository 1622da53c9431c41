//! Relations between the devices of one process: access to each other's memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use wormhole_device::Access;

use crate::memory::{Memory, Use};

/// Access rights to memory, as bit masks of device numbers.
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

/// Position of a device among the devices of its process. A device opened alone has no others.
#[derive(Debug, Default)]
pub struct PeerSet {
    place: OnceLock<Place>,
    /// Bit mask of the devices whose allocations kernels of this device may access.
    reached: AtomicU64,
}

#[derive(Debug)]
struct Place {
    number: usize,
    /// Memories by device number. The references are weak; each device holds the memories of all.
    memories: Box<[Weak<Memory>]>,
}

impl PeerSet {
    /// Joins devices to a set.
    pub fn join(memories: &[Arc<Memory>]) {
        for (number, memory) in memories.iter().enumerate() {
            let place = Place {
                number,
                memories: memories.iter().map(Arc::downgrade).collect(),
            };
            // Cannot fail, because the devices were just opened.
            let _ = memory.peer_set().place.set(place);
        }
    }

    /// Returns the device's number in the set.
    pub fn number(&self) -> usize {
        self.place.get().map_or(0, |place| place.number)
    }

    /// Returns the memory of a device of the set.
    pub fn member(&self, number: usize) -> Option<Arc<Memory>> {
        self.place.get()?.memories.get(number)?.upgrade()
    }

    /// Returns the memory of the first device, or `None` if this is the first one.
    pub fn first(&self) -> Option<Arc<Memory>> {
        match self.number() {
            0 => None,
            _ => self.member(0),
        }
    }

    /// Returns the memories of the other devices, with their numbers.
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

    /// Returns true if kernels may access the allocations of another device.
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

    /// Revokes the access to all other devices.
    pub fn forget(&self) {
        self.reached.store(0, Ordering::Release);
    }
}
