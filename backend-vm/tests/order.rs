//! What happens before in the program happens before on the device.
//!
//! Threads hand streams, an event, an allocation and freshly minted handles to each other under a mutex. The
//! ring and the executor are the real ones; the device remembers the order in which it was called.

mod support;

use std::sync::{Arc, Mutex};

use support::random::Random;
use support::recorder::Recorder;
use support::served::Served;
use wormhole_api::handle::Key;
use wormhole_api::{
    Decode, DevicePtr, Element, Event, EventCreate, EventRecord, Handle, MemAlloc, MemAllocReply,
    MemFree, MemSet, Stream, StreamCreate, StreamDestroy, StreamWaitEvent,
};
use wormhole_backend::counters::Counter;
use wormhole_device::Device;

const HAND_OFFS: u32 = 1_000_000;
const THREADS: u32 = 3;

/// What the threads hand to each other.
struct Handed {
    number: u32,
    allocation: DevicePtr,
}

fn stream(index: u32, generation: u32) -> Handle<Stream> {
    let generation = u16::try_from(generation % 4096).unwrap();
    Handle::new(Key { index, generation }).unwrap()
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

/// The hand-over with this number: what the thread that has its turn does.
fn take_turn(
    served: &Served,
    thread: u32,
    handed: &mut Handed,
    memory: DevicePtr,
    event: Handle<Event>,
) {
    let number = handed.number;
    let shared = stream(0, 0);
    let minted = stream(1, number / 10);
    let sequence = u64::from(number) + 10;
    match number % 10 {
        0 => served.record(&fill(memory, shared, number)),
        1 => served.record(&fill(memory, Handle::LEGACY, number)),
        2 => served.record(&EventRecord {
            event,
            stream: shared,
            flags: number,
            fence: None,
            value: 0,
        }),
        3 => served.record(&StreamWaitEvent {
            stream: Handle::LEGACY,
            event,
            flags: number,
        }),
        4 => served.record(&StreamCreate {
            new: minted,
            flags: number,
            priority: 0,
        }),
        5 => served.record(&fill(memory, minted, number)),
        6 => served.record(&StreamDestroy { stream: minted }),
        7 => {
            let payload = served.call(thread, sequence, &MemAlloc { bytes: 64 });
            handed.allocation = MemAllocReply::decode(&payload).unwrap().address;
        }
        8 => served.record(&fill(handed.allocation, shared, number)),
        _ => {
            let address = handed.allocation;
            served.call(thread, sequence, &MemFree { address });
        }
    }
}

/// Hands over `count` times between [`THREADS`] threads, each writing to `rings[thread % rings]`: the order
/// that the device saw.
fn hand_over(
    device: &Arc<Recorder>,
    rings: &[Served],
    count: u32,
    turn: impl Fn(&Served, u32, &mut Handed) + Sync,
) -> Vec<u32> {
    let handed = Mutex::new(Handed {
        number: 0,
        allocation: DevicePtr(0),
    });
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (handed, turn) = (&handed, &turn);
            let served = &rings[thread as usize % rings.len()];
            scope.spawn(move || {
                let random = Random::new(u64::from(thread) + 1);
                loop {
                    let mut handed = handed.lock().unwrap();
                    if handed.number >= count {
                        break;
                    }
                    // Somebody else's turn: every hand-over is from one thread to another.
                    if handed.number % THREADS != thread {
                        drop(handed);
                        std::thread::yield_now();
                        continue;
                    }
                    random.delay();
                    turn(served, thread, &mut handed);
                    handed.number += 1;
                    random.delay();
                }
            });
        }
    });
    for (index, served) in rings.iter().enumerate() {
        // The last request's answer comes after everything before it.
        served.call(100, 1, &wormhole_api::MemGetInfo {});
        assert_eq!(served.status.load(), None, "ring {index}");
        let counts = served.counters.read();
        assert_eq!(counts.get(Counter::Failures), 0);
        assert_eq!(counts.get(Counter::InvalidHandles), 0);
        assert_eq!(counts.get(Counter::InvalidAddresses), 0);
    }
    device.log()
}

fn inversions(log: &[u32]) -> usize {
    log.windows(2).filter(|pair| pair[0] > pair[1]).count()
}

#[test]
fn a_million_hand_overs_keep_their_order() {
    let device = Arc::new(Recorder::new());
    let served = Served::start(&(Arc::clone(&device) as Arc<dyn Device>), 11);
    let event: Handle<Event> = Handle::new(Key {
        index: 0,
        generation: 0,
    })
    .unwrap();
    served.record(&StreamCreate {
        new: stream(0, 0),
        flags: 0,
        priority: 0,
    });
    served.record(&EventCreate {
        new: event,
        flags: 0,
    });
    let payload = served.call(101, 1, &MemAlloc { bytes: 64 });
    let memory = MemAllocReply::decode(&payload).unwrap().address;
    let rings = [served];
    let log = hand_over(&device, &rings, HAND_OFFS, |served, thread, handed| {
        take_turn(served, thread, handed, memory, event);
    });
    // Three of ten hand-overs leave no number: a destruction, an allocation and its end.
    assert_eq!(log.len(), HAND_OFFS as usize / 10 * 7 + 1);
    assert_eq!(inversions(&log), 0);
}

/// The same test over a broken order: a ring for each thread, as if they were not one program. It must be
/// seen, or the test above proves nothing.
#[test]
fn a_ring_for_each_thread_is_seen_to_break_the_order() {
    let device = Arc::new(Recorder::new());
    let shared = Arc::clone(&device) as Arc<dyn Device>;
    let rings: Vec<Served> = (0..THREADS)
        .map(|thread| Served::start(&shared, u64::from(thread) + 20))
        .collect();
    // Memory of their own, since each ring has a session of its own.
    let memory: Vec<DevicePtr> = rings
        .iter()
        .map(|served| {
            let payload = served.call(101, 1, &MemAlloc { bytes: 64 });
            MemAllocReply::decode(&payload).unwrap().address
        })
        .collect();
    let count = HAND_OFFS / 10;
    let log = hand_over(&device, &rings, count, |served, thread, handed| {
        served.record(&fill(
            memory[thread as usize],
            Handle::LEGACY,
            handed.number,
        ));
    });
    assert_eq!(log.len(), count as usize);
    assert!(inversions(&log) > 0, "a broken order was not seen");
}
