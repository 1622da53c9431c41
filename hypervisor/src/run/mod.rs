//! `wormhole run`: runs one program with a tenant of its own.

pub mod collect;
pub mod confinement;
mod emulated;
pub mod environment;
mod files;
pub mod guest;
pub mod layout;
pub mod network;
mod parent;
pub mod passt;
mod process;
pub mod reaper;
pub mod record;
pub mod resources;
mod summary;
pub mod terminal;
mod transport;
mod volumes;

use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal, Read};
use std::net::Shutdown;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use rustix::fs::{Access, access, statfs};
use rustix::process::{Gid, Resource, getegid, geteuid, getgroups, getrlimit};
use wormhole_images::{Collected, ImageError, NotExecuted, TerminalSize, User};
use wormhole_link::tasks;
use wormhole_monitor::{
    DiskAccess, DiskError, DiskImage, KvmCaps, MAX_DEVICES, MAX_DISKS, MAX_VCPUS,
};
use wormhole_ring::layout::{SEGMENT_BYTES, WINDOW_MAX_BYTES};

use self::collect::{Collect, CollectError, Collectors};
use self::environment::{Variable, variable};
use self::guest::GuestError;
use self::network::{NetworkError, NetworkOption};
use self::record::{Place, Record};
use self::resources::{Processors, ResourcesError};
use self::summary::Summary;
use self::terminal::{Handle, Keeper};
use self::volumes::{Volume, VolumeError};
use crate::backend::{Backend, BackendError};
use crate::backend_vm::{self, Unserved};
use crate::backends::{BackendsError, Chosen, Connected, Placement as Placed};
use crate::config::ConfigOption;
use crate::device::DeviceOption;
use crate::installation::{Installation, InstallationError};
use crate::phases::Phases;
use crate::say;
use crate::signals::{Signal, Signals};

/// Placement of the backend relative to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Placement {
    /// Program and backend are processes of this system.
    Process,
    /// The program runs in a guest VM, the backend is a process of this system.
    Host,
    /// The program runs in a guest VM, the backend in a VM of its own.
    Vm,
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

/// Types of the file systems whose files are in memory: tmpfs and ramfs (statfs(2)).
const IN_MEMORY: [i64; 2] = [libc::TMPFS_MAGIC, 0x8584_58f6];

/// A disk as given by `--disk`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    path: PathBuf,
    access: DiskAccess,
}

impl Disk {
    pub fn parse(text: OsString) -> Result<Self, &'static str> {
        let (path, access) = match text.as_bytes().strip_suffix(b":ro") {
            Some(path) => (PathBuf::from(OsStr::from_bytes(path)), DiskAccess::ReadOnly),
            None => (text.into(), DiskAccess::ReadWrite),
        };
        match path.as_os_str().is_empty() {
            true => Err("a disk needs a file"),
            false => Ok(Self { path, access }),
        }
    }

    /// Returns a disk by its path, and whether the guest can only read it.
    pub fn new(path: PathBuf, is_read_only: bool) -> Self {
        let access = match is_read_only {
            true => DiskAccess::ReadOnly,
            false => DiskAccess::ReadWrite,
        };
        Self { path, access }
    }

    /// Returns the disk's absolute path, and whether the guest can only read it.
    pub fn parts(&self) -> (PathBuf, bool) {
        let path = std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone());
        (path, self.access == DiskAccess::ReadOnly)
    }

    /// Refuses more disks than a guest can have.
    pub fn check(disks: &[Self]) -> Result<(), RunError> {
        match disks.len() > MAX_DISKS {
            true => Err(RunError::Disks(disks.len())),
            false => Ok(()),
        }
    }

    /// Opens and locks the disks.
    pub fn open(disks: &[Self]) -> Result<Vec<DiskImage>, DiskError> {
        let open = |disk: &Self| DiskImage::open(&disk.path, disk.access);
        disks.iter().map(open).collect()
    }

    /// Returns the bytes of those disks that are files in memory, which count as memory of the process that writes to them.
    pub fn bytes_in_memory(disks: &[Self]) -> u64 {
        let in_memory = |disk: &&Self| {
            let found = statfs(&disk.path);
            found.is_ok_and(|found| IN_MEMORY.contains(&found.f_type))
        };
        let size = |disk: &Self| std::fs::metadata(&disk.path).map_or(0, |data| data.len());
        disks.iter().filter(in_memory).map(size).sum()
    }
}

#[derive(Debug, Args)]
pub struct Options {
    /// Placement of the backend.
    #[arg(long, value_enum, default_value = "host")]
    placement: Placement,
    /// Way of the calls to the backend, at --placement process: others than the usual one exist to be measured.
    #[arg(long, value_enum, default_value = "poll")]
    transport: transport::Choice,
    #[command(flatten)]
    device: DeviceOption,
    /// An existing backend, which serves the program beside others: the name that `backend start` gave it,
    /// or the path of its socket. Without this option the run has a backend of its own.
    #[arg(long, value_name = "NAME|unix:PATH", conflicts_with = "device")]
    backend: Option<Chosen>,
    /// Host of the guest VM; this machine's KVM where it can run Linux (auto) if not given.
    #[arg(long, value_enum)]
    host: Option<Host>,
    /// The guest's kernel; 6.1 if not given.
    #[arg(long, value_enum)]
    kernel: Option<Kernel>,
    /// Size of the window: shared memory between guest and backend. If not given, it is as large as the guest's memory,
    /// at --placement process this machine's: page-locked memory natively has no more either.
    #[arg(long)]
    window: Option<Size>,
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
    /// Give the program in the guest this terminal: standard input must be one.
    #[arg(short, long)]
    tty: bool,
    /// The guest sees the files below this folder as its own; all of this machine's if not given. Its changes stay in
    /// its memory. If the folder is an image in the OCI's layout, the guest sees the image unpacked.
    #[arg(long, value_name = "FOLDER")]
    rootfs: Option<PathBuf>,
    /// A folder of this machine, at another place of the guest, which can change it with the caller's rights. With `:ro`
    /// behind it the guest can only read it.
    #[arg(long, value_name = "SOURCE:DESTINATION[:ro]", value_parser = OsStringValueParser::new().try_map(Volume::parse))]
    volume: Vec<Volume>,
    /// A file or folder of the guest, copied to this machine when the program has ended: to HOST, which must be new, or to
    /// its own name in the working directory.
    #[arg(long, value_name = "GUEST[:HOST]", value_parser = OsStringValueParser::new().try_map(Collect::parse))]
    collect: Vec<Collect>,
    /// Working directory of the program in a guest; this one if the guest has this machine's files, else `/`.
    #[arg(short, long, value_name = "FOLDER")]
    workdir: Option<PathBuf>,
    /// Name of the guest.
    #[arg(long, value_name = "NAME", value_parser = hostname)]
    hostname: Option<String>,
    /// Name under which the program is executed.
    #[arg(long, hide = true)]
    argv0: Option<OsString>,
    /// Identity of the program in a guest.
    #[arg(long, hide = true)]
    user: Option<User>,
    /// Identity that an image names. It counts in the guest alone.
    #[arg(skip)]
    image_user: Option<User>,
    /// A raw image file, or a block device, as a disk of the guest (`/dev/vda`, then `/dev/vdb` and so on). With `:ro`
    /// behind it the guest can only read it, and several guests can have it at once.
    #[arg(long, value_name = "FILE[:ro]", value_parser = OsStringValueParser::new().try_map(Disk::parse))]
    disk: Vec<Disk>,
    /// A network of the guest (`eth0`, then `eth1` and so on). `passt` needs nothing of this machine but the program
    /// passt: the guest's connections are then this user's. Or a tap interface of this machine, and the guest's IPv4
    /// address; with a default route through the gateway, and a name server, where they are given.
    #[arg(
        long,
        value_name = "passt[,mac=MAC]|tap=NAME,address=IP/PREFIX[,gateway=IP][,dns=IP][,mac=MAC]"
    )]
    network: Vec<NetworkOption>,
    /// Seconds after which the guest counts as hung and is ended. Without it the guest runs as long as its program.
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
    #[arg(trailing_var_arg = true, required_unless_present = "rootfs")]
    command: Vec<OsString>,
}

impl Options {
    fn kernel(&self) -> Kernel {
        self.kernel.unwrap_or(Kernel::V6_1)
    }

    fn memory(&self) -> Size {
        self.memory.unwrap_or(Size(512 << 20))
    }

    /// Returns the size of the window.
    fn window(&self) -> u64 {
        let usual = || {
            usual_window(match self.placement {
                Placement::Process => resources::memory().unwrap_or(0),
                Placement::Host | Placement::Vm => self.memory().0,
            })
        };
        self.window.map_or_else(usual, |size| size.0)
    }

    fn cpus(&self) -> u8 {
        self.cpus.unwrap_or(1)
    }

    fn timeout(&self) -> Option<Duration> {
        self.timeout.map(Duration::from_secs)
    }

    /// Opens the program's backend, with a fresh window.
    fn open_backend(&self, installation: &Installation) -> Result<Backend, RunError> {
        let (chosen, device) = (self.backend.as_ref(), &self.device.device);
        if self.placement == Placement::Vm {
            return Ok(Backend::start_in_vm(installation, device, self.window())?);
        }
        if self.placement == Placement::Process
            && let Some(chosen) = chosen
        {
            chosen.expect_processes()?;
        }
        open_backend(installation, chosen, device, Size(self.window()))
    }

    /// Opens and locks the disks.
    fn disks(&self) -> Result<Vec<DiskImage>, DiskError> {
        Disk::open(&self.disk)
    }

    /// Returns the folder whose files a guest has.
    fn root(&self) -> &Path {
        self.rootfs.as_deref().unwrap_or(Path::new("/"))
    }

    /// Returns whether a guest has this machine's files.
    fn has_own_files(&self) -> bool {
        self.root() == Path::new("/")
    }

    /// Returns whether a program in a guest reads this process's standard input.
    fn reads_input(&self) -> bool {
        self.interactive || self.tty
    }

    /// Returns the size of the terminal of a program in a guest.
    fn terminal(&self) -> Option<TerminalSize> {
        self.tty.then(terminal::size)
    }

    /// Returns the name of a guest.
    fn hostname(&self) -> &str {
        self.hostname.as_deref().unwrap_or("wormhole")
    }

    /// Returns the identity of a program in a guest: that of the command line, the image's or the caller's.
    fn user(&self) -> io::Result<User> {
        let caller = || {
            Ok(User {
                uid: geteuid().as_raw(),
                gid: getegid().as_raw(),
                groups: getgroups()?.into_iter().map(Gid::as_raw).collect(),
            })
        };
        let named = self.user.as_ref().or(self.image_user.as_ref());
        named.cloned().map_or_else(caller, Ok)
    }

    /// Returns the arguments of a program in a guest, from its name on.
    fn arguments(&self) -> Vec<OsString> {
        let name = self.argv0.as_ref().unwrap_or(&self.command[0]);
        std::iter::once(name)
            .chain(&self.command[1..])
            .cloned()
            .collect()
    }

    /// Returns the working directory of a program in a guest.
    fn directory(&self) -> Result<PathBuf, RunError> {
        match &self.workdir {
            Some(folder) => Ok(folder.clone()),
            None if self.has_own_files() => {
                std::env::current_dir().map_err(|source| RunError::Io {
                    what: "cannot tell the working directory".to_owned(),
                    source,
                })
            }
            None => Ok("/".into()),
        }
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
                ("volume", !self.volume.is_empty()),
                ("collect", !self.collect.is_empty()),
                ("workdir", self.workdir.is_some()),
                ("hostname", self.hostname.is_some()),
                ("disk", !self.disk.is_empty()),
                ("network", !self.network.is_empty()),
                ("interactive", self.interactive),
                ("tty", self.tty),
                ("timeout", self.timeout.is_some()),
            ]
            .into_iter()
            .filter_map(|(name, given)| given.then_some(name))
            .collect();
            if !of_guests.is_empty() {
                return Err(RunError::NoGuest(of_guests));
            }
        }
        if self.placement != Placement::Process && self.transport != transport::Choice::Poll {
            return Err(RunError::Transport);
        }
        if self.placement == Placement::Vm {
            backend_vm::check(self.backend.is_some(), &self.device)?;
        }
        if self.tty && !io::stdin().is_terminal() {
            return Err(RunError::NoTerminal);
        }
        check_window(Size(self.window()))?;
        Disk::check(&self.disk)?;
        network::check(&self.network)?;
        volumes::check(&self.volume)?;
        let json = self.json.as_deref();
        collect::check(&self.collect, json.as_slice())?;
        // The root is a file system as well.
        let devices = self.disk.len() + self.network.len() + self.volume.len() + 1;
        if devices > MAX_DEVICES {
            return Err(RunError::Devices);
        }
        check_memory(self.memory())?;
        if let Some(pins) = &self.pin {
            let needs_another = self.dedicated && self.backend.is_none();
            resources::check_processors(pins, self.cpus().into(), needs_another)?;
        }
        if self.prefault {
            resources::check_memory(self.memory().0)?;
        }
        Ok(())
    }

    /// Refuses folders that the program cannot have.
    fn check_folders(&self) -> Result<(), RunError> {
        if let Some(root) = &self.rootfs {
            let data = std::fs::metadata(root).map_err(|source| RunError::Io {
                what: format!("cannot show {} to a guest", root.display()),
                source,
            })?;
            if !data.is_dir() {
                return Err(RunError::NoFolder(root.clone()));
            }
        }
        if let Some(folder) = &self.workdir {
            if !folder.is_absolute() {
                return Err(RunError::Workdir(folder.clone()));
            }
            let is_in = |volume: &Volume| folder.starts_with(&volume.destination);
            if !self.volume.iter().any(is_in) && files::lacks_folder(self.root(), folder) {
                return Err(RunError::NoWorkdir {
                    root: self.root().to_owned(),
                    folder: folder.clone(),
                });
            }
        }
        Ok(())
    }
}

/// Opens a backend with a fresh window: the chosen one, or a new one.
pub fn open_backend(
    installation: &Installation,
    chosen: Option<&Chosen>,
    device: &str,
    window: Size,
) -> Result<Backend, RunError> {
    let opened = match chosen {
        None => Backend::start(installation, device, window.0),
        Some(chosen) => {
            let Connected {
                stream,
                placement,
                boot_id,
            } = chosen.connect()?;
            match placement {
                Placed::Host => Backend::attach_to(stream, window.0),
                Placed::Vm => {
                    Backend::attach_static(stream, window.0).map(|backend| backend.of_boot(boot_id))
                }
            }
        }
    };
    Ok(opened?)
}

/// Refuses a window that a guest cannot have.
pub fn check_window(Size(size): Size) -> Result<(), RunError> {
    let fits = size.is_multiple_of(SEGMENT_BYTES as u64)
        && (LEAST_WINDOW..=WINDOW_MAX_BYTES).contains(&size);
    fits.then_some(()).ok_or(RunError::Window { size })
}

/// Refuses memory that a guest cannot have.
pub fn check_memory(Size(size): Size) -> Result<(), RunError> {
    let fits = size.is_multiple_of(1 << 20) && (LEAST_MEMORY..=MOST_MEMORY).contains(&size);
    fits.then_some(()).ok_or(RunError::Memory { size })
}

/// Parses the name of a guest as given by `--hostname`.
fn hostname(text: &str) -> Result<String, &'static str> {
    let is_part = |part: &str| {
        let is_of_a_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        !part.is_empty() && !part.starts_with('-') && part.bytes().all(is_of_a_name)
    };
    match text.len() <= LONGEST_HOSTNAME && text.split('.').all(is_part) {
        true => Ok(text.to_owned()),
        false => Err("write at most 64 letters, digits, hyphens and dots, such as node-1.example"),
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
    #[error(
        "--transport has one choice for guests, which is poll: write --placement process, or leave --transport out"
    )]
    Transport,
    #[error(
        "--tty needs a terminal as standard input: leave it out, or write --interactive for other input"
    )]
    NoTerminal,
    #[error("cannot show {} to a guest: it is no folder", .0.display())]
    NoFolder(PathBuf),
    #[error("cannot show the image in {} to a guest: {why}", .layout.display())]
    Layout { layout: PathBuf, why: String },
    #[error(
        "{} has no program of its own to start: write one behind the options",
        .0.display()
    )]
    NoProgram(PathBuf),
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
    Unserved(#[from] Unserved),
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
    #[error(
        "this machine has no KVM that runs Linux, which `wormhole guest` needs: start the guest on one that has"
    )]
    NoLinux,
    #[error("cannot boot {}: it is no regular file", .0.display())]
    NoFile(PathBuf),
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
    #[error("no guest can have the machine of the snapshot: {0}")]
    Machine(String),
    #[error("a guest cannot have {0} disks: at most {MAX_DISKS} are possible")]
    Disks(usize),
    #[error(
        "a guest cannot have so many disks, networks and volumes: at most {} together are possible",
        MAX_DEVICES - 1
    )]
    Devices,
    #[error(transparent)]
    Volume(#[from] VolumeError),
    #[error(transparent)]
    Collect(#[from] CollectError),
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
/// `EX_CANTCREAT` of `sysexits.h`: a path of `--collect` is not copied, and the program itself succeeded.
const NOT_COLLECTED: u8 = 73;
/// `EX_TEMPFAIL` of `sysexits.h`: the emulated host failed, and another run may succeed.
const AGAIN: u8 = 75;

/// Exit statuses of `wormhole run`, for its help.
pub const STATUSES: &str = "Exit status: the program's own, 128 + N if signal N ended it. Otherwise 2: wormhole itself \
    refused or failed; 69: the backend ended before the program, which returned 0; \
    73: what --collect names could not be copied, and the program returned 0; 75: QEMU's emulation failed, and \
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
            Self::Transport => vec!["transport"],
            Self::NoTerminal => vec!["tty"],
            Self::NoFolder(_) | Self::Layout { .. } | Self::NoProgram(_) => vec!["rootfs"],
            Self::Workdir(_) | Self::NoWorkdir { .. } => vec!["workdir"],
            Self::Memory { .. } => vec!["memory"],
            Self::Resources(error) => error.options(),
            Self::Window { .. } => vec!["window"],
            Self::Disks(_) | Self::Disk(_) => vec!["disk"],
            Self::Network(_) => vec!["network"],
            Self::Volume(_) => vec!["volume"],
            Self::Collect(_) => vec!["collect"],
            Self::Devices => vec!["disk", "network", "volume"],
            Self::Overwritten(_) => vec!["json"],
            Self::Backends(_) | Self::Apart(_) => vec!["backend"],
            Self::NotExecuted(_) => vec!["command"],
            Self::Unserved(error) => error.options(),
            _ => Vec::new(),
        }
    }

    /// Returns the exit status of a run with this error.
    pub fn status(&self) -> u8 {
        match self {
            Self::NotExecuted(error) => error.status(),
            Self::NotRun { status, .. } | Self::Said(status) => *status,
            // The emulated host failed, so the program's status is unknown.
            Self::EmulatedProcessor
            | Self::Image(ImageError::HostTimeout { .. } | ImageError::HostNotReady { .. }) => {
                AGAIN
            }
            // QEMU itself exits with success when its machine fails.
            Self::Image(ImageError::HostDied { status, .. }) if status.success() => AGAIN,
            _ => USAGE,
        }
    }
}

/// Longest name of a machine (`HOST_NAME_MAX` of Linux).
const LONGEST_HOSTNAME: usize = 64;

/// Least memory in which a guest's kernel and first file system can be unpacked, and below the most
/// that it can have.
const LEAST_MEMORY: u64 = 128 << 20;
const MOST_MEMORY: u64 = 1 << 40;

/// Smallest window with which a session can start: one segment each for bootstrap, session and
/// arena.
const LEAST_WINDOW: u64 = 8 << 20;

/// Smallest window if `--window` gives none. 64 processes, the limit of a guest, can compute and copy in it: one segment of
/// 2 MiB for the bootstrap and two for each process.
const LEAST_USUAL_WINDOW: u64 = 258 << 20;

/// Returns the size of the window of a guest, or a machine, with this memory if `--window` gives none. Memory is allocated
/// only for parts that are granted and used. The window is a file, which RLIMIT_FSIZE limits.
pub fn usual_window(memory: u64) -> u64 {
    let bytes = memory.min(largest_file());
    let bytes = bytes.clamp(LEAST_USUAL_WINDOW, WINDOW_MAX_BYTES);
    bytes - bytes % SEGMENT_BYTES as u64
}

/// Returns the most bytes of a file that this process may make.
pub fn largest_file() -> u64 {
    getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX)
}

/// Runs the program and returns its exit status.
pub fn run(mut options: Options) -> Result<u8, RunError> {
    let resizes: &[Signal] = if options.tty { &[libc::SIGWINCH] } else { &[] };
    let signals = Signals::take(resizes).map_err(|source| RunError::Io {
        what: "the thread that takes signals cannot be made".to_owned(),
        source,
    })?;
    options.check()?;
    let phases = Phases::new(options.quiet);
    phases.begin("unpacking the image's layers");
    let rootfs = options.rootfs.clone();
    let image = match options.placement {
        Placement::Host | Placement::Vm => options.open_layout()?,
        Placement::Process => None,
    };
    phases.end();
    options.check_folders()?;
    if options.command.is_empty() {
        return Err(RunError::NoProgram(rootfs.unwrap_or_default()));
    }
    let mut program = match options.has_own_files() {
        true => find_program(&options.command[0])?,
        false => {
            let name = options.command[0].as_ref();
            let folders = options.folders_of_programs();
            let missing = || NotExecuted::NotInPath(options.command[0].display().to_string());
            files::find_below(options.root(), name, &folders).ok_or_else(missing)?
        }
    };
    if options.placement != Placement::Process {
        // Links stay: a virtual environment's interpreter is one, and finds its packages by its name.
        program = std::path::absolute(&program).map_err(|source| RunError::Io {
            what: format!("cannot find {}", program.display()),
            source,
        })?;
        if options.has_own_files() {
            // The guest's kernel would refuse it as well, after a boot.
            NotExecuted::expect(&program)?;
        }
    }
    if let Some(path) = &options.json {
        let disks = options.disk.iter().map(|disk| &disk.path);
        let mut read = std::iter::once(&program)
            .chain(disks)
            .chain(&options.config.file);
        if let Some(read) = read.find(|read| same_file(path, read)) {
            return Err(RunError::Overwritten(read.clone()));
        }
    }
    // Detects an unwritable file before the run, not after it.
    let volumes = options.volume.iter();
    let volumes: Vec<&Path> = volumes.map(|volume| volume.source.as_path()).collect();
    let json = options.json.as_deref().map(|path| {
        Place::find(path, &volumes).map_err(|source| RunError::Io {
            what: format!("cannot write {}", path.display()),
            source,
        })
    });
    let json = json.transpose()?;
    let installation = Installation::locate()?;
    let record = json.map(|place| {
        Record::start(installation.command(), place).map_err(|source| RunError::Io {
            what: "cannot start the process that writes the summary".to_owned(),
            source,
        })
    });
    let record = record.transpose()?;
    let collectors = Collectors::start(installation.command(), &options.collect, &volumes)?;
    let terminal = options.tty.then(|| {
        Keeper::start(installation.command()).map_err(|source| RunError::Io {
            what: "cannot start the process that restores the terminal".to_owned(),
            source,
        })
    });
    let terminal = terminal.transpose()?;
    let input = options.reads_input().then(|| Input {
        terminal: terminal.as_ref().map(Keeper::handle),
    });
    let Ended {
        status,
        summary,
        collected,
        is_absence_said,
    } = match options.placement {
        Placement::Process => process::run(&options, &program, &installation, &signals)?,
        Placement::Host | Placement::Vm => match choose_host(options.host.unwrap_or(Host::Auto))? {
            Kvm::Usable => guest::run(&options, &program, &installation, &signals, input, phases)?,
            Kvm::Emulated { why } if options.backend.is_some() => return Err(RunError::Apart(why)),
            Kvm::Emulated { why } if options.pin.is_some() => {
                return Err(ResourcesError::Emulated(why).into());
            }
            Kvm::Emulated { why } => {
                let why = why.as_deref();
                emulated::run(
                    &options,
                    &program,
                    &installation,
                    &signals,
                    input,
                    why,
                    phases,
                )?
            }
        },
    };
    drop(terminal);
    drop(image);
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
    let is_collected = collectors.copy(collected, is_absence_said);
    Ok(match status {
        0 if summary.backend_failure.is_some() => BACKEND_FAILED,
        0 if !is_collected => NOT_COLLECTED,
        status => status,
    })
}

/// Outcome of a run whose program has ended.
#[derive(Debug)]
pub struct Ended {
    status: u8,
    summary: Summary,
    /// Outcomes for the paths of `--collect`, in their order.
    collected: Vec<Collected>,
    /// Whether a command on the emulated host has printed why paths are missing.
    is_absence_said: bool,
}

/// Returns whether both paths name the same file.
fn same_file(one: &Path, other: &Path) -> bool {
    let identity = |path| std::fs::metadata(path).map(|data| (data.dev(), data.ino()));
    matches!((identity(one), identity(other)), (Ok(one), Ok(other)) if one == other)
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

/// Standard input for a program in a guest.
#[derive(Debug)]
pub struct Input {
    /// The terminal that it is, if the program has one.
    terminal: Option<Handle>,
}

impl Input {
    /// Returns a socket that delivers the input once its holder has written a `!`.
    fn socket(self) -> Result<UnixStream, RunError> {
        let (ours, theirs) = UnixStream::pair().map_err(|source| RunError::Io {
            what: "standard input cannot be connected".to_owned(),
            source,
        })?;
        self.feed(ours);
        Ok(theirs)
    }

    /// Copies the input to `stream`, once the peer has written a `!`. The thread is never joined: it ends with the
    /// input, or with this process.
    fn feed(self, mut stream: UnixStream) {
        let fed = tasks::spawn("stdin", move || {
            let mut ready = [0];
            if !matches!(stream.read(&mut ready), Ok(1)) {
                return;
            }
            // Until now the terminal's keys could end this process.
            if let Some(terminal) = self.terminal {
                terminal.make_raw();
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
}

/// Folders of programs in a guest with other files.
const PROGRAMS: &str = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_on_a_tmpfs_count_as_memory() {
        const TMPFS: &str = "/dev/shm";
        if !statfs(TMPFS).is_ok_and(|found| found.f_type == libc::TMPFS_MAGIC) {
            return println!("skipped: {TMPFS} is no tmpfs");
        }
        let folder = tempfile::tempdir_in(TMPFS).expect("a folder");
        let path = folder.path().join("disk");
        let file = std::fs::File::create(&path).expect("a file");
        file.set_len(3 << 20).expect("it is ours");
        // A large file that is on no tmpfs.
        let disks = ["/proc/kcore".into(), path].map(|path| Disk::new(path, true));
        assert_eq!(Disk::bytes_in_memory(&disks), 3 << 20);
    }
}
