//! What the spawner finds out before it says that workers can be started.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use wormhole_link::device::DeviceChoice;
use wormhole_sandbox::{Cgroups, Confinement, GpuError, Gpus, Isolation, Processes, Profile};

use crate::environment;
use crate::workers::{Executables, ExecutablesError};

/// What workers are to be.
#[derive(Debug)]
pub struct Setup {
    pub device: DeviceChoice,
    /// Directories of worker executables.
    pub workers: Vec<PathBuf>,
    /// Start workers although this system lets nobody confine them with namespaces.
    pub without_namespaces: bool,
    /// Bytes of memory that a worker may have.
    pub worker_memory: u64,
}

/// Why no worker can be started.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error("workers cannot be confined on this system: {0}")]
    Sandbox(String),
    #[error(transparent)]
    Executables(#[from] ExecutablesError),
}

/// What workers are started with.
#[derive(Debug)]
pub struct Prepared {
    /// What workers are started on, or why none can be.
    pub device: Result<DeviceChoice, String>,
    pub executables: Executables,
    /// The environment of every worker, before its guest's.
    pub environment: Vec<(OsString, OsString)>,
    pub confinement: Confinement,
}

impl Setup {
    /// # Errors
    /// Workers cannot be confined or found.
    pub fn prepare(self) -> Result<Prepared, SetupError> {
        let profile = self.device.profile();
        let isolation = match wormhole_sandbox::probe(profile) {
            Ok(isolation) => isolation,
            Err(reason) if self.without_namespaces => {
                tracing::warn!("workers run without namespaces: {reason}");
                Isolation::None
            }
            Err(reason) => return Err(SetupError::Sandbox(reason)),
        };
        let mut environment = environment::inherited();
        let library_directories = environment
            .iter()
            .filter(|(name, _)| name == "LD_LIBRARY_PATH")
            .flat_map(|(_, value)| std::env::split_paths(value).collect::<Vec<_>>())
            .collect();
        let (device, device_files) = match shown(self.device.clone(), &mut environment) {
            Ok((device, files)) => (Ok(device), files),
            Err(error) => (Err(wormhole_link::chain(&error)), Vec::new()),
        };
        let memory = self.worker_memory;
        let confinement = Confinement {
            isolation,
            processes: processes(profile, isolation),
            profile,
            device_files,
            memory,
            cgroups: cgroups(profile, memory),
            library_directories,
            execution_limit: wormhole_sandbox::EXECUTION_LIMIT,
        };
        let executables = Executables::find(&self.workers, &confinement)?;
        tracing::debug!(
            "device {}, protocols {}, isolation {isolation:?}",
            self.device,
            executables.names()
        );
        Ok(Prepared {
            device,
            executables,
            environment,
            confinement,
        })
    }
}

/// What a worker for `device` calls it, the device files it needs, and in `environment` what shows it no
/// others. Without a driver there is nothing to show: the worker will say what is missing.
fn shown(
    device: DeviceChoice,
    environment: &mut Vec<(OsString, OsString)>,
) -> Result<(DeviceChoice, Vec<PathBuf>), GpuError> {
    let DeviceChoice::Cuda(ordinals) = &device else {
        return Ok((device, Vec::new()));
    };
    Ok(match Gpus::find(ordinals)? {
        Some(gpus) => {
            environment.extend(gpus.environment());
            (DeviceChoice::Cuda(gpus.ordinals()), gpus.files())
        }
        None => (device, Vec::new()),
    })
}

/// Cgroups for workers, where there are any; and one line in the log on how their memory is limited.
fn cgroups(profile: Profile, memory: u64) -> Option<Arc<Cgroups>> {
    let mebibytes = memory >> 20;
    let reason = match Cgroups::prepare(memory) {
        Ok(cgroups) => {
            tracing::info!("a worker may have {mebibytes} MiB of memory, by its cgroup");
            return Some(Arc::new(cgroups));
        }
        Err(error) => wormhole_link::chain(&error),
    };
    match profile {
        Profile::Cpu => tracing::info!(
            "a worker may have {mebibytes} MiB of private memory, by a resource limit: {reason}"
        ),
        Profile::Cuda => tracing::info!("workers' memory is not limited: {reason}"),
    }
    None
}

/// The PID namespace of all workers, where the device's driver tells processes by their numbers and each worker has a
/// user of its own.
fn processes(profile: Profile, isolation: Isolation) -> Option<Arc<Processes>> {
    // SAFETY: it takes nothing and cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    if (profile, isolation, root) != (Profile::Cuda, Isolation::Namespaces, true) {
        return None;
    }
    let made = Processes::new().inspect_err(|error| {
        tracing::warn!(
            "programs share no memory by cuIpcGetMemHandle, since workers have no numbers: {error}"
        );
    });
    made.ok().map(Arc::new)
}
