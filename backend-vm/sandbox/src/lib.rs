//! Starts a worker that can reach only the files and descriptors that it is given.
//!
//! The child confines itself between `clone` and `exec`, so that the confinement holds against a hostile worker
//! executable: new PID, network, IPC, mount and UTS namespaces, a root file system of read-only system libraries, no
//! capabilities, another user, no new privileges, resource limits, a system call filter, and no descriptor that was not
//! named. The worker dies with its supervisor.
//!
//! One cgroup limits the memory and the tasks of a worker, and others those of its tenant and of all workers, where
//! cgroups are delegated ([`Cgroups`]). On the CPU device RLIMIT_DATA limits a worker's private memory as well. On a GPU it
//! cannot, since the driver reserves too much address space.
//!
//! Root makes the namespaces directly, another user inside a user namespace. The workers of a GPU share one PID
//! namespace where the supervisor is root ([`Processes`]).

mod cgroup;
mod charge;
mod child;
pub mod device;
mod processes;
mod root;
mod seccomp;
mod spawn;
mod standing;

pub use wormhole_link::device::DeviceKind;

pub use self::cgroup::{Cgroups, Limit, Limits, Place};
pub use self::child::become_own_user;
pub use self::processes::Processes;
pub use self::spawn::{
    Child, Command, Confinement, EXECUTION_LIMIT, Ending, Isolation, SpawnError, null_device, probe,
};
