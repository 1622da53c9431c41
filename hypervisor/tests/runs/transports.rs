//! Programs by the transports that exist to be measured: they do the same as by the ring.

use crate::harness::{alone, finish, nothing_is_left, program, wormhole};

const TRANSPORTS: [&str; 2] = ["doorbell", "socket"];

/// Runs a program by each transport and asserts that it verified its own results.
fn passes(name: &str) {
    let _alone = alone();
    for transport in TRANSPORTS {
        let options = ["run", "--placement", "process", "--transport", transport];
        let run = finish(wormhole(&options).arg(program("shared", name)));
        let said = format!("{transport}: {}\n{}", run.stdout, run.stderr);
        assert!(run.status.success(), "{said}");
        assert!(run.stdout.contains(&format!("PASS {name}")), "{said}");
    }
    nothing_is_left();
}

#[test]
fn launches_and_copies() {
    passes("matrix_mul");
}

#[test]
fn copies_of_all_sizes() {
    passes("sets_and_copies");
}

#[test]
fn streams_and_threads() {
    passes("streams");
}

#[test]
fn graphs() {
    passes("graphs");
}

#[test]
fn host_functions() {
    passes("host_functions");
}

#[test]
fn an_error_of_the_device_reaches_the_program() {
    passes("illegal_address");
}

#[test]
fn a_guest_has_one_transport() {
    let run = finish(wormhole(&["run", "--transport", "socket"]).arg(program("shared", "waits")));
    assert_eq!(run.status.code(), Some(2));
    assert!(run.stderr.contains("--placement process"), "{}", run.stderr);
}
