//! Starts a worker that can reach nothing but what it is given.
//!
//! Everything here is applied by the supervisor between `clone` and `exec`, so it holds against a worker
//! executable that is itself hostile: new PID, network, IPC, mount and UTS namespaces, a root file system
//! of read-only system libraries, no capabilities, another user, no new privileges, resource limits, a
//! system call filter and no descriptor that was not named. When the supervisor dies, so does the worker.
//!
//! Its memory and its tasks are limited by a cgroup of its own where the system has one to give, and so are its tenant's
//! and all workers' together (see [`Cgroups`]), and on the CPU device by a resource limit, which counts private memory only; the driver
//! reserves too much address space for one.
//!
//! As root the namespaces are made directly; otherwise inside a user namespace of their own. Of a GPU's workers root
//! makes one PID namespace for all ([`Processes`]).

mod cgroup;
mod child;
pub mod device;
mod processes;
mod root;
mod seccomp;
mod spawn;
mod standing;

pub use self::cgroup::{CgroupError, Cgroups, LEAST_MEMORY, Limit, Limits};
pub use self::processes::Processes;
pub use self::spawn::{
    Child, Command, Confinement, EXECUTION_LIMIT, Ending, Isolation, SpawnError, null_device, probe,
};
pub use wormhole_link::device::DeviceKind;
