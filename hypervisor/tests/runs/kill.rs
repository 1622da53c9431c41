//! Kills each party with SIGKILL in the middle of a run. The run must not hang or leave processes behind, and surviving
//! parties get an error.

use crate::harness::{
    PATIENCE, Underway, alone, eventually, nothing_is_left, program, running, wormhole,
};

fn spinning() -> Underway {
    let run = Underway::start(
        wormhole(&["run", "--placement", "process", "--"]).arg(program("static", "spin")),
    );
    let said = run.working();
    assert!(said.contains("spinning"), "the program said: {said}");
    run
}

fn all_has_ended() {
    nothing_is_left();
    eventually("the end of the programs", PATIENCE, || {
        running("spin").is_empty()
    });
}

/// Asserts that the program's cudaDeviceSynchronize returned this error.
fn assert_error(stdout: &str, error: &str) {
    let said = stdout
        .lines()
        .find(|line| line.starts_with("cudaDeviceSynchronize()"));
    assert_eq!(
        said,
        Some(format!("cudaDeviceSynchronize(): {error}").as_str()),
        "{stdout}"
    );
}

#[test]
fn a_killed_program_ends_the_run_with_its_signal() {
    let _alone = alone();
    let run = spinning();
    run.kill_9("spin");
    let finished = run.finish();
    assert_eq!(
        finished.status.code(),
        Some(128 + libc::SIGKILL),
        "{}",
        finished.stderr
    );
    all_has_ended();
}

#[test]
fn a_killed_worker_is_an_error_in_the_program() {
    let _alone = alone();
    let run = spinning();
    run.kill_9("wormhole-worker");
    let finished = run.finish();
    // CUDA_ERROR_CONTEXT_IS_DESTROYED.
    assert_error(&finished.stdout, "cudaErrorContextIsDestroyed");
    assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
    all_has_ended();
}

#[test]
fn a_killed_supervisor_is_an_error_in_the_program() {
    let _alone = alone();
    let run = spinning();
    run.kill_9("wormhole-supervisor");
    let finished = run.finish();
    // CUDA_ERROR_SYSTEM_NOT_READY.
    assert_error(&finished.stdout, "cudaErrorSystemNotReady");
    all_has_ended();
}

#[test]
fn a_killed_launcher_takes_everything_along() {
    let _alone = alone();
    let run = spinning();
    run.kill_9("wormhole");
    run.finish();
    all_has_ended();
}
