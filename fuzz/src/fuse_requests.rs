//! Serves the files of a folder to a guest that sends anything, while the host moves folders out of it and back.
//!
//! Checks that each reply is well-formed and contains nothing from outside of the exported folder, and that no descriptor
//! is open at the end.

use crate::open_files;

pub fn run(input: &[u8]) {
    let scratch = tempfile::tempdir().expect("a folder");
    let before = open_files();
    wormhole_fs::fuzzing::play(scratch.path(), input).expect("the host's part");
    assert_eq!(open_files(), before, "descriptors are left open");
}
