//! Job threads, for calls that may block: one for each guest thread that makes such calls.
//!
//! A job runs on the thread of its answer slot. Its [`Finish`] runs on the executor, which alone
//! owns the session's tables, so a new object is entered before its answer becomes visible.

use std::fmt;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use wormhole_api::CuResult;
use wormhole_device::Device;
use wormhole_link::progress::{Progress, Stage};
use wormhole_link::tasks;
use wormhole_ring::layout::SLOTS;
use wormhole_ring::slot::SlotIndex;

use super::abort_on_panic::AbortOnPanic;
use super::devices::SessionDevice;
use super::session::{Event, Finish};
use super::wake::Notifier;

/// Closure that runs on a job thread. The [`Finish`] that it returns runs on the executor.
type Job = Box<dyn FnOnce(&dyn Device) -> Finish + Send>;

/// A job, with the slot and the sequence number of its answer.
struct Task {
    slot: SlotIndex,
    sequence: u64,
    device: SessionDevice,
    job: Job,
}

/// The job threads, each started at first use.
pub struct Jobs {
    notifier: Notifier<Event>,
    progress: Progress,
    /// Queue of each slot's thread. A slot has one request at a time, so a queue holds at most one
    /// job.
    threads: Vec<Option<Sender<Task>>>,
    /// Time for which a thread stays awake after a job, by yielding: requests of one guest thread
    /// come in series, and waking a thread takes longer than most of them.
    linger: Duration,
}

impl fmt::Debug for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jobs").finish_non_exhaustive()
    }
}

impl Jobs {
    pub fn new(notifier: Notifier<Event>, progress: Progress) -> Self {
        Self {
            notifier,
            progress,
            threads: (0..SLOTS).map(|_| None).collect(),
            linger: Duration::ZERO,
        }
    }

    /// Sets how long threads started from now on stay awake after a job.
    pub fn set_linger(&mut self, linger: Duration) {
        self.linger = linger;
    }

    /// Runs `job` on the calling thread, the executor.
    pub fn run_here(
        &self,
        device: &SessionDevice,
        slot: SlotIndex,
        sequence: u64,
        job: impl FnOnce(&dyn Device) -> Finish,
    ) {
        finished(&self.notifier, slot, sequence, job(&**device));
    }

    /// Runs `job` on the thread of `slot`, with its device.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` when the thread cannot be started.
    pub fn run(
        &mut self,
        device: SessionDevice,
        slot: SlotIndex,
        sequence: u64,
        job: impl FnOnce(&dyn Device) -> Finish + Send + 'static,
    ) -> Result<(), CuResult> {
        let index = usize::from(slot.get());
        let place = &mut self.threads[index];
        let sender = match place {
            Some(sender) => sender,
            None => place.insert(start(index, &self.notifier, &self.progress, self.linger)?),
        };
        let task = Task {
            slot,
            sequence,
            device,
            job: Box::new(job),
        };
        sender.send(task).map_err(|_| CuResult::UNKNOWN)
    }
}

fn finished(notifier: &Notifier<Event>, slot: SlotIndex, sequence: u64, finish: Finish) {
    notifier.send(Event::Finished {
        slot,
        sequence,
        finish,
    });
}

fn start(
    index: usize,
    notifier: &Notifier<Event>,
    progress: &Progress,
    linger: Duration,
) -> Result<Sender<Task>, CuResult> {
    let (sender, receiver) = channel::<Task>();
    let (notifier, progress) = (notifier.clone(), progress.clone());
    let body = move || {
        let _abort_on_panic = AbortOnPanic;
        while let Some(task) = next(&receiver, linger) {
            progress.job(task.slot, Stage::Running);
            let finish = (task.job)(&*task.device);
            progress.job(task.slot, Stage::Done);
            finished(&notifier, task.slot, task.sequence, finish);
        }
    };
    std::thread::Builder::new()
        .name(format!("slot {index}"))
        .spawn(body)
        .map_err(|error| {
            let error = tasks::named(error);
            tracing::warn!("no thread can be made for slot {index}: {error}");
            CuResult::OPERATING_SYSTEM
        })?;
    Ok(sender)
}

/// Number of looks for the next job before the thread yields: some 2 µs, the time of a guest thread from an answer to its
/// next request. A yield takes a good part of that.
const SPINS: u32 = 50;

/// Receives the next job. Returns `None` when the sender is gone.
fn next(receiver: &Receiver<Task>, linger: Duration) -> Option<Task> {
    if !linger.is_zero() {
        for _ in 0..SPINS {
            match receiver.try_recv() {
                Ok(task) => return Some(task),
                Err(TryRecvError::Empty) => std::hint::spin_loop(),
                Err(TryRecvError::Disconnected) => return None,
            }
        }
        let end = Instant::now() + linger;
        while Instant::now() < end {
            match receiver.try_recv() {
                Ok(task) => return Some(task),
                Err(TryRecvError::Empty) => std::thread::yield_now(),
                Err(TryRecvError::Disconnected) => return None,
            }
        }
    }
    receiver.recv().ok()
}
