//! Checks that soaks of a few seconds pass.

use std::path::Path;
use std::process::Command;

/// Runs a soak. Returns its last line, or all that it said if it failed.
fn soak(options: &[&str]) -> Result<String, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the project's root");
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .arg("soak")
        .args(options)
        .arg("--stage")
        .arg(root.join("target/wormhole"))
        .output()
        .expect("the soak starts");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let last = stdout.lines().last().unwrap_or_default();
    match output.status.success() && last.starts_with("soak: PASS ") {
        true => Ok(last.to_owned()),
        false => Err(format!(
            "{}: {stdout}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}

#[test]
fn a_short_soak_finds_nothing_wrong() {
    let last = soak(&["--minutes", "0.1", "--lanes", "2"]).unwrap_or_else(|said| panic!("{said}"));
    assert!(last.contains(" wrong=0 "), "{last}");
}

/// The eighth window's launcher is killed. QEMU's emulation of virtualization fails now and then, and never thrice.
#[test]
fn windows_come_and_go_beside_a_guest() {
    let mut ends = (0..3).map(|_| soak(&["--windows", "9"]));
    let last = ends.find_map(|end| end.inspect_err(|said| println!("{said}")).ok());
    let last = last.expect("one of three soaks passes");
    assert!(last.contains(" windows=9 "), "{last}");
    assert!(!last.contains("killed_ms=0.0/"), "{last}");
}
