//! Runs the checks that every device must pass.

use std::sync::Arc;

use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_device::conformance::{checks, peer_checks};
use wormhole_device::{Device, DeviceSet};

#[test]
fn every_check_of_the_conformance_suite_holds() {
    let failures: Vec<String> = checks()
        .iter()
        .filter_map(|check| {
            let device = CpuDevice::open(&Options {
                memory: Some(256 << 20),
                ..Default::default()
            })
            .expect("open");
            let sentence = (check.run)(&device).err()?;
            Some(format!("{}: {sentence}", check.name))
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Runs all checks on one of two devices, and the checks between devices.
#[test]
fn every_check_holds_for_one_of_two_devices() {
    let failures: Vec<String> = checks()
        .iter()
        .chain(&peer_checks())
        .filter_map(|check| {
            let options = Options {
                memory: Some(256 << 20),
                ..Default::default()
            };
            let devices = CpuDevice::open_several(&options, 2).expect("open");
            let devices = devices.into_iter();
            let devices = devices.map(|device| Arc::new(device) as Arc<dyn Device>);
            let device = DeviceSet::new(devices.collect());
            let sentence = (check.run)(&device).err()?;
            Some(format!("{}: {sentence}", check.name))
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
