//! The supervisor's command line.

use std::collections::BTreeSet;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use wormhole_link::device::DeviceChoice;
use wormhole_link::operator::OperatorOptions;
use wormhole_link::process::keep_ended_children;
use wormhole_link::{arguments, chain};
use wormhole_sandbox::device::needs;

use crate::log::Log;
use crate::{Limits, Listener, Options, Quotas};

/// Serves tenants' guests with a device: accepts windows, opens control streams, runs a confined worker for
/// each guest process.
#[derive(Debug, Parser)]
#[command(
    version,
    mut_arg("tenant_user", |arg| arg.requires("listen")),
    mut_arg("trusted_tenants", |arg| arg.requires("listen"))
)]
struct Arguments {
    /// A descriptor that is one tenant's stream; the supervisor ends with it.
    #[arg(long, value_name = "N", required_unless_present = "listen")]
    fd: Option<RawFd>,
    /// A path for the Unix socket to accept tenants on.
    #[arg(long, value_name = "PATH")]
    listen: Option<PathBuf>,
    /// Devices that execute: cpu, cpu:N for N devices of the CPU, or cuda:N for the N-th GPU by PCI address, several
    /// with commas between them in the order in which programs see them.
    #[arg(long, default_value = "cpu")]
    device: DeviceChoice,
    /// Directories that hold worker executables.
    #[arg(long, value_name = "DIR", required = true, num_args = 1..)]
    workers: Vec<PathBuf>,
    /// Confinement of workers.
    #[arg(long, value_enum, default_value_t = Sandbox::Full)]
    sandbox: Sandbox,
    #[command(flatten)]
    operator: OperatorOptions,
}

const NAME: &str = "wormhole-supervisor";

/// Far longer than a driver takes to open a GPU that was idle for a while.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A guest sends its hello as soon as it is connected.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// A driver destroys a context within seconds.
const REAP_LIMIT: Duration = Duration::from_secs(60);

/// Least memory of a tenant among strangers, unless `--tenant-memory` names another: the parts of a
/// window that 64 processes use, their workers, and what a CPU device holds.
const TENANT_MEMORY: u64 = 512 << 20;

/// Returns the quotas, and the numbers of users and of tenants of each to divide the memory among: those that do not
/// trust each other.
fn quotas(arguments: &Arguments) -> (Quotas, (usize, usize)) {
    let (operator, default) = (&arguments.operator, Quotas::default());
    let quotas = Quotas {
        tenants_per_user: operator
            .tenants_per_user
            .unwrap_or(default.tenants_per_user),
        sessions: operator.sessions.unwrap_or(default.sessions),
        sessions_per_user: operator
            .sessions_per_user
            .unwrap_or(default.sessions_per_user),
        ..default
    };
    if arguments.listen.is_none() || operator.trusted_tenants {
        return (quotas, (1, 1));
    }
    let own = rustix::process::geteuid().as_raw();
    let users: BTreeSet<u32> = operator.tenant_user.iter().copied().chain([own]).collect();
    let quotas = match operator.tenant_memory {
        Some(_) => quotas,
        None => {
            let workers = (quotas.sessions, threads(arguments));
            let limits = Limits::of(operator.worker_memory, None, (1, 1), workers);
            let all = limits.memory.all;
            let least = operator.worker_memory.unwrap_or(0).max(TENANT_MEMORY);
            quotas.within_memory(all / users.len() as u64, least)
        }
    };
    (quotas, (users.len(), quotas.tenants_per_user))
}

/// Returns the threads that a worker has at most.
fn threads(arguments: &Arguments) -> u64 {
    (needs(arguments.device.kind()).threads)(&arguments.device)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Sandbox {
    /// With namespaces. If the system provides none, no worker starts.
    Full,
    /// Without namespaces if the system provides none; still with filter, limits and dropped
    /// privileges.
    Filter,
}

/// Runs the supervisor.
pub fn main() -> ExitCode {
    survive_the_file_size_limit();
    keep_ended_children();
    let filter = std::env::var("WORMHOLE_LOG").unwrap_or_else(|_| "warn".to_owned());
    // Without standard error there is no log.
    let writer = match Log::open() {
        Ok(log) => BoxMakeWriter::new(Arc::new(log)),
        Err(_) => BoxMakeWriter::new(std::io::sink),
    };
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .with_writer(writer)
        .with_target(false)
        .without_time()
        .with_ansi(false)
        .init();
    let arguments = match arguments::parse(NAME) {
        Ok(arguments) => arguments,
        Err(status) => return status,
    };
    match start(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(sentence) => {
            eprintln!("{NAME}: {sentence}");
            ExitCode::from(arguments::USAGE)
        }
    }
}

/// Makes writes beyond RLIMIT_FSIZE fail with an error instead of a signal, in workers as well: an
/// ignored signal stays ignored over execve(2).
fn survive_the_file_size_limit() {
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

fn start(arguments: Arguments) -> Result<(), String> {
    let (quotas, strangers) = quotas(&arguments);
    let limits = Limits::of(
        arguments.operator.worker_memory,
        arguments.operator.tenant_memory,
        strangers,
        (quotas.sessions, threads(&arguments)),
    );
    // The used parts of a window are memory of its tenant.
    let quotas = Quotas {
        window: (arguments.operator.window_limit).unwrap_or(limits.memory.tenant),
        ..quotas
    };
    let stream = arguments.fd.map(inherited).transpose()?;
    let listener = match &arguments.listen {
        Some(path) => {
            let listener = Listener::bind(path, &arguments.operator.tenant_user);
            Some(listener.map_err(|error| chain(&error))?)
        }
        None => None,
    };
    let place = listener.as_ref().map(|listener| listener.place().clone());
    let result = crate::run(Options {
        device: arguments.device,
        workers: arguments.workers,
        listener,
        stream,
        trusted_tenants: arguments.operator.trusted_tenants,
        without_namespaces: arguments.sandbox == Sandbox::Filter,
        limits,
        start_limit: START_LIMIT,
        hello_limit: HELLO_LIMIT,
        reap_limit: REAP_LIMIT,
        quotas,
    });
    result.map_err(|error| {
        // If the spawner was forked, it removes the socket itself.
        if let Some(place) = place {
            place.remove();
        }
        chain(&error)
    })
}

fn inherited(fd: RawFd) -> Result<OwnedFd, String> {
    // SAFETY: fcntl accepts any number.
    if fd < 3 || unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return Err(format!("descriptor {fd} is not open"));
    }
    // SAFETY: open, and passed to this process for this use.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
