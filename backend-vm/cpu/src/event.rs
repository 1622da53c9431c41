//! Events: a point in a stream, and the time at which it was reached.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use wormhole_device::constants::event_flags::{BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS};
use wormhole_device::{CuError, EventRecord, LaunchEvents, RawEvent, RawStream, Result};

use crate::scheduler::{Point, Scheduler, Work};
use crate::sharing::SharedEvent;

const KNOWN_FLAGS: u32 = BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS;

#[derive(Debug)]
struct Event {
    timing: bool,
    last: Option<Record>,
    /// What other processes know of it. It is then all that there is.
    shared: Option<Arc<SharedEvent>>,
}

/// What an event stands for now.
#[derive(Debug)]
pub enum Last {
    Never,
    Point(Point),
    /// One of its records.
    Shared(Arc<SharedEvent>, EventRecord),
}

#[derive(Clone, Debug)]
struct Record {
    /// Where work that waits for the event may begin.
    point: Point,
    /// Where the host sees it complete, if that is earlier.
    seen: Point,
    time: Arc<OnceLock<Instant>>,
}

impl Record {
    fn at(point: Point, time: Arc<OnceLock<Instant>>) -> Self {
        let seen = point;
        Self { point, seen, time }
    }
}

/// Where the events of a launch are reached.
#[derive(Debug)]
pub struct Reached {
    /// The launch is complete.
    pub end: Point,
    pub programmatic: Option<Point>,
    pub begun: Option<Point>,
}

#[derive(Debug, Default)]
struct Slab {
    events: HashMap<u64, Event>,
}

/// The events of one context.
#[derive(Debug, Default)]
pub struct Events {
    slab: Mutex<Slab>,
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, Slab> {
        self.slab.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `cuEventCreate`.
    pub fn create(&self, flags: u32) -> Result<RawEvent> {
        // An interprocess event keeps no time (CUDA driver API, cuEventCreate).
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

    /// An event that other processes may use.
    pub fn add(&self, shared: SharedEvent) -> RawEvent {
        self.insert(Event {
            timing: false,
            last: None,
            shared: Some(Arc::new(shared)),
        })
    }

    fn insert(&self, event: Event) -> RawEvent {
        // No two events of a process are called the same, whatever device they are of.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        self.lock().events.insert(id, event);
        RawEvent(id)
    }

    /// What other processes know of an event that they may use.
    pub fn shared(&self, event: RawEvent) -> Result<Arc<SharedEvent>> {
        let slab = self.lock();
        let entry = slab.events.get(&event.0).ok_or(CuError::INVALID_HANDLE)?;
        entry.shared.clone().ok_or(CuError::INVALID_HANDLE)
    }

    /// `cuEventDestroy`: what waits for the event still does.
    pub fn destroy(&self, event: RawEvent) -> Result<()> {
        self.lock()
            .events
            .remove(&event.0)
            .map(drop)
            .ok_or(CuError::INVALID_HANDLE)
    }

    /// `cuEventRecord`. The slab stays locked until the record is queued, so that the last record is
    /// the one queued last.
    pub fn record(&self, event: RawEvent, stream: RawStream, scheduler: &Scheduler) -> Result<()> {
        let mut slab = self.lock();
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
            // Nobody is to wait for what never comes.
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

    /// Notes a record that is part of a graph: reached with the whole launch, at the time when its node ran.
    pub fn note(&self, event: RawEvent, point: Point, time: Arc<OnceLock<Instant>>) -> Result<()> {
        let mut slab = self.lock();
        let entry = slab
            .events
            .get_mut(&event.0)
            .ok_or(CuError::INVALID_HANDLE)?;
        entry.last = Some(Record::at(point, time));
        Ok(())
    }

    /// Notes what a launch records that `queue` queues. The slab stays locked as for [`Events::record`].
    pub fn launch(
        &self,
        events: &LaunchEvents,
        queue: impl FnOnce() -> Result<Reached>,
    ) -> Result<()> {
        let mut slab = self.lock();
        for event in [events.programmatic, events.begun].into_iter().flatten() {
            let entry = slab.events.get(&event.0).ok_or(CuError::INVALID_HANDLE)?;
            if entry.timing || entry.shared.is_some() {
                return Err(CuError::NOT_SUPPORTED);
            }
        }
        let reached = queue()?;
        // Kernels that wait for a programmatic event may ask for all that the launch did
        // (`griddepcontrol.wait`), so other streams wait for its end.
        let programmatic = reached.programmatic.map(|seen| (reached.end, seen));
        let begun = reached.begun.map(|point| (point, point));
        // One that is both is complete when it is the one as well as the other: blocks begin before they trigger.
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

    /// What waiting for the event means to other work now.
    pub fn last(&self, event: RawEvent) -> Result<Last> {
        self.last_where(event, |record| record.point)
    }

    /// What waiting for it means to the host.
    pub fn seen(&self, event: RawEvent) -> Result<Last> {
        self.last_where(event, |record| record.seen)
    }

    fn last_where(&self, event: RawEvent, place: impl Fn(&Record) -> Point) -> Result<Last> {
        let slab = self.lock();
        let entry = slab.events.get(&event.0).ok_or(CuError::INVALID_HANDLE)?;
        Ok(match (&entry.shared, &entry.last) {
            (Some(shared), _) => Last::Shared(Arc::clone(shared), shared.last()),
            (None, Some(record)) => Last::Point(place(record)),
            (None, None) => Last::Never,
        })
    }

    /// The point of the last record; none if it was never recorded. Those of other processes have none, and no
    /// graph waits for them.
    pub fn point(&self, event: RawEvent) -> Result<Option<Point>> {
        match self.last(event)? {
            Last::Never => Ok(None),
            Last::Point(point) => Ok(Some(point)),
            Last::Shared(..) => Err(CuError::NOT_SUPPORTED),
        }
    }

    /// `cuEventElapsedTime`.
    pub fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<f32> {
        let slab = self.lock();
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
        // What is not queued records nothing.
        let alone = LaunchEvents {
            begun: Some(first),
            ..LaunchEvents::default()
        };
        let refused = events.launch(&alone, || Err(CuError::OUT_OF_MEMORY));
        assert_eq!(refused, Err(CuError::OUT_OF_MEMORY));
        assert!(matches!(events.last(first), Ok(Last::Point(point)) if point == end));
    }
}
