//! Ping-pong on two words of the window with a thread of the host: the bare round trip.
//!
//! | word | who writes | meaning |
//! |---|---|---|
//! | 0 | host | address of the word that the payload writes |
//! | 1 | host | address of the word that the host answers in |
//! | 2 | host | rounds |
//! | 3 | host | address of one word per round for its duration in time stamps; 0: do not record |
//! | 4 | payload | rounds made |
//! | 5 | payload | time stamps that passed in all |
#![no_std]
#![no_main]

use core::sync::atomic::Ordering;

use wormhole_payload::{Parameters, entry, shared_word, timestamp};

entry!(main);

fn main(parameters: Parameters, _vcpu: u64) -> u32 {
    // SAFETY: the host names mapped words of the window.
    let (ping, pong) = unsafe {
        (
            shared_word(parameters.load(0)),
            shared_word(parameters.load(1)),
        )
    };
    let rounds = parameters.load(2);
    let record = parameters.load(3);
    let begin = timestamp();
    for round in 1..=rounds {
        let start = timestamp();
        // SYNC POINT: ping, with the host's load.
        ping.store(round, Ordering::Release);
        // SYNC POINT: pong, with the host's store.
        while pong.load(Ordering::Acquire) != round {
            core::hint::spin_loop();
        }
        if record != 0 {
            // SAFETY: the host gave room for one word per round there.
            let slot = unsafe { shared_word(record + 8 * (round - 1)) };
            slot.store(timestamp() - start, Ordering::Relaxed);
        }
        parameters.store(4, round);
    }
    parameters.store(5, timestamp() - begin);
    0
}
