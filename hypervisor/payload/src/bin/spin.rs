//! Spins on private memory, never on the window, as a control run.
//!
//! | word | writer | meaning |
//! |---|---|---|
//! | 0 | host | number of iterations; 0: until word 1 is not 0 |
//! | 1 | host | stops the payload if not 0 |
//! | 2 | payload | completed iterations |
//! | 3 | payload | duration in time stamps |
#![no_std]
#![no_main]

use wormhole_payload::{Parameters, entry, timestamp};

entry!(main);

fn main(parameters: Parameters, _vcpu: u64) -> u32 {
    let turns = parameters.load(0);
    let start = timestamp();
    let mut made = 0u64;
    // The parameter block is shared by this payload and the host only; it does not lie in the window.
    while parameters.load(1) == 0 && (turns == 0 || made < turns) {
        core::hint::spin_loop();
        made += 1;
    }
    parameters.store(2, made);
    parameters.store(3, timestamp() - start);
    0
}
