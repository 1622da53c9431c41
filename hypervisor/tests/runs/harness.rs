//! Harness that runs the staged `wormhole` as a user would.
//!
//! `cargo xtask test` stages an installation and builds the programs, then names both in the environment.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use wormhole_lock::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Time after which a run at `process` placement counts as hung.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Time after which a run in a guest counts as hung.
pub const GUEST_PATIENCE: Duration = Duration::from_secs(590);

/// Returns the folder of the staged installation.
pub fn stage() -> PathBuf {
    from_environment("WORMHOLE_STAGE")
}

/// Returns the path of a built program. `link` is `static` or `shared`, or an earlier release such as `cuda12`.
pub fn program(link: &str, name: &str) -> PathBuf {
    let path = from_environment("WORMHOLE_PROGRAMS").join(link).join(name);
    assert!(path.is_file(), "{} is not built", path.display());
    path
}

/// Passes the names of the demo's programs to a macro. Each is built with the static and the shared runtime.
macro_rules! demo_programs {
    ($to:ident) => {
        $to! {
            bitonic_sort black_scholes convolution graphs grid_sync half_gemm
            histogram linked_units mandelbrot matrix_mul nbody prefix_scan
            reduction spin_lock streams_events textures transpose vector_add
        }
    };
}
pub(crate) use demo_programs;

/// Passes the names of the programs that are also built for per-thread default streams to a macro.
macro_rules! per_thread_programs {
    ($to:ident) => {
        $to! {
            contexts copies_3d graph_nodes host_functions kernels managed memory_operations pools
        }
    };
}
pub(crate) use per_thread_programs;

/// Debian packages with which the set-up builds the disk of the images, as a command of docs/images.md does. Each has a program of
/// its name.
pub const DISK_PACKAGES: [&str; 2] = ["hello", "strace"];

/// Returns the folder of images.
pub fn images() -> PathBuf {
    from_environment("WORMHOLE_IMAGES")
}

fn from_environment(key: &str) -> PathBuf {
    std::env::var_os(key)
        .unwrap_or_else(|| panic!("{key} is not set: run these tests by `cargo xtask test`"))
        .into()
}

/// Sets the default signal dispositions for a command. The parent of the tests may ignore some signals, as nohup(1) and
/// a shell's background jobs do.
pub fn with_own_signals(command: &mut Command) -> &mut Command {
    // SAFETY: signal is safe between fork and exec; no handler is installed.
    unsafe {
        command.pre_exec(|| {
            for signal in [
                libc::SIGHUP,
                libc::SIGINT,
                libc::SIGQUIT,
                libc::SIGTERM,
                libc::SIGUSR1,
                libc::SIGUSR2,
            ] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        })
    }
}

/// Result of a finished run.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

/// The right to run programs: one test alone, or several tests whose programs run in guests.
static RUNS: RwLock<()> = RwLock::new(());

/// Waits until no other test runs programs. The test then has all processors, and its leftovers are not mistaken for
/// another test's.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    RUNS.write()
}

/// Waits until no test runs programs alone. A guest that boots under emulation occupies one processor, so that other
/// tests can use the rest.
pub fn beside_other_guests() -> RwLockReadGuard<'static, ()> {
    RUNS.read()
}

/// Creates a command of `wormhole` with these arguments.
pub fn wormhole(args: &[&str]) -> Command {
    let mut command = Command::new(stage().join("bin/wormhole"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs a command to its end. A run that takes too long fails the test. If the emulated host fails, or hangs with its
/// guest, the run is repeated.
pub fn finish(command: &mut Command) -> Finished {
    let in_guest = command.get_args().any(|argument| argument == "host");
    finish_at(command, in_guest)
}

/// Runs a command as [`finish`] does; `in_guest` says whether the program runs in a guest.
pub fn finish_at(command: &mut Command, in_guest: bool) -> Finished {
    let patience = if in_guest { GUEST_PATIENCE } else { PATIENCE };
    for_emulation(|| {
        let start = Instant::now();
        let child = with_own_signals(command)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let finished = match wait(Ended(child), start, patience) {
            Err(hung) if in_guest => return Err(format!("{command:?}: {hung}")),
            finished => finished.unwrap_or_else(|hung| panic!("{command:?}: {hung}")),
        };
        if finished.status.code() == Some(i32::from(FAILED_EMULATION)) {
            return Err(format!("{}{}", finished.stdout, finished.stderr));
        }
        Ok(finished)
    })
}

/// `wormhole`'s exit status for a failure of the emulated host.
pub const FAILED_EMULATION: u8 = 75;
/// Number of failures of the emulated host that fail a test.
const EMULATIONS: u32 = 3;

/// Repeats an attempt until the emulated host does not fail. Prints each failure at once, uncaptured by the test.
pub fn for_emulation<T>(mut attempt: impl FnMut() -> Result<T, String>) -> T {
    for _ in 1..EMULATIONS {
        match attempt() {
            Ok(done) => return done,
            Err(said) => {
                let line = format!("runs: the emulated host failed and is started again: {said}\n");
                let _ = std::io::stderr().write_all(line.as_bytes());
            }
        }
    }
    attempt().unwrap_or_else(|said| panic!("the emulated host failed {EMULATIONS} times: {said}"))
}

/// Waits for a child whose output is piped. If it takes longer than `patience`, fails with its standard error.
fn wait(mut child: Ended, start: Instant, patience: Duration) -> Result<Finished, String> {
    let stdout = drain(child.0.stdout.take());
    let stderr = drain(child.0.stderr.take());
    let status = loop {
        if let Some(status) = child.0.try_wait().expect("the child can be waited for") {
            break status;
        }
        if start.elapsed() > patience {
            let family = descendants(child.0.id());
            let processes: String = family.iter().copied().map(state).collect();
            drop(child);
            // All processes of a run end with the launcher. Until then they hold the locks of its disks.
            eventually("the end of the run's processes", PATIENCE, || {
                family
                    .iter()
                    .all(|process| started_from(*process).is_none())
            });
            let text = stderr.join().expect("its output was read");
            let output = stdout.join().expect("its output was read");
            return Err(format!(
                "the run did not end within {patience:?}; it wrote {output:?}, and said: {text}\n{processes}"
            ));
        }
        std::thread::yield_now();
        std::thread::park_timeout(Duration::from_millis(5));
    };
    Ok(Finished {
        status,
        stdout: stdout.join().expect("stdout was read"),
        stderr: stderr.join().expect("stderr was read"),
    })
}

/// Returns a line with the command, state and processor time of each thread of a process.
fn state(process: u32) -> String {
    let command = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    let command = String::from_utf8_lossy(&command).replace('\0', " ");
    let mut text = format!("{process} {}\n", command.get(..200).unwrap_or(&command));
    let threads = fs::read_dir(format!("/proc/{process}/task"));
    for thread in threads.into_iter().flatten().flatten() {
        let read = |name| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        let (stat, place) = (read("stat"), read("wchan"));
        // The name is in parentheses and may contain spaces.
        let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
        let fields: Vec<&str> = fields.split(' ').collect();
        if let [state, .., user, system] = fields[..fields.len().min(13)] {
            let name = read("comm");
            text += &format!("  {} {state} {user}+{system} ticks {place}\n", name.trim());
        }
    }
    text
}

fn drain(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            pipe.read_to_end(&mut bytes).expect("the pipe can be read");
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Returns the running processes of backends.
pub fn of_backends() -> Vec<u32> {
    let parts = stage().join("lib/wormhole");
    let is_one = |pid: &u32| started_from(*pid).is_some_and(|path| path.starts_with(&parts));
    pids().filter(is_one).collect()
}

/// Waits until no process of a backend runs. Panics with those that still run after [`PATIENCE`], and ends them, since the
/// next tests would wait for them too.
pub fn nothing_is_left() {
    let start = Instant::now();
    loop {
        let left = of_backends();
        if left.is_empty() {
            return;
        }
        if start.elapsed() > PATIENCE {
            let states: String = left.iter().copied().map(state).collect();
            for pid in left {
                let pid = Pid::from_raw(pid.cast_signed()).expect("a process number");
                // It may have ended.
                let _ = kill_process(pid, Signal::KILL);
            }
            panic!("processes of the backend still run after {PATIENCE:?}:\n{states}");
        }
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

/// Returns the running programs of this name.
pub fn running(name: &str) -> Vec<PathBuf> {
    pids()
        .filter_map(started_from)
        .filter(|path| path.ends_with(name))
        .collect()
}

/// Returns the numbers of this system's processes.
fn pids() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc")
        .expect("proc is mounted")
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the first word of a process's command line. `/proc/PID/exe` is no alternative: a confined worker has its own
/// mount namespace, in which its executable has another path.
pub fn started_from(pid: u32) -> Option<PathBuf> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let first = line
        .split(|byte| *byte == 0)
        .next()
        .filter(|first| !first.is_empty())?;
    Some(OsStr::from_bytes(first).into())
}

/// Waits until a condition holds. Panics with `what` if it does not hold in time.
pub fn eventually(what: &str, within: Duration, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(
            start.elapsed() < within,
            "{what} did not happen within {within:?}"
        );
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

/// Copies the staged programs and libraries to a folder that every user can read.
pub fn published_stage() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("it is ours");
    for part in ["bin", "lib/wormhole"] {
        let to = folder.path().join(part);
        fs::create_dir_all(&to).expect("a folder");
        let entries = fs::read_dir(stage().join(part)).expect("it is staged");
        // Folders hold symbols.
        for file in entries.flatten().filter(|entry| entry.path().is_file()) {
            fs::copy(file.path(), to.join(file.file_name())).expect("a copy");
        }
    }
    folder
}

/// Sends a launcher the signal until it has ended. From the second SIGTERM on, the launcher kills programs that the
/// first one did not end.
pub fn end_by(launcher: &mut Child, signal: Signal) {
    let pid = Pid::from_child(launcher);
    eventually("the launcher's end", PATIENCE, || {
        kill_process(pid, signal).is_err()
            || launcher.try_wait().is_ok_and(|status| status.is_some())
    });
    launcher.wait().expect("it is a child");
}

/// A running `wormhole` with its processes.
#[derive(Debug)]
pub struct Underway {
    child: Ended,
    start: Instant,
    lines: std::sync::mpsc::Receiver<String>,
    output: std::thread::JoinHandle<String>,
    /// Everything that it has said.
    said: Arc<Mutex<String>>,
    sayings: std::thread::JoinHandle<()>,
}

impl Underway {
    /// Starts a run whose program prints a line when it is in the middle of its work.
    pub fn start(command: &mut Command) -> Self {
        use std::io::{BufRead, BufReader};
        let start = Instant::now();
        let mut child = with_own_signals(command)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let mut output = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let errors = BufReader::new(child.stderr.take().expect("stderr is piped"));
        let said = Arc::new(Mutex::new(String::new()));
        let all = Arc::clone(&said);
        let sayings = std::thread::spawn(move || {
            for line in errors.split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line);
                all.lock().push_str(&format!("{line}\n"));
            }
        });
        let (tell, lines) = std::sync::mpsc::channel();
        let output = std::thread::spawn(move || {
            let mut all = String::new();
            let mut start = 0;
            while output.read_line(&mut all).expect("stdout can be read") > 0 {
                // The test may have given up already.
                drop(tell.send(all[start..].to_owned()));
                start = all.len();
            }
            all
        });
        Self {
            child: Ended(child),
            start,
            lines,
            output,
            said,
            sayings,
        }
    }

    /// Waits until the program has printed its first line, or the one after the last that a test has seen, and returns it.
    pub fn working(&self) -> String {
        let line = self.lines.recv_timeout(PATIENCE);
        line.unwrap_or_else(|error| {
            // Its last words follow the end of its output.
            eventually("the end of its standard error", PATIENCE, || {
                error == RecvTimeoutError::Timeout || self.sayings.is_finished()
            });
            panic!(
                "the program does not say that it is at work: {error}; it said: {}",
                self.said.lock()
            )
        })
    }

    /// Writes a line to the program and returns the line that it prints for it.
    pub fn answer(&mut self, line: &str) -> String {
        self.write_line(line);
        self.working()
    }

    /// Returns the process id of `wormhole`.
    pub fn id(&self) -> u32 {
        self.child.0.id()
    }

    /// Writes a line to the run's standard input, which must have been piped.
    pub fn write_line(&mut self, line: &str) {
        use std::io::Write;
        let stdin = self.child.0.stdin.as_mut().expect("stdin is piped");
        writeln!(stdin, "{line}").expect("the program reads it");
    }

    /// Sends SIGKILL to every process of this run that was started from a file of this name.
    pub fn kill_9(&self, name: &str) {
        let family = descendants(self.child.0.id());
        let named: Vec<&u32> = family
            .iter()
            .filter(|pid| started_from(**pid).is_some_and(|path| path.ends_with(name)))
            .collect();
        assert!(!named.is_empty(), "no process {name} among {family:?}");
        for pid in named {
            let pid = libc::pid_t::try_from(*pid).expect("a process number");
            let pid = Pid::from_raw(pid).expect("a process number");
            // It may have ended.
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Waits for the end of the run and returns its result.
    pub fn finish(self) -> Finished {
        let finished = wait(self.child, self.start, PATIENCE);
        let mut finished = finished.unwrap_or_else(|hung| panic!("{hung}{}", self.said.lock()));
        finished.stdout = self.output.join().expect("stdout was read");
        self.sayings.join().expect("stderr was read");
        finished.stderr = std::mem::take(&mut *self.said.lock());
        finished
    }
}

/// A child process, killed on drop so that it does not outlive its test.
#[derive(Debug)]
pub struct Ended(pub Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Fails only if the child has ended already.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Returns a process and all its descendants.
pub fn descendants(root: u32) -> Vec<u32> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        next += 1;
        for task in fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            if let Ok(children) = fs::read_to_string(task.path().join("children")) {
                found.extend(
                    children
                        .split_whitespace()
                        .filter_map(|child| child.parse::<u32>().ok()),
                );
            }
        }
    }
    found
}

#[test]
fn a_run_that_does_not_end_is_reported_with_its_threads() {
    let child = Command::new("sh")
        .args(["-c", "echo begun; exec sleep 300"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("there is a shell");
    let id = child.id();
    eventually("a sleeping process", PATIENCE, || {
        started_from(id).is_some_and(|command| command == OsStr::new("sleep"))
    });
    let text = wait(Ended(child), Instant::now(), Duration::ZERO).expect_err("it sleeps");
    for part in ["begun", &format!("{id} sleep 300"), "  sleep "] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
