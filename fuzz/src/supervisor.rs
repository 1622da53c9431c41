//! Runs a supervisor of several tenants: launchers, guests and workers that send anything and end in any order.
//!
//! The supervisor's accounts are checked after each step. At the end all of them leave, and no session, segment or
//! descriptor may remain.

use crate::open_files;

pub fn run(input: &[u8]) {
    let before = open_files();
    _ = wormhole_supervisor::fuzzing::play(input);
    assert_eq!(open_files(), before, "descriptors are left open");
}
