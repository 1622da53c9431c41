use core::fmt;

use crate::{layout::session, memory::SessionMemory, sync::Ordering};

/// Snapshot of a ring's words, for diagnostics. Either side may have written anything there.
///
/// ```
/// use wormhole_ring::{memory::OwnedMemory, ring::{Cursors, Producer, RecordHead}};
/// let region = OwnedMemory::segments(1);
/// // SAFETY: the region outlives the producer.
/// let session = unsafe { region.session(0) }.unwrap();
/// // SAFETY: the only producer.
/// let producer = unsafe { Producer::new(session.clone()) };
/// producer.push(RecordHead::record(12), &[b"stream"]).unwrap();
/// assert_eq!(Cursors::of(&session).to_string(), "64 bytes of its ring are not taken");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursors {
    /// Bytes that producers have reserved since the session began.
    pub tail: u64,
    /// Bytes that the consumer has taken since then.
    pub head: u64,
    /// Set if the consumer sleeps until the doorbell rings.
    pub parked: bool,
}

impl Cursors {
    /// Loads the words in `memory`.
    #[must_use]
    pub fn of(memory: &SessionMemory) -> Self {
        let word = |offset| memory.word(offset).load(Ordering::Relaxed);
        Self {
            tail: word(session::TAIL),
            head: word(session::HEAD),
            parked: word(session::PARKED) != 0,
        }
    }
}

impl fmt::Display for Cursors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.tail.wrapping_sub(self.head);
        write!(f, "{bytes} bytes of its ring are not taken")?;
        if self.parked {
            f.write_str(", and the doorbell is awaited")?;
        }
        Ok(())
    }
}
