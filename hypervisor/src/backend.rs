//! Starts a backend, or attaches to an existing one, and communicates with it on a tenant stream.

pub mod again;
mod frames;
mod lines;

use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::{FdFlags, fcntl_setfd};
use wormhole_link::arguments::USAGE;
use wormhole_link::report::{SessionReport, SessionReports};
use wormhole_link::{chain, tasks};
use wormhole_lock::Mutex;
use wormhole_monitor::devices::vsock::{Accepted, Holders, MAX_CONNECTIONS, Opener, Opening};
use wormhole_monitor::stats::{Stats, StatsError, VmStats};
use wormhole_monitor::{MemoryError, Refused, StopHandle, Window, sealed_file};
use wormhole_ring::control::{Attach, ControlError, Exits, Message, Stream, WindowRun};
use wormhole_ring::layout::SEGMENT_BYTES;

use self::again::{AGAIN, Again, Pause, Shown};
pub use self::frames::{receive, send};
use self::lines::Lines;
use crate::backend_vm::{START_LIMIT, read_boot_id};
use crate::backends::Chosen;
use crate::confinement;
use crate::file_memory::FileMemory;
use crate::installation::{Installation, InstallationError};
use crate::signals::{PASSED, Set};

/// Reason why there is no backend, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error(transparent)]
    Installation(#[from] InstallationError),
    #[error("cannot make a window of {size} bytes{}", file_size_limit(source))]
    Window {
        size: u64,
        #[source]
        source: std::io::Error,
    },
    #[error("a thread for the supervisor's messages cannot be made")]
    Thread(#[source] std::io::Error),
    #[error("cannot start the supervisor")]
    Start(#[source] std::io::Error),
    #[error("{0}")]
    Refused(String),
    #[error(
        "the supervisor closed the connection before it answered; its log lines above may name the cause"
    )]
    Ended,
    #[error("it has not reported the end of its sessions within {} s", REPORT_LIMIT.as_secs())]
    NoReport,
    #[error("it closed the connection before it answered; its log may name the cause")]
    Closed,
    #[error("the supervisor ended and printed the reason")]
    Said,
    #[error("the supervisor has not answered within {} s", ANSWER_LIMIT.as_secs())]
    Silent,
    #[error("it has not answered within {} s", .0.as_secs())]
    NoUsage(Duration),
    #[error("the supervisor's stream broke")]
    Stream(#[source] std::io::Error),
    #[error("the supervisor sent a malformed control message")]
    Control(#[from] ControlError),
    #[error("the supervisor sent {0} where none is expected")]
    Unexpected(&'static str),
    #[error("the supervisor granted memory without its file")]
    NoFile,
    #[error("the supervisor gives a guest process no control stream: {0}")]
    NoStream(String),
    #[error("the granted memory cannot be mapped into the guest")]
    Show(#[from] MemoryError),
    #[error("the supervisor's report cannot be read")]
    Report(#[from] serde_json::Error),
    #[error("the supervisor failed ({0})")]
    Failed(ExitStatus),
    #[error("the figures of the backend VM cannot be read")]
    Figures(#[from] StatsError),
    #[error("the supervisor ended before the program")]
    Early,
    #[error("the supervisor cannot be waited for")]
    Wait(#[source] std::io::Error),
}

/// Outcome of a backend.
#[derive(Debug, Default)]
pub struct Served {
    /// Reports of the tenant's sessions.
    pub sessions: SessionReports,
    /// The error that ended the backend before its tenant.
    pub failure: Option<BackendError>,
}

/// Names the resource limit, if a window's size exceeds it.
fn file_size_limit(error: &std::io::Error) -> &'static str {
    if error.kind() == std::io::ErrorKind::FileTooLarge {
        ", which is more than the size limit of files allows (ulimit -f)"
    } else {
        ""
    }
}

/// Name of a window's file, as `/proc` shows it.
pub const WINDOW: &str = "wormhole-window";

/// Largest number of sessions that a tenant may have at the same time: each has a worker process on
/// the host.
const SESSION_LIMIT: u32 = 64;

/// Longer than a supervisor takes to start a device, or to give that up, in a VM that may have to boot before.
const ANSWER_LIMIT: Duration = START_LIMIT.saturating_add(Duration::from_secs(90));

/// Time within which a supervisor that serves others as well reports the end of a tenant's sessions.
/// A driver destroys a context within seconds.
const REPORT_LIMIT: Duration = Duration::from_secs(20);

/// A tenant of a supervisor.
#[derive(Debug)]
pub struct Backend {
    /// None for a supervisor that was there before.
    supervisor: Option<Child>,
    tenancy: Arc<Mutex<Tenancy>>,
    attach: Attach,
    port: Port,
    /// Attaches the guest to the next backend of this name.
    again: Option<Again>,
    /// Passes new control streams from the listener to the port. None once the listener has it.
    opened: Option<Sender<Opened>>,
    window: File,
    /// Memory of the guest's shared files. None once the listener has it.
    file_memory: Option<FileMemory>,
    listener: Option<JoinHandle<Served>>,
    /// Closed by the end of the listener.
    listens: Option<Receiver<()>>,
    /// Figures of the VM in which the backend runs, if it has one of its own.
    figures: Option<Arc<Stats>>,
    /// Identity of the boot of a VM that was there before.
    boot_id: Option<String>,
    /// Statistics of the guest's VM. The supervisor may ask for its exits.
    guest: Option<VmStats>,
}

/// The stream of the tenant, which changes when it is attached to another backend.
#[derive(Debug)]
struct Tenancy {
    stream: UnixStream,
    /// Whether the guest ends, so that its tenant is not attached again.
    is_ending: bool,
    /// Stream of the process that connects again.
    helper: Option<UnixStream>,
}

impl Tenancy {
    /// Ends the tenant, in one direction or in both.
    fn end(&mut self, direction: Shutdown) {
        self.is_ending = true;
        if let Some(helper) = self.helper.take() {
            drop(helper.shutdown(Shutdown::Both));
        }
        self.shut_down(direction);
    }

    fn shut_down(&self, direction: Shutdown) {
        // Fails only if the supervisor is gone.
        drop(self.stream.shutdown(direction));
    }
}

/// The guest's end of a new control stream, or the supervisor's reason for a refusal.
type Opened = Result<UnixStream, String>;

impl Backend {
    /// Starts a supervisor for `device` and attaches a fresh window of `window_size` bytes.
    pub fn start(
        installation: &Installation,
        device: &str,
        window_size: u64,
    ) -> Result<Self, BackendError> {
        let (supervisor, stream) = start_supervisor(installation, device)?;
        let attach = Attach {
            window_size,
            ..Attach::default()
        };
        Self::open(Some(supervisor), stream, attach)
    }

    /// Attaches a fresh window of `window_size` bytes to a supervisor that listens, on a connection
    /// to it.
    pub fn attach_to(stream: UnixStream, window_size: u64) -> Result<Self, BackendError> {
        let attach = Attach {
            window_size,
            ..Attach::default()
        };
        Self::open(None, stream, attach)
    }

    /// Attaches a fresh static window, which holds the memory of all sessions.
    pub fn attach_static(stream: UnixStream, window_size: u64) -> Result<Self, BackendError> {
        let attach = Attach {
            window_size,
            static_window: 1,
            ..Attach::default()
        };
        Self::open(None, stream, attach)
    }

    /// Starts a VM with a supervisor for `device`, and attaches a fresh static window, which the VM has as a device.
    pub fn start_in_vm(
        installation: &Installation,
        device: &str,
        window_size: u64,
    ) -> Result<Self, BackendError> {
        let mut command = Command::new(installation.command());
        command.args(["backend-vm", "--device", device]);
        let (stream, theirs) = UnixStream::pair().map_err(BackendError::Start)?;
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::piped());
        let process = spawn(command)?;
        let attach = Attach {
            window_size,
            static_window: 1,
            ..Attach::default()
        };
        Self::open(Some(process), stream, attach)
    }

    fn open(
        supervisor: Option<Child>,
        stream: UnixStream,
        attach: Attach,
    ) -> Result<Self, BackendError> {
        let attach = Attach {
            session_limit: SESSION_LIMIT,
            ..attach
        };
        let window = window(attach.window_size)?;
        let sending = stream.try_clone().map_err(BackendError::Stream)?;
        let (opened, streams) = channel();
        let mut backend = Self {
            supervisor,
            tenancy: Arc::new(Mutex::new(Tenancy {
                stream,
                is_ending: false,
                helper: None,
            })),
            attach,
            again: None,
            port: Port {
                sending: Arc::new(Mutex::new(sending)),
                streams: Arc::new(Mutex::new(streams)),
                is_awaited: Arc::default(),
            },
            opened: Some(opened),
            window,
            file_memory: None,
            listener: None,
            listens: None,
            figures: None,
            boot_id: None,
            guest: None,
        };
        let attached = handshake(&backend.tenancy.lock().stream, attach, &backend.window);
        let figures = attached.and_then(|file| Ok(file.map(Stats::of_file).transpose()?));
        match figures {
            Ok(figures) => {
                backend.figures = figures.map(Arc::new);
                Ok(backend)
            }
            Err(error) => Err(backend.why(error)),
        }
    }

    /// Returns the cause of an error in attaching: the supervisor's own exit, if the stream ended
    /// or broke.
    fn why(mut self, error: BackendError) -> BackendError {
        if !matches!(error, BackendError::Ended | BackendError::Stream(_)) {
            return error;
        }
        let Some(supervisor) = &mut self.supervisor else {
            return BackendError::Closed;
        };
        self.tenancy.lock().shut_down(Shutdown::Both);
        match supervisor.wait() {
            Ok(status) if status.code() == Some(USAGE.into()) => BackendError::Said,
            Ok(status) if !status.success() => BackendError::Failed(status),
            _ => error,
        }
    }

    /// Returns the tenant's window.
    pub fn window(&self) -> &File {
        &self.window
    }

    /// Returns whether the guest has the window mapped as it is, from its start to its end.
    pub fn is_static(&self) -> bool {
        self.attach.static_window != 0
    }

    /// Gives the supervisor the memory of the guest's shared files, and each next one that gets the tenant. The window is not
    /// static.
    ///
    /// # Errors
    /// The supervisor is gone.
    pub fn give_file_memory(&mut self, memory: FileMemory) -> Result<(), BackendError> {
        memory.give(&self.port.sending.lock())?;
        self.file_memory = Some(memory);
        Ok(())
    }

    /// Takes the identity of the boot of a VM that was there before.
    pub fn of_boot(mut self, boot_id: Option<String>) -> Self {
        self.boot_id = boot_id;
        self
    }

    /// Returns the figures of the VM in which the backend runs, if it has one with one processor, and the identity of its boot.
    pub fn vm(&mut self) -> Option<(Arc<Stats>, String)> {
        let figures = self.figures.clone()?;
        let boot_id = match self.boot_id.take() {
            Some(boot_id) => boot_id,
            None => read_boot_id(self.supervisor.as_mut()?.stdout.take()?, START_LIMIT),
        };
        Some((figures, boot_id))
    }

    /// Returns the port that opens control streams of guest processes.
    pub fn port(&self) -> Port {
        self.port.clone()
    }

    /// Starts the thread that opens control streams for the processes of a VM's guest.
    ///
    /// # Errors
    /// No thread can be made.
    pub fn streams(&self) -> Result<Streams, BackendError> {
        let holders = self.again.as_ref().map(|again| again.holders.clone());
        self.port().streams(holders)
    }

    /// Makes [`listen`](Self::listen) tell the supervisor how many exits the guest's vCPUs had, whenever it asks.
    pub fn tell_exits(&mut self, guest: VmStats) {
        self.guest = Some(guest);
    }

    /// Makes [`listen`](Self::listen) attach the tenant again, to the next backend of this name, when its backend has ended.
    ///
    /// # Errors
    /// The process that connects cannot be started.
    pub fn stay(
        &mut self,
        installation: &Installation,
        backend: &Chosen,
    ) -> Result<(), BackendError> {
        let mut tenancy = self.tenancy.lock();
        let again = Again::start(installation, backend, self.attach, &tenancy.stream)?;
        tenancy.helper = Some(again.helper().map_err(BackendError::Start)?);
        // They would keep what the kernel has of the first backend's VM.
        self.figures = None;
        self.again = Some(again);
        Ok(())
    }

    /// Starts the thread that reads the supervisor's messages and maps granted runs into the
    /// guest's window; guests that are processes of this system have no such window. If a run
    /// cannot be mapped or unmapped, the guest is stopped at once, because its window's contents
    /// are uncertain.
    pub fn listen(&mut self, guest: Option<(Window, StopHandle)>) -> Result<(), BackendError> {
        let stream = self.tenancy.lock().stream.try_clone();
        let stream = stream.map_err(BackendError::Stream)?;
        let file = self.window.try_clone().map_err(BackendError::Stream)?;
        let tenant = Tenant {
            tenancy: Arc::clone(&self.tenancy),
            port: self.port.clone(),
            opened: self.opened.take(),
            window: guest,
            is_static: self.is_static(),
            file,
            file_memory: self.file_memory.take(),
            stats: self.guest.take(),
            again: self.again.take(),
        };
        let (listening, listens) = channel();
        self.listens = Some(listens);
        let listener = tasks::spawn("listener", move || {
            let _listening: Sender<()> = listening;
            tenant.listen(stream)
        });
        self.listener = Some(listener.map_err(BackendError::Thread)?);
        Ok(())
    }

    /// Returns whether the supervisor has ended the tenant.
    pub fn is_over(&self) -> bool {
        self.listener.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// Ends the tenant. Returns the reports of its sessions, and the backend's failure if there was
    /// one.
    pub fn finish(mut self) -> Served {
        // The supervisor closes its direction after this side has closed its own.
        let early = self.is_over();
        // If the supervisor is gone, its exit status shows that.
        self.tenancy.lock().end(Shutdown::Write);
        // A supervisor of this run alone is its own concern. Another one may be held up by its other
        // tenants, which must not hold up this run.
        let waited = match (&self.supervisor, &self.listens) {
            (None, Some(listens)) => listens.recv_timeout(REPORT_LIMIT),
            _ => Err(RecvTimeoutError::Disconnected),
        };
        let is_silent = waited == Err(RecvTimeoutError::Timeout);
        if is_silent {
            self.tenancy.lock().shut_down(Shutdown::Both);
        }
        let mut served = match self.listener.take().map(JoinHandle::join) {
            Some(Ok(served)) => served,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Served::default(),
        };
        let ended = match self.supervisor.as_mut().map(Child::wait) {
            Some(Ok(status)) if !status.success() => Some(BackendError::Failed(status)),
            Some(Ok(_)) | None => early.then_some(BackendError::Early),
            Some(Err(error)) => Some(BackendError::Wait(error)),
        };
        let silent = is_silent.then_some(BackendError::NoReport);
        served.failure = served.failure.or(silent).or(ended);
        served
    }
}

/// Starts a supervisor for `device` and one tenant. Returns it and the tenant's stream.
pub fn start_supervisor(
    installation: &Installation,
    device: &str,
) -> Result<(Child, UnixStream), BackendError> {
    let (stream, theirs) = UnixStream::pair().map_err(BackendError::Start)?;
    let mut command = Command::new(installation.supervisor()?);
    command
        .args([
            "--fd",
            &theirs.as_raw_fd().to_string(),
            "--device",
            device,
            "--workers",
        ])
        .arg(installation.folder())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    // No other process is started while this descriptor can be inherited.
    fcntl_setfd(&theirs, FdFlags::empty()).map_err(|error| BackendError::Start(error.into()))?;
    Ok((spawn(command)?, stream))
}

/// Starts a process of the backend. It gets a process group of its own, so that signals from the terminal do not
/// reach it: they are for the program, which needs its backend until it ends.
fn spawn(mut command: Command) -> Result<Child, BackendError> {
    Set::of(&PASSED).unblock_in(&mut command);
    let process = command.process_group(0).spawn();
    process.map_err(|error| BackendError::Start(tasks::named(error)))
}

/// The listener's part of a tenant.
struct Tenant {
    tenancy: Arc<Mutex<Tenancy>>,
    port: Port,
    opened: Option<Sender<Opened>>,
    /// Window of a guest VM.
    window: Option<(Window, StopHandle)>,
    is_static: bool,
    file: File,
    file_memory: Option<FileMemory>,
    stats: Option<VmStats>,
    again: Option<Again>,
}

impl Tenant {
    /// Handles messages until the tenant has ended. Attaches it to the next backend if it stays.
    fn listen(self, mut stream: UnixStream) -> Served {
        let mut served = Served::default();
        let mut pause = Pause::FIRST;
        let mut lines = Lines::new(Instant::now());
        loop {
            let start = Instant::now();
            let mut shown = Shown::default();
            let ended = self.handle(&stream, &mut served.sessions, &mut shown);
            if let (Err(BackendError::Show(_)), Some((_, stop))) = (&ended, &self.window) {
                stop.stop();
            }
            let is_over = self.again.is_none() || matches!(ended, Err(BackendError::Show(_)));
            if ended.is_err() && !is_over {
                Self::discard(&stream);
            }
            if ended.is_err() || !is_over {
                // Without the launcher no run can be granted, so the supervisor must end the
                // sessions. A request that is underway finds its stream closed.
                drop(stream.shutdown(Shutdown::Both));
            }
            served.failure = ended.err();
            if is_over {
                return served;
            }
            self.answer(Err("the backend has ended".to_owned()));
            pause = pause.after(start.elapsed());
            let wait = pause.time().max(shown.workers_live());
            match self.next(wait, &mut lines) {
                Some(next) => {
                    served.failure = None;
                    stream = next;
                }
                None => return served,
            }
        }
    }

    /// Ends this direction and reads until the backend has ended its own: until then workers may use the window. The end of
    /// the guest ends it as well.
    fn discard(mut stream: &UnixStream) {
        drop(stream.shutdown(Shutdown::Write));
        // An error is an end.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    }

    fn is_ending(&self) -> bool {
        self.tenancy.lock().is_ending
    }

    /// Waits for the next backend, at least so long. Returns the new stream of the tenant; none if the guest ends.
    fn next(&self, wait: Duration, lines: &mut Lines) -> Option<UnixStream> {
        let (again, (window, stop)) = (self.again.as_ref()?, self.window.as_ref()?);
        if self.is_ending() {
            return None;
        }
        let ended = "the guest's backend has ended: its programs get errors until one of this name is there";
        lines.say(ended.to_owned());
        let first = Instant::now() + wait;
        let mut is_cleared = false;
        let mut say_why =
            |reason: &str| lines.say(format!("the guest has no backend yet: {reason}"));
        loop {
            std::thread::sleep(AGAIN);
            if self.is_ending() {
                return None;
            }
            if Instant::now() < first {
                continue;
            }
            if !again.is_due() {
                say_why("programs of the guest still have connections to the last one");
                continue;
            }
            // No session begins before the window is attached.
            if !is_cleared {
                if let Err(error) = window.clear() {
                    say_why(&chain(&error));
                    stop.stop();
                    return None;
                }
                is_cleared = true;
            }
            let next = match again.attach(&self.file) {
                Ok(next) => next,
                Err(error @ (BackendError::Ended | BackendError::Stream(_))) => {
                    let why = chain(&error);
                    say_why(&format!("the process that connects has ended: {why}"));
                    return None;
                }
                Err(error) => {
                    say_why(&chain(&error));
                    continue;
                }
            };
            // Before any process asks for a session.
            let given = self.file_memory.as_ref();
            if let Some(Err(error)) = given.map(|memory| memory.give(&next)) {
                say_why(&chain(&error));
                drop(next.shutdown(Shutdown::Both));
                continue;
            }
            let ours = || Ok::<_, std::io::Error>((next.try_clone()?, next.try_clone()?));
            // Without a descriptor the next attempt follows.
            let Ok((stream, sending)) = ours() else {
                drop(next.shutdown(Shutdown::Both));
                continue;
            };
            let mut tenancy = self.tenancy.lock();
            if tenancy.is_ending {
                return None;
            }
            tenancy.stream = stream;
            *self.port.sending.lock() = sending;
            lines.say("the guest has a backend again".to_owned());
            return Some(next);
        }
    }

    /// Answers the request for a control stream. Returns whether there is one.
    fn answer(&self, stream: Opened) -> bool {
        let is_awaited = self.port.is_awaited.swap(false, Ordering::AcqRel);
        if let (true, Some(opened)) = (is_awaited, &self.opened) {
            // Without a receiver no request waits any more.
            let _ = opened.send(stream);
        }
        is_awaited
    }

    /// Handles messages until the supervisor has sent all reports and closed its direction.
    fn handle(
        &self,
        stream: &UnixStream,
        sessions: &mut SessionReports,
        shown: &mut Shown,
    ) -> Result<(), BackendError> {
        let window = self.window.as_ref().map(|(window, _)| window);
        let window = window.filter(|_| !self.is_static);
        let stats = self.stats.as_ref();
        let mut body = Vec::new();
        let answer = |what: &'static str, stream: Opened| match self.answer(stream) {
            true => Ok(()),
            false => Err(BackendError::Unexpected(what)),
        };
        while let Some((message, file)) = receive(stream, &mut body)? {
            match (message, window) {
                (Message::Stream(_), _) => {
                    let no_file = || "this process has no free descriptor".to_owned();
                    let stream = file.map(|file| OwnedFd::from(file).into());
                    answer(message.name(), stream.ok_or_else(no_file))?;
                }
                (Message::Refused { reason, .. }, _) => {
                    answer(message.name(), Err(reason.to_owned()))?;
                }
                (Message::SessionReport(json), _) => {
                    sessions.push(serde_json::from_str::<SessionReport>(json)?);
                }
                (Message::WindowMap(run), Some(window)) => {
                    let file = file.ok_or(BackendError::NoFile)?;
                    let (start, bytes) = range(run);
                    shown.map(run);
                    window.show(&file.into(), start, bytes)?;
                    self.port.answer(&Message::WindowMapped(run))?;
                }
                (Message::AskExits, _) => {
                    let exits = stats.and_then(exits_of);
                    self.port.answer(&Message::Exits(Exits {
                        is_known: exits.is_some().into(),
                        count: exits.unwrap_or_default(),
                    }))?;
                }
                (Message::WindowUnmap(run), Some(window)) => {
                    let (start, bytes) = range(run);
                    window.hide(start, bytes)?;
                    shown.unmap(run);
                }
                (other, _) => return Err(BackendError::Unexpected(other.name())),
            }
        }
        Ok(())
    }
}

/// Attaches a window on a connection to a supervisor. Returns the figures of its VM, if it has one.
///
/// # Errors
/// The supervisor refuses the window, or does not answer.
fn handshake(
    stream: &UnixStream,
    attach: Attach,
    window: &File,
) -> Result<Option<File>, BackendError> {
    let limit = |time| {
        let set = stream.set_read_timeout(time);
        set.map_err(BackendError::Stream)
    };
    limit(Some(ANSWER_LIMIT))?;
    let sent = send(stream, &Message::Attach(attach), &[window.as_raw_fd()]);
    let mut body = Vec::new();
    // A supervisor that serves no further tenant may have answered and closed the connection.
    match (receive(stream, &mut body), sent) {
        (Ok(Some((Message::Attached, figures))), Ok(())) => {
            limit(None)?;
            Ok(figures)
        }
        (Ok(Some((Message::Refused { reason, .. }, _))), _) => {
            Err(BackendError::Refused(reason.to_owned()))
        }
        (Ok(Some((other, _))), _) => Err(BackendError::Unexpected(other.name())),
        (Err(BackendError::Stream(error)), _) if error.kind() == std::io::ErrorKind::WouldBlock => {
            Err(BackendError::Silent)
        }
        (_, Err(error)) | (Err(error), _) => Err(error),
        (Ok(None), Ok(())) => Err(BackendError::Ended),
    }
}

/// Returns the number of exits of a VM's vCPUs; none if it cannot be read.
fn exits_of(stats: &VmStats) -> Option<u64> {
    stats.vcpus().iter().map(Stats::exits).sum()
}

/// Returns the offset and the size of a run in bytes.
fn range(run: WindowRun) -> (u64, u64) {
    let segment = SEGMENT_BYTES as u64;
    (
        u64::from(run.first) * segment,
        u64::from(run.count) * segment,
    )
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.tenancy.lock().end(Shutdown::Both);
        // The end of its only tenant's stream ends a supervisor that was started for it.
        drop(self.supervisor.as_mut().map(Child::wait));
    }
}

/// Sending direction of the tenant stream, shared by all senders.
#[derive(Clone, Debug)]
pub struct Port {
    sending: Arc<Mutex<UnixStream>>,
    /// Answers to requests for control streams. Locked from a request to its answer.
    streams: Arc<Mutex<Receiver<Opened>>>,
    /// Whether a request waits for its answer. An answer without a request ends the backend: it would be kept for ever.
    is_awaited: Arc<AtomicBool>,
}

/// Opens control streams for the processes of a VM's guest. The guest's device does not wait for the supervisor's answers.
#[derive(Debug)]
pub struct Streams {
    openers: SyncSender<Opener>,
    holders: Option<Holders>,
}

impl Streams {
    /// Returns the guest's end of a control stream, once the supervisor has answered.
    ///
    /// # Errors
    /// Too many streams wait for an answer, or no descriptor is left.
    pub fn open(&self) -> Result<Accepted, Refused> {
        let opening = self.opening()?;
        Ok(match &self.holders {
            Some(holders) => opening.held(holders.add()).into(),
            None => opening.into(),
        })
    }

    /// As [`Self::open`], for a stream that is not counted.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn opening(&self) -> Result<Opening, Refused> {
        let (opening, opener) = Opening::new().map_err(|_| Refused)?;
        self.openers.try_send(opener).map_err(|_| Refused)?;
        Ok(opening)
    }
}

impl Port {
    /// Starts the thread that waits for the supervisor's answers.
    fn streams(self, holders: Option<Holders>) -> Result<Streams, BackendError> {
        let (sender, openers) = sync_channel::<Opener>(MAX_CONNECTIONS);
        let open = move || {
            for opener in openers {
                if let Ok(stream) = self.open(false) {
                    opener.open(stream);
                }
            }
        };
        confinement::spawn("streams", open).map_err(BackendError::Thread)?;
        Ok(Streams {
            openers: sender,
            holders,
        })
    }

    /// Opens a control stream for a guest process, and returns the guest's end. Waits for the
    /// supervisor's answer. `local`: the process runs on this system, and the supervisor sends it
    /// the session's file itself.
    pub fn open(&self, local: bool) -> Result<UnixStream, BackendError> {
        let stream = Stream {
            local: local.into(),
        };
        let streams = self.streams.lock();
        // An earlier request that could not be sent may have been refused as well.
        while streams.try_recv().is_ok() {}
        self.is_awaited.store(true, Ordering::Release);
        if let Err(error) = self.send(&Message::Stream(stream), &[]) {
            self.is_awaited.store(false, Ordering::Release);
            return Err(error);
        }
        let opened = streams.recv().map_err(|_| BackendError::Ended)?;
        opened.map_err(BackendError::NoStream)
    }

    /// Sends an answer to the supervisor. Once this side's direction is closed, the answer is not needed.
    fn answer(&self, message: &Message<'_>) -> Result<(), BackendError> {
        match self.send(message, &[]) {
            Err(BackendError::Stream(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                Ok(())
            }
            sent => sent,
        }
    }

    fn send(&self, message: &Message<'_>, descriptors: &[RawFd]) -> Result<(), BackendError> {
        send(&self.sending.lock(), message, descriptors)
    }
}

/// Creates a window.
fn window(size: u64) -> Result<File, BackendError> {
    let file = sealed_file(WINDOW, size);
    file.map(File::from)
        .map_err(|source| BackendError::Window { size, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_without_a_request_end_the_backend() {
        let (ours, theirs) = UnixStream::pair().expect("streams");
        let sending = ours.try_clone().expect("a stream");
        let (opened, streams) = channel();
        let port = Port {
            sending: Arc::new(Mutex::new(sending)),
            streams: Arc::new(Mutex::new(streams)),
            is_awaited: Arc::default(),
        };
        let refusal = Message::Refused {
            code: 0,
            reason: "no",
        };
        let tenant = Tenant {
            tenancy: Arc::new(Mutex::new(Tenancy {
                stream: ours.try_clone().expect("a stream"),
                is_ending: false,
                helper: None,
            })),
            port: port.clone(),
            opened: Some(opened),
            window: None,
            is_static: false,
            file: tempfile::tempfile().expect("a file"),
            file_memory: None,
            stats: None,
            again: None,
        };
        let listener = std::thread::spawn(move || {
            tenant.handle(&ours, &mut SessionReports::default(), &mut Shown::default())
        });
        let asking = std::thread::spawn(move || port.open(false));
        let mut body = Vec::new();
        let request = receive(&theirs, &mut body).expect("a request");
        assert!(matches!(request, Some((Message::Stream(_), _))));
        send(&theirs, &refusal, &[]).expect("an answer");
        let refused = asking.join().expect("a thread").expect_err("refused");
        assert!(matches!(refused, BackendError::NoStream(reason) if reason == "no"));
        send(&theirs, &refusal, &[]).expect("an answer to nothing");
        let ended = listener.join().expect("a thread").expect_err("the end");
        assert!(matches!(ended, BackendError::Unexpected(_)), "{ended}");
    }
}
