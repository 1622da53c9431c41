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

/// Something no correct producer writes: the session is hostile or broken and must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The commit word has bits or a length that no entry has.
    #[error("ring entry at {cursor:#x}: commit word {word:#018x} is impossible")]
    Commit {
        /// Where the entry starts, in bytes since the session began.
        cursor: u64,
        /// The word as read.
        word: u64,
    },
    /// The commit word belongs to another lap around the ring.
    #[error("ring entry at {cursor:#x}: commit word of lap {found}, expected lap {expected}")]
    Lap {
        /// Where the entry starts.
        cursor: u64,
        /// The lap in the word.
        found: u32,
        /// The lap of the cursor.
        expected: u32,
    },
    /// The entry reaches past the ring's end, or a pad does not end there.
    #[error(
        "ring entry at {cursor:#x}: {bytes} bytes do not fit the {left} bytes to the ring's end"
    )]
    Overrun {
        /// Where the entry starts.
        cursor: u64,
        /// Bytes of the entry.
        bytes: usize,
        /// Bytes from there to the ring's end.
        left: usize,
    },
    /// The body's length contradicts the entry's.
    #[error("ring entry at {cursor:#x}: a body of {body_len} bytes in an entry of {bytes} bytes")]
    Body {
        /// Where the entry starts.
        cursor: u64,
        /// The length in the header.
        body_len: u32,
        /// Bytes of the entry.
        bytes: usize,
    },
    /// The answer slot does not exist.
    #[error("ring entry at {cursor:#x}: answer slot {slot} of {SLOTS}")]
    Slot {
        /// Where the entry starts.
        cursor: u64,
        /// The slot in the header.
        slot: u16,
    },
    /// The producers' cursor is not where any producer can have moved it.
    #[error("ring tail {tail:#x} is impossible with head {head:#x}")]
    Tail {
        /// The cursor as read.
        tail: u64,
        /// The consumer's own cursor.
        head: u64,
    },
}

/// The consuming side of a ring.
#[derive(Debug)]
pub struct Consumer {
    memory: SessionMemory,
    /// Everything before it has been taken; a multiple of [`UNIT`]. The copy in shared memory is
    /// written, never read.
    head: u64,
}

impl Consumer {
    /// The consuming side of the ring in `memory`, which is fresh: nothing was taken from it.
    ///
    /// # Safety
    /// This is the only consumer of the session, and all its producers that live in this process are
    /// values of this crate.
    #[must_use]
    pub unsafe fn new(memory: SessionMemory) -> Self {
        Self { memory, head: 0 }
    }

    /// Takes the next record: copies it to `buf`, frees its place, returns its head. `None` when no
    /// record is published next.
    ///
    /// Allocates nothing, takes no lock, never waits.
    ///
    /// # Errors
    /// The producer wrote what no correct one writes. The consumer stays where it is; its session
    /// must end.
    #[inline]
    pub fn take(&mut self, buf: &mut RecordBuf) -> Result<Option<RecordHead>, Violation> {
        let Some(mut commit) = self.published()? else {
            return Ok(None);
        };
        if commit.pad {
            self.release(commit.units);
            // A pad ends at the ring's end, so what follows it is no pad.
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
        let slot = match wire.slot {
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
            message: wire.message,
            flags: wire.flags,
            slot,
            device: wire.device,
            sequence: wire.sequence,
        }))
    }

    /// Announces that this side is about to sleep. True: sleep until the doorbell, then call
    /// [`Consumer::unpark`]. False: a record came meanwhile and the announcement is withdrawn.
    ///
    /// # Errors
    /// The producers' cursor is impossible.
    pub fn park(&self) -> Result<bool, Violation> {
        self.check_tail()?;
        self.memory
            .word(session::PARKED)
            .store(1, Ordering::Relaxed);
        // SYNC POINT: park. Either the look below sees the record, or the producer that published it
        // sees PARKED after its own fence.
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

    /// Withdraws the announcement of [`Consumer::park`].
    pub fn unpark(&self) {
        self.memory
            .word(session::PARKED)
            .store(0, Ordering::Relaxed);
    }

    /// Bytes taken since the session began, pads included.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.head
    }

    /// Whether the producers' cursor lies where producers can have moved it.
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

    /// The next entry, if it is published and possible.
    #[inline]
    fn published(&self) -> Result<Option<Commit>, Violation> {
        let cursor = self.head;
        // SYNC POINT: commit. What the producer wrote to the entry is seen from here on.
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

    /// Gives the next `units` units back to the producers.
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
        // SYNC POINT: head. A producer that sees this cursor may write what lies before it.
        self.memory
            .word(session::HEAD)
            .store(self.head, SyncPoint::Head.release());
    }
}
