//! The device executes calls in the program's happens-before order.
//!
//! Threads hand streams, an event, an allocation and freshly minted handles to each other under a
//! mutex. The ring and the executor are the real ones; the device logs the order of its calls.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use support::recorder::Recorder;
use support::served::{self, Served};
use wormhole_api::handle::Key;
use wormhole_api::{
    Decode, DevicePtr, Element, Event, EventCreate, EventRecord, Handle, MemAlloc, MemAllocReply,
    MemFree, MemSet, Message, Stream, StreamCreate, StreamDestroy, StreamWaitEvent,
};
use wormhole_backend_tests::random::Random;
use wormhole_device::Device;
use wormhole_link::counters::Counter;
use wormhole_ring::memory::OwnedMemory;
use wormhole_ring::ring::{Consumer, Producer, RecordBuf};

const HAND_OFFS: u32 = 1_000_000;
/// Enough turns to detect a broken order in every kind of hand-over.
const BROKEN_HAND_OFFS: u32 = 100_000;
const THREADS: u32 = 3;
/// A schedule repeats after this many turns; over time each thread takes each of them.
const TURNS: u32 = 10;

/// Order in which the threads' records reach the device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// The program's order: all threads write to the session's ring.
    Kept,
    /// No order between threads: each writes to a ring of its own, and carriers copy these into the
    /// session's.
    Broken,
}

/// Ring of one thread, and the carrier that copies its records into the session's ring.
struct Lane {
    producer: Producer,
    ended: Arc<AtomicBool>,
    carrier: std::thread::JoinHandle<()>,
    // Dropped last: the producer points into it.
    _memory: OwnedMemory,
}

impl Lane {
    fn start(into: Producer, random: Random) -> Self {
        let memory = OwnedMemory::segments(1);
        // SAFETY: the carrier ends before the memory is dropped.
        let session = unsafe { memory.session(0) }.unwrap();
        // SAFETY: the carrier alone consumes.
        let (producer, mut consumer) = unsafe {
            (
                Producer::new(session.clone()),
                Consumer::new(session.clone()),
            )
        };
        let ended = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&ended);
        let carrier = std::thread::spawn(move || {
            let mut buffer = RecordBuf::new();
            loop {
                // Loaded before the ring is read, so that records pushed before the end are
                // carried.
                let last = told.load(Ordering::Acquire);
                random.delay();
                match consumer.take(&mut buffer).unwrap() {
                    Some(head) => served::push(&into, head, &[buffer.body()]),
                    None if last => break,
                    None => std::thread::yield_now(),
                }
            }
        });
        Self {
            producer,
            ended,
            carrier,
            _memory: memory,
        }
    }

    /// Returns once all records were carried.
    fn finish(self) {
        self.ended.store(true, Ordering::Release);
        self.carrier.join().unwrap();
    }
}

/// A session, and the lanes by which its threads write to it.
struct Session {
    // Ended first: the carriers write to the session's ring.
    lanes: Vec<Lane>,
    served: Served,
}

impl Session {
    fn start(device: &Arc<Recorder>, order: Order) -> Self {
        let served = Served::start(&(Arc::clone(device) as Arc<dyn Device>), 11);
        let lanes = match order {
            Order::Kept => Vec::new(),
            Order::Broken => (0..THREADS)
                .map(|thread| {
                    // SAFETY: the lane ends before the served memory is dropped.
                    let into = unsafe { Producer::new(served.memory()) };
                    Lane::start(into, Random::new(u64::from(thread) + 20))
                })
                .collect(),
        };
        Self { lanes, served }
    }

    /// Returns the ring to which a thread writes.
    fn ring(&self, thread: u32) -> &Producer {
        self.lanes
            .get(thread as usize)
            .map_or(&self.served.producer, |lane| &lane.producer)
    }

    fn record<M: Message>(&self, thread: u32, message: &M) {
        served::record(self.ring(thread), message);
    }

    /// Sends a request on the thread's own slot and returns the answer.
    fn call<M: Message>(&self, thread: u32, sequence: u64, message: &M) -> Vec<u8> {
        served::ask(self.ring(thread), thread, sequence, message);
        self.served.payload::<M>(thread, sequence)
    }

    /// Returns once all records were carried.
    fn finish_lanes(&mut self) {
        for lane in self.lanes.drain(..) {
            lane.finish();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.finish_lanes();
    }
}

/// Objects that the threads hand to each other.
struct Handed {
    number: u32,
    memory: DevicePtr,
    event: Handle<Event>,
    /// Allocation that lives for two turns.
    allocation: DevicePtr,
}

fn stream(index: u32, generation: u32) -> Handle<Stream> {
    let generation = u16::try_from(generation % 4096).unwrap();
    Handle::new(Key { index, generation }).unwrap()
}

/// Returns the stream that all threads use.
fn shared() -> Handle<Stream> {
    stream(0, 0)
}

fn fill(destination: DevicePtr, stream: Handle<Stream>, value: u32) -> MemSet {
    MemSet {
        destination,
        pitch: 0,
        width: 1,
        height: 1,
        value,
        element: Element::Word,
        stream,
    }
}

fn record_event(handed: &Handed) -> EventRecord {
    EventRecord {
        event: handed.event,
        stream: shared(),
        flags: handed.number,
        fence: None,
        value: 0,
    }
}

fn wait_for_event(handed: &Handed) -> StreamWaitEvent {
    StreamWaitEvent {
        stream: Handle::LEGACY,
        event: handed.event,
        flags: handed.number,
    }
}

/// Work of the thread whose turn it is.
type Turn = fn(&Session, u32, &mut Handed);

/// Sends records and requests. A request ends only once it has reached the device, so it orders the
/// calls around it.
fn with_requests(session: &Session, thread: u32, handed: &mut Handed) {
    let number = handed.number;
    let minted = stream(1, number / TURNS);
    let sequence = u64::from(number) + 10;
    match number % TURNS {
        0 => session.record(thread, &fill(handed.memory, shared(), number)),
        1 => session.record(thread, &fill(handed.memory, Handle::LEGACY, number)),
        2 => session.record(thread, &record_event(handed)),
        3 => session.record(thread, &wait_for_event(handed)),
        4 => session.record(
            thread,
            &StreamCreate {
                new: minted,
                flags: number,
                priority: 0,
            },
        ),
        5 => session.record(thread, &fill(handed.memory, minted, number)),
        6 => session.record(thread, &StreamDestroy { stream: minted }),
        7 => {
            let payload = session.call(thread, sequence, &MemAlloc { bytes: 64 });
            handed.allocation = MemAllocReply::decode(&payload).unwrap().address;
        }
        8 => session.record(thread, &fill(handed.allocation, shared(), number)),
        _ => {
            let address = handed.allocation;
            session.call(thread, sequence, &MemFree { address });
        }
    }
}

/// Turns of [`with_requests`] that log no number: a destruction, an allocation and its free.
const SILENT_WITH_REQUESTS: [u32; 3] = [6, 7, 9];

/// Sends records only, for which no thread waits: the ring alone preserves their order.
fn records_only(session: &Session, thread: u32, handed: &mut Handed) {
    let number = handed.number;
    let minted = stream(1, number / TURNS);
    match number % TURNS {
        0 | 1 => session.record(thread, &fill(handed.memory, shared(), number)),
        2 | 3 => session.record(thread, &fill(handed.memory, Handle::LEGACY, number)),
        4 => session.record(thread, &record_event(handed)),
        5 => session.record(thread, &wait_for_event(handed)),
        6 => session.record(
            thread,
            &StreamCreate {
                new: minted,
                flags: number,
                priority: 0,
            },
        ),
        7 | 8 => session.record(thread, &fill(handed.memory, minted, number)),
        _ => session.record(thread, &StreamDestroy { stream: minted }),
    }
}

const SILENT_RECORDS: [u32; 1] = [9];

/// Objects handed over after these turns of [`records_only`].
const HANDED_OVER: [(usize, &str); 4] = [
    (0, "a stream"),
    (2, "the legacy stream"),
    (4, "an event, recorded and then waited on"),
    (6, "a freshly minted handle"),
];

/// Calls logged by the device.
struct Seen {
    /// Numbers of the turns, in order of arrival.
    log: Vec<u32>,
    /// Number of calls that named no object, because they came too early or too late.
    refused: u64,
}

impl Seen {
    fn inversions(&self) -> usize {
        self.log.windows(2).filter(|pair| pair[0] > pair[1]).count()
    }

    /// Counts the hand-overs that lost their order, by the turn before them: the later turn came
    /// first, or one of the two was refused.
    fn broken(&self, count: u32, silent: &[u32]) -> [usize; TURNS as usize] {
        let mut places = vec![None; count as usize];
        for (place, number) in self.log.iter().enumerate() {
            places[*number as usize] = Some(place);
        }
        let mut broken = [0; TURNS as usize];
        for number in 0..count - 1 {
            let turn = number % TURNS;
            if silent.contains(&turn) || silent.contains(&((turn + 1) % TURNS)) {
                continue;
            }
            let (before, after) = (places[number as usize], places[number as usize + 1]);
            if before.is_none() || after.is_none() || before > after {
                broken[turn as usize] += 1;
            }
        }
        broken
    }
}

/// Takes `count` turns, each in another thread than the one before.
fn hand_over(order: Order, count: u32, turn: Turn) -> Seen {
    let device = Arc::new(Recorder::new());
    let mut session = Session::start(&device, order);
    let event: Handle<Event> = Handle::new(Key {
        index: 0,
        generation: 0,
    })
    .unwrap();
    session.record(
        THREADS,
        &StreamCreate {
            new: shared(),
            flags: 0,
            priority: 0,
        },
    );
    session.record(
        THREADS,
        &EventCreate {
            new: event,
            flags: 0,
        },
    );
    let payload = session.call(THREADS, 1, &MemAlloc { bytes: 64 });
    let handed = Mutex::new(Handed {
        number: 0,
        memory: MemAllocReply::decode(&payload).unwrap().address,
        event,
        allocation: DevicePtr(0),
    });
    let before = device.log().len();

    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (handed, session) = (&handed, &session);
            scope.spawn(move || {
                let random = Random::new(u64::from(thread) + 1);
                loop {
                    let mut handed = handed.lock().unwrap();
                    if handed.number >= count {
                        break;
                    }
                    if handed.number % THREADS != thread {
                        drop(handed);
                        std::thread::yield_now();
                        continue;
                    }
                    random.delay();
                    turn(session, thread, &mut handed);
                    handed.number += 1;
                    random.delay();
                }
            });
        }
    });
    session.finish_lanes();
    // The answer comes after all earlier calls.
    session.call(THREADS, 2, &wormhole_api::MemGetInfo {});
    let counts = session.served.counters.read();
    let refused = counts.get(Counter::Failures)
        + counts.get(Counter::InvalidHandles)
        + counts.get(Counter::InvalidAddresses);
    assert_eq!(
        session.served.status.load().is_some(),
        refused > 0,
        "a refused record ends the session, and nothing else does"
    );
    Seen {
        log: device.log().split_off(before),
        refused,
    }
}

/// Asserts that every hand-over preserved the order.
fn assert_kept(seen: &Seen, count: u32, silent: &[u32]) {
    assert_eq!(seen.refused, 0);
    assert_eq!(
        seen.log.len(),
        count as usize / TURNS as usize * (TURNS as usize - silent.len())
    );
    assert_eq!(seen.inversions(), 0);
    assert_eq!(seen.broken(count, silent), [0; TURNS as usize]);
}

#[test]
fn a_million_hand_overs_keep_their_order() {
    let seen = hand_over(Order::Kept, HAND_OFFS, with_requests);
    assert_kept(&seen, HAND_OFFS, &SILENT_WITH_REQUESTS);
}

#[test]
fn a_million_hand_overs_of_records_keep_their_order() {
    let seen = hand_over(Order::Kept, HAND_OFFS, records_only);
    assert_kept(&seen, HAND_OFFS, &SILENT_RECORDS);
}

/// Runs the same schedule over a broken order, with a ring for each thread. The test must detect
/// it, or the tests above prove nothing.
#[test]
fn a_ring_for_each_thread_is_seen_to_break_the_order() {
    let seen = hand_over(Order::Broken, BROKEN_HAND_OFFS, with_requests);
    assert!(seen.inversions() > 0, "a broken order was not seen");
}

#[test]
fn a_ring_for_each_thread_is_seen_to_break_the_order_of_records() {
    let seen = hand_over(Order::Broken, BROKEN_HAND_OFFS, records_only);
    assert!(seen.inversions() > 0, "a broken order was not seen");
    let broken = seen.broken(BROKEN_HAND_OFFS, &SILENT_RECORDS);
    for (turn, what) in HANDED_OVER {
        assert!(
            broken[turn] > 0,
            "{what} was never seen to be handed over in a broken order: {broken:?}"
        );
    }
    assert!(seen.refused > 0, "nothing came before it was made");
}
