//! NVIDIA Management Library for guests: `libnvidia-ml.so.1` on a machine without a GPU and driver.
//!
//! A program sees its tenant's resources: the devices that `libcuda.so.1` enumerates, the device memory that the
//! tenant's processes have allocated, and those processes. It also reads the values that the host's NVML reports for the
//! whole device (temperature, clocks, utilization), and cannot change any of them.
//!
//! The first `nvmlInit` opens a separate control stream to the backend, which the supervisor serves without starting a
//! worker or mapping a window. The last `nvmlShutdown` closes it.
//!
//! The C functions are generated from `shared-ring/api/nvml.idl`, which declares each with its implementation class.
//!
//! Invariants:
//! - Before `nvmlInit` every call returns `NVML_ERROR_UNINITIALIZED`, except calls that need no device.
//! - Unavailable values are `NVML_ERROR_NOT_SUPPORTED`, never invented numbers.
//! - A forked child never writes to the stream of its parent.
//! - An unresponsive backend causes an error after a timeout, not a hang.

mod calls;
mod error;
mod exports;
mod host;
mod library;
mod runtime;
mod view;
