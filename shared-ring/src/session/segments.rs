use alloc::{collections::BTreeMap, vec::Vec};

use super::SessionId;
use super::runs::Runs;

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
    /// No contiguous run is long enough in the part of the window that was asked for.
    #[error(
        "{session} asked for {count} contiguous segments between {first} and {end}, where no free run has as many"
    )]
    NoRunWithin {
        /// The requesting session.
        session: SessionId,
        /// Segments requested.
        count: u32,
        /// First segment of the part.
        first: u32,
        /// Segment behind the part.
        end: u32,
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
    /// Segments of the window. Segment 0 is [`Owner::Reserved`].
    segments: u32,
    free: Runs,
    sessions: BTreeMap<SessionId, Held>,
    /// Most segments granted or quarantined at the same time.
    limit: u32,
    /// Segments granted or quarantined; at most `limit`.
    held: u32,
}

/// Segments of a session. A session without any has no entry in the table.
#[derive(Clone, Debug, Default)]
struct Held {
    granted: Runs,
    quarantined: Runs,
}

impl SegmentTable {
    /// Creates the table of a window of `segments` segments. At most `limit` of them are in use at a time.
    #[must_use]
    pub fn new(segments: u32, limit: u32) -> Self {
        let mut free = Runs::default();
        if segments > 1 {
            free.insert(Run {
                first: 1,
                count: segments - 1,
            });
        }
        Self {
            segments,
            free,
            sessions: BTreeMap::new(),
            limit,
            held: 0,
        }
    }

    /// Returns the number of segments of the window.
    #[must_use]
    pub fn segments(&self) -> u32 {
        self.segments
    }

    /// Returns the number of segments that are granted or quarantined.
    #[must_use]
    pub fn held(&self) -> u32 {
        self.held
    }

    /// Returns the number of segments that can still be granted: free ones, contiguous or not, within the quota.
    #[must_use]
    pub fn room(&self) -> u32 {
        let most = self.limit.min(self.segments.saturating_sub(1));
        most.saturating_sub(self.held)
    }

    /// Returns the owner of `segment`, or `None` if the window has no such segment. Searches all sessions.
    #[must_use]
    pub fn owner(&self, segment: u32) -> Option<Owner> {
        if segment >= self.segments {
            return None;
        }
        if segment == 0 {
            return Some(Owner::Reserved);
        }
        let mut owners = self.sessions.iter().filter_map(|(session, held)| {
            if held.granted.at(segment).is_some() {
                Some(Owner::Granted(*session))
            } else if held.quarantined.at(segment).is_some() {
                Some(Owner::Quarantined(*session))
            } else {
                None
            }
        });
        Some(owners.next().unwrap_or(Owner::Free))
    }

    /// Returns true if every segment of the run is granted to `session`.
    #[must_use]
    pub fn owns(&self, session: SessionId, run: Run) -> bool {
        let held = self.sessions.get(&session);
        held.is_some_and(|held| held.granted.missing(run).is_none())
    }

    /// Grants `session` the start of the shortest free run with `count` segments, of several the first. The time
    /// depends on the number of free runs by its logarithm.
    ///
    /// # Errors
    /// See [`GrantError`].
    pub fn grant(&mut self, session: SessionId, count: u32) -> Result<Run, GrantError> {
        self.grant_found(session, count, |free| {
            free.shortest(count).ok_or(GrantError::NoRun {
                session,
                count,
                longest: free.longest(),
            })
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
        self.check_kept(session, count, kept)?;
        self.grant(session, count)
    }

    /// Grants like [`SegmentTable::grant_leaving`], but the first run between two segments, the second one excluded.
    /// The time grows with the number of free runs between them.
    ///
    /// # Errors
    /// See [`GrantError`].
    pub fn grant_within(
        &mut self,
        session: SessionId,
        count: u32,
        (first, end): (u32, u32),
        kept: u32,
    ) -> Result<Run, GrantError> {
        self.check_kept(session, count, kept)?;
        self.grant_found(session, count, |free| {
            let found = free.within(count, first, end);
            found.ok_or(GrantError::NoRunWithin {
                session,
                count,
                first,
                end,
            })
        })
    }

    fn check_kept(&self, session: SessionId, count: u32, kept: u32) -> Result<(), GrantError> {
        let room = self.room().saturating_sub(kept);
        if count > room && count <= self.room() {
            return Err(GrantError::Kept {
                session,
                count,
                room,
                kept,
            });
        }
        Ok(())
    }

    /// Grants the first `count` segments of the free run that `find` returns.
    fn grant_found(
        &mut self,
        session: SessionId,
        count: u32,
        find: impl FnOnce(&Runs) -> Result<Run, GrantError>,
    ) -> Result<Run, GrantError> {
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
        let run = Run {
            count,
            ..find(&self.free)?
        };
        self.free.remove(run);
        self.sessions
            .entry(session)
            .or_default()
            .granted
            .insert(run);
        self.held += count;
        Ok(run)
    }

    /// Quarantines a run that its session returned, until [`SegmentTable::scrubbed`]. The run may be a part of a
    /// granted one.
    ///
    /// # Errors
    /// See [`TakeBackError`]. Nothing changes if it fails.
    pub fn take_back(&mut self, session: SessionId, run: Run) -> Result<(), TakeBackError> {
        let held = self.held_run(session, run, |held| &held.granted)?;
        held.granted.remove(run);
        held.quarantined.insert(run);
        Ok(())
    }

    /// Quarantines all segments granted to `session` and returns all its quarantined runs, in order and none beside
    /// another.
    pub fn take_back_all(&mut self, session: SessionId) -> Vec<Run> {
        let Some(held) = self.sessions.get_mut(&session) else {
            return Vec::new();
        };
        for run in core::mem::take(&mut held.granted).iter() {
            held.quarantined.insert(run);
        }
        held.quarantined.iter().collect()
    }

    /// Frees a quarantined run that is zeroed again and that no process maps.
    ///
    /// # Errors
    /// See [`TakeBackError`]. Nothing changes if it fails.
    pub fn scrubbed(&mut self, session: SessionId, run: Run) -> Result<(), TakeBackError> {
        let held = self.held_run(session, run, |held| &held.quarantined)?;
        held.quarantined.remove(run);
        if held.granted.is_empty() && held.quarantined.is_empty() {
            self.sessions.remove(&session);
        }
        self.free.insert(run);
        self.held -= run.count;
        Ok(())
    }

    /// Returns the session's segments, if these of its runs contain the whole `run`.
    fn held_run(
        &mut self,
        session: SessionId,
        run: Run,
        runs: impl Fn(&Held) -> &Runs,
    ) -> Result<&mut Held, TakeBackError> {
        let segments = self.segments;
        if run.count == 0 || run.first >= segments || run.count > segments - run.first {
            return Err(TakeBackError::OutOfWindow { run, segments });
        }
        let held = self.sessions.get(&session);
        if let Some(segment) = held.map_or(Some(run.first), |held| runs(held).missing(run)) {
            return Err(TakeBackError::NotOwned {
                segment,
                session,
                owner: self.owner(segment).unwrap_or(Owner::Free),
            });
        }
        Ok(self.sessions.entry(session).or_default())
    }
}
