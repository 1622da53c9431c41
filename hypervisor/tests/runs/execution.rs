//! Tests that programs are executed as execve(2) does, and that a failure names its cause.

use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::io::{ErrorKind, Seek, SeekFrom};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Uid;

use crate::harness::{
    PATIENCE, Underway, alone, eventually, finish, nothing_is_left, program, wormhole,
};

/// Asserts that a program is not executed at this placement: one sentence on standard error, and this status.
fn is_not_executed(placement: &str, program: &OsStr, status: i32, words: &str) {
    let run = finish(
        wormhole(&["run", "--placement", placement, "--"])
            .arg(program)
            .arg("argument"),
    );
    assert_eq!(
        run.status.code(),
        Some(status),
        "{program:?}: {}",
        run.stderr
    );
    assert_eq!(run.stdout, "");
    let one = run.stderr.lines().count() == 1 && run.stderr.starts_with("wormhole: cannot run ");
    assert!(one && run.stderr.contains(words), "{words}: {}", run.stderr);
    nothing_is_left();
}

fn executable(path: &Path, content: &[u8]) {
    fs::write(path, content).expect("it is written");
    fs::set_permissions(path, Permissions::from_mode(0o755)).expect("it is ours");
}

/// Returns a copy of the shell whose ELF header names another architecture.
fn foreign() -> Vec<u8> {
    let mut program = fs::read("/bin/sh").expect("every machine has a shell");
    // EM_AARCH64 in e_machine.
    program[18..20].copy_from_slice(&[183, 0]);
    program
}

#[test]
fn files_in_no_format_of_this_machine_are_not_handed_to_a_shell() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("file");
    let shell = fs::read("/bin/sh").expect("every machine has a shell");
    for content in [&foreign()[..], &shell[..100], b"echo it ran\n", b""] {
        executable(&path, content);
        is_not_executed("process", path.as_os_str(), 126, "Exec format error");
    }
    let left: Vec<_> = fs::read_dir(folder.path()).expect("it is there").collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn causes_that_keep_a_program_from_running_are_named() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    symlink(path("loop"), path("loop")).expect("a link");
    let made = Command::new("mkfifo").arg(path("fifo")).status();
    assert!(made.expect("it is there").success());
    fs::write(path("text"), "#!/bin/sh\n").expect("it is written");
    executable(&path("script"), b"#!/no/such/interpreter -e\n");
    for placement in ["process", "host"] {
        let refused = |program: &Path, status, words| {
            is_not_executed(placement, program.as_os_str(), status, words);
        };
        refused(Path::new(""), 127, "name is empty");
        refused(&path("missing"), 127, "No such file");
        refused(Path::new("no-such-program"), 127, "no such program in PATH");
        refused(folder.path(), 126, "it is a folder");
        refused(&path("loop"), 126, "symbolic links");
        refused(&path("fifo"), 126, "it is a named pipe");
        refused(&path("text"), 126, "it is not executable");
        refused(
            &path("script"),
            127,
            "its interpreter /no/such/interpreter is not there",
        );
    }
    let foreign_program = path("foreign");
    executable(&foreign_program, &foreign());
    is_not_executed(
        "host",
        foreign_program.as_os_str(),
        126,
        "Exec format error",
    );
}

#[test]
fn arguments_and_paths_are_bytes() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let script = folder.path().join(OsStr::from_bytes(b"odd\xff"));
    executable(
        &script,
        b"#!/bin/sh\ntest \"$1\" = \"$(printf '\\377\\376')\" && exit 6\n",
    );
    let run = finish(
        wormhole(&["run", "--placement", "process", "--"])
            .arg(script)
            .arg(OsString::from_vec(b"\xff\xfe".to_vec())),
    );
    assert_eq!(run.status.code(), Some(6), "{}", run.stderr);
}

#[test]
fn a_script_is_called_by_the_path_that_was_given() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    executable(&folder.path().join("script"), b"#!/bin/sh\necho \"$0\"\n");
    symlink("script", folder.path().join("link")).expect("a link");
    let run = finish(
        wormhole(&["run", "--placement", "process", "--", "./link"]).current_dir(folder.path()),
    );
    assert_eq!(run.stdout, "./link\n", "{}", run.stderr);
}

/// Runs a command with this file as its standard error and returns the exit status.
fn with_stderr(file: fs::File, command: &mut Command) -> Option<i32> {
    let status = command.stdout(Stdio::null()).stderr(file).status();
    status.expect("it starts").code()
}

#[test]
fn a_standard_error_that_takes_nothing_does_not_change_the_status() {
    let _alone = alone();
    let full = || {
        fs::File::options()
            .write(true)
            .open("/dev/full")
            .expect("it is there")
    };
    for status in [0, 3] {
        let script = format!("exit {status}");
        let mut run = wormhole(&["run", "--placement", "process", "--", "sh", "-c", &script]);
        assert_eq!(with_stderr(full(), &mut run), Some(status));
    }
    let mut run = wormhole(&["run", "--placement", "process", "--", "/no/such/program"]);
    assert_eq!(with_stderr(full(), &mut run), Some(127));
    let mut wrong = wormhole(&["run", "--no-such-flag"]);
    assert_eq!(with_stderr(full(), &mut wrong), Some(2));
}

/// Creates a command that runs `wormhole run` under `ulimit -f`.
fn limited(limit: &str, script: &str) -> Command {
    let mut shell = Command::new("bash");
    let run = wormhole(&["run", "--placement", "process", "--window", "64M", "--"]);
    shell
        .args(["-c", &format!("ulimit -f {limit}; exec \"$@\""), "bash"])
        .arg(run.get_program())
        .args(run.get_args())
        .args(["bash", "-c", script])
        .stdin(Stdio::null());
    shell
}

#[test]
fn a_limit_on_the_size_of_files_is_named_and_does_not_change_the_status() {
    let _alone = alone();
    let run = finish(&mut limited("0", "exit 0"));
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    assert!(
        run.stderr.starts_with("wormhole: ") && run.stderr.contains("ulimit -f"),
        "{}",
        run.stderr
    );
    // The files of window and device fit, and standard error already has the largest allowed size.
    let limit = 256 << 30;
    let file = tempfile::tempfile().expect("a file");
    file.set_len(limit).expect("it is sparse");
    let stderr = || {
        let mut file = file.try_clone().expect("a descriptor");
        file.seek(SeekFrom::End(0)).expect("it has an end");
        file
    };
    let blocks = (limit >> 10).to_string();
    let run = |script| with_stderr(stderr(), &mut limited(&blocks, script));
    assert_eq!(run("exit 4"), Some(4));
    // The program has the signal's default action again.
    assert_eq!(run("echo >&2; exit 4"), Some(128 + libc::SIGXFSZ));
}

/// A stranger who could connect could send descriptors whose close never ends.
#[test]
fn no_other_user_reaches_the_socket_of_a_run() {
    let _alone = alone();
    let run = || {
        let mut command = wormhole(&["run", "--placement", "process", "--quiet", "--"]);
        command.args(["sh", "-c", "echo \"$WORMHOLE_CONTROL\"; read -r line"]);
        Underway::start(command.stdin(Stdio::piped()))
    };
    let socket_of = |run: &Underway| -> PathBuf {
        let said = run.working();
        let path = said.trim_end().strip_prefix("unix:").expect("a path");
        path.into()
    };
    let mut first = run();
    let socket = socket_of(&first);
    let folder = socket.parent().expect("a folder");
    let mode = fs::metadata(folder).expect("it is there").permissions();
    assert_eq!(mode.mode() & 0o7777, 0o700);
    UnixStream::connect(&socket).expect("it is this user's");
    if rustix::process::geteuid().is_root() {
        let socket = socket.clone();
        let refused = std::thread::spawn(move || {
            // Changes this thread alone.
            rustix::thread::set_thread_uid(Uid::from_raw(65534)).expect("another user");
            UnixStream::connect(socket).expect_err("another user's")
        });
        let refused = refused.join().expect("a thread");
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
    } else {
        println!("skipped the stranger: only root can be another user");
    }
    first.write_line("end");
    assert!(first.finish().status.success());
    assert!(!folder.exists());
    // The folder goes although the launcher cannot remove it.
    let second = run();
    let folder = socket_of(&second);
    let folder = folder.parent().expect("a folder");
    second.kill_9("wormhole");
    second.finish();
    eventually("the folder's removal", PATIENCE, || !folder.exists());
}

#[test]
fn a_dead_backend_is_said_counted_and_no_success() {
    let _alone = alone();
    let json = tempfile::NamedTempFile::new().expect("a file");
    // The program ignores its device's errors.
    let kills = "kill -9 $(pgrep -P $(ps -o ppid= -p $PPID) -x wormhole-superv); exit $0";
    for (status, expected) in [(0, 69), (7, 7)] {
        let run = finish(
            wormhole(&["run", "--placement", "process", "--quiet", "--json"])
                .arg(json.path())
                .args(["--", "sh", "-c", kills, &status.to_string()]),
        );
        assert_eq!(run.status.code(), Some(expected), "{}", run.stderr);
        assert!(
            run.stderr
                .contains("wormhole: the backend ended before the program: "),
            "{}",
            run.stderr
        );
        let text = fs::read(json.path()).expect("the summary is there");
        let summary: serde_json::Value = serde_json::from_slice(&text).expect("it is JSON");
        let failure = summary["backend_failure"].as_str().expect("it failed");
        assert!(failure.contains("signal: 9"), "{failure}");
    }
    let run = finish(
        wormhole(&["run", "--placement", "process", "--json"])
            .arg(json.path())
            .arg("--")
            .arg(program("static", "vector_add")),
    );
    assert!(run.status.success(), "{}", run.stderr);
    let text = fs::read(json.path()).expect("the summary is there");
    let summary: serde_json::Value = serde_json::from_slice(&text).expect("it is JSON");
    assert!(summary["backend_failure"].is_null(), "{summary}");
}
