//! The checks that every device must pass.

use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_device::Device;
use wormhole_device::conformance::checks;

#[test]
fn every_check_of_the_conformance_suite_holds() {
    let failures: Vec<String> = checks()
        .iter()
        .filter_map(|check| {
            let device = CpuDevice::open(&Options {
                memory: Some(256 << 20),
            })
            .expect("open");
            device.bind_thread().expect("bind");
            let sentence = (check.run)(&device).err()?;
            Some(format!("{}: {sentence}", check.name))
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
