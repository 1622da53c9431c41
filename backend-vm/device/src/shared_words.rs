//! The words by which processes share an event.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{CuError, Found, Result, Shared, file};

/// Bytes of a file with an event's words.
pub const WORDS_FILE: usize = 4096;
/// Parties that may use one event.
pub const PARTIES: u32 = 1 << PARTY_BITS;

const PARTY_BITS: u32 = 8;
/// Records of an event that are told apart while they are incomplete.
const MARKS: usize = 255;

/// What is in the file. All zeros: never recorded.
#[repr(C)]
struct Layout {
    /// The number of the last record, above the party that made it.
    last: AtomicU64,
    /// By the records' numbers, each of which shares its mark with the one [`MARKS`] before it: which of them was
    /// completed last.
    marks: [AtomicU64; MARKS],
    /// Which of them was made last, and by whom, as in `last`.
    makers: [AtomicU64; MARKS],
}

const _: () = assert!(size_of::<Layout>() <= WORDS_FILE);

/// The words of an event, in a file that all its parties map.
///
/// Records are numbered in the order in which they are made, whoever makes them, and the last one counts. Who
/// made it stands beside its number: what a party has recorded that died is complete.
#[derive(Clone, Copy)]
pub struct EventWords<'a>(&'a Layout);

impl EventWords<'_> {
    /// The words at the start of a mapped file.
    ///
    /// # Safety
    /// [`WORDS_FILE`] bytes from `base` on are mapped, readable and writable, for as long as the result lives; `base`
    /// is aligned to 8.
    #[must_use]
    pub unsafe fn new(base: *mut u8) -> Self {
        // SAFETY: the caller's promise. Other processes use them as atomics too; one that does not spoils what it
        // shares and nothing else.
        Self(unsafe { &*base.cast::<Layout>() })
    }

    fn mark(&self, record: u64) -> &AtomicU64 {
        &self.0.marks[index(record)]
    }

    /// Where in the file the word is that reaches the number of a record, or a later one, once it is complete.
    #[must_use]
    pub fn place(record: u64) -> usize {
        std::mem::offset_of!(Layout, marks) + index(record) * size_of::<AtomicU64>()
    }

    /// The record that has the same word, if there is one: the word is not to fall back to it.
    #[must_use]
    pub fn predecessor(record: u64) -> Option<u64> {
        record
            .checked_sub(MARKS as u64)
            .filter(|record| *record > 0)
    }

    /// The number of a new record of a party.
    #[must_use]
    pub fn record(&self, party: u32) -> u64 {
        let mut last = self.0.last.load(Ordering::Acquire);
        loop {
            let number = (last >> PARTY_BITS).wrapping_add(1);
            let next = number << PARTY_BITS | u64::from(party % PARTIES);
            let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
            match self
                .0
                .last
                .compare_exchange_weak(last, next, success, failure)
            {
                Ok(_) => {
                    self.0.makers[index(number)].store(next, Ordering::Release);
                    return number;
                }
                Err(found) => last = found,
            }
        }
    }

    /// The number of the last record, 0 if there is none.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.0.last.load(Ordering::Acquire) >> PARTY_BITS
    }

    /// The work before a record is complete.
    pub fn complete(&self, record: u64) {
        self.mark(record).fetch_max(record, Ordering::AcqRel);
    }

    /// Whether the work before a record is complete.
    #[must_use]
    pub fn is_complete(&self, record: u64) -> bool {
        record == 0 || self.mark(record).load(Ordering::Acquire) >= record
    }

    /// A party has died: nobody is to wait for what it recorded. Of what was recorded so long ago that its word has
    /// another maker by now, nobody knows who did.
    pub fn bury(&self, party: u32) {
        for made in std::iter::once(&self.0.last).chain(&self.0.makers) {
            let made = made.load(Ordering::Acquire);
            let record = made >> PARTY_BITS;
            if record != 0 && made % u64::from(PARTIES) == u64::from(party) {
                self.complete(record);
            } else if let Some(record) = Self::predecessor(record) {
                self.complete(record);
            }
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

fn index(record: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "below `MARKS`")]
    let index = (record % MARKS as u64) as usize;
    index
}

/// One party's mapping of an event's words.
pub struct SharedWords {
    file: OwnedFd,
    base: NonNull<u8>,
    party: u32,
}

// SAFETY: a mapping of this object's own, which is reached through atomics alone.
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
    /// Of an event that was never recorded, and is this process's to share.
    ///
    /// # Errors
    /// There is no file or no mapping to be had.
    pub fn new() -> io::Result<Self> {
        Self::map(file::anonymous(WORDS_FILE as u64)?, 0)
    }

    /// Of another process's event.
    ///
    /// # Errors
    /// It is no such file, or cannot be mapped.
    pub fn open(found: Found) -> Result<Self> {
        let file = found.descriptor.ok_or(CuError::INVALID_VALUE)?;
        if file::fixed_size(&file) != Some(WORDS_FILE as u64) || found.party >= PARTIES {
            return Err(CuError::INVALID_VALUE);
        }
        Self::map(file, found.party).map_err(|_| CuError::OUT_OF_MEMORY)
    }

    fn map(file: OwnedFd, party: u32) -> io::Result<Self> {
        // SAFETY: a new mapping where the kernel likes, of a file that has that size for good.
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
        // SAFETY: a whole page, mapped until this is dropped.
        unsafe { EventWords::new(self.base.as_ptr()) }
    }

    /// Where they are.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The number of a new record of this party.
    #[must_use]
    pub fn record(&self) -> u64 {
        self.words().record(self.party)
    }

    /// What another process needs to map them.
    ///
    /// # Errors
    /// There is no descriptor to be had.
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
        // SAFETY: this object's own mapping.
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

    #[test]
    fn what_a_party_recorded_that_died_is_complete_and_no_other_s() {
        let shared = SharedWords::new().unwrap();
        let words = shared.words();
        assert!(words.is_complete(words.last()), "never recorded");
        let first = words.record(3);
        assert_eq!(words.last(), first);
        let second = words.record(PARTIES - 1);
        words.bury(3);
        assert!(words.is_complete(first) && !words.is_complete(second));
        words.bury(PARTIES - 1);
        assert!(words.is_complete(second));
    }

    #[test]
    fn records_are_complete_each_by_itself() {
        let shared = SharedWords::new().unwrap();
        let words = shared.words();
        let [first, second] = [words.record(0), words.record(0)];
        words.complete(second);
        assert!(!words.is_complete(first) && words.is_complete(second));
        words.complete(first);
        assert!(words.is_complete(first) && words.is_complete(second));
    }

    #[test]
    fn a_mark_is_used_again_and_does_not_fall_back() {
        let shared = SharedWords::new().unwrap();
        let words = shared.words();
        let first = words.record(1);
        let later = loop {
            let record = words.record(0);
            if EventWords::predecessor(record).is_some() {
                break record;
            }
        };
        assert_eq!(EventWords::predecessor(later), Some(first));
        assert_eq!(EventWords::place(later), EventWords::place(first));
        assert_eq!(EventWords::place(first + 1), EventWords::place(first) + 8);
        words.complete(later);
        words.complete(first);
        assert!(words.is_complete(first) && words.is_complete(later));
    }

    #[test]
    fn a_dead_party_s_record_whose_mark_another_uses_by_now_is_waited_for_by_nobody() {
        let shared = SharedWords::new().unwrap();
        let words = shared.words();
        let first = words.record(1);
        while words.last() < first + MARKS as u64 {
            let _ = words.record(0);
        }
        assert!(!words.is_complete(first));
        words.bury(1);
        assert!(words.is_complete(first) && !words.is_complete(words.last()));
    }

    #[test]
    fn parties_see_each_other_s_records_at_the_place_that_is_named() {
        let own = SharedWords::new().unwrap();
        let other = SharedWords::open(found(&own, 1)).unwrap();
        let record = other.record();
        assert_eq!(own.words().last(), record);
        // SAFETY: a word of the mapping.
        let word = unsafe {
            AtomicU64::from_ptr(other.base().as_ptr().add(EventWords::place(record)).cast())
        };
        word.store(record, Ordering::Release);
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
