//! Programs in real guest VMs: on this machine's KVM where it runs Linux, on the emulated host otherwise.

use std::path::PathBuf;

use crate::bad_input;
use crate::harness::{
    Finished, PATIENCE, alone, demo_programs, finish, finish_within, images, program, wormhole,
};

macro_rules! names {
    ($($name:ident)*) => { [$(stringify!($name)),*] };
}

/// The demo's programs.
const PROGRAMS: &[&str] = &demo_programs!(names);

/// Runs a shell script in a guest that has these programs.
fn in_guest(kernel: &str, programs: &[PathBuf], script: &str, more: &[&str]) -> Finished {
    let mut command = wormhole(&["run", "--placement", "host", "--kernel", kernel]);
    command.args(more);
    for program in programs {
        command.arg("--take").arg(program);
    }
    finish(command.args(["--", "/bin/sh", "-c", script]))
}

fn all_programs_pass(kernel: &str) {
    let _alone = alone();
    let programs: Vec<PathBuf> = ["static", "shared"]
        .iter()
        .flat_map(|link| PROGRAMS.iter().map(|name| program(link, name)))
        .collect();
    let script: String = programs
        .iter()
        .map(|path| format!("{} || exit 1\n", path.display()))
        .collect();
    let run = in_guest(
        kernel,
        &programs,
        &format!("read -r version < /proc/version; echo \"$version\"; {script}"),
        &[],
    );
    assert!(
        run.status.success(),
        "{:?}\n{}\n{}",
        run.status,
        run.stdout,
        run.stderr
    );
    assert!(
        run.stdout.starts_with(&format!("Linux version {kernel}.")),
        "another kernel than {kernel}: {}",
        run.stdout
    );
    for name in PROGRAMS {
        let passed = |line: &&str| line.split(' ').take(2).eq(["PASS", name]);
        assert_eq!(
            run.stdout.lines().filter(passed).count(),
            2,
            "{name}\n{}",
            run.stdout
        );
    }
    // What the backend says of the guest's processes.
    let sessions = format!("{} sessions", programs.len());
    assert!(run.stderr.contains(&sessions), "{}", run.stderr);
}

/// The names of the programs in a folder of sources, in order.
fn sources(folder: &str) -> Vec<String> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../programs")).join(folder);
    let mut found: Vec<String> = std::fs::read_dir(path)
        .expect("the folder of programs")
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name().into_string().ok()?;
            // A folder with a main unit is one program.
            let is_program = entry.path().join("main.cu").is_file();
            let name = name.strip_suffix(".cu").or(is_program.then_some(&name))?;
            Some(name.to_owned())
        })
        .collect();
    found.sort();
    found
}

#[test]
fn no_program_of_the_demo_is_forgotten_here() {
    assert_eq!(sources(""), PROGRAMS);
}

#[test]
fn programs_pass_on_linux_6_1() {
    all_programs_pass("6.1");
}

#[test]
fn programs_pass_on_linux_6_12() {
    all_programs_pass("6.12");
}

/// The folders of programs that check the driver API with one device: each says `PASS` and its name.
const SUITES: [&str; 3] = ["api", "memory", "nvml"];

/// Programs of the suites that a guest cannot serve.
const NOT_IN_A_GUEST: [(&str, &str); 2] = [
    (
        "registered",
        "moves pages of the program's into the window, which a guest maps in whole segments",
    ),
    (
        "shared_files",
        "registers a file where it is, and files of a guest are not the backend's",
    ),
];

/// The programs of the suites, each built with the runtime that its test at `process` placement takes.
fn suites() -> Vec<(&'static str, String)> {
    let mut found = vec![("static", "lives".to_owned())];
    for folder in SUITES {
        let link = if folder == "nvml" { "shared" } else { "static" };
        found.extend(sources(folder).into_iter().map(|name| (link, name)));
    }
    found
}

#[test]
fn the_suites_pass_in_a_guest() {
    let _alone = alone();
    let mut suites = suites();
    for (not, _) in NOT_IN_A_GUEST {
        let before = suites.len();
        suites.retain(|(_, name)| name != not);
        assert_eq!(suites.len() + 1, before, "{not} is no program");
    }
    let mut taken = Vec::new();
    let mut script = String::new();
    for (link, name) in &suites {
        let path = program(link, name);
        script.push_str(&format!("{} || echo FAILED {name} $?\n", path.display()));
        taken.push(path);
    }
    // What programs load by themselves.
    taken.push(program("shared", "libcudart.so.13"));
    let handoff = program("shared", "handoff");
    script.push_str(&format!("{} 50\n", handoff.display()));
    taken.push(handoff);

    let run = in_guest("6.1", &taken, &script, &["--timeout", "280"]);
    let passed = |name: &str| {
        let mut lines = run.stdout.lines();
        lines.any(|line| line.split(' ').take(2).eq(["PASS", name]))
    };
    let names = suites.iter().map(|(_, name)| name.as_str());
    let failed: Vec<&str> = names.filter(|name| !passed(name)).collect();
    assert!(
        failed.is_empty(),
        "{failed:?} did not pass\n{}\n{}",
        run.stdout,
        run.stderr
    );
    assert!(run.stdout.contains("inversions 0"), "{}", run.stdout);
    assert!(run.status.success(), "{:?}\n{}", run.status, run.stderr);
}

/// More than two thousand cases, most in a process of its own.
#[test]
fn bad_input_in_a_guest_is_answered_as_natively() {
    let _alone = alone();
    bad_input::is_answered_as_natively(|program, calls| {
        let mut command = wormhole(&["run", "--placement", "host", "--timeout", "880", "--take"]);
        command.arg(calls).arg("--").args([program, calls]).arg("1");
        finish_within(&mut command, 3 * PATIENCE)
    });
}

#[test]
fn a_guest_sees_all_devices_of_its_tenant() {
    let _alone = alone();
    let peers = program("static", "peers");
    let run = finish(wormhole(&["run", "--device", "cpu:2", "--"]).arg(peers));
    assert!(run.status.success(), "{}\n{}", run.stdout, run.stderr);
    assert!(run.stdout.contains("PASS peers: 2"), "{}", run.stdout);
}

/// What launching adds to a guest's exits: less than one in twenty, where a call that trapped would add one.
#[test]
fn launches_of_a_guest_make_no_exits() {
    const LAUNCHES: u64 = 20_480;
    let _alone = alone();
    let steady = program("static", "steady");
    let json = tempfile::NamedTempFile::new().expect("a file");
    let run = finish(
        wormhole(&["run", "--json"])
            .arg(json.path())
            .arg("--")
            .args([steady.as_os_str(), LAUNCHES.to_string().as_ref()]),
    );
    assert!(run.status.success(), "{}\n{}", run.stdout, run.stderr);
    let text = std::fs::read(json.path()).expect("the summary is there");
    let summary: serde_json::Value = serde_json::from_slice(&text).expect("it is JSON");
    let exits = |account: usize| {
        summary["exit_accounts"][account]
            .as_u64()
            .unwrap_or_else(|| panic!("no account {account}: {summary}"))
    };
    let launched = summary["sessions"][0]["messages"]["LaunchKernel"].as_u64();
    assert!(launched >= Some(LAUNCHES), "{summary}");
    let (launching, spinning) = (exits(1), exits(2));
    assert!(spinning > 0, "the guest's timer made no exit: {summary}");
    assert!(
        launching.saturating_sub(spinning) < LAUNCHES / 20,
        "{launching} exits while launching, {spinning} while spinning"
    );
}

#[test]
fn output_and_status_come_out_of_the_guest_apart() {
    let _alone = alone();
    let run = in_guest(
        "6.1",
        &[],
        "echo to stdout; echo to stderr >&2; exit 43",
        &[],
    );
    assert_eq!(run.status.code(), Some(43), "{}", run.stderr);
    assert_eq!(run.stdout, "to stdout\n");
    assert!(run.stderr.contains("to stderr\n"), "{}", run.stderr);
}

#[test]
fn a_killed_process_of_a_guest_leaves_its_memory_to_the_other() {
    let _alone = alone();
    let neighbour = program("static", "neighbour");
    let script = format!("{0} && {0} pidns", neighbour.display());
    let run = in_guest("6.1", &[neighbour], &script, &["--window", "192M"]);
    assert!(
        run.status.success(),
        "{:?}\n{}\n{}",
        run.status,
        run.stdout,
        run.stderr
    );
    assert_eq!(
        run.stdout.matches("PASS neighbour").count(),
        2,
        "{}",
        run.stdout
    );
}

#[test]
fn a_guest_that_panics_says_so() {
    let _alone = alone();
    let run = in_guest(
        "6.1",
        &[],
        "mount -t proc proc /proc 2>/dev/null; echo c > /proc/sysrq-trigger",
        &["--timeout", "60"],
    );
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert!(run.stderr.contains("kernel panicked"), "{}", run.stderr);
}

#[test]
fn a_window_that_the_kernel_took_as_memory_is_refused_by_name() {
    let _alone = alone();
    // The same folder of images, but for what stands at the guest's place.
    let folder = tempfile::tempdir().expect("a folder");
    for (name, image) in [
        ("guest-6.12", format!("{}-6.12", wormhole_images::TAKEN)),
        ("emulated-host-6.1", "emulated-host-6.1".to_owned()),
    ] {
        std::os::unix::fs::symlink(images().join(image), folder.path().join(name)).expect("a link");
    }
    let run = finish(
        wormhole(&["run", "--kernel", "6.12", "--", "/bin/true"])
            .env("WORMHOLE_IMAGES", folder.path()),
    );
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    let sentence = run
        .stderr
        .lines()
        .find(|line| line.contains("as ordinary memory"))
        .unwrap_or_else(|| panic!("no word of the window: {}", run.stderr));
    for words in [
        "the guest could not run the program: the kernel uses the window 0x100000000-",
        "(\"System RAM (kmem)\" in /proc/iomem)",
        "keep the module kmem from being loaded",
    ] {
        assert!(sentence.contains(words), "{words}: {sentence}");
    }
}

/// A program in a small guest that takes memory until there is none left.
fn out_of_memory(before: &str) -> Finished {
    // It keeps its input until the end of a line, which never comes.
    let hungry = PathBuf::from("/usr/bin/tail");
    let script = format!("{before}{} /dev/zero", hungry.display());
    let more = ["--memory", "256M", "--window", "32M"];
    in_guest("6.1", &[hungry], &script, &more)
}

#[test]
fn a_program_killed_for_want_of_guest_memory_says_so() {
    let _alone = alone();
    let run = out_of_memory("");
    assert_eq!(
        run.status.code(),
        Some(128 + libc::SIGKILL),
        "{}",
        run.stderr
    );
    for words in [
        "the guest ran out of memory",
        "Killed process",
        "(tail)",
        "give it more with --memory",
    ] {
        assert!(run.stderr.contains(words), "{words}: {}", run.stderr);
    }
}

#[test]
fn a_guest_that_dies_for_want_of_memory_says_so() {
    let _alone = alone();
    // Otherwise the kernel kills the program, and dies only if that does not help.
    let run = out_of_memory("echo 1 > /proc/sys/vm/panic_on_oom; ");
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert!(
        run.stderr.contains("the guest ran out of memory: "),
        "{}",
        run.stderr
    );
    assert!(!run.stderr.contains("kernel panicked"), "{}", run.stderr);
}

#[test]
fn a_guest_that_hangs_is_stopped() {
    let _alone = alone();
    let run = in_guest("6.1", &[], "while :; do :; done", &["--timeout", "40"]);
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert!(
        run.stderr.contains("did not end within 40"),
        "{}",
        run.stderr
    );
}
