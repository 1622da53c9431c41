//! Sends requests over the ring one at a time and times them: the round trip of a forwarded call.
//!
//! | word | writer | meaning |
//! |---|---|---|
//! | 0 | host | address of the session segment |
//! | 1 | host | number of requests |
//! | 2 | host | address of one word per request for its duration in time stamps; 0: do not record |
//! | 3 | payload | completed requests |
//! | 4 | payload | total duration in time stamps |
//! | 5 | host | 1: ring the doorbell for each request, and wait in the host |
#![no_std]
#![no_main]

use core::sync::atomic::Ordering;

use wormhole_api::{Encode, MemGetInfo, Message};
use wormhole_payload::{Parameters, entry, ring, session, shared_word, timestamp, wait};
use wormhole_ring::ring::{Producer, RecordHead};
use wormhole_ring::slot::{AnswerSlots, SlotIndex};

entry!(main);

/// Answer slot. The payload is the only thread of its session.
const SLOT: u16 = 0;

fn main(parameters: Parameters, _vcpu: u64) -> u32 {
    // SAFETY: the host passed a session segment that it mapped for this payload alone.
    let (producer, slots) = unsafe {
        let session = session(parameters.load(0));
        (Producer::new(session.clone()), AnswerSlots::new(session))
    };
    let Some(slot) = SlotIndex::new(SLOT) else {
        return 1;
    };
    let record = parameters.load(2);
    let rings = parameters.load(5) == 1;
    let begin = timestamp();
    for sequence in 1..=parameters.load(1) {
        let start = timestamp();
        let head = RecordHead::request(MemGetInfo::ID, slot, sequence);
        let sent = MemGetInfo {}.encode(|parts| producer.push(head, parts));
        if !matches!(sent, Ok(Ok(()))) {
            return 2;
        }
        if rings {
            ring();
        }
        while !matches!(slots.poll(slot, sequence), Ok(Some(_))) {
            match rings {
                true => wait(),
                false => core::hint::spin_loop(),
            }
        }
        if record != 0 {
            // SAFETY: the host reserved one word per request at this address.
            let sample = unsafe { shared_word(record + 8 * (sequence - 1)) };
            sample.store(timestamp() - start, Ordering::Relaxed);
        }
        parameters.store(3, sequence);
    }
    parameters.store(4, timestamp() - begin);
    0
}
