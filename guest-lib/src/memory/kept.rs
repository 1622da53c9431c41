//! Device memory that the program has freed and that is kept for its next allocations of the same sizes, with no message:
//! the native driver takes some 50 µs for an allocation that is larger than a [part of a slab](super::slabs), and as
//! long again for its free.
//!
//! The worker frees it when the device has no memory left, when the program asks how much is free, and with its context.

use wormhole_api::{DevicePtr, MemFree};
use wormhole_lock::{Mutex, MutexGuard};

use crate::error::Result;
use crate::memory::map::Allocation;
use crate::object::context::{self, Scope};
use crate::object::stream;

/// Most bytes that are kept of one kind, of all devices together: little beside what a context takes, since other processes
/// lack it.
pub const MOST_BYTES: u64 = 32 << 20;

/// Freed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed<O, T> {
    /// Number of the context that allocated it, or of its device: another one's cannot be used in its place.
    pub owner: O,
    pub memory: T,
    pub bytes: u64,
}

/// Addresses of freed memory, by the numbers of contexts.
static KEPT: Mutex<Kept<u32, u64>> = Mutex::new(Kept::NEW);

fn kept() -> MutexGuard<'static, Kept<u32, u64>> {
    KEPT.lock()
}

/// All memory of one kind that is kept, with what was freed last at the end.
#[derive(Debug)]
pub struct Kept<O, T> {
    freed: Vec<Freed<O, T>>,
}

impl<O: PartialEq, T> Kept<O, T> {
    pub const NEW: Self = Self { freed: Vec::new() };

    fn bytes(&self) -> u64 {
        self.freed.iter().map(|freed| freed.bytes).sum()
    }

    /// Keeps memory. Returns the memory that was freed first, as far as there is no room for it any more.
    pub fn put(&mut self, freed: Freed<O, T>) -> Vec<Freed<O, T>> {
        self.freed.push(freed);
        let mut surplus = Vec::new();
        while self.bytes() > MOST_BYTES {
            surplus.push(self.freed.remove(0));
        }
        surplus
    }

    /// Takes the last memory of this size.
    pub fn take(&mut self, owner: O, bytes: u64) -> Option<T> {
        let fits = |freed: &Freed<O, T>| freed.owner == owner && freed.bytes == bytes;
        let found = self.freed.iter().rposition(fits)?;
        Some(self.freed.remove(found).memory)
    }

    pub fn take_all(&mut self, wanted: impl Fn(&Freed<O, T>) -> bool) -> Vec<Freed<O, T>> {
        self.freed.extract_if(.., |freed| wanted(freed)).collect()
    }
}

/// Returns kept memory of this size.
pub fn take(scope: Scope, bytes: u64) -> Option<u64> {
    kept().take(scope.context, bytes)
}

/// Keeps an allocation that was removed from the map, once the work of its device is done, as for `cuMemFree`. `None` if
/// it is too large, or if another process may have it open.
pub fn put(scope: Scope, allocation: &Allocation) -> Option<Result> {
    (allocation.bytes <= MOST_BYTES && !allocation.is_shared).then(|| {
        let session = scope.session.session();
        stream::wait_for_work(context::scope_numbered(session, allocation.context))?;
        let surplus = kept().put(Freed {
            owner: allocation.context,
            memory: allocation.base,
            bytes: allocation.bytes,
        });
        surplus.into_iter().try_for_each(|freed| free(scope, freed))
    })
}

fn free(scope: Scope, freed: Freed<u32, u64>) -> Result {
    let owner = context::scope_numbered(scope.session.session(), freed.owner);
    let address = DevicePtr(freed.memory);
    owner.session.request(&MemFree { address }, |()| ())
}

/// Frees the kept memory of the scope's device. Returns false if the device has none.
pub fn free_all(scope: Scope) -> Result<bool> {
    let session = scope.session.session();
    let freed = kept().take_all(|freed| {
        let owner = context::scope_numbered(session, freed.owner);
        owner.session.ordinal() == scope.session.ordinal()
    });
    for freed in &freed {
        free(scope, *freed)?;
    }
    Ok(!freed.is_empty())
}

/// Frees what is kept of a context.
pub fn free_of(scope: Scope) {
    for freed in kept().take_all(|freed| freed.owner == scope.context) {
        // The context is destroyed: a failure ends the session and shows at the next call.
        let _ = free(scope, freed);
    }
}

/// Forgets everything, after the worker has freed it.
pub fn forget_all() {
    kept().take_all(|_| true);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn freed(address: u64, bytes: u64) -> Freed<u32, u64> {
        Freed {
            owner: 1,
            memory: address,
            bytes,
        }
    }

    #[test]
    fn memory_is_taken_by_its_size_and_context_and_once() {
        let mut kept = Kept::NEW;
        for (address, bytes) in [(1, 4 * MIB), (2, 2 * MIB), (3, 4 * MIB)] {
            assert_eq!(kept.put(freed(address, bytes)), []);
        }
        assert_eq!(kept.take(2, 4 * MIB), None);
        assert_eq!(kept.take(1, 3 * MIB), None);
        let taken = [4, 4, 4, 2].map(|units| kept.take(1, units * MIB));
        assert_eq!(taken, [Some(3), Some(1), None, Some(2)]);
        assert_eq!(kept.bytes(), 0);
    }

    #[test]
    fn what_was_freed_first_makes_room() {
        let mut kept = Kept::NEW;
        let third = MOST_BYTES / 3;
        for address in 1..=3 {
            assert_eq!(kept.put(freed(address, third)), []);
        }
        let surplus = kept.put(freed(4, 2 * third));
        assert_eq!(surplus, [freed(1, third), freed(2, third)]);
        assert_eq!(kept.put(freed(5, MOST_BYTES)).len(), 2);
        assert_eq!(kept.bytes(), MOST_BYTES);
        assert_eq!(kept.take_all(|_| true), [freed(5, MOST_BYTES)]);
        assert_eq!(kept.bytes(), 0);
    }
}
