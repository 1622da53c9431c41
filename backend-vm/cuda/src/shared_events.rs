//! Events that processes share, without the driver's own means: those need files and a user that workers have
//! in common.
//!
//! A record writes its number to a word in memory that all processes map, in the stream's order; who waits for it
//! waits for the word, on the device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use wormhole_api::constants::event_flags::{DISABLE_TIMING, INTERPROCESS};
use wormhole_api::ctypes::CUevent;
use wormhole_device::{
    CuError, Device, EventRecord, Found, MemoryOperation, MemoryOperationKind, RawEvent, RawStream,
    Result, Shared, SharedWords, StreamMemory, WORDS_FILE, condition,
};

use crate::device::{CudaDevice, event, locked};
use crate::driver::Driver;

/// In an event's handle, which is an address of the driver's and so even: that it is shared.
const SHARED: u64 = 1;
/// How often who waits for another process looks.
const LOOK: Duration = Duration::from_micros(50);

/// An event whose words the devices reach.
#[derive(Debug)]
pub(crate) struct SharedEvent {
    words: SharedWords,
    /// What the streams have to do with the words: by stream, an event behind the last of it.
    uses: Mutex<Vec<(RawStream, RawEvent)>>,
}

/// Those of this process, by their handles: an event of one device is waited for by others, too. And those that are
/// destroyed, until no stream uses their words.
#[derive(Debug, Default)]
struct Registry {
    live: HashMap<u64, (i32, Arc<SharedEvent>)>,
    retired: Vec<(i32, Arc<SharedEvent>)>,
}

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);

fn with<R>(work: impl FnOnce(&mut Registry) -> R) -> R {
    let mut registry = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
    work(registry.get_or_insert_default())
}

/// The handle of the driver's event that keeps the place of one that is shared.
pub(crate) fn place_of(raw: RawEvent) -> RawEvent {
    RawEvent(raw.0 & !SHARED)
}

/// Whether an event that is to be made with these flags is shared.
pub(crate) fn is_for_sharing(flags: u32) -> bool {
    flags & (INTERPROCESS | DISABLE_TIMING) == INTERPROCESS | DISABLE_TIMING
}

/// Whether other processes may use an event.
pub(crate) fn is_shared(raw: RawEvent) -> bool {
    raw.0 & SHARED != 0
}

/// An event for a graph's node or a launch, neither of which writes words.
pub(crate) fn unshared(raw: RawEvent) -> Result<CUevent> {
    if is_shared(raw) {
        return Err(CuError::NOT_SUPPORTED);
    }
    Ok(event(raw))
}

/// The words of an event that is shared; none for others.
pub(crate) fn find(raw: RawEvent) -> Result<Option<Arc<SharedEvent>>> {
    if !is_shared(raw) {
        return Ok(None);
    }
    let found = with(|registry| Some(Arc::clone(&registry.live.get(&raw.0)?.1)));
    found.map(Some).ok_or(CuError::INVALID_HANDLE)
}

/// What a device's context had, to be [let go](end) once the context is gone.
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

/// The context is gone, and with it what it was to complete.
pub(crate) fn end(taken: Vec<Arc<SharedEvent>>) {
    for shared in taken {
        shared.words.bury();
    }
}

impl SharedEvent {
    /// Where the words are, for all sides.
    fn address(&self) -> u64 {
        self.words.base().as_ptr().expose_provenance() as u64
    }

    /// Completes a record.
    fn write(&self, record: EventRecord) -> MemoryOperation {
        MemoryOperation {
            kind: MemoryOperationKind::Write64,
            flags: 0,
            address: self.address() + record.place() as u64,
            value: record.value(),
        }
    }

    /// Waits until a record is complete.
    fn wait(&self, record: EventRecord) -> MemoryOperation {
        MemoryOperation {
            kind: MemoryOperationKind::Wait64,
            flags: condition::GEQ,
            ..self.write(record)
        }
    }
}

impl CudaDevice {
    /// Makes an event that is to be shared.
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

    /// What the event had is given back when the next is made: that may wait for the device.
    pub(crate) fn destroy_shared(&self, raw: RawEvent) -> Result<()> {
        with(|registry| {
            let gone = registry.live.remove(&raw.0);
            registry.retired.extend(gone);
        });
        self.destroy_event(place_of(raw))
    }

    /// Gives back what destroyed events had that no stream uses any more.
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
            for (_, after) in locked(&shared.uses).drain(..) {
                let _ = self.destroy_event(after);
            }
            if let Err(error) = self.unregister(shared.address()) {
                tracing::debug!("a shared event's words are not given back: {error}");
            }
        }
    }

    /// Has a stream do something with the words of an event, and notes what is behind that.
    fn use_shared(
        &self,
        shared: &SharedEvent,
        on: RawStream,
        operations: &[MemoryOperation],
    ) -> Result<()> {
        let mut uses = locked(&shared.uses);
        let known = uses.iter().find(|(stream, _)| *stream == on);
        let after = match known {
            Some((_, after)) => *after,
            None => {
                // Of streams that are gone, maybe.
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
        // What never comes is not made known, and holds no later one up.
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

    /// Waits in the calling thread, as long as the context lives.
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
    /// Whether the work before the last record is complete.
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
        let uses = locked(&self.uses);
        uses.iter().all(|(_, after)| is_over(driver, *after))
    }
}

/// Whether the work before an event's record is complete, or its context gone.
fn is_over(driver: &Driver, after: RawEvent) -> bool {
    // SAFETY: an event of the caller's own.
    let state = unsafe { driver.cuEventQuery(event(after)) };
    state != Err(CuError::NOT_READY)
}
