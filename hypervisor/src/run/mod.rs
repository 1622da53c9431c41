//! `wormhole run`: runs one program with a tenant of its own.

mod confinement;
mod emulated;
mod files;
mod guest;
mod network;
mod process;
pub mod reaper;
pub mod record;
mod resources;
mod summary;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use rustix::fs::{Access, access};
use wormhole_images::{ImageError, NotExecuted};
use wormhole_link::tasks;
use wormhole_monitor::{DiskAccess, DiskError, DiskImage, KvmCaps, MAX_DISKS, MAX_VCPUS};
use wormhole_ring::layout::{SEGMENT_BYTES, WINDOW_MAX_BYTES};

use self::guest::GuestError;
use self::network::{NetworkError, NetworkOption};
use self::record::Record;
use self::resources::{Processors, ResourcesError};
use crate::backend::{Backend, BackendError};
use crate::backends::{BackendsError, Chosen};
use crate::config::ConfigOption;
use crate::device::DeviceOption;
use crate::installation::{Installation, InstallationError};
use crate::say;
use crate::signals::Signals;

/// Placement of the backend relative to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Placement {
    /// Program and backend are processes of this system.
    Process,
    /// The program runs in a guest VM, the backend is a process of this system.
    Host,
}

/// Host on which a guest VM runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Host {
    /// This machine's KVM where it can run Linux, the emulated host otherwise.
    Auto,
    Kvm,
    /// A machine with virtualization, emulated by QEMU.
    Emulated,
}

/// Kernel of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kernel {
    #[value(name = "6.1")]
    V6_1,
    #[value(name = "6.12")]
    V6_12,
}

/// Environment variable of a program: name and value.
type Variable = (OsString, OsString);

/// Number of bytes, written with a unit, such as `512M` or `1G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl From<Kernel> for wormhole_images::Kernel {
    fn from(kernel: Kernel) -> Self {
        match kernel {
            Kernel::V6_1 => Self::V6_1,
            Kernel::V6_12 => Self::V6_12,
        }
    }
}

impl std::fmt::Display for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        wormhole_images::Kernel::from(*self).fmt(f)
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Every size is a multiple of K, because a size needs a unit.
        let units = [(40, 'T'), (30, 'G'), (20, 'M')];
        let exact = units
            .into_iter()
            .find(|(shift, _)| self.0.trailing_zeros() >= *shift);
        let (shift, unit) = exact.unwrap_or((10, 'K'));
        write!(f, "{}{unit}", self.0 >> shift)
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, unit) = match text.char_indices().last() {
            Some((at, 'K' | 'k')) => (&text[..at], 1 << 10),
            Some((at, 'M' | 'm')) => (&text[..at], 1 << 20),
            Some((at, 'G' | 'g')) => (&text[..at], 1 << 30),
            Some((at, 'T' | 't')) => (&text[..at], 1 << 40),
            _ => ("", 1),
        };
        digits
            .parse::<u64>()
            .ok()
            .and_then(|count| count.checked_mul(unit))
            .filter(|&bytes| bytes > 0)
            .map(Self)
            .ok_or_else(|| {
                "write a size with its unit (K, M, G or T), such as 512M or 1G".to_owned()
            })
    }
}

/// A disk as given by `--disk`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Disk {
    path: PathBuf,
    access: DiskAccess,
}

impl Disk {
    fn parse(text: OsString) -> Result<Self, &'static str> {
        let (path, access) = match text.as_bytes().strip_suffix(b":ro") {
            Some(path) => (PathBuf::from(OsStr::from_bytes(path)), DiskAccess::ReadOnly),
            None => (text.into(), DiskAccess::ReadWrite),
        };
        match path.as_os_str().is_empty() {
            true => Err("a disk needs a file"),
            false => Ok(Self { path, access }),
        }
    }
}

#[derive(Debug, Args)]
pub struct Options {
    /// Where the backend runs.
    #[arg(long, value_enum, default_value = "host")]
    placement: Placement,
    #[command(flatten)]
    device: DeviceOption,
    /// A backend that is there already, which serves the program beside others: the name that `backend start` gave it,
    /// or the path of its socket. Without this option the run has a backend of its own.
    #[arg(long, value_name = "NAME|unix:PATH", conflicts_with = "device")]
    backend: Option<Chosen>,
    /// Host of the guest VM; this machine's KVM where it can run Linux (auto) if not given.
    #[arg(long, value_enum)]
    host: Option<Host>,
    /// The guest's kernel; 6.1 if not given.
    #[arg(long, value_enum)]
    kernel: Option<Kernel>,
    /// Size of the window: shared memory between guest and backend. 64 processes, the limit of a guest, can compute and
    /// copy in the default: one segment of 2 MiB for the bootstrap and two for each process.
    #[arg(long, default_value = "258M")]
    window: Size,
    /// Memory of the guest; 512M if not given.
    #[arg(long)]
    memory: Option<Size>,
    /// Processors of the guest; 1 if not given.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=i64::from(MAX_VCPUS)))]
    cpus: Option<u8>,
    /// Processors of this machine, one for each of the guest's, which then stays on it.
    #[arg(long, value_name = "CPU[,CPU...]")]
    pin: Option<Processors>,
    /// The pinned processors are the guest's alone: it does not leave them when it waits or halts.
    #[arg(long, requires = "pin")]
    dedicated: bool,
    /// Allocate the guest's memory before it starts, and its parts of the window when they are granted.
    #[arg(long)]
    prefault: bool,
    /// A variable of the program's environment; `NAME` alone has the value that it has here.
    #[arg(short, long, value_name = "NAME[=VALUE]", value_parser = OsStringValueParser::new().try_map(variable))]
    env: Vec<Variable>,
    /// Connect standard input to the program in the guest, which reads an empty one otherwise.
    #[arg(short, long)]
    interactive: bool,
    /// The guest sees the files below this folder as its own, `/` for all of this machine's. Its changes stay in its
    /// memory.
    #[arg(long, value_name = "FOLDER")]
    rootfs: Option<PathBuf>,
    /// Working directory of the program in a guest with --rootfs; this one for `--rootfs /`, else `/`.
    #[arg(short, long, value_name = "FOLDER", requires = "rootfs")]
    workdir: Option<PathBuf>,
    /// Name under which the program is executed.
    #[arg(long, hide = true, requires = "rootfs")]
    argv0: Option<OsString>,
    /// One more file or folder that the guest shall have, at its own path; libraries come along.
    #[arg(long)]
    take: Vec<PathBuf>,
    /// A raw image file, or a block device, as a disk of the guest (`/dev/vda`, then `/dev/vdb` and so on). With `:ro`
    /// behind it the guest can only read it, and several guests can have it at once.
    #[arg(long, value_name = "FILE[:ro]", value_parser = OsStringValueParser::new().try_map(Disk::parse))]
    disk: Vec<Disk>,
    /// A network of the guest (`eth0`, then `eth1` and so on): a tap interface of this machine, and the guest's IPv4
    /// address; with a default route through the gateway, and a name server, where they are given.
    #[arg(
        long,
        value_name = "tap=NAME,address=IP/PREFIX[,gateway=IP][,dns=IP][,mac=MAC]"
    )]
    network: Vec<NetworkOption>,
    /// Seconds after which the guest counts as hung; 600 if not given.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: Option<u64>,
    /// Seconds between a signal that asks the program to end (SIGHUP, SIGINT, SIGQUIT, SIGTERM) and its kill. A second
    /// such signal kills it at once.
    #[arg(long, default_value_t = 60)]
    grace: u64,
    /// Print no summary.
    #[arg(long)]
    quiet: bool,
    /// Write the summary as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    #[command(flatten)]
    config: ConfigOption,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

impl Options {
    fn kernel(&self) -> Kernel {
        self.kernel.unwrap_or(Kernel::V6_1)
    }

    fn memory(&self) -> Size {
        self.memory.unwrap_or(Size(512 << 20))
    }

    fn cpus(&self) -> u8 {
        self.cpus.unwrap_or(1)
    }

    fn timeout(&self) -> u64 {
        self.timeout.unwrap_or(600)
    }

    /// Opens the program's backend, with a fresh window.
    fn open_backend(&self, installation: &Installation) -> Result<Backend, RunError> {
        let window = self.window.0;
        let opened = match &self.backend {
            None => Backend::start(installation, &self.device.device, window),
            Some(chosen) => Backend::attach_to(chosen.connect()?, window),
        };
        Ok(opened?)
    }

    /// Opens and locks the disks.
    fn disks(&self) -> Result<Vec<DiskImage>, DiskError> {
        let open = |disk: &Disk| DiskImage::open(&disk.path, disk.access);
        self.disk.iter().map(open).collect()
    }

    /// Returns the arguments of a program in a guest, from its name on: the caller's, or the path of a program that is
    /// copied.
    fn arguments(&self, program: &Path) -> Vec<OsString> {
        let name = match (&self.argv0, &self.rootfs) {
            (Some(name), _) => name.clone(),
            (None, Some(_)) => self.command[0].clone(),
            (None, None) => program.into(),
        };
        std::iter::once(name)
            .chain(self.command[1..].iter().cloned())
            .collect()
    }

    /// Returns the working directory of a program in a guest.
    fn directory(&self) -> Result<PathBuf, RunError> {
        match (&self.workdir, self.rootfs.as_deref()) {
            (Some(folder), _) => Ok(folder.clone()),
            (None, Some(root)) if root == Path::new("/") => {
                std::env::current_dir().map_err(|source| RunError::Io {
                    what: "cannot tell the working directory".to_owned(),
                    source,
                })
            }
            _ => Ok("/".into()),
        }
    }

    /// Returns the variables of a program in a guest: those given, and the caller's that it needs.
    fn variables(&self) -> Vec<Variable> {
        let mut variables = forwarded_variables();
        if self.rootfs.as_deref() == Some(Path::new("/")) {
            let mine = SAME_FILES.iter().filter_map(|name| {
                let value = std::env::var_os(name)?;
                Some((OsString::from(name), value))
            });
            variables.extend(mine);
        }
        variables.extend(self.env.iter().cloned());
        with_last_values(variables)
    }

    /// Returns the folders in which a guest with files of its own has programs.
    fn folders_of_programs(&self) -> Vec<PathBuf> {
        let given = self.env.iter().rev().find(|(name, _)| name == "PATH");
        let path = given.map_or_else(|| PROGRAMS.into(), |(_, path)| path.clone());
        std::env::split_paths(&path).collect()
    }

    /// Refuses options that are impossible, or that would have no effect.
    fn check(&self) -> Result<(), RunError> {
        if self.placement == Placement::Process {
            let of_guests: Vec<&str> = [
                ("host", self.host.is_some()),
                ("kernel", self.kernel.is_some()),
                ("memory", self.memory.is_some()),
                ("cpus", self.cpus.is_some()),
                ("pin", self.pin.is_some()),
                ("dedicated", self.dedicated),
                ("prefault", self.prefault),
                ("rootfs", self.rootfs.is_some()),
                ("take", !self.take.is_empty()),
                ("disk", !self.disk.is_empty()),
                ("network", !self.network.is_empty()),
                ("interactive", self.interactive),
                ("timeout", self.timeout.is_some()),
            ]
            .into_iter()
            .filter_map(|(name, given)| given.then_some(name))
            .collect();
            if !of_guests.is_empty() {
                return Err(RunError::NoGuest(of_guests));
            }
        }
        if let Some(root) = &self.rootfs {
            if !self.take.is_empty() {
                return Err(RunError::Taken);
            }
            let data = std::fs::metadata(root).map_err(|source| RunError::Io {
                what: format!("cannot show {} to a guest", root.display()),
                source,
            })?;
            if !data.is_dir() {
                return Err(RunError::NoFolder(root.clone()));
            }
            if let Some(folder) = self.workdir.as_ref().filter(|folder| !folder.is_absolute()) {
                return Err(RunError::Workdir(folder.clone()));
            }
            if let Some(folder) = self
                .workdir
                .as_ref()
                .filter(|folder| files::lacks_folder(root, folder))
            {
                return Err(RunError::NoWorkdir {
                    root: root.clone(),
                    folder: folder.clone(),
                });
            }
        }
        if !self.window.0.is_multiple_of(SEGMENT_BYTES as u64)
            || !(LEAST_WINDOW..=WINDOW_MAX_BYTES).contains(&self.window.0)
        {
            return Err(RunError::Window {
                size: self.window.0,
            });
        }
        if self.disk.len() > MAX_DISKS {
            return Err(RunError::Disks(self.disk.len()));
        }
        network::check(&self.network)?;
        let memory = self.memory().0;
        if !memory.is_multiple_of(1 << 20) || !(LEAST_MEMORY..=MOST_MEMORY).contains(&memory) {
            return Err(RunError::Memory { size: memory });
        }
        if let Some(pins) = &self.pin {
            let needs_another = self.dedicated && self.backend.is_none();
            resources::check_processors(pins, self.cpus().into(), needs_another)?;
        }
        if self.prefault {
            resources::check_memory(memory)?;
        }
        Ok(())
    }
}

/// Parses a variable as given by `--env`.
fn variable(text: OsString) -> Result<Variable, String> {
    let mut parts = text.as_bytes().splitn(2, |byte| *byte == b'=');
    let name = OsStr::from_bytes(parts.next().unwrap_or_default());
    if name.is_empty() {
        return Err("a variable needs a name".to_owned());
    }
    let value = match parts.next() {
        Some(value) => Some(OsStr::from_bytes(value).to_owned()),
        None => std::env::var_os(name),
    };
    match value {
        Some(value) => Ok((name.to_owned(), value)),
        None => Err(format!(
            "{0} is not set here: write {0}=VALUE",
            name.display()
        )),
    }
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    NotExecuted(#[from] NotExecuted),
    #[error("{message}")]
    NotRun { status: u8, message: String },
    #[error("--{} applies to guests, and --placement process has none: leave it out", .0.join(", --"))]
    NoGuest(Vec<&'static str>),
    #[error("--take has no effect with --rootfs, which shows whole folders: leave it out")]
    Taken,
    #[error("cannot show {} to a guest: it is no folder", .0.display())]
    NoFolder(PathBuf),
    #[error("--workdir {} is no path of the guest: begin it with /", .0.display())]
    Workdir(PathBuf),
    #[error("--workdir {} cannot be: the guest has no such folder, since {} has none", .folder.display(), .root.display())]
    NoWorkdir { root: PathBuf, folder: PathBuf },
    #[error(
        "a guest cannot have {size} bytes of memory: it must be a multiple of 1M, at least {}M and at most {}G",
        LEAST_MEMORY >> 20,
        MOST_MEMORY >> 30
    )]
    Memory { size: u64 },
    #[error(transparent)]
    Resources(#[from] ResourcesError),
    #[error(transparent)]
    Reaper(#[from] reaper::ReaperError),
    #[error(transparent)]
    Installation(#[from] InstallationError),
    #[error("backend")]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Backends(#[from] BackendsError),
    #[error(
        "--backend needs a guest on this machine's KVM, since the emulated host shares no memory with a backend here{}: \
         choose --placement process, or leave --backend out",
        .0.as_ref().map(|why| format!(" ({why})")).unwrap_or_default()
    )]
    Apart(Option<String>),
    #[error(
        "a window of {size} bytes does not fit: it must be a multiple of 2 MiB and at least {LEAST_WINDOW} bytes, \
         at most {}T",
        WINDOW_MAX_BYTES >> 40
    )]
    Window { size: u64 },
    #[error("{0}")]
    Kvm(String),
    #[error("cannot tell where images lie: set WORMHOLE_IMAGES or HOME")]
    NoImages,
    #[error("wormhole on the emulated host ended with status {0}")]
    Inner(u8),
    /// The command on the emulated host has printed the error, or a signal to this process has
    /// ended it.
    #[error("wormhole on the emulated host has said why it ended with status {0}")]
    Said(u8),
    #[error(
        "the guest's processor failed, as QEMU's emulation of virtualization may: run it again"
    )]
    EmulatedProcessor,
    #[error("a guest cannot have {0} disks: at most {MAX_DISKS} are possible")]
    Disks(usize),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error("--json would overwrite {}, which the run needs", .0.display())]
    Overwritten(PathBuf),
    #[error("image")]
    Image(#[from] ImageError),
    #[error("guest")]
    Guest(#[from] GuestError),
    #[error("{what}")]
    Io {
        what: String,
        #[source]
        source: io::Error,
    },
}

/// Exit status of all errors before or beside the program itself.
pub const USAGE: u8 = 2;
/// `EX_UNAVAILABLE` of `sysexits.h`: the backend ended before the program, which itself succeeded.
const BACKEND_FAILED: u8 = 69;
/// `EX_TEMPFAIL` of `sysexits.h`: the emulated host failed, and another run may succeed.
const AGAIN: u8 = 75;

/// Exit statuses of `wormhole run`, for its help.
pub const STATUSES: &str = "Exit status: the program's own, 128 + N if signal N ended it. Otherwise 2: wormhole itself \
    refused or failed; 69: the backend ended before the program, which returned 0; 75: QEMU's emulation failed, and \
    the run may be repeated; 126: the program cannot be executed; 127: the program or its interpreter is missing.";

impl RunError {
    /// Returns whether the process that failed has printed the cause already.
    pub fn is_said(&self) -> bool {
        matches!(self, Self::Said(_) | Self::Backend(BackendError::Said))
    }

    /// Returns the names of the options that the error is about.
    pub fn options(&self) -> Vec<&'static str> {
        match self {
            Self::NoGuest(options) => options.clone(),
            Self::Taken => vec!["rootfs", "take"],
            Self::NoFolder(_) => vec!["rootfs"],
            Self::Workdir(_) | Self::NoWorkdir { .. } => vec!["workdir"],
            Self::Memory { .. } => vec!["memory"],
            Self::Resources(error) => error.options(),
            Self::Window { .. } => vec!["window"],
            Self::Disks(_) | Self::Disk(_) => vec!["disk"],
            Self::Network(_) => vec!["network"],
            Self::Overwritten(_) => vec!["json"],
            Self::Backends(_) | Self::Apart(_) => vec!["backend"],
            Self::NotExecuted(_) => vec!["command"],
            _ => Vec::new(),
        }
    }

    /// Returns the exit status of a run with this error.
    pub fn status(&self) -> u8 {
        match self {
            Self::NotExecuted(error) => error.status(),
            Self::NotRun { status, .. } | Self::Said(status) => *status,
            // The emulated host failed, so the program's status is unknown.
            Self::EmulatedProcessor | Self::Image(ImageError::HostTimeout { .. }) => AGAIN,
            // QEMU itself exits with success when its machine fails.
            Self::Image(ImageError::HostDied { status, .. }) if status.success() => AGAIN,
            _ => USAGE,
        }
    }
}

/// Least memory in which a guest's kernel and first file system can be unpacked, and below the most
/// that it can have.
const LEAST_MEMORY: u64 = 128 << 20;
const MOST_MEMORY: u64 = 1 << 40;

/// Smallest window with which a session can start: one segment each for bootstrap, session and
/// arena.
const LEAST_WINDOW: u64 = 8 << 20;

/// Runs the program and returns its exit status.
pub fn run(mut options: Options) -> Result<u8, RunError> {
    let signals = Signals::take().map_err(|source| RunError::Io {
        what: "the thread that takes signals cannot be made".to_owned(),
        source,
    })?;
    options.check()?;
    let mut program = match options.rootfs.as_deref() {
        Some(root) if root != Path::new("/") => {
            let name = options.command[0].as_ref();
            let folders = options.folders_of_programs();
            let missing = || NotExecuted::NotInPath(options.command[0].display().to_string());
            files::find_below(root, name, &folders).ok_or_else(missing)?
        }
        _ => find_program(&options.command[0])?,
    };
    if options.rootfs.is_some() {
        // Links stay: a virtual environment's interpreter is one, and finds its packages by its name.
        program = std::path::absolute(&program).map_err(|source| RunError::Io {
            what: format!("cannot find {}", program.display()),
            source,
        })?;
    } else if options.placement == Placement::Host {
        // A guest has the program at its real path, and programs search for files beside their own.
        program = std::fs::canonicalize(&program)
            .map_err(|source| NotExecuted::because(&program, source))?;
    }
    for path in &mut options.take {
        // Links are not resolved, because the guest opens the path as given.
        let named = std::fs::metadata(&*path).and_then(|_| std::path::absolute(&*path));
        *path = named.map_err(|source| RunError::Io {
            what: format!("cannot take {} along", path.display()),
            source,
        })?;
    }
    if let Some(path) = &options.json {
        let disks = options.disk.iter().map(|disk| &disk.path);
        let mut read = std::iter::once(&program)
            .chain(&options.take)
            .chain(disks)
            .chain(&options.config.file);
        if let Some(read) = read.find(|read| same_file(path, read)) {
            return Err(RunError::Overwritten(read.clone()));
        }
    }
    // Detects an unwritable file before the run, not after it.
    let json = options.json.as_deref().map(|path| {
        let open = writable(path).map_err(|source| RunError::Io {
            what: format!("cannot write {}", path.display()),
            source,
        });
        open.map(|open| (path, open))
    });
    let json = json.transpose()?;
    let installation = Installation::locate()?;
    let record = json.map(|(path, open)| {
        Record::start(installation.command(), path, open).map_err(|source| RunError::Io {
            what: "cannot start the process that writes the summary".to_owned(),
            source,
        })
    });
    let record = record.transpose()?;
    let (status, summary) = match options.placement {
        Placement::Process => process::run(&options, &program, &installation, &signals)?,
        Placement::Host => match choose_host(options.host.unwrap_or(Host::Auto))? {
            Kvm::Usable => guest::run(&options, &program, &installation, &signals)?,
            Kvm::Emulated { why } if options.backend.is_some() => return Err(RunError::Apart(why)),
            Kvm::Emulated { why } if options.pin.is_some() => {
                return Err(ResourcesError::Emulated(why).into());
            }
            Kvm::Emulated { why } => {
                emulated::run(&options, &program, &installation, &signals, why.as_deref())?
            }
        },
    };
    if let (Some(failure), "none" | "kvm") = (&summary.backend_failure, summary.guest.as_str()) {
        say::line(format_args!(
            "the backend ended before the program: {failure}"
        ));
    }
    if !options.quiet {
        say::to_stderr(&summary.to_string());
    }
    if let Some(record) = record {
        record.write(&summary);
    }
    if status == 0 && summary.backend_failure.is_some() {
        return Ok(BACKEND_FAILED);
    }
    Ok(status)
}

/// Returns whether both paths name the same file.
fn same_file(one: &Path, other: &Path) -> bool {
    let identity = |path| std::fs::metadata(path).map(|data| (data.dev(), data.ino()));
    matches!((identity(one), identity(other)), (Ok(one), Ok(other)) if one == other)
}

/// Checks that a file can be written. Removes it again, so that a run that fails leaves neither an
/// empty summary nor one of another run. A named pipe, a device or a link stays open: the reader of
/// a pipe would otherwise see its end, and not open it a second time.
fn writable(path: &Path) -> io::Result<Option<File>> {
    let file = File::create(path)?;
    if std::fs::symlink_metadata(path)?.is_file() {
        std::fs::remove_file(path)?;
        return Ok(None);
    }
    Ok(Some(file))
}

/// Returns the path of the program: the name itself if it contains a slash, otherwise the result of
/// a search in PATH, as execvp(3) does.
fn find_program(name: &OsStr) -> Result<PathBuf, NotExecuted> {
    if name.is_empty() {
        return Err(NotExecuted::NoName);
    }
    if name.as_encoded_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return look(&path).map(|()| path);
    }
    let folders = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut found = None;
    for folder in std::env::split_paths(&folders) {
        let path = folder.join(name);
        match look(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.status() == wormhole_images::status::NOT_FOUND => {}
            // As shells do, the search goes on: another folder may have an executable one.
            Err(error) => found = found.or(Some(error)),
        }
    }
    Err(found.unwrap_or_else(|| NotExecuted::NotInPath(name.display().to_string())))
}

/// Checks that a path names an executable file.
fn look(path: &Path) -> Result<(), NotExecuted> {
    let refused = |source| NotExecuted::because(path, source);
    let data = std::fs::metadata(path).map_err(refused)?;
    if !data.is_file() {
        return Err(refused(rustix::io::Errno::ACCESS.into()));
    }
    access(path, Access::EXEC_OK).map_err(|error| refused(error.into()))
}

/// Separates errors of the program itself from errors of the image that contains it.
fn not_executed(program: &Path, error: ImageError) -> RunError {
    match error {
        ImageError::Elf { path, .. } if path == program => NotExecuted::format(program).into(),
        ImageError::Interpreter {
            script,
            interpreter,
            fault,
        } if script == program => NotExecuted::Interpreter {
            program: script.display().to_string(),
            interpreter,
            fault,
        }
        .into(),
        error => error.into(),
    }
}

/// Usability of this machine's KVM for the guest.
enum Kvm {
    Usable,
    /// The emulated host is used; `why` if the user did not request it.
    Emulated {
        why: Option<String>,
    },
}

fn choose_host(wanted: Host) -> Result<Kvm, RunError> {
    if wanted == Host::Emulated {
        return Ok(Kvm::Emulated { why: None });
    }
    match wormhole_monitor::probe() {
        KvmCaps::Linux => Ok(Kvm::Usable),
        // Emulation is far slower, and the user can mend this.
        KvmCaps::Denied { why } => Err(RunError::Kvm(why)),
        KvmCaps::Missing { why } | KvmCaps::PayloadOnly { why } => {
            if wanted == Host::Auto {
                Ok(Kvm::Emulated { why: Some(why) })
            } else {
                Err(RunError::Kvm(why))
            }
        }
    }
}

fn images(installation: &Installation) -> Result<PathBuf, RunError> {
    installation.images().ok_or(RunError::NoImages)
}

/// Returns a socket that delivers standard input once its holder has written a `!`.
fn standard_input() -> Result<UnixStream, RunError> {
    let (ours, theirs) = UnixStream::pair().map_err(|source| RunError::Io {
        what: "standard input cannot be connected".to_owned(),
        source,
    })?;
    feed(ours);
    Ok(theirs)
}

/// Copies standard input to `stream`, once the peer has written a `!`. The thread is never joined:
/// it ends with the input, or with this process.
fn feed(mut stream: UnixStream) {
    let fed = tasks::spawn("stdin", move || {
        let mut ready = [0];
        if !matches!(stream.read(&mut ready), Ok(1)) {
            return;
        }
        // A program that does not read all of its input is no failure.
        drop(io::copy(&mut io::stdin().lock(), &mut stream));
        drop(stream.shutdown(Shutdown::Write));
        // QEMU drops unread data of a socket whose peer is closed, so this end stays open until
        // QEMU closes its own.
        drop(io::copy(&mut stream, &mut io::sink()));
    });
    if let Err(error) = fed {
        say::line(format_args!("the program gets no standard input: {error}"));
    }
}

/// Variables that a program in a guest has from the caller, where it has the caller's files.
const SAME_FILES: [&str; 6] = [
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "VIRTUAL_ENV",
    "PYTHONPATH",
];

/// Folders of programs in a guest with other files.
const PROGRAMS: &str = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin";

/// Names the folders in which the loader looks for libraries first (ld.so(8)).
const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";

/// Returns the variables of this environment that a guest's program gets: those that CUDA programs and the frontend
/// read, and the folders of libraries.
fn forwarded_variables() -> Vec<Variable> {
    let folders = std::env::var_os(LIBRARY_PATH).and_then(|path| absolute_folders(&path));
    std::env::vars_os()
        .filter(|(name, _)| {
            let name = name.to_string_lossy();
            name.starts_with("CUDA_") || name == "WORMHOLE_LOG"
        })
        .chain(folders.map(|path| (LIBRARY_PATH.into(), path)))
        .collect()
}

/// Returns each variable once, with its last value: programs read the first of two.
fn with_last_values(variables: Vec<Variable>) -> Vec<Variable> {
    let mut seen = HashSet::new();
    let mut last: Vec<Variable> = variables
        .into_iter()
        .rev()
        .filter(|(name, _)| seen.insert(name.clone()))
        .collect();
    last.reverse();
    last
}

/// Makes the folders of a path absolute. The loader takes an empty name for the working directory.
fn absolute_folders(path: &OsStr) -> Option<OsString> {
    if path.is_empty() {
        return None;
    }
    let folders = std::env::split_paths(path).filter_map(|folder| {
        let named = !folder.as_os_str().is_empty();
        let whole = if named {
            std::path::absolute(&folder)
        } else {
            std::env::current_dir()
        };
        whole.ok()
    });
    std::env::join_paths(folders).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_has_its_last_value() {
        let variable = |name: &str, value: &str| (name.into(), value.into());
        let given = vec![variable("A", "1"), variable("B", "2"), variable("A", "3")];
        let last = vec![variable("B", "2"), variable("A", "3")];
        assert_eq!(with_last_values(given), last);
    }

    #[test]
    fn folders_of_libraries_are_the_same_in_a_guest() {
        let here = std::env::current_dir().expect("a working directory");
        let here = here.to_str().expect("text");
        let absolute = |path: &str| absolute_folders(path.as_ref());
        let wanted = format!("/opt/lib:{here}/lib:{here}");
        assert_eq!(absolute("/opt/lib:lib:"), Some(wanted.into()));
        assert_eq!(absolute(""), None);
    }
}
