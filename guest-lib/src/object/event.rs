//! Events. Once an event has been queried or waited for, each later record writes a fence, so that the next query
//! needs no round trip. Other events cost the device nothing.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use wormhole_lock::Mutex;

use wormhole_api::constants::event_flags::BLOCKING_SYNC;
pub use wormhole_api::constants::event_use_flags::EXTERNAL;
use wormhole_api::handle::{Event as EventKind, Stream as StreamKind};
use wormhole_api::{
    EventCreate, EventDestroy, EventElapsed, EventQuery, EventRecord, EventSynchronize, Handle,
    Message, OpenEvent, ShareEvent, SharedEventCreate, StreamWaitEvent,
};

use crate::error::{CuError, Result};
use crate::handle::{self, Table};
use crate::memory::pool_reuse;
use crate::object::context::{self, Scope};
use crate::object::sharing::{self, Token};
use crate::object::stream::Target;
use crate::object::stream::release::RELEASES;
use crate::session::{FenceLine, Manner};
use crate::types::{CUevent, EVENT_DISABLE_TIMING, EVENT_INTERPROCESS};

/// Flags that `cuEventCreate` accepts.
const FLAGS: u32 = BLOCKING_SYNC | EVENT_DISABLE_TIMING | EVENT_INTERPROCESS;
/// Internal flag: another process created the event.
const OPENED: u32 = 1 << 31;
/// [`Event::state`] of an event that was never recorded, and of one recorded without a fence. Greater values are the
/// fence's value plus one.
const NEVER: u64 = 0;
const UNFENCED: u64 = 1;

/// Record of an event.
#[derive(Debug, Default)]
pub struct Event {
    flags: AtomicU32,
    /// Index of the context that owns the event, and its device's ordinal.
    context: AtomicU32,
    device: AtomicUsize,
    /// True once the event was queried or waited for.
    asked: AtomicBool,
    /// True if the last record was in a capture.
    captured: AtomicBool,
    state: AtomicU64,
    fence: Mutex<Option<EventFence>>,
}

#[derive(Clone, Copy, Debug)]
struct EventFence {
    line: FenceLine,
    /// Stream of the last record that wrote the fence.
    stream: Handle<StreamKind>,
}

static EVENTS: Table<EventKind, Event> = Table::new();

fn find(event: CUevent) -> Result<(Handle<EventKind>, &'static Event)> {
    let handle = handle::from_pointer(event).ok_or_else(|| handle::refusal(event))?;
    Ok((handle, EVENTS.get(handle).ok_or(CuError::INVALID_HANDLE)?))
}

/// Returns the calling thread's scope, or the scope of the event's context if the thread has no current context.
pub fn scope(event: CUevent) -> Result<Scope> {
    if event.is_null() {
        return Err(CuError::INVALID_HANDLE);
    }
    context::scope_or(|| Ok(find(event)?.1.context.load(Ordering::Relaxed)))
}

/// Looks up an event by its `CUevent`.
pub fn exists(event: CUevent) -> Result<Handle<EventKind>> {
    find(event).map(|(handle, _)| handle)
}

/// Notes that a launch of a graph records the event.
pub fn recorded_by_graph(event: Handle<EventKind>) {
    if let Some(facts) = EVENTS.get(event) {
        facts.state.store(UNFENCED, Ordering::Release);
    }
}

/// Looks up an event that launches may record: without timing and not interprocess (CUDA driver API,
/// `CUlaunchAttributeID`).
pub fn of_launches(event: CUevent) -> Result<Handle<EventKind>> {
    let (handle, facts) = find(event)?;
    let flags = facts.flags.load(Ordering::Relaxed);
    if flags & (EVENT_DISABLE_TIMING | EVENT_INTERPROCESS) != EVENT_DISABLE_TIMING {
        return Err(CuError::NOT_SUPPORTED);
    }
    Ok(handle)
}

/// Returns whether the event exists and belongs to the device.
pub fn is_on(event: Handle<EventKind>, device: usize) -> bool {
    let facts = EVENTS.get(event);
    facts.is_some_and(|facts| facts.device.load(Ordering::Relaxed) == device)
}

/// Returns whether several processes share the event.
pub fn is_shared(event: Handle<EventKind>) -> bool {
    EVENTS.get(event).is_some_and(Event::is_shared)
}

/// Notes that a launch records the event. The event may be complete before the launch is, so it has no fence.
pub fn recorded_by_launch(event: Handle<EventKind>) {
    if let Some(facts) = EVENTS.get(event) {
        facts.captured.store(false, Ordering::Release);
        facts.state.store(UNFENCED, Ordering::Release);
    }
}

/// Notes that the event was recorded in a capture.
pub fn recorded_in_capture(event: Handle<EventKind>) {
    if let Some(facts) = EVENTS.get(event) {
        facts.captured.store(true, Ordering::Release);
    }
}

pub fn create(scope: Scope, flags: u32) -> Result<CUevent> {
    if flags & !FLAGS != 0
        || flags & (EVENT_INTERPROCESS | EVENT_DISABLE_TIMING) == EVENT_INTERPROCESS
    {
        return Err(CuError::INVALID_VALUE);
    }
    make(scope, flags, |new| match flags & EVENT_INTERPROCESS {
        0 => scope.session.record(&EventCreate { new, flags }),
        _ => scope.session.request(&SharedEventCreate { new }, |()| ()),
    })
}

/// Mints an event and has the worker create it by `made`.
fn make(
    scope: Scope,
    flags: u32,
    made: impl FnOnce(Handle<EventKind>) -> Result,
) -> Result<CUevent> {
    let handle = EVENTS.mint(|event| {
        event.flags.store(flags, Ordering::Relaxed);
        event.context.store(scope.context, Ordering::Relaxed);
        event
            .device
            .store(scope.session.ordinal(), Ordering::Relaxed);
        event.asked.store(false, Ordering::Relaxed);
        event.captured.store(false, Ordering::Relaxed);
        event.state.store(NEVER, Ordering::Relaxed);
    })?;
    if let Err(error) = made(handle) {
        EVENTS.forget(handle);
        return Err(error);
    }
    Ok(handle::to_pointer(handle))
}

/// Returns the token of an interprocess event (`cuIpcGetEventHandle`).
pub fn share(scope: Scope, event: CUevent) -> Result<Token> {
    let (handle, facts) = find(event)?;
    if !facts.is_shared() || facts.flags.load(Ordering::Relaxed) & OPENED != 0 {
        return Err(CuError::INVALID_HANDLE);
    }
    sharing::check_handles(scope.session)?;
    let message = ShareEvent { event: handle };
    scope.session.request(&message, |reply| reply.token)
}

/// Opens an event of another process (`cuIpcOpenEventHandle`).
pub fn open(scope: Scope, token: Token) -> Result<CUevent> {
    let flags = EVENT_INTERPROCESS | EVENT_DISABLE_TIMING | OPENED;
    make(scope, flags, |new| {
        let opened = scope.session.request(&OpenEvent { new, token }, |()| ());
        // The native driver returns this code for the handle of an event that does not exist.
        opened.map_err(|error| match error {
            CuError::INVALID_VALUE => CuError::MAP_FAILED,
            error => error,
        })
    })
}

pub fn destroy(scope: Scope, event: CUevent) -> Result {
    let (handle, _) = find(event)?;
    let facts = EVENTS.retire(handle).ok_or(CuError::INVALID_HANDLE)?;
    let sent = scope.session.record(&EventDestroy { event: handle });
    facts.give_fence_back(scope);
    EVENTS.recycle(handle);
    sent
}

/// Destroys the events of a context.
pub fn destroy_of(scope: Scope) {
    for (handle, event) in EVENTS.live() {
        if event.context.load(Ordering::Relaxed) == scope.context {
            // An error is ignored: the context is destroyed, and another thread may have destroyed the event first.
            let _ = destroy(scope, handle::to_pointer(handle));
        }
    }
}

/// Drops the records of all events, after the worker has destroyed the events.
pub fn forget_all(scope: Scope) {
    for (handle, _) in EVENTS.live() {
        if let Some(event) = EVENTS.retire(handle) {
            event.give_fence_back(scope);
            EVENTS.recycle(handle);
        }
    }
}

/// Event record (`cuEventRecordWithFlags`).
#[derive(Clone, Copy, Debug)]
pub struct Record {
    pub event: Handle<EventKind>,
    facts: &'static Event,
    pub external: bool,
}

impl Record {
    /// Checks an event record. Fails if the event belongs to another device than the stream.
    #[inline]
    pub fn new(scope: Scope, target: Target, event: CUevent, flags: u32) -> Result<Self> {
        let (event, facts) = find(event)?;
        if facts.device.load(Ordering::Relaxed) != target.device(scope) {
            return Err(CuError::INVALID_HANDLE);
        }
        let external = flags & EXTERNAL != 0;
        Ok(Self {
            event,
            facts,
            external,
        })
    }

    /// Records the event behind the work of a stream.
    pub fn send(self, scope: Scope, target: Target) -> Result {
        // The external flag is valid in captures only.
        if self.external {
            return Err(CuError::ILLEGAL_STATE);
        }
        self.facts.captured.store(false, Ordering::Release);
        let stream = target.handle;
        if self.facts.asked.load(Ordering::Relaxed) && !self.facts.is_shared() {
            let mut place = self.facts.fence.lock();
            let mut line = match *place {
                // The values of two streams may be written in either order, so a fence changes streams only after its
                // last value was written.
                Some(fence)
                    if fence.stream == stream
                        || scope
                            .session
                            .fence_passed(fence.line.fence, fence.line.issued) =>
                {
                    fence.line
                }
                Some(fence) => {
                    scope.session.return_fence(fence.line);
                    scope.session.take_fence()?
                }
                None => scope.session.take_fence()?,
            };
            line.issued += 1;
            let message = EventRecord {
                event: self.event,
                stream,
                flags: 0,
                fence: Some(line.fence),
                value: line.issued,
            };
            scope.session.record(&message)?;
            *place = Some(EventFence { line, stream });
            self.facts.state.store(line.issued + 1, Ordering::Release);
        } else {
            let message = EventRecord {
                event: self.event,
                stream,
                flags: 0,
                fence: None,
                value: 0,
            };
            self.facts.send(scope, &message)?;
            self.facts.state.store(UNFENCED, Ordering::Release);
        }
        target.worked(scope)
    }
}

/// Records an event in a stream that is not captured, such as an internal one.
pub fn record(scope: Scope, event: CUevent, target: Target) -> Result {
    Record::new(scope, target, event, 0)?.send(scope, target)
}

/// Returns error 600 while the event is not complete (`cuEventQuery`).
pub fn query(scope: Scope, event: CUevent) -> Result {
    let (handle, facts) = find(event)?;
    match facts.fence() {
        Recorded::Never => Ok(()),
        Recorded::Unfenced => scope
            .session
            .request(&EventQuery { event: handle }, |()| ()),
        Recorded::Fenced(line) => match scope.session.fence_reached(line.fence, line.issued)? {
            true => Ok(()),
            false => Err(CuError::NOT_READY),
        },
    }
}

impl Event {
    /// Returns how a thread waits for the event. A context that sleeps does so for streams only (CUDA driver API,
    /// `cuEventSynchronize`).
    fn manner(&self) -> Manner {
        if self.flags.load(Ordering::Relaxed) & BLOCKING_SYNC != 0 {
            return Manner::Block;
        }
        match context::manner() {
            Manner::Block => Manner::Auto,
            manner => manner,
        }
    }
}

/// Waits for an event (`cuEventSynchronize`).
pub fn synchronize(scope: Scope, event: CUevent) -> Result {
    let (handle, facts) = find(event)?;
    scope.session.publish_counts();
    match facts.fence() {
        Recorded::Never => Ok(()),
        Recorded::Fenced(line) if !RELEASES.is_set() => {
            scope
                .session
                .wait_fence(line.fence, line.issued, facts.manner())
        }
        Recorded::Unfenced | Recorded::Fenced(_) => {
            if RELEASES.is_set() {
                pool_reuse::free_in_order(scope, |_| false)?;
            }
            scope
                .session
                .request(&EventSynchronize { event: handle }, |()| ())
        }
    }
}

/// Returns whether an event was last recorded in a capture.
pub fn is_captured(event: Handle<EventKind>) -> bool {
    let facts = EVENTS.get(event);
    facts.is_some_and(|facts| facts.captured.load(Ordering::Acquire))
}

/// Fails for an event without timing and for one that was never recorded.
pub fn check_timed(event: Handle<EventKind>) -> Result {
    let facts = EVENTS.get(event).ok_or(CuError::INVALID_HANDLE)?;
    let untimed = facts.flags.load(Ordering::Relaxed) & EVENT_DISABLE_TIMING != 0;
    if untimed || facts.state.load(Ordering::Acquire) == NEVER {
        return Err(CuError::INVALID_HANDLE);
    }
    Ok(())
}

/// Returns the milliseconds between two events.
pub fn elapsed(scope: Scope, start: Handle<EventKind>, end: Handle<EventKind>) -> Result<f32> {
    scope
        .session
        .request(&EventElapsed { start, end }, |reply| reply.milliseconds)
}

/// Stream wait (`cuStreamWaitEvent`).
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    pub event: Handle<EventKind>,
    facts: &'static Event,
    pub external: bool,
}

impl Wait {
    pub fn new(event: CUevent, flags: u32) -> Result<Self> {
        let (event, facts) = find(event)?;
        let external = flags & EXTERNAL != 0;
        Ok(Self {
            event,
            facts,
            external,
        })
    }

    /// Returns whether the event was last recorded in a capture.
    #[inline]
    pub fn is_of_capture(&self) -> bool {
        self.facts.captured.load(Ordering::Acquire)
    }

    /// Returns whether there can be work to wait for.
    pub fn is_recorded(&self) -> bool {
        self.facts.state.load(Ordering::Acquire) != NEVER || self.facts.is_shared()
    }

    /// Makes a stream wait for the event.
    pub fn send(self, scope: Scope, target: Target) -> Result {
        // The capture that recorded the event has ended.
        if self.is_of_capture() {
            return Err(CuError::INVALID_VALUE);
        }
        if self.external {
            return Err(CuError::ILLEGAL_STATE);
        }
        if !self.is_recorded() {
            return scope.session.alive();
        }
        let message = StreamWaitEvent {
            stream: target.handle,
            event: self.event,
            flags: 0,
        };
        self.facts.send(scope, &message)?;
        target.worked(scope)
    }
}

/// Makes a stream that is not captured wait for an event.
pub fn wait(scope: Scope, target: Target, event: CUevent) -> Result {
    Wait::new(event, 0)?.send(scope, target)
}

/// State of an event's last record.
enum Recorded {
    Never,
    Unfenced,
    Fenced(FenceLine),
}

impl Event {
    /// Returns whether other processes may record the event, so that only the worker knows its state.
    fn is_shared(&self) -> bool {
        self.flags.load(Ordering::Relaxed) & EVENT_INTERPROCESS != 0
    }

    /// Sends a message about the event. For an interprocess event the call waits for the answer, because the effect
    /// must be visible to other processes when the call returns.
    fn send<M>(&self, scope: Scope, message: &M) -> Result
    where
        M: for<'a> Message<Reply<'a> = ()>,
    {
        if self.is_shared() {
            scope.session.request(message, |()| ())
        } else {
            scope.session.record(message)
        }
    }

    /// Returns the state of the last record. Makes later records write a fence.
    fn fence(&self) -> Recorded {
        if self.is_shared() {
            return Recorded::Unfenced;
        }
        self.asked.store(true, Ordering::Relaxed);
        match self.state.load(Ordering::Acquire) {
            NEVER => Recorded::Never,
            UNFENCED => Recorded::Unfenced,
            _ => match *self.fence.lock() {
                Some(fence) => Recorded::Fenced(fence.line),
                None => Recorded::Unfenced,
            },
        }
    }

    fn give_fence_back(&self, scope: Scope) {
        let fence = self.fence.lock().take();
        if let Some(fence) = fence {
            scope.session.return_fence(fence.line);
        }
    }
}
