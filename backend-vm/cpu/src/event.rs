//! Events: points in streams, with the time at which they were reached.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use wormhole_device::constants::event_flags::{BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS};
use wormhole_device::{CuError, EventRecord, LaunchEvents, RawEvent, RawStream, Result};
use wormhole_lock::Mutex;

use crate::scheduler::{Point, Scheduler, Work};
use crate::sharing::SharedEvent;

const KNOWN_FLAGS: u32 = BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS;

#[derive(Debug)]
struct Event {
    timing: bool,
    last: Option<Record>,
    /// Shared state of an interprocess event, which replaces `last`.
    shared: Option<Arc<SharedEvent>>,
}

/// Last record of an event.
#[derive(Debug)]
pub enum Last {
    Never,
    Point(Point),
    /// A record of an interprocess event.
    Shared(Arc<SharedEvent>, EventRecord),
}

#[derive(Clone, Debug)]
struct Record {
    /// Point after which work that waits for the event may begin.
    point: Point,
    /// Point at which the host sees the event complete, which may be earlier.
    seen: Point,
    time: Arc<OnceLock<Instant>>,
}

impl Record {
    fn at(point: Point, time: Arc<OnceLock<Instant>>) -> Self {
        let seen = point;
        Self { point, seen, time }
    }
}

/// Points at which the events of a launch are reached.
#[derive(Debug)]
pub struct Reached {
    /// Point at which the launch is complete.
    pub end: Point,
    pub programmatic: Option<Point>,
    pub begun: Option<Point>,
}

#[derive(Debug, Default)]
struct Slab {
    events: HashMap<u64, Event>,
}

/// Events of one context.
#[derive(Debug, Default)]
pub struct Events {
    slab: Mutex<Slab>,
}

impl Events {
    /// Creates an event (`cuEventCreate`).
    pub fn create(&self, flags: u32) -> Result<RawEvent> {
        // An interprocess event must have timing disabled (CUDA driver API, cuEventCreate).
        if flags & !KNOWN_FLAGS != 0 || flags & (INTERPROCESS | DISABLE_TIMING) == INTERPROCESS {
            return Err(CuError::INVALID_VALUE);
        }
        if flags & INTERPROCESS != 0 {
            return Ok(self.add(SharedEvent::new()?));
        }
        Ok(self.insert(Event {
            timing: flags & DISABLE_TIMING == 0,
            last: None,
            shared: None,
        }))
    }

    /// Adds an event that other processes may use.
    pub fn add(&self, shared: SharedEvent) -> RawEvent {
        self.insert(Event {
            timing: false,
            last: None,
            shared: Some(Arc::new(shared)),
        })
    }

    fn insert(&self, event: Event) -> RawEvent {
        // Event numbers are unique in the process, across all devices.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        self.slab.lock().events.insert(id, event);
        RawEvent(id)
    }

    /// Returns the shared state of an interprocess event.
    pub fn shared(&self, event: RawEvent) -> Result<Arc<SharedEvent>> {
        let slab = self.slab.lock();
        let entry = slab.events.get(&event.0).ok_or(CuError::INVALID_HANDLE)?;
        entry.shared.clone().ok_or(CuError::INVALID_HANDLE)
    }

    /// Destroys an event (`cuEventDestroy`). Work that waits for it keeps waiting.
    pub fn destroy(&self, event: RawEvent) -> Result<()> {
        self.slab
            .lock()
            .events
            .remove(&event.0)
            .map(drop)
            .ok_or(CuError::INVALID_HANDLE)
    }

    /// Records an event (`cuEventRecord`). The slab stays locked until the record is queued, so that the last record is
    /// the one queued last.
    pub fn record(&self, event: RawEvent, stream: RawStream, scheduler: &Scheduler) -> Result<()> {
        let mut slab = self.slab.lock();
        let entry = slab
            .events
            .get_mut(&event.0)
            .ok_or(CuError::INVALID_HANDLE)?;
        if let Some(shared) = &entry.shared {
            let record = shared.record();
            let done = Arc::clone(shared);
            let work = move || {
                done.complete(record);
                Ok(())
            };
            let queued = scheduler.submit(stream, Work::new(work));
            // Completes a record that was not queued, so that no process waits for it.
            return queued.map(drop).inspect_err(|_| shared.complete(record));
        }
        let time = Arc::new(OnceLock::new());
        let stamp = Arc::clone(&time);
        let point = scheduler.submit(
            stream,
            Work::new(move || {
                stamp.get_or_init(Instant::now);
                Ok(())
            }),
        )?;
        entry.last = Some(Record::at(point, time));
        Ok(())
    }

    /// Sets the record made by a node of a graph. It is reached when the whole graph launch is complete; `time` is when
    /// the node ran.
    pub fn note(&self, event: RawEvent, point: Point, time: Arc<OnceLock<Instant>>) -> Result<()> {
        let mut slab = self.slab.lock();
        let entry = slab
            .events
            .get_mut(&event.0)
            .ok_or(CuError::INVALID_HANDLE)?;
        entry.last = Some(Record::at(point, time));
        Ok(())
    }

    /// Sets the records made by a launch, which `queue` submits. The slab stays locked as in [`Events::record`].
    pub fn launch(
        &self,
        events: &LaunchEvents,
        queue: impl FnOnce() -> Result<Reached>,
    ) -> Result<()> {
        let mut slab = self.slab.lock();
        for event in [events.programmatic, events.begun].into_iter().flatten() {
            let entry = slab.events.get(&event.0).ok_or(CuError::INVALID_HANDLE)?;
            if entry.timing || entry.shared.is_some() {
                return Err(CuError::NOT_SUPPORTED);
            }
        }
        let reached = queue()?;
        // Kernels that wait for a programmatic event may use `griddepcontrol.wait`, which waits for all writes of the
        // launch. So other streams wait for its end.
        let programmatic = reached.programmatic.map(|seen| (reached.end, seen));
        let begun = reached.begun.map(|point| (point, point));
        // An event that is both is complete when both points are reached. Blocks begin before they trigger, so the
        // programmatic record is set last.
        for (event, places) in [(events.begun, begun), (events.programmatic, programmatic)] {
            if let (Some(event), Some((point, seen))) = (event, places)
                && let Some(entry) = slab.events.get_mut(&event.0)
            {
                let time = Arc::default();
                entry.last = Some(Record { point, seen, time });
            }
        }
        Ok(())
    }

    /// Returns the record that other work must wait for.
    pub fn last(&self, event: RawEvent) -> Result<Last> {
        self.last_where(event, |record| record.point)
    }

    /// Returns the record that the host must wait for.
    pub fn seen(&self, event: RawEvent) -> Result<Last> {
        self.last_where(event, |record| record.seen)
    }

    fn last_where(&self, event: RawEvent, place: impl Fn(&Record) -> Point) -> Result<Last> {
        let slab = self.slab.lock();
        let entry = slab.events.get(&event.0).ok_or(CuError::INVALID_HANDLE)?;
        Ok(match (&entry.shared, &entry.last) {
            (Some(shared), _) => Last::Shared(Arc::clone(shared), shared.last()),
            (None, Some(record)) => Last::Point(place(record)),
            (None, None) => Last::Never,
        })
    }

    /// Returns the point of the last record, or `None` if the event was never recorded. Interprocess events have no
    /// points, so graphs cannot wait for them.
    pub fn point(&self, event: RawEvent) -> Result<Option<Point>> {
        match self.last(event)? {
            Last::Never => Ok(None),
            Last::Point(point) => Ok(Some(point)),
            Last::Shared(..) => Err(CuError::NOT_SUPPORTED),
        }
    }

    /// Returns the milliseconds between two records (`cuEventElapsedTime`).
    pub fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<f32> {
        let slab = self.slab.lock();
        let record = |event: RawEvent| {
            let entry = slab.events.get(&event.0).filter(|entry| entry.timing);
            entry
                .and_then(|entry| entry.last.clone())
                .ok_or(CuError::INVALID_HANDLE)
        };
        let (start, end) = (record(start)?, record(end)?);
        let time = |record: &Record| record.time.get().copied().ok_or(CuError::NOT_READY);
        let (start, end) = (time(&start)?, time(&end)?);
        let milliseconds = if end >= start {
            (end - start).as_secs_f64() * 1e3
        } else {
            -(start - end).as_secs_f64() * 1e3
        };
        #[expect(clippy::cast_possible_truncation, reason = "the API's type")]
        Ok(milliseconds as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_says_where_its_events_are_reached() {
        let (scheduler, events) = (Scheduler::new(), Events::default());
        let [end, programmatic, begun] = [(); 3].map(|()| scheduler.milestone().point());
        let [first, second, both] = [(); 3].map(|()| events.create(DISABLE_TIMING).expect("event"));
        let reached = || {
            Ok(Reached {
                end,
                programmatic: Some(programmatic),
                begun: Some(begun),
            })
        };
        for (programmatic, begun) in [(first, second), (both, both)] {
            let named = LaunchEvents {
                programmatic: Some(programmatic),
                at_block_start: false,
                begun: Some(begun),
            };
            events.launch(&named, reached).expect("a launch");
        }
        for (event, waited_for, shown) in [
            (first, end, programmatic),
            (second, begun, begun),
            (both, end, programmatic),
        ] {
            let found = [events.last(event), events.seen(event)];
            assert!(
                matches!(found, [Ok(Last::Point(last)), Ok(Last::Point(seen))]
                    if (last, seen) == (waited_for, shown)),
                "{found:?}"
            );
        }
        // A launch that is not queued records no event.
        let alone = LaunchEvents {
            begun: Some(first),
            ..LaunchEvents::default()
        };
        let refused = events.launch(&alone, || Err(CuError::OUT_OF_MEMORY));
        assert_eq!(refused, Err(CuError::OUT_OF_MEMORY));
        assert!(matches!(events.last(first), Ok(Last::Point(point)) if point == end));
    }
}
