//! `kill -9` of each party in the middle of a run: no hang, no leak, and an error for whoever is left.

use std::time::Duration;

use crate::harness::{Underway, alone, eventually, kill_9, leftovers, program, wormhole};

/// How soon everything must be gone once a party was killed.
const SOON: Duration = Duration::from_secs(20);

fn spinning() -> Underway {
    let run = Underway::start(wormhole(&["run", "--placement", "process", "--"]).arg(program("static", "spin")));
    let said = run.working();
    assert!(said.contains("spinning"), "the program said: {said}");
    run
}

fn nothing_is_left() {
    eventually("the end of all processes", SOON, || leftovers().is_empty());
    let shared: Vec<_> = std::fs::read_dir("/dev/shm")
        .expect("/dev/shm exists")
        .flatten()
        .map(|entry| entry.file_name())
        .filter(|name| name.to_string_lossy().contains("wormhole"))
        .collect();
    assert!(shared.is_empty(), "left in /dev/shm: {shared:?}");
}

/// The program's synchronize returned, and with an error.
fn assert_error(stdout: &str) {
    let said = stdout.lines().find(|line| line.starts_with("cudaDeviceSynchronize()"));
    let said = said.unwrap_or_else(|| panic!("the program's wait never returned: {stdout}"));
    assert!(!said.ends_with("cudaSuccess"), "the program learned nothing: {stdout}");
}

#[test]
fn a_killed_program_ends_the_run_with_its_signal() {
    let _alone = alone();
    let run = spinning();
    kill_9(run.pid_of("spin"));
    let finished = run.finish();
    assert_eq!(finished.status.code(), Some(128 + libc::SIGKILL), "{}", finished.stderr);
    nothing_is_left();
}

#[test]
fn a_killed_worker_is_an_error_in_the_program() {
    let _alone = alone();
    let run = spinning();
    kill_9(run.pid_of("wormhole-worker"));
    let finished = run.finish();
    assert_error(&finished.stdout);
    assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
    nothing_is_left();
}

#[test]
fn a_killed_supervisor_is_an_error_in_the_program() {
    let _alone = alone();
    let run = spinning();
    kill_9(run.pid_of("wormhole-supervisor"));
    let finished = run.finish();
    assert_error(&finished.stdout);
    nothing_is_left();
}

#[test]
fn a_killed_launcher_takes_everything_along() {
    let _alone = alone();
    let run = spinning();
    let spin = run.pid_of("spin");
    kill_9(run.pid_of("wormhole"));
    run.finish();
    nothing_is_left();
    eventually("the program's end", SOON, || !std::path::Path::new(&format!("/proc/{spin}")).exists());
}
