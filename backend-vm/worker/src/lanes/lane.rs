//! One lane: its thread, and the queue to it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{JoinHandle, sleep, yield_now};
use std::time::Duration;

use wormhole_device::{CuError, Launch, RawStream};
use wormhole_ring::layout::MAX_RECORD;
use wormhole_ring::queue::{Gauge, Reader, Writer, queue};
use wormhole_ring::status::EndCause;
use wormhole_ring::wait::{Backoff, Policy, Step};

use super::{Shared, entry};
use crate::abort_on_panic::AbortOnPanic;
use crate::session::Event;
use crate::wake::Notifier;
use crate::watcher::publish_death;

/// Words of a queue: 1,900 launches with ten arguments, and several of the longest ones. A guest has fewer than 800
/// launches under way on each stream.
const WORDS: usize = 32 << 10;
/// More words than a record has, with those that an entry adds.
const LONGEST: usize = MAX_RECORD / 8 + 64;
const _: () = assert!(LONGEST * 2 < WORDS);

/// A lane without calls spins for some 20 µs and yields for as long before it sleeps.
const IDLE: Policy = Policy {
    spins: 400,
    yields: 100,
    first_sleep: Duration::ZERO,
    part: 1,
    longest_sleep: Duration::ZERO,
};

/// The executor waits for a lane as for a call of the driver; one that takes long costs no processor.
const WAIT: Policy = Policy {
    spins: 1000,
    yields: 1000,
    first_sleep: Duration::from_micros(20),
    part: 128,
    longest_sleep: Duration::from_millis(1),
};

/// Executor's side of a lane.
#[derive(Debug)]
pub(super) struct Lane {
    writer: Writer,
    /// The thread, until the lane has ended.
    thread: Option<JoinHandle<()>>,
    /// Place behind the last call on a blocking stream.
    pub blocking: u64,
    /// Number of streams that got this lane in this round.
    pub streams: u32,
}

impl Lane {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        number: usize,
        shared: &Arc<Shared>,
        notifier: &Notifier<Event>,
    ) -> io::Result<Self> {
        let (writer, reader) = queue(WORDS);
        let (shared, notifier) = (Arc::clone(shared), notifier.clone());
        let thread = std::thread::Builder::new()
            .name(format!("lane {number}"))
            .spawn(move || {
                let _abort_on_panic = AbortOnPanic;
                serve(reader, &shared, &notifier);
            })?;
        Ok(Self {
            writer,
            thread: Some(thread),
            blocking: 0,
            streams: 0,
        })
    }

    pub fn gauge(&self) -> Gauge {
        self.writer.gauge()
    }

    /// Returns the place behind the last call.
    #[inline]
    pub fn tail(&self) -> u64 {
        self.writer.tail()
    }

    /// Returns whether the calls before a place are made.
    #[inline]
    pub fn has_done(&mut self, place: u64) -> bool {
        self.writer.has_done(place)
    }

    /// Waits until the calls before a place are made. Returns whether one was not.
    #[inline]
    pub fn wait(&mut self, place: u64) -> bool {
        let waits = !self.has_done(place);
        if waits {
            self.wait_until(|writer| writer.has_done(place));
        }
        waits
    }

    /// Waits until a call of so many words has room.
    #[inline]
    pub fn wait_for_room(&mut self, words: usize) {
        if !self.writer.has_room(words) {
            self.wait_until(|writer| writer.has_room(words));
        }
    }

    #[cold]
    fn wait_until(&mut self, is_over: impl Fn(&mut Writer) -> bool) {
        let mut backoff = Backoff::with(WAIT);
        while !is_over(&mut self.writer) {
            match backoff.step() {
                Step::Spun => {}
                Step::Yield => yield_now(),
                Step::Sleep(interval) => sleep(interval),
            }
        }
    }

    /// Hands over a launch that has room.
    #[inline]
    pub fn push_launch(&mut self, device: usize, launch: &Launch<'_>) {
        let mut entry = self.writer.begin(entry::launch_words(launch));
        entry::write_launch(&mut entry, device, launch);
        if entry.publish() {
            self.wake();
        }
    }

    /// Hands over a fence that has room.
    #[inline]
    pub fn push_fence(&mut self, device: usize, stream: RawStream, address: u64, value: u64) {
        let mut entry = self.writer.begin(entry::FENCE_WORDS);
        entry::write_fence(&mut entry, device, stream, address, value);
        if entry.publish() {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Waits until the thread has ended. The calls that are left are not made.
    pub fn end(&mut self) {
        self.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has ended the process.
            let _ = thread.join();
        }
    }
}

fn serve(mut reader: Reader, shared: &Shared, notifier: &Notifier<Event>) {
    let mut words = Vec::with_capacity(LONGEST);
    let mut backoff = Backoff::with(IDLE);
    let mut has_failed = false;
    while !shared.stop.load(Ordering::Acquire) {
        if reader.next(&mut words) {
            // Once the status is set, the calls that are left would all say the same of a dead context.
            if let Some((device, call)) = entry::read(&words)
                && let Err(error) = call.make(&*shared.devices[device])
                && !std::mem::replace(&mut has_failed, true)
            {
                failed(call.name(), error, shared, notifier);
            }
            reader.done();
            backoff.reset();
            continue;
        }
        match backoff.step() {
            Step::Spun => {}
            Step::Yield => yield_now(),
            Step::Sleep(_) => {
                if reader.announce_sleep() {
                    std::thread::park();
                    reader.awake();
                }
                backoff.reset();
            }
        }
    }
}

/// Handles the lane's first failure as the executor handles one that no answer carries, before the lane's next call: a fence behind
/// the call is never written before the status word.
#[cold]
fn failed(name: &str, error: CuError, shared: &Shared, notifier: &Notifier<Event>) {
    if let Some(sticky) = shared.devices.fault() {
        publish_death(&shared.status, sticky);
    }
    tracing::warn!("{name} failed with {}, and no answer carries it", error.0);
    let cause = EndCause::of_device(error.0);
    shared.status.set_once(error.0, cause);
    notifier.send(Event::LaneFailed);
}
