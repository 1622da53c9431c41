//! Device descriptions that a worker sends to the supervisor, as text of facts.

use std::fmt::Write as _;

use wormhole_api::constants::device_attribute as attribute;
use wormhole_api::constants::peer_attribute::ACCESS_SUPPORTED;
use wormhole_device::Description;
use wormhole_ring::control::facts;

use super::devices::{Devices, SessionDevice};

/// Device attributes that NVML reports as well.
const ATTRIBUTES: [i32; 9] = [
    attribute::CLOCK_RATE,
    attribute::COMPUTE_MODE,
    attribute::ECC_ENABLED,
    attribute::PCI_BUS_ID,
    attribute::PCI_DEVICE_ID,
    attribute::GLOBAL_MEMORY_BUS_WIDTH,
    attribute::PCI_DOMAIN_ID,
    attribute::COMPUTE_CAPABILITY_MAJOR,
    attribute::COMPUTE_CAPABILITY_MINOR,
];

/// Largest number of characters of a name that NVML's buffer holds.
const NAME: usize = 95;

/// Returns the facts of all devices, with an empty line between devices.
pub fn text(devices: &Devices) -> String {
    let texts = devices.iter();
    let texts = texts.map(|device| one(device.describe()) + &peers(devices, device));
    texts.collect::<Vec<_>>().join("\n")
}

/// Returns the fact that lists the devices whose memory `own` reaches; empty for a single device.
fn peers(devices: &Devices, own: &SessionDevice) -> String {
    if devices.count() == 1 {
        return String::new();
    }
    let reached = devices.iter().filter(|peer| {
        *peer != own && own.peer_attribute(peer.as_peer(), ACCESS_SUPPORTED) == Ok(1)
    });
    let reached: Vec<String> = reached.map(|peer| peer.number().to_string()).collect();
    format!("{}={}\n", facts::PEERS, reached.join(" "))
}

fn one(device: &Description) -> String {
    let mut text = String::new();
    // A line break in the name would start another fact.
    let name: String = device
        .name
        .chars()
        .filter(|c| !c.is_control())
        .take(NAME)
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

    #[test]
    fn what_is_said_of_all_devices_fits_a_message() {
        use wormhole_ring::control::{MAX_FRAME, Message};

        use wormhole_link::device::MOST;

        let device = Description {
            name: "n".repeat(300),
            uuid: [0xff; 16],
            total_memory: u64::MAX,
            driver_version: i32::MIN,
            attributes: ATTRIBUTES.map(|id| (id, i32::MIN)).to_vec(),
            stream_priorities: (0, 0),
        };
        let numbers: Vec<String> = (1..MOST).map(|other| other.to_string()).collect();
        let peers = format!("{}={}\n", facts::PEERS, numbers.join(" "));
        let text = vec![one(&device) + &peers; MOST].join("\n");
        let message = Message::Ready {
            protocol_hash: 1,
            device: &text,
        };
        let encoded = message.encode(&mut [0; MAX_FRAME]);
        assert!(encoded.is_ok(), "{} bytes: {encoded:?}", text.len());
    }
}
