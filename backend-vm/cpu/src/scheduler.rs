//! Streams: what runs after what.
//!
//! Every stream is a queue. Its front is ready once the points that it must come after are reached, and one of
//! the scheduler's threads then runs it ([`threads`]). The legacy default stream and the blocking streams order
//! with each other both ways (CUDA programming guide, "Default Stream"), `cuStreamWaitEvent` adds one point.
//! Points lie in the past when they are taken, so no two streams ever wait for each other.
//!
//! Invariant: a stream whose queue is not empty is in exactly one place: with a thread, in a ready queue, with
//! the watcher, or among the dependents of a stream that has not reached a point.
//!
//! The scheduler knows nothing of what the work does. The first work that fails kills the context: no
//! queue moves again, and every later call answers that error.

mod describe;
mod threads;
mod work;

use std::collections::{BTreeMap, VecDeque};
use std::mem::take;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use wormhole_device::{CuError, RawStream, Result};

pub use work::{Outcome, Turn, Work};

/// The legacy default stream's entry.
const LEGACY: u64 = RawStream::LEGACY.0;
/// The first number that a created stream may have: 0, 1 and 2 mean default streams.
const FIRST: u64 = 16;

/// Pieces of work that may wait, over all streams.
const MAX_QUEUED: usize = 1 << 20;
/// Bytes of data that they may hold.
const MAX_QUEUED_BYTES: usize = 1 << 30;

/// A place in a stream: reached when that many pieces of work of the stream are complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    stream: u64,
    sequence: u64,
}

struct Queued {
    work: Work,
    /// Points that it must come after, without those that were found reached.
    after: Vec<Point>,
    /// Bytes of data it holds.
    bytes: usize,
}

struct Stream {
    queue: VecDeque<Queued>,
    submitted: u64,
    completed: u64,
    blocking: bool,
    destroyed: bool,
    /// Streams whose front waits until this many pieces of work are complete.
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
    /// Streams whose front can run, in the order in which they became ready; those where it is a kernel.
    ready: VecDeque<u64>,
    ready_kernels: VecDeque<u64>,
    /// Kernels that run.
    kernels: usize,
    threads: Vec<JoinHandle<()>>,
    /// Sleeping threads. The last to sleep is woken first, since its data is still in the processor's caches.
    idle: Vec<Arc<threads::Sleeper>>,
    /// How many were called and have not come yet, and how many are being started.
    called: usize,
    starting: usize,
    /// The log has not yet been told that the system has no more threads.
    may_complain: bool,
    watcher: Option<JoinHandle<()>>,
    /// What the watcher has not taken yet.
    watched: Vec<threads::Watched>,
    /// Pieces of work that are not complete, and the bytes of data they hold.
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

    /// What work submitted now to `id` must come after, beside the stream's own.
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

    /// Queues work on a stream that is there.
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

    /// Puts a stream that is in no place where its front belongs.
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

    /// One more piece of work of a stream is complete.
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
    /// Something completed, or the context died; for host threads.
    progressed: Condvar,
    /// The watcher has something new.
    parked: Condvar,
    /// Threads that look at a condition themselves.
    looking: AtomicUsize,
    /// The sticky error, 0 while the context lives.
    fault: AtomicU32,
    /// Set when running work is to stop: a fault elsewhere, or a reset.
    cancel: Arc<AtomicBool>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fault(&self) -> Option<CuError> {
        match self.fault.load(Ordering::Acquire) {
            0 => None,
            code => Some(CuError(code)),
        }
    }

    fn alive(&self) -> Result<()> {
        self.fault().map_or(Ok(()), Err)
    }

    /// Tells host threads that a point may be reached.
    fn tell_hosts(&self, state: &State) {
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
        let mut state = self.lock();
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
        // What they hold may take locks when it goes.
        drop((dropped, watched));
    }

    /// Has threads for the work that is to be queued: one at least.
    fn prepare(self: &Arc<Self>, state: &mut State) -> Result<()> {
        self.alive()?;
        if state.threads.is_empty() && !self.hire(state) {
            return Err(CuError::OPERATING_SYSTEM);
        }
        Ok(())
    }

    fn begin(self: &Arc<Self>, work: Work) -> Result<Point> {
        let mut state = self.lock();
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
        let stream = self.lock().add(Stream {
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

/// A point that is reached when work says so, which may be while it runs.
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
        let mut state = self.shared.lock();
        if state.streams.contains_key(&self.point.stream) {
            state.complete(self.point.stream);
            self.shared.staff(&mut state);
            self.shared.tell_hosts(&state);
        }
    }
}

impl std::fmt::Debug for Milestone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Milestone").field(&self.point).finish()
    }
}

/// The streams of one context.
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
    /// A context with nothing but the legacy default stream.
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

    /// The sticky error.
    pub fn fault(&self) -> Option<CuError> {
        self.shared.fault()
    }

    /// `Err` with the sticky error.
    pub fn alive(&self) -> Result<()> {
        self.shared.alive()
    }

    /// Becomes true when running work is to stop.
    pub fn cancel(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.shared.cancel)
    }

    /// Adds a stream; `blocking` ones order with the legacy default stream.
    pub fn create(&self, blocking: bool) -> RawStream {
        RawStream(self.shared.lock().add(Stream::new(blocking)))
    }

    /// A point of its own, like the end of a stream's only work.
    pub fn milestone(&self) -> Milestone {
        self.shared.milestone()
    }

    /// Forgets a stream; what it holds still runs (`cuStreamDestroy`).
    pub fn destroy(&self, stream: RawStream) -> Result<()> {
        if stream == RawStream::LEGACY {
            return Err(CuError::INVALID_HANDLE);
        }
        let mut state = self.shared.lock();
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

    /// The same, for work that holds this many bytes of data.
    pub fn submit_with(&self, stream: RawStream, bytes: usize, work: Work) -> Result<Point> {
        self.enqueue(stream, None, bytes, work)
    }

    /// The same, for work that must also come after `points`.
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
        let mut state = self.shared.lock();
        self.shared.prepare(&mut state)?;
        state.live(stream)?;
        let mut after = state.implicit_order(stream.0);
        after.extend(points);
        let bytes = bytes.saturating_add(size_of_val(after.as_slice()));
        let point = state.push(stream.0, Queued { work, after, bytes })?;
        self.shared.staff(&mut state);
        Ok(point)
    }

    /// The points at which everything in `stream` so far is complete; for the legacy default stream
    /// that includes the blocking streams.
    pub fn frontier(&self, stream: RawStream) -> Result<Vec<Point>> {
        let mut state = self.shared.lock();
        self.alive()?;
        state.live(stream)?;
        let mut points = Vec::from_iter(state.last_point(stream.0));
        if stream == RawStream::LEGACY {
            points.extend(state.implicit_order(LEGACY));
        }
        Ok(points)
    }

    /// The points at which everything submitted so far is complete.
    pub fn whole_frontier(&self) -> Vec<Point> {
        let state = self.shared.lock();
        state
            .streams
            .keys()
            .filter_map(|id| state.last_point(*id))
            .collect()
    }

    /// Whether all points are reached.
    pub fn reached(&self, points: &[Point]) -> Result<bool> {
        self.alive()?;
        let state = self.shared.lock();
        Ok(points.iter().all(|point| state.reached(*point)))
    }

    /// Waits for all points, or for the context's death.
    pub fn wait(&self, points: &[Point]) -> Result<()> {
        let mut left = points.iter().peekable();
        let mut state = self.shared.lock();
        loop {
            self.alive()?;
            while left.next_if(|point| state.reached(**point)).is_some() {}
            if left.peek().is_none() {
                return Ok(());
            }
            state.waiters += 1;
            state = self
                .shared
                .progressed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.waiters -= 1;
        }
    }

    /// Work for another scheduler: complete once these points of this one are reached, a fault if this context
    /// dies before.
    pub fn awaited(&self, points: Vec<Point>) -> Work {
        let shared = Arc::clone(&self.shared);
        let reached = move |shared: &Shared| {
            let state = shared.lock();
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

    /// Stops everything that runs or waits and returns when no thread of this context is left. Calls
    /// that wait, and calls that come later, answer `error`.
    pub fn stop(&self, error: CuError) {
        self.shared.kill(error);
        let mut state = self.shared.lock();
        let (threads, watcher) = (take(&mut state.threads), state.watcher.take());
        drop(state);
        for thread in threads.into_iter().chain(watcher) {
            // A thread catches the panics of its work; it has nothing to tell.
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
