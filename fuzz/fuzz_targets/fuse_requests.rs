//! Serves the files of a folder to a guest that sends anything, while the host moves folders out of it and back.
//!
//! No reply may tell of what is outside, and each is in order. At the end no descriptor may remain.

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
