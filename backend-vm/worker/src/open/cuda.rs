//! Opens devices of the NVIDIA driver.

use std::sync::Arc;
use std::time::Duration;

use wormhole_cuda_device::{CudaDevice, Options};
use wormhole_device::Device;
use wormhole_link::device::CudaChoice;

use super::Opened;
use crate::lanes::Plan;

pub(super) fn open(choice: &CudaChoice) -> Result<Opened, String> {
    wormhole_cuda_device::reserve_bands().map_err(|error| wormhole_link::chain(&error))?;
    wormhole_cuda_device::capture_output().map_err(|error| wormhole_link::chain(&error))?;
    let open = |&ordinal| {
        let options = Options {
            ordinal,
            ..Default::default()
        };
        match CudaDevice::open(&options) {
            Ok(device) => Ok(Arc::new(device) as Arc<dyn Device>),
            Err(error) => Err(wormhole_link::chain(&error)),
        }
    };
    Ok(Opened {
        devices: choice.0.iter().map(open).collect::<Result<_, _>>()?,
        linger: Duration::from_millis(2),
        lanes: lanes(),
    })
}

/// Returns the plan of the session's lanes. With one connection the device executes all streams in the order of their
/// submission, on which programs rely that ask for it.
fn lanes() -> Plan {
    match std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS") {
        Some(connections) if connections == "1" => Plan::none(),
        _ => Plan::affordable(),
    }
}
