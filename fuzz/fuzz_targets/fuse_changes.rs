//! Serves the files of a folder to a guest that may change them and sends anything, while the host moves folders out of it
//! and back.
//!
//! Checks that requests change nothing outside of the exported folder, that each reply is well-formed and contains nothing
//! from outside, and that no descriptor is open at the end.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let scratch = tempfile::tempdir().expect("a folder");
    let before = open_files();
    wormhole_fs::fuzzing::play_changes(scratch.path(), input).expect("the host's part");
    assert_eq!(open_files(), before, "descriptors are left open");
});

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}
