//! The same programs on the native driver and through Wormhole, on a machine with an NVIDIA GPU.

use std::process::{Command, Stdio};

use crate::harness::{Finished, alone, finish, program, wormhole};

/// Whether this machine has a GPU and its driver; says so where not.
fn has_gpu() -> bool {
    let present = std::path::Path::new("/dev/nvidiactl").exists();
    if !present {
        eprintln!("skipped: this machine has no NVIDIA GPU");
    }
    present
}

fn native(link: &str, name: &str) -> Finished {
    finish(Command::new(program(link, name)).stdin(Stdio::null()))
}

fn forwarded(link: &str, name: &str) -> Finished {
    finish(
        wormhole(&["run", "--placement", "process", "--device", "cuda:0", "--"])
            .arg(program(link, name)),
    )
}

/// What the program itself wrote on standard error.
fn own_stderr(run: &Finished) -> String {
    run.stderr
        .lines()
        .filter(|line| !line.starts_with("wormhole: "))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Output, error text and exit status are what the native driver gives.
fn equals_native(link: &str, name: &str) {
    if !has_gpu() {
        return;
    }
    let _alone = alone();
    let (expected, got) = (native(link, name), forwarded(link, name));
    assert_eq!(
        got.stdout, expected.stdout,
        "{name}: standard output; on standard error: {}",
        got.stderr
    );
    assert_eq!(
        own_stderr(&got),
        own_stderr(&expected),
        "{name}: standard error"
    );
    assert_eq!(
        got.status.code(),
        expected.status.code(),
        "{name}: exit status"
    );
}

macro_rules! equal_native {
    ($($test:ident: $link:literal $name:literal;)*) => {$(
        #[test]
        fn $test() {
            equals_native($link, $name);
        }
    )*};
}

equal_native! {
    vector_add_with_the_static_runtime: "static" "vector_add";
    vector_add_with_the_shared_runtime: "shared" "vector_add";
    matrix_mul_with_the_static_runtime: "static" "matrix_mul";
    matrix_mul_with_the_shared_runtime: "shared" "matrix_mul";
    reduction_with_the_static_runtime: "static" "reduction";
    reduction_with_the_shared_runtime: "shared" "reduction";
    streams_and_events_with_the_static_runtime: "static" "streams_events";
    streams_and_events_with_the_shared_runtime: "shared" "streams_events";
    an_illegal_address: "static" "illegal_address";
    a_trap: "static" "trap";
    an_assert: "static" "assert";
    device_printf: "static" "printf";
}

#[test]
fn eight_waiting_threads_are_released_together() {
    if !has_gpu() {
        return;
    }
    let _alone = alone();
    let run = forwarded("static", "eight_waiters");
    let spread_us: f64 = run
        .stdout
        .lines()
        .find_map(|line| line.strip_prefix("PASS eight_waiters spread_us "))
        .and_then(|number| number.trim().parse().ok())
        .unwrap_or_else(|| panic!("no spread in: {}\n{}", run.stdout, run.stderr));
    assert!(
        spread_us <= 100_000.0,
        "the last waiter returned {spread_us} µs after the first"
    );
}
