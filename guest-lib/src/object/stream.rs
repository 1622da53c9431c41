//! Streams: the guest's record of each, and waiting for their work.
//!
//! Each stream has one fence, which covers its work so far: a synchronize or a first query asks the device to write
//! the next value when all earlier work is complete. Streams without new work send no request.

pub mod attributes;
mod due;
pub mod output;
mod progress;
pub mod release;
mod throttle;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use wormhole_api::handle::Stream as StreamKind;
use wormhole_api::{
    Fence, FenceWrite, GreenStream, Handle, StreamCreate, StreamDestroy, StreamQuery,
};
use wormhole_lock::{Mutex, MutexGuard};

use self::attributes::{PRIORITY, StreamAttributes};
use self::progress::{Counter, Progress};
use self::release::RELEASES;
use self::throttle::BATCHES;
use crate::device::MOST;
use crate::error::{CuError, Result};
use crate::handle::{self, Table};
use crate::memory::pool_reuse;
use crate::object::context::{self, Scope};
use crate::object::{context_events, green_context};
use crate::session::{FenceLine, Manner};
use crate::types::{
    CUstream, CUstreamAttrValue, DefaultStream, STREAM_LEGACY, STREAM_NON_BLOCKING,
    STREAM_PER_THREAD,
};

/// Record of a stream.
#[derive(Debug, Default)]
pub struct Stream {
    pub flags: AtomicU32,
    pub priority: AtomicI32,
    /// Identity (`cuStreamGetId`).
    pub id: AtomicU64,
    /// Index of the context that owns the stream, and its device's ordinal.
    pub context: AtomicU32,
    device: AtomicUsize,
    /// Operations submitted so far, each counted after it was written to the ring. Only the kernels among them can fault.
    work: Counter,
    /// Operations known to be complete. Written under the lock of the timeline.
    complete: Counter,
    /// 1 while the stream is captured. For a legacy stream, the number of captured blocking streams.
    captured: AtomicU32,
    timeline: Mutex<Timeline>,
    attributes: Mutex<StreamAttributes>,
}

/// Fence of a stream.
#[derive(Debug, Default)]
struct Timeline {
    line: Option<FenceLine>,
    /// Operations that the last issued value covers.
    covered: Progress,
    /// Fences at the ends of the last batches, oldest first.
    batches: [Option<Cover>; BATCHES],
}

/// Stream that a call names.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub handle: Handle<StreamKind>,
    pub stream: &'static Stream,
}

/// Fence value that is written when the operations counted here are complete.
#[derive(Clone, Copy, Debug)]
pub struct Cover {
    pub fence: Fence,
    pub value: u64,
    work: Progress,
}

/// Operations of a stream that are covered by another stream's fence.
struct Covered {
    target: Target,
    work: Progress,
}

/// Lock held while a stream is created or ends, and while messages name streams of other threads: a stream is live here
/// before the worker knows it, and ends here before the worker destroys it.
static LIVES: Mutex<()> = Mutex::new(());

static STREAMS: Table<StreamKind, Stream> = Table::new();
/// Legacy streams, by device.
static LEGACY: [Stream; MOST] = [const { Stream::legacy() }; MOST];

impl Stream {
    const fn legacy() -> Self {
        Self {
            flags: AtomicU32::new(0),
            priority: AtomicI32::new(0),
            id: AtomicU64::new(STREAM_LEGACY),
            context: AtomicU32::new(0),
            device: AtomicUsize::new(0),
            work: Counter::new(),
            complete: Counter::new(),
            captured: AtomicU32::new(0),
            timeline: Mutex::new(Timeline {
                line: None,
                covered: Progress::START,
                batches: [None; BATCHES],
            }),
            attributes: Mutex::new(StreamAttributes::NEW),
        }
    }

    fn reset_counts(&self) {
        self.work.store(Progress::START);
        self.complete.store(Progress::START);
    }
}

/// Next stream identity; 1 is the legacy stream's.
static NEXT_ID: AtomicU64 = AtomicU64::new(STREAM_PER_THREAD + 1);

/// Per-thread default streams of one thread (handle 2), one for each context. They are destroyed with the thread.
struct PerThread {
    /// Stream that was used last, and its context.
    last: Cell<Option<(u32, Handle<StreamKind>)>>,
    all: RefCell<Vec<(u32, Handle<StreamKind>)>>,
}

impl PerThread {
    fn destroy(&self) {
        let Ok(session) = crate::session::session() else {
            return;
        };
        for (context, handle) in self.all.take() {
            // The thread ends, so an error cannot be returned.
            let _ = destroy(context::scope_numbered(session, context), handle);
        }
    }
}

impl Drop for PerThread {
    fn drop(&mut self) {
        self.destroy();
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

/// Creates a stream.
pub fn create(scope: Scope, flags: u32, priority: i32) -> Result<Handle<StreamKind>> {
    if flags & !STREAM_NON_BLOCKING != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    let (least, greatest) = scope.session.device().priorities;
    let priority = priority.clamp(greatest.min(least), least.max(greatest));
    let lives = LIVES.lock();
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
        // The lock is held until all counts are reset: see `Target::completed`.
        let mut timeline = stream.timeline();
        stream.reset_counts();
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
        STREAMS.forget(handle);
        return Err(error);
    }
    drop(lives);
    if let Some(stream) = STREAMS.get(handle) {
        context_events::hold(scope, Target { handle, stream })?;
    }
    Ok(handle)
}

/// Looks up a stream by its handle.
pub fn existing(handle: Handle<StreamKind>) -> Result<Target> {
    let stream = STREAMS.get(handle).ok_or(CuError::INVALID_HANDLE)?;
    Ok(Target { handle, stream })
}

/// Marks a stream as no longer captured.
pub fn release_captured(handle: Handle<StreamKind>) {
    if let Ok(target) = existing(handle) {
        target.set_captured(false);
    }
}

/// Returns all streams of a context, and the legacy stream.
fn all_of(scope: Scope) -> impl Iterator<Item = Target> {
    let minted = STREAMS
        .live()
        .filter(move |(_, stream)| stream.context.load(Ordering::Relaxed) == scope.context)
        .map(|(handle, stream)| Target { handle, stream });
    minted.chain([legacy(scope)])
}

/// Returns the legacy stream of the scope's device.
#[inline]
pub fn legacy(scope: Scope) -> Target {
    Target {
        handle: Handle::LEGACY,
        stream: &LEGACY[scope.session.ordinal()],
    }
}

/// Destroys a stream. Its work continues.
pub fn destroy(scope: Scope, handle: Handle<StreamKind>) -> Result {
    let freed = pool_reuse::free_of_stream(scope.session.session(), handle);
    let (stream, sent) = end(scope, handle)?;
    let target = Target { handle, stream };
    if target.is_captured() {
        target.set_captured(false);
    }
    if let Some(line) = stream.timeline().line.take() {
        scope.session.return_fence(line);
    }
    STREAMS.recycle(handle);
    freed.and(sent)
}

/// Ends a handle and sends the message that destroys its stream.
fn end(scope: Scope, handle: Handle<StreamKind>) -> Result<(&'static Stream, Result)> {
    let _lives = LIVES.lock();
    let stream = STREAMS.retire(handle).ok_or(CuError::INVALID_HANDLE)?;
    if stream.is_dirty() {
        let session = scope.session.session();
        let device = session.on(stream.device.load(Ordering::Relaxed)).device();
        device.orphaned.fetch_add(1, Ordering::AcqRel);
    }
    let sent = scope.session.record(&StreamDestroy { stream: handle });
    Ok((stream, sent))
}

/// Calls `visit` with each stream of a context, and the legacy stream. No thread destroys a stream meanwhile.
pub fn for_each(scope: Scope, visit: impl FnMut(Target) -> Result) -> Result {
    let _lives = LIVES.lock();
    all_of(scope).try_for_each(visit)
}

/// Destroys the streams of a context.
pub fn destroy_of(scope: Scope) {
    for (handle, stream) in STREAMS.live() {
        if stream.context.load(Ordering::Relaxed) == scope.context {
            // An error is ignored: the context is destroyed, and another thread may have destroyed the stream first.
            let _ = destroy(scope, handle);
        }
    }
}

/// Destroys the per-thread default streams of the calling thread, which ends. Thread-local values are dropped in no
/// fixed order: the streams may be destroyed already.
pub fn destroy_of_thread() {
    let _ = PER_THREAD.try_with(PerThread::destroy);
}

/// Drops the records of all streams, after the worker has destroyed the streams.
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
        legacy.reset_counts();
    }
}

/// Resolves the `CUstream` of a call.
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

/// Returns the handle of a `CUstream` that a program may destroy.
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
            // The streams of destroyed contexts were destroyed with them.
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
    fn timeline(&self) -> MutexGuard<'_, Timeline> {
        self.timeline.lock()
    }

    fn attributes(&self) -> MutexGuard<'_, StreamAttributes> {
        self.attributes.lock()
    }

    /// Returns an attribute (`cuStreamGetAttribute`).
    pub fn attribute(&self, id: u32) -> Result<CUstreamAttrValue> {
        if id == PRIORITY {
            let priority = self.priority.load(Ordering::Relaxed).cast_unsigned();
            return Ok([u64::from(priority), 0, 0, 0, 0, 0, 0, 0]);
        }
        self.attributes().place(id).copied()
    }

    /// Records an attribute that was set.
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
        self.complete.load().operations() < self.work.load().operations()
    }

    fn may_fault(&self) -> bool {
        self.complete.load().lacks_kernels_of(self.work.load())
    }

    /// Records work as complete.
    fn completed(&self, _timeline: &Timeline, work: Progress) {
        if work.operations() > self.complete.load().operations() {
            self.complete.store(work);
        }
    }
}

impl Target {
    /// Returns the number of the stream's operations so far.
    pub fn work(self) -> u64 {
        self.stream.work.load().operations()
    }

    /// Returns whether all work of the stream is known to be complete.
    pub fn is_idle(self) -> bool {
        !self.stream.is_dirty()
    }

    /// Returns the ordinal of the stream's device, for a call in this scope.
    #[inline]
    pub fn device(self, scope: Scope) -> usize {
        if self.handle.is_legacy() {
            scope.session.ordinal()
        } else {
            self.stream.device.load(Ordering::Relaxed)
        }
    }

    /// Returns whether work on the stream becomes nodes of a graph. For a legacy stream: whether its use would depend
    /// on a captured blocking stream.
    #[inline]
    pub fn is_captured(self) -> bool {
        self.stream.captured.load(Ordering::Relaxed) != 0
    }

    /// Marks the stream as captured.
    pub fn mark_captured(self) {
        self.set_captured(true);
    }

    /// Sets or clears the captured flag. Only one thread at a time calls this, for any stream.
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
        // The work was counted after it was written, so all work counted here precedes the fence in the ring.
        let work = self.stream.work.load();
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
        Ok(Cover {
            fence: line.fence,
            value: line.issued,
            work,
        })
    }

    /// Issues a fence value that covers the work so far, even if all of it is complete.
    pub fn fence_now(self, scope: Scope) -> Result<Cover> {
        let mut timeline = self.stream.timeline();
        self.issue(scope, &mut timeline)
    }

    /// Returns a fence value that covers the work so far, or `None` if all of it is known to be complete.
    fn cover(self, scope: Scope) -> Result<Option<Cover>> {
        if !self.stream.is_dirty() {
            return Ok(None);
        }
        match self.covered() {
            Some(cover) => Ok(Some(cover)),
            None => self.fence_now(scope).map(Some),
        }
    }

    /// Waits for a fence value, and records the work that it covers as complete.
    pub fn wait(self, scope: Scope, cover: Cover) -> Result {
        self.wait_in(context::manner(), scope, cover)
    }

    fn wait_in(self, manner: Manner, scope: Scope, cover: Cover) -> Result {
        scope.session.wait_fence(cover.fence, cover.value, manner)?;
        self.completed(cover.work);
        Ok(())
    }

    /// Records work as complete, unless another thread has destroyed the stream. The lock prevents that the table entry is
    /// reused for another stream meanwhile, for which the counts would be wrong.
    fn completed(self, work: Progress) {
        let timeline = self.stream.timeline();
        if self.handle.is_legacy() || STREAMS.get(self.handle).is_some() {
            self.stream.completed(&timeline, work);
        }
    }

    /// Waits for the stream (`cuStreamSynchronize`).
    pub fn synchronize(self, scope: Scope) -> Result {
        scope.session.publish_counts();
        if output::is_due(self.device(scope)) || RELEASES.is_set() {
            return self.let_device_synchronize(scope);
        }
        scope.session.alive()?;
        if self.handle.is_legacy() {
            // A fence in the legacy stream is written after the work of all blocking streams.
            let others = blocking_work(scope);
            if !others.is_empty() {
                let cover = self.fence_now(scope)?;
                self.wait(scope, cover)?;
                for covered in others {
                    covered.target.completed(covered.work);
                }
                return Ok(());
            }
        }
        match self.cover(scope)? {
            Some(cover) => self.wait(scope, cover),
            None => Ok(()),
        }
    }

    /// Waits for the stream and writes the kernels' output, if any kernel can print. Called by copies that wait.
    pub fn show_output(self, scope: Scope) -> Result {
        if output::is_due(self.device(scope)) {
            self.let_device_synchronize(scope)
        } else {
            Ok(())
        }
    }

    /// Waits for the stream by a request.
    #[cold]
    fn let_device_synchronize(self, scope: Scope) -> Result {
        if RELEASES.is_set() {
            pool_reuse::free_in_order(scope, |stream| stream == self.handle)?;
            RELEASES.take(Some(self.handle));
        }
        let work = self.stream.work.load();
        output::synchronize(scope, self.device(scope), Some(self.handle))?;
        self.completed(work);
        Ok(())
    }

    /// Returns error 600 while work is not complete (`cuStreamQuery`). The first query after new work is a request to
    /// the worker; if the answer is no, a fence answers the next queries.
    pub fn query(self, scope: Scope) -> Result {
        scope.session.alive()?;
        if self.handle.is_legacy() {
            // A fence in the legacy stream would delay all blocking streams.
            return self.ask(scope);
        }
        if !self.stream.is_dirty() {
            return Ok(());
        }
        let covered = self.covered();
        match covered {
            Some(cover) if scope.session.fence_reached(cover.fence, cover.value)? => {
                self.completed(cover.work);
                Ok(())
            }
            Some(_) => Err(CuError::NOT_READY),
            None => self.ask(scope).inspect_err(|error| {
                if *error == CuError::NOT_READY {
                    // Without a fence the next query would be a request again.
                    let _ = self.fence_now(scope);
                }
            }),
        }
    }

    fn ask(self, scope: Scope) -> Result {
        let work = self.stream.work.load();
        let message = StreamQuery {
            stream: self.handle,
        };
        scope.session.request(&message, |()| ())?;
        self.completed(work);
        Ok(())
    }

    /// Returns the last fence value if it covers all work so far.
    fn covered(self) -> Option<Cover> {
        let timeline = self.stream.timeline();
        let line = timeline.line?;
        let covered = timeline.covered;
        (covered.operations() >= self.work()).then_some(Cover {
            fence: line.fence,
            value: line.issued,
            work: covered,
        })
    }

    /// Synchronizes if kernels may be running, because the next call must report their faults. Does not wait for work
    /// that cannot fault.
    pub fn synchronize_if_faults_are_possible(self, scope: Scope) -> Result {
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

/// Returns whether none of the device's blocking streams has work for which the legacy stream would wait.
pub fn is_alone(scope: Scope) -> bool {
    blocking_work(scope).is_empty()
}

/// Returns the work of the device's blocking streams that is not known to be complete.
fn blocking_work(scope: Scope) -> Vec<Covered> {
    STREAMS
        .live()
        .filter(|(_, stream)| stream.is_blocking_on(scope) && stream.is_dirty())
        .map(|(handle, stream)| Covered {
            target: Target { handle, stream },
            work: stream.work.load(),
        })
        .collect()
}

/// Waits for all work of the scope's device (`cuCtxSynchronize`). Streams without new work are skipped.
pub fn synchronize_all(scope: Scope) -> Result {
    scope.session.publish_counts();
    let releases = RELEASES.is_set();
    if releases {
        pool_reuse::free_in_order(scope, |_| true)?;
        RELEASES.take(None);
    }
    if output::is_due(scope.session.ordinal()) || releases {
        return output::synchronize(scope, scope.session.ordinal(), None);
    }
    wait_for_work(scope)
}

/// Waits for all work of the scope's device, for a call that frees memory. Kernels' output stays where it is.
pub fn wait_for_work(scope: Scope) -> Result {
    scope.session.alive()?;
    let device = scope.session.device();
    let lives = LIVES.lock();
    let orphaned = device.orphaned.load(Ordering::Acquire);
    if device.orphaned_complete.load(Ordering::Acquire) < orphaned {
        drop(lives);
        output::synchronize(scope, scope.session.ordinal(), None)?;
        device
            .orphaned_complete
            .fetch_max(orphaned, Ordering::AcqRel);
        return Ok(());
    }
    let mut covers = Vec::new();
    let minted = STREAMS
        .live()
        .filter(|(_, stream)| stream.is_on(scope))
        .map(|(handle, stream)| Target { handle, stream });
    for target in minted.chain([legacy(scope)]) {
        if let Some(cover) = target.cover(scope)? {
            covers.push((target, cover));
        }
    }
    drop(lives);
    covers
        .into_iter()
        .try_for_each(|(target, cover)| target.wait(scope, cover))
}

/// Returns the scope of a stream that a program created. Needs no current context.
pub fn scope_of(stream: CUstream) -> Result<Scope> {
    let stream = minted(stream).map_err(|_| CuError::INVALID_CONTEXT)?;
    let context = existing(stream)?.stream.context.load(Ordering::Relaxed);
    Ok(context::scope_numbered(crate::session::session()?, context))
}

/// Waits for all work of all devices, for objects that streams of any device may use.
pub fn synchronize_devices(scope: Scope) -> Result {
    let session = scope.session.session();
    let others = (0..session.devices().len()).filter(|device| *device != scope.session.ordinal());
    let waited = synchronize_all(scope);
    others.fold(waited, |waited, device| {
        waited.and(synchronize_all(context::primary_scope(session, device)))
    })
}

/// Returns the index of the context that owns a stream, without a current context. Fails for the default streams,
/// which need one.
pub fn owner(stream: CUstream) -> Result<u32> {
    if stream.addr() as u64 <= STREAM_PER_THREAD {
        return Err(CuError::INVALID_CONTEXT);
    }
    let target = existing(minted(stream)?)?;
    Ok(target.stream.context.load(Ordering::Relaxed))
}

/// Resolves the `CUstream` of a call. Returns it with the calling thread's scope, or with the scope of the stream's
/// context if the thread has no current context.
pub fn target(default: DefaultStream, stream: CUstream) -> Result<(Scope, Target)> {
    target_here(default, stream)
}

/// As [`target`], inlined, for the calls that programs make most often.
#[inline(always)]
pub fn target_here(default: DefaultStream, stream: CUstream) -> Result<(Scope, Target)> {
    let scope = context::scope_or(|| owner(stream))?;
    let target = resolve(scope, default, stream)?;
    Ok((scope, target))
}
