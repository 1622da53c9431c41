//! Checks that the demo shows three VMs, and detects a kernel with wrong results.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use wormhole_lock::Mutex;

/// The right to run the demo, which takes all processors and writes to one folder.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs the demo with these options, on programs in the folder of all. Returns its outcome and the text of both its streams.
fn demo(options: &[&str], programs: &[&str]) -> (Output, String) {
    let _alone = ALONE.lock();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the project's root");
    let programs = programs
        .iter()
        .map(|name| root.join("target/programs").join(name));
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .arg("demo")
        .args(options)
        .args(programs)
        .output()
        .expect("the demo starts");
    let streams = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    let said = streams.join("\n");
    (output, said)
}

#[test]
fn the_demo_runs_programs_in_two_guests_of_a_backend_vm() {
    let (output, said) = demo(&[], &["static/reduction", "static/streams_events"]);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    for line in ["first: PASS reduction", "second: PASS streams_events"] {
        assert!(stdout.contains(line), "{line}\n{said}");
    }
    for vm in [
        "backend VM: kvm-",
        "first guest: kvm-",
        "second guest: kvm-",
    ] {
        assert!(stdout.lines().any(|said| said.starts_with(vm)), "{said}");
    }
    let last = stdout.lines().last().unwrap_or_default();
    let words: Vec<&str> = last.split(' ').collect();
    assert_eq!(words[..3], ["demo:", "PASS", "programs=2"], "{last}");
    assert_eq!(words[4..6], ["backend=vm", "vms=3"], "{last}");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let readme = fs::read_to_string(root.join("README.md")).expect("the page");
    let shown = readme.lines().find(|line| line.starts_with("demo: PASS "));
    let names = |line: &str| -> Vec<String> {
        let words = line.split(' ').map(|word| word.split('=').next());
        words
            .map(|name| name.unwrap_or_default().to_owned())
            .collect()
    };
    assert_eq!(names(shown.expect("a line")), names(last));
    let number = |word: &str, name: &str| {
        let value = word.strip_prefix(name).map(str::parse::<f64>);
        value
            .and_then(Result::ok)
            .unwrap_or_else(|| panic!("{name} {last}"))
    };
    assert!(number(words[6], "requests=") > 0.0, "{last}");
    assert!(number(words[7], "records=") > 102_400.0, "{last}");
    assert!(number(words[8], "exits_per_call=") <= 0.05, "{last}");
    assert!(
        number(words[9], "backend_exits_per_call=") <= 0.05,
        "{last}"
    );
}

#[test]
fn the_demo_fails_where_a_kernel_is_broken() {
    let programs = ["static/reduction", "broken/vector_add"];
    let (output, said) = demo(&["--backend", "process"], &programs);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("PASS reduction"), "{said}");
    assert!(said.contains("FAIL vector_add"), "{said}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let last = stdout.lines().last().unwrap_or_default();
    assert!(last.starts_with("demo: FAIL 1 of 2"), "{last}");
}
