//! Arena: runs of segments that a session is granted and returns during its life.
//!
//! A run is granted to the guest once its worker has mapped it. A returned run is free again once
//! the worker has unmapped it and it is scrubbed.

use std::io;

use event_manager::EventOps;
use wormhole_link::channel::ChannelError;
use wormhole_ring::control::{ArenaDenied, ArenaRequest, ArenaRun, ArenaWithin, Message, Refusal};
use wormhole_ring::session::{GrantError, Run};

use super::Id;
use super::guests::GuestError;
use super::sessions::{Session, refusal_of};
use super::static_window::View;
use super::tenant_loop::TenantLoop;
use super::tenants::window_of;

/// Largest number of unfinished requests and returns of arena in a session.
const MAX_PENDING_ARENA: usize = 16;
/// Largest number of a session's runs of arena. It bounds the work of a request and of the
/// session's end in a window of any size.
const MAX_EXTENTS: usize = 4096;
/// Part of a window in a request that names none: first segment, and the one behind the last.
const ANYWHERE: (u32, u32) = (0, u32::MAX);

/// Returns the request for a part of the window that one for any part is.
pub(super) fn anywhere(request: ArenaRequest) -> ArenaWithin {
    let (first, end) = ANYWHERE;
    ArenaWithin {
        id: request.id,
        segments: request.segments,
        first,
        end,
    }
}

/// A run of arena.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub count: u32,
    pub state: ExtentState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExtentState {
    /// The worker is mapping it. Contains the number of the guest's request.
    Adding(u32),
    /// The launcher is mapping it for the guest. Contains the number of the guest's request.
    Showing(u32),
    Granted,
    /// The worker is unmapping it.
    Removing,
    /// A scrubber is freeing its memory.
    Scrubbing,
}

impl Session {
    /// Returns the extent of a run, if it has this size and state.
    fn extent(&mut self, run: Run, state: ExtentState) -> Option<&mut Extent> {
        self.extents
            .get_mut(&run.first)
            .filter(|extent| extent.count == run.count && extent.state == state)
    }
}

impl TenantLoop {
    /// Handles a request for arena. A part of the window that the guest asks for places the run, and
    /// decides nothing else.
    pub(super) fn request_arena(
        &mut self,
        ops: &mut EventOps<'_>,
        guest: Id,
        key: Id,
        request: &ArenaWithin,
    ) -> Result<(), GuestError> {
        let kept = self.kept_for_others(key);
        let Some(session) = self.sessions.get_mut(&key) else {
            return Ok(());
        };
        let Some(window) = window_of(&mut self.tenants, session.tenant) else {
            return Ok(());
        };
        let pending = session
            .extents
            .values()
            .filter(|extent| extent.state != ExtentState::Granted)
            .count();
        let mut is_place = false;
        let granted = if pending >= MAX_PENDING_ARENA {
            Err((Refusal::Quota, format!("{pending} runs are on their way")))
        } else if session.extents.len() >= MAX_EXTENTS {
            let reason = format!("a session has at most {MAX_EXTENTS} runs of arena");
            Err((Refusal::Quota, reason))
        } else {
            let (segments, part) = (request.segments, (request.first, request.end));
            let table = &mut window.segments;
            let granted = if part == ANYWHERE {
                table.grant_leaving(session.id, segments, kept)
            } else {
                table.grant_within(session.id, segments, part, kept)
            };
            granted.map_err(|error| {
                // A guest tries other places or a smaller run, or goes on without.
                is_place = matches!(error, GrantError::NoRunWithin { .. });
                (refusal_of(&error), window.explain(&error))
            })
        };
        match granted {
            Ok(run) => {
                session.extents.insert(
                    run.first,
                    Extent {
                        count: run.count,
                        state: ExtentState::Adding(request.id),
                    },
                );
                let run = ArenaRun {
                    id: request.id,
                    first: run.first,
                    count: run.count,
                };
                self.tell_worker(ops, key, &Message::ArenaAdd(run))
            }
            Err((refusal, reason)) => {
                let (tenant, id) = (session.tenant, session.id);
                if is_place {
                    tracing::debug!("tenant {tenant} {id}: {reason}");
                } else if self.may_log(tenant) {
                    tracing::info!("tenant {tenant} {id}: {reason}");
                }
                Ok(self.deny_arena(ops, guest, request.id, refusal)?)
            }
        }
    }

    /// Returns the number of segments that a session may not use: one for each other session of its
    /// tenant without arena. A session without arena may use the last segment.
    fn kept_for_others(&self, key: Id) -> u32 {
        let Some(asking) = self.sessions.get(&key) else {
            return 0;
        };
        if asking.extents.is_empty() {
            return 0;
        }
        let others = self.sessions.values().filter(|other| {
            other.tenant == asking.tenant && other.guest.is_some() && other.extents.is_empty()
        });
        u32::try_from(others.count()).unwrap_or(u32::MAX)
    }

    /// Denies a request for arena.
    pub(super) fn deny_arena(
        &mut self,
        ops: &mut EventOps<'_>,
        guest: Id,
        request: u32,
        refusal: Refusal,
    ) -> Result<(), ChannelError> {
        let Some(guest) = self.guests.get_mut(&guest) else {
            return Ok(());
        };
        let window = window_of(&mut self.tenants, guest.tenant);
        let denied = ArenaDenied {
            id: request,
            code: refusal as u32,
            limit: window.map_or(0, |window| window.usable()),
        };
        guest
            .peer
            .send(ops, &Message::ArenaDenied(denied), Vec::new())
    }

    /// Denies the pending requests of a session that ends, and those in `further`.
    pub(super) fn deny_pending_arena(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        further: Vec<u32>,
    ) {
        let Some((session, guest)) = self
            .sessions
            .get(&key)
            .and_then(|session| Some((session, session.guest?)))
        else {
            return;
        };
        let pending = session
            .extents
            .values()
            .filter_map(|extent| match extent.state {
                ExtentState::Adding(request) | ExtentState::Showing(request) => Some(request),
                _ => None,
            });
        let pending: Vec<u32> = pending.chain(further).collect();
        for request in pending {
            if let Err(error) = self.deny_arena(ops, guest, request, Refusal::NoDevice) {
                tracing::debug!(
                    "the message that a session is over does not reach its guest: {error}"
                );
            }
        }
    }

    /// Denies a request as [`deny_arena`](Self::deny_arena) does, once the guest can read why its
    /// session has ended.
    pub(super) fn deny_dying(
        &mut self,
        ops: &mut EventOps<'_>,
        guest: Id,
        session: Id,
        request: u32,
    ) -> Result<(), ChannelError> {
        match self.ending(session) {
            Some(ending) if ending.requests.len() < MAX_PENDING_ARENA => {
                ending.requests.push(request);
                Ok(())
            }
            _ => self.deny_arena(ops, guest, request, Refusal::NoDevice),
        }
    }

    pub(super) fn return_arena(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        run: &ArenaRun,
    ) -> Result<(), GuestError> {
        let Some(session) = self.sessions.get_mut(&key) else {
            return Ok(());
        };
        let Some(extent) = session.extent(run.segments(), ExtentState::Granted) else {
            return Err(GuestError::Return {
                first: run.first,
                count: run.count,
            });
        };
        extent.state = ExtentState::Removing;
        self.tell_worker(ops, key, &Message::ArenaRemove(*run))
    }

    /// Handles a worker's answer about a run, and sets the extent's state to `state`. Returns no
    /// session if the run's request was denied already.
    fn answered(
        &mut self,
        key: Id,
        run: &ArenaRun,
        state: ExtentState,
    ) -> Result<Option<&Session>, String> {
        if self.is_dying(key) {
            return Ok(None);
        }
        let Some(session) = self.sessions.get_mut(&key) else {
            return Ok(None);
        };
        let Some(extent) = session.extent(run.segments(), ExtentState::Adding(run.id)) else {
            return Err("it answers for arena that it was not given".to_owned());
        };
        extent.state = state;
        Ok(Some(session))
    }

    /// Handles the worker's message that it has mapped a run: grants it, or has the launcher map
    /// it.
    pub(super) fn arena_added(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        run: &ArenaRun,
    ) -> Result<(), String> {
        let Some(session) = self.answered(key, run, ExtentState::Showing(run.id))? else {
            return Ok(());
        };
        if session.view == View::Launcher {
            self.show_run(ops, key, run.segments());
            Ok(())
        } else {
            self.arena_shown(ops, key, run.segments())
                .map_err(str::to_owned)
        }
    }

    /// Handles the worker's refusal to register a run: denies the request and scrubs the run.
    pub(super) fn arena_refused(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        run: &ArenaRun,
    ) -> Result<(), String> {
        let Some(session) = self.answered(key, run, ExtentState::Scrubbing)? else {
            return Ok(());
        };
        let guest = session.guest;
        self.scrub_run(key, run.segments());
        let Some(guest) = guest else {
            return Ok(());
        };
        if let Err(error) = self.deny_arena(ops, guest, run.id, Refusal::NoDevice) {
            let why = format!("the guest does not take an answer: {error}");
            self.end_guest(ops, guest, &why, None);
        }
        Ok(())
    }

    /// Orders a scrubber to free the memory of a run that is not in use any more.
    fn scrub_run(&mut self, key: Id, run: Run) {
        let Some(session) = self.sessions.get(&key) else {
            return;
        };
        match session.file.descriptor() {
            Ok(file) => self.scrubber.scrub(session.tenant, key, file, run),
            // The run stays taken until the session ends.
            Err(error) => tracing::error!("{run} cannot be scrubbed: {error}"),
        }
    }

    /// Grants a run that the launcher has mapped for the guest.
    pub(super) fn arena_shown(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        run: Run,
    ) -> Result<(), &'static str> {
        let Some(session) = self.sessions.get_mut(&key) else {
            return Ok(());
        };
        let extent = session.extents.get_mut(&run.first);
        let Some((extent, request)) = extent.and_then(|extent| match extent.state {
            ExtentState::Showing(request) if extent.count == run.count => Some((extent, request)),
            _ => None,
        }) else {
            return Err("it shows arena that it was not asked to");
        };
        extent.state = ExtentState::Granted;
        let Some(id) = session.guest else {
            return Ok(());
        };
        let granted = Message::ArenaGrant(ArenaRun {
            id: request,
            first: run.first,
            count: run.count,
        });
        let sent = match self.guests.get_mut(&id) {
            Some(guest) => guest.peer.send(ops, &granted, Vec::new()),
            None => Ok(()),
        };
        if let Err(error) = sent {
            let why = format!("the guest does not take its arena: {error}");
            self.end_guest(ops, id, &why, None);
        }
        Ok(())
    }

    /// Handles the worker's message that it has unmapped a run: scrubs it.
    pub(super) fn arena_removed(
        &mut self,
        ops: &mut EventOps<'_>,
        key: Id,
        run: &ArenaRun,
    ) -> Result<(), String> {
        let Some(session) = self.sessions.get_mut(&key) else {
            return Ok(());
        };
        let run = run.segments();
        let Some(extent) = session.extent(run, ExtentState::Removing) else {
            return Err("it gave back arena that was not asked back".to_owned());
        };
        extent.state = ExtentState::Scrubbing;
        let (tenant, view) = (session.tenant, session.view);
        if view == View::Launcher {
            self.hide_run(ops, tenant, key, run);
        }
        self.scrub_run(key, run);
        Ok(())
    }

    /// Frees a run that was scrubbed.
    pub(super) fn run_scrubbed(&mut self, key: Id, run: Run, result: io::Result<()>) {
        // A session that has ended meanwhile has released its runs.
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        if let Err(error) = result {
            // A run that still contains data is not granted again.
            tracing::error!("{run} of {} cannot be scrubbed: {error}", session.id);
            return;
        }
        session.extents.remove(&run.first);
        let freed = window_of(&mut self.tenants, session.tenant).map(|window| {
            window.segments.take_back(session.id, run)?;
            window.segments.scrubbed(session.id, run)
        });
        if let Some(Err(error)) = freed {
            tracing::error!("{error}");
        }
    }
}
