//! Streams: what runs after what, and on which thread.
//!
//! Every stream is a queue and, from its first work on, a thread. Work carries the points of other
//! streams that it must come after: the legacy default stream and the blocking streams order with each
//! other both ways (CUDA programming guide, "Default Stream"), `cuStreamWaitEvent` adds one point.
//! Points lie in the past when they are taken, so no two streams ever wait for each other.
//!
//! The scheduler knows nothing of what the work does. The first work that fails kills the context: no
//! queue moves again, and every later call answers that error.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use wormhole_device::{CuError, RawStream, Result};

/// The legacy default stream's entry.
const LEGACY: u64 = RawStream::LEGACY.0;
/// The first number that a created stream may have: 0, 1 and 2 mean default streams.
const FIRST: u64 = 16;

/// Streams that may have a thread at the same time.
const MAX_THREADS: usize = 4096;
/// Pieces of work that may wait, over all streams.
const MAX_QUEUED: usize = 1 << 20;
/// Bytes of data that they may hold.
const MAX_QUEUED_BYTES: usize = 1 << 30;

/// One piece of work.
pub type Work = Box<dyn FnOnce() -> Result<()> + Send>;

/// A place in a stream: reached when that many pieces of work of the stream are complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    stream: u64,
    sequence: u64,
}

struct Queued {
    work: Work,
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
    /// Its thread sleeps because the front of the queue must come after something.
    held: bool,
    started: bool,
    wake: Arc<Condvar>,
}

impl Stream {
    fn new(blocking: bool) -> Self {
        Self {
            queue: VecDeque::new(),
            submitted: 0,
            completed: 0,
            blocking,
            destroyed: false,
            held: false,
            started: false,
            wake: Arc::new(Condvar::new()),
        }
    }

    fn pending(&self) -> bool {
        self.completed < self.submitted
    }
}

struct State {
    streams: BTreeMap<u64, Stream>,
    next: u64,
    threads: Vec<JoinHandle<()>>,
    /// Pieces of work in all queues, and the bytes of data they hold.
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
}

struct Shared {
    state: Mutex<State>,
    /// Something completed, or the context died; for host threads.
    progressed: Condvar,
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

    /// Wakes whom progress may concern.
    fn progressed(&self, state: &State) {
        for other in state.streams.values().filter(|stream| stream.held) {
            other.wake.notify_one();
        }
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
        {
            let mut state = self.lock();
            for stream in state.streams.values_mut() {
                dropped.extend(stream.queue.drain(..));
                stream.wake.notify_all();
            }
            self.progressed.notify_all();
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
        if state.streams.remove(&self.point.stream).is_some() {
            self.shared.progressed(&state);
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
                    threads: Vec::new(),
                    queued: 0,
                    queued_bytes: 0,
                    waiters: 0,
                }),
                progressed: Condvar::new(),
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
        self.fault().map_or(Ok(()), Err)
    }

    /// Becomes true when running work is to stop.
    pub fn cancel(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.shared.cancel)
    }

    /// Adds a stream; `blocking` ones order with the legacy default stream.
    pub fn create(&self, blocking: bool) -> RawStream {
        let mut state = self.shared.lock();
        let id = state.next;
        state.next += 1;
        state.streams.insert(id, Stream::new(blocking));
        RawStream(id)
    }

    /// A point of its own, like the end of a stream's only work.
    pub fn milestone(&self) -> Milestone {
        let mut state = self.shared.lock();
        let stream = state.next;
        state.next += 1;
        let entry = Stream {
            submitted: 1,
            destroyed: true,
            ..Stream::new(false)
        };
        state.streams.insert(stream, entry);
        Milestone {
            shared: Arc::clone(&self.shared),
            point: Point {
                stream,
                sequence: 1,
            },
        }
    }

    /// Forgets a stream; what it holds still runs (`cuStreamDestroy`).
    pub fn destroy(&self, stream: RawStream) -> Result<()> {
        if stream == RawStream::LEGACY {
            return Err(CuError::INVALID_HANDLE);
        }
        let mut state = self.shared.lock();
        let entry = state.live(stream)?;
        entry.destroyed = true;
        entry.wake.notify_all();
        if !entry.started {
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
        self.alive()?;
        let mut after = state.implicit_order(stream.0);
        after.extend(points);
        let started = state.live(stream)?.started;
        if !started {
            state.threads.retain(|thread| !thread.is_finished());
        }
        let bytes = bytes + size_of_val(after.as_slice());
        if (!started && state.threads.len() >= MAX_THREADS)
            || state.queued >= MAX_QUEUED
            || bytes > MAX_QUEUED_BYTES - state.queued_bytes
        {
            return Err(CuError::OUT_OF_MEMORY);
        }
        state.queued += 1;
        state.queued_bytes += bytes;
        let entry = state.live(stream)?;
        entry.submitted += 1;
        entry.queue.push_back(Queued { work, after, bytes });
        let point = Point {
            stream: stream.0,
            sequence: entry.submitted,
        };
        if entry.started {
            entry.wake.notify_one();
        } else {
            entry.started = true;
            let wake = Arc::clone(&entry.wake);
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new()
                .name(format!("stream-{}", stream.0))
                .spawn(move || serve(&shared, stream.0, &wake));
            match thread {
                Ok(thread) => state.threads.push(thread),
                Err(error) => {
                    tracing::error!(%error, "no thread for a stream");
                    let entry = state.live(stream)?;
                    entry.started = false;
                    entry.submitted -= 1;
                    entry.queue.pop_back();
                    state.queued -= 1;
                    state.queued_bytes -= bytes;
                    return Err(CuError::OUT_OF_MEMORY);
                }
            }
        }
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
        let mut state = self.shared.lock();
        loop {
            self.alive()?;
            if points.iter().all(|point| state.reached(*point)) {
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

    /// Waits for all points, for work of another scheduler: until that is to stop.
    pub fn wait_for_other(&self, points: &[Point], stopped: impl Fn() -> bool) -> Result<()> {
        /// How soon it is noticed that the other is to stop, which nothing tells.
        const LOOK: Duration = Duration::from_millis(1);
        let mut state = self.shared.lock();
        while !points.iter().all(|point| state.reached(*point)) {
            self.alive()?;
            if stopped() {
                break;
            }
            state.waiters += 1;
            (state, _) = self
                .shared
                .progressed
                .wait_timeout(state, LOOK)
                .unwrap_or_else(PoisonError::into_inner);
            state.waiters -= 1;
        }
        Ok(())
    }

    /// Stops everything that runs or waits and returns when no thread of this context is left. Calls
    /// that wait, and calls that come later, answer `error`.
    pub fn stop(&self, error: CuError) {
        self.shared.kill(error);
        let threads = std::mem::take(&mut self.shared.lock().threads);
        for thread in threads {
            // A stream's thread catches the panics of its work; it has nothing to tell.
            let _ = thread.join();
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.stop(CuError::CONTEXT_IS_DESTROYED);
    }
}

/// A stream's thread.
fn serve(shared: &Shared, id: u64, wake: &Condvar) {
    let mut state = shared.lock();
    loop {
        if shared.fault().is_some() {
            return;
        }
        let Some(stream) = state.streams.get(&id) else {
            return;
        };
        let ready = match stream.queue.front() {
            Some(front) => front.after.iter().all(|point| state.reached(*point)),
            None if stream.destroyed => {
                state.streams.remove(&id);
                return;
            }
            None => false,
        };
        let Some(stream) = state.streams.get_mut(&id) else {
            return;
        };
        if !ready {
            stream.held = !stream.queue.is_empty();
            state = wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        stream.held = false;
        let Some(front) = stream.queue.pop_front() else {
            continue;
        };
        state.queued -= 1;
        state.queued_bytes -= front.bytes;
        drop(state);
        if let Err(error) = run(front.work) {
            shared.kill(error);
            return;
        }
        state = shared.lock();
        if shared.fault().is_some() {
            return;
        }
        if let Some(stream) = state.streams.get_mut(&id) {
            stream.completed += 1;
        }
        shared.progressed(&state);
    }
}

fn run(work: Work) -> Result<()> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        tracing::error!("work on a stream panicked; the context is lost");
        Err(CuError::LAUNCH_FAILED)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Work that says its name, and work that waits until it is let go.
    struct Log {
        sender: mpsc::Sender<u32>,
        receiver: mpsc::Receiver<u32>,
    }

    impl Log {
        fn new() -> Self {
            let (sender, receiver) = mpsc::channel();
            Self { sender, receiver }
        }

        fn work(&self, name: u32) -> Work {
            let sender = self.sender.clone();
            Box::new(move || {
                sender.send(name).expect("the test listens");
                Ok(())
            })
        }

        fn names(&self) -> Vec<u32> {
            self.receiver.try_iter().collect()
        }
    }

    fn gate() -> (mpsc::Sender<()>, Work) {
        let (open, opened) = mpsc::channel();
        (
            open,
            Box::new(move || opened.recv().map_err(|_| CuError::UNKNOWN)),
        )
    }

    #[test]
    fn work_of_a_stream_runs_in_order() {
        let (scheduler, log) = (Scheduler::new(), Log::new());
        let stream = scheduler.create(true);
        for name in 0..1000 {
            scheduler.submit(stream, log.work(name)).expect("submit");
        }
        scheduler
            .wait(&scheduler.frontier(stream).expect("frontier"))
            .expect("wait");
        assert_eq!(log.names(), (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn what_can_be_queued_is_bounded() {
        let scheduler = Scheduler::new();
        let stream = scheduler.create(false);
        let (open, held) = gate();
        scheduler.submit(stream, held).expect("submit");
        let full = || scheduler.submit_with(stream, MAX_QUEUED_BYTES, Box::new(|| Ok(())));
        let small = || scheduler.submit_with(stream, 1, Box::new(|| Ok(())));
        small().expect("submit");
        assert_eq!(full(), Err(CuError::OUT_OF_MEMORY));
        let refused = (0..=MAX_QUEUED).find_map(|_| small().err());
        assert_eq!(refused, Some(CuError::OUT_OF_MEMORY));
        open.send(()).expect("open");
        scheduler.wait(&scheduler.whole_frontier()).expect("wait");
        full().expect("there is room again");
    }

    #[test]
    fn streams_that_have_threads_are_bounded() {
        let scheduler = Scheduler::new();
        let run = |_| scheduler.submit(scheduler.create(false), Box::new(|| Ok(())));
        let refused = (0..=MAX_THREADS).find_map(|number| run(number).err());
        assert_eq!(refused, Some(CuError::OUT_OF_MEMORY));
    }

    #[test]
    fn the_legacy_stream_is_a_barrier_among_blocking_streams_only() {
        let (scheduler, log) = (Scheduler::new(), Log::new());
        let (first, second) = (scheduler.create(true), scheduler.create(true));
        let free = scheduler.create(false);
        let (open, held) = gate();
        scheduler.submit(first, held).expect("submit");
        scheduler
            .submit(RawStream::LEGACY, log.work(1))
            .expect("submit");
        scheduler.submit(second, log.work(2)).expect("submit");
        let point = scheduler.submit(free, log.work(3)).expect("submit");
        scheduler.wait(&[point]).expect("wait");
        assert_eq!(log.names(), [3], "only the non-blocking stream ran");
        let legacy = scheduler.frontier(RawStream::LEGACY).expect("frontier");
        assert_eq!(scheduler.reached(&legacy), Ok(false));
        open.send(()).expect("open");
        scheduler.wait(&scheduler.whole_frontier()).expect("wait");
        assert_eq!(log.names(), [1, 2]);
    }

    #[test]
    fn two_streams_run_at_once() {
        let scheduler = Scheduler::new();
        let ((here, first), (there, second)) = (gate(), gate());
        let meet = |say: mpsc::Sender<()>, hear: Work| -> Work {
            Box::new(move || {
                say.send(()).map_err(|_| CuError::UNKNOWN)?;
                hear()
            })
        };
        scheduler
            .submit(scheduler.create(true), meet(there, first))
            .expect("submit");
        scheduler
            .submit(scheduler.create(true), meet(here, second))
            .expect("submit");
        scheduler
            .wait(&scheduler.whole_frontier())
            .expect("both met");
    }

    #[test]
    fn a_point_of_another_stream_holds_work_back() {
        let (scheduler, log) = (Scheduler::new(), Log::new());
        let (first, second) = (scheduler.create(false), scheduler.create(false));
        let (open, held) = gate();
        let point = scheduler.submit(first, held).expect("submit");
        let after = scheduler
            .submit_after(second, Some(point), log.work(1))
            .expect("submit");
        assert_eq!(scheduler.reached(&[after]), Ok(false));
        open.send(()).expect("open");
        scheduler.wait(&[after]).expect("wait");
        assert_eq!(
            (scheduler.reached(&[point]), log.names()),
            (Ok(true), vec![1])
        );
    }

    #[test]
    fn a_milestone_is_reached_while_its_work_runs() {
        let (scheduler, log) = (Scheduler::new(), Log::new());
        let (first, second) = (scheduler.create(false), scheduler.create(false));
        let milestone = scheduler.milestone();
        let point = milestone.point();
        let ((open, held), (end, waits)) = (gate(), gate());
        let work = move || {
            held()?;
            milestone.reach();
            milestone.reach();
            waits()
        };
        let last = scheduler.submit(first, Box::new(work)).expect("submit");
        let behind = scheduler.submit_after(second, Some(point), log.work(1));
        assert_eq!(scheduler.reached(&[point]), Ok(false));
        assert!(scheduler.whole_frontier().contains(&point));
        open.send(()).expect("open");
        scheduler
            .wait(&[point, behind.expect("submit")])
            .expect("wait");
        assert_eq!(
            (scheduler.reached(&[last]), log.names()),
            (Ok(false), vec![1])
        );
        end.send(()).expect("open");
        scheduler.wait(&scheduler.whole_frontier()).expect("wait");
    }

    #[test]
    fn nothing_runs_after_a_fault_and_every_call_says_so() {
        let (scheduler, log) = (Scheduler::new(), Log::new());
        let stream = scheduler.create(false);
        let (open, held) = gate();
        scheduler.submit(stream, held).expect("submit");
        let fault: Work = Box::new(|| Err(CuError::ILLEGAL_ADDRESS));
        let point = scheduler.submit(stream, fault).expect("submit");
        scheduler.submit(stream, log.work(1)).expect("submit");
        open.send(()).expect("open");
        assert_eq!(scheduler.wait(&[point]), Err(CuError::ILLEGAL_ADDRESS));
        assert_eq!(scheduler.fault(), Some(CuError::ILLEGAL_ADDRESS));
        assert!(
            scheduler.cancel().load(Ordering::Acquire),
            "running kernels are stopped"
        );
        let refused = scheduler.submit(RawStream::LEGACY, log.work(2));
        assert_eq!(refused, Err(CuError::ILLEGAL_ADDRESS));
        scheduler.stop(CuError::CONTEXT_IS_DESTROYED);
        assert_eq!(
            scheduler.fault(),
            Some(CuError::ILLEGAL_ADDRESS),
            "the first error stays"
        );
        assert!(log.names().is_empty());
    }

    #[test]
    fn work_that_panics_is_a_fault() {
        let scheduler = Scheduler::new();
        let broken: Work = Box::new(|| std::panic::resume_unwind(Box::new("broken")));
        let point = scheduler.submit(RawStream::LEGACY, broken).expect("submit");
        assert_eq!(scheduler.wait(&[point]), Err(CuError::LAUNCH_FAILED));
    }

    #[test]
    fn a_destroyed_stream_finishes_its_work_and_is_gone() {
        let (scheduler, log) = (Scheduler::new(), Log::new());
        let stream = scheduler.create(false);
        let (open, held) = gate();
        scheduler.submit(stream, held).expect("submit");
        let point = scheduler.submit(stream, log.work(1)).expect("submit");
        scheduler.destroy(stream).expect("destroy");
        assert_eq!(scheduler.destroy(stream), Err(CuError::INVALID_HANDLE));
        assert_eq!(
            scheduler.submit(stream, log.work(2)),
            Err(CuError::INVALID_HANDLE)
        );
        open.send(()).expect("open");
        scheduler.wait(&[point]).expect("wait");
        assert_eq!(log.names(), [1]);
        assert_eq!(
            scheduler.destroy(RawStream::LEGACY),
            Err(CuError::INVALID_HANDLE)
        );
    }
}
