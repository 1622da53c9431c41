//! Queue by which one thread hands calls to another of the same process, in private memory.
//!
//! The writer describes each call by an entry of 64-bit words, and the reader executes them in order. The reader
//! removes an entry after it has executed it, so each entry before the head is done. The words are atomics: neither side needs
//! unsafe code, a lock or an allocation for an entry.
//!
//! A *place* is the number of words that were written before it. It never decreases.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::sync::{AtomicU64, Ordering, SyncPoint};

/// A word on cache lines of its own: its neighbours belong to the other side.
#[derive(Debug)]
#[repr(align(128))]
struct Line(AtomicU64);

impl Line {
    fn zero() -> Self {
        Self(AtomicU64::new(0))
    }
}

#[derive(Debug)]
struct Queue {
    words: Box<[AtomicU64]>,
    /// Place behind the last entry. The writer moves it.
    tail: Line,
    /// Place behind the last entry that is done. The reader moves it.
    head: Line,
    /// 1 while the reader sleeps or is about to.
    asleep: Line,
}

impl Queue {
    #[inline]
    fn word(&self, place: u64) -> &AtomicU64 {
        // The number of words is a power of two, so the cast and the mask keep the place's lowest bits.
        #[expect(clippy::cast_possible_truncation, reason = "masked")]
        &self.words[place as usize & (self.words.len() - 1)]
    }
}

/// The side that hands calls over.
#[derive(Debug)]
pub struct Writer {
    queue: Arc<Queue>,
    tail: u64,
    /// Place behind which nothing was done at the last look.
    head: u64,
}

/// The side that executes them.
#[derive(Debug)]
pub struct Reader {
    queue: Arc<Queue>,
    head: u64,
    /// Place behind the entry that is being executed.
    next: u64,
    /// Place up to which entries were there at the last look.
    tail: u64,
}

/// A view of both places, for people to read.
#[derive(Clone, Debug)]
pub struct Gauge(Arc<Queue>);

/// Makes a queue of so many words.
///
/// # Panics
/// `words` is no power of two.
#[must_use]
pub fn queue(words: usize) -> (Writer, Reader) {
    assert!(words.is_power_of_two());
    let queue = Arc::new(Queue {
        words: (0..words).map(|_| AtomicU64::new(0)).collect(),
        tail: Line::zero(),
        head: Line::zero(),
        asleep: Line::zero(),
    });
    let writer = Writer {
        queue: Arc::clone(&queue),
        tail: 0,
        head: 0,
    };
    let reader = Reader {
        queue,
        head: 0,
        next: 0,
        tail: 0,
    };
    (writer, reader)
}

impl Writer {
    /// Returns whether an entry of so many words has room now.
    #[inline]
    pub fn has_room(&mut self, words: usize) -> bool {
        let needed = words as u64 + 1;
        let size = self.queue.words.len() as u64;
        self.has_done((self.tail + needed).saturating_sub(size))
    }

    /// Begins an entry of so many words, for which there is room.
    #[inline]
    pub fn begin(&mut self, words: usize) -> Entry<'_> {
        debug_assert!(self.has_room(words), "an entry overtakes the reader");
        let at = self.tail;
        let mut entry = Entry { writer: self, at };
        entry.word(words as u64);
        entry
    }

    /// Returns the place behind the last entry.
    #[inline]
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Returns whether everything before a place is done.
    #[inline]
    pub fn has_done(&mut self, place: u64) -> bool {
        if self.head < place {
            // SYNC POINT: Done.
            self.head = self.queue.head.0.load(SyncPoint::Done.acquire());
        }
        self.head >= place
    }

    #[must_use]
    pub fn gauge(&self) -> Gauge {
        Gauge(Arc::clone(&self.queue))
    }
}

/// An entry that is being written. One that is dropped was never there.
#[derive(Debug)]
pub struct Entry<'a> {
    writer: &'a mut Writer,
    at: u64,
}

impl Entry<'_> {
    #[inline]
    pub fn word(&mut self, word: u64) {
        let place = self.writer.queue.word(self.at);
        place.store(word, Ordering::Relaxed);
        self.at += 1;
    }

    /// Writes bytes, the last ones with zeros behind them to a whole word.
    #[inline]
    pub fn bytes(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.word(u64::from_ne_bytes(*word));
        }
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            self.word(u64::from_ne_bytes(last));
        }
    }

    /// Hands the entry over. Returns whether the reader sleeps, so that the caller has to wake it.
    #[inline]
    #[must_use]
    pub fn publish(self) -> bool {
        let Self { writer, at } = self;
        debug_assert_eq!(
            writer.queue.word(writer.tail).load(Ordering::Relaxed) + 1,
            at - writer.tail,
            "an entry has the words that it announced"
        );
        writer.tail = at;
        // SYNC POINT: Entry.
        writer.queue.tail.0.store(at, SyncPoint::Entry.release());
        // SYNC POINT: Idle. Either the reader's look after its announcement sees the entry, or this load sees the
        // announcement.
        SyncPoint::Idle.fence();
        writer.queue.asleep.0.load(Ordering::Relaxed) != 0
    }
}

impl Reader {
    /// Copies the next entry's words to `into`. Returns false if there is none. The entry stays until [`Reader::done`].
    #[inline]
    pub fn next(&mut self, into: &mut Vec<u64>) -> bool {
        if self.head == self.tail {
            // SYNC POINT: Entry.
            self.tail = self.queue.tail.0.load(SyncPoint::Entry.acquire());
            if self.head == self.tail {
                return false;
            }
        }
        let words = self.queue.word(self.head).load(Ordering::Relaxed);
        self.next = self.head + 1 + words;
        into.clear();
        into.extend(
            (self.head + 1..self.next).map(|place| self.queue.word(place).load(Ordering::Relaxed)),
        );
        true
    }

    /// Removes the entry of the last [`Reader::next`]: it is done.
    #[inline]
    pub fn done(&mut self) {
        self.head = self.next;
        // SYNC POINT: Done.
        let order = SyncPoint::Done.release();
        self.queue.head.0.store(self.head, order);
    }

    /// Announces that the reader is about to sleep. Returns false if it must not, because there is an entry.
    pub fn announce_sleep(&self) -> bool {
        self.queue.asleep.0.store(1, Ordering::Relaxed);
        // SYNC POINT: Idle.
        SyncPoint::Idle.fence();
        let nothing = self.queue.tail.0.load(Ordering::Relaxed) == self.head;
        if !nothing {
            self.awake();
        }
        nothing
    }

    pub fn awake(&self) {
        self.queue.asleep.0.store(0, Ordering::Relaxed);
    }
}

impl Gauge {
    /// Returns the number of words whose entries are not done, and of words that were ever written.
    #[must_use]
    pub fn read(&self) -> (u64, u64) {
        let head = self.0.head.0.load(Ordering::Relaxed);
        let tail = self.0.tail.0.load(Ordering::Relaxed);
        (tail.saturating_sub(head), tail)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn entries_leave_in_order_once_they_are_done() {
        let (mut writer, mut reader) = queue(8);
        let mut found = Vec::new();
        assert!(!reader.next(&mut found));
        for round in 0..20u8 {
            let mut entry = writer.begin(3);
            entry.word(u64::from(round));
            entry.bytes(&[round; 9]);
            assert!(!entry.publish());
            assert!(writer.has_room(3));
            assert!(!writer.has_room(4), "the entry is not done");
            let place = writer.tail();
            assert!(reader.next(&mut found));
            assert_eq!(found[0], u64::from(round));
            assert_eq!(found[1], u64::from_ne_bytes([round; 8]));
            let [.., last] = &found[..] else {
                unreachable!("three words")
            };
            assert_eq!(last.to_ne_bytes(), [round, 0, 0, 0, 0, 0, 0, 0]);
            assert!(!writer.has_done(place));
            assert_eq!(writer.gauge().read(), (4, place));
            reader.done();
            assert!(writer.has_done(place));
            assert!(!reader.next(&mut found));
        }
    }

    #[test]
    fn an_entry_that_is_dropped_was_never_there() {
        let (mut writer, mut reader) = queue(8);
        writer.begin(2).word(7);
        assert!(!reader.next(&mut Vec::new()));
        assert_eq!(writer.tail(), 0);
    }

    #[test]
    fn a_sleeper_is_to_be_woken() {
        let (mut writer, mut reader) = queue(8);
        assert!(reader.announce_sleep());
        assert!(writer.begin(0).publish());
        assert!(!reader.announce_sleep(), "there is an entry");
        assert!(!writer.begin(0).publish());
        assert!(reader.next(&mut Vec::new()));
    }
}
