use crate::sync::{AtomicU64, SyncPoint};

/// States of a session number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum State {
    /// The number is not in use.
    Free = 0,
    /// A guest process and a worker share the session.
    Active = 1,
    /// The control stream has ended or the worker has died; the supervisor is ending the other one.
    Dying = 2,
    /// The worker is reaped; the guest may still map the segments.
    Quarantined = 3,
    /// The segments are zeroed.
    Scrubbed = 4,
}

impl State {
    const fn from_bits(bits: u64) -> Self {
        match bits & 0xFF {
            1 => Self::Active,
            2 => Self::Dying,
            3 => Self::Quarantined,
            4 => Self::Scrubbed,
            _ => Self::Free,
        }
    }
}

/// A transition that the order of states does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a session of generation {generation} in state {found:?} cannot become {wanted:?} of generation {wanted_generation}"
)]
pub struct TransitionError {
    /// The session's state.
    pub found: State,
    /// The session's generation.
    pub generation: u32,
    /// The state that the caller requested.
    pub wanted: State,
    /// The generation that the caller named.
    pub wanted_generation: u32,
}

/// State machine of one session number: FREE → ACTIVE → DYING → QUARANTINED → SCRUBBED → FREE, with
/// no other transitions. Of several callers that attempt a transition exactly one succeeds, and
/// none succeeds for a generation that is over.
///
/// ```
/// use wormhole_ring::session::{SessionState, State};
/// let session = SessionState::new();
/// let generation = session.activate().unwrap();
/// session.end(generation).unwrap();
/// assert!(session.end(generation).is_err());
/// session.worker_reaped(generation).unwrap();
/// session.scrubbed(generation).unwrap();
/// session.release(generation).unwrap();
/// assert_eq!(session.load(), (State::Free, generation));
/// assert_eq!(session.activate().unwrap(), generation + 1);
/// ```
#[derive(Debug)]
pub struct SessionState {
    /// The generation in the high half, the [`State`] in the lowest byte.
    word: AtomicU64,
}

impl SessionState {
    /// Creates the state of a free session number that was never used.
    #[must_use]
    pub fn new() -> Self {
        Self {
            word: AtomicU64::new(0),
        }
    }

    /// Loads the state and the generation.
    #[must_use]
    pub fn load(&self) -> (State, u32) {
        split(self.word.load(SyncPoint::SessionState.acquire()))
    }

    /// Moves FREE → ACTIVE and returns the next generation, which is never 0.
    ///
    /// # Errors
    /// The session is not free.
    pub fn activate(&self) -> Result<u32, TransitionError> {
        let word = self.word.load(SyncPoint::SessionState.acquire());
        let (found, generation) = split(word);
        let next = generation.wrapping_add(1).max(1);
        let refused = |(found, generation)| TransitionError {
            found,
            generation,
            wanted: State::Active,
            wanted_generation: next,
        };
        if found != State::Free {
            return Err(refused((found, generation)));
        }
        // SYNC POINT: session state.
        match self.word.compare_exchange(
            word,
            join(State::Active, next),
            SyncPoint::SessionState.acquire_release(),
            SyncPoint::SessionState.acquire(),
        ) {
            Ok(_) => Ok(next),
            Err(word) => Err(refused(split(word))),
        }
    }

    /// Moves ACTIVE → DYING. The caller for which this succeeds ends the worker; the end of the
    /// control stream and the worker's death may both try.
    ///
    /// # Errors
    /// The session is not active, or of another generation.
    pub fn end(&self, generation: u32) -> Result<(), TransitionError> {
        self.advance(generation, State::Active, State::Dying)
    }

    /// Moves DYING → QUARANTINED, after `waitpid` has returned the worker and its context is gone.
    ///
    /// # Errors
    /// The session is not dying, or of another generation.
    pub fn worker_reaped(&self, generation: u32) -> Result<(), TransitionError> {
        self.advance(generation, State::Dying, State::Quarantined)
    }

    /// Moves QUARANTINED → SCRUBBED, after no process maps the segments and they are zeroed.
    ///
    /// # Errors
    /// The session is not quarantined, or of another generation.
    pub fn scrubbed(&self, generation: u32) -> Result<(), TransitionError> {
        self.advance(generation, State::Quarantined, State::Scrubbed)
    }

    /// Moves SCRUBBED → FREE, after the session's segments are free in the table.
    ///
    /// # Errors
    /// The session is not scrubbed, or of another generation.
    pub fn release(&self, generation: u32) -> Result<(), TransitionError> {
        self.advance(generation, State::Scrubbed, State::Free)
    }

    fn advance(&self, generation: u32, from: State, to: State) -> Result<(), TransitionError> {
        // SYNC POINT: session state. The thread that makes the next transition sees all writes
        // before this one.
        self.word
            .compare_exchange(
                join(from, generation),
                join(to, generation),
                SyncPoint::SessionState.acquire_release(),
                SyncPoint::SessionState.acquire(),
            )
            .map(|_| ())
            .map_err(|word| {
                let (found, found_generation) = split(word);
                TransitionError {
                    found,
                    generation: found_generation,
                    wanted: to,
                    wanted_generation: generation,
                }
            })
    }
}

impl Default for SessionState {
    fn default() -> Self {
        Self::new()
    }
}

const fn join(state: State, generation: u32) -> u64 {
    (generation as u64) << 32 | state as u64
}

const fn split(word: u64) -> (State, u32) {
    (State::from_bits(word), (word >> 32) as u32)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_step_out_of_order_is_refused() {
        let session = SessionState::new();
        assert!(session.end(0).is_err());
        let generation = session.activate().unwrap();
        assert!(session.activate().is_err());
        assert!(session.worker_reaped(generation).is_err());
        assert!(session.scrubbed(generation).is_err());
        assert!(session.release(generation).is_err());
        assert_eq!(session.load(), (State::Active, generation));
    }

    #[test]
    fn a_generation_that_is_over_cannot_move_its_successor() {
        let session = SessionState::new();
        let old = session.activate().unwrap();
        session.end(old).unwrap();
        session.worker_reaped(old).unwrap();
        session.scrubbed(old).unwrap();
        session.release(old).unwrap();
        let new = session.activate().unwrap();
        assert_eq!(
            session.end(old),
            Err(TransitionError {
                found: State::Active,
                generation: new,
                wanted: State::Dying,
                wanted_generation: old,
            })
        );
        assert_eq!(session.load(), (State::Active, new));
    }
}
