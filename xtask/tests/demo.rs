//! Checks that the demo detects a kernel with wrong results.

use std::path::Path;
use std::process::Command;

#[test]
fn the_demo_fails_where_a_kernel_is_broken() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the project's root");
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .arg("demo")
        .arg(root.join("target/programs/static/reduction"))
        .arg(root.join("target/programs/broken/vector_add"))
        .output()
        .expect("the demo starts");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stdout}\n{stderr}");
    assert!(stdout.contains("PASS reduction"), "{stdout}\n{stderr}");
    assert!(stdout.contains("FAIL vector_add"), "{stdout}\n{stderr}");
    let last = stdout.lines().last().unwrap_or_default();
    assert!(last.starts_with("demo: FAIL 1 of 2"), "{last}");
}
