//! Needs of workers by the kind of their device: one file for each kind.

mod cpu;
mod cuda;
mod gpus;

use std::ffi::OsString;
use std::path::PathBuf;

use wormhole_link::device::{DeviceChoice, DeviceKind};
use wormhole_privileges::{Calls, FilterError};

pub use self::gpus::GpuError;
use crate::root::Steps;

/// Needs of the workers on one kind of device.
#[derive(Debug)]
pub struct Needs {
    /// Adds system calls to those of every worker.
    pub(crate) calls: fn(Calls) -> Result<Calls, FilterError>,
    /// Adds device files and directories of libraries to the root of every worker.
    pub(crate) root: fn(&mut Steps, files: &[PathBuf], libraries: &[PathBuf]),
    /// Finds the chosen devices on this system.
    pub find: fn(&DeviceChoice) -> Result<Found, GpuError>,
    /// Returns how many threads a worker on these devices has at most.
    pub threads: fn(&DeviceChoice) -> u64,
    /// True if RLIMIT_DATA can limit a worker's memory: false for a driver that reserves more address space than it
    /// uses.
    pub limits_memory: bool,
    /// True if the driver identifies processes by user and number. Workers of strangers then need a user each, and
    /// workers share memory by handles only in one PID namespace.
    pub identifies_processes: bool,
    /// True if NVML reports figures of the devices.
    pub has_figures: bool,
}

/// Chosen devices, as found on this system.
#[derive(Debug)]
pub struct Found {
    /// Devices as the worker names them.
    pub device: DeviceChoice,
    /// Device files that the worker needs.
    pub files: Vec<PathBuf>,
    /// Variables that hide other devices from the worker.
    pub environment: Vec<(OsString, OsString)>,
}

/// Returns the needs of workers on a kind of device.
pub fn needs(kind: DeviceKind) -> &'static Needs {
    match kind {
        DeviceKind::Cpu => &cpu::NEEDS,
        DeviceKind::Cuda => &cuda::NEEDS,
    }
}
