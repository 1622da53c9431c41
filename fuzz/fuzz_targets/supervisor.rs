//! A supervisor of several tenants: launchers, guests and workers that say anything and end in any order.
//!
//! The books of the supervisor are checked after each step. In the end everybody leaves, and no session, no segment and no
//! descriptor may be left.

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
