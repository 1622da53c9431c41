//! Streams: what the guest knows of each, and waiting for their work.
//!
//! One fence per stream covers its work so far: a synchronize or a first query asks the device to write
//! the next number when everything before is complete. Streams without new work are not asked again.

pub mod attributes;
mod hold_back;
mod output;
pub mod release;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use wormhole_api::handle::Stream as StreamKind;
use wormhole_api::{
    Fence, FenceWrite, GreenStream, Handle, StreamCreate, StreamDestroy, StreamQuery,
};

use self::attributes::{PRIORITY, StreamAttributes};
use self::hold_back::BATCHES;
use crate::device::MOST;
use crate::error::{CuError, Result};
use crate::handle::{self, Table};
use crate::object::context::{self, Scope};
use crate::object::{context_events, green_context};
use crate::session::FenceLine;
use crate::types::{
    CUstream, CUstreamAttrValue, DefaultStream, STREAM_LEGACY, STREAM_NON_BLOCKING,
    STREAM_PER_THREAD,
};

/// What is known of a stream.
#[derive(Debug, Default)]
pub struct Stream {
    pub flags: AtomicU32,
    pub priority: AtomicI32,
    /// `cuStreamGetId`.
    pub id: AtomicU64,
    /// The context it belongs to, and its device's number for the program.
    pub context: AtomicU32,
    device: AtomicUsize,
    /// Pieces of work handed over so far. Counted after each was written to the ring.
    work: AtomicU64,
    /// Kernels among them: work that can fault.
    launches: AtomicU64,
    /// How many of the pieces are known to be complete.
    complete: AtomicU64,
    /// How many of the kernels are known to be complete.
    launches_complete: AtomicU64,
    /// It is being captured; of the legacy stream, how many blocking streams are.
    captured: AtomicU32,
    timeline: Mutex<Timeline>,
    attributes: Mutex<StreamAttributes>,
}

/// The fence of a stream.
#[derive(Debug, Default)]
struct Timeline {
    line: Option<FenceLine>,
    /// How many pieces of work the last issued value covers, and how many kernels.
    covered: u64,
    launches_covered: u64,
    /// The fences at the ends of the last batches, oldest first.
    batches: [Option<Cover>; BATCHES],
}

/// A stream as a call names it.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub handle: Handle<StreamKind>,
    pub stream: &'static Stream,
}

/// A fence value that says when the work counted so far is complete.
#[derive(Clone, Copy, Debug)]
pub struct Cover {
    pub fence: Fence,
    pub value: u64,
    work: u64,
    launches: u64,
}

/// Work of a stream that another stream's fence covers too.
struct Covered {
    handle: Handle<StreamKind>,
    work: u64,
    launches: u64,
}

static STREAMS: Table<StreamKind, Stream> = Table::new();
/// The legacy streams, by device.
static LEGACY: [Stream; MOST] = [const { Stream::legacy() }; MOST];

impl Stream {
    const fn legacy() -> Self {
        Self {
            flags: AtomicU32::new(0),
            priority: AtomicI32::new(0),
            id: AtomicU64::new(STREAM_LEGACY),
            context: AtomicU32::new(0),
            device: AtomicUsize::new(0),
            work: AtomicU64::new(0),
            launches: AtomicU64::new(0),
            complete: AtomicU64::new(0),
            launches_complete: AtomicU64::new(0),
            captured: AtomicU32::new(0),
            timeline: Mutex::new(Timeline {
                line: None,
                covered: 0,
                launches_covered: 0,
                batches: [None; BATCHES],
            }),
            attributes: Mutex::new(StreamAttributes::NEW),
        }
    }
}
/// Takes a stream that goes out of its capture: a function of the graph layer, which is there once a stream was
/// captured.
static LEAVE: OnceLock<fn(Handle<StreamKind>)> = OnceLock::new();
/// Identities of streams; 1 is the legacy one's.
static NEXT_ID: AtomicU64 = AtomicU64::new(STREAM_PER_THREAD + 1);

/// The streams behind handle 2 in one thread, one for each context, destroyed with it.
struct PerThread {
    /// The one that was used last, and its context.
    last: Cell<Option<(u32, Handle<StreamKind>)>>,
    all: RefCell<Vec<(u32, Handle<StreamKind>)>>,
}

impl Drop for PerThread {
    fn drop(&mut self) {
        let Ok(session) = crate::session::session() else {
            return;
        };
        for (context, handle) in self.all.take() {
            // The thread ends: there is nobody left to tell of a failure.
            let _ = destroy(context::scope_numbered(session, context), handle);
        }
    }
}

thread_local! {
    static PER_THREAD: PerThread = const {
        PerThread {
            last: Cell::new(None),
            all: RefCell::new(Vec::new()),
        }
    };
}

/// Makes a stream.
pub fn create(scope: Scope, flags: u32, priority: i32) -> Result<Handle<StreamKind>> {
    if flags & !STREAM_NON_BLOCKING != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let (least, greatest) = scope.session.device().priorities;
    let priority = priority.clamp(greatest.min(least), least.max(greatest));
    let handle = STREAMS.mint(|stream| {
        stream.flags.store(flags, Ordering::Relaxed);
        stream.priority.store(priority, Ordering::Relaxed);
        stream
            .id
            .store(NEXT_ID.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        stream.context.store(scope.context, Ordering::Relaxed);
        stream
            .device
            .store(scope.session.ordinal(), Ordering::Relaxed);
        stream.captured.store(0, Ordering::Relaxed);
        // Held until all is forgotten: see `Covered::complete`.
        let mut timeline = stream.timeline();
        for count in [
            &stream.work,
            &stream.launches,
            &stream.complete,
            &stream.launches_complete,
        ] {
            count.store(0, Ordering::Relaxed);
        }
        *timeline = Timeline::default();
        drop(timeline);
        *stream.attributes() = StreamAttributes::NEW;
    })?;
    let made = match green_context::of(scope.context) {
        Some(green) => scope.session.request(
            &GreenStream {
                new: handle,
                green,
                flags,
                priority,
            },
            |()| (),
        ),
        None => scope.session.record(&StreamCreate {
            new: handle,
            flags,
            priority,
        }),
    };
    if let Err(error) = made {
        STREAMS.retire(handle);
        STREAMS.recycle(handle);
        return Err(error);
    }
    if let Some(stream) = STREAMS.get(handle) {
        context_events::hold(scope, Target { handle, stream })?;
    }
    Ok(handle)
}

/// A stream that exists.
pub fn existing(handle: Handle<StreamKind>) -> Result<Target> {
    let stream = STREAMS.get(handle).ok_or(CuError::INVALID_HANDLE)?;
    Ok(Target { handle, stream })
}

/// A stream is no longer captured.
pub fn release_captured(handle: Handle<StreamKind>) {
    if let Ok(target) = existing(handle) {
        target.set_captured(false);
    }
}

/// All streams of a context, and the legacy one.
pub fn all_of(scope: Scope) -> impl Iterator<Item = Target> {
    let minted = STREAMS
        .live()
        .filter(move |(_, stream)| stream.context.load(Ordering::Relaxed) == scope.context)
        .map(|(handle, stream)| Target { handle, stream });
    minted.chain([legacy(scope)])
}

/// The legacy stream of the scope's device.
#[inline]
pub fn legacy(scope: Scope) -> Target {
    Target {
        handle: Handle::LEGACY,
        stream: &LEGACY[scope.session.ordinal()],
    }
}

/// Those of them whose work is not known to be complete.
pub fn busy_of(scope: Scope) -> impl Iterator<Item = Target> {
    all_of(scope).filter(|target| target.stream.is_dirty())
}

/// Destroys a stream; its work goes on.
pub fn destroy(scope: Scope, handle: Handle<StreamKind>) -> Result {
    let stream = STREAMS.retire(handle).ok_or(CuError::INVALID_HANDLE)?;
    let target = Target { handle, stream };
    if target.is_captured() {
        target.set_captured(false);
        if let Some(leave) = LEAVE.get() {
            leave(handle);
        }
    }
    if stream.is_dirty() {
        // Release: who takes the mark finds the work in the ring before its request.
        let device = scope
            .session
            .session()
            .on(stream.device.load(Ordering::Relaxed))
            .device();
        device.has_orphaned_work.store(true, Ordering::Release);
    }
    let sent = scope.session.record(&StreamDestroy { stream: handle });
    if let Some(line) = stream.timeline().line.take() {
        scope.session.return_fence(line);
    }
    STREAMS.recycle(handle);
    sent
}

/// Destroys the streams of a context.
pub fn destroy_of(scope: Scope) {
    for (handle, stream) in STREAMS.live() {
        if stream.context.load(Ordering::Relaxed) == scope.context {
            // The context goes; a stream that somebody else destroys at the same time is gone too.
            let _ = destroy(scope, handle);
        }
    }
}

/// Forgets every stream, after the worker has destroyed them all.
pub fn forget_all(scope: Scope) {
    for (handle, _) in STREAMS.live() {
        if let Some(stream) = STREAMS.retire(handle) {
            if let Some(line) = stream.timeline().line.take() {
                scope.session.return_fence(line);
            }
            STREAMS.recycle(handle);
        }
    }
    for legacy in &LEGACY {
        *legacy.timeline() = Timeline::default();
        *legacy.attributes() = StreamAttributes::NEW;
        for count in [
            &legacy.work,
            &legacy.launches,
            &legacy.complete,
            &legacy.launches_complete,
        ] {
            count.store(0, Ordering::Relaxed);
        }
    }
}

/// The stream that a call names.
#[inline]
pub fn resolve(scope: Scope, default: DefaultStream, stream: CUstream) -> Result<Target> {
    match (stream.addr() as u64, default) {
        (0, DefaultStream::Legacy) | (STREAM_LEGACY, _) => Ok(legacy(scope)),
        (0, DefaultStream::PerThread) | (STREAM_PER_THREAD, _) => per_thread(scope),
        _ => {
            let handle = handle::from_pointer(stream).ok_or_else(|| handle::refusal(stream))?;
            let stream = STREAMS.get(handle).ok_or(CuError::INVALID_HANDLE)?;
            Ok(Target { handle, stream })
        }
    }
}

/// The handle of a stream that a program may destroy.
pub fn minted(stream: CUstream) -> Result<Handle<StreamKind>> {
    handle::from_pointer(stream).ok_or_else(|| handle::refusal(stream))
}

fn per_thread(scope: Scope) -> Result<Target> {
    PER_THREAD
        .try_with(|streams| {
            if let Some((context, handle)) = streams.last.get()
                && context == scope.context
                && let Some(stream) = STREAMS.get(handle)
            {
                return Ok(Target { handle, stream });
            }
            let mut all = streams.all.borrow_mut();
            // Those of contexts that are gone went with them.
            all.retain(|(_, handle)| STREAMS.get(*handle).is_some());
            let known = all.iter().find(|(context, _)| *context == scope.context);
            let found = match known {
                Some(found) => *found,
                None => {
                    let made = (scope.context, create(scope, 0, 0)?);
                    all.push(made);
                    made
                }
            };
            streams.last.set(Some(found));
            let (_, handle) = found;
            let stream = STREAMS.get(handle).ok_or(CuError::UNKNOWN)?;
            Ok(Target { handle, stream })
        })
        .unwrap_or(Err(CuError::DEINITIALIZED))
}

impl Stream {
    fn timeline(&self) -> std::sync::MutexGuard<'_, Timeline> {
        self.timeline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attributes(&self) -> std::sync::MutexGuard<'_, StreamAttributes> {
        self.attributes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// `cuStreamGetAttribute`.
    pub fn attribute(&self, id: u32) -> Result<CUstreamAttrValue> {
        if id == PRIORITY {
            let priority = self.priority.load(Ordering::Relaxed).cast_unsigned();
            return Ok([u64::from(priority), 0, 0, 0, 0, 0, 0, 0]);
        }
        self.attributes().place(id).copied()
    }

    /// Keeps what the stream was told.
    pub fn note_attribute(&self, id: u32, value: &CUstreamAttrValue) -> Result {
        if id == PRIORITY {
            let [a, b, c, d, ..] = value[0].to_le_bytes();
            let priority = i32::from_le_bytes([a, b, c, d]);
            self.priority.store(priority, Ordering::Relaxed);
            return Ok(());
        }
        *self.attributes().place(id)? = *value;
        Ok(())
    }

    fn is_on(&self, scope: Scope) -> bool {
        self.device.load(Ordering::Relaxed) == scope.session.ordinal()
    }

    fn is_blocking_on(&self, scope: Scope) -> bool {
        self.is_blocking() && self.is_on(scope)
    }

    pub fn is_blocking(&self) -> bool {
        self.flags.load(Ordering::Relaxed) & STREAM_NON_BLOCKING == 0
    }

    fn is_dirty(&self) -> bool {
        self.complete.load(Ordering::Acquire) < self.work.load(Ordering::Acquire)
    }

    fn may_fault(&self) -> bool {
        self.launches_complete.load(Ordering::Acquire) < self.launches.load(Ordering::Acquire)
    }

    fn completed(&self, work: u64, launches: u64) {
        self.complete.fetch_max(work, Ordering::AcqRel);
        self.launches_complete.fetch_max(launches, Ordering::AcqRel);
    }
}

impl Covered {
    /// Notes that the work is complete, unless the stream is gone. The lock is held so that the entry
    /// cannot become another stream's meanwhile, to which the counts would mean nothing.
    fn complete(&self) {
        if let Some(stream) = STREAMS.get(self.handle) {
            let _timeline = stream.timeline();
            if STREAMS.get(self.handle).is_some() {
                stream.completed(self.work, self.launches);
            }
        }
    }
}

impl Target {
    /// The number of its device for the program, for a call of this scope.
    #[inline]
    pub fn device(self, scope: Scope) -> usize {
        if self.handle.is_legacy() {
            scope.session.ordinal()
        } else {
            self.stream.device.load(Ordering::Relaxed)
        }
    }

    /// Whether its work becomes nodes of a graph. Of the legacy stream: whether using it would be a dependency
    /// on a stream of which that is so.
    #[inline]
    pub fn is_captured(self) -> bool {
        self.stream.captured.load(Ordering::Relaxed) != 0
    }

    /// Begins the stream's capture, which `leave` ends for the stream when it goes.
    pub fn begin_capture(self, leave: fn(Handle<StreamKind>)) {
        LEAVE.get_or_init(|| leave);
        self.set_captured(true);
    }

    /// Begins or ends the stream's capture. One thread at a time does, for all streams.
    fn set_captured(self, captured: bool) {
        let before = self
            .stream
            .captured
            .swap(captured.into(), Ordering::Release);
        if self.stream.is_blocking() && (before != 0) != captured {
            let legacy = &LEGACY[self.stream.device.load(Ordering::Relaxed)];
            match captured {
                true => legacy.captured.fetch_add(1, Ordering::Release),
                false => legacy.captured.fetch_sub(1, Ordering::Release),
            };
        }
    }

    /// Asks the device to write the stream's next fence value.
    fn issue(self, scope: Scope, timeline: &mut Timeline) -> Result<Cover> {
        // Counted after the work was written, so whatever is counted here lies before the fence.
        let work = self.stream.work.load(Ordering::Acquire);
        let launches = self.stream.launches.load(Ordering::Acquire);
        let mut line = match timeline.line {
            Some(line) => line,
            None => scope.session.take_fence()?,
        };
        line.issued += 1;
        let message = FenceWrite {
            stream: self.handle,
            fence: line.fence,
            value: line.issued,
        };
        scope.session.record(&message)?;
        timeline.line = Some(line);
        timeline.covered = work;
        timeline.launches_covered = launches;
        Ok(Cover {
            fence: line.fence,
            value: line.issued,
            work,
            launches,
        })
    }

    /// A fence value that covers the work so far, whether or not it is complete.
    pub fn fence_now(self, scope: Scope) -> Result<Cover> {
        let mut timeline = self.stream.timeline();
        self.issue(scope, &mut timeline)
    }

    /// A fence value that covers the work so far, or `None` if all of it is known to be complete.
    fn cover(self, scope: Scope) -> Result<Option<Cover>> {
        if !self.stream.is_dirty() {
            return Ok(None);
        }
        match self.covered() {
            Some(cover) => Ok(Some(cover)),
            None => self.fence_now(scope).map(Some),
        }
    }

    /// Waits until a fence value has been written, and remembers what that means.
    pub fn wait(self, scope: Scope, cover: Cover) -> Result {
        scope.session.wait_fence(cover.fence, cover.value)?;
        self.stream.completed(cover.work, cover.launches);
        Ok(())
    }

    /// `cuStreamSynchronize`.
    pub fn synchronize(self, scope: Scope) -> Result {
        scope.session.publish_counts();
        if scope.session.has_device_output() || release::take_due(Some(self.handle)) {
            return output::synchronize(scope, Some(self.handle));
        }
        scope.session.alive()?;
        if self.handle.is_legacy() {
            // A fence in the legacy stream comes after the work of all blocking streams.
            let others = blocking_work(scope);
            if !others.is_empty() {
                let cover = self.fence_now(scope)?;
                self.wait(scope, cover)?;
                others.iter().for_each(Covered::complete);
                return Ok(());
            }
        }
        match self.cover(scope)? {
            Some(cover) => self.wait(scope, cover),
            None => Ok(()),
        }
    }

    /// Shows what kernels have printed, at a copy that waits.
    pub fn show_output(self, scope: Scope) -> Result {
        if scope.session.has_device_output() {
            output::synchronize(scope, Some(self.handle))
        } else {
            Ok(())
        }
    }

    /// `cuStreamQuery`: an error of 600 while work is under way. The first question after new work goes to
    /// the worker; while the answer is no, a fence answers the next ones.
    pub fn query(self, scope: Scope) -> Result {
        scope.session.alive()?;
        if self.handle.is_legacy() {
            // A fence in the legacy stream would hold up all blocking streams.
            return self.ask(scope);
        }
        if !self.stream.is_dirty() {
            return Ok(());
        }
        let covered = self.covered();
        match covered {
            Some(cover) if scope.session.fence_reached(cover.fence, cover.value)? => {
                self.stream.completed(cover.work, cover.launches);
                Ok(())
            }
            Some(_) => Err(CuError::NOT_READY),
            None => self.ask(scope).inspect_err(|error| {
                if *error == CuError::NOT_READY {
                    // Without the fence the next question would be asked again.
                    let _ = self.fence_now(scope);
                }
            }),
        }
    }

    fn ask(self, scope: Scope) -> Result {
        let work = self.stream.work.load(Ordering::Acquire);
        let launches = self.stream.launches.load(Ordering::Acquire);
        let message = StreamQuery {
            stream: self.handle,
        };
        scope.session.request(&message, |()| ())?;
        self.stream.completed(work, launches);
        Ok(())
    }

    /// The last fence value, if it covers all work so far.
    fn covered(self) -> Option<Cover> {
        let timeline = self.stream.timeline();
        let line = timeline.line?;
        (timeline.covered >= self.stream.work.load(Ordering::Acquire)).then_some(Cover {
            fence: line.fence,
            value: line.issued,
            work: timeline.covered,
            launches: timeline.launches_covered,
        })
    }

    /// Waits for kernels whose faults the next call must report. Work that cannot fault is left alone.
    pub fn settle_launches(self, scope: Scope) -> Result {
        let others = self.handle.is_legacy()
            && STREAMS
                .live()
                .any(|(_, stream)| stream.is_blocking_on(scope) && stream.may_fault());
        if self.stream.may_fault() || others {
            self.synchronize(scope)
        } else {
            Ok(())
        }
    }
}

/// The work of the device's blocking streams that is not known to be complete.
fn blocking_work(scope: Scope) -> Vec<Covered> {
    STREAMS
        .live()
        .filter(|(_, stream)| stream.is_blocking_on(scope) && stream.is_dirty())
        .map(|(handle, stream)| Covered {
            handle,
            work: stream.work.load(Ordering::Acquire),
            launches: stream.launches.load(Ordering::Acquire),
        })
        .collect()
}

/// Waits for all work of the scope's device (`cuCtxSynchronize`): streams without new work are not visited.
pub fn synchronize_all(scope: Scope) -> Result {
    scope.session.publish_counts();
    let orphaned = &scope.session.device().has_orphaned_work;
    if orphaned.load(Ordering::Relaxed) && orphaned.swap(false, Ordering::Acquire)
        || scope.session.has_device_output()
        || release::take_due(None)
    {
        return output::synchronize(scope, None);
    }
    scope.session.alive()?;
    let mut covers = Vec::new();
    let minted = STREAMS
        .live()
        .filter(|(_, stream)| stream.is_on(scope))
        .map(|(handle, stream)| Target { handle, stream });
    for target in minted.chain([legacy(scope)]) {
        if target.stream.is_dirty()
            && let Some(cover) = target.cover(scope)?
        {
            covers.push((target, cover));
        }
    }
    covers
        .into_iter()
        .try_for_each(|(target, cover)| target.wait(scope, cover))
}

/// The scope of a stream that a program made, without a current context.
pub fn scope_of(stream: CUstream) -> Result<Scope> {
    let stream = minted(stream).map_err(|_| CuError::INVALID_CONTEXT)?;
    let context = existing(stream)?.stream.context.load(Ordering::Relaxed);
    Ok(context::scope_numbered(crate::session::session()?, context))
}

/// Waits for all work of all devices: for what their streams may name without belonging to one of them.
pub fn synchronize_devices(scope: Scope) -> Result {
    let session = scope.session.session();
    let others = (0..session.devices().len()).filter(|device| *device != scope.session.ordinal());
    let waited = synchronize_all(scope);
    others.fold(waited, |waited, device| {
        waited.and(synchronize_all(context::primary_scope(session, device)))
    })
}

/// The number of the context that a stream belongs to, which needs no current one; the default streams do.
pub fn owner(stream: CUstream) -> Result<u32> {
    if stream.addr() as u64 <= STREAM_PER_THREAD {
        return Err(CuError::INVALID_CONTEXT);
    }
    let target = existing(minted(stream)?)?;
    Ok(target.stream.context.load(Ordering::Relaxed))
}

/// The scope of the calling thread, or else of the stream, and the stream that a call names.
#[inline]
pub fn target(default: DefaultStream, stream: CUstream) -> Result<(Scope, Target)> {
    let scope = context::scope_or(|| owner(stream))?;
    let target = resolve(scope, default, stream)?;
    Ok((scope, target))
}
