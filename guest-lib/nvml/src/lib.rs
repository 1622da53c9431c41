//! The NVIDIA Management Library of guests: `libnvidia-ml.so.1` where there is no GPU and no driver.
//!
//! A program sees what its tenant has: the devices that `libcuda.so.1` shows, the memory that the tenant's processes
//! hold of them, and those processes. Of the host's device it sees what the host's NVML says of the whole (its
//! temperature, its clocks, its load), and changes nothing.
//!
//! The first `nvmlInit` opens a control stream of its own to the backend, on which the supervisor answers; no worker is
//! started and no window mapped. The last `nvmlShutdown` closes it.
//!
//! The C functions are generated from `shared-ring/api/nvml.idl`, where each is declared with what becomes of it.
//!
//! Invariants:
//! - Every call of a process that has not initialized the library is `NVML_ERROR_UNINITIALIZED`, but for those that
//!   need no device.
//! - What nobody can tell is `NVML_ERROR_NOT_SUPPORTED`, never a made-up number.
//! - A forked child never writes to the stream of its parent.
//! - A backend that does not answer is an error after some seconds, not a hang.

mod backend;
mod calls;
mod error;
mod exports;
mod host;
mod library;
mod runtime;
mod view;
