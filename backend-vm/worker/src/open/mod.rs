//! Opens the devices of a worker: one file for each kind.

mod cpu;
mod cuda;

use std::sync::Arc;
use std::time::Duration;

use wormhole_device::Device;
use wormhole_link::device::{DeviceChoice, DeviceKind};
use wormhole_ring::transport::{self, Transport};

use crate::{WorkerError, chains, lanes, reserve_bands};

/// Gives up what a device of this kind needs no more once the worker's program has started. Returns the system calls that the
/// caller is to deny.
pub fn give_up(kind: DeviceKind) -> &'static [i64] {
    match kind {
        DeviceKind::Cpu => cpu::give_up(),
        DeviceKind::Cuda => &[],
    }
}

/// Returns whether the program rings the doorbell for each record.
pub fn is_rung_for_each_record() -> bool {
    let wanted = std::env::var(transport::VARIABLE);
    wanted.is_ok_and(|text| Transport::parse(&text) == Some(Transport::Doorbell))
}

/// Devices of a worker, opened.
#[derive(Debug)]
pub struct Opened {
    pub devices: Vec<Arc<dyn Device>>,
    pub tuning: Tuning,
}

/// Settings of an executor that depend on its devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tuning {
    /// Time for which the executor stays awake without work.
    pub linger: Duration,
    /// Threads that launch beside the executor.
    pub lanes: lanes::Plan,
    /// When launches go into chains.
    pub chains: chains::Plan,
}

/// Opens devices, after reserving the address bands.
///
/// # Errors
/// The bands are taken, or a device cannot be used.
pub fn open(choice: DeviceChoice) -> Result<Opened, WorkerError> {
    reserve_bands()?;
    let opened = match &choice {
        DeviceChoice::Cpu(choice) => cpu::open(choice),
        DeviceChoice::Cuda(choice) => cuda::open(choice),
    };
    opened.map_err(|reason| WorkerError::Device {
        device: choice,
        reason,
    })
}
