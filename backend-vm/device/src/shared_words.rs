//! Words in shared memory by which processes share an event.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{CuError, Found, Result, Shared, file};

/// Size of a file with an event's words.
pub const WORDS_FILE: usize = 32 << 10;
/// Greatest number of parties of an event at a time.
pub const PARTIES: u32 = 31;

const PARTY_BITS: u32 = 8;
/// Greatest number of incomplete records of a party that have distinct marks.
const MARKS: usize = 128;

/// Layout of the file. All zeros: never recorded.
#[repr(C)]
struct Layout {
    /// Last record: number of the record in the upper bits, party in the lower [`PARTY_BITS`].
    last: AtomicU64,
    /// Number of records of each party.
    counts: [AtomicU64; PARTIES as usize],
    /// Number of the last completed record, for each party and each record number modulo [`MARKS`].
    marks: [[AtomicU64; MARKS]; PARTIES as usize],
}

const _: () = assert!(size_of::<Layout>() <= WORDS_FILE);

/// Record of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventRecord {
    party: usize,
    /// Number of the record, from 1 on. 0 stands for no record, which is complete.
    number: u64,
}

impl EventRecord {
    fn mark(self) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "below `MARKS`")]
        let mark = (self.number % MARKS as u64) as usize;
        mark
    }

    /// Returns the offset in the file of the record's word, which reaches [`value`](Self::value) or more when the
    /// record is complete.
    #[must_use]
    pub fn place(self) -> usize {
        let index = self.party * MARKS + self.mark();
        std::mem::offset_of!(Layout, marks) + index * size_of::<AtomicU64>()
    }

    #[must_use]
    pub fn value(self) -> u64 {
        self.number
    }

    /// Returns the party's previous record with the same word, if any. A record is written after it, so that the word
    /// never decreases.
    #[must_use]
    pub fn predecessor(self) -> Option<Self> {
        let number = self.number.checked_sub(MARKS as u64)?;
        (number > 0).then_some(Self { number, ..self })
    }
}

/// Words of an event, in a file that all its parties map.
///
/// The last record of any party is the event's state. Records of a dead party count as complete.
#[derive(Clone, Copy)]
pub struct EventWords<'a>(&'a Layout);

impl EventWords<'_> {
    /// Accesses the words at the start of a mapped file.
    ///
    /// # Safety
    /// [`WORDS_FILE`] bytes from `base` on are mapped, readable and writable, for as long as the result lives; `base`
    /// is aligned to 8.
    #[must_use]
    pub unsafe fn new(base: *mut u8) -> Self {
        // SAFETY: the caller's promise. Other processes access the words as atomics, too; one that does not corrupts
        // only the event that it shares.
        Self(unsafe { &*base.cast::<Layout>() })
    }

    fn mark(&self, record: EventRecord) -> &AtomicU64 {
        &self.0.marks[record.party][record.mark()]
    }

    /// Makes a new record of a party below [`PARTIES`]. It is not the last one until it is [published](Self::publish).
    #[must_use]
    pub fn record(&self, party: u32) -> EventRecord {
        let party = index(party);
        let number = self.0.counts[party]
            .fetch_add(1, Ordering::AcqRel)
            .wrapping_add(1);
        EventRecord { party, number }
    }

    /// Makes a record the last one. Nothing waits for it before.
    pub fn publish(&self, record: EventRecord) {
        let last = record.number << PARTY_BITS | record.party as u64;
        self.0.last.store(last, Ordering::Release);
    }

    /// Returns the last record.
    #[must_use]
    pub fn last(&self) -> EventRecord {
        let last = self.0.last.load(Ordering::Acquire);
        let party = (last % (1 << PARTY_BITS)) as u32;
        EventRecord {
            party: index(party),
            number: last >> PARTY_BITS,
        }
    }

    /// Marks a record as complete.
    pub fn complete(&self, record: EventRecord) {
        self.mark(record).fetch_max(record.number, Ordering::AcqRel);
    }

    /// Returns whether the work before a record is complete.
    #[must_use]
    pub fn is_complete(&self, record: EventRecord) -> bool {
        self.mark(record).load(Ordering::Acquire) >= record.number
    }

    /// Completes all records of a party that has died or whose context is gone, so that no process waits for them.
    pub fn complete_records(&self, party: u32) {
        let party = index(party);
        let made = self.0.counts[party].load(Ordering::Acquire);
        for mark in &self.0.marks[party] {
            mark.fetch_max(made, Ordering::AcqRel);
        }
    }
}

impl fmt::Debug for EventWords<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventWords")
            .field("last", &self.last())
            .finish_non_exhaustive()
    }
}

/// Index of a party's words. `party` comes from another process, so it is reduced modulo [`PARTIES`].
fn index(party: u32) -> usize {
    (party % PARTIES) as usize
}

/// One party's mapping of an event's words.
pub struct SharedWords {
    file: OwnedFd,
    base: NonNull<u8>,
    party: u32,
}

// SAFETY: the mapping belongs to this object and is accessed through atomics only.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl fmt::Debug for SharedWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedWords")
            .field("party", &self.party)
            .finish_non_exhaustive()
    }
}

impl SharedWords {
    /// Creates the words of a new event, which this process may share.
    ///
    /// # Errors
    /// The file cannot be created or mapped.
    pub fn new() -> io::Result<Self> {
        Self::map(file::anonymous(WORDS_FILE as u64)?, 0)
    }

    /// Maps the words of another process's event.
    ///
    /// # Errors
    /// The descriptor is not such a file, or cannot be mapped.
    pub fn open(found: Found) -> Result<Self> {
        let file = found.descriptor.ok_or(CuError::INVALID_VALUE)?;
        if file::fixed_size(&file) != Some(WORDS_FILE as u64) || found.party >= PARTIES {
            return Err(CuError::INVALID_VALUE);
        }
        Self::map(file, found.party).map_err(|_| CuError::OUT_OF_MEMORY)
    }

    fn map(file: OwnedFd, party: u32) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice, of a file whose size is sealed.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                WORDS_FILE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { file, base, party })
    }

    #[must_use]
    pub fn words(&self) -> EventWords<'_> {
        // SAFETY: the whole file is mapped until this is dropped.
        unsafe { EventWords::new(self.base.as_ptr()) }
    }

    /// Returns the address of the words.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Makes a new record of this party.
    #[must_use]
    pub fn record(&self) -> EventRecord {
        self.words().record(self.party)
    }

    /// Completes all records of this party, so that no process waits for them.
    pub fn complete_records(&self) {
        self.words().complete_records(self.party);
    }

    /// Describes the words for another process.
    ///
    /// # Errors
    /// The descriptor cannot be duplicated.
    pub fn share(&self) -> Result<Shared> {
        let file = self.file.try_clone();
        Ok(Shared {
            descriptor: Some(file.map_err(|_| CuError::OUT_OF_MEMORY)?),
            words: true,
            ..Shared::described([0; 8])
        })
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this object.
        unsafe { libc::munmap(self.base.as_ptr().cast(), WORDS_FILE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(words: &SharedWords, party: u32) -> Found {
        Found {
            description: [0; 8],
            descriptor: words.share().unwrap().descriptor,
            party,
        }
    }

    fn published(words: EventWords<'_>, party: u32) -> EventRecord {
        let record = words.record(party);
        words.publish(record);
        record
    }

    #[test]
    fn what_a_party_recorded_that_died_is_complete_and_no_other_s() {
        let shared = SharedWords::new().unwrap();
        let words = shared.words();
        assert!(words.is_complete(words.last()), "never recorded");
        let first = published(words, 3);
        assert_eq!(words.last(), first);
        let second = published(words, PARTIES - 1);
        assert_eq!(words.last(), second);
        words.complete_records(3);
        assert!(words.is_complete(first) && !words.is_complete(second));
        words.complete_records(PARTIES - 1);
        assert!(words.is_complete(second));
        // Another process has the party's number by now.
        let third = published(words, 3);
        assert!(!words.is_complete(third));
        words.complete(third);
        assert!(words.is_complete(third));
    }

    #[test]
    fn records_are_complete_each_by_itself() {
        let shared = SharedWords::new().unwrap();
        let words = shared.words();
        let [first, second, other] = [0, 0, 1].map(|party| published(words, party));
        words.complete(second);
        assert!(!words.is_complete(first) && words.is_complete(second));
        assert!(!words.is_complete(other));
        words.complete(first);
        assert!(words.is_complete(first) && words.is_complete(second));
    }

    #[test]
    fn a_mark_is_its_party_s_and_does_not_fall_back() {
        let shared = SharedWords::new().unwrap();
        let words = shared.words();
        let first = words.record(1);
        let later = loop {
            let record = words.record(1);
            if record.predecessor().is_some() {
                break record;
            }
        };
        assert_eq!(later.predecessor(), Some(first));
        assert_eq!(later.place(), first.place());
        words.complete(later);
        words.complete(first);
        assert!(words.is_complete(first) && words.is_complete(later));
        let places = (0..PARTIES).flat_map(|party| (0..MARKS).map(move |_| party));
        let mut places: Vec<usize> = places.map(|party| words.record(party).place()).collect();
        let count = places.len();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), count);
        assert!(
            places
                .iter()
                .all(|place| place % 8 == 0 && place + 8 <= WORDS_FILE)
        );
    }

    #[test]
    fn what_other_processes_write_there_is_no_more_than_wrong() {
        let shared = SharedWords::new().unwrap();
        // SAFETY: the mapping, byte by byte.
        unsafe { shared.base().as_ptr().write_bytes(0xFF, WORDS_FILE) };
        let words = shared.words();
        let last = words.last();
        assert!(last.place() + 8 <= WORDS_FILE && words.is_complete(last));
        words.publish(words.record(7));
        words.complete_records(7);
    }

    #[test]
    fn parties_see_each_other_s_records_at_the_place_that_is_named() {
        let own = SharedWords::new().unwrap();
        let other = SharedWords::open(found(&own, 1)).unwrap();
        let record = other.record();
        other.words().publish(record);
        assert_eq!(own.words().last(), record);
        // SAFETY: a word of the mapping.
        let word = unsafe { AtomicU64::from_ptr(other.base().as_ptr().add(record.place()).cast()) };
        word.store(record.value(), Ordering::Release);
        assert!(own.words().is_complete(record));
    }

    #[test]
    fn only_a_file_of_that_size_has_words() {
        let shared = SharedWords::new().unwrap();
        assert!(SharedWords::open(found(&shared, PARTIES)).is_err());
        let mut large = found(&shared, 1);
        large.descriptor = Some(file::anonymous(2 * WORDS_FILE as u64).unwrap());
        assert!(SharedWords::open(large).is_err());
        let none = Found {
            descriptor: None,
            ..found(&shared, 1)
        };
        assert!(SharedWords::open(none).is_err());
    }
}
