//! The attendant of a guest's console, without a guest: a process whose output is the console's input.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::harness::{Ended, Finished, PATIENCE, eventually, finish, wormhole};
use crate::signals::{Terminal, shell_words};

/// An attendant, and a process that it takes for its guest.
struct Attended {
    folder: tempfile::TempDir,
    guest: Ended,
    attendant: Child,
    output: Option<ChildStdin>,
    input: UnixStream,
    /// Brings the connections of commands that save the guest.
    connections: UnixStream,
}

impl Attended {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join(".guests/one");
        fs::create_dir_all(&place).expect("a folder");
        let guest = Command::new("sleep").arg("600").spawn();
        let guest = Ended(guest.expect("it starts"));
        let stat = fs::read_to_string(format!("/proc/{}/stat", guest.0.id())).expect("it lives");
        let start = stat.split(' ').nth(21).expect("proc(5)");
        let record = format!(
            r#"{{"process": {{"pid": {}, "start": {start}}}, "version": "", "started": 1, "backend": null,
                "device": "cpu", "memory": 268435456, "cpus": 2}}"#,
            guest.0.id()
        );
        fs::write(place.join("record.json"), record).expect("a record");
        fs::write(place.join("machine.json"), "machine").expect("room");
        let (mut input, theirs) = UnixStream::pair().expect("a pair");
        let (connections, forwarded) = UnixStream::pair().expect("a pair");
        let mut attendant = wormhole(&["attend-guest", "one"])
            .arg(guest.0.id().to_string())
            .env("WORMHOLE_RUNTIME", folder.path())
            .stdin(Stdio::piped())
            .stdout(OwnedFd::from(theirs))
            .spawn()
            .expect("it starts");
        input
            .send_with_fd(&[0u8][..], forwarded.as_raw_fd())
            .expect("sent");
        input.read_exact(&mut [0]).expect("it attends");
        Self {
            output: attendant.stdin.take(),
            folder,
            guest,
            attendant,
            input,
            connections,
        }
    }

    fn place(&self) -> PathBuf {
        self.folder.path().join(".guests/one")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = wormhole(&[&["guest"], args].concat());
        command.env("WORMHOLE_RUNTIME", self.folder.path());
        command
    }

    fn finish(&self, args: &[&str]) -> Finished {
        finish(&mut self.command(args))
    }

    fn writes(&mut self, bytes: &[u8]) {
        let output = self.output.as_mut().expect("it is open");
        output.write_all(bytes).expect("the attendant reads");
    }

    fn expects(&mut self, typed: &[u8]) {
        let mut bytes = vec![0; typed.len()];
        self.input.read_exact(&mut bytes).expect("input");
        assert_eq!(bytes, typed);
    }

    /// Answers a command that saves the guest, and returns whether it stops the guest. Writes to both of its files.
    fn answers(&self, answer: &[u8]) -> bool {
        let connection = self.connections.recv_with_fd(&mut [0]).expect("a message");
        let connection = OwnedFd::from(connection.1.expect("a connection"));
        let mut connection = UnixStream::from(connection);
        let receive = |words: &str| {
            let mut byte = [0];
            let (_, file) = connection.recv_with_fd(&mut byte).expect("a message");
            let mut file: File = file.expect("a file");
            file.write_all(words.as_bytes()).expect("room");
            byte[0]
        };
        let stop = receive("state");
        receive("memory");
        connection.write_all(answer).expect("it is there");
        stop == 1
    }

    /// Ends the guest, and waits for the attendant's end, which may be a success.
    fn ends_by(&mut self, success: bool) {
        self.guest.0.kill().expect("it lives");
        self.guest.0.wait().expect("it is a child");
        self.output = None;
        let ended = self.attendant.wait().expect("a child");
        assert_eq!(ended.success(), success);
    }

    fn ends(&mut self) {
        self.ends_by(true);
    }
}

impl Drop for Attended {
    fn drop(&mut self) {
        self.output = None;
        drop(self.attendant.wait());
    }
}

#[test]
fn one_person_at_a_time_has_the_console_and_gets_the_terminal_back() {
    let mut attended = Attended::new();
    let console = shell_words(&attended.command(&["console", "one"]));
    let runtime = attended.folder.path().display().to_string();
    let mut terminal = Terminal::start(&format!(
        "export WORMHOLE_RUNTIME={runtime}; before=$(stty -g); {console}; echo status $?; \
         test \"$before\" = \"$(stty -g)\" && echo restored; \
         bash -c \"echo process \\$\\$; exec {console}\"; \
         until test \"$before\" = \"$(stty -g)\"; do sleep 0.01; done; echo again"
    ));
    terminal.until("Ctrl-] detaches");
    attended.writes(b"the guest speaks\r\n");
    terminal.until("the guest speaks");
    // Neither is the key a signal, nor is the line edited.
    terminal.keyboard.write_all(b"ab\x7f\x03\r").expect("keys");
    attended.expects(b"ab\x7f\x03\r");
    let second = attended.finish(&["console", "one"]);
    assert_eq!(second.status.code(), Some(2));
    let words = "is attached to the console of guest one: detach it with Ctrl-], or end it";
    assert!(second.stderr.contains(words), "{}", second.stderr);
    terminal.keyboard.write_all(b"x\x1dy").expect("keys");
    attended.expects(b"x");
    terminal.until("status 0");
    terminal.until("restored");

    // A person who is killed gives the console and the terminal free as well.
    let lines = terminal.until("Ctrl-] detaches");
    let process = lines
        .iter()
        .find_map(|line| line.strip_prefix("process "))
        .and_then(|number| Pid::from_raw(number.parse().ok()?))
        .expect("its number");
    kill_process(process, Signal::KILL).expect("it runs");
    terminal.until("again");
    let mut third = Ended(
        attended
            .command(&["console", "one"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts"),
    );
    let mut keys = third.0.stdin.take().expect("it is piped");
    keys.write_all(b"third").expect("it reads");
    attended.expects(b"third");
    attended.ends();
    assert!(third.0.wait().expect("a child").success());
    assert!(!attended.place().exists());
}

#[test]
fn a_person_who_leaves_keys_that_the_guest_does_not_read_gives_the_console_free() {
    let attended = Attended::new();
    let mut console = attended.command(&["console", "one"]);
    let mut first = Ended(console.stdin(Stdio::piped()).spawn().expect("it starts"));
    let mut keys = first.0.stdin.take().expect("it is piped");
    // More than the pipe to the guest has room for.
    keys.write_all(&[b'x'; 128 << 10]).expect("it reads");
    drop(keys);
    assert!(first.0.wait().expect("a child").success());
    let second = attended.finish(&["console", "one"]);
    assert!(second.status.success(), "{}", second.stderr);
}

#[test]
fn the_log_has_the_last_output_in_bounded_files() {
    let mut attended = Attended::new();
    let line = |number: u32| format!("{number:->1023}\n");
    for number in 0..5000 {
        attended.writes(line(number).as_bytes());
    }
    let last = line(4999);
    eventually("the last line", PATIENCE, || {
        attended.finish(&["logs", "one"]).stdout.ends_with(&last)
    });
    let log = attended.finish(&["logs", "one"]).stdout;
    assert!((1 << 20..(2 << 20) + 8192).contains(&log.len()));
    assert!(log.contains(&line(4000)) && !log.contains(&line(2000)));
    attended.ends();
    let gone = attended.finish(&["logs", "one"]);
    assert_eq!(gone.status.code(), Some(2));
    assert!(!attended.place().exists());
}

#[test]
fn a_log_at_a_terminal_has_no_commands_for_it_and_in_a_file_has_all_bytes() {
    const WRITTEN: &str = "a color \x1b[31m a title \x1b]0;x\x07 c1 \u{9b}2J end\r\n";
    let mut attended = Attended::new();
    attended.writes(WRITTEN.as_bytes());
    eventually("the line", PATIENCE, || {
        attended.finish(&["logs", "one"]).stdout == WRITTEN
    });
    let logs = shell_words(&attended.command(&["logs", "one"]));
    let runtime = attended.folder.path().display().to_string();
    let script = format!("export WORMHOLE_RUNTIME={runtime}; {logs}; echo shown");
    let shown = Terminal::start(&script).until("shown");
    assert_eq!(shown, ["a color .[31m a title .]0;x. c1 .2J end"]);
    attended.ends();
}

#[test]
fn a_guest_that_failed_is_listed_until_it_is_stopped() {
    let mut attended = Attended::new();
    let list = attended.finish(&["list"]).stdout;
    for word in ["one", "256M", "its own (cpu)", "running"] {
        assert!(list.contains(word), "{list}");
    }
    let end = "the guest's kernel panicked:\x1b[2J";
    fs::write(attended.place().join("end"), end).expect("a file");
    attended.writes(b"its last words\n");
    attended.ends();
    let list = attended.finish(&["list"]).stdout;
    assert!(list.contains("panicked:.[2J"), "{list}");
    assert_eq!(attended.finish(&["logs", "one"]).stdout, "its last words\n");
    let console = attended.finish(&["console", "one"]).stderr;
    assert!(console.contains("no guest one is running"), "{console}");
    let stopped = attended.finish(&["stop", "one"]);
    assert!(stopped.status.success(), "{}", stopped.stderr);
    assert!(stopped.stdout.starts_with("guest one had ended: "));
    assert!(!attended.place().exists());
    assert!(!attended.finish(&["list"]).stdout.contains("one"));
}

#[test]
fn a_folder_whose_processes_were_killed_is_no_guest() {
    let mut attended = Attended::new();
    attended.attendant.kill().expect("it lives");
    attended.ends_by(false);
    assert!(attended.place().exists());
    assert!(!attended.finish(&["list"]).stdout.contains("one"));
    let stopped = attended.finish(&["stop", "one"]);
    assert_eq!(stopped.status.code(), Some(2));
    assert!(
        stopped.stderr.contains("no guest one is running"),
        "{}",
        stopped.stderr
    );
    assert!(!attended.place().exists());
}

/// Returns the names and the contents of a folder's files.
fn contents(folder: &Path) -> Vec<(String, String)> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let files = entries.flatten().map(|entry| {
        let text = fs::read_to_string(entry.path()).expect("a text");
        (entry.file_name().to_string_lossy().into_owned(), text)
    });
    let mut files: Vec<_> = files.collect();
    files.sort();
    files
}

#[test]
fn a_snapshot_is_what_the_guest_writes_and_nothing_stays_of_one_that_it_refuses() {
    let mut attended = Attended::new();
    let home = tempfile::tempdir().expect("a folder");
    let folder = home.path().join("saved");
    let path = folder.display().to_string();
    let asked = |more: &[&str], answer: &[u8]| {
        let mut command = attended.command(&[&["snapshot", "one", &path], more].concat());
        let asking = std::thread::spawn(move || finish(&mut command));
        let stops = attended.answers(answer);
        (asking.join().expect("no panic"), stops)
    };
    let (refused, stops) = asked(&[], b"it has a session");
    assert_eq!((refused.status.code(), stops), (Some(2), false));
    let words = "guest one is not saved: it has a session";
    assert!(refused.stderr.contains(words), "{}", refused.stderr);
    assert!(!folder.exists());
    // A guest that ends gives no answer.
    let (ended, _) = asked(&[], b"");
    let words = "guest one has ended, or took no request: nothing is saved";
    assert!(ended.stderr.contains(words), "{}", ended.stderr);
    assert!(!folder.exists());

    let (saved, stops) = asked(&[], &[0]);
    assert!(saved.status.success() && !stops, "{}", saved.stderr);
    let line = format!("guest one is saved in {path}, and runs on");
    assert!(saved.stdout.contains(&line), "{}", saved.stdout);
    let files = [
        ("machine.json", "machine"),
        ("memory", "memory"),
        ("state.json", "state"),
    ];
    let files = files.map(|(name, text)| (name.to_owned(), text.to_owned()));
    assert_eq!(contents(&folder), files);
    let again = attended.finish(&["snapshot", "one", &path]);
    assert!(again.stderr.contains("saved"), "{}", again.stderr);
    assert_eq!(contents(&folder), files);

    attended.ends();
    let gone = attended.finish(&["snapshot", "one", &path]);
    assert!(
        gone.stderr.contains("no guest one is running"),
        "{}",
        gone.stderr
    );
}

#[test]
fn a_guest_is_not_started_from_a_folder_that_is_no_snapshot() {
    let home = tempfile::tempdir().expect("a folder");
    let start = |more: &[&str]| {
        let folder = home.path().display().to_string();
        let args = [&["guest", "start", "one", "--restore", &folder], more].concat();
        let mut command = wormhole(&args);
        command.env("WORMHOLE_RUNTIME", home.path().join("runtime"));
        let finished = finish(&mut command);
        assert_eq!(finished.status.code(), Some(2));
        finished.stderr
    };
    assert!(start(&[]).contains("state.json"));
    fs::write(home.path().join("state.json"), "{\"format\": 0}").expect("room");
    assert!(start(&[]).contains("it has format 0, and this version reads 3"));
    // A snapshot has the options of the machine.
    for option in [["--memory", "1G"], ["--kernel", "/k"], ["--disk", "/d"]] {
        let refused = start(&option);
        assert!(refused.contains("cannot be used with"), "{refused}");
    }
}
