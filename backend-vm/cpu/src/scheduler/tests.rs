//! Tests of the scheduler.

use std::sync::mpsc;

use wormhole_device::{MAX_KERNELS, STREAM_THREADS};

use super::*;

/// Creates work that reports its name, and work that waits until it is released.
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
        Work::new(move || {
            sender.send(name).expect("the test listens");
            Ok(())
        })
    }

    fn names(&self) -> Vec<u32> {
        self.receiver.try_iter().collect()
    }
}

fn latch() -> (mpsc::Sender<()>, impl FnOnce() -> Result<()>) {
    let (open, opened) = mpsc::channel();
    (open, move || opened.recv().map_err(|_| CuError::UNKNOWN))
}

fn gate() -> (mpsc::Sender<()>, Work) {
    let (open, held) = latch();
    (open, Work::kernel(held))
}

/// Number of streams that a program may plausibly have.
const MANY: u32 = 10_000;

fn threads(scheduler: &Scheduler) -> usize {
    scheduler.shared.state.lock().threads.len()
}

fn wait_for_all(scheduler: &Scheduler) {
    scheduler.wait(&scheduler.whole_frontier()).expect("wait");
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
    let full = || scheduler.submit_with(stream, MAX_QUEUED_BYTES, Work::nothing());
    let small = || scheduler.submit_with(stream, 1, Work::nothing());
    small().expect("submit");
    assert_eq!(full(), Err(CuError::OUT_OF_MEMORY));
    let refused = (0..=MAX_QUEUED).find_map(|_| small().err());
    assert_eq!(refused, Some(CuError::OUT_OF_MEMORY));
    open.send(()).expect("open");
    scheduler.wait(&scheduler.whole_frontier()).expect("wait");
    full().expect("there is room again");
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
    let ((here, first), (there, second)) = (latch(), latch());
    let meet = |say: mpsc::Sender<()>, hear: Box<dyn FnOnce() -> Result<()> + Send>| {
        Work::kernel(move || {
            say.send(()).map_err(|_| CuError::UNKNOWN)?;
            hear()
        })
    };
    for work in [meet(there, Box::new(first)), meet(here, Box::new(second))] {
        let stream = scheduler.create(true);
        scheduler.submit(stream, work).expect("submit");
    }
    wait_for_all(&scheduler);
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
    let ((open, held), (end, waits)) = (latch(), latch());
    let work = move || {
        held()?;
        milestone.reach();
        milestone.reach();
        waits()
    };
    let last = scheduler.submit(first, Work::kernel(work)).expect("submit");
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
    let fault = Work::new(|| Err(CuError::ILLEGAL_ADDRESS));
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
    let broken = Work::new(|| std::panic::resume_unwind(Box::new("broken")));
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

#[test]
fn streams_that_wait_have_no_threads() {
    let (scheduler, log) = (Scheduler::new(), Log::new());
    let open = Arc::new(AtomicBool::new(false));
    for name in 0..MANY {
        let stream = scheduler.create(true);
        let open = Arc::clone(&open);
        let wait = Work::when(move || open.load(Ordering::Acquire));
        scheduler.submit(stream, wait).expect("submit");
        scheduler.submit(stream, log.work(name)).expect("submit");
        scheduler.destroy(stream).expect("destroy");
    }
    let free = scheduler.create(false);
    let point = scheduler.submit(free, log.work(MANY)).expect("submit");
    scheduler.wait(&[point]).expect("wait");
    assert_eq!(log.names(), [MANY], "the others wait");
    open.store(true, Ordering::Release);
    wait_for_all(&scheduler);
    let mut names = log.names();
    names.sort_unstable();
    assert_eq!(names, (0..MANY).collect::<Vec<_>>());
    assert!(threads(&scheduler) <= STREAM_THREADS);
    let state = scheduler.shared.state.lock();
    assert_eq!((state.queued, state.queued_bytes), (0, 0));
    assert_eq!(state.streams.len(), 2, "destroyed streams are gone");
}

#[test]
fn kernels_that_wait_for_each_other_run_at_once_and_copies_beside_them() {
    let scheduler = Scheduler::new();
    let all_run = Arc::new(std::sync::Barrier::new(MAX_KERNELS));
    let copied = Arc::new(AtomicBool::new(false));
    for _ in 0..MAX_KERNELS {
        let (all_run, copied) = (Arc::clone(&all_run), Arc::clone(&copied));
        let spin = move || {
            all_run.wait();
            while !copied.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            Ok(())
        };
        let stream = scheduler.create(false);
        let work = Work::kernel(spin);
        scheduler.submit(stream, work).expect("submit");
    }
    let behind = Arc::clone(&copied);
    let one_more = Work::kernel(move || match behind.load(Ordering::Acquire) {
        true => Ok(()),
        false => Err(CuError::UNKNOWN),
    });
    let stream = scheduler.create(false);
    scheduler.submit(stream, one_more).expect("submit");
    let copy = Work::new(move || {
        copied.store(true, Ordering::Release);
        Ok(())
    });
    let stream = scheduler.create(false);
    scheduler.submit(stream, copy).expect("submit");
    wait_for_all(&scheduler);
}

#[test]
fn a_condition_that_is_no_longer_true_does_not_hold_work_twice() {
    let (scheduler, log) = (Scheduler::new(), Log::new());
    let looks = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&looks);
    // True only once, at a poll of the watcher.
    let pulse = move || seen.fetch_add(1, Ordering::Relaxed) == 1000;
    let stream = scheduler.create(false);
    scheduler.submit(stream, Work::when(pulse)).expect("submit");
    scheduler.submit(stream, log.work(1)).expect("submit");
    wait_for_all(&scheduler);
    assert_eq!(log.names(), [1]);
    assert_eq!(looks.load(Ordering::Relaxed), 1001);
}

#[test]
fn work_begins_other_work_and_goes_on_behind_it() {
    let (scheduler, log) = (Scheduler::new(), Log::new());
    let (open, held) = gate();
    let mut parts = Some([held, log.work(1)]);
    let last = log.work(2);
    let mut last = Some(last);
    let work = Work::of_steps(move |turn| {
        if let Some(parts) = parts.take() {
            let points = parts.map(|part| turn.begin(part));
            return Ok(Outcome::After(points.into_iter().collect::<Result<_>>()?));
        }
        if !turn.may_run_kernels() {
            return Ok(Outcome::Kernel);
        }
        last.take()
            .map_or(Ok(()), |last| turn.begin(last).map(drop))?;
        Ok(Outcome::Complete)
    });
    let stream = scheduler.create(false);
    let point = scheduler.submit(stream, work).expect("submit");
    assert_eq!(log.receiver.recv(), Ok(1));
    assert_eq!(scheduler.reached(&[point]), Ok(false));
    open.send(()).expect("open");
    wait_for_all(&scheduler);
    assert_eq!(scheduler.reached(&[point]), Ok(true));
    assert_eq!(log.receiver.recv(), Ok(2));
}

#[test]
fn a_context_that_ends_lets_go_of_all_that_waits() {
    let scheduler = Scheduler::new();
    let held = Arc::new(());
    let (_open, gate) = latch();
    let running = Arc::clone(&held);
    let cancel = scheduler.cancel();
    let (says, begun) = mpsc::channel();
    let kernel = Work::kernel(move || {
        let _held = running;
        says.send(()).map_err(|_| CuError::UNKNOWN)?;
        while !cancel.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        Ok(())
    });
    let stream = scheduler.create(false);
    scheduler.submit(stream, kernel).expect("submit");
    let mut waits = Vec::new();
    for _ in 0..100 {
        let (held, looked) = (Arc::clone(&held), Arc::new(AtomicBool::new(false)));
        waits.push(Arc::clone(&looked));
        let stream = scheduler.create(false);
        let wait = Work::when(move || {
            looked.store(true, Ordering::Release);
            Arc::strong_count(&held) == 0
        });
        scheduler.submit(stream, wait).expect("submit");
    }
    let behind = Arc::clone(&held);
    let gate = Work::new(move || {
        let _held = behind;
        gate()
    });
    scheduler.submit(stream, gate).expect("submit");
    begun.recv().expect("the kernel runs");
    while !waits.iter().all(|looked| looked.load(Ordering::Acquire)) {
        std::thread::yield_now();
    }
    scheduler.stop(CuError::CONTEXT_IS_DESTROYED);
    assert_eq!(Arc::strong_count(&held), 1);
}

#[test]
fn a_description_names_the_point_that_a_stream_waits_for() {
    let scheduler = Scheduler::new();
    let (open, held) = gate();
    let (busy, waiting) = (scheduler.create(false), scheduler.create(false));
    let point = scheduler.submit(busy, held).expect("submit");
    let after = Work::new(|| Ok(()));
    scheduler
        .submit_after(waiting, [point], after)
        .expect("submit");
    // A thread takes the work a little later.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let runs = format!(
        "stream {}: 0 of 1 pieces of work are complete; its front runs",
        busy.0
    );
    let lines = loop {
        let lines = scheduler.describe();
        if lines.contains(&runs) {
            break lines;
        }
        assert!(std::time::Instant::now() < end, "{lines:?}");
        std::thread::yield_now();
    };
    assert!(lines[0].starts_with("2 streams have work; "), "{lines:?}");
    let waits = format!(
        "stream {}: 0 of 1 pieces of work are complete; its front waits for stream {} to complete 1 pieces, which has \
         completed 0",
        waiting.0, busy.0
    );
    assert!(lines.contains(&waits), "{lines:?}");
    open.send(()).expect("the work waits");
    wait_for_all(&scheduler);
    assert!(scheduler.describe()[0].starts_with("0 streams have work"));
}
