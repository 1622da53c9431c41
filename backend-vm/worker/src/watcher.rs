//! Looks after the device while a guest may be waiting for a fence.
//!
//! A fence announces success only: behind a fault it is never written. So while fences are outstanding
//! this thread asks the device how it is, after 100 µs and then at intervals that grow to 1 ms, and
//! publishes a dead context in the session's status word, which ends every wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use wormhole_api::CuResult;
use wormhole_device::RawStream;
use wormhole_ring::fence::{FenceIndex, Fences};
use wormhole_ring::status::{EndCause, Status};

use super::abort_on_panic::AbortOnPanic;
use super::devices::Devices;
use super::objects::StreamObject;
use wormhole_link::progress::Progress;

const FIRST_INTERVAL: Duration = Duration::from_micros(100);
const LONGEST_INTERVAL: Duration = Duration::from_millis(1);
/// With nothing to watch for this long, the thread sleeps until it is called.
const LINGER: Duration = Duration::from_millis(20);

/// The number of a device, and its own handle.
type Key = (usize, RawStream);

fn key(stream: &StreamObject) -> Key {
    (stream.device.number(), stream.raw)
}

#[derive(Debug)]
struct Shared {
    /// The streams that exist. Locked when one comes or goes, and for the time of a look through them; a
    /// fence is noted in its stream, without the lock.
    streams: Mutex<HashMap<Key, Arc<StreamObject>>>,
    /// A fence was asked for since the last look, or was outstanding then.
    expecting: AtomicBool,
    asleep: AtomicBool,
    /// Grows when the device's context was replaced.
    context: AtomicU64,
    /// No look may be taken while this is not 0.
    pauses: Mutex<usize>,
    stop: AtomicBool,
}

/// While it lives, the device is not looked at. Then it is looked at as a fresh context.
#[derive(Debug)]
pub struct Pause {
    shared: Arc<Shared>,
}

impl Drop for Pause {
    fn drop(&mut self) {
        self.shared.context.fetch_add(1, Ordering::Release);
        *locked(&self.shared.pauses) -= 1;
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The executor's handle on the thread.
#[derive(Debug)]
pub struct Watcher {
    shared: Arc<Shared>,
    fences: Fences,
    thread: Thread,
}

impl Watcher {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        devices: Devices,
        fences: Fences,
        status: Status,
        progress: Progress,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            streams: Mutex::new(HashMap::new()),
            expecting: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            context: AtomicU64::new(0),
            pauses: Mutex::new(0),
            stop: AtomicBool::new(false),
        });
        let (watched, words) = (Arc::clone(&shared), fences.clone());
        let handle = std::thread::Builder::new()
            .name("watcher".to_owned())
            .spawn(move || {
                let _critical = AbortOnPanic;
                watch(&watched, &devices, &words, &status, &progress);
            })?;
        Ok(Self {
            shared,
            fences,
            thread: handle.thread().clone(),
        })
    }

    /// A stream behind whose work there may be fences from now on.
    pub fn watch(&self, stream: &Arc<StreamObject>) {
        locked(&self.shared.streams).insert(key(stream), Arc::clone(stream));
    }

    /// Lets go of a stream.
    pub fn forget(&self, stream: &StreamObject) {
        locked(&self.shared.streams).remove(&key(stream));
    }

    /// Whether a fence behind the stream's work is outstanding. For the thread that calls
    /// [`Watcher::expect`].
    pub fn awaits(&self, stream: &StreamObject) -> bool {
        stream.is_awaited(&self.fences)
    }

    /// A fence that the device will set to `value` when the watched `stream` gets there.
    pub fn expect(&self, fence: FenceIndex, value: u64, stream: &StreamObject) {
        stream.expect(fence, value);
        self.shared.expecting.store(true, Ordering::Release);
        // SYNC POINT: watcher. Either its look after announcing its sleep sees the fence, or this load
        // sees the announcement.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.shared.asleep.load(Ordering::Relaxed) {
            self.thread.unpark();
        }
    }

    /// Whether fences were outstanding when it looked last.
    pub fn is_watching(&self) -> bool {
        self.shared.expecting.load(Ordering::Relaxed)
    }

    /// Forgets every stream but the `legacy` ones, whose fences will not come, and keeps the thread from the device.
    pub fn pause(&self, legacy: &[Arc<StreamObject>]) -> Pause {
        *locked(&self.shared.pauses) += 1;
        let kept = |known: &Key| legacy.iter().any(|stream| key(stream) == *known);
        locked(&self.shared.streams).retain(|known, _| kept(known));
        legacy.iter().for_each(|stream| stream.expect_nothing());
        Pause {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// Publishes a dead context. Whether it was this call that did it.
pub fn publish_death(status: &Status, error: CuResult) -> bool {
    let first = status.set_once(error.0, EndCause::of_device(error.0));
    if first {
        tracing::info!("the device's context is dead: {error}");
    }
    first
}

/// The sticky error of a device, asked also about those streams of it that are in `held`. `streams` is room for them.
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

fn watch(
    shared: &Shared,
    devices: &Devices,
    fences: &Fences,
    status: &Status,
    progress: &Progress,
) {
    let mut interval = FIRST_INTERVAL;
    let mut idle_since: Option<Instant> = Some(Instant::now());
    let mut held: Vec<Arc<StreamObject>> = Vec::new();
    let mut streams = Vec::new();
    while !shared.stop.load(Ordering::Acquire) {
        let context = shared.context.load(Ordering::Acquire);
        let asked = shared.expecting.swap(false, Ordering::AcqRel);
        {
            let streams = locked(&shared.streams);
            let awaited = streams.values().filter(|stream| stream.is_awaited(fences));
            held.extend(awaited.cloned());
        }
        let first = held.first().and_then(|stream| stream.awaited(fences));
        progress.await_fences(held.len(), first);
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
                if nothing && !shared.stop.load(Ordering::Acquire) {
                    std::thread::park();
                }
                shared.asleep.store(false, Ordering::Relaxed);
                idle_since = Some(Instant::now());
                continue;
            }
            std::thread::sleep(LONGEST_INTERVAL);
            continue;
        }
        shared.expecting.store(true, Ordering::Relaxed);
        if idle_since.take().is_some() {
            // Most fences come within the first interval.
            held.clear();
            std::thread::sleep(FIRST_INTERVAL);
            continue;
        }
        // Held during the look: a pause begins after it.
        let pauses = locked(&shared.pauses);
        // After a pause the streams above are no more.
        if *pauses == 0
            && context == shared.context.load(Ordering::Acquire)
            && let Some(error) = fault(devices, &held, &mut streams)
        {
            publish_death(status, error);
            return;
        }
        drop(pauses);
        held.clear();
        std::thread::sleep(interval);
        interval = (interval * 2).min(LONGEST_INTERVAL);
    }
}
