//! Tests of the ring, the slots and the header page, with both sides in one process.

#![cfg(not(loom))]
#![expect(
    clippy::cast_possible_truncation,
    reason = "numbers that repeat every 256 do for payloads"
)]

use wormhole_ring::{
    layout::{self, FENCES, MAX_BODY, RING_BYTES, SLOTS, UNIT, session},
    memory::{OwnedMemory, WindowMemory},
    ring::{Consumer, Producer, PushError, RecordBuf, RecordHead, Violation},
    slot::{AnswerSlots, SlotError, SlotIndex},
    status::{Cause, EndCause, Status},
};

/// Scales a count down under miri, which interleaves threads step by step and runs some thousand
/// times slower.
const fn scaled(count: u64) -> u64 {
    if cfg!(miri) { count / 500 } else { count }
}

struct Session {
    producer: Producer,
    consumer: Consumer,
    /// The session's bytes, for tests that act as a hostile side.
    window: WindowMemory,
    // Dropped last.
    _region: OwnedMemory,
}

impl Session {
    fn new() -> Self {
        let region = OwnedMemory::segments(1);
        // SAFETY: the region lives as long as the rest of this value; there is one consumer.
        unsafe {
            let session = region.session(0).unwrap();
            Self {
                producer: Producer::new(session.clone()),
                consumer: Consumer::new(session),
                window: region.window().unwrap(),
                _region: region,
            }
        }
    }

    fn write_word(&self, offset: usize, word: u64) {
        self.window.write(offset, &word.to_le_bytes()).unwrap();
    }

    fn read_word(&self, offset: usize) -> u64 {
        let mut word = [0; 8];
        self.window.read(offset, &mut word).unwrap();
        u64::from_le_bytes(word)
    }

    fn take(&mut self) -> Result<Option<(RecordHead, Vec<u8>)>, Violation> {
        let mut buf = Box::new(RecordBuf::new());
        Ok(self
            .consumer
            .take(&mut buf)?
            .map(|head| (head, buf.body().to_vec())))
    }
}

const RECORD: RecordHead = RecordHead::record(33);

#[test]
fn a_record_keeps_every_field() {
    let mut session = Session::new();
    let head = RecordHead {
        message: 7,
        thread: 0x8001,
        slot: SlotIndex::new(127),
        device: 5,
        sequence: u64::MAX - 1,
    };
    session
        .producer
        .push(head, &[b"one", b"", b"two, three"])
        .unwrap();
    assert_eq!(session.take(), Ok(Some((head, b"onetwo, three".to_vec()))));
    assert_eq!(session.take(), Ok(None));
}

#[test]
fn bodies_of_every_length_arrive_over_several_laps() {
    let mut session = Session::new();
    let bytes: Vec<u8> = (0..MAX_BODY).map(|index| (index % 251) as u8).collect();
    let step = if cfg!(miri) { 509 } else { 7 };
    let mut bytes_sent = 0;
    for length in (0..=MAX_BODY).step_by(step).chain([MAX_BODY]) {
        session.producer.push(RECORD, &[&bytes[..length]]).unwrap();
        let (head, body) = session.take().unwrap().unwrap();
        assert_eq!((head, &body[..]), (RECORD, &bytes[..length]));
        bytes_sent += length;
    }
    assert!(cfg!(miri) || bytes_sent > 2 * RING_BYTES);
    assert!(session.producer.is_drained());
}

#[test]
fn a_body_longer_than_a_record_is_refused() {
    let session = Session::new();
    let half = [0; MAX_BODY / 2 + 1];
    let refused = PushError::TooLong {
        length: 2 * half.len(),
        limit: MAX_BODY,
    };
    assert_eq!(session.producer.push(RECORD, &[&half, &half]), Err(refused));
    assert_eq!(session.read_word(session::TAIL), 0);
}

#[test]
#[cfg_attr(miri, ignore = "goes once around the ring in the smallest steps")]
fn a_full_ring_takes_one_more_record_for_each_that_leaves() {
    let mut session = Session::new();
    for _ in 0..RING_BYTES / UNIT {
        session.producer.push(RECORD, &[&[1; 32]]).unwrap();
    }
    let full = Err(PushError::Full { needed: UNIT });
    assert_eq!(session.producer.push(RECORD, &[]), full);
    assert!(!session.producer.is_drained());
    session.take().unwrap().unwrap();
    assert_eq!(session.producer.push(RECORD, &[]), Ok(()));
    assert_eq!(session.producer.push(RECORD, &[]), full);
}

#[test]
fn a_taken_place_holds_no_word_that_looks_published() {
    let mut session = Session::new();
    session.producer.push(RECORD, &[&[0xFF; MAX_BODY]]).unwrap();
    session.take().unwrap().unwrap();
    for unit in 0..layout::MAX_RECORD / UNIT {
        assert_eq!(
            session.read_word(session::RING_BASE + unit * UNIT),
            0,
            "unit {unit}"
        );
    }
}

#[test]
fn park_sees_a_record_that_came_before_it() {
    let mut session = Session::new();
    assert_eq!(session.consumer.park(), Ok(true));
    assert!(session.producer.consumer_parked());
    session.consumer.unpark();
    assert!(!session.producer.consumer_parked());
    session.producer.push(RECORD, &[]).unwrap();
    assert_eq!(session.consumer.park(), Ok(false));
    assert!(!session.producer.consumer_parked());
    session.take().unwrap().unwrap();
    assert_eq!(session.consumer.park(), Ok(true));
}

/// Writes `word` as the first entry's commit word and returns the consumer's violation.
fn violation(word: u64) -> Violation {
    let mut session = Session::new();
    session.write_word(session::RING_BASE, word);
    let first = session.take().unwrap_err();
    assert_eq!(session.take(), Err(first), "the consumer stays where it is");
    first
}

#[test]
fn an_impossible_commit_word_is_a_violation() {
    let longer = layout::MAX_RECORD as u64 / UNIT as u64 + 1;
    for word in [1 << 17 | 1, u64::from(u32::MAX), longer, 0xFFFF, 1 << 16] {
        assert_eq!(violation(word), Violation::Commit { cursor: 0, word });
    }
    let lap = Violation::Lap {
        cursor: 0,
        found: 5,
        expected: 0,
    };
    assert_eq!(violation(5 << 32 | 1), lap);
    let overrun = Violation::Overrun {
        cursor: 0,
        bytes: UNIT,
        left: RING_BYTES,
    };
    assert_eq!(violation(1 << 16 | 1), overrun);
}

#[test]
#[cfg_attr(miri, ignore = "goes once around the ring in the smallest steps")]
fn an_entry_past_the_end_of_the_ring_is_a_violation() {
    let mut session = Session::new();
    for _ in 0..RING_BYTES / UNIT - 1 {
        session.producer.push(RECORD, &[]).unwrap();
        session.take().unwrap().unwrap();
    }
    session.write_word(session::RING_BASE + RING_BYTES - UNIT, 2);
    let cursor = (RING_BYTES - UNIT) as u64;
    let overrun = Violation::Overrun {
        cursor,
        bytes: 2 * UNIT,
        left: UNIT,
    };
    assert_eq!(session.take(), Err(overrun));
}

#[test]
fn a_body_that_contradicts_its_entry_is_a_violation() {
    for body_len in [33, 97, 0x7FFF_FFFF, u32::MAX] {
        let mut session = Session::new();
        session.producer.push(RECORD, &[&[0; 8]]).unwrap();
        session
            .window
            .write(session::RING_BASE + 20, &body_len.to_le_bytes())
            .unwrap();
        let violation = Violation::Body {
            cursor: 0,
            body_len,
            bytes: UNIT,
        };
        assert_eq!(session.take(), Err(violation));
    }
}

#[test]
fn an_answer_slot_that_does_not_exist_is_a_violation() {
    let mut session = Session::new();
    session.producer.push(RECORD, &[]).unwrap();
    session
        .window
        .write(session::RING_BASE + 12, &128_u16.to_le_bytes())
        .unwrap();
    assert_eq!(
        session.take(),
        Err(Violation::Slot {
            cursor: 0,
            slot: 128
        })
    );
}

#[test]
fn a_tail_where_no_producer_can_be_is_a_violation() {
    for tail in [1, 63, RING_BYTES as u64 + 64, 1 << 62] {
        let session = Session::new();
        session.write_word(session::TAIL, tail);
        assert_eq!(
            session.consumer.park(),
            Err(Violation::Tail { tail, head: 0 })
        );
        assert!(!session.producer.consumer_parked());
    }
}

#[test]
fn the_shared_head_is_never_believed_by_the_consumer() {
    let mut session = Session::new();
    session.producer.push(RECORD, &[b"first"]).unwrap();
    session.write_word(session::HEAD, 0x5555_5555_5555);
    assert_eq!(session.take(), Ok(Some((RECORD, b"first".to_vec()))));
    assert_eq!(session.read_word(session::HEAD), UNIT as u64);
}

#[test]
#[cfg_attr(miri, ignore = "goes once around the ring in the smallest steps")]
fn cursors_that_contradict_each_other_end_the_producer() {
    let session = Session::new();
    session.write_word(session::TAIL, 7);
    assert_eq!(
        session.producer.push(RECORD, &[]),
        Err(PushError::Corrupt { head: 0, tail: 7 })
    );

    let session = Session::new();
    let tail = 2 * RING_BYTES as u64;
    session.write_word(session::TAIL, tail);
    assert_eq!(
        session.producer.push(RECORD, &[]),
        Err(PushError::Corrupt { head: 0, tail })
    );

    let session = Session::new();
    for _ in 0..RING_BYTES / UNIT {
        session.producer.push(RECORD, &[]).unwrap();
    }
    let (head, tail) = (u64::MAX, RING_BYTES as u64);
    session.write_word(session::HEAD, head);
    assert_eq!(
        session.producer.push(RECORD, &[]),
        Err(PushError::Corrupt { head, tail })
    );
}

#[test]
fn records_of_many_producers_arrive_once_and_in_each_ones_order() {
    const PRODUCERS: usize = 4;
    let records = scaled(100_000);
    let mut session = Session::new();
    let producer = &session.producer;
    std::thread::scope(|scope| {
        for thread in 0..PRODUCERS {
            scope.spawn(move || {
                for sequence in 0..records {
                    let length = (sequence as usize * 37 + thread) % 200;
                    let body = [sequence as u8; 200];
                    let head = RecordHead {
                        thread: thread as u16,
                        sequence,
                        ..RECORD
                    };
                    while let Err(error) = producer.push(head, &[&body[..length]]) {
                        assert!(matches!(error, PushError::Full { .. }), "{error}");
                        std::thread::yield_now();
                    }
                }
            });
        }
        let mut buf = RecordBuf::new();
        let mut next = [0; PRODUCERS];
        while next.iter().any(|&sequence| sequence < records) {
            match session.consumer.take(&mut buf).unwrap() {
                None => std::thread::yield_now(),
                Some(head) => {
                    let thread = usize::from(head.thread);
                    assert_eq!(head.sequence, next[thread]);
                    assert_eq!(
                        buf.body().len(),
                        (head.sequence as usize * 37 + thread) % 200
                    );
                    assert!(buf.body().iter().all(|&byte| byte == head.sequence as u8));
                    next[thread] += 1;
                }
            }
        }
    });
    assert_eq!(session.take(), Ok(None));
    assert!(session.producer.is_drained());
}

/// Threads pass a counter to each other under a lock and push its value. The ring must hold the
/// values in the order in which they were passed.
#[test]
fn what_threads_hand_to_each_other_stays_in_order() {
    let hand_overs = scaled(100_000);
    let mut session = Session::new();
    let producer = &session.producer;
    let counter = std::sync::Mutex::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let mut counter = counter.lock().unwrap();
                    if *counter == hand_overs {
                        return;
                    }
                    let head = RecordHead {
                        sequence: *counter,
                        ..RECORD
                    };
                    match producer.push(head, &[]) {
                        Ok(()) => *counter += 1,
                        Err(error) => assert!(matches!(error, PushError::Full { .. }), "{error}"),
                    }
                }
            });
        }
        let mut buf = RecordBuf::new();
        let mut expected = 0;
        while expected < hand_overs {
            if let Some(head) = session.consumer.take(&mut buf).unwrap() {
                assert_eq!(head.sequence, expected);
                expected += 1;
            } else {
                std::thread::yield_now();
            }
        }
    });
}

#[test]
fn an_answer_reaches_the_thread_that_polls_its_slot() {
    let region = OwnedMemory::segments(1);
    // SAFETY: the region outlives the threads; each slot is polled by one of them.
    let slots = unsafe { AnswerSlots::new(region.session(0).unwrap()) };
    let rounds = scaled(20_000);
    std::thread::scope(|scope| {
        for slot in [0, SLOTS as u16 - 1].map(|index| SlotIndex::new(index).unwrap()) {
            let (answers, polls) = (slots.clone(), slots.clone());
            let (asked, requests) = std::sync::mpsc::channel();
            scope.spawn(move || {
                for sequence in requests {
                    let payload = [sequence as u8; 48];
                    answers
                        .publish(slot, sequence, sequence as u32, &[&payload])
                        .unwrap();
                }
            });
            scope.spawn(move || {
                for sequence in 1..=rounds {
                    asked.send(sequence).unwrap();
                    let answer = loop {
                        match polls.poll(slot, sequence).unwrap() {
                            Some(answer) => break answer,
                            None => std::thread::yield_now(),
                        }
                    };
                    assert_eq!((answer.status, answer.length), (sequence as u32, 48));
                    let mut tail = [0; 16];
                    polls.copy_payload(slot, 32, &mut tail);
                    assert_eq!(tail, [sequence as u8; 16]);
                }
            });
        }
    });
}

#[test]
fn an_answer_longer_than_its_slot_is_refused_on_both_sides() {
    let region = OwnedMemory::segments(1);
    // SAFETY: the region outlives the slots.
    let (slots, window) = unsafe {
        (
            AnswerSlots::new(region.session(0).unwrap()),
            region.window().unwrap(),
        )
    };
    let slot = SlotIndex::new(5).unwrap();
    let too_long = Err(SlotError::TooLong {
        slot: 5,
        length: 4097,
    });
    assert_eq!(slots.publish(slot, 1, 0, &[&[0; 4097]]), too_long);
    assert_eq!(slots.poll(slot, 1), Ok(None));
    slots.publish(slot, 1, 0, &[&[0; 4096]]).unwrap();
    let header = session::SLOT_BASE + 5 * session::SLOT_STRIDE;
    window.write(header + 12, &4097_u32.to_le_bytes()).unwrap();
    assert_eq!(slots.poll(slot, 1).map(|_| ()), too_long);
}

#[test]
fn the_first_end_of_a_session_is_the_one_that_counts() {
    let region = OwnedMemory::segments(1);
    // SAFETY: the region outlives the status word.
    let status = Status::new(unsafe { region.session(0) }.unwrap());
    std::thread::scope(|scope| {
        let ends: Vec<_> = (1..=4)
            .map(|result| {
                let status = &status;
                scope.spawn(move || (result, status.set_once(result, EndCause::WorkerLost)))
            })
            .collect();
        let won: Vec<_> = ends.into_iter().map(|end| end.join().unwrap()).collect();
        let [winner] = won.iter().filter(|(_, won)| *won).collect::<Vec<_>>()[..] else {
            panic!("not one winner: {won:?}");
        };
        assert_eq!(
            status.load(),
            Some(Cause {
                result: winner.0,
                cause: 2
            })
        );
    });
}

#[test]
fn the_layout_is_the_one_that_is_documented() {
    assert_eq!(session::SLOT_STRIDE, 4160);
    assert_eq!(session::FENCE_BASE + FENCES * 8, session::RING_BASE);
    let words = [
        session::STATUS,
        session::TAIL,
        session::HEAD,
        session::PARKED,
    ];
    assert_eq!(words, [0, 128, 256, 384]);
    assert_eq!((session::GENERATION, session::LOCAL_CALLS), (512, 640));
}
