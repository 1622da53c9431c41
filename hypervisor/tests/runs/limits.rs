//! Tests runs under limits of the system: each is named in an error, and no run hangs or continues with a wrong result.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Resource, Rlimit, Signal, geteuid, setrlimit};

use crate::harness::{
    Finished, PATIENCE, alone, end_by, eventually, finish, program, published_stage, wormhole,
};

/// First of 41 user ids without processes, so that their RLIMIT_NPROC counts only the test's. An orphan counts until init has
/// reaped it.
const USER: u32 = 54_321;

/// Copies the stage and a program to a folder that every user can read.
fn published(name: &str) -> tempfile::TempDir {
    let folder = published_stage();
    fs::copy(program("static", name), folder.path().join(name)).expect("a copy");
    folder
}

/// Creates a command of `wormhole run` at `process` placement as a user, with `tasks` as its RLIMIT_NPROC.
fn limited(published: &Path, user: u32, tasks: u64, command: &[&str]) -> Command {
    let mut run = Command::new(published.join("bin/wormhole"));
    run.args(["run", "--placement", "process", "--"])
        .args(command)
        .current_dir(published)
        .env("HOME", "/tmp")
        .stdin(Stdio::null())
        .uid(user)
        .gid(user);
    let limit = Rlimit {
        current: Some(tasks),
        maximum: Some(tasks),
    };
    // SAFETY: one system call.
    unsafe { run.pre_exec(move || Ok(setrlimit(Resource::Nproc, limit)?)) };
    run
}

/// For each limit from too few to enough tasks, the program computes or a sentence names the limit. Each limit is another
/// user's, since some systems' init takes seconds to reap an orphan.
#[test]
fn a_limit_of_processes_is_named_wherever_it_is_reached() {
    if !geteuid().is_root() {
        println!("skipped: only root can have another user's processes limited");
        return;
    }
    let _alone = alone();
    let published = published("vector_add");
    let mut passed = 0;
    let users = USER + 1..=USER + 40;
    for (user, tasks) in users.clone().zip(1..) {
        let run = finish(&mut limited(
            published.path(),
            user,
            tasks,
            &["./vector_add"],
        ));
        let said = format!("{tasks}: {:?}\n{}\n{}", run.status, run.stdout, run.stderr);
        if run.status.success() {
            assert!(run.stdout.contains("PASS vector_add"), "{said}");
            passed += 1;
        } else {
            assert!(
                run.stderr.contains("limit of processes and threads"),
                "{said}"
            );
            assert!([1, 2, 126].map(Some).contains(&run.status.code()), "{said}");
        }
        assert!(!run.stderr.contains("panicked"), "{said}");
        assert!(!run.stderr.contains("by signal"), "{said}");
    }
    for user in users {
        eventually("the backend's end", PATIENCE, || tasks_of(user) == 0);
    }
    assert!(passed > 0, "40 are enough");
}

/// Runs `wormhole run -- /bin/true` in a shell with this `ulimit`.
fn under(limit: &str) -> Finished {
    let inner = wormhole(&["run", "--placement", "process", "--", "/bin/true"]);
    let mut shell = Command::new("bash");
    shell
        .args(["-c", &format!("ulimit {limit}; exec \"$@\""), "bash"])
        .arg(inner.get_program())
        .args(inner.get_args())
        .stdin(Stdio::null());
    finish(&mut shell)
}

#[test]
fn a_supervisor_that_ends_at_its_start_is_explained_once() {
    let _alone = alone();
    // Each limit suffices for the launcher.
    for files in ["12", "20", "40", "100"] {
        let run = under(&format!("-n {files}"));
        assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
        let words = format!("{files} open files are too few for the supervisor");
        let one = run.stderr.lines().count() == 1;
        assert!(
            one && run.stderr.contains(&words),
            "{files}: {}",
            run.stderr
        );
    }
}

#[test]
fn a_limit_of_memory_is_named_where_a_thread_has_no_stack() {
    let _alone = alone();
    let run = under("-d 1000");
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert!(run.stderr.contains("RLIMIT_DATA"), "{}", run.stderr);
}

#[test]
fn a_limit_of_address_space_is_named_once() {
    let _alone = alone();
    let run = under("-v 8000000");
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    let count = run.stderr.matches("RLIMIT_AS").count();
    assert!(
        count == 1 && run.stderr.lines().count() == 1,
        "{}",
        run.stderr
    );
}

/// Returns the number of processes and threads of a user.
fn tasks_of(user: u32) -> usize {
    let processes = fs::read_dir("/proc").expect("it is mounted").flatten();
    let own = processes.filter(|entry| entry.metadata().is_ok_and(|data| data.uid() == user));
    own.map(|process| fs::read_dir(process.path().join("task")).map_or(0, Iterator::count))
        .sum()
}

/// Runs a program whose processes fork without end. Some of them use CUDA. Only the user's RLIMIT_NPROC bounds them.
#[test]
fn a_fork_bomb_ends_with_its_launcher_and_its_neighbour_computes() {
    const TASKS: u64 = 60;
    const BOMB: &str = "import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        if os.fork() == 0 and os.fork() == 0:
            os.execv('./vector_add', ['./vector_add'])
    except OSError:
        pass";
    if !geteuid().is_root() {
        println!("skipped: only root can have another user's processes limited");
        return;
    }
    let _alone = alone();
    let published = published("vector_add");
    for signal in [Signal::TERM, Signal::KILL] {
        let mut run = limited(published.path(), USER, TASKS, &["python3", "-c", BOMB]);
        run.stdout(Stdio::null()).stderr(Stdio::null());
        let mut launcher = run.spawn().expect("it starts");
        eventually("the bomb", PATIENCE, || {
            tasks_of(USER) >= usize::try_from(TASKS).unwrap_or(0) * 4 / 5
        });
        let neighbour = finish(
            wormhole(&["run", "--placement", "process", "--"]).arg(program("static", "vector_add")),
        );
        assert!(neighbour.stdout.contains("PASS"), "{}", neighbour.stderr);
        end_by(&mut launcher, signal);
        eventually("the end of all it started", PATIENCE, || {
            tasks_of(USER) == 0
        });
    }
}
