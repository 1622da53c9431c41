use super::{
    producer::{ring_offset, ring_position},
    record::{Commit, RecordBuf, RecordHead, units_for},
};
use crate::{
    layout::{MAX_BODY, MAX_RECORD, RING_BYTES, SLOTS, UNIT, session},
    memory::SessionMemory,
    slot::SlotIndex,
    sync::{Ordering, SyncPoint},
};

/// Ring content that no correct producer writes. The session is hostile or broken and must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The commit word has invalid bits or an invalid length.
    #[error("ring entry at {cursor:#x}: commit word {word:#018x} is impossible")]
    Commit {
        /// Cursor of the entry, in bytes since the session began.
        cursor: u64,
        /// The word as read.
        word: u64,
    },
    /// The commit word belongs to another lap around the ring.
    #[error("ring entry at {cursor:#x}: commit word of lap {found}, expected lap {expected}")]
    Lap {
        /// Cursor of the entry.
        cursor: u64,
        /// The lap in the word.
        found: u32,
        /// The lap of the cursor.
        expected: u32,
    },
    /// The entry reaches past the ring's end, or is a pad that does not end there.
    #[error(
        "ring entry at {cursor:#x}: {bytes} bytes do not fit the {left} bytes to the ring's end"
    )]
    Overrun {
        /// Cursor of the entry.
        cursor: u64,
        /// Bytes of the entry.
        bytes: usize,
        /// Bytes from the entry's start to the ring's end.
        left: usize,
    },
    /// The body's length contradicts the length of the entry.
    #[error("ring entry at {cursor:#x}: a body of {body_len} bytes in an entry of {bytes} bytes")]
    Body {
        /// Cursor of the entry.
        cursor: u64,
        /// The length in the header.
        body_len: u32,
        /// Bytes of the entry.
        bytes: usize,
    },
    /// The answer slot does not exist.
    #[error("ring entry at {cursor:#x}: answer slot {slot} of {SLOTS}")]
    Slot {
        /// Cursor of the entry.
        cursor: u64,
        /// The slot in the header.
        slot: u16,
    },
    /// The producers' cursor has a value that no producer can have written.
    #[error("ring tail {tail:#x} is impossible with head {head:#x}")]
    Tail {
        /// The cursor as read.
        tail: u64,
        /// The consumer's own cursor.
        head: u64,
    },
}

/// Value of PARKED while the consumer sleeps on that word.
pub(super) const ON_WORD: u32 = 2;

/// Wakes a consumer that sleeps.
#[derive(Clone, Debug)]
pub struct Doorbell {
    memory: SessionMemory,
}

impl Doorbell {
    /// Ends the sleep of the consumer, if it sleeps or is about to. A consumer looks between [`Consumer::park`] and
    /// [`Consumer::sleep`] for the event that the caller has stored before.
    #[cfg(all(feature = "std", not(loom)))]
    pub fn ring(&self) {
        self.clear();
        crate::futex::wake(self.memory.word(session::PARKED));
    }

    /// Clears PARKED. No sleep begins on the word afterwards until the consumer parks again.
    pub fn clear(&self) {
        // SYNC POINT: park. Either the consumer, which looks for the event after its own fence, sees it, or it has set
        // PARKED before this clears it.
        SyncPoint::Park.fence();
        self.memory.word(session::PARKED).swap(0, Ordering::Relaxed);
    }
}

/// The consuming side of a ring.
#[derive(Debug)]
pub struct Consumer {
    memory: SessionMemory,
    /// Cursor of the next entry to take; a multiple of [`UNIT`]. Its copy in shared memory is written, never read.
    head: u64,
}

impl Consumer {
    /// Creates the consuming side of the ring in `memory`. The ring must be fresh: no record was taken from it.
    ///
    /// # Safety
    /// This is the only consumer of the session, and all its producers that live in this process are
    /// values of this crate.
    #[must_use]
    pub unsafe fn new(memory: SessionMemory) -> Self {
        Self { memory, head: 0 }
    }

    /// Takes the next record: copies it to `buf`, frees its units and returns its head. Returns `None` if no record is
    /// published at the cursor.
    ///
    /// Allocates nothing, takes no lock, never waits.
    ///
    /// # Errors
    /// The producer wrote an entry that no correct one writes. The consumer's cursor does not move; the session must
    /// end.
    #[inline]
    pub fn take(&mut self, buf: &mut RecordBuf) -> Result<Option<RecordHead>, Violation> {
        let Some(mut commit) = self.published()? else {
            return Ok(None);
        };
        if commit.pad {
            self.release(commit.units);
            // A pad ends at the ring's end, so the next entry is no pad.
            match self.published()? {
                Some(next) => commit = next,
                None => return Ok(None),
            }
        }
        let bytes = commit.units * UNIT;
        self.memory
            .read(ring_offset(self.head), buf.units_mut(commit.units));
        let wire = buf.head();
        let body = wire.body_len as usize;
        if body > MAX_BODY || units_for(body) != commit.units {
            return Err(Violation::Body {
                cursor: self.head,
                body_len: wire.body_len,
                bytes,
            });
        }
        let [message, thread, slot, device] = wire.route;
        let slot = match slot {
            SlotIndex::NONE_WIRE => None,
            slot => match SlotIndex::new(slot) {
                Some(slot) => Some(slot),
                None => {
                    return Err(Violation::Slot {
                        cursor: self.head,
                        slot,
                    });
                }
            },
        };
        buf.set_body(body);
        self.release(commit.units);
        Ok(Some(RecordHead {
            message,
            thread,
            slot,
            device,
            sequence: wire.sequence,
        }))
    }

    /// Sets PARKED before the consumer sleeps. Returns true if the caller shall sleep by [`Consumer::sleep`] and then call
    /// [`Consumer::unpark`]; false, with PARKED cleared again, if a record was published meanwhile.
    ///
    /// # Errors
    /// The producers' cursor is impossible.
    pub fn park(&self) -> Result<bool, Violation> {
        self.check_tail()?;
        self.memory
            .word(session::PARKED)
            .store(ON_WORD.into(), Ordering::Relaxed);
        // SYNC POINT: park. Either the load below sees the record, or the producer that published it sees PARKED after
        // its own fence.
        SyncPoint::Park.fence();
        if self
            .memory
            .word(ring_offset(self.head))
            .load(Ordering::Relaxed)
            == 0
        {
            return Ok(true);
        }
        self.unpark();
        Ok(false)
    }

    /// Sleeps after [`Consumer::park`] until a producer or a [`Doorbell`] clears PARKED and wakes this thread; may return
    /// earlier. A guest that writes the word otherwise keeps its own session waiting.
    #[cfg(all(feature = "std", not(loom)))]
    pub fn sleep(&self) {
        /// Without effect on a correct guest, which clears the word first.
        const LIMIT: core::time::Duration = core::time::Duration::from_secs(3600);
        crate::futex::wait(self.memory.word(session::PARKED), ON_WORD, LIMIT);
    }

    /// Returns the doorbell by which other threads of the consumer's process wake it.
    #[must_use]
    pub fn doorbell(&self) -> Doorbell {
        Doorbell {
            memory: self.memory.clone(),
        }
    }

    /// Clears PARKED, which [`Consumer::park`] set.
    pub fn unpark(&self) {
        self.memory
            .word(session::PARKED)
            .store(0, Ordering::Relaxed);
    }

    /// Returns the number of bytes taken since the session began, pads included.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.head
    }

    /// Checks that correct producers can have written the producers' cursor.
    fn check_tail(&self) -> Result<(), Violation> {
        let tail = self.memory.word(session::TAIL).load(Ordering::Relaxed);
        let possible = self.head..=self.head + RING_BYTES as u64;
        if tail.is_multiple_of(UNIT as u64) && possible.contains(&tail) {
            Ok(())
        } else {
            Err(Violation::Tail {
                tail,
                head: self.head,
            })
        }
    }

    /// Returns whether the producer has written something at the cursor: most often a record.
    #[inline]
    #[must_use]
    pub fn is_ready(&self) -> bool {
        // Nothing is read behind the word, so that the load orders nothing.
        let word = self.memory.word(ring_offset(self.head));
        word.load(Ordering::Relaxed) != 0
    }

    /// Returns the commit word of the next entry, if it is published. Fails if it is invalid.
    #[inline]
    fn published(&self) -> Result<Option<Commit>, Violation> {
        let cursor = self.head;
        // SYNC POINT: commit. The producer's writes to the entry are visible from here on.
        let word = self
            .memory
            .word(ring_offset(cursor))
            .load(SyncPoint::Commit.acquire());
        if word == 0 {
            return Ok(None);
        }
        let commit = match Commit::from_word(word) {
            Some(commit) if commit.units > 0 && commit.units <= MAX_RECORD / UNIT => commit,
            _ => return Err(Violation::Commit { cursor, word }),
        };
        let expected = Commit::lap_of(cursor);
        if commit.lap != expected {
            return Err(Violation::Lap {
                cursor,
                found: commit.lap,
                expected,
            });
        }
        let bytes = commit.units * UNIT;
        let left = RING_BYTES - ring_position(cursor);
        if bytes > left || (commit.pad && bytes != left) {
            return Err(Violation::Overrun {
                cursor,
                bytes,
                left,
            });
        }
        Ok(Some(commit))
    }

    /// Frees the next `units` units for the producers.
    #[inline]
    fn release(&mut self, units: usize) {
        let offset = ring_offset(self.head);
        // The next lap's entries may start at any of these units: none may look published.
        for unit in 0..units {
            self.memory
                .word(offset + unit * UNIT)
                .store(0, Ordering::Relaxed);
        }
        self.head += (units * UNIT) as u64;
        // SYNC POINT: head. A producer that sees this cursor may overwrite the units before it.
        self.memory
            .word(session::HEAD)
            .store(self.head, SyncPoint::Head.release());
    }
}
