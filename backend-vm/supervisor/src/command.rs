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
use wormhole_link::process::keep_ended_children;
use wormhole_link::{arguments, chain};
use wormhole_sandbox::LEAST_MEMORY;

use crate::log::Log;
use crate::{Limits, Listener, Options, Quotas};

/// Serves tenants' guests with a device: accepts windows, opens control streams, runs a confined worker for
/// each guest process.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// A descriptor that is one tenant's stream; the supervisor ends with it.
    #[arg(long, value_name = "N", required_unless_present = "listen")]
    fd: Option<RawFd>,
    /// A path for the Unix socket to accept tenants on.
    #[arg(long, value_name = "PATH")]
    listen: Option<PathBuf>,
    /// A user, by number, whose processes may attach over the socket, beside root and the supervisor's own user.
    #[arg(long, value_name = "UID", requires = "listen")]
    tenant_user: Vec<u32>,
    /// The tenants trust each other. They are then served although no cgroup is delegated to the supervisor, so that
    /// nothing limits their memory and processors. On a GPU the supervisor need not be root, and programs share memory by
    /// cuIpcGetMemHandle, with handles of the driver's that another tenant's worker could guess if it were taken over.
    #[arg(long, requires = "listen")]
    trusted_tenants: bool,
    /// Devices that execute: cpu, cpu:N for N devices of the CPU, or cuda:N for the N-th GPU by PCI address, several
    /// with commas between them in the order in which programs see them.
    #[arg(long, default_value = "cpu")]
    device: DeviceChoice,
    /// Directories that hold worker executables.
    #[arg(long, value_name = "DIR", required = true, num_args = 1..)]
    workers: Vec<PathBuf>,
    /// How workers are confined.
    #[arg(long, value_enum, default_value_t = Sandbox::Full)]
    sandbox: Sandbox,
    /// Memory that a worker may have, as in 4G: what the device holds in it on the CPU, and the window. As much as its
    /// tenant if not given. A cgroup of each worker's own limits it where the
    /// supervisor's own is delegated to it (systemd: Delegate=yes); elsewhere a resource limit does on the CPU
    /// device, for private memory, and nothing does with CUDA.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    worker_memory: Option<u64>,
    /// Memory that the workers of one tenant may have together, where there are cgroups. If not given, three quarters of
    /// the system's memory, or of the supervisor's own limit, which is what all workers may have together, divided by the
    /// tenants that there may be at the same time: --tenants-per-user for the supervisor's own user and each --tenant-user,
    /// but no more than have 512 MiB each, or --worker-memory if that is more. Further ones are refused.
    /// With --trusted-tenants each may have all of it.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    tenant_memory: Option<u64>,
    /// Tenants that one user may have over the socket at the same time.
    #[arg(long, value_name = "N", default_value_t = Quotas::default().tenants_per_user)]
    tenants_per_user: usize,
    /// Sessions, which are CUDA processes, that one tenant may have at the same time. Where there are cgroups, their
    /// workers may have 5,120 threads for each, but one of several tenants at most half of the threads that all workers
    /// may have: three quarters of the system's limit.
    #[arg(long, value_name = "N", default_value_t = Quotas::default().sessions)]
    sessions: usize,
    /// Sessions that all tenants of one user may have at the same time.
    #[arg(long, value_name = "N", default_value_t = Quotas::default().sessions_per_user)]
    sessions_per_user: usize,
    /// How large a tenant's window may be, as in 64G. 1T if not given.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    window_limit: Option<u64>,
}

const NAME: &str = "wormhole-supervisor";

/// Far longer than a driver takes to open a GPU that was idle for a while.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A guest sends its hello as soon as it is connected.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// A driver destroys a context within seconds.
const REAP_LIMIT: Duration = Duration::from_secs(60);

fn memory(text: &str) -> Result<u64, String> {
    let units = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];
    let (digits, shift) = units
        .iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(*unit)?, *shift)))
        .unwrap_or((text, 0));
    digits
        .parse::<u64>()
        .ok()
        .and_then(|count| count.checked_mul(1u64 << shift))
        .filter(|bytes| *bytes >= LEAST_MEMORY)
        .ok_or_else(|| format!("write a size such as 4G, at least {}M", LEAST_MEMORY >> 20))
}

/// Least memory of a tenant among strangers, unless `--tenant-memory` names another: a default
/// window, its workers, and what a CPU device holds.
const TENANT_MEMORY: u64 = 512 << 20;

/// Returns the quotas, and the number of tenants to divide the memory among: those that do not
/// trust each other.
fn quotas(arguments: &Arguments) -> (Quotas, usize) {
    let quotas = Quotas {
        tenants_per_user: arguments.tenants_per_user,
        tenant_memory: None,
        sessions: arguments.sessions,
        sessions_per_user: arguments.sessions_per_user,
        window: arguments.window_limit.unwrap_or(Quotas::default().window),
    };
    if arguments.listen.is_none() || arguments.trusted_tenants {
        return (quotas, 1);
    }
    let own = rustix::process::geteuid().as_raw();
    let users: BTreeSet<u32> = arguments.tenant_user.iter().copied().chain([own]).collect();
    let quotas = match arguments.tenant_memory {
        Some(_) => quotas,
        None => {
            let all = Limits::of(arguments.worker_memory, None, 1, arguments.sessions)
                .memory
                .all;
            let least = arguments.worker_memory.unwrap_or(0).max(TENANT_MEMORY);
            quotas.within_memory(all / users.len() as u64, least)
        }
    };
    (quotas, users.len().saturating_mul(quotas.tenants_per_user))
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
        arguments.worker_memory,
        arguments.tenant_memory,
        strangers,
        arguments.sessions,
    );
    let stream = arguments.fd.map(inherited).transpose()?;
    let listener = match &arguments.listen {
        Some(path) => {
            let listener = Listener::bind(path, &arguments.tenant_user);
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
        trusted_tenants: arguments.trusted_tenants,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_read_with_its_unit() {
        assert_eq!(memory("4G"), Ok(4 << 30));
        assert_eq!(memory("100M"), Ok(100 << 20));
        assert_eq!(memory("100000000"), Ok(100_000_000));
        for wrong in ["", "G", "4GG", "-4G", "4 G", "4g", "63M", "99999999999T"] {
            assert!(memory(wrong).is_err(), "{wrong}");
        }
    }
}
