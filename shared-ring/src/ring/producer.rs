use zerocopy::IntoBytes;

use super::consumer::ON_WORD;
use super::record::{Commit, RecordHead, WireHead, units_for};
use crate::{
    layout::{self, MAX_BODY, RING_BYTES, UNIT, session},
    memory::SessionMemory,
    sync::{AtomicU64, Ordering, SyncPoint},
};

/// Errors of [`Producer::push`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// The consumer has not freed enough units yet. Nothing was written; the caller may try again.
    #[error("the ring has no room for {needed} bytes now")]
    Full {
        /// Bytes that the record needs, with the pad before it.
        needed: usize,
    },
    /// The body is longer than a record's body may be.
    #[error("a body of {length} bytes exceeds the {limit} bytes of a record")]
    TooLong {
        /// Bytes of the body.
        length: usize,
        /// Most bytes of a body.
        limit: usize,
    },
    /// The cursors in shared memory contradict each other: the session is lost.
    #[error("the ring's cursors are impossible: head {head:#x}, tail {tail:#x}")]
    Corrupt {
        /// The consumer's cursor as read.
        head: u64,
        /// The producers' cursor as read.
        tail: u64,
    },
}

/// Manner in which a consumer sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleep {
    /// Until a message of the control channel.
    UntilMessage,
    /// On a word of the window: a producer on the consumer's own system wakes it by [`Producer::wake_consumer`], others by a
    /// message.
    OnWord,
}

/// Most attempts to reserve before `push` reports a full ring. The bound keeps another party that moves the tail all
/// the time from blocking a caller.
const ATTEMPTS: u32 = 1 << 16;

/// Units of a later record that [`Producer::push`] fetches. Longer records are rare, and copying them takes longer.
const PREFETCHED_UNITS: usize = 4;

/// The producing side of a ring. All threads of a process share one producer.
///
/// ```
/// use wormhole_ring::{memory::OwnedMemory, ring::{Consumer, Producer, RecordBuf, RecordHead}};
/// let region = OwnedMemory::segments(1);
/// // SAFETY: the region outlives both sides, and there is one consumer.
/// let (producer, mut consumer) = unsafe {
///     let session = region.session(0).unwrap();
///     (Producer::new(session.clone()), Consumer::new(session))
/// };
/// producer.push(RecordHead::record(12), &[b"stream", b"fence"]).unwrap();
///
/// let mut buf = RecordBuf::new();
/// let head = consumer.take(&mut buf).unwrap().unwrap();
/// assert_eq!(head.message, 12);
/// assert_eq!(buf.body(), b"streamfence");
/// ```
#[derive(Debug)]
pub struct Producer {
    memory: SessionMemory,
    /// A past value of the consumer's head. It is at most the current one, so room computed from it exists. It is read
    /// again only when that room is too small.
    cached_head: CachedHead,
}

/// The cached head, aligned to two cache lines of its own, because processors fetch lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct CachedHead(AtomicU64);

/// Units reserved for one record.
struct Reservation {
    /// Cursor of the pad or, without one, of the record.
    start: u64,
    /// Bytes of the pad that fills the ring's end, 0 without one.
    pad: usize,
}

impl Producer {
    /// Creates the producing side of the ring in `memory`.
    ///
    /// # Safety
    /// All producers and the consumer of this session that live in this process are values of this
    /// crate.
    #[must_use]
    pub unsafe fn new(memory: SessionMemory) -> Self {
        Self {
            memory,
            cached_head: CachedHead(AtomicU64::new(0)),
        }
    }

    /// Copies a record with the concatenation of `parts` as its body into the ring and publishes it.
    ///
    /// Allocates nothing, takes no lock, never waits. Call [`Producer::consumer_parked`] afterwards.
    ///
    /// # Errors
    /// See [`PushError`]. Nothing was written if it fails.
    #[inline]
    pub fn push(&self, head: RecordHead, parts: &[&[u8]]) -> Result<(), PushError> {
        // A caller has the head's numbers in registers, and these remain there. In memory a processor would write them one by
        // one, and wait for all of them when it reads several at once.
        self.push_to(head.route(), head.sequence, parts)
    }

    fn push_to(&self, route: [u16; 4], sequence: u64, parts: &[&[u8]]) -> Result<(), PushError> {
        let body = parts
            .iter()
            .map(|part| part.len())
            .fold(0, usize::saturating_add);
        let body_len = match u32::try_from(body) {
            Ok(body_len) if body <= MAX_BODY => body_len,
            _ => {
                return Err(PushError::TooLong {
                    length: body,
                    limit: MAX_BODY,
                });
            }
        };
        let units = units_for(body);
        let Reservation { start, pad } = self.reserve(units * UNIT)?;
        if pad > 0 {
            self.publish(
                start,
                Commit {
                    units: pad / UNIT,
                    pad: true,
                    lap: Commit::lap_of(start),
                },
            );
        }
        let cursor = start + pad as u64;
        let offset = ring_offset(cursor);
        let wire = WireHead {
            route,
            pad: [0; 2],
            body_len,
            sequence,
        };
        self.memory.write(offset + 8, wire.as_bytes());
        let mut at = offset + layout::RECORD_HEADER;
        for part in parts {
            self.memory.write(at, part);
            at += part.len();
        }
        self.publish(
            cursor,
            Commit {
                units,
                pad: false,
                lap: Commit::lap_of(cursor),
            },
        );
        self.prefetch(cursor, units);
        Ok(())
    }

    /// Fetches lines for a later record, after the one at `cursor` of `units` units was published.
    ///
    /// The consumer's processor owns these lines since it cleared their commit words a lap ago. The store of a record
    /// waits for them at the fence of [`Producer::consumer_parked`], unless they were fetched before. The units of the
    /// next record are left out: a consumer that waits reads its commit word all the time.
    #[inline]
    fn prefetch(&self, cursor: u64, units: usize) {
        let next = cursor + 2 * (units * UNIT) as u64;
        for unit in 0..units.min(PREFETCHED_UNITS) {
            self.memory
                .prefetch_for_write(ring_offset(next + (unit * UNIT) as u64));
        }
    }

    /// Returns true if the consumer sleeps or is about to, so that a producer must ring the doorbell. Call it after
    /// [`Producer::push`].
    #[inline]
    #[must_use]
    pub fn consumer_parked(&self) -> bool {
        // SYNC POINT: park. Either this load sees PARKED, or the consumer's load after its own fence sees the record
        // published before this fence.
        SyncPoint::Park.fence();
        self.is_consumer_parked()
    }

    /// Returns true if the consumer sleeps or is about to: a hint, without order.
    #[inline]
    #[must_use]
    pub fn is_consumer_parked(&self) -> bool {
        self.memory.word(session::PARKED).load(Ordering::Relaxed) != 0
    }

    /// Returns how the consumer sleeps, if the caller must wake it. Of several producers that find the consumer parked,
    /// only one must, so that a sleeping consumer is not woken once for each record. Call it after [`Producer::push`].
    #[inline]
    #[must_use]
    pub fn must_ring(&self) -> Option<Sleep> {
        if self.consumer_parked() {
            self.take_turn_to_ring()
        } else {
            None
        }
    }

    #[cold]
    fn take_turn_to_ring(&self) -> Option<Sleep> {
        // The producer that rings clears the word. A producer that then finds it clear relies on that doorbell: the
        // woken consumer looks at the ring, and before it sleeps again it sets the word and looks once more.
        match self.memory.word(session::PARKED).swap(0, Ordering::Relaxed) {
            0 => None,
            how if how == u64::from(ON_WORD) => Some(Sleep::OnWord),
            _ => Some(Sleep::UntilMessage),
        }
    }

    /// Wakes a consumer on the same system that sleeps [on the word](Sleep::OnWord), after [`Producer::must_ring`].
    #[cfg(all(feature = "std", not(loom)))]
    pub fn wake_consumer(&self) {
        crate::futex::wake(self.memory.word(session::PARKED));
    }

    /// Returns true if the consumer has taken all reserved bytes.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        let tail = self.memory.word(session::TAIL).load(Ordering::Relaxed);
        self.memory
            .word(session::HEAD)
            .load(SyncPoint::Head.acquire())
            >= tail
    }

    /// Reserves `bytes` contiguous bytes of the ring, with a pad before them if they would wrap.
    #[inline]
    fn reserve(&self, bytes: usize) -> Result<Reservation, PushError> {
        let tail_word = self.memory.word(session::TAIL);
        // SYNC POINT: cached head. The consumer's clears that another thread saw with this head are visible here too.
        let mut head = self.cached_head.0.load(SyncPoint::CachedHead.acquire());
        // If one reservation happens before another in the program, coherence alone keeps their order. The commit words
        // publish the records themselves.
        let mut tail = tail_word.load(SyncPoint::Tail.acquire());
        let mut needed = bytes;
        for _ in 0..ATTEMPTS {
            if !tail.is_multiple_of(UNIT as u64) || tail > u64::MAX / 2 {
                return Err(PushError::Corrupt { head, tail });
            }
            let position = ring_position(tail);
            let pad = if RING_BYTES - position < bytes {
                RING_BYTES - position
            } else {
                0
            };
            needed = pad + bytes;
            let end = tail + needed as u64;
            if end.saturating_sub(head) > RING_BYTES as u64 {
                // Reservations by other threads only move this record's end further.
                head = self.refresh(end)?.ok_or(PushError::Full { needed })?;
            }
            // SYNC POINT: tail.
            match tail_word.compare_exchange(
                tail,
                end,
                SyncPoint::Tail.release(),
                SyncPoint::Tail.acquire(),
            ) {
                Ok(_) => return Ok(Reservation { start: tail, pad }),
                Err(current) => tail = current,
            }
        }
        Err(PushError::Full { needed })
    }

    /// Reads the consumer's head again for a reservation that would end at `end`. Returns the head if it leaves enough
    /// room.
    #[cold]
    fn refresh(&self, end: u64) -> Result<Option<u64>, PushError> {
        let head_word = self.memory.word(session::HEAD);
        // The head is loaded before the tail and again after it. When the tail was loaded, the head lay between the two
        // values, which bounds the tail exactly however much other threads move it meanwhile.
        let before = head_word.load(SyncPoint::Head.acquire());
        // SYNC POINT: tail. The head that allowed a peer to move the tail there is visible below.
        let tail = self
            .memory
            .word(session::TAIL)
            .load(SyncPoint::Tail.acquire());
        // SYNC POINT: head. The consumer cleared the units it took before it moved the head past them.
        let after = head_word.load(SyncPoint::Head.acquire());
        let room_end = after.saturating_add(RING_BYTES as u64);
        if before > tail || tail > room_end || after < before {
            return Err(PushError::Corrupt { head: after, tail });
        }
        if end > room_end {
            return Ok(None);
        }
        // SYNC POINT: cached head.
        self.cached_head
            .0
            .store(after, SyncPoint::CachedHead.release());
        Ok(Some(after))
    }

    /// Publishes the entry at `cursor`.
    #[inline]
    fn publish(&self, cursor: u64, commit: Commit) {
        // SYNC POINT: commit. A thread that sees this word sees all writes to the entry.
        self.memory
            .word(ring_offset(cursor))
            .store(commit.to_word(), SyncPoint::Commit.release());
    }
}

/// Returns the offset in the ring of the entry at `cursor`.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "smaller than the ring")]
pub(super) const fn ring_position(cursor: u64) -> usize {
    (cursor & (RING_BYTES as u64 - 1)) as usize
}

/// Returns the offset in the session segment of the entry at `cursor`.
#[inline]
pub(super) const fn ring_offset(cursor: u64) -> usize {
    session::RING_BASE + ring_position(cursor)
}
