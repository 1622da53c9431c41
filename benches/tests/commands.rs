//! Runs the benchmarks with few calls, so that those of the pages work. Their figures mean nothing here.

use std::path::{Path, PathBuf};
use std::process::Command;

use wormhole_figures::{Report, Row};
use wormhole_monitor::{KvmCaps, probe};

/// Returns whether payloads can run here; prints the reason if not.
fn kvm() -> bool {
    if let KvmCaps::Missing { why } | KvmCaps::Denied { why } = probe() {
        eprintln!("skipped: {why}");
        return false;
    }
    true
}

/// Builds the payloads and returns their folder.
fn payloads() -> PathBuf {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("payload");
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--release", "--manifest-path"])
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../hypervisor/payload/Cargo.toml"
        ))
        .arg("--target-dir")
        .arg(&target)
        .env_remove("RUSTFLAGS")
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the payloads do not build");
    target.join("release")
}

fn printed(command: &mut Command) -> String {
    let output = command.output().expect("it starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn the_benchmarks_of_the_window_measure_a_payload() {
    if !kvm() {
        return;
    }
    let payloads = payloads();
    let folder = tempfile::tempdir().expect("a folder");
    let json = folder.path().join("ring.json");
    let ring = printed(
        Command::new(env!("CARGO_BIN_EXE_ring"))
            .args(["--calls", "1000", "--payloads"])
            .arg(&payloads)
            .arg("--json")
            .arg(&json),
    );
    assert!(ring.contains(" of 10 on an empty ring) | "), "{ring}");
    assert!(ring.contains(" in 960 calls and "), "{ring}");
    let figures = Report::read(&json).expect("the figures");
    assert_eq!(figures.rows.len(), 3, "{figures:?}");
    assert!(figures.rows[0].ratio.is_some(), "{figures:?}");

    let stage = std::env::var_os("WORMHOLE_STAGE").expect("WORMHOLE_STAGE names an installation");
    for transport in ["poll", "doorbell", "socket"] {
        let launches = printed(
            Command::new(Path::new(&stage).join("bin/wormhole"))
                .args(["run", "--placement", "process", "--transport", transport])
                .args(["--device", "cpu", "--"])
                .arg(env!("CARGO_BIN_EXE_launch"))
                .args(["--launches", "100", "--payloads"])
                .arg(&payloads),
        );
        assert!(
            launches.contains(&format!("| {transport} | ")),
            "{launches}"
        );
        assert!(launches.contains("(100 launches) | "), "{launches}");
        assert!(launches.contains("exits per launch | "), "{launches}");
    }
}

#[test]
fn beside_every_attack_the_victim_is_never_refused() {
    let table = printed(
        Command::new(env!("CARGO_BIN_EXE_neighbours")).args(["--rounds", "1", "--slice", "200"]),
    );
    // Three operations beside each of ten attacks and the control.
    let rows = table.lines().filter(|line| line.contains("(beside "));
    assert_eq!(rows.count(), 33, "{table}");
}

#[test]
fn the_benchmarks_of_calls_measure_every_group() {
    let stage = std::env::var_os("WORMHOLE_STAGE").expect("WORMHOLE_STAGE names an installation");
    let folder = tempfile::tempdir().expect("a folder");
    let json = folder.path().join("figures.json");
    for (group, row) in [
        ("calls", "cuLaunchKernel (back to back until done)"),
        ("copies", "cuMemcpyDtoH (256 MiB, pageable)"),
        ("memory", "cuMemSetAccess (20 MiB)"),
        (
            "threads",
            "cuLaunchKernel (8 threads, on one stream, until done)",
        ),
        ("start", "first kernel (8 processes together, last)"),
        (
            "waits",
            "cuLaunchKernel, cuStreamSynchronize (BLOCKING_SYNC, beyond a kernel of 2000 µs)",
        ),
    ] {
        let table = printed(
            Command::new(env!("CARGO_BIN_EXE_calls"))
                .args([group, "--samples", "2", "--turns", "1", "--wormhole"])
                .arg(Path::new(&stage).join("bin/wormhole"))
                .arg("--json")
                .arg(&json),
        );
        assert!(table.contains(&format!("| {row} | ")), "{table}");
        let figures = Report::read(&json).expect("the figures");
        assert!(figures.conditions.device.contains("CUDA "), "{figures:?}");
        let has_time = |row: &Row| row.ns.is_some_and(|ns| ns > 0.0);
        assert!(figures.rows.iter().all(has_time), "{table}");
    }
}

/// Runs a benchmark of programs with this linkage, and returns its table.
fn measured(benchmark: &str, linkage: &str, arguments: &[&str]) -> String {
    let stage = std::env::var_os("WORMHOLE_STAGE").expect("WORMHOLE_STAGE names an installation");
    let programs = std::env::var_os("WORMHOLE_PROGRAMS").expect("the built programs");
    printed(
        Command::new(benchmark)
            .args(arguments)
            .arg("--wormhole")
            .arg(Path::new(&stage).join("bin/wormhole"))
            .arg("--programs")
            .arg(Path::new(&programs).join(linkage)),
    )
}

#[test]
fn the_benchmark_of_workloads_measures_the_programs() {
    let program = env!("CARGO_BIN_EXE_workloads");
    let table = measured(program, "shared", &["--samples", "1", "--turns", "1"]);
    for row in [
        "cudaMemcpy to the host (256 MiB, pinned)",
        "training step of a perceptron (C++, own kernels, batch of 32)",
    ] {
        assert!(table.contains(&format!("| {row} | ")), "{table}");
    }
    // Others are of their processor time, where that is long enough.
    let is_pattern = |line: &&str| line.contains(" (managed memory, ") && line.contains(" MiB) | ");
    assert_eq!(table.lines().filter(is_pattern).count(), 6, "{table}");
}

#[test]
fn the_benchmark_of_programs_times_a_program() {
    let program = env!("CARGO_BIN_EXE_programs");
    let arguments = ["vector_add", "--turns", "1", "--against", "one-processor"];
    let table = measured(program, "static", &arguments);
    let head = "| | poll | ratio | one-processor |\n";
    assert!(table.contains(head), "{table}");
    assert!(table.contains("| vector_add (8000000) | "), "{table}");
}
