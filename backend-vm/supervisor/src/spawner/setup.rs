//! What the spawner finds out before it says that workers can be started.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use wormhole_link::device::DeviceChoice;
use wormhole_sandbox::{
    Cgroups, Confinement, GpuError, Gpus, Isolation, MemoryLimits, Processes, Profile,
};

use crate::environment;
use crate::workers::{Executables, ExecutablesError};

/// How the tenants of a supervisor stand to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tenants {
    /// There is one.
    One,
    /// They trust each other.
    Trusting,
    /// One may have taken its worker over and attack the others.
    Strangers,
}

/// What workers are to be.
#[derive(Debug)]
pub struct Setup {
    pub device: DeviceChoice,
    /// Directories of worker executables.
    pub workers: Vec<PathBuf>,
    pub tenants: Tenants,
    /// Start workers although this system lets nobody confine them with namespaces.
    pub without_namespaces: bool,
    pub memory: MemoryLimits,
    /// How long workers may take to end when the supervisor has ended.
    pub reap_limit: Duration,
}

/// Why no worker can be started.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error("workers cannot be confined on this system: {0}")]
    Sandbox(String),
    #[error(
        "tenants who are strangers cannot be served, since nothing would limit their memory and processors: {0} (systemd: \
         Delegate=yes); if they trust each other, say --trusted-tenants"
    )]
    Cgroups(String),
    #[error(
        "tenants on a GPU are kept apart by a user for each worker, which only root can give: run the supervisor as root, \
         or, if all tenants trust each other, with --trusted-tenants"
    )]
    Users,
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
        if (profile, self.tenants, is_root()) == (Profile::Cuda, Tenants::Strangers, false) {
            return Err(SetupError::Users);
        }
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
        let memory = self.memory.worker;
        let cgroups = match Cgroups::prepare(self.memory) {
            Ok(cgroups) => Some(Arc::new(cgroups)),
            Err(error) => {
                let reason = wormhole_link::chain(&error);
                if self.tenants == Tenants::Strangers {
                    return Err(SetupError::Cgroups(reason));
                }
                self.tell_unlimited(&reason);
                None
            }
        };
        if cgroups.is_some() {
            let [worker, tenant, all] =
                [memory, self.memory.tenant, self.memory.all].map(|bytes| bytes >> 20);
            tracing::info!(
                "by cgroups a worker may have {worker} MiB of memory, a tenant {tenant} MiB, all workers {all} MiB"
            );
        }
        let confinement = Confinement {
            isolation,
            processes: processes(profile, isolation, self.tenants),
            profile,
            device_files,
            memory,
            cgroups,
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

    /// How workers' memory is limited without cgroups: said aloud where tenants depend on it.
    fn tell_unlimited(&self, reason: &str) {
        let mebibytes = self.memory.worker >> 20;
        let limit = match self.device.profile() {
            Profile::Cpu => {
                format!("a worker may have {mebibytes} MiB of private memory, by a resource limit")
            }
            Profile::Cuda => "workers' memory is not limited".to_owned(),
        };
        if self.tenants == Tenants::Trusting {
            tracing::warn!("{limit}, tenants' not at all, nor their processors: {reason}");
        } else {
            tracing::info!("{limit}: {reason}");
        }
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

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The PID namespace of all workers, where the device's driver tells processes by their numbers and each worker has a
/// user of its own. With it programs share memory by `cuIpcGetMemHandle`. The driver's handle holds a process number,
/// counters and sizes: any process on the GPU that guesses them opens the memory (shown on an H200 with driver 580).
/// Strangers therefore have a namespace for each worker, in which the device offers no such handles.
fn processes(profile: Profile, isolation: Isolation, tenants: Tenants) -> Option<Arc<Processes>> {
    let numbered = (profile, isolation) == (Profile::Cuda, Isolation::Namespaces);
    if !numbered || tenants == Tenants::Strangers || !is_root() {
        return None;
    }
    let made = Processes::new().inspect_err(|error| {
        tracing::warn!(
            "programs share no memory by cuIpcGetMemHandle, since workers have no numbers: {error}"
        );
    });
    made.ok().map(Arc::new)
}
