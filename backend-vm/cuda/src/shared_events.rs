//! Events shared between processes. The driver's own mechanism is not used: it needs files and a user that workers
//! have in common.
//!
//! A record writes its number to a word in memory that all processes map, in the stream's order. A wait for the record
//! is a wait for the word, on the device.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use wormhole_api::constants::event_flags::{DISABLE_TIMING, INTERPROCESS};
use wormhole_api::ctypes::CUevent;
use wormhole_device::{
    CuError, Device, EventRecord, Found, MemOps, MemoryOperation, MemoryOperationKind, RawEvent,
    RawStream, Result, Shared, SharedWords, WORDS_FILE, condition,
};
use wormhole_lock::Mutex;

use crate::device::{CudaDevice, event};
use crate::driver::Driver;

/// Bit of an event's handle that marks a shared event. The driver's handles are addresses and so even.
const SHARED: u64 = 1;
/// Interval at which a thread that waits for another process polls.
const LOOK: Duration = Duration::from_micros(50);

/// Event whose words are registered with the device.
#[derive(Debug)]
pub(crate) struct SharedEvent {
    words: SharedWords,
    /// Event behind the last operation on the words, for each stream.
    uses: Mutex<Vec<(RawStream, RawEvent)>>,
}

/// Events of this process by handle, since other devices wait for an event, too; and destroyed events whose words a
/// stream may still use.
#[derive(Debug, Default)]
struct Registry {
    live: HashMap<u64, (i32, Arc<SharedEvent>)>,
    retired: Vec<(i32, Arc<SharedEvent>)>,
}

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);

fn with<R>(work: impl FnOnce(&mut Registry) -> R) -> R {
    let mut registry = REGISTRY.lock();
    work(registry.get_or_insert_default())
}

/// Handle of the driver's event that reserves the number of a shared event.
pub(crate) fn place_of(raw: RawEvent) -> RawEvent {
    RawEvent(raw.0 & !SHARED)
}

/// Returns whether an event created with these flags is shared.
pub(crate) fn is_for_sharing(flags: u32) -> bool {
    flags & (INTERPROCESS | DISABLE_TIMING) == INTERPROCESS | DISABLE_TIMING
}

/// Returns whether other processes may use an event.
pub(crate) fn is_shared(raw: RawEvent) -> bool {
    raw.0 & SHARED != 0
}

/// Converts an event for a graph node or a launch attribute. Neither writes words, so a shared event is not supported.
pub(crate) fn unshared(raw: RawEvent) -> Result<CUevent> {
    if is_shared(raw) {
        return Err(CuError::NOT_SUPPORTED);
    }
    Ok(event(raw))
}

/// Words of a shared event; `None` for other events.
pub(crate) fn find(raw: RawEvent) -> Result<Option<Arc<SharedEvent>>> {
    if !is_shared(raw) {
        return Ok(None);
    }
    let found = with(|registry| Some(Arc::clone(&registry.live.get(&raw.0)?.1)));
    found.map(Some).ok_or(CuError::INVALID_HANDLE)
}

/// Removes the shared events of a device whose context is about to be reset; [`end`] ends them afterwards.
pub(crate) fn take(device: i32) -> Vec<Arc<SharedEvent>> {
    with(|registry| {
        let live = registry.live.extract_if(|_, (owner, _)| *owner == device);
        let mut taken: Vec<_> = live.map(|(_, (_, shared))| shared).collect();
        let retired = registry
            .retired
            .extract_if(.., |(owner, _)| *owner == device);
        taken.extend(retired.map(|(_, shared)| shared));
        taken
    })
}

/// Completes the events of a context that is gone.
pub(crate) fn end(taken: Vec<Arc<SharedEvent>>) {
    for shared in taken {
        shared.words.complete_records();
    }
}

impl SharedEvent {
    /// Address of the words, for the host and all devices.
    fn address(&self) -> u64 {
        self.words.base().as_ptr().expose_provenance() as u64
    }

    /// Operation that completes a record.
    fn write(&self, record: EventRecord) -> MemoryOperation {
        MemoryOperation {
            kind: MemoryOperationKind::Write64,
            flags: 0,
            address: self.address() + record.place() as u64,
            value: record.value(),
        }
    }

    /// Operation that waits until a record is complete.
    fn wait(&self, record: EventRecord) -> MemoryOperation {
        MemoryOperation {
            kind: MemoryOperationKind::Wait64,
            flags: condition::GEQ,
            ..self.write(record)
        }
    }
}

impl CudaDevice {
    /// Creates a shared event.
    pub(crate) fn create_shared(&self, flags: u32) -> Result<RawEvent> {
        let words = SharedWords::new().map_err(|error| {
            tracing::warn!(%error, "no file can be had for an event that is to be shared");
            CuError::OUT_OF_MEMORY
        })?;
        self.add_shared(words, flags & !INTERPROCESS)
    }

    pub(crate) fn open_shared(&self, found: Found) -> Result<RawEvent> {
        self.add_shared(SharedWords::open(found)?, DISABLE_TIMING)
    }

    fn add_shared(&self, words: SharedWords, flags: u32) -> Result<RawEvent> {
        self.sweep_shared();
        let place = self.create_event(flags)?;
        let uses = Mutex::default();
        let shared = SharedEvent { words, uses };
        // SAFETY: the words stay mapped until they are unregistered, or the context is gone.
        if let Err(error) = unsafe { self.register(shared.address(), WORDS_FILE as u64) } {
            self.destroy_event(place)?;
            return Err(error);
        }
        let raw = RawEvent(place.0 | SHARED);
        let entry = (self.ordinal(), Arc::new(shared));
        with(|registry| registry.live.insert(raw.0, entry));
        Ok(raw)
    }

    /// Destroys a shared event. Its memory is released when the next one is created, since that may wait for the
    /// device.
    pub(crate) fn destroy_shared(&self, raw: RawEvent) -> Result<()> {
        with(|registry| {
            let gone = registry.live.remove(&raw.0);
            registry.retired.extend(gone);
        });
        self.destroy_event(place_of(raw))
    }

    /// Releases destroyed events that no stream uses any more.
    fn sweep_shared(&self) {
        let retired = with(|registry| {
            let own = |(owner, shared): &mut (i32, Arc<SharedEvent>)| {
                *owner == self.ordinal()
                    && Arc::strong_count(shared) == 1
                    && shared.is_unused(self.driver())
            };
            registry.retired.extract_if(.., own).collect::<Vec<_>>()
        });
        for (_, shared) in retired {
            for (_, after) in shared.uses.lock().drain(..) {
                let _ = self.destroy_event(after);
            }
            if let Err(error) = self.unregister(shared.address()) {
                tracing::debug!("a shared event's words are not given back: {error}");
            }
        }
    }

    /// Submits operations on the words of an event to a stream, and records the event that follows them.
    fn use_shared(
        &self,
        shared: &SharedEvent,
        on: RawStream,
        operations: &[MemoryOperation],
    ) -> Result<()> {
        let mut uses = shared.uses.lock();
        let known = uses.iter().find(|(stream, _)| *stream == on);
        let after = match known {
            Some((_, after)) => *after,
            None => {
                // Some of these streams may be destroyed.
                for (_, after) in uses.extract_if(.., |(_, after)| is_over(self.driver(), *after)) {
                    self.destroy_event(after)?;
                }
                let after = self.create_event(DISABLE_TIMING)?;
                uses.push((on, after));
                after
            }
        };
        self.memory_operations(on, operations)?;
        self.record_event(after, on, 0)
    }

    pub(crate) fn record_shared(&self, shared: &SharedEvent, on: RawStream) -> Result<()> {
        let record = shared.words.record();
        let write = shared.write(record);
        let written = match record.predecessor() {
            Some(before) => self.use_shared(shared, on, &[shared.wait(before), write]),
            None => self.use_shared(shared, on, &[write]),
        };
        // A failed record is completed at once and not published, so it blocks no later one.
        written.inspect_err(|_| shared.words.words().complete(record))?;
        shared.words.words().publish(record);
        Ok(())
    }

    pub(crate) fn wait_shared(&self, on: RawStream, shared: &SharedEvent) -> Result<()> {
        let record = shared.words.words().last();
        if shared.is_complete(record) {
            return Ok(());
        }
        self.use_shared(shared, on, &[shared.wait(record)])
    }

    /// Waits in the calling thread, as long as the context is healthy.
    pub(crate) fn synchronize_shared(&self, shared: &SharedEvent) -> Result<()> {
        let record = shared.words.words().last();
        while !shared.is_complete(record) {
            if let Some(error) = self.health(&[]) {
                return Err(error);
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }
}

impl SharedEvent {
    /// Returns whether the work before the last record is complete.
    pub(crate) fn is_reached(&self) -> bool {
        self.is_complete(self.words.words().last())
    }

    fn is_complete(&self, record: EventRecord) -> bool {
        self.words.words().is_complete(record)
    }

    pub(crate) fn share(&self) -> Result<Shared> {
        self.words.share()
    }

    fn is_unused(&self, driver: &Driver) -> bool {
        let uses = self.uses.lock();
        uses.iter().all(|(_, after)| is_over(driver, *after))
    }
}

/// Returns whether the work before an event's record is complete, or its context gone.
fn is_over(driver: &Driver, after: RawEvent) -> bool {
    // SAFETY: the event belongs to the caller.
    let state = unsafe { driver.cuEventQuery(event(after)) };
    state != Err(CuError::NOT_READY)
}
