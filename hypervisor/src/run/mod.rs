//! `wormhole run`: one program, one fresh tenant.

mod emulated;
mod guest;
mod process;
mod summary;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, ValueEnum};
use wormhole_link::device::DeviceChoice;
use wormhole_monitor::KvmCaps;

use crate::backend::BackendError;
use crate::installation::{Installation, InstallationError};

/// Where the backend runs relative to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Placement {
    /// Program and backend are processes of this system.
    Process,
    /// The program runs in a guest VM, the backend is a process of this system.
    Host,
}

/// What a guest VM runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Host {
    /// This machine's KVM where it can run Linux, the emulated host otherwise.
    Auto,
    Kvm,
    /// A machine with virtualization, emulated by QEMU.
    Emulated,
}

/// The guest's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kernel {
    #[value(name = "6.1")]
    V6_1,
    #[value(name = "6.12")]
    V6_12,
}

/// Bytes, written as `512M`, `1G` or a plain number.
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

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, unit) = match text.char_indices().last() {
            Some((at, 'K' | 'k')) => (&text[..at], 1 << 10),
            Some((at, 'M' | 'm')) => (&text[..at], 1 << 20),
            Some((at, 'G' | 'g')) => (&text[..at], 1 << 30),
            _ => (text, 1),
        };
        digits
            .parse::<u64>()
            .ok()
            .and_then(|count| count.checked_mul(unit))
            .filter(|&bytes| bytes > 0)
            .map(Self)
            .ok_or_else(|| "write a size such as 512M or 1G".to_owned())
    }
}

#[derive(Debug, Args)]
pub struct Options {
    /// Where the backend runs.
    #[arg(long, value_enum, default_value = "host")]
    placement: Placement,
    /// The devices that execute: `cpu`, `cpu:N` for N devices of the CPU, or `cuda:N` for the machine's N-th GPU;
    /// several GPUs with commas between them, in the order in which programs see them. `cpu,check` looks for races and
    /// uninitialised memory in kernels' shared memory, and tells the program's standard error.
    #[arg(long, default_value = "cpu", value_parser = device)]
    device: String,
    /// What the guest VM runs on.
    #[arg(long, value_enum, default_value = "auto")]
    host: Host,
    /// The guest's kernel.
    #[arg(long, value_enum, default_value = "6.1")]
    kernel: Kernel,
    /// Size of the window: shared memory between guest and backend.
    #[arg(long, default_value = "256M")]
    window: Size,
    /// Memory of the guest.
    #[arg(long, default_value = "512M")]
    memory: Size,
    /// Processors of the guest.
    #[arg(long, default_value_t = 1)]
    cpus: u8,
    /// One more file or folder that the guest shall have, at its own path; libraries come along.
    #[arg(long)]
    take: Vec<PathBuf>,
    /// Seconds after which the guest counts as hung.
    #[arg(long, default_value_t = 600)]
    timeout: u64,
    /// Print no summary.
    #[arg(long)]
    quiet: bool,
    /// Write the summary as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

fn device(text: &str) -> Result<String, String> {
    let devices = text.parse::<DeviceChoice>();
    devices
        .map(|devices| devices.to_string())
        .map_err(|error| error.to_string())
}

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("{0} is not a program that can be run: no such file")]
    NoProgram(String),
    #[error("{0} is not a program that can be run: it is not executable")]
    NotExecutable(PathBuf),
    #[error(transparent)]
    Installation(#[from] InstallationError),
    #[error("backend")]
    Backend(#[from] BackendError),
    #[error(
        "a window of {size} bytes does not fit: it must be a multiple of 2 MiB and at least {least} bytes"
    )]
    Window { size: u64, least: u64 },
    #[error("{0}")]
    Kvm(String),
    #[error("cannot tell where images lie: set WORMHOLE_IMAGES or HOME")]
    NoImages,
    #[error("wormhole on the emulated host ended with status {0}")]
    Inner(u8),
    #[error(
        "the guest's processor failed, as QEMU's emulation of virtualization may: run it again"
    )]
    EmulatedProcessor,
    #[error("image")]
    Image(#[from] wormhole_images::ImageError),
    #[error("guest")]
    Guest(#[from] guest::GuestError),
    #[error("{what}")]
    Io {
        what: String,
        #[source]
        source: std::io::Error,
    },
}

impl RunError {
    /// Whether it is the emulated host that failed, so that nothing is known of the program.
    pub fn is_of_emulation(&self) -> bool {
        use wormhole_images::ImageError;
        match self {
            Self::EmulatedProcessor | Self::Image(ImageError::HostTimeout { .. }) => true,
            // QEMU itself ends well when its machine fails.
            Self::Image(ImageError::HostDied { status, .. }) => status.success(),
            _ => false,
        }
    }
}

/// The smallest window with which a session can start: bootstrap, session and one arena segment each.
const LEAST_WINDOW: u64 = 8 << 20;

/// Runs the program and returns its exit status.
pub fn run(mut options: Options) -> Result<u8, RunError> {
    let program = find_program(&options.command[0])?;
    for path in &mut options.take {
        // Links stay: the guest looks for what it was named.
        let named = std::fs::metadata(&*path).and_then(|_| std::path::absolute(&*path));
        *path = named.map_err(|source| RunError::Io {
            what: format!("cannot take {} along", path.display()),
            source,
        })?;
    }
    if !options
        .window
        .0
        .is_multiple_of(wormhole_ring::layout::SEGMENT_BYTES as u64)
        || options.window.0 < LEAST_WINDOW
    {
        return Err(RunError::Window {
            size: options.window.0,
            least: LEAST_WINDOW,
        });
    }
    if let Some(path) = &options.json {
        // Fail before the run, not after it.
        writable(path).map_err(|source| RunError::Io {
            what: format!("cannot write {}", path.display()),
            source,
        })?;
    }
    let installation = Installation::locate()?;
    let (status, summary) = match options.placement {
        Placement::Process => process::run(&options, &program, &installation)?,
        Placement::Host => match choose_host(options.host)? {
            Host::Emulated => emulated::run(&options, &program, &installation)?,
            Host::Kvm | Host::Auto => guest::run(&options, &program, &installation)?,
        },
    };
    if !options.quiet {
        eprint!("{summary}");
    }
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&summary).unwrap_or_default();
        std::fs::write(path, text).map_err(|source| RunError::Io {
            what: format!("cannot write {}", path.display()),
            source,
        })?;
    }
    Ok(status)
}

/// Whether a file can be written there. It is not there afterwards, so that a run that fails leaves neither an
/// empty summary nor another run's.
fn writable(path: &Path) -> std::io::Result<()> {
    std::fs::File::create(path)?;
    // Not a device, and not a link to one.
    if std::fs::symlink_metadata(path)?.is_file() {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

/// The program as a path: as given where it names a file, searched in PATH otherwise.
fn find_program(name: &str) -> Result<PathBuf, RunError> {
    use std::os::unix::fs::PermissionsExt;
    let found = if name.contains('/') {
        Some(PathBuf::from(name))
    } else {
        std::env::var_os("PATH").and_then(|paths| {
            std::env::split_paths(&paths)
                .map(|folder| folder.join(name))
                .find(|path| path.is_file())
        })
    };
    let path = found
        .filter(|path| path.is_file())
        .ok_or_else(|| RunError::NoProgram(name.to_owned()))?;
    let path = std::fs::canonicalize(&path).map_err(|source| RunError::Io {
        what: format!("cannot find {}", path.display()),
        source,
    })?;
    let mode = std::fs::metadata(&path)
        .map(|data| data.permissions().mode())
        .unwrap_or(0);
    if mode & 0o111 == 0 {
        Err(RunError::NotExecutable(path))
    } else {
        Ok(path)
    }
}

fn choose_host(wanted: Host) -> Result<Host, RunError> {
    if wanted == Host::Emulated {
        return Ok(Host::Emulated);
    }
    match wormhole_monitor::probe() {
        KvmCaps::Linux => Ok(Host::Kvm),
        KvmCaps::Missing { why } | KvmCaps::PayloadOnly { why } => {
            if wanted == Host::Auto {
                eprintln!("wormhole: {why}; using the emulated host");
                Ok(Host::Emulated)
            } else {
                Err(RunError::Kvm(why))
            }
        }
    }
}

fn images() -> Result<PathBuf, RunError> {
    wormhole_images::default_folder().ok_or(RunError::NoImages)
}

/// The variables of this environment that CUDA programs and the frontend read.
fn forwarded_variables() -> Vec<(OsString, OsString)> {
    std::env::vars_os()
        .filter(|(name, _)| {
            let name = name.to_string_lossy();
            name.starts_with("CUDA_") || name == "WORMHOLE_LOG"
        })
        .collect()
}
