//! The supervisor's executable.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use wormhole_backend::chain;
use wormhole_backend::device::DeviceChoice;
use wormhole_backend::supervisor::{self, Options};

/// Serves tenants' guests with a device: accepts windows and control streams, runs a confined worker for
/// each guest process.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// A descriptor that is one tenant's stream; the supervisor ends with it.
    #[arg(long, value_name = "N", required_unless_present = "listen")]
    fd: Option<RawFd>,
    /// A Unix socket to accept tenants on.
    #[arg(long, value_name = "PATH")]
    listen: Option<PathBuf>,
    /// What to execute on: cpu, or cuda:N for the N-th GPU by PCI address.
    #[arg(long, default_value = "cpu")]
    device: DeviceChoice,
    /// Directories that hold worker executables.
    #[arg(long, value_name = "DIR", required = true, num_args = 1..)]
    workers: Vec<PathBuf>,
    /// How workers are confined.
    #[arg(long, value_enum, default_value_t = Sandbox::Full)]
    sandbox: Sandbox,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Sandbox {
    /// With namespaces; where the system has none to give, nothing is started.
    Full,
    /// Where the system has no namespaces to give, with the rest: system call filter, limits, privileges.
    Filter,
}

fn main() -> ExitCode {
    let filter = std::env::var("WORMHOLE_LOG").unwrap_or_else(|_| "warn".to_owned());
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .with_writer(std::io::stderr)
        .with_target(false)
        .without_time()
        .with_ansi(false)
        .init();
    match start(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(sentence) => {
            eprintln!("wormhole-supervisor: {sentence}");
            ExitCode::from(2)
        }
    }
}

fn start(arguments: Arguments) -> Result<(), String> {
    let stream = arguments.fd.map(inherited).transpose()?;
    let listener = match &arguments.listen {
        Some(path) => Some(listen(path)?),
        None => None,
    };
    let result = supervisor::run(Options {
        device: arguments.device,
        workers: arguments.workers,
        listener,
        stream,
        without_namespaces: arguments.sandbox == Sandbox::Filter,
    });
    if let Some(path) = &arguments.listen {
        let _ = std::fs::remove_file(path);
    }
    result.map_err(|error| chain(&error))
}

fn inherited(fd: RawFd) -> Result<OwnedFd, String> {
    // SAFETY: asks about a number, whatever it is.
    if fd < 3 || unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return Err(format!("descriptor {fd} is not open"));
    }
    // SAFETY: open, and given to this process for this use.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A listener at `path`, in place of a socket that nobody listens on any more.
fn listen(path: &PathBuf) -> Result<UnixListener, String> {
    let failed = |error: std::io::Error| format!("cannot listen on {}: {error}", path.display());
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            if std::os::unix::net::UnixStream::connect(path).is_ok() {
                return Err(format!("another process listens on {}", path.display()));
            }
            std::fs::remove_file(path).map_err(failed)?;
            UnixListener::bind(path).map_err(failed)?
        }
        other => other.map_err(failed)?,
    };
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}
