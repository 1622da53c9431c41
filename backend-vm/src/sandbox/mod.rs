//! Starts a worker that can reach nothing but what it is given.
//!
//! Everything here is applied by the supervisor between `clone` and `exec`, so it holds against a worker
//! executable that is itself hostile: new PID, network, IPC, mount and UTS namespaces, a root file system
//! of read-only system libraries, no capabilities, another user, no new privileges, resource limits, a
//! system call filter and no descriptor that was not named. When the supervisor dies, so does the worker.
//!
//! As root the namespaces are made directly; otherwise inside a user namespace of their own.

mod child;
mod gpu;
mod root;
mod seccomp;
mod spawn;

pub use self::gpu::{Gpu, GpuError};
pub use self::seccomp::Profile;
pub(crate) use self::spawn::null_device;
pub use self::spawn::{Child, Command, Confinement, Ending, Isolation, SpawnError, probe};
