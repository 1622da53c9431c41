//! Starts a confined process, and reports whether it executed its program.

use std::ffi::{CString, OsStr, OsString};
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{fcntl_dupfd_cloexec, retry_on_intr};
use rustix::process::{Signal, WaitId, WaitIdOptions, getegid, geteuid, pidfd_send_signal, waitid};
use wormhole_cgroups::CgroupError;
use wormhole_link::device::DeviceKind;
use wormhole_link::tasks;

use super::cgroup::{Cgroup, Cgroups};
use super::child::{self, NOBODY, Plan, STAGES};
use super::device::needs;
use super::processes::Processes;
use super::root::{self, PROGRAM, STAGE};
use super::seccomp;
use super::standing;

/// Means by which a worker is isolated from the rest of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// Namespaces that the supervisor makes as root.
    Namespaces,
    /// Namespaces inside a user namespace of the worker's own.
    UserNamespace,
    /// None: only the system call filter, limits and dropped privileges hold.
    None,
}

/// Confinement of workers on this system.
#[derive(Clone, Debug)]
pub struct Confinement {
    pub isolation: Isolation,
    /// PID namespace of all workers; `None` gives each its own.
    pub processes: Option<Arc<Processes>>,
    pub kind: DeviceKind,
    /// Device files that a worker may open, beyond those of every worker.
    pub device_files: Vec<PathBuf>,
    /// Bytes of memory that a worker may have.
    pub memory: u64,
    /// Threads that a worker may have.
    pub threads: u64,
    /// Cgroups that enforce the limits of memory and tasks.
    pub cgroups: Option<Arc<Cgroups>>,
    /// Directories outside the system's own that hold shared libraries a worker loads.
    pub library_directories: Vec<PathBuf>,
    /// Time in which a process must have confined itself and executed its program.
    pub execution_limit: Duration,
}

/// Default of `execution_limit`: far more than a process needs if its files can be reached.
pub const EXECUTION_LIMIT: Duration = Duration::from_secs(10);

/// Process to start.
#[derive(Debug)]
pub struct Command<'a> {
    pub program: &'a Path,
    pub arguments: &'a [OsString],
    pub environment: &'a [(OsString, OsString)],
    pub stdin: BorrowedFd<'a>,
    /// Standard output and standard error.
    pub output: BorrowedFd<'a>,
    /// Descriptors 3, 4, … of the process.
    pub descriptors: &'a [BorrowedFd<'a>],
    /// True if descriptor 3 is a stream to the supervisor, which closes when the supervisor ends.
    pub lifeline: bool,
}

/// Process that was started and is not reaped yet.
#[derive(Debug)]
pub struct Child {
    pid: libc::pid_t,
    pidfd: OwnedFd,
    cgroup: Option<Cgroup>,
}

#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    #[error("cannot start a process for {program}")]
    Clone {
        program: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("the process for {program} failed while {stage}")]
    Child {
        program: PathBuf,
        stage: &'static str,
        #[source]
        cause: io::Error,
    },
    #[error("the process for {program} had not executed it after {limit:?}: {doing}")]
    Late {
        program: PathBuf,
        limit: Duration,
        doing: String,
    },
    #[error("cannot prepare {what}")]
    Prepare {
        what: &'static str,
        #[source]
        cause: io::Error,
    },
    #[error("a process for {program} has no cgroup")]
    Cgroup {
        program: PathBuf,
        #[source]
        cause: CgroupError,
    },
    #[error("the system call filter does not compile")]
    Filter(#[from] wormhole_privileges::FilterError),
}

const OPEN_FILES: u64 = 4096;
/// `CLONE_INTO_CGROUP` of clone(2), beyond the flags that are an `int`.
const CLONE_INTO_CGROUP: u64 = 1 << 33;

impl Confinement {
    /// Returns whether each process that is started gets a user of its own.
    pub fn changes_user(&self) -> bool {
        geteuid().is_root() && self.isolation != Isolation::UserNamespace
    }

    /// Starts `command`, confined. Returns once the process has executed its program.
    ///
    /// # Errors
    /// Fails if the process cannot be made, cannot confine itself, cannot execute its program, or takes longer than
    /// `execution_limit`.
    pub fn spawn(&self, command: &Command<'_>) -> Result<Child, SpawnError> {
        let steps = if self.isolation == Isolation::None {
            Vec::new()
        } else {
            root::steps(
                self.kind,
                command.program,
                &self.device_files,
                &self.library_directories,
            )
        };
        let executed = if self.isolation == Isolation::None {
            root::c_string(command.program.as_os_str())
        } else {
            c_string(PROGRAM)
        };
        let argument_strings: Vec<CString> = std::iter::once(command.program.as_os_str())
            .chain(command.arguments.iter().map(OsString::as_os_str))
            .map(root::c_string)
            .collect();
        let environment_strings: Vec<CString> = command
            .environment
            .iter()
            .map(|(name, value)| {
                let mut entry = name.clone();
                entry.push("=");
                entry.push(value);
                root::c_string(&entry)
            })
            .collect();

        let mut sources = vec![
            duplicate_high(command.stdin)?,
            duplicate_high(command.output)?,
        ];
        let mut descriptors = vec![
            (sources[0].as_raw_fd(), 0),
            (sources[1].as_raw_fd(), 1),
            (sources[1].as_raw_fd(), 2),
        ];
        for (target, source) in (3..).zip(command.descriptors) {
            let source = duplicate_high(*source)?;
            descriptors.push((source.as_raw_fd(), target));
            sources.push(source);
        }

        let (uid, gid) = (geteuid(), getegid());
        let plan = Plan {
            isolation: self.isolation,
            steps,
            stage: c_string(STAGE),
            old_root: c_string(&format!("{STAGE}/old")),
            null: c_string(&format!("{STAGE}/dev/null")),
            uid_map: format!("{NOBODY} {uid} 1").into_bytes(),
            gid_map: format!("{NOBODY} {gid} 1").into_bytes(),
            groups: device_groups(&self.device_files),
            change_user: self.changes_user(),
            descriptors,
            lifeline: command.lifeline.then_some(3),
            open_files: OPEN_FILES,
            memory: if needs(self.kind).limits_memory {
                self.memory
            } else {
                libc::RLIM_INFINITY
            },
            threads: self.threads,
            filter: seccomp::filter(self.kind)?,
            program: executed,
            arguments: pointers(&argument_strings),
            environment: pointers(&environment_strings),
        };
        let child = self.clone_child(&plan, command.program)?;
        drop(sources);
        Ok(child)
    }

    fn clone_child(&self, plan: &Plan, program: &Path) -> Result<Child, SpawnError> {
        let (mut report, low_writer) = io::pipe().map_err(|cause| SpawnError::Prepare {
            what: "a pipe",
            cause,
        })?;
        let report_writer = duplicate_high(low_writer.as_fd())?;
        drop(low_writer);
        let namespaces =
            libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWNS | libc::CLONE_NEWUTS;
        let own_processes = match &self.processes {
            Some(_) => 0,
            None => libc::CLONE_NEWPID,
        };
        let flags = match self.isolation {
            Isolation::Namespaces => namespaces | own_processes,
            Isolation::UserNamespace => namespaces | own_processes | libc::CLONE_NEWUSER,
            Isolation::None => 0,
        };
        let cgroup = self.cgroups.as_ref().map(Cgroups::make);
        let cgroup = cgroup.transpose().map_err(|cause| SpawnError::Cgroup {
            program: program.to_owned(),
            cause,
        })?;
        let clone = || {
            // SAFETY: the child only runs `become_worker`, which neither allocates nor returns.
            let (pid, pidfd) = unsafe { cloned(flags.unsigned_abs().into(), cgroup.as_ref()) }?;
            if pid == 0 {
                // SAFETY: this is the child just cloned; `plan` was prepared for it.
                unsafe { child::become_worker(plan, report_writer.as_raw_fd()) }
            }
            Ok((pid, pidfd.ok_or(io::ErrorKind::NotFound)?))
        };
        let made = match &self.processes {
            Some(processes) => processes.within(clone).flatten(),
            None => clone(),
        };
        let (pid, pidfd) = made.map_err(|cause| SpawnError::Clone {
            program: program.to_owned(),
            cause: tasks::named(cause),
        })?;
        drop(report_writer);
        let child = Child { pid, pidfd, cgroup };
        if !readable_within(&report, self.execution_limit) {
            let doing = standing::of(child.pid);
            child.end_stuck();
            return Err(SpawnError::Late {
                program: program.to_owned(),
                limit: self.execution_limit,
                doing,
            });
        }
        let mut message = [0u8; 8];
        // The child writes the whole report by one system call, or none of it.
        match report.read_exact(&mut message) {
            // exec has closed the pipe, and the child reported no failure.
            Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => Ok(child),
            Err(cause) => {
                child.kill();
                child.wait();
                Err(SpawnError::Prepare {
                    what: "the worker: its report cannot be read",
                    cause,
                })
            }
            Ok(()) => {
                child.kill();
                child.wait();
                let [stage, errno] = [&message[..4], &message[4..]]
                    .map(|bytes| i32::from_le_bytes(bytes.try_into().unwrap_or([0; 4])));
                Err(SpawnError::Child {
                    program: program.to_owned(),
                    stage: usize::try_from(stage)
                        .ok()
                        .and_then(|stage| STAGES.get(stage))
                        .copied()
                        .unwrap_or("starting"),
                    cause: io::Error::from_raw_os_error(errno),
                })
            }
        }
    }
}

impl Child {
    /// Returns the process's number in the supervisor's PID namespace. Numbers are reused: use it in messages only.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns whether the OOM killer has ended the process, which SIGKILL has ended.
    pub fn ran_out_of_memory(&self) -> bool {
        self.cgroup.as_ref().is_some_and(Cgroup::ran_out_of_memory)
    }

    /// Moves the process into a cgroup of its tenant's; does nothing without cgroups.
    ///
    /// # Errors
    /// Fails if the kernel does not make the cgroup, or does not move the process.
    pub fn move_to(&mut self, tenant: u32) -> Result<(), CgroupError> {
        match &mut self.cgroup {
            Some(cgroup) => cgroup.move_to(tenant, self.pid),
            None => Ok(()),
        }
    }

    /// Returns the process's pidfd, which is readable once the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        borrow(&self.pidfd)
    }

    /// Sends SIGKILL; does nothing if the process has ended already.
    pub fn kill(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Reaps the process if it has ended, and returns how it ended.
    pub fn try_reap(&self) -> Option<Ending> {
        self.reap(WaitIdOptions::NOHANG)
    }

    /// Waits for the end of the process and reaps it.
    pub fn wait(&self) -> Option<Ending> {
        self.reap(WaitIdOptions::empty())
    }

    /// Kills a process that may wait in the kernel where SIGKILL does not reach it. A new thread reaps it, so that the
    /// caller does not wait.
    fn end_stuck(self) {
        self.kill();
        let reaper = std::thread::Builder::new().name("reaper".to_owned());
        if let Err(error) = reaper.spawn(move || self.wait()) {
            tracing::error!("a process that was killed is not waited for: {error}");
        }
    }

    fn reap(&self, options: WaitIdOptions) -> Option<Ending> {
        let options = options | WaitIdOptions::EXITED;
        let waited = || waitid(WaitId::PidFd(self.pidfd.as_fd()), options);
        let status = retry_on_intr(waited).ok().flatten()?;
        let exited = status.exit_status().map(Ending::Exited);
        exited.or_else(|| status.terminating_signal().map(Ending::Signalled))
    }
}

/// Exit status of a process, or the signal that ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Exited(i32),
    Signalled(i32),
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(status) => write!(f, "exited with status {status}"),
            Self::Signalled(signal) => write!(f, "was ended by signal {signal}"),
        }
    }
}

/// Finds the strongest isolation that this system allows, by starting a process under each. Root starts none in a user
/// namespace: outside of it the process would be root, to whom the kernel's settings belong.
///
/// # Errors
/// Returns the reason why namespaces failed, and for others than root why they failed inside a user namespace.
pub fn probe(kind: DeviceKind) -> Result<Isolation, String> {
    let mut reasons = Vec::new();
    let all = [Isolation::Namespaces, Isolation::UserNamespace];
    let tried = if geteuid().is_root() { &all[..1] } else { &all };
    for &isolation in tried {
        let confinement = Confinement {
            isolation,
            processes: None,
            kind,
            device_files: Vec::new(),
            memory: libc::RLIM_INFINITY,
            threads: libc::RLIM_INFINITY,
            cgroups: None,
            library_directories: Vec::new(),
            execution_limit: EXECUTION_LIMIT,
        };
        match confinement.try_itself() {
            Ok(()) => return Ok(isolation),
            Err(error) => {
                let cause = std::error::Error::source(&error)
                    .map(|cause| format!(": {cause}"))
                    .unwrap_or_default();
                reasons.push(match isolation {
                    Isolation::UserNamespace => format!("with a user namespace: {error}{cause}"),
                    _ => format!("directly: {error}{cause}"),
                });
            }
        }
    }
    Err(reasons.join("; "))
}

impl Confinement {
    /// Starts this program itself with `--version`, since no other is certain to exist.
    fn try_itself(&self) -> Result<(), SpawnError> {
        let null = null_device()?;
        let itself = std::env::current_exe().map_err(|cause| SpawnError::Prepare {
            what: "the running program",
            cause,
        })?;
        let child = self.spawn(&Command {
            program: &itself,
            arguments: &["--version".into()],
            environment: &[],
            stdin: borrow(&null),
            output: borrow(&null),
            descriptors: &[],
            lifeline: false,
        })?;
        child.wait();
        Ok(())
    }
}

/// Opens `/dev/null` for reading and writing.
pub fn null_device() -> Result<OwnedFd, SpawnError> {
    std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .map(OwnedFd::from)
        .map_err(|cause| SpawnError::Prepare {
            what: "/dev/null",
            cause,
        })
}

fn device_groups(device_files: &[PathBuf]) -> Vec<libc::gid_t> {
    let mut groups: Vec<libc::gid_t> = device_files
        .iter()
        .filter_map(|device| device.metadata().ok())
        .filter(|metadata| metadata.mode() & 0o006 != 0o006 && metadata.gid() != 0)
        .map(|metadata| metadata.gid())
        .collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings
        .iter()
        .map(|string| string.as_ptr())
        .chain(std::iter::once(std::ptr::null()))
        .collect()
}

fn c_string(text: &str) -> CString {
    root::c_string(OsStr::from_bytes(text.as_bytes()))
}

fn borrow(fd: &OwnedFd) -> BorrowedFd<'_> {
    fd.as_fd()
}

/// Waits until the pipe has a byte or its other end is closed. Returns false if that takes longer than `limit`.
fn readable_within(pipe: &PipeReader, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        // None, which waits for ever, for more seconds than a `Timespec` has.
        let left = Timespec::try_from(left).ok();
        let mut entry = [PollFd::new(pipe, PollFlags::IN)];
        if poll(&mut entry, left.as_ref()).is_ok_and(|ready| ready > 0) {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
    }
}

/// Duplicates a descriptor to a number of at least 16, above all that a child is given.
fn duplicate_high(fd: BorrowedFd<'_>) -> Result<OwnedFd, SpawnError> {
    fcntl_dupfd_cloexec(fd, 16).map_err(|errno| SpawnError::Prepare {
        what: "a descriptor",
        cause: errno.into(),
    })
}

/// Clones this process with a copy of its memory and without its other threads (clone3(2)). Returns the child's number
/// and pidfd in the parent, and 0 in the child.
///
/// # Safety
/// Other threads of this process may have held any lock at that moment. The child must only make system calls on memory
/// that exists, and must neither allocate nor return.
pub(super) unsafe fn cloned(
    flags: u64,
    cgroup: Option<&Cgroup>,
) -> io::Result<(libc::pid_t, Option<OwnedFd>)> {
    let (into, place) = match cgroup {
        Some(cgroup) => (CLONE_INTO_CGROUP, cgroup.as_fd().as_raw_fd().unsigned_abs()),
        None => (0, 0),
    };
    let mut pidfd: RawFd = -1;
    // struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid,
    // set_tid_size, cgroup.
    let arguments: [u64; 11] = [
        flags | u64::from(libc::CLONE_PIDFD.unsigned_abs()) | into,
        (&raw mut pidfd) as u64,
        0,
        0,
        u64::from(libc::SIGCHLD.unsigned_abs()),
        0,
        0,
        0,
        0,
        0,
        u64::from(place),
    ];
    // SAFETY: a complete `struct clone_args` without CLONE_VM: the child gets a copy of this process's memory. The
    // caller promises the rest.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            arguments.as_ptr(),
            size_of_val(&arguments),
        )
    };
    match libc::pid_t::try_from(pid) {
        Ok(0) => Ok((0, None)),
        // SAFETY: the kernel stored a fresh descriptor there because of CLONE_PIDFD.
        Ok(pid) if pid > 0 => Ok((pid, Some(unsafe { OwnedFd::from_raw_fd(pidfd) }))),
        _ => Err(io::Error::last_os_error()),
    }
}
