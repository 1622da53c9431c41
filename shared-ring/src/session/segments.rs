use alloc::{vec, vec::Vec};

use super::SessionId;

/// Contiguous segments of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// First segment of the run.
    pub first: u32,
    /// Number of segments, at least 1 in every run that the table returns.
    pub count: u32,
}

impl core::fmt::Display for Run {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} segments from {}", self.count, self.first)
    }
}

/// Owner of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// Owned by the supervisor: the segment of the bootstrap.
    Reserved,
    /// Not owned; the segment holds zeroes.
    Free,
    /// Owned by a session.
    Granted(SessionId),
    /// Not owned any more, but possibly still mapped by the session, and not zeroed yet.
    Quarantined(SessionId),
}

/// Errors of granting segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    /// The request was for 0 segments.
    #[error("{session} asked for no segments")]
    Empty {
        /// The requesting session.
        session: SessionId,
    },
    /// The grant would exceed the tenant's quota. Quarantined segments count, because they hold memory.
    #[error("{session} asked for {count} segments; {held} of the tenant's {limit} are in use")]
    Quota {
        /// The requesting session.
        session: SessionId,
        /// Segments requested.
        count: u32,
        /// Segments granted or quarantined.
        held: u32,
        /// The quota.
        limit: u32,
    },
    /// The free segments are reserved for sessions that have none yet.
    #[error(
        "{session} asked for {count} segments; {room} are free beside {kept} that are kept for other sessions"
    )]
    Kept {
        /// The requesting session.
        session: SessionId,
        /// Segments requested.
        count: u32,
        /// Segments that can be granted to the session.
        room: u32,
        /// Segments reserved for other sessions.
        kept: u32,
    },
    /// No contiguous run is long enough.
    #[error("{session} asked for {count} contiguous segments; the longest free run has {longest}")]
    NoRun {
        /// The requesting session.
        session: SessionId,
        /// Segments requested.
        count: u32,
        /// Segments of the longest free run.
        longest: u32,
    },
}

/// Errors of taking segments back and of freeing them.
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
    /// The session does not own a segment of the run.
    #[error("segment {segment} is not {session}'s: {owner:?}")]
    NotOwned {
        /// The first such segment.
        segment: u32,
        /// The session named in the call.
        session: SessionId,
        /// The segment's owner.
        owner: Owner,
    },
}

/// Owners of the segments of a tenant's window, in the supervisor's private memory.
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
    /// Most segments granted or quarantined at the same time.
    limit: u32,
    /// Segments granted or quarantined; at most `limit`.
    held: u32,
}

impl SegmentTable {
    /// Creates the table of a window of `segments` segments. At most `limit` of them are in use at a time.
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

    /// Returns the number of segments of the window.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "made from a u32")]
    pub fn segments(&self) -> u32 {
        self.owners.len() as u32
    }

    /// Returns the number of segments that are granted or quarantined.
    #[must_use]
    pub fn held(&self) -> u32 {
        self.held
    }

    /// Returns the number of segments that can still be granted: free ones, contiguous or not, within the quota.
    #[must_use]
    pub fn room(&self) -> u32 {
        let most = self.limit.min(self.segments().saturating_sub(1));
        most.saturating_sub(self.held)
    }

    /// Returns the owner of `segment`, or `None` if the window has no such segment.
    #[must_use]
    pub fn owner(&self, segment: u32) -> Option<Owner> {
        self.owners.get(segment as usize).copied()
    }

    /// Returns true if every segment of the run is granted to `session`.
    #[must_use]
    pub fn owns(&self, session: SessionId, run: Run) -> bool {
        self.all_are(Owner::Granted(session), session, run).is_ok()
    }

    /// Grants `session` the first free run of `count` segments.
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

    /// Grants like [`SegmentTable::grant`], but only if at least `kept` segments remain afterwards.
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

    /// Quarantines a run that its session returned, until [`SegmentTable::scrubbed`]. The run may be a part of a
    /// granted one.
    ///
    /// # Errors
    /// See [`TakeBackError`]. Nothing changes if it fails.
    pub fn take_back(&mut self, session: SessionId, run: Run) -> Result<(), TakeBackError> {
        self.all_are(Owner::Granted(session), session, run)?;
        self.entries(run).fill(Owner::Quarantined(session));
        Ok(())
    }

    /// Quarantines all segments granted to `session` and returns all its quarantined runs.
    pub fn take_back_all(&mut self, session: SessionId) -> Vec<Run> {
        for owner in &mut self.owners {
            if *owner == Owner::Granted(session) {
                *owner = Owner::Quarantined(session);
            }
        }
        self.runs(Owner::Quarantined(session))
    }

    /// Frees a quarantined run that is zeroed again and that no process maps.
    ///
    /// # Errors
    /// See [`TakeBackError`]. Nothing changes if it fails.
    pub fn scrubbed(&mut self, session: SessionId, run: Run) -> Result<(), TakeBackError> {
        self.all_are(Owner::Quarantined(session), session, run)?;
        self.entries(run).fill(Owner::Free);
        self.held -= run.count;
        Ok(())
    }

    /// Returns the runs of segments with this owner, in order.
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

    /// Returns the entries of a run that lies in the window.
    fn entries(&mut self, run: Run) -> &mut [Owner] {
        &mut self.owners[run.first as usize..(run.first + run.count) as usize]
    }
}
