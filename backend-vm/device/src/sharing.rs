//! What one device lets the devices of other processes use: memory, events and pools.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{RawEvent, RawMemory, RawPool, Result};

/// What another process's device needs to use something of this one.
#[derive(Debug)]
pub struct Shared {
    /// Means something to a device of the same kind alone.
    pub description: [u64; 8],
    /// Goes with it.
    pub descriptor: Option<OwnedFd>,
    /// The descriptor is that of a file with an event's words.
    pub words: bool,
}

impl Shared {
    /// For which a description is enough.
    pub fn described(description: [u64; 8]) -> Self {
        Self {
            description,
            descriptor: None,
            words: false,
        }
    }
}

/// What another process's device has shared. It comes from another worker, and so from anywhere: it is checked.
#[derive(Debug)]
pub struct Found {
    pub description: [u64; 8],
    pub descriptor: Option<OwnedFd>,
    /// Which of an event's parties this process is.
    pub party: u32,
}

/// Sharing with the devices of other processes. Any of it may wait for the system, or for the device as the
/// driver's own functions do.
pub trait Sharing {
    /// Shares the allocation that starts at `address` (`cuIpcGetMemHandle`).
    fn share_allocation(&self, address: u64) -> Result<Shared>;
    /// Shows what another device has shared: address and bytes.
    fn open_allocation(&self, found: Found) -> Result<(u64, u64)>;
    /// Ends what [`Sharing::open_allocation`] began; waits as `cuIpcCloseMemHandle` does.
    fn close_allocation(&self, address: u64) -> Result<()>;
    /// Shares an event that was made for it (`CU_EVENT_INTERPROCESS`).
    fn share_event(&self, event: RawEvent) -> Result<Shared>;
    fn open_event(&self, found: Found) -> Result<RawEvent>;
    /// Shares mappable memory of that size, which was made for it (`cuMemExportToShareableHandle`).
    fn share_memory(&self, memory: RawMemory, bytes: u64) -> Result<Shared>;
    /// Another device's memory under a name of this one, and its bytes.
    fn open_memory(&self, found: Found) -> Result<(RawMemory, u64)>;
    /// Shares a pool that was made for it (`cuMemPoolExportToShareableHandle`).
    fn share_pool(&self, pool: RawPool) -> Result<Shared>;
    /// Another device's pool. Nothing can be allocated from it.
    fn open_pool(&self, found: Found) -> Result<RawPool>;
    /// Shares an allocation of a pool that is shared (`cuMemPoolExportPointer`).
    fn share_pointer(&self, address: u64) -> Result<Shared>;
    /// Shows such an allocation: address and bytes. It is freed like any other of a pool.
    fn open_pointer(&self, pool: RawPool, found: Found) -> Result<(u64, u64)>;
}

/// Bytes of a file with an event's words.
pub const WORDS_FILE: usize = 4096;
/// Parties that may use one event.
pub const PARTIES: u32 = 1 << PARTY_BITS;

const PARTY_BITS: u32 = 8;

/// The words by which processes share an event: the first sixteen bytes of a file that all of them map. All
/// zeros: never recorded.
///
/// Records are numbered in the order in which they are made, whoever makes them, and the last one counts. Who
/// made it stands beside its number: what a party has recorded that died is complete.
#[derive(Clone, Copy, Debug)]
pub struct EventWords<'a> {
    /// The number of the last record, above the party that made it.
    last: &'a AtomicU64,
    /// Every record up to this one is complete.
    complete: &'a AtomicU64,
}

impl EventWords<'_> {
    /// The words at the start of a mapped file.
    ///
    /// # Safety
    /// Sixteen bytes from `base` on are mapped, readable and writable, for as long as the result lives; `base` is
    /// aligned to 8.
    pub unsafe fn new(base: *mut u8) -> Self {
        let base = base.cast::<u64>();
        // SAFETY: the caller's promise, for each of the two words. Other processes use them as atomics too; one
        // that does not spoils what it shares and nothing else.
        unsafe {
            Self {
                last: AtomicU64::from_ptr(base),
                complete: AtomicU64::from_ptr(base.add(1)),
            }
        }
    }

    /// The number of a new record of a party.
    pub fn record(&self, party: u32) -> u64 {
        let mut last = self.last.load(Ordering::Acquire);
        loop {
            let number = (last >> PARTY_BITS).wrapping_add(1);
            let next = number << PARTY_BITS | u64::from(party % PARTIES);
            let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
            match self
                .last
                .compare_exchange_weak(last, next, success, failure)
            {
                Ok(_) => return number,
                Err(found) => last = found,
            }
        }
    }

    /// The number of the last record, 0 if there is none.
    pub fn last(&self) -> u64 {
        self.last.load(Ordering::Acquire) >> PARTY_BITS
    }

    /// The work before a record is complete.
    pub fn complete(&self, record: u64) {
        self.complete.fetch_max(record, Ordering::AcqRel);
    }

    /// Whether the work before a record is complete.
    pub fn is_complete(&self, record: u64) -> bool {
        self.complete.load(Ordering::Acquire) >= record
    }

    /// A party has died: nobody is to wait for what it recorded.
    pub fn bury(&self, party: u32) {
        let last = self.last.load(Ordering::Acquire);
        if last % u64::from(PARTIES) == u64::from(party) {
            self.complete(last >> PARTY_BITS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_party_recorded_that_died_is_complete_and_no_other_s() {
        let mut place = [0_u64; 2];
        // SAFETY: two words that live longer.
        let words = unsafe { EventWords::new(place.as_mut_ptr().cast()) };
        assert!(words.is_complete(words.last()), "never recorded");
        let first = words.record(3);
        assert_eq!(words.last(), first);
        let second = words.record(PARTIES - 1);
        words.bury(3);
        assert!(!words.is_complete(first) && !words.is_complete(second));
        words.complete(first);
        assert!(words.is_complete(first) && !words.is_complete(second));
        words.bury(PARTIES - 1);
        assert!(words.is_complete(second));
        words.complete(first);
        assert!(words.is_complete(second), "an old one changes nothing");
    }
}
