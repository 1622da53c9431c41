//! Boots the emulated host with QEMU.
//!
//! `cargo xtask test` builds the images, stages an installation, and sets WORMHOLE_IMAGES and WORMHOLE_STAGE.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use wormhole_images::{
    Absence, Collected, EmulatedHost, Ending, HostRun, Image, ImageError, Kernel, Report,
    host_overlay,
};

fn from_environment(key: &str) -> PathBuf {
    std::env::var_os(key)
        .unwrap_or_else(|| panic!("{key} is not set: run these tests by `cargo xtask test`"))
        .into()
}

/// Result of a run: standard output, standard error and the report.
struct Finished {
    stdout: String,
    stderr: String,
    outcome: Result<Report, ImageError>,
}

/// Runs a shell script instead of `wormhole`.
fn run(kernel: Kernel, script: &str, timeout: Duration) -> Finished {
    let mut stdout = Vec::new();
    let (stderr, outcome) = run_with(kernel, script, timeout, None, &mut stdout);
    Finished {
        stdout: String::from_utf8(stdout).expect("text"),
        stderr,
        outcome,
    }
}

/// Runs a shell script with standard input and output. Returns its standard error and the outcome.
fn run_with(
    kernel: Kernel,
    script: &str,
    timeout: Duration,
    stdin: Option<BorrowedFd<'_>>,
    stdout: &mut (dyn Write + Send),
) -> (String, Result<Report, ImageError>) {
    let images = from_environment("WORMHOLE_IMAGES");
    let overlay = host_overlay(&HostRun {
        init: from_environment("WORMHOLE_STAGE").join("lib/wormhole/wormhole-init"),
        wormhole: "/bin/sh".into(),
        parts: Vec::new(),
        images: vec![Image::guest(&images, Kernel::V6_1).expect("it was built")],
        arguments: vec!["-c".into(), script.into()],
        stdin: stdin.is_some(),
        terminal: None,
        variables: vec![("GREETING".into(), "good\nmorning".into())],
        programs: vec!["/bin/cat".into()],
        has_files: false,
        volumes: Vec::new(),
        taps: 0,
        collect: vec!["/run/summary.json".into(), "/run/nothing".into()],
    })
    .expect("every part is there");
    let image = Image::emulated_host(&images, kernel).expect("it was built");
    let host = EmulatedHost {
        image: &image,
        overlay: &overlay,
        memory: 768 << 20,
        processors: 2,
        disks: &[],
        nvme_disks: &[],
        networks: &[],
        files: &[],
        timeout: Some(timeout),
        stdin,
        signals: None,
    };
    let mut stderr = Vec::new();
    let outcome = host.run(stdout, &mut stderr);
    (String::from_utf8(stderr).expect("text"), outcome)
}

/// Output of a program that waits for a line of input. The line is written when the output has arrived here.
struct Answering {
    output: Vec<u8>,
    input: UnixStream,
}

impl Write for Answering {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.output.extend(bytes);
        self.input.write_all(b"\n")?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn output_status_and_files_come_back_apart_from_each_other() {
    let script = "echo \"$GREETING\"; echo trouble >&2; echo '{}' > /run/summary.json
        cat /proc/sys/kernel/panic_on_rcu_stall /var/lib/wormhole/images/guest-6.1/release
        test -c /dev/kvm && exit 7";
    let finished = run(Kernel::V6_1, script, Duration::from_secs(120));
    let report = finished.outcome.expect("it reports");
    assert_eq!(report.ending, Ending::Exited(7));
    assert_eq!(
        report.collected,
        [
            Collected::File(b"{}\n".to_vec()),
            Collected::Absent(Absence::Missing)
        ]
    );
    let release = finished.stdout.strip_prefix("good\nmorning\n1\n");
    assert!(
        release.is_some_and(|release| release.starts_with("6.1.")),
        "{}",
        finished.stdout
    );
    assert_eq!(finished.stderr, "trouble\n");
}

/// Returns a line of `/proc/PID/status` of each QEMU that this process started.
fn of_qemus(line: &str) -> Vec<String> {
    let own = format!("PPid:\t{}\n", std::process::id());
    let processes = std::fs::read_dir("/proc").expect("proc is mounted");
    processes
        .flatten()
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("status")).ok())
        .filter(|status| status.starts_with("Name:\tqemu") && status.contains(&own))
        .filter_map(|status| {
            let value = status.lines().find_map(|found| found.strip_prefix(line))?;
            Some(value.trim().to_owned())
        })
        .collect()
}

#[test]
fn the_machines_own_system_calls_are_filtered_while_a_large_output_comes_back_whole() {
    const FILTERED: &str = "2";
    let script = "i=0; line=$(cat /etc/group /etc/passwd /etc/hosts)
        while [ $i -lt 20000 ]; do echo \"$line\"; i=$((i+1)); done; kill -9 $$";
    let machine = std::thread::spawn(|| run(Kernel::V6_1, script, Duration::from_secs(180)));
    let mut filtered = false;
    while !filtered && !machine.is_finished() {
        filtered = of_qemus("Seccomp:").iter().any(|mode| mode == FILTERED);
        std::thread::sleep(Duration::from_millis(10));
    }
    let finished = machine.join().expect("it ends");
    assert!(filtered, "the system calls of QEMU are not filtered");
    let report = finished.outcome.expect("it reports");
    assert_eq!(report.ending, Ending::Signalled(9), "a signal is told");
    assert_eq!(report.ending.status(), 137);
    assert_eq!(finished.stdout.lines().count(), 60_000);
}

#[test]
fn a_machine_that_does_not_end_is_given_up() {
    let start = Instant::now();
    let finished = run(Kernel::V6_1, "while :; do :; done", Duration::from_secs(1));
    let error = finished.outcome.expect_err("it never ends");
    assert!(matches!(error, ImageError::HostTimeout { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(120));
}

#[test]
fn a_machine_that_dies_is_started_once_more_unless_its_program_has_said_something() {
    let dies = "echo b > /proc/sysrq-trigger; sleep 60";
    let finished = run(Kernel::V6_1, dies, Duration::from_secs(120));
    let error = finished.outcome.expect_err("it dies again");
    assert!(matches!(error, ImageError::HostDied { .. }), "{error}");
    let told = finished.stderr.matches("it is started once more").count();
    assert_eq!(told, 1, "{}", finished.stderr);

    // A machine that dies loses the output that is underway, so that this one waits until it has arrived.
    let script = format!("echo begun; read line; {dies}");
    let (program, input) = UnixStream::pair().expect("a pair");
    let mut stdout = Answering {
        output: Vec::new(),
        input,
    };
    let limit = Duration::from_secs(120);
    let stdin = Some(program.as_fd());
    let (stderr, outcome) = run_with(Kernel::V6_1, &script, limit, stdin, &mut stdout);
    let error = outcome.expect_err("it dies");
    assert!(matches!(error, ImageError::HostDied { .. }), "{error}");
    assert_eq!((&stdout.output[..], stderr.as_str()), (&b"begun\n"[..], ""));
}
