//! Two protocol versions, each served by its own worker.

use std::path::{Path, PathBuf};
use std::process::Command;

use wormhole_api::{MemGetInfo, PROTOCOL_HASH};
use wormhole_backend_tests::backend::{Backend, Workers};
use wormhole_ring::control::Attach;

/// Message that only the next version has.
const PROTOCOL_HASH_MESSAGE: u16 = 1000;

/// Builds a worker of the next protocol version where the tests are built, and for the same packages: nearly all that does
/// not depend on the version is there already, with the same features.
fn next_worker() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--workspace"])
        .args(["--bin", "wormhole-worker-next"])
        .args(["--features", "wormhole-worker/next"])
        .arg("--target-dir")
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .unwrap();
    assert!(status.success(), "the next version's worker does not build");
    target.join("debug/wormhole-worker-next")
}

#[test]
fn guests_of_two_versions_are_served_side_by_side() {
    let next = next_worker();
    let output = Command::new(&next).arg("--protocol").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let next_hash = u64::from_str_radix(text.trim(), 16).unwrap();
    assert_ne!(next_hash, PROTOCOL_HASH);
    let this = Path::new(env!("CARGO_BIN_EXE_worker"));
    let mut backend = Backend::start(Workers::of(&[this, &next]), &[]);
    backend.attach(64, Attach::default()).unwrap();

    let mut old = backend.connect().open();
    let mut new = backend.connect().open_with(next_hash);
    assert_eq!(old.grant.protocol_hash, PROTOCOL_HASH);
    assert_eq!(new.grant.protocol_hash, next_hash);
    assert_eq!(old.call(&MemGetInfo {}).status, 0);
    let answer = new.call_raw(PROTOCOL_HASH_MESSAGE, &[]).unwrap();
    assert_eq!(answer.status, 0);
    assert_eq!(answer.payload, next_hash.to_le_bytes());
    // The older worker does not know the message.
    let cause = old.call_raw(PROTOCOL_HASH_MESSAGE, &[]).unwrap_err();
    assert_eq!(cause.result, 999);
    assert_eq!(new.call(&MemGetInfo {}).status, 0);

    let mut stranger = backend.connect();
    stranger.hello(1, "");
    let wormhole_backend_tests::guest::Reply::Refused(_, reason) = stranger.receive() else {
        panic!("not refused");
    };
    for hash in [1, PROTOCOL_HASH, next_hash] {
        assert!(reason.contains(&format!("{hash:016x}")), "{reason}");
    }
}
