//! Runs a supervisor of several tenants: launchers, guests and workers that send anything and end in any order.
//!
//! The supervisor's accounts are checked after each step. At the end all of them leave, and no session, segment or
//! descriptor may remain.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let before = open_files();
    _ = wormhole_supervisor::fuzzing::play(input);
    assert_eq!(open_files(), before, "descriptors are left open");
});

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}
