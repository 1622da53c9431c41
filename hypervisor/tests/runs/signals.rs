//! Tests that the launcher forwards signals to the program, and that no process of the program outlives the launcher.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{ChildStderr, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::harness::{
    Ended, PATIENCE, Underway, alone, descendants, eventually, finish, nothing_is_left,
    of_backends, program, running, started_from, with_own_signals, wormhole,
};

/// Script that prints the signals it receives, and exits with status 5 on SIGTERM.
const TELLS: &str = r#"
for signal in HUP INT QUIT USR1 USR2; do trap "echo $signal" $signal; done
trap 'echo TERM; exit 5' TERM
echo ready
while :; do sleep 0.02; done
"#;

/// Time from the first request to end to the second.
const REPETITION: Duration = Duration::from_millis(600);

/// Script that ignores all requests to end.
const STUBBORN: &str = "trap '' HUP INT QUIT TERM; echo ready; while :; do sleep 0.02; done";

fn in_process(options: &[&str], script: &str) -> Command {
    run(options, &["bash", "-c", script])
}

/// Returns the command for a script in Perl. Bash discards a signal that arrives while it runs the trap of an earlier
/// one with the same number.
fn perl(script: &str) -> Command {
    run(&[], &["perl", "-e", script])
}

fn run(options: &[&str], program: &[&str]) -> Command {
    let mut command = wormhole(&["run", "--placement", "process", "--quiet"]);
    command.args(options).arg("--").args(program);
    command
}

/// Reads the next line, which is empty at the end of the stream or of the terminal.
fn next_line(stream: &mut BufReader<impl Read + AsFd>) -> String {
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        if stream.buffer().is_empty() {
            let limit = Timespec::try_from(PATIENCE).expect("a short time");
            let mut ready = [PollFd::new(stream.get_ref(), PollFlags::IN)];
            let count = poll(&mut ready, Some(&limit)).expect("it is open");
            let line = String::from_utf8_lossy(&line);
            assert_eq!(count, 1, "nothing follows in {PATIENCE:?} after {line:?}");
        }
        let bytes = match stream.fill_buf() {
            Ok(bytes) => bytes,
            // A terminal that no process has any more.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => break,
            Err(error) => panic!("after {:?}: {error}", String::from_utf8_lossy(&line)),
        };
        if bytes.is_empty() {
            break;
        }
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(bytes.len(), |end| end + 1);
        line.extend_from_slice(&bytes[..taken]);
        stream.consume(taken);
    }
    String::from_utf8(line).expect("text")
}

fn send(process: u32, signal: libc::c_int) {
    let process = libc::pid_t::try_from(process).expect("a process number");
    // SAFETY: kill takes no pointers.
    assert_eq!(unsafe { libc::kill(process, signal) }, 0);
}

/// A launcher in its own process group, with its output line by line.
struct Launcher {
    child: Ended,
    stdout: BufReader<ChildStdout>,
    stderr: BufReader<ChildStderr>,
}

impl Launcher {
    fn start(command: &mut Command) -> Self {
        let mut child = with_own_signals(command)
            .process_group(0)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        Self {
            stdout: BufReader::new(child.stdout.take().expect("it is piped")),
            stderr: BufReader::new(child.stderr.take().expect("it is piped")),
            child: Ended(child),
        }
    }

    fn id(&self) -> u32 {
        self.child.0.id()
    }

    fn says(&mut self, line: &str) {
        assert_eq!(next_line(&mut self.stdout), format!("{line}\n"));
    }

    /// Waits for the end and returns the exit status and the rest of both streams.
    fn ends(mut self) -> (Option<i32>, String, String) {
        let out = rest(&mut self.stdout);
        let err = rest(&mut self.stderr);
        let status = self.child.0.wait().expect("it can be waited for");
        (status.code(), out, err)
    }
}

/// Reads a stream to its end.
fn rest(stream: &mut BufReader<impl Read + AsFd>) -> String {
    let lines = std::iter::repeat_with(|| next_line(stream));
    lines.take_while(|line| !line.is_empty()).collect()
}

#[test]
fn each_signal_reaches_the_program_and_its_status_is_the_launchers() {
    let _alone = alone();
    for (signal, name) in [
        (libc::SIGHUP, "HUP"),
        (libc::SIGINT, "INT"),
        (libc::SIGQUIT, "QUIT"),
        (libc::SIGUSR1, "USR1"),
        (libc::SIGUSR2, "USR2"),
    ] {
        let mut run = Launcher::start(&mut in_process(&[], TELLS));
        run.says("ready");
        send(run.id(), signal);
        run.says(name);
        send(run.id(), libc::SIGKILL);
        run.ends();
    }
    let mut run = Launcher::start(&mut in_process(&[], TELLS));
    run.says("ready");
    send(run.id(), libc::SIGTERM);
    assert_eq!(run.ends(), (Some(5), "TERM\n".into(), String::new()));
}

#[test]
fn a_signal_to_the_process_group_reaches_the_program_once() {
    let _alone = alone();
    let mut run = Launcher::start(&mut perl(
        r#"$| = 1; $SIG{USR1} = sub { print "USR1\n" }; $SIG{TERM} = sub { print "TERM\n"; exit 5 };
        print "ready\n"; sleep 1 while 1"#,
    ));
    run.says("ready");
    let group = i32::try_from(run.id()).expect("a process number");
    // SAFETY: kill takes no pointers.
    let to_all = |signal| assert_eq!(unsafe { libc::kill(-group, signal) }, 0);
    for _ in 0..3 {
        to_all(libc::SIGUSR1);
        run.says("USR1");
    }
    to_all(libc::SIGTERM);
    assert_eq!(run.ends(), (Some(5), "TERM\n".into(), String::new()));
}

#[test]
fn a_signal_without_a_handler_ends_the_run_with_it() {
    let _alone = alone();
    let mut run = Launcher::start(&mut in_process(&[], "echo ready; exec sleep 600"));
    run.says("ready");
    send(run.id(), libc::SIGINT);
    assert_eq!(run.ends().0, Some(128 + libc::SIGINT));
}

#[test]
fn a_stubborn_program_is_killed_with_all_it_started_after_its_grace() {
    let _alone = alone();
    let script = format!(
        "(setsid bash -c '{}') & {STUBBORN}",
        STUBBORN.replace('\'', "\"")
    );
    let mut run = Launcher::start(&mut in_process(&["--grace", "1"], &script));
    run.says("ready");
    run.says("ready");
    let family = descendants(run.id());
    send(run.id(), libc::SIGTERM);
    let (status, _, said) = run.ends();
    assert_eq!(status, Some(128 + libc::SIGKILL));
    assert_eq!(
        said,
        "wormhole: the program has not ended within 1 s of SIGTERM: it is killed\n"
    );
    are_gone(&family);
}

#[test]
fn a_second_request_kills_a_stubborn_program() {
    let _alone = alone();
    let mut run = Launcher::start(&mut in_process(&[], STUBBORN));
    run.says("ready");
    send(run.id(), libc::SIGINT);
    // A repetition after a shorter time counts as the same request.
    std::thread::sleep(REPETITION);
    send(run.id(), libc::SIGINT);
    let (status, _, said) = run.ends();
    assert_eq!(status, Some(128 + libc::SIGKILL));
    assert_eq!(
        said,
        "wormhole: a second signal came: the program is killed\n"
    );
}

/// timeout(1) signals the launcher and then the process group.
#[test]
fn a_program_under_timeout_has_its_time_to_end() {
    let _alone = alone();
    let mut command = Command::new("timeout");
    let inner = in_process(&[], TELLS);
    command
        .arg("2")
        .arg(inner.get_program())
        .args(inner.get_args())
        .stdin(Stdio::null());
    let run = finish(&mut command);
    assert_eq!(run.status.code(), Some(124), "{}", run.stderr);
    assert_eq!(run.stdout, "ready\nTERM\n");
}

#[test]
fn a_launcher_under_nohup_leaves_the_program_alone() {
    let _alone = alone();
    let mut command = Command::new("nohup");
    let inner = in_process(&[], TELLS);
    command.arg(inner.get_program()).args(inner.get_args());
    let mut run = Launcher::start(command.stdin(Stdio::null()));
    run.says("ready");
    send(run.id(), libc::SIGHUP);
    send(run.id(), libc::SIGUSR1);
    run.says("USR1");
    send(run.id(), libc::SIGTERM);
    run.says("TERM");
    assert_eq!(run.ends().0, Some(5));
}

/// The parent ignores SIGCHLD, like a daemon that waits for none of its commands. The kernel then reaps its ended
/// children.
#[test]
fn a_launcher_whose_parent_ignores_its_children_ends_with_the_program() {
    let _alone = alone();
    let spin = program("static", "spin");
    let ignoring = |program: &[&str]| {
        let mut command = wormhole(&["run", "--placement", "process", "--quiet", "--"]);
        command.args(program);
        // SAFETY: signal is safe between fork and exec; no handler is installed.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
                Ok(())
            });
        }
        command
    };
    let run = finish(&mut ignoring(&["sh", "-c", "exit 7"]));
    assert_eq!((run.status.code(), run.stderr.as_str()), (Some(7), ""));
    // The supervisor's own children are reaped as well.
    let run = Underway::start(&mut ignoring(&[spin.to_str().expect("text")]));
    run.working();
    send(run.id(), libc::SIGKILL);
    run.finish();
    nothing_is_left();
}

fn are_gone(processes: &[u32]) {
    eventually("the end of everything", PATIENCE, || {
        processes
            .iter()
            .all(|process| state(*process) == 'Z' || !is_there(*process))
    });
}

fn is_there(process: u32) -> bool {
    std::fs::exists(format!("/proc/{process}")).expect("proc is mounted")
}

#[test]
fn nothing_that_the_program_started_outlives_a_killed_launcher() {
    let _alone = alone();
    let spin = program("static", "spin");
    // A child, an orphan in a session of its own, a stopped process, and one that uses the device.
    let script = format!(
        "sleep 600 & (setsid sleep 600 &) ; (setsid sh -c 'kill -STOP $$' &) ; {} & wait",
        spin.display()
    );
    let run = Underway::start(&mut in_process(&[], &script));
    run.working();
    let family = descendants(run.id());
    assert!(family.len() > 7, "{family:?}");
    send(run.id(), libc::SIGKILL);
    are_gone(&family);
    run.finish();
    assert!(of_backends().is_empty() && running("spin").is_empty());
}

#[test]
fn an_orphan_in_a_session_of_its_own_does_not_outlive_a_killed_launcher() {
    let _alone = alone();
    let script = "setsid sh -c 'echo ready; exec sleep 600' & exec sleep 600";
    let mut run = Launcher::start(&mut in_process(&[], script));
    run.says("ready");
    let family = descendants(run.id());
    send(run.id(), libc::SIGKILL);
    are_gone(&family);
    run.ends();
}

#[test]
fn the_end_of_a_program_that_left_its_process_group_ends_the_run() {
    let _alone = alone();
    for leaves in ["os.setsid()", "os.setpgid(0, 0)"] {
        let script = format!("import os; {leaves}; os._exit(4)");
        let run = finish(
            wormhole(&["run", "--placement", "process", "--quiet", "--"])
                .args(["python3", "-c", &script]),
        );
        assert_eq!(run.status.code(), Some(4), "{leaves}: {}", run.stderr);
    }
}

#[test]
fn processes_that_go_on_forking_do_not_outlive_a_killed_launcher() {
    let _alone = alone();
    // Each process starts its successor and ends; there are always a few.
    let chain = r#"f() { sleep 0.01; f & }; for i in 1 2 3 4; do f & done; echo ready; wait; exec sleep 600"#;
    let mut run = Launcher::start(&mut in_process(&[], chain));
    run.says("ready");
    let group = run.id();
    send(group, libc::SIGKILL);
    eventually("the end of the group", PATIENCE, || {
        let number = i32::try_from(group).expect("a process number");
        // SAFETY: kill takes no pointers; signal 0 only checks. The launcher itself is not reaped yet.
        assert!(unsafe { libc::kill(-number, 0) } == 0 || !is_there(group));
        members(group) == 0
    });
    drop(run.ends());
}

/// Returns the number of living processes of a group.
fn members(group: u32) -> usize {
    let listed = finish(Command::new("ps").args(["-eo", "pgid=,stat="]));
    let alive = |line: &&str| {
        let mut words = line.split_whitespace();
        words.next() == Some(&group.to_string())
            && words.next().is_some_and(|s| !s.starts_with('Z'))
    };
    listed.stdout.lines().filter(alive).count()
}

/// A pseudo-terminal with a shell that has job control, and a run in its foreground.
pub struct Terminal {
    pub keyboard: File,
    screen: BufReader<File>,
    shell: Ended,
}

impl Terminal {
    pub fn start(script: &str) -> Self {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
            .expect("a terminal");
        grantpt(&controller).expect("it is ours");
        unlockpt(&controller).expect("it is ours");
        let name = ptsname(&controller, Vec::new()).expect("it has a name");
        let open = || {
            let path = name.to_str().expect("plain text");
            OwnedFd::from(
                File::options()
                    .read(true)
                    .write(true)
                    .open(path)
                    .expect("it opens"),
            )
        };
        // Without `noflsh`, keys that signal would discard unread output of the program.
        let script = format!("stty noflsh; {script}");
        let mut command = Command::new("bash");
        command
            .args(["-c", &script])
            .stdin(open())
            .stdout(open())
            .stderr(open());
        // SAFETY: between fork and exec this makes two system calls.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            });
        }
        let shell = with_own_signals(&mut command)
            .spawn()
            .expect("there is a shell");
        let controller = File::from(controller);
        Self {
            keyboard: controller.try_clone().expect("a descriptor"),
            screen: BufReader::new(controller),
            shell: Ended(shell),
        }
    }

    pub fn press(&mut self, key: u8) {
        self.keyboard.write_all(&[key]).expect("a key");
    }

    /// Reads lines up to one with this end and returns the lines before it.
    pub fn until(&mut self, end: &str) -> Vec<String> {
        let mut before = Vec::new();
        loop {
            let line = next_line(&mut self.screen);
            assert!(!line.is_empty(), "no {end} after {before:?}");
            let line = line.trim_end().to_owned();
            if line.ends_with(end) {
                return before;
            }
            before.push(line);
        }
    }
}

#[test]
fn a_key_of_the_terminal_reaches_the_program_once() {
    let _alone = alone();
    let command = perl(
        r#"$| = 1; $SIG{INT} = sub { print "INT\n" }; $SIG{QUIT} = sub { print "QUIT\n"; exit 6 };
        print "ready\n"; sleep 1 while 1"#,
    );
    let run = shell_words(&command);
    let mut terminal = Terminal::start(&format!("{run}; echo status $?"));
    terminal.until("ready");
    for _ in 0..3 {
        terminal.press(3);
        let before = terminal.until("INT");
        assert_eq!(before, Vec::<String>::new());
    }
    terminal.press(0x1c);
    assert_eq!(terminal.until("QUIT"), Vec::<String>::new());
    assert_eq!(terminal.until("status 6"), Vec::<String>::new());
    terminal.shell.0.wait().expect("it ends");
}

#[test]
fn a_run_is_stopped_and_continued_as_a_job() {
    let _alone = alone();
    let command = in_process(
        &[],
        "trap 'echo went on; exit 8' USR1; echo ready; while :; do sleep 0.02; done",
    );
    let run = shell_words(&command);
    let script = format!(
        "set -m; {run}; echo stopped $?; read; kill -USR1 %1; fg > /dev/null; echo status $?"
    );
    let mut terminal = Terminal::start(&script);
    terminal.until("ready");
    terminal.press(0x1a);
    terminal.until(&format!("stopped {}", 128 + libc::SIGTSTP));
    // The launcher may stop before the program. A SIGCONT that arrives while the program forks does not cancel the
    // SIGTSTP of the forked child, since Linux discards a SIGCONT without a handler too early.
    let is_reaper = |process: &u32| {
        started_from(*process).is_some_and(|path| path.ends_with("wormhole-reaper"))
    };
    let family = descendants(terminal.shell.0.id());
    let reaper = family.into_iter().find(is_reaper).expect("it runs");
    eventually("the program's stop", PATIENCE, || {
        let programs = descendants(reaper).into_iter().skip(1);
        programs.map(state).all(|state| state == 'T')
    });
    terminal.press(b'\n');
    terminal.until("went on");
    terminal.until("status 8");
    terminal.shell.0.wait().expect("it ends");
}

/// Returns the letter by which `/proc` calls a process's state.
fn state(process: u32) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let (_, state) = stat.rsplit_once(") ").unwrap_or_default();
    state.chars().next().unwrap_or('-')
}

/// Quotes the command for a shell.
pub fn shell_words(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| format!("'{}'", word.to_str().expect("text").replace('\'', r"'\''")))
        .collect::<Vec<_>>()
        .join(" ")
}
