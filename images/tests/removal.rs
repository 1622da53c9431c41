//! Removal of unpacked images by a process with few descriptors. The only test of its process, whose limit it changes.

use std::fs;
use std::os::unix::fs::symlink;

use rustix::process::{Resource, getrlimit, setrlimit};
use wormhole_images::remove_unpacked;

#[test]
fn folders_are_removed_however_deep_they_lie() {
    const DEPTH: usize = 300;
    const DESCRIPTORS: u64 = 64;
    let outer = tempfile::tempdir().expect("a folder");
    let root = outer.path().join("root");
    let deep = vec!["deep"; DEPTH].join("/");
    // Names as removal gives them.
    for name in ["1/1", "1/2", "2/1/2", &deep] {
        fs::create_dir_all(root.join(name)).expect("a folder");
    }
    fs::write(root.join("3"), "").expect("a file");
    fs::write(root.join("1/1/file"), "").expect("a file");
    symlink(outer.path(), root.join("1/link")).expect("a link");
    fs::write(outer.path().join("outside"), "").expect("a file");
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(DESCRIPTORS);
    setrlimit(Resource::Nofile, limit).expect("fewer descriptors");
    remove_unpacked(&root).expect("it is removed");
    let left: Vec<_> = fs::read_dir(outer.path()).expect("a folder").collect();
    assert_eq!(left.len(), 1);
}
