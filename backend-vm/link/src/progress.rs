//! Current progress of a worker, in the page behind its counts.
//!
//! Threads of the worker write it with relaxed stores, each its own words. Only the supervisor reads it, for a dump of
//! all waits; a hostile worker may have written any numbers. It holds no clock: two snapshots are compared, and a number that has
//! not moved between them belongs to a wait.

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use wormhole_ring::layout::SLOTS;
use wormhole_ring::slot::SlotIndex;

use crate::counters::{Counter, Counts};

/// Words of the page.
pub const WORDS: usize = 512;

/// Id of the message that the executor executes, plus 1; 0 between messages.
const EXECUTING: usize = 0;
/// 1 while the executor sleeps.
const PARKED: usize = 1;
/// Number of tasks submitted to the registrar, and of tasks that it has done.
const TASKS: usize = 16;
const TASKS_DONE: usize = 17;
/// Four words: the number of streams whose fence the watcher awaits, and the first one's fence, awaited value and
/// current value.
const FENCES: usize = 32;
/// Requests by answer slot: the message's id, and from bit [`STAGE`] on its stage; 0 without a request.
const REQUESTS: usize = 64;
const STAGE: u32 = 32;

const _: () = assert!(REQUESTS + SLOTS <= WORDS);

/// Stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// The executor has taken the request from the ring.
    Taken = 1,
    /// A thread executes its job.
    Running = 2,
    /// The job is done, but not answered yet.
    Done = 3,
}

/// The worker's side: the page, mapped until the process ends.
#[derive(Clone, Debug)]
pub struct Progress {
    page: NonNull<AtomicU64>,
}

// SAFETY: the page is accessed through atomics only.
unsafe impl Send for Progress {}
// SAFETY: as above.
unsafe impl Sync for Progress {}

impl Progress {
    /// # Safety
    /// `page` is aligned to a page, and [`WORDS`] words from there are mapped, readable and writable, until the process
    /// ends.
    pub(crate) unsafe fn new(page: NonNull<AtomicU64>) -> Self {
        Self { page }
    }

    /// Notes that the executor begins a message, which may have a slot for its answer.
    #[inline]
    pub fn begin(&self, message: u16, slot: Option<SlotIndex>) {
        self.set(EXECUTING, u64::from(message) + 1);
        if let Some(slot) = slot {
            self.request(slot, message, Stage::Taken);
        }
    }

    /// Notes that the executor has finished the message.
    #[inline]
    pub fn end(&self) {
        self.set(EXECUTING, 0);
    }

    /// Notes that the request of a slot is answered.
    #[inline]
    pub fn answered(&self, slot: SlotIndex) {
        self.set(REQUESTS + usize::from(slot.get()), 0);
    }

    /// Sets the stage of a slot's request. Called by the job's thread.
    pub fn job(&self, slot: SlotIndex, stage: Stage) {
        let word = self.word(REQUESTS + usize::from(slot.get()));
        let message = word.load(Ordering::Relaxed) & ((1 << STAGE) - 1);
        word.store(u64::from(stage as u8) << STAGE | message, Ordering::Relaxed);
    }

    /// Notes whether the executor sleeps.
    pub fn park(&self, parked: bool) {
        self.set(PARKED, parked.into());
    }

    /// Counts a task submitted to the registrar. Any thread may call it.
    pub fn add_task(&self) {
        self.word(TASKS).fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a task that the registrar has done.
    pub fn end_task(&self) {
        self.word(TASKS_DONE).fetch_add(1, Ordering::Relaxed);
    }

    /// Sets the number of streams whose fence is not written yet. `first` is a fence with its awaited and its current
    /// value.
    pub fn await_fences(&self, streams: usize, first: Option<(u32, u64, u64)>) {
        let (fence, wanted, value) = first.unwrap_or_default();
        let words = [streams as u64, fence.into(), wanted, value];
        for (index, word) in (FENCES..).zip(words) {
            self.set(index, word);
        }
    }

    #[inline]
    fn request(&self, slot: SlotIndex, message: u16, stage: Stage) {
        let word = u64::from(stage as u8) << STAGE | u64::from(message);
        self.set(REQUESTS + usize::from(slot.get()), word);
    }

    #[inline]
    fn set(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Relaxed);
    }

    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < WORDS);
        // SAFETY: inside the page, which is mapped for the life of the process.
        unsafe { self.page.add(index).as_ref() }
    }
}

/// A copy of the page and of the counts, for people to read.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub words: Vec<u64>,
    pub counts: Counts,
}

impl Snapshot {
    fn word(&self, index: usize) -> u64 {
        self.words.get(index).copied().unwrap_or(0)
    }

    /// Returns the number of messages taken from the ring.
    pub fn taken(&self) -> u64 {
        let records = self.counts.get(Counter::Records);
        records.wrapping_add(self.counts.get(Counter::Requests))
    }

    /// Returns true if the worker has made no progress since `before`.
    pub fn is_as(&self, before: &Self) -> bool {
        self.words == before.words && self.taken() == before.taken()
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} messages taken, executor ", self.taken())?;
        match (self.word(EXECUTING), self.word(PARKED)) {
            (0, 0) => f.write_str("looks for work")?,
            (0, _) => f.write_str("sleeps")?,
            (message, _) => write!(f, "executes {}", name(message.wrapping_sub(1)))?,
        }
        for slot in 0..SLOTS {
            let word = self.word(REQUESTS + slot);
            if word == 0 {
                continue;
            }
            let stage = match word >> STAGE {
                2 => "runs as a job",
                3 => "is done and not answered",
                _ => "was taken",
            };
            write!(
                f,
                "; slot {slot}: {} {stage}",
                name(word & ((1 << STAGE) - 1))
            )?;
        }
        let tasks = self.word(TASKS).wrapping_sub(self.word(TASKS_DONE));
        if tasks > 0 {
            write!(f, "; registrar: {tasks} tasks left")?;
        }
        if self.word(FENCES) > 0 {
            write!(
                f,
                "; fences awaited behind {} streams, fence {} to become {} and is {}",
                self.word(FENCES),
                self.word(FENCES + 1),
                self.word(FENCES + 2),
                self.word(FENCES + 3)
            )?;
        }
        Ok(())
    }
}

/// Returns a message's name, or its id if this build's table does not contain it.
fn name(id: u64) -> String {
    let known = wormhole_api::MESSAGES
        .iter()
        .find(|info| u64::from(info.id) == id);
    known.map_or_else(|| format!("message {id}"), |info| info.name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::tests::page;

    #[test]
    fn a_request_is_seen_until_it_is_answered() {
        let (file, counters) = page();
        let progress = counters.progress();
        let info = &wormhole_api::MESSAGES[0];
        let slot = SlotIndex::new(7).unwrap();
        let said = || file.snapshot().to_string();
        progress.begin(info.id, Some(slot));
        assert!(
            said().contains(&format!("executes {}", info.name)),
            "{}",
            said()
        );
        assert!(said().contains(&format!("slot 7: {} was taken", info.name)));
        progress.end();
        progress.job(slot, Stage::Running);
        assert!(said().contains("runs as a job"));
        let before = file.snapshot();
        assert!(file.snapshot().is_as(&before));
        progress.job(slot, Stage::Done);
        assert!(!file.snapshot().is_as(&before));
        assert!(said().contains(&format!("slot 7: {} is done and not answered", info.name)));
        progress.answered(slot);
        assert!(!said().contains("slot"), "{}", said());
    }

    #[test]
    fn whatever_a_worker_writes_can_be_said() {
        let words = vec![u64::MAX; WORDS];
        let snapshot = Snapshot {
            words,
            counts: Counts::default(),
        };
        assert!(
            snapshot.to_string().contains("sleeps") || snapshot.to_string().contains("executes")
        );
    }
}
