//! Opens devices of the NVIDIA driver.

use std::sync::Arc;
use std::time::Duration;

use wormhole_cuda_device::{CudaDevice, Options};
use wormhole_device::Device;
use wormhole_link::device::CudaChoice;

use super::Opened;

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
    })
}
