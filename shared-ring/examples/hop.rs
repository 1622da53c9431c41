//! Measures the cost of a push and of a round trip on this machine.
//!
//! `cargo run --release -p wormhole-ring --example hop`
//!
//! The bare ping-pong is two threads that pass one word back and forth: the lower bound of any round trip.

use std::{hint::black_box, time::Instant};

use wormhole_ring::{
    memory::{OwnedMemory, SessionMemory},
    ring::{Consumer, Producer, PushError, RecordBuf, RecordHead},
    slot::{AnswerSlots, SlotIndex},
    sync::{AtomicU64, Ordering},
};

const STOP: u16 = u16::MAX;
const PARAMETERS: [u8; 96] = [7; 96];

fn main() {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cpus} CPUs; nanoseconds, best of 5");
    for body in [16, 96, 1024, 4096] {
        let alone = best(|| push_alone(body));
        println!("push of {body:4} bytes, nobody takes      {alone:8.1}");
    }
    for body in [16, 96, 1024, 4096] {
        let hop = best(|| push_and_take(body, 1));
        println!("record of {body:4} bytes, taken meanwhile   {hop:8.1}");
    }
    println!(
        "push, fence and look at PARKED          {:8.1}",
        best(push_and_look)
    );
    println!(
        "record of 96 bytes, two producers       {:8.1}",
        best(|| push_and_take(96, 2))
    );
    let bare = best(bare_ping_pong);
    let round = best(round_trip);
    println!("bare ping-pong                          {bare:8.1}");
    println!(
        "request and answer                      {round:8.1}   {:.2} x bare",
        round / bare
    );
}

fn best(measure: impl Fn() -> f64) -> f64 {
    (0..5).map(|_| measure()).fold(f64::INFINITY, f64::min)
}

fn session(region: &OwnedMemory) -> SessionMemory {
    // SAFETY: every measurement keeps its region until its threads are joined.
    unsafe { region.session(0) }.expect("the region holds one session")
}

fn sides(region: &OwnedMemory) -> (Producer, Consumer) {
    // SAFETY: one consumer per region.
    unsafe {
        (
            Producer::new(session(region)),
            Consumer::new(session(region)),
        )
    }
}

/// Fills the ring repeatedly and times only the pushes.
fn push_alone(body: usize) -> f64 {
    let region = OwnedMemory::segments(1);
    let (producer, mut consumer) = sides(&region);
    let payload = vec![7; body];
    let mut buf = RecordBuf::new();
    let mut pushed = 0_u64;
    let mut nanoseconds = 0;
    while pushed < 500_000 {
        let start = Instant::now();
        let mut burst = 0;
        while burst < 200 && producer.push(RecordHead::record(33), &[&payload]).is_ok() {
            burst += 1;
        }
        nanoseconds += start.elapsed().as_nanos();
        pushed += burst;
        while consumer
            .take(&mut buf)
            .expect("the producer is correct")
            .is_some()
        {}
    }
    nanoseconds as f64 / pushed as f64
}

fn push_and_look() -> f64 {
    let region = OwnedMemory::segments(1);
    let (producer, mut consumer) = sides(&region);
    let mut buf = RecordBuf::new();
    let mut nanoseconds = 0;
    for _ in 0..2000 {
        let start = Instant::now();
        for _ in 0..200 {
            push(&producer, RecordHead::record(33), &PARAMETERS);
            black_box(producer.consumer_parked());
        }
        nanoseconds += start.elapsed().as_nanos();
        while consumer
            .take(&mut buf)
            .expect("the producer is correct")
            .is_some()
        {}
    }
    nanoseconds as f64 / 400_000.0
}

fn push_and_take(body: usize, producers: u64) -> f64 {
    const RECORDS: u64 = 1_000_000;
    let region = OwnedMemory::segments(1);
    let (producer, mut consumer) = sides(&region);
    let payload = vec![7; body];
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut buf = RecordBuf::new();
            let mut left = producers;
            while left > 0 {
                match consumer.take(&mut buf).expect("the producer is correct") {
                    Some(head) if head.message == STOP => left -= 1,
                    Some(_) => _ = black_box(buf.body()),
                    None => std::hint::spin_loop(),
                }
            }
        });
        let start = Instant::now();
        let threads: Vec<_> = (0..producers)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..RECORDS / producers {
                        push(&producer, RecordHead::record(33), &payload);
                    }
                })
            })
            .collect();
        threads
            .into_iter()
            .for_each(|thread| thread.join().expect("a producer"));
        let elapsed = start.elapsed();
        (0..producers).for_each(|_| push(&producer, RecordHead::record(STOP), &[]));
        elapsed.as_nanos() as f64 / RECORDS as f64
    })
}

fn push(producer: &Producer, head: RecordHead, body: &[u8]) {
    loop {
        match producer.push(head, &[body]) {
            Ok(()) => return,
            Err(PushError::Full { .. }) => std::hint::spin_loop(),
            Err(error) => panic!("{error}"),
        }
    }
}

fn round_trip() -> f64 {
    const ROUNDS: u64 = 300_000;
    let region = OwnedMemory::segments(1);
    let (producer, mut consumer) = sides(&region);
    // SAFETY: one thread answers, one polls.
    let slots = unsafe { AnswerSlots::new(session(&region)) };
    let slot = SlotIndex::new(0).expect("the first slot");
    std::thread::scope(|scope| {
        let answers = slots.clone();
        scope.spawn(move || {
            let mut buf = RecordBuf::new();
            loop {
                match consumer.take(&mut buf).expect("the producer is correct") {
                    Some(head) if head.message == STOP => return,
                    Some(head) => {
                        let slot = head.slot.expect("a request");
                        answers
                            .publish(slot, head.sequence, 0, &[&[1; 16]])
                            .expect("it fits");
                    }
                    None => std::hint::spin_loop(),
                }
            }
        });
        let start = Instant::now();
        for sequence in 1..=ROUNDS {
            push(&producer, RecordHead::request(2, slot, sequence), &[3; 16]);
            let answer = loop {
                if let Some(answer) = slots.poll(slot, sequence).expect("a correct worker") {
                    break answer;
                }
                std::hint::spin_loop();
            };
            let mut payload = [0; 16];
            slots.copy_payload(slot, 0, &mut payload[..answer.length]);
            black_box(payload);
        }
        let elapsed = start.elapsed();
        push(&producer, RecordHead::record(STOP), &[]);
        elapsed.as_nanos() as f64 / ROUNDS as f64
    })
}

#[repr(align(128))]
struct Padded(AtomicU64);

fn bare_ping_pong() -> f64 {
    const ROUNDS: u64 = 1_000_000;
    let (ping, pong) = (Padded(AtomicU64::new(0)), Padded(AtomicU64::new(0)));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                while ping.0.load(Ordering::Acquire) != round {
                    std::hint::spin_loop();
                }
                pong.0.store(round, Ordering::Release);
            }
        });
        let start = Instant::now();
        for round in 1..=ROUNDS {
            ping.0.store(round, Ordering::Release);
            while pong.0.load(Ordering::Acquire) != round {
                std::hint::spin_loop();
            }
        }
        start.elapsed().as_nanos() as f64 / ROUNDS as f64
    })
}
