//! Choice of the devices that a backend executes on, as `run` and `backend start` take it.

use clap::Args;
use wormhole_link::device::DeviceChoice;

#[derive(Clone, Debug, Args)]
pub struct DeviceOption {
    /// The devices that execute: `cpu`, `cpu:N` for N devices of the CPU, or `cuda:N` for the machine's N-th GPU;
    /// several GPUs with commas between them, in the order in which programs see them. `cpu,check` looks for races and
    /// uninitialised memory in kernels' shared memory, and tells the program's standard error.
    #[arg(long, default_value = "cpu", value_parser = device)]
    pub device: String,
}

fn device(text: &str) -> Result<String, String> {
    let devices = text.parse::<DeviceChoice>();
    devices
        .map(|devices| devices.to_string())
        .map_err(|error| error.to_string())
}
