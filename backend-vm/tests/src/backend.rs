//! A supervisor under test, and a launcher for it.

use std::ffi::CString;
use std::fs::{File, Permissions};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wormhole_link::channel::{self, ChannelError, Incoming, Outgoing};
use wormhole_link::memory;
use wormhole_link::report::SessionReport;
use wormhole_link::usage::{TenantUsage, Usage};
use wormhole_ring::control::{Attach, Exits, Message, Stream};
use wormhole_ring::layout::SEGMENT_BYTES;

use crate::guest::Control;

/// Limit on every wait of a test.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Environment variable with the level of the supervisor's log.
pub const LOG: &str = "WORMHOLE_LOG";

/// Returns the path of an executable of this package, which cargo builds before the package's
/// tests. Cargo passes its path to the tests alone, so this looks beside the current executable and
/// in the folder above it, where tests and benchmarks are.
pub fn program(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let folders = own.ancestors().skip(1).take(2);
    let mut programs = folders.map(|folder| folder.join(name));
    let program = programs.find(|program| program.is_file());
    program.unwrap_or_else(|| panic!("{name} is not built for {}", own.display()))
}

/// A directory with worker executables, removed on drop.
pub struct Workers {
    directory: tempfile::TempDir,
}

impl Workers {
    /// Installs the worker of this build.
    pub fn built() -> Self {
        Self::of(&[&program("worker")])
    }

    pub fn of(files: &[&Path]) -> Self {
        Self::numbered(&(0..).zip(files.iter().copied()).collect::<Vec<_>>())
    }

    /// Installs files under names that end in these numbers.
    pub fn numbered(files: &[(u64, &Path)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for (number, file) in files {
            let place = directory.path().join(format!("wormhole-worker-{number}"));
            if std::fs::hard_link(file, &place).is_err() {
                copy_program(file, &place);
            }
        }
        Self { directory }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().to_owned()
    }
}

/// Copies a program by a separate process. If this process had the copy open for writing, a process
/// that another test forks would inherit it for a moment, and a file open for writing cannot be
/// executed.
fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").args([from, to]).status().unwrap();
    assert!(copied.success(), "{} is not copied", from.display());
}

/// A launcher: one tenant's stream and window.
pub struct Tenant {
    socket: UnixStream,
    incoming: Incoming,
    outgoing: Outgoing,
    reports: Vec<SessionReport>,
}

/// A running supervisor with its first tenant.
pub struct Backend {
    pub child: Child,
    tenant: Tenant,
    log: Arc<Mutex<String>>,
    _workers: Workers,
}

impl Deref for Backend {
    type Target = Tenant;

    fn deref(&self) -> &Tenant {
        &self.tenant
    }
}

impl DerefMut for Backend {
    fn deref_mut(&mut self) -> &mut Tenant {
        &mut self.tenant
    }
}

impl Backend {
    /// Starts a supervisor, without attaching a window.
    pub fn start(workers: Workers, arguments: &[&str]) -> Self {
        let supervisor = Command::new(program("supervisor"));
        Self::start_as(supervisor, workers, arguments)
    }

    /// Same as [`start`](Self::start), with another executable. A supervisor with `--listen` also
    /// gets `--trusted-tenants`, so that it serves on systems without cgroups.
    pub fn start_as(command: Command, workers: Workers, arguments: &[&str]) -> Self {
        let (backend, mut stderr) = Self::start_unheard(command, workers, arguments);
        let sink = Arc::clone(&backend.log);
        std::thread::spawn(move || {
            use std::io::Read;
            let mut buffer = [0; 4096];
            while let Ok(count) = stderr.read(&mut buffer) {
                if count == 0 {
                    break;
                }
                let text = String::from_utf8_lossy(&buffer[..count]).into_owned();
                if std::env::var_os("WORMHOLE_TEST_LOG").is_some() {
                    eprint!("{text}");
                }
                sink.lock().unwrap().push_str(&text);
            }
        });
        backend
    }

    /// Same as [`start_as`](Self::start_as), without a thread that reads the log. The log is
    /// detailed, unless the command sets its level.
    pub fn start_unheard(
        mut command: Command,
        workers: Workers,
        arguments: &[&str],
    ) -> (Self, ChildStderr) {
        let (near, far) = UnixStream::pair().unwrap();
        let number = far.as_raw_fd();
        if arguments.contains(&"--listen") {
            command.arg("--trusted-tenants");
        }
        if command.get_envs().all(|(name, _)| name != LOG) {
            command.env(LOG, "debug");
        }
        command
            .args(["--fd", "3", "--workers"])
            .arg(workers.path())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        // SAFETY: dup2 and fcntl are safe between fork and exec.
        unsafe {
            command.pre_exec(move || {
                if number == 3 {
                    libc::fcntl(3, libc::F_SETFD, 0);
                } else {
                    libc::dup2(number, 3);
                }
                Ok(())
            });
        }
        let mut child = command.spawn().unwrap();
        drop(far);
        let stderr = child.stderr.take().unwrap();
        let backend = Self {
            child,
            tenant: Tenant::new(near),
            log: Arc::new(Mutex::new(String::new())),
            _workers: workers,
        };
        (backend, stderr)
    }

    /// Starts a supervisor on the CPU device with a window of `segments` segments attached.
    pub fn with_window(segments: u64) -> Self {
        Self::with_devices(segments, "cpu")
    }

    /// Starts a supervisor on these devices with a window attached.
    pub fn with_devices(segments: u64, devices: &str) -> Self {
        let mut backend = Self::start(Workers::built(), &["--device", devices]);
        backend.attach(segments, Attach::default()).unwrap();
        backend
    }

    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Waits until the log contains a text.
    pub fn wait_for_log(&self, text: &str) {
        wait_until(
            || self.log().contains(text),
            || format!("\"{text}\" in the log:\n{}", self.log()),
        );
    }

    /// Returns the process that starts workers for the supervisor.
    pub fn spawner(&self) -> Option<i32> {
        children_of(self.child.id()).first().copied()
    }

    /// Returns the worker processes.
    pub fn workers(&self) -> Vec<i32> {
        self.started(|name| !["scrubber", "refuser", "tenant"].contains(&name))
    }

    /// Returns the processes that refuse connections.
    pub fn refusers(&self) -> Vec<i32> {
        self.started(|name| name == "refuser")
    }

    /// Returns the processes that serve tenants, and the one that waits for the next tenant.
    pub fn tenant_processes(&self) -> Vec<i32> {
        self.started(|name| name == "tenant")
    }

    /// Returns the processes that close descriptors for the supervisor.
    pub fn scrubbers(&self) -> Vec<i32> {
        self.started(|name| name == "scrubber")
    }

    /// Returns the spawner's children whose names match.
    fn started(&self, wanted: impl Fn(&str) -> bool) -> Vec<i32> {
        let spawner = self.spawner().map(i32::cast_unsigned);
        let mut children = spawner.map(children_of).unwrap_or_default();
        children.retain(|pid| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
            wanted(name.unwrap_or_default().trim_end())
        });
        children
    }

    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Sends a signal to the supervisor.
    pub fn signal(&self, signal: i32) {
        kill(i32::try_from(self.child.id()).unwrap(), signal);
    }

    pub fn wait_for_end(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "the supervisor does not end");
            std::thread::yield_now();
        }
    }

    /// Closes the tenant stream and waits for the supervisor to end.
    pub fn finish(mut self) -> ExitStatus {
        self.socket.shutdown(std::net::Shutdown::Both).unwrap();
        self.wait_for_end()
    }
}

impl Tenant {
    fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            incoming: Incoming::new(true),
            outgoing: Outgoing::default(),
            reports: Vec::new(),
        }
    }

    /// Connects as another tenant to a supervisor that listens at `path`, or will soon.
    pub fn join(path: &Path) -> Self {
        let mut stream = None;
        wait_until(
            || {
                stream = UnixStream::connect(path).ok();
                stream.is_some()
            },
            || format!("a listener at {}", path.display()),
        );
        Self::new(stream.unwrap())
    }

    /// Connects as another user, from a thread that alone has that user's id.
    pub fn join_as(user: libc::uid_t, path: &Path) -> Self {
        let path = path.to_owned();
        let joined = std::thread::spawn(move || {
            // SAFETY: integers; made directly, the system call changes the calling thread alone.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) };
            assert_eq!(changed, 0);
            Self::join(&path)
        });
        joined.join().unwrap()
    }

    /// Asks for the usage by tenants. Returns none if the supervisor's side closes the stream instead.
    pub fn usage(&mut self) -> Option<Vec<TenantUsage>> {
        self.send(&Message::AskUsage, Vec::new());
        let mut text = String::new();
        loop {
            let (more, part) = self.answered()?;
            text.push_str(&part);
            if more == 0 {
                return Some(serde_json::from_str(&text).unwrap());
            }
        }
    }

    /// Asks for the usage by this tenant, and tells its guest's exits. Returns the answers without and with them.
    pub fn own_usage(&mut self, exits: Option<u64>) -> [Usage; 2] {
        self.send(&Message::AskUsage, Vec::new());
        let (more, without) = self.answered().expect("an answer");
        assert_eq!(more, 1);
        self.tell_exits(exits);
        let (more, with) = self.answered().expect("an answer");
        assert_eq!(more, 0);
        [without, with].map(|text| serde_json::from_str(&text).unwrap())
    }

    /// Waits for a part of an answer. Returns its number and text, or none if the stream ends.
    pub fn answered(&mut self) -> Option<(u32, String)> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.incoming.take() {
                Ok(Some(Message::Usage { more, tenants })) => {
                    return Some((more, tenants.to_owned()));
                }
                Ok(Some(other)) => panic!("unexpected {other:?}"),
                Ok(None) => {
                    wait_readable(&self.socket, end);
                    if self.incoming.fill(&self.socket).is_err() {
                        return None;
                    }
                }
                Err(ChannelError::Ended | ChannelError::Cut) => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Waits until the supervisor asks for the guest's exits, and answers.
    pub fn tell_exits(&mut self, count: Option<u64>) {
        assert!(self.hears("AskExits"));
        let exits = Exits {
            is_known: count.is_some().into(),
            count: count.unwrap_or_default(),
        };
        self.send(&Message::Exits(exits), Vec::new());
    }

    /// Attaches a fresh window. Returns the supervisor's answer.
    pub fn attach(&mut self, segments: u64, limits: Attach) -> Result<(), String> {
        self.attach_file(segments, limits).map(drop)
    }

    /// Attaches a static window. Returns its file.
    pub fn attach_static(&mut self, segments: u64) -> File {
        let limits = Attach {
            static_window: 1,
            ..Attach::default()
        };
        self.attach_file(segments, limits).unwrap()
    }

    fn attach_file(&mut self, segments: u64, limits: Attach) -> Result<File, String> {
        let file = self.begin_attaching(segments, limits)?;
        self.attached().map(|()| file)
    }

    /// Sends a fresh window, and returns it.
    pub fn begin_attaching(&mut self, segments: u64, limits: Attach) -> Result<File, String> {
        let bytes = segments * SEGMENT_BYTES as u64;
        let file = File::from(memory::anonymous_file(c"test-window").unwrap());
        file.set_len(bytes).unwrap();
        memory::seal_size(&file).unwrap();
        let attach = Attach {
            window_size: bytes,
            ..limits
        };
        let theirs = file.try_clone().unwrap();
        self.try_send(&Message::Attach(attach), vec![theirs.into()])?;
        Ok(file)
    }

    /// Waits for the answer to an attach. Returns the reason of a refusal, or how the stream ended: a user whose
    /// connections were refused too often is refused without a sentence.
    pub fn attached(&mut self) -> Result<(), String> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.incoming.take().map_err(|error| error.to_string())? {
                Some(Message::Attached) => return Ok(()),
                Some(Message::Refused { reason, .. }) => return Err(reason.to_owned()),
                Some(Message::SessionReport(text)) => {
                    self.reports.push(serde_json::from_str(text).unwrap());
                }
                Some(other) => panic!("unexpected {other:?}"),
                None => {
                    wait_readable(&self.socket, end);
                    let filled = self.incoming.fill(&self.socket);
                    filled.map_err(|error| error.to_string())?;
                }
            }
        }
    }

    pub fn send(&mut self, message: &Message<'_>, descriptors: Vec<OwnedFd>) {
        self.try_send(message, descriptors).unwrap();
    }

    fn try_send(&mut self, message: &Message<'_>, descriptors: Vec<OwnedFd>) -> Result<(), String> {
        let sent = self.outgoing.send(&self.socket, message, descriptors);
        sent.map_err(|error| error.to_string())?;
        while self.outgoing.is_waiting() {
            channel::wait_writable(&self.socket).unwrap();
            let sent = self.outgoing.flush(&self.socket);
            sent.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Requests a control stream. The stream of a refused guest has ended.
    pub fn connect(&mut self) -> Control {
        self.request(Stream { local: 1 }, Vec::new())
    }

    /// Requests a control stream for a remote guest, which gets no descriptor of its session's file.
    pub fn connect_remote(&mut self) -> Control {
        self.request(Stream { local: 0 }, Vec::new())
    }

    /// Requests a control stream with descriptors, which launchers must not send.
    pub fn connect_with(&mut self, descriptors: Vec<OwnedFd>) -> Control {
        self.request(Stream { local: 1 }, descriptors)
    }

    fn request(&mut self, stream: Stream, descriptors: Vec<OwnedFd>) -> Control {
        self.send(&Message::Stream(stream), descriptors);
        let end = Instant::now() + PATIENCE;
        loop {
            match self.incoming.take().expect("the tenant stream") {
                Some(Message::Stream(_)) => {
                    let socket = self.incoming.descriptor().expect("the guest's end");
                    return Control::new(socket.into());
                }
                Some(Message::Refused { .. }) => {
                    return Control::new(UnixStream::pair().unwrap().0);
                }
                Some(Message::SessionReport(text)) => {
                    self.reports.push(serde_json::from_str(text).unwrap());
                }
                Some(other) => panic!("unexpected {other:?}"),
                None => {
                    wait_readable(&self.socket, end);
                    self.incoming.fill(&self.socket).unwrap();
                }
            }
        }
    }

    /// Waits until the supervisor has read all messages.
    pub fn wait_until_read(&self) {
        let unread = || {
            let mut bytes: libc::c_int = 0;
            // SAFETY: an open descriptor, and an integer that the kernel fills.
            let result =
                unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
            assert_eq!(result, 0);
            bytes
        };
        wait_until(
            || unread() == 0,
            || "the supervisor to read its stream".into(),
        );
    }

    /// Reads up to a message of this name. Returns false if the stream ends first.
    pub fn hears(&mut self, name: &str) -> bool {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.incoming.take() {
                Ok(Some(message)) if message.name() == name => return true,
                Ok(Some(_)) => {}
                Ok(None) => {
                    wait_readable(&self.socket, end);
                    self.incoming.fill(&self.socket).unwrap();
                }
                Err(ChannelError::Ended | ChannelError::Cut) => return false,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Waits for an order to map a run for a guest, and answers that it is mapped. Returns the session's file.
    pub fn show_run(&mut self) -> OwnedFd {
        let end = Instant::now() + PATIENCE;
        let run = loop {
            match self.incoming.take().expect("the tenant stream") {
                Some(Message::WindowMap(run)) => break run,
                Some(other) => panic!("unexpected {other:?}"),
                None => {
                    wait_readable(&self.socket, end);
                    self.incoming.fill(&self.socket).unwrap();
                }
            }
        };
        let file = self.incoming.descriptor().expect("the session's file");
        self.send(&Message::WindowMapped(run), Vec::new());
        file
    }

    /// Waits for the next report of an ended session.
    pub fn report(&mut self) -> SessionReport {
        let end = Instant::now() + PATIENCE;
        loop {
            if !self.reports.is_empty() {
                return self.reports.remove(0);
            }
            match self.incoming.take().expect("the tenant stream") {
                Some(Message::SessionReport(text)) => {
                    self.reports.push(serde_json::from_str(text).unwrap());
                }
                Some(other) => panic!("unexpected {other:?}"),
                None => {
                    wait_readable(&self.socket, end);
                    self.incoming.fill(&self.socket).unwrap();
                }
            }
        }
    }

    /// Returns a report that has arrived already, if there is one.
    pub fn ready_report(&mut self) -> Option<SessionReport> {
        self.incoming.fill(&self.socket).unwrap();
        while let Some(message) = self.incoming.take().expect("the tenant stream") {
            if let Message::SessionReport(text) = message {
                self.reports.push(serde_json::from_str(text).unwrap());
            }
        }
        (!self.reports.is_empty()).then(|| self.reports.remove(0))
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the supervisor's log:\n{}", self.log());
        }
    }
}

pub fn kill(pid: i32, signal: i32) {
    // SAFETY: a process that this test started, directly or not.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "kill {pid}");
}

/// Returns whether a process exists and is no zombie.
pub fn is_running(pid: i32) -> bool {
    state(pid).is_some_and(|state| !['Z', 'X'].contains(&state))
}

/// Returns whether a process is stopped by a signal.
pub fn is_stopped(pid: i32) -> bool {
    state(pid) == Some('T')
}

/// Returns the state of a process (proc_pid_stat(5)), if it exists.
fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    rest.trim_start().chars().next()
}

/// Lets every user connect to a supervisor's socket, as on a file system without access control
/// lists.
pub fn open_to_all(socket: &Path) {
    let path = CString::new(socket.as_os_str().as_bytes()).unwrap();
    // SAFETY: C strings. The call fails where there are no lists.
    unsafe {
        libc::removexattr(path.as_ptr(), c"system.posix_acl_access".as_ptr());
    }
    std::fs::set_permissions(socket, Permissions::from_mode(0o666)).unwrap();
}

/// Returns the children of all threads of a process.
pub fn children_of(pid: u32) -> Vec<i32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    threads
        .flatten()
        .flat_map(|thread| {
            let text = std::fs::read_to_string(thread.path().join("children"));
            let numbers = text.unwrap_or_default();
            let numbers = numbers.split_whitespace().map(|number| number.parse());
            numbers.collect::<Result<Vec<i32>, _>>().unwrap()
        })
        .collect()
}

/// Waits for a condition by polling it.
pub fn wait_until(mut condition: impl FnMut() -> bool, what: impl Fn() -> String) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "waited in vain for {}", what());
        std::thread::yield_now();
    }
}

pub fn wait_readable(socket: &impl AsFd, end: Instant) {
    let left = end.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).unwrap();
    let ready = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&left));
    assert!(
        ready.is_ok_and(|count| count > 0),
        "waited in vain for a message"
    );
}

/// Limits the open files of a process, 0 for the caller. Safe between fork and exec.
///
/// # Errors
/// The caller lacks the permission.
pub fn limit_descriptors(process: u32, soft: u64, hard: u64) -> std::io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: soft,
        rlim_max: hard,
    };
    let process = process.cast_signed();
    let resource = libc::RLIMIT_NOFILE;
    // SAFETY: a local structure that the kernel reads.
    match unsafe { libc::prlimit(process, resource, &raw const limit, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
