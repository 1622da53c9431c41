//! The runtime's consistency check: the driver proves that it sees the same process, tables and devices.
//!
//! Key, constants and the order of the inputs are as ZLUDA (version 5, `dark_api/src/lib.rs`) publishes
//! them; the digest is HMAC (RFC 2104) over MD2 (RFC 1319).

use hmac::{KeyInit, Mac, SimpleHmac};
use md2::Md2;

const KEY: [u8; 16] = [
    0x14, 0x6A, 0xDD, 0xAE, 0x53, 0xA9, 0xA7, 0x52, 0xAA, 0x08, 0x41, 0x36, 0x0B, 0xF5, 0x5A, 0x9F,
];

/// Constant answers, for versions that end in 0 and in 1.
const FIXED: [[u64; 2]; 2] = [
    [0x3341_181C_03CB_675C, 0x8ED3_83AA_1F4C_D1E8],
    [0x1841_181C_03CB_675C, 0x8ED3_83AA_1F4C_D1E8],
];

/// Facts of the process on which the driver and the runtime must agree.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    pub driver_version: u32,
    pub version: u32,
    pub process: u32,
    /// Low half of `pthread_self`.
    pub thread: u32,
    /// Address of the table of the runtime's interface.
    pub runtime_table: u64,
    /// Address of the table that holds this check.
    pub check_table: u64,
    /// Address of the check itself.
    pub check_function: u64,
    pub unix_seconds: u64,
}

/// Facts of each device in the check.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    pub uuid: [u8; 16],
    pub pci_domain: i32,
    pub pci_bus: i32,
    pub pci_device: i32,
}

/// Returns the two words of the check's answer.
pub fn answer(process: &Process, devices: impl IntoIterator<Item = Device>) -> [u64; 2] {
    if let Some(fixed) = FIXED.get((process.version % 10) as usize) {
        return *fixed;
    }
    let mut mac = SimpleHmac::<Md2>::new_from_slice(&KEY).expect("HMAC takes keys of any length");
    for word in [
        process.driver_version,
        process.version,
        process.process,
        process.thread,
    ] {
        mac.update(&word.to_le_bytes());
    }
    for word in [
        process.runtime_table,
        process.check_table,
        process.check_function,
        process.unix_seconds,
    ] {
        mac.update(&word.to_le_bytes());
    }
    for device in devices {
        mac.update(&device.uuid);
        for word in [device.pci_domain, device.pci_bus, device.pci_device] {
            mac.update(&word.to_le_bytes());
        }
    }
    let digest: [u8; 16] = mac.finalize().into_bytes().into();
    let (low, high) = digest.split_at(8);
    [low, high].map(|half| u64::from_le_bytes(half.try_into().expect("half of 16 bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(version: u32) -> Process {
        Process {
            driver_version: 0x2F30,
            version,
            process: 0x002F_A423,
            thread: 0xF79C_1000,
            runtime_table: 0x0000_7FFF_F695_8240,
            check_table: 0x0000_7FFF_F695_8220,
            check_function: 0x0000_7FFF_F2AA_F4A0,
            unix_seconds: 0x682B_9CEE,
        }
    }

    fn device() -> Device {
        let words = [0x8A2B_FE9A_u32, 0x382D_25AC, 0xC5AE_37EA, 0x5F32_716D];
        let mut uuid = [0; 16];
        for (bytes, word) in uuid.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        Device {
            uuid,
            pci_domain: 0,
            pci_bus: 2,
            pci_device: 0,
        }
    }

    #[test]
    fn versions_that_end_in_zero_and_one_are_constants() {
        assert_eq!(answer(&process(13000), [device()]), FIXED[0]);
        assert_eq!(answer(&process(13001), []), FIXED[1]);
    }

    /// Computed by hand from the digest state after the third pass in ZLUDA's tests.
    #[test]
    fn the_published_state_leads_to_the_known_answer() {
        assert_eq!(
            answer(&process(12082), []),
            [0xD22D_FA4F_5EEF_7907, 0xFA7B_90D1_0375_5207]
        );
    }

    /// The inputs of ZLUDA's own tests, taken through RFC 2104 by hand: MD2 over the padded keys.
    #[test]
    fn other_versions_are_the_keyed_digest_of_the_packed_inputs() {
        use md2::Digest;
        let mut message = Vec::new();
        for word in [0x2F30_u32, 12082, 0x002F_A423, 0xF79C_1000] {
            message.extend(word.to_le_bytes());
        }
        for word in [
            0x7FFF_F695_8240_u64,
            0x7FFF_F695_8220,
            0x7FFF_F2AA_F4A0,
            0x682B_9CEE,
        ] {
            message.extend(word.to_le_bytes());
        }
        message.extend(device().uuid);
        for word in [0_i32, 2, 0] {
            message.extend(word.to_le_bytes());
        }
        let inner = Md2::new()
            .chain_update(KEY.map(|byte| byte ^ 0x36))
            .chain_update(&message)
            .finalize();
        let outer = Md2::new()
            .chain_update(KEY.map(|byte| byte ^ 0x5C))
            .chain_update(inner)
            .finalize();
        let words = answer(&process(12082), [device()]);
        let mut bytes = words[0].to_le_bytes().to_vec();
        bytes.extend(words[1].to_le_bytes());
        assert_eq!(bytes, outer.to_vec());
    }
}
