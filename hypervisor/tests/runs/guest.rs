//! Runs programs in guest VMs: on this machine's KVM if it can run Linux, on the emulated host otherwise.

use std::ffi::OsString;
use std::fs::Permissions;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::NamedTempFile;

use crate::bad_input;
use crate::harness::{
    Ended, FAILED_EMULATION, Finished, GUEST_PATIENCE, alone, beside_other_guests, demo_programs,
    finish, for_emulation, per_thread_programs, program, with_own_signals, wormhole,
};
use crate::process::{AFTER_12_1, BROKEN, FAULTS};

macro_rules! names {
    ($($name:ident)*) => { [$(stringify!($name)),*] };
}

/// Programs of the demo.
pub const PROGRAMS: &[&str] = &demo_programs!(names);

/// Programs that are also built for per-thread default streams.
const PER_THREAD: &[&str] = &per_thread_programs!(names);

/// Folders of programs that check the driver API with one device. Each prints `PASS` and its name.
const SUITES: [&str; 3] = ["api", "memory", "nvml"];

/// Other folders of programs.
const OTHERS: [&str; 6] = ["devices", "exits", "faults", "input", "lives", "order"];

/// Programs of [`OTHERS`] that tests here, in `guest_kill` and in `backend_vm` start by name, beside [`FAULTS`].
const BY_NAME: [&str; 10] = [
    "bad_input",
    "copying",
    "eight_waiters",
    "handoff",
    "hostile",
    "lives",
    "neighbour",
    "peers",
    "spin",
    "steady",
];

/// Programs that no guest runs, each with the reason.
const NOT_IN_A_GUEST: [(&str, &str); 4] = [
    (
        "beside",
        "answers questions of a test that has two tenants on one backend",
    ),
    (
        "race",
        "shows what the checker says, which leaves the backend as all that it says",
    ),
    (
        "many",
        "fills a window of two gigabytes, for which the emulated host would need as much memory",
    ),
    (
        "waits",
        "measures processor time, most of which emulation takes where a guest is emulated",
    ),
];

/// Runs a shell script in a guest.
fn in_guest(kernel: &str, script: &str, more: &[&str]) -> Finished {
    let mut command = wormhole(&["run", "--placement", "host", "--kernel", kernel]);
    finish(command.args(more).args(["--", "/bin/sh", "-c", script]))
}

/// A program: the runtime that it was built with, and its name.
type Built = (&'static str, String);

/// Runs programs one after another in a guest, after a script that may be empty, and asserts that each prints `PASS`
/// and its name.
fn all_pass(kernel: &str, programs: &[Built], script: &str, more: &[&str]) -> Finished {
    let mut script = script.to_owned();
    for (link, name) in programs {
        let path = program(link, name);
        script.push_str(&format!(
            "{} || echo FAILED {link} {name} $?\n",
            path.display()
        ));
    }
    let run = in_guest(kernel, &script, more);
    assert!(
        run.status.success(),
        "{:?}\n{}\n{}",
        run.status,
        run.stdout,
        run.stderr
    );
    for (_, name) in programs {
        let said = run.stdout.lines().filter(|line| {
            let mut words = line.split([' ', ':']);
            words.next() == Some("PASS") && words.next() == Some(name)
        });
        let builds = programs.iter().filter(|(_, other)| other == name);
        assert_eq!(
            said.count(),
            builds.count(),
            "{name}\n{}\n{}",
            run.stdout,
            run.stderr
        );
    }
    assert!(!run.stdout.contains("FAILED"), "{}", run.stdout);
    run
}

/// Returns each of these programs as built for each of these runtimes.
fn built(links: &[&'static str], names: &[&str]) -> Vec<Built> {
    links
        .iter()
        .flat_map(|link| names.iter().map(|name| (*link, (*name).to_owned())))
        .collect()
}

/// Returns each of these programs as built for one of these runtimes, by turns. Without a guest each runs with all.
fn built_by_turns(links: &[&'static str], names: &[&str]) -> Vec<Built> {
    let named = names.iter().map(|name| (*name).to_owned());
    links.iter().copied().cycle().zip(named).collect()
}

/// Prints the version of the guest's kernel.
const VERSION: &str = "read -r version < /proc/version; echo \"$version\"\n";

fn assert_version(run: &Finished, kernel: &str) {
    assert!(
        run.stdout.starts_with(&format!("Linux version {kernel}.")),
        "another kernel than {kernel}: {}",
        run.stdout
    );
}

/// Returns the names of the programs in a folder of sources, in order.
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
fn every_program_runs_in_a_guest_or_is_known_not_to() {
    let faults = FAULTS.iter().map(|(name, _)| *name);
    let known: Vec<&str> = faults
        .chain(BY_NAME)
        .chain(NOT_IN_A_GUEST.map(|(name, _)| name))
        .collect();
    for name in OTHERS.iter().flat_map(|folder| sources(folder)) {
        assert!(known.contains(&name.as_str()), "{name} is not run");
    }
}

/// Covers the demo's programs, faults, wrong kernels, waiting threads, and threads that pass a counter to each other.
#[test]
fn programs_pass_on_linux_6_1_and_say_what_they_say_elsewhere() {
    let _beside = beside_other_guests();
    let programs = built_by_turns(&["static", "shared"], PROGRAMS);
    let run = all_pass("6.1", &programs, &(VERSION.to_owned() + &elsewhere()), &[]);
    assert_version(&run, "6.1");
    assert_said_as_elsewhere(&run);
}

/// The programs are compiled by CUDA 13.0, 11.8 and 12.4, the latter also with the runtimes of 12.1 and 12.9.
#[test]
fn programs_of_all_releases_pass_on_linux_6_12() {
    let _beside = beside_other_guests();
    let links = [
        "static", "shared", "cuda11", "cuda12", "cuda12.1", "cuda12.9",
    ];
    let mut programs = built_by_turns(&links, PROGRAMS);
    for (link, name) in &mut programs {
        if *link == "cuda12.1" && AFTER_12_1.contains(&name.as_str()) {
            *link = "cuda12";
        }
    }
    // The kernel leaves the window's region idle, and it is divided otherwise than on 6.1.
    programs.extend(built(&["static"], &["registered_load"]));
    let run = all_pass("6.12", &programs, VERSION, &[]);
    assert_version(&run, "6.12");
    let version = run.stdout.lines().next().unwrap_or_default();
    assert!(
        version.contains("+deb13-cloud-"),
        "not Debian 13's: {version}"
    );
    // Each program is one session in the backend's summary.
    let sessions = format!("{} sessions", programs.len());
    assert!(run.stderr.contains(&sessions), "{}", run.stderr);
}

/// Returns the programs of the suites, each with one of the runtimes of its tests at `process` placement.
fn suites() -> Vec<Built> {
    let mut found = built(&["static"], &["lives"]);
    for folder in SUITES {
        let links: &[&str] = match folder {
            "nvml" => &["shared"],
            _ => &["static", "shared"],
        };
        let names = sources(folder);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        found.extend(built_by_turns(links, &names));
    }
    found.extend(built(&["per-thread"], PER_THREAD));
    found.retain(|(_, name)| NOT_IN_A_GUEST.iter().all(|(not, _)| name != not));
    found
}

#[test]
fn the_suites_pass_in_a_guest() {
    let _beside = beside_other_guests();
    all_pass("6.1", &suites(), "", &[]);
}

/// Kills processes while their pages move into the window and back, two at a time.
#[test]
fn a_process_that_is_killed_leaves_none_of_its_registered_memory_in_the_window() {
    const KILLS: usize = 6;
    let _beside = beside_other_guests();
    let load = program("static", "registered_load");
    let script = format!(
        "load={}\n\
         $load room || exit\n\
         for moment in $(seq {KILLS}); do\n\
         $load loop >/tmp/first & first=$!\n\
         $load loop >/tmp/second & second=$!\n\
         until grep -q looping /tmp/first && grep -q looping /tmp/second; do\n\
         kill -0 $first && kill -0 $second || exit\n\
         sleep 0.1\n\
         done\n\
         sleep 0.$moment; kill -9 $first $second; wait; rm /tmp/first /tmp/second; echo killed\n\
         done\n\
         $load room && $load",
        load.display()
    );
    let run = in_guest("6.1", &script, &[]);
    let said = format!("{}\n{}", run.stdout, run.stderr);
    assert!(run.status.success(), "{said}");
    assert_eq!(run.stdout.matches("killed\n").count(), KILLS, "{said}");
    assert!(run.stdout.contains("PASS registered_load\n"), "{said}");
    let rooms: Vec<_> = run
        .stdout
        .lines()
        .filter(|line| line.starts_with("room for "))
        .collect();
    let [before, after] = rooms[..] else {
        panic!("{said}");
    };
    assert_eq!(before, after, "{said}");
    assert_ne!(before, "room for 0 MiB", "{said}");
}

/// Returns a script of programs whose output [`assert_said_as_elsewhere`] reads.
fn elsewhere() -> String {
    let start = |link, name| program(link, name).display().to_string();
    let mut script = String::new();
    for (name, _) in FAULTS {
        // One in 14 of its 134 ways to wait for a fault, each in a process of its own.
        let step = if name == "sticky" { " 14" } else { "" };
        script.push_str(&format!(
            "{}{step} || echo FAILED {name} $?\n",
            start("static", name)
        ));
    }
    for name in BROKEN {
        script.push_str(&format!(
            "{}; echo broken {name} $?\n",
            start("broken", name)
        ));
    }
    script.push_str(&format!(
        "echo fault | {}\n",
        start("static", "eight_waiters")
    ));
    script.push_str(&format!("{} 50\n", start("shared", "handoff")));
    script
}

fn assert_said_as_elsewhere(run: &Finished) {
    let faults = FAULTS.iter().flat_map(|(_, lines)| *lines);
    let errs = BROKEN.map(|name| [format!("FAIL {name}: index "), format!("broken {name} 1\n")]);
    let others = ["PASS eight_waiters", "inversions 0"];
    let lines = faults.copied().chain(others);
    for line in lines.chain(errs.as_flattened().iter().map(String::as_str)) {
        assert!(
            run.stdout.contains(line),
            "{line:?}\n{}\n{}",
            run.stdout,
            run.stderr
        );
    }
}

/// Neighbours of the attacker.
const NEIGHBOURS: [&str; 3] = ["vector_add", "reduction", "prefix_scan"];

/// Returns a script whose output [`assert_unharmed`] reads. Root in the guest overwrites its session while the worker
/// serves it, sends garbage on control streams, and finally overwrites the whole window.
fn attack() -> String {
    let hostile = program("static", "hostile");
    let hostile = hostile.display();
    let [first, second, third] =
        NEIGHBOURS.map(|name| program("static", name).display().to_string());
    let mut script = String::new();
    for way in ["session 1", "session 2", "streams 3"] {
        script.push_str(&format!(
            "{hostile} {way} & {first} & {second} & {third}; wait\n"
        ));
    }
    // Programs that read the bootstrap after that are refused.
    script.push_str(&format!("{hostile} window 4\n{first}; echo then $?\n"));
    script
}

/// Asserts that neighbouring sessions have computed correctly, and that the run has ended normally.
fn assert_unharmed(run: &Finished) {
    assert!(run.status.success(), "{}\n{}", run.stdout, run.stderr);
    for name in NEIGHBOURS {
        let passed = run.stdout.matches(&format!("PASS {name} ")).count();
        assert_eq!(passed, 3, "{name}\n{}\n{}", run.stdout, run.stderr);
    }
    for line in [
        "hostile session: 1 ranges",
        "hostile window: done",
        "then 1\n",
    ] {
        assert!(run.stdout.contains(line), "{line}\n{}", run.stdout);
    }
    for line in [
        "the guest broke the protocol: a control message starts with",
        "is no window: the window starts with",
    ] {
        assert!(run.stderr.contains(line), "{line}\n{}", run.stderr);
    }
}

/// Bad input covers some hundred cases, most in a process of their own. `bad_input` has all of them without a guest.
#[test]
fn bad_input_and_an_attacker_in_a_guest_harm_their_own_sessions_and_not_the_host() {
    let _beside = beside_other_guests();
    let mut attacked = None;
    bad_input::is_answered_as_natively(16, |program, calls| {
        let (program, calls) = (program.display(), calls.display());
        let script = format!("{program} {calls} 1 || exit\necho attack\n{}", attack());
        let mut run = in_guest("6.1", &script, &[]);
        if let Some((answers, rest)) = run.stdout.split_once("attack\n") {
            attacked = Some(Finished {
                status: run.status,
                stdout: rest.to_owned(),
                stderr: run.stderr.clone(),
            });
            run.stdout = answers.to_owned();
        }
        run
    });
    assert_unharmed(&attacked.expect("the bad input ended normally"));
}

/// Runs a program for several devices, also with only some of them visible, and programs for one device.
#[test]
fn a_guest_sees_all_devices_of_its_tenant() {
    let _beside = beside_other_guests();
    let one = [
        "vector_add",
        "pools",
        "virtual_memory",
        "contexts",
        "managed_variables",
    ];
    let peers = program("static", "peers");
    let mut script = format!("{0} && CUDA_VISIBLE_DEVICES=1,0 {0}", peers.display());
    for name in one {
        script.push_str(&format!(" && {}", program("static", name).display()));
    }
    let run = in_guest("6.1", &script, &["--device", "cpu:3"]);
    assert!(run.status.success(), "{}\n{}", run.stdout, run.stderr);
    let passed = ["peers: 3 devices", "peers: 2 devices"]
        .into_iter()
        .chain(one);
    for name in passed {
        assert!(
            run.stdout.contains(&format!("PASS {name}")),
            "{name}\n{}",
            run.stdout
        );
    }
}

/// Asserts that a launch adds less than 1/20 VM exit. A call that trapped would add one.
#[test]
fn launches_of_a_guest_make_no_exits() {
    const LAUNCHES: u64 = 20_480;
    let _alone = alone();
    let steady = program("static", "steady");
    let json = NamedTempFile::new().expect("a file");
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

/// A Python program whose interpreter, module and working directory are the caller's, and that uses the device. Each
/// line of its output begins with the name of a fact.
const IN_AN_ENVIRONMENT: &str = "
import ctypes, hashlib, os, sys, mine
print('files', sys.prefix, sys.argv, os.getcwd(), mine.NAME)
cuda = ctypes.CDLL('libcuda.so.1')
count = ctypes.c_int()
print('files', 'cuda', cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count)), count.value)
print('files', [line.split()[-1] for line in open('/proc/self/maps') if 'libcuda' in line][0])
open('left.txt', 'w').write('in memory')
os.rename('mine.py', 'moved.py')
print('files', sorted(os.listdir('.')))
print('files', os.path.exists(os.path.join('/proc/1', 'root', 'files/lower/proc/1')))
print('variables', [os.environ.get(name) for name in ['FIRST', 'SECOND', 'THIRD', 'HOME']])
print('input', hashlib.sha256(sys.stdin.buffer.read()).hexdigest())
print('random', open('/sys/class/misc/hw_random/rng_current').read().strip())
with open('/dev/hwrng', 'rb', buffering=0) as random:
    print('random', random.read(32).hex(), random.read(32).hex())
print('library', os.spawnl(os.P_WAIT, 'libraries/program', 'program'))
print('to stderr', file=sys.stderr)
sys.exit(43)
";

/// Makes a folder `libraries` with a library, and with a program that needs it and returns 7.
fn make_libraries(folder: &Path) {
    let folder = folder.join("libraries");
    std::fs::create_dir(&folder).expect("a folder");
    let compile = |source: &str, arguments: &[&str]| {
        std::fs::write(folder.join("source.c"), source).expect("it is written");
        let compiled = Command::new("cc")
            .args(["source.c", "-L."])
            .args(arguments)
            .current_dir(&folder)
            .status();
        assert!(compiled.expect("a compiler").success());
    };
    compile(
        "int mine(void) { return 7; }",
        &["-shared", "-fPIC", "-o", "libmine.so"],
    );
    compile(
        "int mine(void); int main(void) { return mine(); }",
        &["-o", "program", "-lmine"],
    );
}

/// Returns the sorted names in a folder.
fn names_in(folder: &Path) -> Vec<OsString> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// Runs [`IN_AN_ENVIRONMENT`] in one guest and asserts, fact by fact, what it says.
#[test]
fn a_guest_has_the_hosts_files_and_what_its_caller_gives() {
    let _beside = beside_other_guests();
    let (folder, beside) = (tempfile::tempdir(), tempfile::tempdir());
    let (folder, beside) = (folder.expect("a folder"), beside.expect("a folder"));
    let path = folder.path().canonicalize().expect("a path");
    let venv = Command::new("python3")
        .args(["-m", "venv", "--without-pip", "venv"])
        .current_dir(&path)
        .status();
    assert!(venv.expect("python3 is there").success());
    std::fs::write(path.join("program.py"), IN_AN_ENVIRONMENT).expect("room");
    std::fs::write(path.join("mine.py"), "NAME = 'mine'\n").expect("room");
    make_libraries(&path);
    let input = beside.path().join("input");
    // The input is larger than any buffer on the way.
    let bytes: Vec<u8> = (0u32..1 << 19).flat_map(u32::to_le_bytes).collect();
    std::fs::write(&input, bytes).expect("room");
    let sum = finish(Command::new("sha256sum").arg(&input)).stdout;
    let sum = sum.split(' ').next().expect("a sum");
    // The shell opens the input again for each attempt. Options behind the program belong to the program.
    let mut command = Command::new("/bin/sh");
    let run = finish(
        command
            .args(["-c", "input=$1; shift; exec \"$0\" run \"$@\" <\"$input\""])
            .arg(wormhole(&[]).get_program())
            .arg(input)
            .args(["--placement", "host", "--interactive"])
            .args(["--env", "FIRST=1=2\n3", "-e", "SECOND", "-e", "HOME=/tmp"])
            .args(["venv/bin/python3", "program.py", "two words", "--quiet"])
            .env("SECOND", "two")
            .env("THIRD", "three")
            .env("LD_LIBRARY_PATH", "libraries")
            .current_dir(&path),
    );
    assert_output_and_status_come_out_apart(&run);
    assert_has_the_hosts_files(&run, &path);
    let lines = |fact: &str| -> Vec<&str> {
        let begin = format!("{fact} ");
        let lines = run.stdout.lines();
        lines.filter_map(|line| line.strip_prefix(&begin)).collect()
    };
    let variables = "['1=2\\n3', 'two', None, '/tmp']";
    assert_eq!(lines("variables"), [variables], "the caller's variables");
    assert_eq!(lines("input"), [sum], "the caller's input");
    assert_eq!(lines("library"), ["7"], "the caller's LD_LIBRARY_PATH");
    assert_reads_random_bytes(&lines("random"));
    assert_eq!(run.stdout.lines().count(), 10, "{}", run.stdout);
}

fn assert_output_and_status_come_out_apart(run: &Finished) {
    let status = run.status.code();
    assert_eq!(status, Some(43), "{}\n{}", run.stdout, run.stderr);
    assert!(run.stderr.contains("to stderr\n"), "{}", run.stderr);
    assert!(!run.stdout.contains("to stderr"), "{}", run.stdout);
    assert!(!run.stderr.contains("variables"), "{}", run.stderr);
}

/// Asserts that the guest had the host's files and has changed none of them.
fn assert_has_the_hosts_files(run: &Finished, path: &Path) {
    let name = path.display();
    let wanted = format!(
        "files {name}/venv ['program.py', 'two words', '--quiet'] {name} mine\nfiles cuda 0 0 1\n\
         files /run/wormhole/libcuda.so.1\n\
         files ['__pycache__', 'left.txt', 'libraries', 'moved.py', 'program.py', 'venv']\nfiles False\n"
    );
    assert!(run.stdout.starts_with(&wanted), "{wanted}\n{}", run.stdout);
    let left = ["libraries", "mine.py", "program.py", "venv"];
    assert_eq!(names_in(path), left, "the host's files");
}

/// Asserts that the guest's generator has the host's random bytes. An image without its driver has no such generator.
fn assert_reads_random_bytes(lines: &[&str]) {
    let [name, bytes] = lines else {
        panic!("no random bytes: {lines:?}");
    };
    assert_eq!(*name, "virtio_rng.0", "the generator of random bytes");
    let (first, second) = bytes.split_once(' ').expect("two numbers");
    assert_eq!(first.len(), 64, "{first}");
    assert_ne!(first, second, "random bytes");
}

/// Leaves a folder, a file in the working directory, and a link. Its argument is no text.
const LEAVES_FILES: &str = r#"#!/bin/sh
test "$1" = "$(printf '\377\376')" && echo "argument of odd bytes"
mkdir -p /tmp/out/below && echo deep > /tmp/out/below/deep && echo flat > /tmp/out/flat
ln -s /etc/passwd /tmp/out/link && ln -s /etc/passwd /tmp/link
echo mine > made.txt
"$0".needs/libraries/program
echo "library $?"
"#;

#[test]
fn files_that_a_program_leaves_are_collected_and_what_is_missing_is_named() {
    let _beside = beside_other_guests();
    let (folder, beside) = (tempfile::tempdir(), tempfile::tempdir());
    let (folder, beside) = (folder.expect("a folder"), beside.expect("a folder"));
    let path = folder.path().canonicalize().expect("a path");
    let made = path.join("made.txt");
    let script = beside.path().join("script");
    let needs = beside.path().join("script.needs");
    std::fs::write(&script, LEAVES_FILES).expect("it is written");
    std::fs::set_permissions(&script, Permissions::from_mode(0o755)).expect("it is ours");
    std::fs::create_dir(&needs).expect("a folder");
    make_libraries(&needs);
    let library_path = format!("LD_LIBRARY_PATH={}", needs.join("libraries").display());
    let mut command = wormhole(&["run", "--placement", "host", "--collect", "/tmp/out:copy"]);
    command.arg("--collect").arg(&made);
    command.args(["--collect", "/tmp/none", "--collect", "/tmp/link"]);
    command.args(["--env", &library_path, "--"]).arg(&script);
    let odd = OsString::from_vec(b"\xff\xfe".to_vec());
    let run = finish(command.arg(odd).current_dir(&path));
    // The program returns 0.
    assert_eq!(run.status.code(), Some(73), "{}", run.stderr);
    for (name, why) in [
        ("/tmp/none", "the program has left no such file or folder"),
        ("/tmp/link", "it is neither a regular file nor a folder"),
    ] {
        let line = format!("wormhole: cannot collect {name}: {why}\n");
        assert_eq!(run.stderr.matches(&line).count(), 1, "{}", run.stderr);
    }
    let read = |name: &str| std::fs::read_to_string(path.join(name)).expect(name);
    let files = ["made.txt", "copy/flat", "copy/below/deep"];
    assert_eq!(files.map(read), ["mine\n", "flat\n", "deep\n"]);
    assert_eq!(names_in(&path), ["copy", "made.txt"]);
    assert_eq!(names_in(&path.join("copy")), ["below", "flat"]);
    // The launcher names the library's folder by an option, and the program is a script.
    assert_eq!(run.stdout, "argument of odd bytes\nlibrary 7\n");
}

#[test]
fn a_killed_process_of_a_guest_leaves_its_memory_to_the_other() {
    let _beside = beside_other_guests();
    let neighbour = program("static", "neighbour");
    let script = format!("{0} && {0} pidns", neighbour.display());
    let run = in_guest("6.1", &script, &["--window", "192M"]);
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
fn memory_that_a_guest_frees_goes_back_to_the_host() {
    /// MiB of the guest's memory. Four of the six rounds use and free as much.
    const MEMORY: u64 = 256;
    let _beside = beside_other_guests();
    let json = NamedTempFile::new().expect("a file");
    let script = "for round in 1 2 3 4 5 6; do head -c 64M /dev/zero >/tmp/used && rm /tmp/used && sleep 3 || exit 1; done";
    let memory = format!("{MEMORY}M");
    let path = json.path().to_str().expect("a text");
    let run = in_guest("6.1", script, &["--memory", &memory, "--json", path]);
    assert!(run.status.success(), "{:?}\n{}", run.status, run.stderr);
    let text = std::fs::read(json.path()).expect("the summary is there");
    let summary: serde_json::Value = serde_json::from_slice(&text).expect("it is JSON");
    let reclaimed = summary["reclaimed_bytes"].as_u64().expect("a guest's run");
    assert!(
        reclaimed > MEMORY << 20,
        "{reclaimed} bytes of {MEMORY} MiB"
    );
}

#[test]
fn disks_of_a_guest_are_files_of_the_host_also_when_it_resets_itself() {
    let _beside = beside_other_guests();
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).expect("room");
        path
    };
    let pattern: Vec<u8> = (0u32..1 << 18).flat_map(u32::to_le_bytes).collect();
    let source = file("source.img", &pattern);
    let target = file("target, with a comma.img", &vec![0xff; pattern.len() + 512]);
    // The last sector of the target keeps its bytes.
    let script = "read -r size < /sys/block/vdb/size; read -r serial < /sys/block/vdb/serial; echo $size $serial; \
        dd if=/dev/vda of=/dev/vdb bs=64k conv=fsync || exit 8; \
        if dd if=/dev/zero of=/dev/vda bs=512 count=1; then exit 9; fi; \
        echo b > /proc/sysrq-trigger";
    let run = in_guest(
        "6.1",
        script,
        &[
            "--disk",
            &format!("{}:ro", source.display()),
            "--disk",
            &target.display().to_string(),
        ],
    );
    // The guest ends by a reset.
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert!(
        run.stderr.contains("the guest reset itself"),
        "{}",
        run.stderr
    );
    assert_eq!(run.stdout.trim(), "2049 disk-1");
    assert_eq!(std::fs::read(&source).expect("the source"), pattern);
    let copied = std::fs::read(&target).expect("the target");
    let (copy, rest) = copied.split_at(pattern.len());
    assert_eq!(copy, pattern);
    assert_eq!(rest, [0xff; 512]);
}

#[test]
fn a_guest_that_panics_says_so() {
    let _beside = beside_other_guests();
    let run = in_guest("6.1", "echo c > /proc/sysrq-trigger", &[]);
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert!(run.stderr.contains("kernel panicked"), "{}", run.stderr);
}

/// A program and its child. Both print the name of each signal that they receive, and end by none.
const TELLS_SIGNALS: &str = r#"$| = 1;
    my $who = fork ? "program" : "child";
    $SIG{$_} = sub { print "$who $_[0]\n" } for qw(HUP INT QUIT USR1 USR2 TERM);
    print "$who ready\n";
    sleep 1 while 1"#;

/// A run of [`TELLS_SIGNALS`] in a guest.
struct Telling {
    run: Ended,
    start: Instant,
    stdout: NamedTempFile,
    stderr: NamedTempFile,
}

impl Telling {
    /// Starts a run with this folder of temporary files, and waits until both processes are ready. Fails if the emulated
    /// host does.
    fn start(temporary: &Path) -> Result<Self, String> {
        let file = || NamedTempFile::new().expect("a file");
        let (stdout, stderr) = (file(), file());
        let reopen = |file: &NamedTempFile| file.reopen().expect("it is ours");
        let mut command = wormhole(&["run", "--quiet", "--grace", "5", "--", "perl", "-e"]);
        command
            .arg(TELLS_SIGNALS)
            .env("TMPDIR", temporary)
            .stdout(reopen(&stdout))
            .stderr(reopen(&stderr));
        let run = with_own_signals(&mut command).spawn().expect("it starts");
        let mut telling = Self {
            run: Ended(run),
            start: Instant::now(),
            stdout,
            stderr,
        };
        telling.both_say("ready")?;
        Ok(telling)
    }

    fn read(file: &NamedTempFile) -> String {
        std::fs::read_to_string(file.path()).expect("it is ours")
    }

    /// Waits until the condition holds for what the program has printed, and the status with which the run has ended if it
    /// has. Fails if the emulated host does, or hangs with its guest.
    fn wait(
        &mut self,
        what: &str,
        holds: impl Fn(&str, Option<ExitStatus>) -> bool,
    ) -> Result<(), String> {
        loop {
            let status = self.run.0.try_wait().expect("it is a child");
            let said = Self::read(&self.stdout);
            if holds(&said, status) {
                return Ok(());
            }
            let told = || format!("{what}: {said:?}, {}", Self::read(&self.stderr));
            if status.is_some_and(|status| status.code() == Some(i32::from(FAILED_EMULATION))) {
                return Err(told());
            }
            assert!(status.is_none(), "{status:?} before {}", told());
            if self.start.elapsed() > GUEST_PATIENCE {
                return Err(format!("the run hangs before {}", told()));
            }
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }

    fn both_say(&mut self, word: &str) -> Result<(), String> {
        let lines = ["program", "child"].map(|who| format!("{who} {word}"));
        self.wait(word, |said, _| {
            lines
                .iter()
                .all(|line| said.lines().any(|said| said == line))
        })
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.run.0), signal).expect("it runs");
    }
}

/// Also asserts that no end of the launcher leaves a file behind. The emulated host's first file system was once left.
#[test]
fn signals_reach_a_guests_program_and_nothing_is_left_in_the_temporary_folder() {
    let _beside = beside_other_guests();
    let temporary = tempfile::tempdir().expect("a folder");
    for_emulation(|| {
        let mut telling = Telling::start(temporary.path())?;
        for (signal, name) in [(Signal::USR1, "USR1"), (Signal::USR2, "USR2")] {
            telling.send(signal);
            telling.both_say(name)?;
        }
        // The launcher receives these at once, so that none is a second request, which would kill the program.
        for signal in [
            Signal::STOP,
            Signal::HUP,
            Signal::INT,
            Signal::QUIT,
            Signal::TERM,
            Signal::CONT,
        ] {
            telling.send(signal);
        }
        for name in ["HUP", "INT", "QUIT", "TERM"] {
            telling.both_say(name)?;
        }
        // The program ends by none, and is killed.
        telling.wait("the end", |_, status| {
            status.and_then(|status| status.code()) == Some(128 + libc::SIGKILL)
        })
    });
    for_emulation(|| {
        let mut telling = Telling::start(temporary.path())?;
        telling.run.0.kill().expect("it runs");
        telling.run.0.wait().expect("it is a child");
        Ok(())
    });
    assert_eq!(names_in(temporary.path()), [""; 0], "files that are left");
}
