//! What a worker tells the supervisor of its devices.

use std::fmt::Write as _;
use std::sync::Arc;

use wormhole_device::{Description, Device};
use wormhole_ring::control::facts;

/// The `CUdevice_attribute`s that NVML asks for as well: CLOCK_RATE, COMPUTE_MODE, ECC_ENABLED, PCI_BUS_ID,
/// PCI_DEVICE_ID, GLOBAL_MEMORY_BUS_WIDTH, PCI_DOMAIN_ID and the compute capability.
const ATTRIBUTES: [i32; 9] = [13, 20, 32, 33, 34, 37, 50, 75, 76];

/// What a device, or each of several, says of itself.
pub fn all(device: &dyn Device) -> Vec<&Description> {
    match device.members() {
        [] => vec![device.describe()],
        members => members.iter().map(|member| member.describe()).collect(),
    }
}

/// The devices in facts, an empty line between them.
pub fn text(device: &dyn Device) -> String {
    let texts = all(device).into_iter().enumerate();
    let texts = texts.map(|(number, described)| one(described) + &peers(device.members(), number));
    texts.collect::<Vec<_>>().join("\n")
}

/// Whose memory a device of several reaches.
fn peers(members: &[Arc<dyn Device>], number: usize) -> String {
    /// `CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED`.
    const ACCESS_SUPPORTED: u32 = 2;
    let mut text = String::new();
    for (other, peer) in members.iter().enumerate() {
        let reached = |own: &Arc<dyn Device>| {
            other != number && own.peer_attribute(peer.as_peer(), ACCESS_SUPPORTED) == Ok(1)
        };
        if members.get(number).is_some_and(reached) {
            let _ = writeln!(text, "{}={other}", facts::PEER);
        }
    }
    text
}

fn one(device: &Description) -> String {
    let mut text = String::new();
    // A line break in the name would begin another fact.
    let name: String = device
        .name
        .chars()
        .filter(|c| !c.is_control())
        .take(200)
        .collect();
    let uuid: String = device
        .uuid
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let _ = writeln!(text, "{}={name}", facts::NAME);
    let _ = writeln!(text, "{}={uuid}", facts::UUID);
    let _ = writeln!(text, "{}={}", facts::TOTAL_MEMORY, device.total_memory);
    let _ = writeln!(text, "{}={}", facts::CUDA_VERSION, device.driver_version);
    for (id, value) in &device.attributes {
        if ATTRIBUTES.contains(id) {
            let _ = writeln!(text, "{}{id}={value}", facts::ATTRIBUTE);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_adds_no_facts() {
        let device = Description {
            name: "GPU\nmemory.total=1".to_owned(),
            uuid: [0xab; 16],
            total_memory: 7,
            driver_version: 13_000,
            attributes: vec![(33, 4), (1, 1024)],
            stream_priorities: (0, 0),
        };
        let text = one(&device);
        assert_eq!(facts::get(&text, facts::NAME), Some("GPUmemory.total=1"));
        assert_eq!(facts::number(&text, facts::TOTAL_MEMORY), Some(7));
        assert_eq!(
            facts::get(&text, facts::UUID),
            Some("ab".repeat(16).as_str())
        );
        assert_eq!(facts::number(&text, "attribute.33"), Some(4));
        assert_eq!(facts::get(&text, "attribute.1"), None);
    }
}
