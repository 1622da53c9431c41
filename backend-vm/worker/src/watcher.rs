//! Watcher: detects a dead context while a guest may be waiting for a fence.
//!
//! A fence announces success only: after a fault it is never written. So while fences are
//! outstanding this thread looks at them, after 100 µs and then at intervals that grow to 1 ms. If
//! one stands still from one look to the next, it queries the device's state, and publishes a dead
//! context in the session's status word, which ends every wait. Where fences move, the context is
//! alive, and a query would only delay the executor's calls.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use wormhole_api::CuResult;
use wormhole_device::RawStream;
use wormhole_link::progress::Progress;
use wormhole_lock::Mutex;
use wormhole_ring::fence::{FenceIndex, Fences};
use wormhole_ring::status::{EndCause, Status};
use wormhole_ring::waits::Waits;

use super::abort_on_panic::AbortOnPanic;
use super::devices::Devices;
use super::objects::StreamObject;

const FIRST_INTERVAL: Duration = Duration::from_micros(100);
const LONGEST_INTERVAL: Duration = Duration::from_millis(1);
/// Time without outstanding fences after which the thread sleeps until it is unparked.
const LINGER: Duration = Duration::from_millis(20);

/// Number of a device, and the device's handle of the stream.
type Key = (usize, RawStream);

fn key(stream: &StreamObject) -> Key {
    (stream.device.number(), stream.raw)
}

#[derive(Debug)]
struct Shared {
    /// Streams that exist. Locked when one is added or removed, and while the thread goes through
    /// them. A fence is recorded in its stream, without the lock.
    streams: Mutex<HashMap<Key, Arc<StreamObject>>>,
    /// Whether a fence was requested since the last check.
    expecting: AtomicBool,
    /// Whether a fence was outstanding at the last check. True during a check.
    outstanding: AtomicBool,
    asleep: AtomicBool,
    /// Incremented when the device's context is replaced.
    context: AtomicU64,
    /// Number of pauses. No check may run while it is not 0.
    pauses: Mutex<usize>,
    stop: AtomicBool,
}

/// Guard that keeps the thread from the device. On drop the context counts as a new one.
#[derive(Debug)]
pub struct Pause {
    shared: Arc<Shared>,
}

impl Drop for Pause {
    fn drop(&mut self) {
        self.shared.context.fetch_add(1, Ordering::Release);
        *self.shared.pauses.lock() -= 1;
    }
}

/// Executor's handle on the thread.
#[derive(Debug)]
pub struct Watcher {
    shared: Arc<Shared>,
    fences: Fences,
    /// The thread, until this is dropped.
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Starts the thread.
    ///
    /// `sleepers` are the guest's threads, if hardware writes the fences: after a while without work the
    /// executor sleeps too, and this thread wakes them.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        devices: Devices,
        fences: Fences,
        sleepers: Option<Waits>,
        status: Status,
        progress: Progress,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            streams: Mutex::new(HashMap::new()),
            expecting: AtomicBool::new(false),
            outstanding: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            context: AtomicU64::new(0),
            pauses: Mutex::new(0),
            stop: AtomicBool::new(false),
        });
        let (watched, words) = (Arc::clone(&shared), fences.clone());
        let handle = std::thread::Builder::new()
            .name("watcher".to_owned())
            .spawn(move || {
                let _abort_on_panic = AbortOnPanic;
                watch(
                    &watched,
                    &devices,
                    &words,
                    sleepers.as_ref(),
                    &status,
                    &progress,
                );
            })?;
        Ok(Self {
            shared,
            fences,
            thread: Some(handle),
        })
    }

    /// Adds a stream. Fences may be behind its work from now on.
    pub fn watch(&self, stream: &Arc<StreamObject>) {
        self.shared
            .streams
            .lock()
            .insert(key(stream), Arc::clone(stream));
    }

    /// Removes a stream.
    pub fn forget(&self, stream: &StreamObject) {
        self.shared.streams.lock().remove(&key(stream));
    }

    /// Returns whether a fence behind the stream's work is outstanding. Only the thread that calls
    /// [`Watcher::expect`] may call it.
    pub fn awaits(&self, stream: &StreamObject) -> bool {
        stream.is_awaited(&self.fences)
    }

    /// Records a fence that the device sets to `value` when it has done the watched `stream`'s work
    /// so far.
    pub fn expect(&self, fence: FenceIndex, value: u64, stream: &StreamObject) {
        stream.expect(fence, value);
        self.shared.expecting.store(true, Ordering::Release);
        // SYNC POINT: watcher. Either the thread's check after announcing its sleep sees the fence,
        // or this load sees the announcement.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.shared.asleep.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Returns whether fences are outstanding, as of the last check or later. Never returns false while one is.
    pub fn is_watching(&self) -> bool {
        // SYNC POINT: check. Where a check has cleared the first word, the second one has been set.
        self.shared.expecting.load(Ordering::Acquire)
            || self.shared.outstanding.load(Ordering::Relaxed)
    }

    /// Forgets every stream but the `legacy` ones, clears their fences, which will not be written,
    /// and keeps the thread from the device.
    pub fn pause(&self, legacy: &[Arc<StreamObject>]) -> Pause {
        *self.shared.pauses.lock() += 1;
        let kept = |known: &Key| legacy.iter().any(|stream| key(stream) == *known);
        self.shared.streams.lock().retain(|known, _| kept(known));
        legacy.iter().for_each(|stream| stream.expect_nothing());
        Pause {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.wake();
        // The thread reads the session's memory, which may be unmapped afterwards.
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has ended the process.
            let _ = thread.join();
        }
    }
}

/// Publishes a dead context. Returns whether this call was the first to set the status.
pub fn publish_death(status: &Status, error: CuResult) -> bool {
    let first = status.set_once(error.0, EndCause::of_device(error.0));
    if first {
        tracing::info!("the device's context is dead: {error}");
    }
    first
}

/// Returns the sticky error of a device. Each device is queried together with its streams in
/// `held`. `streams` is a reused buffer.
fn fault(
    devices: &Devices,
    held: &[Arc<StreamObject>],
    streams: &mut Vec<RawStream>,
) -> Option<CuResult> {
    devices.iter().find_map(|device| {
        streams.clear();
        let own = held.iter().filter(|stream| stream.device == *device);
        streams.extend(own.map(|stream| stream.raw));
        device.health(streams)
    })
}

/// Outstanding fences at the look before.
#[derive(Debug, Default)]
struct Looks {
    /// Fence and its value, by stream.
    before: HashMap<Key, (u32, u64)>,
}

impl Looks {
    /// Returns the streams whose fences have not moved since the look before.
    fn still(&mut self, now: HashMap<Key, (u32, u64)>) -> HashSet<Key> {
        let still = now
            .iter()
            .filter(|(stream, fence)| self.before.get(*stream) == Some(*fence))
            .map(|(stream, _)| *stream)
            .collect();
        self.before = now;
        still
    }
}

/// Sleeps for an interval. Wakes meanwhile and afterwards the guest's threads whose fences hardware has written.
fn rest(interval: Duration, sleepers: Option<&Waits>) {
    let mut left = interval;
    while !left.is_zero() {
        let step = match sleepers {
            Some(waits) if waits.anyone_sleeps() => left.min(FIRST_INTERVAL),
            _ => left,
        };
        std::thread::sleep(step);
        left -= step;
        if let Some(waits) = sleepers {
            waits.wake();
        }
    }
}

fn watch(
    shared: &Shared,
    devices: &Devices,
    fences: &Fences,
    sleepers: Option<&Waits>,
    status: &Status,
    progress: &Progress,
) {
    let mut interval = FIRST_INTERVAL;
    let mut idle_since: Option<Instant> = Some(Instant::now());
    let mut held: Vec<Arc<StreamObject>> = Vec::new();
    let mut streams = Vec::new();
    let mut looks = Looks::default();
    while !shared.stop.load(Ordering::Acquire) {
        let context = shared.context.load(Ordering::Acquire);
        shared.outstanding.store(true, Ordering::Relaxed);
        // SYNC POINT: check.
        let asked = shared.expecting.swap(false, Ordering::AcqRel);
        {
            let streams = shared.streams.lock();
            let awaited = streams.values().filter(|stream| stream.is_awaited(fences));
            held.extend(awaited.cloned());
        }
        let first = held.first().and_then(|stream| stream.awaited(fences));
        progress.await_fences(held.len(), first);
        shared
            .outstanding
            .store(!held.is_empty(), Ordering::Relaxed);
        if held.is_empty() {
            interval = FIRST_INTERVAL;
            let since = *idle_since.get_or_insert_with(Instant::now);
            if asked {
                idle_since = Some(Instant::now());
            } else if since.elapsed() > LINGER {
                shared.asleep.store(true, Ordering::Relaxed);
                // SYNC POINT: watcher.
                std::sync::atomic::fence(Ordering::SeqCst);
                let nothing = !shared.expecting.load(Ordering::Relaxed);
                // A thread that sleeps after this look checks its fence once more before.
                if let Some(waits) = sleepers {
                    waits.wake();
                }
                if nothing && !shared.stop.load(Ordering::Acquire) {
                    std::thread::park();
                }
                shared.asleep.store(false, Ordering::Relaxed);
                idle_since = Some(Instant::now());
                continue;
            }
            // The fences were written since the last rest, perhaps.
            rest(LONGEST_INTERVAL, sleepers);
            continue;
        }
        if idle_since.take().is_some() {
            // Most fences are written within the first interval.
            held.clear();
            rest(FIRST_INTERVAL, sleepers);
            continue;
        }
        let still = looks.still(
            held.iter()
                .filter_map(|stream| Some((key(stream), stream.awaited(fences)?)))
                .map(|(stream, (fence, _, value))| (stream, (fence, value)))
                .collect(),
        );
        held.retain(|stream| still.contains(&key(stream)));
        // Locked during the check, so that a pause begins after it.
        let pauses = shared.pauses.lock();
        // After a pause the collected streams do not exist any more.
        if *pauses == 0
            && !held.is_empty()
            && context == shared.context.load(Ordering::Acquire)
            && let Some(error) = fault(devices, &held, &mut streams)
        {
            publish_death(status, error);
            return;
        }
        drop(pauses);
        held.clear();
        rest(interval, sleepers);
        interval = (interval * 2).min(LONGEST_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_stands_still_that_has_not_moved_between_two_looks() {
        let mut looks = Looks::default();
        let mut look = |fences: &[(u64, u64)]| {
            let seen = fences.iter();
            let still = looks.still(
                seen.map(|&(stream, value)| ((0, RawStream(stream)), (1, value)))
                    .collect(),
            );
            let mut still: Vec<_> = still.iter().map(|(_, stream)| stream.0).collect();
            still.sort_unstable();
            still
        };
        assert_eq!(look(&[(7, 1), (8, 1)]), []);
        assert_eq!(look(&[(7, 2), (8, 1)]), [8]);
        assert_eq!(look(&[(7, 2), (8, 1)]), [7, 8]);
        assert_eq!(look(&[(8, 2)]), []);
        assert_eq!(look(&[(7, 2), (8, 3)]), [], "it was not outstanding");
    }
}
