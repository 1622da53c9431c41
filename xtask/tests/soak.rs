//! Checks that a soak of a few seconds passes.

use std::path::Path;
use std::process::Command;

#[test]
fn a_short_soak_finds_nothing_wrong() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the project's root");
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["soak", "--minutes", "0.1", "--lanes", "2", "--stage"])
        .arg(root.join("target/wormhole"))
        .output()
        .expect("the soak starts");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stdout}\n{stderr}");
    let last = stdout.lines().last().unwrap_or_default();
    assert!(last.starts_with("soak: PASS "), "{last}\n{stderr}");
    assert!(last.contains(" wrong=0 "), "{last}\n{stderr}");
}
