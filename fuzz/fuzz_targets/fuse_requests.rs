//! Serves the files of a folder to a guest that sends anything, while the host moves folders out of it and back.
//!
//! Checks that each reply is well-formed and contains nothing from outside of the exported folder, and that no descriptor
//! is open at the end.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let scratch = tempfile::tempdir().expect("a folder");
    let before = open_files();
    wormhole_fs::fuzzing::play(scratch.path(), input).expect("the host's part");
    assert_eq!(open_files(), before, "descriptors are left open");
});

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}
