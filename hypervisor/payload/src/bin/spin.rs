//! The control run: spins on private memory, never on the window.
//!
//! | word | who writes | meaning |
//! |---|---|---|
//! | 0 | host | turns to make; 0: until word 1 is not 0 |
//! | 1 | host | stop |
//! | 2 | payload | turns made |
//! | 3 | payload | time stamps that passed |
#![no_std]
#![no_main]

use wormhole_payload::{Parameters, entry, timestamp};

entry!(main);

fn main(parameters: Parameters, _vcpu: u64) -> u32 {
    let turns = parameters.load(0);
    let start = timestamp();
    let mut made = 0u64;
    // The parameter block is private to this payload and the host: no word of it is in the window.
    while parameters.load(1) == 0 && (turns == 0 || made < turns) {
        core::hint::spin_loop();
        made += 1;
    }
    parameters.store(2, made);
    parameters.store(3, timestamp() - start);
    0
}
