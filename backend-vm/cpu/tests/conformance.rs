//! Runs the checks that every device must pass.

use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_device::conformance::{checks, peer_checks};

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

fn two_devices() -> [CpuDevice; 2] {
    let options = Options {
        memory: Some(256 << 20),
        ..Default::default()
    };
    let devices = CpuDevice::open_several(&options, 2).expect("open");
    devices.try_into().expect("two devices")
}

#[test]
fn every_check_holds_for_each_of_two_devices() {
    let failures: Vec<String> = [0, 1]
        .into_iter()
        .flat_map(|number| checks().into_iter().map(move |check| (number, check)))
        .filter_map(|(number, check)| {
            let devices = two_devices();
            let sentence = (check.run)(&devices[number]).err()?;
            Some(format!("{} (device {number}): {sentence}", check.name))
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_check_of_two_devices_holds() {
    let failures: Vec<String> = peer_checks()
        .iter()
        .filter_map(|check| {
            let [first, second] = two_devices();
            let sentence = (check.run)([&first, &second]).err()?;
            Some(format!("{}: {sentence}", check.name))
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
