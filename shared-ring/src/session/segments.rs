use alloc::{vec, vec::Vec};

use super::SessionId;

/// Contiguous segments of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// The first segment.
    pub first: u32,
    /// Segments, at least 1 in every run the table hands out.
    pub count: u32,
}

impl core::fmt::Display for Run {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} segments from {}", self.count, self.first)
    }
}

/// Who owns a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The supervisor: the bootstrap.
    Reserved,
    /// Nobody; it holds zeroes.
    Free,
    /// A session.
    Granted(SessionId),
    /// Nobody, but it may still be mapped by the session and holds what it left.
    Quarantined(SessionId),
}

/// Why segments are not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    /// Nothing was asked for.
    #[error("{session} asked for no segments")]
    Empty {
        /// Who asked.
        session: SessionId,
    },
    /// The tenant's quota does not allow it. Quarantined segments count: they hold memory.
    #[error("{session} asked for {count} segments; {held} of the tenant's {limit} are in use")]
    Quota {
        /// Who asked.
        session: SessionId,
        /// Segments asked for.
        count: u32,
        /// Segments granted or quarantined.
        held: u32,
        /// The quota.
        limit: u32,
    },
    /// The segments that are free are kept for sessions that have none yet.
    #[error(
        "{session} asked for {count} segments; {room} are free beside {kept} that are kept for other sessions"
    )]
    Kept {
        /// Who asked.
        session: SessionId,
        /// Segments asked for.
        count: u32,
        /// Segments that the session could have.
        room: u32,
        /// Segments kept.
        kept: u32,
    },
    /// No contiguous run is long enough.
    #[error("{session} asked for {count} contiguous segments; the longest free run has {longest}")]
    NoRun {
        /// Who asked.
        session: SessionId,
        /// Segments asked for.
        count: u32,
        /// The longest free run.
        longest: u32,
    },
}

/// Why segments are not taken back or freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TakeBackError {
    /// The run does not lie in the window.
    #[error("{run} do not lie in a window of {segments} segments")]
    OutOfWindow {
        /// The run.
        run: Run,
        /// Segments of the window.
        segments: u32,
    },
    /// A segment of the run is not the session's.
    #[error("segment {segment} is not {session}'s: {owner:?}")]
    NotOwned {
        /// The first such segment.
        segment: u32,
        /// Who meant to own it.
        session: SessionId,
        /// Who does.
        owner: Owner,
    },
}

/// Who owns each segment of a tenant's window. The supervisor's own table.
///
/// ```
/// use wormhole_ring::session::{Owner, Run, SegmentTable, SessionId};
/// let mut table = SegmentTable::new(16, 8);
/// let session = SessionId { index: 0, generation: 1 };
/// let run = table.grant(session, 3).unwrap();
/// assert_eq!(run, Run { first: 1, count: 3 });
/// table.take_back(session, run).unwrap();
/// assert_eq!(table.owner(2), Some(Owner::Quarantined(session)));
/// table.scrubbed(session, run).unwrap();
/// assert_eq!(table.owner(2), Some(Owner::Free));
/// ```
#[derive(Clone, Debug)]
pub struct SegmentTable {
    /// One entry per segment of the window; entry 0 is [`Owner::Reserved`].
    owners: Vec<Owner>,
    /// Segments that may be granted or quarantined at the same time.
    limit: u32,
    /// Segments that are; at most `limit`.
    held: u32,
}

impl SegmentTable {
    /// The table of a window of `segments` segments, of which `limit` may be in use at a time.
    #[must_use]
    pub fn new(segments: u32, limit: u32) -> Self {
        let mut owners = vec![Owner::Free; segments as usize];
        if let Some(first) = owners.first_mut() {
            *first = Owner::Reserved;
        }
        Self {
            owners,
            limit,
            held: 0,
        }
    }

    /// Segments of the window.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "made from a u32")]
    pub fn segments(&self) -> u32 {
        self.owners.len() as u32
    }

    /// Segments that are granted or quarantined.
    #[must_use]
    pub fn held(&self) -> u32 {
        self.held
    }

    /// Segments that can be granted still: those that the quota allows and that are free, wherever they lie.
    #[must_use]
    pub fn room(&self) -> u32 {
        let most = self.limit.min(self.segments().saturating_sub(1));
        most.saturating_sub(self.held)
    }

    /// Who owns `segment`, if there is such a segment.
    #[must_use]
    pub fn owner(&self, segment: u32) -> Option<Owner> {
        self.owners.get(segment as usize).copied()
    }

    /// Whether every byte of the run is granted to `session`.
    #[must_use]
    pub fn owns(&self, session: SessionId, run: Run) -> bool {
        self.all_are(Owner::Granted(session), session, run).is_ok()
    }

    /// Gives `session` the first free run of `count` segments.
    ///
    /// # Errors
    /// See [`GrantError`].
    pub fn grant(&mut self, session: SessionId, count: u32) -> Result<Run, GrantError> {
        if count == 0 {
            return Err(GrantError::Empty { session });
        }
        let (held, limit) = (self.held, self.limit);
        if count > limit.saturating_sub(held) {
            return Err(GrantError::Quota {
                session,
                count,
                held,
                limit,
            });
        }
        let mut longest = 0;
        let mut free = 0;
        for segment in 0..self.segments() {
            free = if self.owners[segment as usize] == Owner::Free {
                free + 1
            } else {
                0
            };
            longest = longest.max(free);
            if free == count {
                let run = Run {
                    first: segment + 1 - count,
                    count,
                };
                self.entries(run).fill(Owner::Granted(session));
                self.held += count;
                return Ok(run);
            }
        }
        Err(GrantError::NoRun {
            session,
            count,
            longest,
        })
    }

    /// The same, if `kept` segments are left after it.
    ///
    /// # Errors
    /// See [`GrantError`].
    pub fn grant_leaving(
        &mut self,
        session: SessionId,
        count: u32,
        kept: u32,
    ) -> Result<Run, GrantError> {
        let room = self.room().saturating_sub(kept);
        if count > room && count <= self.room() {
            return Err(GrantError::Kept {
                session,
                count,
                room,
                kept,
            });
        }
        self.grant(session, count)
    }

    /// Takes a run from a session that returned it. It is quarantined until
    /// [`SegmentTable::scrubbed`]. A part of what was granted may be taken back.
    ///
    /// # Errors
    /// See [`TakeBackError`]; nothing changed then.
    pub fn take_back(&mut self, session: SessionId, run: Run) -> Result<(), TakeBackError> {
        self.all_are(Owner::Granted(session), session, run)?;
        self.entries(run).fill(Owner::Quarantined(session));
        Ok(())
    }

    /// Takes back everything that was granted to `session`, and returns all its quarantined runs.
    pub fn take_back_all(&mut self, session: SessionId) -> Vec<Run> {
        for owner in &mut self.owners {
            if *owner == Owner::Granted(session) {
                *owner = Owner::Quarantined(session);
            }
        }
        self.runs(Owner::Quarantined(session))
    }

    /// Frees a quarantined run that holds zeroes again and that nobody maps.
    ///
    /// # Errors
    /// See [`TakeBackError`]; nothing changed then.
    pub fn scrubbed(&mut self, session: SessionId, run: Run) -> Result<(), TakeBackError> {
        self.all_are(Owner::Quarantined(session), session, run)?;
        self.entries(run).fill(Owner::Free);
        self.held -= run.count;
        Ok(())
    }

    /// The runs whose every segment has this owner, in order.
    #[must_use]
    pub fn runs(&self, owner: Owner) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for segment in (0..self.segments()).filter(|&s| self.owners[s as usize] == owner) {
            match runs.last_mut() {
                Some(run) if run.first + run.count == segment => run.count += 1,
                _ => runs.push(Run {
                    first: segment,
                    count: 1,
                }),
            }
        }
        runs
    }

    fn all_are(&self, wanted: Owner, session: SessionId, run: Run) -> Result<(), TakeBackError> {
        let segments = self.segments();
        if run.count == 0 || run.first >= segments || run.count > segments - run.first {
            return Err(TakeBackError::OutOfWindow { run, segments });
        }
        match (run.first..run.first + run.count).find(|&s| self.owners[s as usize] != wanted) {
            None => Ok(()),
            Some(segment) => {
                let owner = self.owners[segment as usize];
                Err(TakeBackError::NotOwned {
                    segment,
                    session,
                    owner,
                })
            }
        }
    }

    /// The entries of a run that lies in the window.
    fn entries(&mut self, run: Run) -> &mut [Owner] {
        &mut self.owners[run.first as usize..(run.first + run.count) as usize]
    }
}
