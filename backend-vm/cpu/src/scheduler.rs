//! Scheduler of streams: the order of their work, and its execution.
//!
//! Every stream is a queue. Its front is ready once the points that it must come after are reached; then one of the
//! scheduler's threads runs it ([`threads`]). The legacy default stream and the blocking streams synchronise with each
//! other both ways (CUDA programming guide, "Default Stream"); `cuStreamWaitEvent` adds one point. A point refers to
//! work submitted before, so no two streams ever wait for each other.
//!
//! Invariant: a stream whose queue is not empty is in exactly one place: run by a thread, in a ready queue, with the
//! watcher, or among the dependents of a stream that has not reached a point.
//!
//! The scheduler does not depend on the kind of work. The first work that fails kills the context: no queue moves
//! again, and every later call returns that error.

mod describe;
mod threads;
mod work;

use std::collections::{BTreeMap, VecDeque};
use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use wormhole_device::{CuError, RawStream, Result};
use wormhole_lock::{Condvar, Mutex};

pub use work::{Outcome, Turn, Work};

/// Number of the legacy default stream.
const LEGACY: u64 = RawStream::LEGACY.0;
/// First number of created streams: 0, 1 and 2 are default streams.
const FIRST: u64 = 16;

/// Most pieces of work that are queued, over all streams.
const MAX_QUEUED: usize = 1 << 20;
/// Most bytes of data that queued work holds.
const MAX_QUEUED_BYTES: usize = 1 << 30;

/// A position in a stream, reached when `sequence` pieces of the stream's work are complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    stream: u64,
    sequence: u64,
}

struct Queued {
    work: Work,
    /// Points that it must come after, without those already seen reached.
    after: Vec<Point>,
    /// Bytes of data that it holds.
    bytes: usize,
}

struct Stream {
    queue: VecDeque<Queued>,
    submitted: u64,
    completed: u64,
    blocking: bool,
    destroyed: bool,
    /// Waiting streams: the number of complete pieces of work that each waits for, and the stream.
    dependents: Vec<(u64, u64)>,
}

impl Stream {
    fn new(blocking: bool) -> Self {
        Self {
            queue: VecDeque::new(),
            submitted: 0,
            completed: 0,
            blocking,
            destroyed: false,
            dependents: Vec::new(),
        }
    }

    fn pending(&self) -> bool {
        self.completed < self.submitted
    }
}

struct State {
    streams: BTreeMap<u64, Stream>,
    next: u64,
    /// Streams whose front can run, in the order in which they became ready. Streams whose front is a kernel are in
    /// `ready_kernels`.
    ready: VecDeque<u64>,
    ready_kernels: VecDeque<u64>,
    /// Number of running kernels.
    kernels: usize,
    threads: Vec<JoinHandle<()>>,
    /// Sleeping threads. The last one to sleep is woken first, because its data is still in the processor's caches.
    idle: Vec<Arc<threads::Sleeper>>,
    /// Number of threads that were called but have not woken yet, and of threads being started.
    called: usize,
    starting: usize,
    /// True until the log has a warning that the system refuses threads.
    may_complain: bool,
    watcher: Option<JoinHandle<()>>,
    /// Conditions that the watcher has not taken yet.
    watched: Vec<threads::Watched>,
    /// Number of incomplete pieces of work, and the bytes of data that they hold.
    queued: usize,
    queued_bytes: usize,
    /// Host threads inside [`Scheduler::wait`].
    waiters: usize,
}

impl State {
    fn live(&mut self, stream: RawStream) -> Result<&mut Stream> {
        match self.streams.get_mut(&stream.0) {
            Some(entry) if !entry.destroyed => Ok(entry),
            _ => Err(CuError::INVALID_HANDLE),
        }
    }

    fn reached(&self, point: Point) -> bool {
        self.streams
            .get(&point.stream)
            .is_none_or(|stream| stream.completed >= point.sequence)
    }

    fn last_point(&self, id: u64) -> Option<Point> {
        let stream = self.streams.get(&id)?;
        stream.pending().then_some(Point {
            stream: id,
            sequence: stream.submitted,
        })
    }

    /// Returns the points of other streams that work submitted now to `id` must come after.
    fn implicit_order(&self, id: u64) -> Vec<Point> {
        if id == LEGACY {
            self.streams
                .iter()
                .filter(|(other, stream)| **other != LEGACY && stream.blocking)
                .filter_map(|(other, _)| self.last_point(*other))
                .collect()
        } else if self.streams.get(&id).is_some_and(|stream| stream.blocking) {
            self.last_point(LEGACY).into_iter().collect()
        } else {
            Vec::new()
        }
    }

    /// Adds a stream.
    fn add(&mut self, stream: Stream) -> u64 {
        let id = self.next;
        self.next += 1;
        self.streams.insert(id, stream);
        id
    }

    /// Queues work on an existing stream.
    fn push(&mut self, id: u64, queued: Queued) -> Result<Point> {
        if self.queued >= MAX_QUEUED || queued.bytes > MAX_QUEUED_BYTES - self.queued_bytes {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let stream = self.streams.get_mut(&id).ok_or(CuError::INVALID_HANDLE)?;
        let bytes = queued.bytes;
        let first = !stream.pending();
        stream.submitted += 1;
        stream.queue.push_back(queued);
        let point = Point {
            stream: id,
            sequence: stream.submitted,
        };
        self.queued += 1;
        self.queued_bytes += bytes;
        if first {
            self.arrange(id);
        }
        Ok(point)
    }

    /// Puts a stream that is in no place to the place of its front, or removes it if it is empty and destroyed.
    fn arrange(&mut self, id: u64) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let Some(front) = stream.queue.front_mut() else {
            if stream.destroyed {
                self.streams.remove(&id);
            }
            return;
        };
        let kernel = front.work.kernel;
        let mut after = take(&mut front.after);
        while let Some(point) = after.pop() {
            if self.reached(point) {
                continue;
            }
            after.push(point);
            if let Some(other) = self.streams.get_mut(&point.stream) {
                other.dependents.push((point.sequence, id));
            }
            let front = self.streams.get_mut(&id).map(|stream| &mut stream.queue);
            if let Some(front) = front.and_then(VecDeque::front_mut) {
                front.after = after;
            }
            return;
        }
        if kernel {
            self.ready_kernels.push_back(id);
        } else {
            self.ready.push_back(id);
        }
    }

    /// Counts a complete piece of work of a stream.
    fn complete(&mut self, id: u64) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.completed += 1;
        let reached = stream.completed;
        let dependents = &mut stream.dependents;
        let freed = dependents.extract_if(.., |(sequence, _)| *sequence <= reached);
        let freed: Vec<u64> = freed.map(|(_, dependent)| dependent).collect();
        self.arrange(id);
        for dependent in freed {
            self.arrange(dependent);
        }
    }
}

struct Shared {
    state: Mutex<State>,
    /// Signals host threads that work completed or the context died.
    progressed: Condvar,
    /// Signals the watcher that there is a new condition.
    parked: Condvar,
    /// Number of threads that poll a condition themselves.
    looking: AtomicUsize,
    /// Sticky error, 0 while the context lives.
    fault: AtomicU32,
    /// Set when running work must stop, after a fault elsewhere or for a reset.
    cancel: Arc<AtomicBool>,
}

impl Shared {
    fn fault(&self) -> Option<CuError> {
        match self.fault.load(Ordering::Acquire) {
            0 => None,
            code => Some(CuError(code)),
        }
    }

    fn alive(&self) -> Result<()> {
        self.fault().map_or(Ok(()), Err)
    }

    /// Wakes host threads, because a point may be reached.
    fn wake_hosts(&self, state: &State) {
        if state.waiters > 0 {
            self.progressed.notify_all();
        }
    }

    /// Kills the context. The first error stays.
    fn kill(&self, error: CuError) {
        let _ = self
            .fault
            .compare_exchange(0, error.0, Ordering::AcqRel, Ordering::Acquire);
        self.cancel.store(true, Ordering::Release);
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        for stream in state.streams.values_mut() {
            dropped.extend(stream.queue.drain(..));
        }
        let watched = take(&mut state.watched);
        self.progressed.notify_all();
        for sleeper in take(&mut state.idle) {
            sleeper.call();
        }
        self.parked.notify_all();
        drop(state);
        // Dropped without the lock, because destructors may take locks.
        drop((dropped, watched));
    }

    /// Ensures that at least one thread exists for work to be queued.
    fn prepare(self: &Arc<Self>, state: &mut State) -> Result<()> {
        self.alive()?;
        if state.threads.is_empty() && !self.hire(state) {
            return Err(CuError::OPERATING_SYSTEM);
        }
        Ok(())
    }

    fn begin(self: &Arc<Self>, work: Work) -> Result<Point> {
        let mut state = self.state.lock();
        self.prepare(&mut state)?;
        let stream = state.add(Stream {
            destroyed: true,
            ..Stream::new(false)
        });
        let queued = Queued {
            work,
            after: Vec::new(),
            bytes: 0,
        };
        let point = state.push(stream, queued).inspect_err(|_| {
            state.streams.remove(&stream);
        })?;
        self.staff(&mut state);
        Ok(point)
    }

    fn milestone(self: &Arc<Self>) -> Milestone {
        let stream = self.state.lock().add(Stream {
            submitted: 1,
            destroyed: true,
            ..Stream::new(false)
        });
        Milestone {
            shared: Arc::clone(self),
            point: Point {
                stream,
                sequence: 1,
            },
        }
    }
}

/// A point that work reaches explicitly, possibly while it runs.
#[derive(Clone)]
pub struct Milestone {
    shared: Arc<Shared>,
    point: Point,
}

impl Milestone {
    pub fn point(&self) -> Point {
        self.point
    }

    pub fn reach(&self) {
        let mut state = self.shared.state.lock();
        if state.streams.contains_key(&self.point.stream) {
            state.complete(self.point.stream);
            self.shared.staff(&mut state);
            self.shared.wake_hosts(&state);
        }
    }
}

impl std::fmt::Debug for Milestone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Milestone").field(&self.point).finish()
    }
}

/// Streams of one context.
pub struct Scheduler {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler")
            .field("fault", &self.shared.fault())
            .finish_non_exhaustive()
    }
}

impl Scheduler {
    /// Creates a scheduler with only the legacy default stream.
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(State {
                    streams: BTreeMap::from([(LEGACY, Stream::new(true))]),
                    next: FIRST,
                    ready: VecDeque::new(),
                    ready_kernels: VecDeque::new(),
                    kernels: 0,
                    threads: Vec::new(),
                    idle: Vec::new(),
                    called: 0,
                    starting: 0,
                    may_complain: true,
                    watcher: None,
                    watched: Vec::new(),
                    queued: 0,
                    queued_bytes: 0,
                    waiters: 0,
                }),
                progressed: Condvar::new(),
                parked: Condvar::new(),
                looking: AtomicUsize::new(0),
                fault: AtomicU32::new(0),
                cancel: Arc::new(AtomicBool::new(false)),
            }),
        }
    }

    /// Returns the sticky error, if any.
    pub fn fault(&self) -> Option<CuError> {
        self.shared.fault()
    }

    /// Fails with the sticky error if there is one.
    pub fn alive(&self) -> Result<()> {
        self.shared.alive()
    }

    /// Returns a flag that becomes true when running work must stop.
    pub fn cancel(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.shared.cancel)
    }

    /// Creates a stream. A `blocking` one synchronises with the legacy default stream.
    pub fn create(&self, blocking: bool) -> RawStream {
        RawStream(self.shared.state.lock().add(Stream::new(blocking)))
    }

    /// Creates a milestone, whose point belongs to no visible stream.
    pub fn milestone(&self) -> Milestone {
        self.shared.milestone()
    }

    /// Destroys a stream (`cuStreamDestroy`). Its queued work still runs.
    pub fn destroy(&self, stream: RawStream) -> Result<()> {
        if stream == RawStream::LEGACY {
            return Err(CuError::INVALID_HANDLE);
        }
        let mut state = self.shared.state.lock();
        let entry = state.live(stream)?;
        entry.destroyed = true;
        if !entry.pending() {
            state.streams.remove(&stream.0);
        }
        Ok(())
    }

    /// Queues work on a stream and returns the point where it is complete.
    pub fn submit(&self, stream: RawStream, work: Work) -> Result<Point> {
        self.enqueue(stream, None, 0, work)
    }

    /// Queues work that holds `bytes` bytes of data.
    pub fn submit_with(&self, stream: RawStream, bytes: usize, work: Work) -> Result<Point> {
        self.enqueue(stream, None, bytes, work)
    }

    /// Queues work that must also come after `points`.
    pub fn submit_after(
        &self,
        stream: RawStream,
        points: impl IntoIterator<Item = Point>,
        work: Work,
    ) -> Result<Point> {
        self.enqueue(stream, points, 0, work)
    }

    fn enqueue(
        &self,
        stream: RawStream,
        points: impl IntoIterator<Item = Point>,
        bytes: usize,
        work: Work,
    ) -> Result<Point> {
        let mut state = self.shared.state.lock();
        self.shared.prepare(&mut state)?;
        state.live(stream)?;
        let mut after = state.implicit_order(stream.0);
        after.extend(points);
        let bytes = bytes.saturating_add(size_of_val(after.as_slice()));
        let point = state.push(stream.0, Queued { work, after, bytes })?;
        self.shared.staff(&mut state);
        Ok(point)
    }

    /// Returns the points at which all work in `stream` so far is complete. For the legacy default stream that includes
    /// the blocking streams.
    pub fn frontier(&self, stream: RawStream) -> Result<Vec<Point>> {
        let mut state = self.shared.state.lock();
        self.alive()?;
        state.live(stream)?;
        let mut points = Vec::from_iter(state.last_point(stream.0));
        if stream == RawStream::LEGACY {
            points.extend(state.implicit_order(LEGACY));
        }
        Ok(points)
    }

    /// Returns the points at which all work submitted so far is complete.
    pub fn whole_frontier(&self) -> Vec<Point> {
        let state = self.shared.state.lock();
        state
            .streams
            .keys()
            .filter_map(|id| state.last_point(*id))
            .collect()
    }

    /// Returns whether all points are reached. Fails with the sticky error.
    pub fn reached(&self, points: &[Point]) -> Result<bool> {
        self.alive()?;
        let state = self.shared.state.lock();
        Ok(points.iter().all(|point| state.reached(*point)))
    }

    /// Waits for all points, or for the context's death.
    pub fn wait(&self, points: &[Point]) -> Result<()> {
        let mut left = points.iter().peekable();
        let mut state = self.shared.state.lock();
        loop {
            self.alive()?;
            while left.next_if(|point| state.reached(**point)).is_some() {}
            if left.peek().is_none() {
                return Ok(());
            }
            state.waiters += 1;
            state = self.shared.progressed.wait(state);
            state.waiters -= 1;
        }
    }

    /// Creates work for another scheduler that completes once these points of this one are reached, and fails if this
    /// context dies before.
    pub fn awaited(&self, points: Vec<Point>) -> Work {
        let shared = Arc::clone(&self.shared);
        let reached = move |shared: &Shared| {
            let state = shared.state.lock();
            points.iter().all(|point| state.reached(*point))
        };
        let reached = Arc::new(reached);
        Work::of_steps(move |_| {
            if reached(&shared) {
                return Ok(Outcome::Complete);
            }
            shared.alive()?;
            let (shared, reached) = (Arc::clone(&shared), Arc::clone(&reached));
            let condition = move || reached(&shared) || shared.fault().is_some();
            Ok(Outcome::When(Box::new(condition)))
        })
    }

    /// Stops all running and waiting work, and returns when no thread of this context is left. Waiting and later calls
    /// fail with `error`.
    pub fn stop(&self, error: CuError) {
        self.shared.kill(error);
        let mut state = self.shared.state.lock();
        let (threads, watcher) = (take(&mut state.threads), state.watcher.take());
        drop(state);
        for thread in threads.into_iter().chain(watcher) {
            // A thread catches the panics of its work, so the result is not used.
            let _ = thread.join();
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.stop(CuError::CONTEXT_IS_DESTROYED);
    }
}

#[cfg(test)]
mod tests;
