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

use wormhole_device::{CuError, Device};
use wormhole_ring::fence::{FenceIndex, Fences};
use wormhole_ring::status::{EndCause, Status};

use super::objects::StreamObject;

const FIRST_INTERVAL: Duration = Duration::from_micros(100);
const LONGEST_INTERVAL: Duration = Duration::from_millis(1);
/// With nothing to watch for this long, the thread sleeps until it is called.
const LINGER: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct Shared {
    /// The value that each outstanding fence will reach, and the stream whose work it follows.
    outstanding: Mutex<HashMap<u32, (u64, Arc<StreamObject>)>>,
    asleep: AtomicBool,
    /// Grows when the device's context was replaced: this thread must bind to the new one.
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
    thread: Thread,
}

impl Watcher {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(device: Arc<dyn Device>, fences: Fences, status: Status) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            outstanding: Mutex::new(HashMap::new()),
            asleep: AtomicBool::new(false),
            context: AtomicU64::new(0),
            pauses: Mutex::new(0),
            stop: AtomicBool::new(false),
        });
        let watched = Arc::clone(&shared);
        let handle = std::thread::Builder::new()
            .name("watcher".to_owned())
            .spawn(move || watch(&watched, device.as_ref(), &fences, &status))?;
        Ok(Self {
            shared,
            thread: handle.thread().clone(),
        })
    }

    /// A fence that the device will set to `value` when `stream` gets there.
    pub fn expect(&self, fence: FenceIndex, value: u64, stream: &Arc<StreamObject>) {
        self.outstanding()
            .insert(fence.get(), (value, Arc::clone(stream)));
        // SYNC POINT: watcher. Either its look after announcing its sleep sees the fence, or this load
        // sees the announcement.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.shared.asleep.load(Ordering::Relaxed) {
            self.thread.unpark();
        }
    }

    /// Whether fences were outstanding when it looked last.
    pub fn is_watching(&self) -> bool {
        !self.outstanding().is_empty()
    }

    /// Forgets every fence and keeps the thread from the device.
    pub fn pause(&self) -> Pause {
        self.outstanding().clear();
        *locked(&self.shared.pauses) += 1;
        Pause {
            shared: Arc::clone(&self.shared),
        }
    }

    fn outstanding(&self) -> MutexGuard<'_, HashMap<u32, (u64, Arc<StreamObject>)>> {
        locked(&self.shared.outstanding)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// Publishes a dead context. Whether it was this call that did it.
pub fn publish_death(status: &Status, error: CuError) -> bool {
    let first = status.set_once(error.0, EndCause::ContextDead);
    if first {
        tracing::info!("the device's context is dead: {error}");
    }
    first
}

fn watch(shared: &Shared, device: &dyn Device, fences: &Fences, status: &Status) {
    let mut bound = None;
    let mut interval = FIRST_INTERVAL;
    let mut idle_since: Option<Instant> = Some(Instant::now());
    let mut streams = Vec::new();
    while !shared.stop.load(Ordering::Acquire) {
        let context = shared.context.load(Ordering::Acquire);
        let before;
        let mut held = Vec::new();
        {
            let mut outstanding = locked(&shared.outstanding);
            before = outstanding.len();
            outstanding.retain(|&index, (value, _)| {
                FenceIndex::new(index).is_some_and(|fence| fences.load(fence) < *value)
            });
            streams.clear();
            for (_, stream) in outstanding.values() {
                if !streams.contains(&stream.raw) {
                    streams.push(stream.raw);
                    held.push(Arc::clone(stream));
                }
            }
        }
        if held.is_empty() {
            interval = FIRST_INTERVAL;
            let since = *idle_since.get_or_insert_with(Instant::now);
            if before > 0 {
                idle_since = Some(Instant::now());
            } else if since.elapsed() > LINGER {
                shared.asleep.store(true, Ordering::Relaxed);
                // SYNC POINT: watcher.
                std::sync::atomic::fence(Ordering::SeqCst);
                let nothing = locked(&shared.outstanding).is_empty();
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
        if idle_since.take().is_some() {
            // Most fences come within the first interval.
            drop(held);
            std::thread::sleep(FIRST_INTERVAL);
            continue;
        }
        // Held during the look: a pause begins after it.
        let pauses = locked(&shared.pauses);
        // After a pause the streams above are no more.
        if *pauses == 0 && context == shared.context.load(Ordering::Acquire) {
            if bound != Some(context) {
                if let Err(error) = device.bind_thread() {
                    tracing::warn!("the device cannot be watched: {error}");
                }
                bound = Some(context);
            }
            if let Some(error) = device.health(&streams) {
                publish_death(status, error);
                return;
            }
        }
        drop(pauses);
        drop(held);
        std::thread::sleep(interval);
        interval = (interval * 2).min(LONGEST_INTERVAL);
    }
}
