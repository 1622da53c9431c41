//! Opens devices of the NVIDIA driver.

use std::sync::Arc;
use std::time::Duration;

use wormhole_cuda_device::{CudaDevice, Options};
use wormhole_device::Device;
use wormhole_link::device::CudaChoice;

use super::{Opened, Tuning};
use crate::{chains, lanes};

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
        tuning: Tuning {
            linger: Duration::from_millis(2),
            lanes: lanes(),
            chains: chains(),
        },
    })
}

/// Returns the plan of the session's lanes. With one connection the device executes all streams in the order of their
/// submission, on which programs rely that ask for it.
fn lanes() -> lanes::Plan {
    match has_one_connection() {
        true => lanes::Plan::none(),
        false => lanes::Plan::affordable(),
    }
}

fn has_one_connection() -> bool {
    std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|number| is_one(&number))
}

/// Returns the plan of the session's chains. Kernels of a graph have the priority of the stream that it is launched on, unless
/// a variable of the driver's says otherwise.
fn chains() -> chains::Plan {
    let by_node = std::env::var_os("CUDA_GRAPHS_USE_NODE_PRIORITY");
    if has_one_connection() || by_node.is_some_and(|value| value != "0") {
        chains::Plan::Never
    } else {
        chains::Plan::wanted(chains::Plan::Measured)
    }
}

/// Returns whether a text begins with the number 1, decimal or hexadecimal, as C reads it.
fn is_one(text: &str) -> bool {
    let text = text.trim_start();
    let text = text.strip_prefix('+').unwrap_or(text);
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let rest = digits.trim_start_matches('0').strip_prefix('1');
    rest.is_some_and(|rest| !rest.starts_with(|next: char| next.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_connection_is_known_however_it_is_written() {
        for one in ["1", "01", " 1", "+1", "1 ", "0x1", "1.0", "1%"] {
            assert!(is_one(one), "{one:?}");
        }
        for other in ["", "0", "8", "10", "1a", "0x10", "-1", "x1", "32"] {
            assert!(!is_one(other), "{other:?}");
        }
    }
}
