//! Models of the ring's protocols, which loom runs in every order that the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p wormhole-ring --test loom`
//!
//! Each property has a second model that disables the sync point it depends on. The second model must fail, so that a
//! model which checks nothing is noticed.

#![cfg(loom)]

use loom::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64},
    },
    thread,
};
use wormhole_ring::{
    fence::{FenceIndex, Fences},
    memory::SessionMemory,
    queue::queue,
    ring::{Consumer, Producer, PushError, RecordBuf, RecordHead},
    session::{SessionState, State, TransitionError},
    slot::{AnswerSlots, SlotIndex},
    status::{EndCause, Status},
    sync::{Ordering, SyncPoint, model::without},
    waits::{Wait, Waits},
};

fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

fn sides() -> (Arc<Producer>, Consumer) {
    let memory = SessionMemory::new();
    // SAFETY: one consumer.
    unsafe {
        (
            Arc::new(Producer::new(memory.clone())),
            Consumer::new(memory),
        )
    }
}

fn push(producer: &Producer, message: u16, words: &[u64]) {
    let body: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    loop {
        match producer.push(RecordHead::record(message), &[&body]) {
            Ok(()) => return,
            Err(PushError::Full { .. }) => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

fn take(consumer: &mut Consumer) -> (u16, Vec<u64>) {
    let mut buf = RecordBuf::new();
    loop {
        match consumer.take(&mut buf).expect("the producers are correct") {
            Some(head) => {
                let (words, _) = buf.body().as_chunks::<8>();
                return (
                    head.message,
                    words.iter().copied().map(u64::from_le_bytes).collect(),
                );
            }
            None => thread::yield_now(),
        }
    }
}

fn published_records_arrive_whole() {
    explore(3, || {
        let (producer, mut consumer) = sides();
        let pushing = thread::spawn(move || {
            push(&producer, 1, &[11]);
            push(&producer, 2, &[21, 22, 23, 24, 25]);
        });
        assert_eq!(take(&mut consumer), (1, vec![11]));
        assert_eq!(take(&mut consumer), (2, vec![21, 22, 23, 24, 25]));
        pushing.join().unwrap();
    });
}

#[test]
fn a_published_record_arrives_whole() {
    published_records_arrive_whole();
}

#[test]
#[should_panic]
fn a_publication_without_release_is_noticed() {
    without(SyncPoint::Commit, published_records_arrive_whole);
}

/// Pushes more records than fit the ring's four units: the later records reuse the units of the first ones, the last
/// one behind a pad.
fn places_are_used_again() {
    explore(2, || {
        let (producer, mut consumer) = sides();
        let pushing = thread::spawn(move || {
            for message in 1..=3 {
                push(&producer, message, &[1, 2, 3, 4, u64::from(message)]);
            }
            push(&producer, 4, &[4]);
            push(&producer, 5, &[1, 2, 3, 4, 5]);
        });
        for message in 1..=3 {
            assert_eq!(
                take(&mut consumer),
                (message, vec![1, 2, 3, 4, u64::from(message)])
            );
        }
        assert_eq!(take(&mut consumer), (4, vec![4]));
        assert_eq!(take(&mut consumer), (5, vec![1, 2, 3, 4, 5]));
        pushing.join().unwrap();
    });
}

#[test]
fn a_place_is_written_again_only_after_it_was_taken() {
    places_are_used_again();
}

#[test]
#[should_panic]
fn a_head_without_release_is_noticed() {
    without(SyncPoint::Head, places_are_used_again);
}

/// Models two producers that find the ring full while the consumer frees room for both. One of them may use the head
/// that the other read.
fn a_head_read_by_a_peer() {
    explore(2, || {
        let (producer, mut consumer) = sides();
        for message in 0..4 {
            push(&producer, message, &[u64::from(message)]);
        }
        let taking = thread::spawn(move || {
            let taken = [take(&mut consumer), take(&mut consumer)];
            assert_eq!(taken, [(0, vec![0]), (1, vec![1])]);
            consumer
        });
        let attempt = |message: u16| {
            let producer = Arc::clone(&producer);
            move || match producer.push(RecordHead::record(message), &[&[9; 8]]) {
                Ok(()) => true,
                Err(PushError::Full { .. }) => false,
                Err(error) => panic!("{error}"),
            }
        };
        let peer = thread::spawn(attempt(8));
        let pushed = attempt(9)();
        let expected = 2 + usize::from(pushed) + usize::from(peer.join().unwrap());
        let mut consumer = taking.join().unwrap();
        let mut buf = RecordBuf::new();
        let mut left = 0;
        while consumer
            .take(&mut buf)
            .expect("the producers are correct")
            .is_some()
        {
            left += 1;
        }
        assert_eq!(left, expected);
    });
}

#[test]
fn a_head_read_by_one_producer_counts_for_its_peer() {
    a_head_read_by_a_peer();
}

#[test]
#[should_panic(expected = "the ring's cursors are impossible")]
fn a_tail_without_release_is_noticed() {
    without(SyncPoint::Tail, a_head_read_by_a_peer);
}

#[test]
#[should_panic]
fn a_cached_head_without_release_is_noticed() {
    without(SyncPoint::CachedHead, a_head_read_by_a_peer);
}

/// Models two threads that push one record each. `ordered` adds a happens-before edge from the first to the second.
fn two_producers(ordered: bool) {
    explore(3, move || {
        let (producer, mut consumer) = sides();
        let peer = Arc::clone(&producer);
        let first = thread::spawn(move || push(&peer, 1, &[1]));
        let second = thread::spawn(move || {
            let first = if ordered {
                first.join().unwrap();
                None
            } else {
                Some(first)
            };
            push(&producer, 2, &[2]);
            first
        });
        assert_eq!(take(&mut consumer), (1, vec![1]));
        assert_eq!(take(&mut consumer), (2, vec![2]));
        if let Some(first) = second.join().unwrap() {
            first.join().unwrap();
        }
    });
}

#[test]
fn what_happens_before_lies_before_in_the_ring() {
    two_producers(true);
}

#[test]
#[should_panic]
fn producers_without_an_order_are_seen_in_both() {
    two_producers(false);
}

/// Models a consumer that parks, with a flag as the doorbell. The consumer may miss the doorbell only if it saw the
/// record.
fn parked_consumer() {
    explore(3, || {
        let (producer, mut consumer) = sides();
        let bell = Arc::new(Mutex::new(false));
        let pushing = {
            let bell = Arc::clone(&bell);
            thread::spawn(move || {
                push(&producer, 1, &[1]);
                if producer.consumer_parked() {
                    *bell.lock().unwrap() = true;
                }
            })
        };
        let sleeps = consumer.park().expect("the tail is possible");
        pushing.join().unwrap();
        assert!(
            !sleeps || *bell.lock().unwrap(),
            "the consumer sleeps and nobody rings"
        );
        consumer.unpark();
        assert_eq!(take(&mut consumer), (1, vec![1]));
    });
}

/// Models two producers that push to a consumer that may sleep. One doorbell is enough for each sleep; loom reports a
/// sleep without a doorbell as a deadlock.
fn one_of_two_producers_rings() {
    explore(2, || {
        let (producer, mut consumer) = sides();
        let bell = Arc::new((Mutex::new(false), Condvar::new()));
        let pushing = [1, 2].map(|message| {
            let (producer, bell) = (Arc::clone(&producer), Arc::clone(&bell));
            thread::spawn(move || {
                push(&producer, message, &[]);
                if producer.must_ring().is_some() {
                    *bell.0.lock().unwrap() = true;
                    bell.1.notify_one();
                }
            })
        });
        let mut buf = RecordBuf::new();
        let mut taken = 0;
        while taken < 2 {
            if consumer
                .take(&mut buf)
                .expect("the producers are correct")
                .is_some()
            {
                taken += 1;
            } else if consumer.park().expect("the tail is possible") {
                let mut rung = bell.0.lock().unwrap();
                while !*rung {
                    rung = bell.1.wait(rung).unwrap();
                }
                *rung = false;
                drop(rung);
                consumer.unpark();
            }
        }
        for thread in pushing {
            thread.join().unwrap();
        }
    });
}

#[test]
fn a_consumer_is_woken_by_the_producer_that_must_ring() {
    one_of_two_producers_rings();
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_doorbell_without_fences_is_noticed() {
    without(SyncPoint::Park, one_of_two_producers_rings);
}

/// Models another thread of the consumer's process that stores an event and rings, while the consumer goes to sleep on the
/// word of the ring.
fn an_event_beside_the_ring() {
    explore(2, || {
        let (producer, consumer) = sides();
        let event = Arc::new(AtomicBool::new(false));
        let (doorbell, sent) = (consumer.doorbell(), Arc::clone(&event));
        let other = thread::spawn(move || {
            sent.store(true, Ordering::Relaxed);
            doorbell.clear();
        });
        let parked = consumer.park().expect("the tail is possible");
        let sleeps = parked && !event.load(Ordering::Relaxed);
        other.join().unwrap();
        assert!(
            !sleeps || !producer.is_consumer_parked(),
            "nobody ends the sleep"
        );
    });
}

#[test]
fn a_consumer_that_sleeps_on_the_ring_is_woken_by_an_event_beside_it() {
    an_event_beside_the_ring();
}

#[test]
#[should_panic(expected = "nobody ends the sleep")]
fn an_event_without_fences_is_noticed() {
    without(SyncPoint::Park, an_event_beside_the_ring);
}

#[test]
fn a_consumer_that_sleeps_is_woken() {
    parked_consumer();
}

#[test]
#[should_panic(expected = "the consumer sleeps and nobody rings")]
fn parking_without_fences_is_noticed() {
    without(SyncPoint::Park, parked_consumer);
}

fn request_and_answer() {
    explore(3, || {
        let memory = SessionMemory::new();
        let (slots, slot) = answers(&memory);
        // SAFETY: one consumer.
        let (producer, mut consumer) =
            unsafe { (Producer::new(memory.clone()), Consumer::new(memory)) };
        let answers = slots.clone();
        let worker = thread::spawn(move || {
            for _ in 0..2 {
                take(&mut consumer);
                let sequence = consumer.taken() / 64;
                answers
                    .publish(slot, sequence, 7, &[&sequence.to_le_bytes(), &[9; 8]])
                    .expect("it fits");
            }
        });
        for sequence in 1..=2_u64 {
            push(&producer, 1, &[sequence]);
            let answer = loop {
                match slots.poll(slot, sequence).expect("a correct worker") {
                    Some(answer) => break answer,
                    None => thread::yield_now(),
                }
            };
            assert_eq!((answer.status, answer.length), (7, 16));
            let mut payload = [0; 16];
            slots.copy_payload(slot, 0, &mut payload);
            assert_eq!(payload[..8], sequence.to_le_bytes());
            assert_eq!(payload[8..], [9; 8]);
        }
        worker.join().unwrap();
    });
}

#[test]
fn an_answer_arrives_whole() {
    request_and_answer();
}

#[test]
#[should_panic]
fn an_answer_without_release_is_noticed() {
    without(SyncPoint::Answer, request_and_answer);
}

#[test]
fn a_status_is_set_once() {
    loom::model(|| {
        let status = Status::new(SessionMemory::new());
        let worker = {
            let status = status.clone();
            thread::spawn(move || status.set_once(719, EndCause::ContextDead))
        };
        let lost = status.set_once(999, EndCause::WorkerLost);
        assert_ne!(worker.join().unwrap(), lost);
        assert_eq!(status.load().unwrap().result, if lost { 999 } else { 719 });
    });
}

type End = fn(&SessionState, u32) -> Result<(), TransitionError>;

/// Models a control stream that ends while the worker dies. Only one of the two ends the session.
fn session_ends_once(end: End) {
    loom::model(move || {
        let session = Arc::new(SessionState::new());
        let generation = session.activate().unwrap();
        let attempt = |session: Arc<SessionState>| {
            move || {
                let won = end(&session, generation).is_ok();
                // The winner also reaps the worker; the other thread leaves the session alone.
                if won {
                    session
                        .worker_reaped(generation)
                        .expect("this thread ended the session");
                }
                won
            }
        };
        let stream_ended = thread::spawn(attempt(Arc::clone(&session)));
        let worker_died = thread::spawn(attempt(Arc::clone(&session)));
        let won = [stream_ended.join().unwrap(), worker_died.join().unwrap()];
        assert_eq!(
            won.iter().filter(|won| **won).count(),
            1,
            "the session ended once"
        );
        assert_eq!(session.load(), (State::Quarantined, generation));
        session.scrubbed(generation).unwrap();
        session.release(generation).unwrap();
    });
}

#[test]
fn a_session_ends_once() {
    session_ends_once(SessionState::end);
}

#[test]
#[should_panic]
fn a_session_that_is_looked_at_before_it_is_ended_is_noticed() {
    session_ends_once(|session, generation| {
        let active = session.load() == (State::Active, generation);
        let ended = session.end(generation);
        if active { Ok(()) } else { ended }
    });
}

/// Models a thread that sleeps until `passed` while another lets that come and looks for sleepers. A lock and a
/// condition stand for the kernel's futex.
fn a_sleeper_and_its_waker(
    wait: Wait,
    passed: fn(&SessionMemory) -> bool,
    come: fn(&SessionMemory),
) {
    explore(3, move || {
        let memory = SessionMemory::new();
        let kernel = Arc::new((Mutex::new(()), Condvar::new()));
        let (theirs, queue) = (memory.clone(), Arc::clone(&kernel));
        let waking = thread::spawn(move || {
            come(&theirs);
            let waits = Waits::new(theirs);
            waits.fence_before_look();
            waits.find_due(|_| {
                let _queue = queue.0.lock().unwrap();
                queue.1.notify_all();
            });
        });
        let waits = Waits::new(memory.clone());
        let note = waits.note(1, wait).unwrap();
        loop {
            let asleep = note.announce();
            if passed(&memory) {
                break;
            }
            let mut queued = kernel.0.lock().unwrap();
            while asleep.load(Ordering::Relaxed) == 1 {
                queued = kernel.1.wait(queued).unwrap();
            }
        }
        drop(note);
        assert!(!waits.anyone_sleeps());
        waking.join().unwrap();
    });
}

fn a_fence_wakes() {
    const FENCE: Option<FenceIndex> = FenceIndex::new(1);
    a_sleeper_and_its_waker(
        Wait::Fence(FENCE.unwrap(), 5),
        |memory| Fences::new(memory.clone()).load(FENCE.unwrap()) >= 5,
        |memory| Fences::new(memory.clone()).store(FENCE.unwrap(), 5),
    );
}

#[test]
fn a_thread_that_sleeps_is_woken_by_its_fence() {
    a_fence_wakes();
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_sleep_without_fences_is_noticed() {
    without(SyncPoint::Sleep, a_fence_wakes);
}

/// The slot of the model.
fn answers(memory: &SessionMemory) -> (AnswerSlots, SlotIndex) {
    // SAFETY: one thread publishes to the slot, and one polls it.
    let slots = unsafe { AnswerSlots::new(memory.clone()) };
    (slots, SlotIndex::new(0).unwrap())
}

#[test]
fn a_thread_that_sleeps_is_woken_by_its_answer() {
    a_sleeper_and_its_waker(
        Wait::Answer(SlotIndex::new(0).unwrap(), 3),
        |memory| {
            let (slots, slot) = answers(memory);
            slots.poll(slot, 3).unwrap().is_some()
        },
        |memory| {
            let (slots, slot) = answers(memory);
            slots.publish(slot, 3, 0, &[]).unwrap();
        },
    );
}

#[test]
fn a_thread_that_sleeps_is_woken_by_the_end_of_the_session() {
    a_sleeper_and_its_waker(
        Wait::Fence(FenceIndex::new(0).unwrap(), 1),
        |memory| Status::new(memory.clone()).load().is_some(),
        |memory| {
            Status::new(memory.clone()).set_once(719, EndCause::ContextDead);
        },
    );
}

/// Hands over two entries by a queue that has room for one of them. Loads what the reader has done once they have left
/// the queue.
fn a_queue_and_its_reader() {
    explore(3, || {
        let (mut writer, mut reader) = queue(4);
        let executed = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&executed);
        let executing = thread::spawn(move || {
            let mut entry = Vec::with_capacity(2);
            for number in 1..=2 {
                while !reader.next(&mut entry) {
                    thread::yield_now();
                }
                assert_eq!(entry, [number, number + 10]);
                executed.store(number, Ordering::Relaxed);
                reader.done();
            }
        });
        for number in 1..=2 {
            while !writer.has_room(2) {
                thread::yield_now();
            }
            assert_eq!(seen.load(Ordering::Relaxed), number - 1, "a place is free");
            let mut entry = writer.begin(2);
            entry.word(number);
            entry.word(number + 10);
            assert!(!entry.publish());
        }
        while !writer.has_done(writer.tail()) {
            thread::yield_now();
        }
        assert_eq!(seen.load(Ordering::Relaxed), 2, "an entry is done");
        executing.join().unwrap();
    });
}

#[test]
fn an_entry_arrives_whole_and_leaves_when_it_is_done() {
    a_queue_and_its_reader();
}

#[test]
#[should_panic]
fn an_entry_without_release_is_noticed() {
    without(SyncPoint::Entry, a_queue_and_its_reader);
}

#[test]
#[should_panic]
fn an_execution_without_release_is_noticed() {
    without(SyncPoint::Done, a_queue_and_its_reader);
}

/// Models a reader that is about to sleep, with a flag as its wake. The reader may miss the wake only if it saw the
/// entry.
fn a_sleeping_reader() {
    explore(3, || {
        let (mut writer, mut reader) = queue(8);
        let bell = Arc::new(Mutex::new(false));
        let writing = {
            let bell = Arc::clone(&bell);
            thread::spawn(move || {
                let mut entry = writer.begin(1);
                entry.word(7);
                if entry.publish() {
                    *bell.lock().unwrap() = true;
                }
            })
        };
        let sleeps = reader.announce_sleep();
        writing.join().unwrap();
        assert!(
            !sleeps || *bell.lock().unwrap(),
            "the reader sleeps and nobody wakes it"
        );
        reader.awake();
        let mut entry = Vec::new();
        assert!(reader.next(&mut entry));
        assert_eq!(entry, [7]);
    });
}

#[test]
fn a_reader_that_sleeps_is_woken() {
    a_sleeping_reader();
}

#[test]
#[should_panic(expected = "the reader sleeps and nobody wakes it")]
fn a_reader_without_fences_is_noticed() {
    without(SyncPoint::Idle, a_sleeping_reader);
}
