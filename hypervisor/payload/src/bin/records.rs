//! Pushes records into the ring back to back and times them: the cost of an asynchronous forwarded call
//! to its caller.
//!
//! Bursts are timed one by one. The consumer leaves a backlog in the ring, so that every timed record is
//! written while the ring holds others.
//!
//! | word | writer | meaning |
//! |---|---|---|
//! | 0 | host | address of the session segment |
//! | 1 | host | number of bursts |
//! | 2 | host | number of records in a burst |
//! | 3 | host | address of one word per burst for its duration in time stamps |
//! | 4 | payload | records written |
//! | 5 | payload | bursts that began with an empty ring |
#![no_std]
#![no_main]

use core::sync::atomic::Ordering;

use wormhole_api::{DevicePtr, Element, Encode, Handle, MemSet, Message};
use wormhole_payload::{Parameters, entry, session, shared_word, timestamp};
use wormhole_ring::ring::{Producer, PushError, RecordHead};

entry!(main);

fn main(parameters: Parameters, _vcpu: u64) -> u32 {
    // SAFETY: the host passed a session segment that it mapped for this payload alone.
    let producer = unsafe { Producer::new(session(parameters.load(0))) };
    let bursts = parameters.load(1);
    let length = parameters.load(2);
    let samples = parameters.load(3);
    let message = MemSet {
        destination: DevicePtr(0x6000_0000_0000),
        pitch: 0,
        width: 1024,
        height: 1,
        value: 7,
        element: Element::Word,
        stream: Handle::LEGACY,
    };
    let head = RecordHead::record(MemSet::ID);
    let push = || loop {
        match message.encode(|parts| producer.push(head, parts)) {
            Ok(Ok(())) => return true,
            Ok(Err(PushError::Full { .. })) => core::hint::spin_loop(),
            _ => return false,
        }
    };
    let mut written = 0;
    let mut empty = 0;
    for burst in 0..bursts {
        if producer.is_drained() {
            empty += 1;
        }
        let start = timestamp();
        for _ in 0..length {
            if !push() {
                return 1;
            }
        }
        // SAFETY: the host reserved one word per burst at this address.
        let sample = unsafe { shared_word(samples + 8 * burst) };
        sample.store(timestamp() - start, Ordering::Relaxed);
        written += length;
        parameters.store(4, written);
    }
    parameters.store(5, empty);
    0
}
