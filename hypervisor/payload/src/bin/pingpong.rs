//! Plays ping-pong on two words of the window with a host thread: the minimal round trip.
//!
//! | word | writer | meaning |
//! |---|---|---|
//! | 0 | host | address of the word that the payload writes |
//! | 1 | host | address of the word that the host writes in response |
//! | 2 | host | number of rounds |
//! | 3 | host | address of one word per round for its duration in time stamps; 0: do not record |
//! | 4 | payload | completed rounds |
//! | 5 | payload | total duration in time stamps |
#![no_std]
#![no_main]

use core::sync::atomic::Ordering;

use wormhole_payload::{Parameters, entry, shared_word, timestamp};

entry!(main);

fn main(parameters: Parameters, _vcpu: u64) -> u32 {
    // SAFETY: the host passed addresses of mapped words in the window.
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
            // SAFETY: the host reserved one word per round at this address.
            let slot = unsafe { shared_word(record + 8 * (round - 1)) };
            slot.store(timestamp() - start, Ordering::Relaxed);
        }
        parameters.store(4, round);
    }
    parameters.store(5, timestamp() - begin);
    0
}
