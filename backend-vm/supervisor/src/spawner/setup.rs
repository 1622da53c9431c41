//! Checks and preparation before the spawner reports that workers can be started.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use wormhole_link::device::DeviceChoice;
use wormhole_sandbox::device::{Needs, needs};
use wormhole_sandbox::{Cgroups, Confinement, Isolation, Limits, Processes};

use super::libraries;
use crate::environment;
use crate::workers::{Executables, ExecutablesError};

/// Variable of the loader: folders of libraries beside the system's.
const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";

/// Trust between the tenants of a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tenants {
    /// There is one tenant.
    One,
    /// The tenants trust each other.
    Trusting,
    /// A tenant may have compromised its worker and attack the others.
    Strangers,
}

/// Options for starting workers.
#[derive(Debug)]
pub struct Setup {
    pub device: DeviceChoice,
    /// Directories of worker executables.
    pub workers: Vec<PathBuf>,
    pub tenants: Tenants,
    /// Start workers even if this system provides no namespaces to confine them.
    pub without_namespaces: bool,
    pub limits: Limits,
    /// Time within which workers must end after the supervisor has.
    pub reap_limit: Duration,
}

/// Reason why no worker can be started.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error("workers cannot be confined on this system: {0}")]
    Sandbox(String),
    #[error(
        "workers cannot be confined on this system by more than a filter, which keeps tenants who are strangers not apart: \
         {0}; if they trust each other, say --trusted-tenants"
    )]
    Filter(String),
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

/// Prepared parameters of workers' starts.
#[derive(Debug)]
pub struct Prepared {
    /// Device of the workers, or the reason why none can be started.
    pub device: Result<DeviceChoice, String>,
    pub executables: Executables,
    /// Environment of every worker, before its guest's.
    pub environment: Vec<(OsString, OsString)>,
    pub confinement: Confinement,
}

impl Setup {
    /// # Errors
    /// Workers cannot be confined or found.
    pub fn prepare(self) -> Result<Prepared, SetupError> {
        let kind = self.device.kind();
        let needs = needs(kind);
        if needs.identifies_processes && self.tenants == Tenants::Strangers && !is_root() {
            return Err(SetupError::Users);
        }
        let isolation = match wormhole_sandbox::probe(kind) {
            Ok(isolation) => isolation,
            Err(reason) if self.without_namespaces && self.tenants == Tenants::Strangers => {
                return Err(SetupError::Filter(reason));
            }
            Err(reason) if self.without_namespaces => {
                tracing::warn!("workers run without namespaces: {reason}");
                Isolation::None
            }
            Err(reason) => return Err(SetupError::Sandbox(reason)),
        };
        let mut environment = environment::inherited();
        let library_directories = std::env::var_os(LIBRARY_PATH)
            .map(|path| libraries::folders(&path))
            .unwrap_or_default();
        if let Some(path) = libraries::search_path(&library_directories) {
            environment.push((LIBRARY_PATH.into(), path));
        }
        let (device, device_files) = match (needs.find)(&self.device) {
            Ok(found) => {
                environment.extend(found.environment);
                (Ok(found.device), found.files)
            }
            Err(error) => (Err(wormhole_link::chain(&error)), Vec::new()),
        };
        let (memory, threads) = (self.limits.memory.worker, self.limits.tasks.worker);
        let strangers = self.tenants == Tenants::Strangers;
        let cgroups = match Cgroups::prepare(self.limits) {
            Ok(cgroups) => {
                if let Err(error) = cgroups.check_processors() {
                    let reason = wormhole_link::chain(&error);
                    if strangers {
                        return Err(SetupError::Cgroups(reason));
                    }
                    tracing::warn!("tenants have no shares of the processors: {reason}");
                }
                Some(Arc::new(cgroups))
            }
            Err(error) => {
                let reason = wormhole_link::chain(&error);
                if strangers {
                    return Err(SetupError::Cgroups(reason));
                }
                self.tell_unlimited(&reason);
                None
            }
        };
        if cgroups.is_some() {
            let Limits { memory, tasks, .. } = self.limits;
            let worker = match self.limits.by_worker {
                true => memory.worker,
                false => memory.tenant,
            };
            let [worker, tenant, all] =
                [worker, memory.tenant, memory.all].map(|bytes| bytes >> 20);
            tracing::info!(
                "by cgroups a worker may have {worker} MiB of memory, a tenant {tenant} MiB, all workers {all} MiB; and \
                 {}, {} and {} threads",
                tasks.worker,
                tasks.tenant,
                tasks.all
            );
        }
        let confinement = Confinement {
            isolation,
            processes: processes(needs, isolation, self.tenants),
            kind,
            device_files,
            memory,
            threads,
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

    /// Logs how workers' memory is limited without cgroups: as a warning if tenants depend on it.
    fn tell_unlimited(&self, reason: &str) {
        let mebibytes = self.limits.memory.worker >> 20;
        let limit = if needs(self.device.kind()).limits_memory {
            format!("a worker may have {mebibytes} MiB of private memory, by a resource limit")
        } else {
            "workers' memory is not limited".to_owned()
        };
        if self.tenants == Tenants::Trusting {
            tracing::warn!("{limit}; a tenant's memory and processors are not limited: {reason}");
        } else {
            tracing::info!("{limit}: {reason}");
        }
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns the PID namespace that all workers share, if the device's driver identifies processes by
/// number and each worker has a user of its own. With it programs share memory by
/// `cuIpcGetMemHandle`. The driver's handle contains a process number, counters and sizes: any
/// process on the GPU that guesses them opens the memory (shown on an H200 with driver 580). With
/// strangers, each worker therefore has a namespace of its own, in which the device offers no such
/// handles.
fn processes(needs: &Needs, isolation: Isolation, tenants: Tenants) -> Option<Arc<Processes>> {
    let numbered = needs.identifies_processes && isolation == Isolation::Namespaces;
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

#[cfg(test)]
mod tests {
    use wormhole_link::device::DeviceKind;

    use super::*;
    use crate::alone::alone;

    #[test]
    fn workers_of_strangers_on_a_gpu_share_no_process_numbers() {
        if !is_root() {
            eprintln!("skipped: only root makes PID namespaces");
            return;
        }
        let _alone = alone();
        let of = |kind, tenants| processes(needs(kind), Isolation::Namespaces, tenants);
        assert!(of(DeviceKind::Cuda, Tenants::Strangers).is_none());
        // Namespaces can be made here.
        assert!(of(DeviceKind::Cuda, Tenants::Trusting).is_some());
        assert!(of(DeviceKind::Cuda, Tenants::One).is_some());
        assert!(of(DeviceKind::Cpu, Tenants::Trusting).is_none());
    }
}
