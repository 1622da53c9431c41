//! Opens devices that execute PTX on processors.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::Resource;
use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_device::Device;
use wormhole_link::device::CpuChoice;

use super::Opened;

pub(super) fn open(choice: &CpuChoice) -> Result<Opened, String> {
    let options = Options {
        check: choice.check,
        most: device_memory(),
        ..Options::default()
    };
    let devices = CpuDevice::open_several(&options, choice.count)
        .map_err(|error| wormhole_link::chain(&error))?;
    Ok(Opened {
        devices: devices
            .into_iter()
            .map(|device| Arc::new(device) as Arc<dyn Device>)
            .collect(),
        // The devices need the processors themselves.
        linger: Duration::ZERO,
    })
}

/// Returns the bytes that devices in this process's memory may use, if the supervisor has set
/// `RLIMIT_DATA`: two thirds of the limit. By default the limit is three quarters of the system's
/// memory, so this is half of it. The rest is for the window and the worker itself.
fn device_memory() -> Option<u64> {
    let limit = rustix::process::getrlimit(Resource::Data).current?;
    Some(limit / 3 * 2)
}
