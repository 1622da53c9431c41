//! Threads that run the work of all streams.
//!
//! A thread takes the stream that has been ready for longest, runs one step of its work and looks for the next one.
//! Threads are started when work is ready and none is free, at most [`STREAM_THREADS`]. Waiting work has no thread: the
//! scheduler makes its stream ready when a point is reached, and one more thread, the watcher, polls conditions without a
//! notification.

use std::mem::take;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use wormhole_device::{CuError, MAX_KERNELS, STREAM_THREADS};
use wormhole_lock::Condvar;

use super::work::{Condition, Outcome, Turn};
use super::{Queued, Shared, State};

/// Number of checks of a condition before it is passed to the watcher.
const YIELDS: u32 = 200;
/// Most threads that do these checks at the same time.
const MAX_LOOKING: usize = 2;
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// A sleeping thread. It is called under the scheduler's lock.
#[derive(Default)]
pub(super) struct Sleeper {
    called: AtomicBool,
    wake: Condvar,
}

impl Sleeper {
    pub(super) fn call(&self) {
        self.called.store(true, Ordering::Relaxed);
        self.wake.notify_one();
    }
}

/// A stream whose work waits for a condition.
pub(super) struct Watched {
    stream: u64,
    condition: Condition,
}

impl State {
    /// Takes a stream whose front is ready. Returns it and whether the front is a kernel, which is then counted as
    /// running.
    fn take_ready(&mut self) -> Option<(u64, bool)> {
        if let Some(stream) = self.ready.pop_front() {
            return Some((stream, false));
        }
        if self.kernels >= MAX_KERNELS {
            return None;
        }
        let stream = self.ready_kernels.pop_front()?;
        self.kernels += 1;
        Some((stream, true))
    }

    fn takeable(&self) -> usize {
        let kernels = MAX_KERNELS.saturating_sub(self.kernels);
        self.ready.len() + self.ready_kernels.len().min(kernels)
    }
}

impl Shared {
    /// Wakes or starts threads for all ready work.
    pub(super) fn staff(self: &Arc<Self>, state: &mut State) {
        while state.takeable() > state.called + state.starting && self.fault().is_none() {
            if let Some(sleeper) = state.idle.pop() {
                state.called += 1;
                sleeper.call();
            } else if !self.hire(state) {
                return;
            }
        }
    }

    /// Starts a thread. Returns false if the limit is reached or the system refuses.
    pub(super) fn hire(self: &Arc<Self>, state: &mut State) -> bool {
        if state.threads.len() >= STREAM_THREADS {
            return false;
        }
        let shared = Arc::clone(self);
        let started = Builder::new()
            .name("streams".to_owned())
            .spawn(move || serve(&shared));
        match started {
            Ok(thread) => {
                state.threads.push(thread);
                state.starting += 1;
                true
            }
            Err(error) => {
                if !take(&mut state.may_complain) {
                    return false;
                }
                let threads = state.threads.len();
                tracing::warn!(%error, threads, "no further thread can be had for streams");
                false
            }
        }
    }

    /// Passes a stream whose work waits for a condition to the watcher.
    fn park(self: &Arc<Self>, state: &mut State, stream: u64, condition: Condition) {
        if state.watcher.is_none() {
            let shared = Arc::clone(self);
            state.watcher = Builder::new()
                .name("stream-watcher".to_owned())
                .spawn(move || watch(&shared))
                .ok();
        }
        if state.watcher.is_some() {
            state.watched.push(Watched { stream, condition });
            self.parked.notify_one();
        } else {
            // Without a watcher the other threads poll the condition in turn.
            state.arrange(stream);
        }
    }
}

/// State of work after a step.
enum Rest {
    /// The work is complete; it held this many bytes.
    Complete(usize),
    More(Queued),
    Waits(Queued, Condition),
    Failed(CuError),
}

/// Runs steps of ready work until the context dies. The main function of a thread.
fn serve(shared: &Arc<Shared>) {
    let sleeper = Arc::new(Sleeper::default());
    let mut state = shared.state.lock();
    state.starting -= 1;
    while shared.fault().is_none() {
        let Some((stream, kernel)) = state.take_ready() else {
            state.idle.push(Arc::clone(&sleeper));
            while !sleeper.called.swap(false, Ordering::Relaxed) {
                state = sleeper.wake.wait(state);
            }
            state.called = state.called.saturating_sub(1);
            continue;
        };
        shared.staff(&mut state);
        let front = state.streams.get_mut(&stream);
        let Some(front) = front.and_then(|stream| stream.queue.pop_front()) else {
            state.kernels -= usize::from(kernel);
            continue;
        };
        drop(state);
        let rest = step(shared, front, kernel);
        if let Rest::Failed(error) = rest {
            return shared.kill(error);
        }
        state = shared.state.lock();
        state.kernels -= usize::from(kernel);
        if shared.fault().is_none() {
            shared.apply(&mut state, stream, rest);
        }
    }
}

fn step(shared: &Arc<Shared>, mut front: Queued, kernel: bool) -> Rest {
    let turn = Turn { shared, kernel };
    let work = &mut front.work;
    let result = catch_unwind(AssertUnwindSafe(|| (work.step)(&turn))).unwrap_or_else(|_| {
        tracing::error!("work on a stream panicked; the context is lost");
        Err(CuError::LAUNCH_FAILED)
    });
    front.work.kernel = matches!(result, Ok(Outcome::Kernel));
    match result {
        Ok(Outcome::Complete) => Rest::Complete(front.bytes),
        Ok(Outcome::Kernel) => Rest::More(front),
        Ok(Outcome::After(points)) => {
            front.after = points;
            Rest::More(front)
        }
        Ok(Outcome::When(mut condition)) => {
            if is_true_soon(shared, &mut condition) {
                Rest::More(front)
            } else {
                Rest::Waits(front, condition)
            }
        }
        Err(error) => Rest::Failed(error),
    }
}

impl Shared {
    /// Applies the result of a step of a stream's front.
    fn apply(self: &Arc<Self>, state: &mut State, stream: u64, rest: Rest) {
        let put_back = |state: &mut State, front| {
            if let Some(stream) = state.streams.get_mut(&stream) {
                stream.queue.push_front(front);
            }
        };
        match rest {
            Rest::Complete(bytes) => {
                state.queued -= 1;
                state.queued_bytes -= bytes;
                state.complete(stream);
                self.wake_hosts(state);
            }
            Rest::More(front) => {
                put_back(state, front);
                state.arrange(stream);
            }
            Rest::Waits(front, condition) => {
                put_back(state, front);
                self.park(state, stream, condition);
            }
            Rest::Failed(_) => {}
        }
    }
}

/// Polls a condition for a short while, because the watcher is slower to notice.
fn is_true_soon(shared: &Shared, condition: &mut Condition) -> bool {
    if condition() {
        return true;
    }
    let alone = shared.looking.fetch_add(1, Ordering::Relaxed) < MAX_LOOKING;
    let yields = if alone { YIELDS } else { 0 };
    let found = (0..yields).any(|_| {
        thread::yield_now();
        condition()
    });
    shared.looking.fetch_sub(1, Ordering::Relaxed);
    found
}

/// Polls new conditions at once, and all of them after pauses. The main function of the watcher.
fn watch(shared: &Arc<Shared>) {
    let mut watched: Vec<Watched> = Vec::new();
    let mut pause = FIRST_PAUSE;
    let mut round = Instant::now();
    let mut state = shared.state.lock();
    while shared.fault().is_none() {
        let known = watched.len();
        watched.append(&mut state.watched);
        let now = Instant::now();
        let new_only = now < round;
        if known == watched.len() && (new_only || known == 0) {
            state = if known == 0 {
                shared.parked.wait(state)
            } else {
                shared.parked.wait_timeout(state, round - now)
            };
            continue;
        }
        drop(state);
        let mut ready = Vec::new();
        let from = if new_only { known } else { 0 };
        let found = watched.extract_if(from.., |watched| (watched.condition)());
        ready.extend(found.map(|watched| watched.stream));
        let moved = watched.len() != known || !ready.is_empty();
        if !new_only {
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        if moved {
            pause = FIRST_PAUSE;
        }
        if !new_only || moved {
            round = Instant::now() + pause;
        }
        state = shared.state.lock();
        if shared.fault().is_none() {
            for stream in ready {
                state.arrange(stream);
            }
            shared.staff(&mut state);
        }
    }
}
