//! Reaper: the process between the launcher and a program of this system.
//!
//! The reaper starts the program, passes signals to it, reports its end, and outlives the launcher
//! until it has killed all of the program's descendants. As subreaper (PR_SET_CHILD_SUBREAPER) it becomes
//! the parent of every orphan among its descendants, so no process is left once it has no child. A
//! PID namespace would do the same in one step, but programs would have different process numbers
//! inside and outside; cgroups are not available everywhere.
//!
//! The reaper is in the program's process group, where it receives signals sent to the group: such
//! a signal has reached the program already, and is not passed again.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, PipeReader};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{
    Pid, WaitOptions, WaitStatus, getpgid, getpid, getppid, set_child_subreaper,
    set_parent_process_death_signal, wait,
};
use wormhole_images::{Ending, Execution, NotExecuted, Report};
use wormhole_link::tasks;

use crate::run::transport;
use crate::say;
use crate::signals::{self, Grace, PASSED, Passing, Receiver, Set, Signal, Signals};

/// Time to wait for the reaper's own copy of a signal that the launcher received. The kernel
/// signals a group in one go, but on a busy machine the launcher may run before the loop has ended.
const COPY: Duration = Duration::from_millis(100);

/// Interval between checks for children that are not killed yet.
const AGAIN: Duration = Duration::from_millis(10);

/// Signals that would stop the reaper.
const STOPPING: [Signal; 3] = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// Returns the real-time signal by which the launcher passes a signal. These are queued, and cannot
/// be confused with signals to the group.
fn passing(index: usize) -> Signal {
    libc::SIGRTMIN() + Signal::try_from(index).unwrap_or_default()
}

/// Returns all signals that the reaper blocks.
fn blocked() -> Vec<Signal> {
    let mut all = [libc::SIGCHLD, libc::SIGCONT].to_vec();
    all.extend(PASSED);
    all.extend(STOPPING);
    all.extend((0..PASSED.len()).map(passing));
    all
}

/// Reason why the program's outcome is unknown.
#[derive(Debug, thiserror::Error)]
pub enum ReaperError {
    #[error("cannot start the program's reaper")]
    Start(#[source] io::Error),
    #[error("the program's reaper ended without a report ({0})")]
    NoReport(ExitStatus),
}

/// Launcher's handle on the reaper.
#[derive(Debug)]
pub struct Reaper {
    process: Child,
    report: PipeReader,
}

/// A program and the parameters of its start.
#[derive(Debug)]
pub struct Program<'a> {
    pub path: &'a Path,
    /// Name by which the program was called, and its arguments.
    pub command: &'a [OsString],
    pub variables: Vec<(OsString, OsString)>,
    /// The run's socket, alone in its folder. The reaper removes both when the program has ended.
    pub socket: &'a Path,
    /// Time between a signal that asks the program to end and its kill.
    pub grace: Duration,
}

impl Reaper {
    /// Starts the reaper, which is this same command, and through it the program. The launcher's
    /// signals are passed on while the guard lives.
    pub fn start(
        wormhole: &Path,
        program: Program<'_>,
        signals: &Signals,
    ) -> Result<(Self, Passing), ReaperError> {
        signals.to_started(|| {
            let reaper = Self::spawn(wormhole, program)?;
            let number = reaper.process.id().try_into().ok();
            let number = number
                .and_then(Pid::from_raw)
                .ok_or_else(|| ReaperError::Start(Errno::SRCH.into()))?;
            let receiver: Receiver = Box::new(move |signal| {
                let index = PASSED.iter().position(|passed| Some(*passed) == signal);
                if let Some(index) = index {
                    signals::send(number, passing(index));
                }
                None
            });
            Ok((reaper, receiver))
        })
    }

    fn spawn(wormhole: &Path, program: Program<'_>) -> Result<Self, ReaperError> {
        let (report, writer) = io::pipe().map_err(ReaperError::Start)?;
        let number = writer.as_raw_fd();
        let mut command = Command::new(wormhole);
        command
            .arg0("wormhole-reaper")
            .args(["reap", "--launcher", &getpid().to_string()])
            .args(["--report", &number.to_string()])
            .args(["--grace", &program.grace.as_secs().to_string()])
            .arg("--socket")
            .arg(program.socket)
            .arg("--program")
            .arg(program.path)
            .arg("--")
            .args(program.command)
            .envs(program.variables);
        let set = Set::of(&blocked());
        // SAFETY: between fork and exec this makes three system calls and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                set.block();
                // Resumes a reaper that was stopped with its group.
                set_parent_process_death_signal(Some(rustix::process::Signal::CONT))?;
                if libc::fcntl(number, libc::F_SETFD, 0) != 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let process = command
            .spawn()
            .map_err(|error| ReaperError::Start(tasks::named(error)))?;
        Ok(Self { process, report })
    }

    /// Waits for the program's end.
    pub fn wait(mut self, passing: Passing) -> Result<Ending, ReaperError> {
        let report = Report::read(&self.report, 0, 0);
        // Dropped before another process can have the reaper's number.
        drop(passing);
        let status = self.process.wait().map_err(ReaperError::Start)?;
        report
            .map(|report| report.ending)
            .map_err(|_| ReaperError::NoReport(status))
    }
}

/// Arguments of the reaper.
#[derive(Debug, Args)]
pub struct Options {
    /// The launcher's process number.
    #[arg(long)]
    launcher: i32,
    /// The descriptor that takes the report.
    #[arg(long)]
    report: RawFd,
    #[arg(long)]
    grace: u64,
    /// The run's socket.
    #[arg(long)]
    socket: PathBuf,
    #[arg(long)]
    program: PathBuf,
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Runs as the reaper.
pub fn reap(options: &Options) {
    // SAFETY: the launcher passed this descriptor to this process for this use.
    let report = unsafe { OwnedFd::from_raw_fd(options.report) };
    // The program must not inherit it.
    let _ = fcntl_setfd(&report, FdFlags::CLOEXEC);
    let ending = run(options).unwrap_or_else(|error| Ending::Failed {
        status: error.status(),
        message: error.to_string(),
    });
    // The launcher does the same, unless it was killed.
    let streams = options.socket.with_file_name(transport::SOCKET);
    for socket in [&options.socket, &streams] {
        let _ = fs::remove_file(socket);
    }
    if let Some(folder) = options.socket.parent() {
        let _ = fs::remove_dir(folder);
    }
    let report_of = Report {
        ending,
        collected: Vec::new(),
    };
    // Fails only if the launcher is gone.
    let _ = report_of.write(File::from(report));
}

fn run(options: &Options) -> Result<Ending, NotExecuted> {
    let blocked = blocked();
    let all = Set::of(&blocked);
    all.block();
    let failed = |source: io::Error| NotExecuted::because(&options.program, source);
    set_child_subreaper(Some(getpid())).map_err(|error| failed(error.into()))?;
    let execution = Execution::new(&options.program, &options.command, std::env::vars_os())?;
    let child = execution
        .ending_with_its_parent()
        .unblocking(&blocked)
        .command()
        .spawn()
        .map_err(|error| failed(tasks::named(error)))?;
    let number = child.id().try_into().ok().and_then(Pid::from_raw);
    let program = number.ok_or_else(|| failed(Errno::SRCH.into()))?;
    let mut attendance = Attendance {
        launcher: Pid::from_raw(options.launcher),
        program,
        ending: None,
        grace: Grace::new(Duration::from_secs(options.grace)),
        copies: [false; PASSED.len()],
    };
    Ok(attendance.run(&all))
}

/// State of a running reaper.
struct Attendance {
    launcher: Option<Pid>,
    program: Pid,
    ending: Option<Ending>,
    grace: Grace,
    /// Signals received by the reaper itself, and so by the whole group.
    copies: [bool; PASSED.len()],
}

impl Attendance {
    fn run(&mut self, all: &Set) -> Ending {
        loop {
            if getppid() != self.launcher {
                return self.end_all();
            }
            let now = Instant::now();
            if let Some(patience) = self.grace.exhausted(now) {
                say::line(format_args!("{patience}"));
                return self.end_all();
            }
            let limit = self.grace.end().map(|end| end.duration_since(now));
            let Some(signal) = all.wait(limit) else {
                continue;
            };
            if signal == libc::SIGCHLD {
                self.collect();
                if let Some(ending) = self.ending.take() {
                    return ending;
                }
            } else if let Some(index) = PASSED.iter().position(|passed| *passed == signal) {
                self.copies[index] = true;
            } else if let Some(index) = (0..PASSED.len()).find(|index| passing(*index) == signal) {
                let signal = PASSED[index];
                if self.has_it(index) {
                    continue;
                }
                signals::send(self.program, signal);
                if let Some(patience) = self.grace.count(signal, Instant::now()) {
                    say::line(format_args!("{patience}"));
                    return self.end_all();
                }
            }
        }
    }

    /// Returns whether a signal that the launcher received has reached the program as well.
    fn has_it(&mut self, index: usize) -> bool {
        let copied = std::mem::take(&mut self.copies[index])
            || Set::of(&[PASSED[index]]).wait(Some(COPY)).is_some();
        copied && getpgid(Some(self.program)) == getpgid(None)
    }

    /// Reaps children that have ended, in any process group. Returns whether any is left.
    fn collect(&mut self) -> bool {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((child, status))) if child == self.program => {
                    self.ending = Some(ending(status));
                }
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Kills the program and all its descendants, and returns when none is left.
    ///
    /// Kills only own children: their numbers cannot be reused before they are reaped. The orphans
    /// of each become children in turn.
    fn end_all(&mut self) -> Ending {
        let mut killed = Vec::new();
        while self.collect() {
            let mut children = children();
            if self.ending.is_none() {
                children.push(self.program);
            }
            // Children of another user, which may not be killed, are left.
            children.retain(|child| signals::send(*child, libc::SIGKILL));
            if children.is_empty() {
                break;
            }
            let fresh = children.iter().any(|child| !killed.contains(child));
            killed = children;
            if !fresh {
                Set::of(&[libc::SIGCHLD]).wait(Some(AGAIN));
            }
        }
        self.ending
            .take()
            .unwrap_or(Ending::Signalled(signals::KILLED - 128))
    }
}

fn ending(status: WaitStatus) -> Ending {
    let byte = |number: i32| u8::try_from(number).unwrap_or(u8::MAX);
    match (status.exit_status(), status.terminating_signal()) {
        (Some(status), _) => Ending::Exited(byte(status)),
        (None, signal) => Ending::Signalled(byte(signal.unwrap_or_default())),
    }
}

/// Returns the children of this process, which has one thread.
fn children() -> Vec<Pid> {
    let text = fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    text.split_whitespace()
        .filter_map(|number| Pid::from_raw(number.parse().ok()?))
        .collect()
}
