//! Reads and unpacks a file of NVIDIA's driver, and an archive as such a file has it.

use crate::open_files;

pub fn run(input: &[u8]) {
    let scratch = tempfile::tempdir().expect("a folder");
    let before = open_files();
    wormhole_images::fuzzing::play(scratch.path(), input);
    assert_eq!(open_files(), before, "descriptors are left open");
}
