//! Service of the executor for the guest's waiting threads: it wakes those that sleep, and publishes its
//! processor.

use rustix::thread::sched_getcpu;
use wormhole_ring::status::{Executor, Status};
use wormhole_ring::waits::Waits;

/// Number of records from one look to the next.
const RECORDS: u32 = 16;
/// Number of looks of an idle executor, some 100 ns each, from one question for the processor to the next: a record that
/// comes meanwhile has to wait for the answer.
const LOOKS: u32 = 8;

/// Executor's view of the guest's waiting threads.
#[derive(Debug)]
pub struct Sleepers {
    waits: Waits,
    /// Facts that the guest's threads can read.
    published: Executor,
    records: u32,
    looks: u32,
}

impl Sleepers {
    pub fn new(waits: Waits, device_is_apart: bool) -> Self {
        let published = Executor {
            processor: None,
            device_is_apart,
        };
        Self {
            waits,
            published,
            records: 0,
            looks: 0,
        }
    }

    /// Looks at each [`RECORDS`]th record, for an executor that is never idle.
    #[inline]
    pub fn executes(&mut self, status: &Status) {
        self.records = self.records.wrapping_add(1);
        if self.records.is_multiple_of(RECORDS) {
            self.wake();
            self.tell_processor(status);
        }
    }

    /// Wakes the threads whose waits are over, and tells the guest when this thread has moved to another
    /// processor. The executor looks again and again, so it needs no order against a thread that is about
    /// to sleep.
    #[inline]
    pub fn look(&mut self, status: &Status) {
        self.wake();
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(LOOKS) {
            self.tell_processor(status);
        }
    }

    fn wake(&self) {
        if self.waits.wake() {
            // A woken thread may have to run on this processor.
            std::thread::yield_now();
        }
    }

    fn tell_processor(&mut self, status: &Status) {
        let processor = u32::try_from(sched_getcpu()).ok();
        if processor != self.published.processor {
            self.published.processor = processor;
            status.set_executor(self.published);
        }
    }

    /// Looks for the last time before the executor sleeps.
    pub fn last_look(&self) {
        self.waits.fence_before_look();
        self.waits.wake();
    }
}
