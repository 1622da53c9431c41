//! Implements the network device's registers: features and configuration.

use std::fmt;
use std::io;
use std::str::FromStr;

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
};

use super::host_end::HostEnd;
use crate::devices::virtio::VirtioDevice;

/// Network controller, Ethernet.
const PCI_CLASS: [u8; 3] = [0x02, 0, 0];
pub(super) const QUEUE_SIZE: u16 = 256;
/// Bytes of `struct virtio_net_hdr_v1`, which precedes each frame in both directions.
pub const HEADER_LEN: usize = 12;
/// Maximum bytes of a frame with its header: segmentation offload allows 64 KiB of payload (virtio 1.2, 5.1.6.3.1).
pub(super) const MAX_FRAME: usize = 65550 + HEADER_LEN;

/// Features that the device offers at any end.
const FEATURES: [u32; 2] = [VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF];

/// Features that the host's network stack serves: checksums and segmentation.
pub(super) const OFFLOADS: [u32; 8] = [
    VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_ECN,
    VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_HOST_ECN,
];

/// Features that need one of others (virtio 1.2, 5.1.3.1).
const NEEDS: [(u32, &[u32]); 6] = [
    (VIRTIO_NET_F_GUEST_TSO4, &[VIRTIO_NET_F_GUEST_CSUM]),
    (VIRTIO_NET_F_GUEST_TSO6, &[VIRTIO_NET_F_GUEST_CSUM]),
    (
        VIRTIO_NET_F_GUEST_ECN,
        &[VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6],
    ),
    (VIRTIO_NET_F_HOST_TSO4, &[VIRTIO_NET_F_CSUM]),
    (VIRTIO_NET_F_HOST_TSO6, &[VIRTIO_NET_F_CSUM]),
    (
        VIRTIO_NET_F_HOST_ECN,
        &[VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6],
    ),
];

/// Hardware address of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MacAddress([u8; 6]);

impl MacAddress {
    /// Returns a locally administered unicast address with these last bytes.
    pub fn local(number: u32) -> Self {
        let [a, b, c, d] = number.to_be_bytes();
        Self([0x02, 0x77, a, b, c, d])
    }

    /// Returns the bytes of the address.
    pub fn bytes(self) -> [u8; 6] {
        self.0
    }

    /// Returns a locally administered unicast address that most probably no other interface has.
    pub fn random() -> io::Result<Self> {
        let mut number = [0; 4];
        rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty())?;
        Ok(Self::local(u32::from_ne_bytes(number)))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The text is no unicast hardware address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a hardware address has six bytes in hexadecimal, as 02:77:00:00:00:01, and the lowest bit of the first is 0"
)]
pub struct NoMacAddress;

impl FromStr for MacAddress {
    type Err = NoMacAddress;

    fn from_str(text: &str) -> Result<Self, NoMacAddress> {
        let parts: Vec<&str> = text.split(':').collect();
        let bytes: Result<Vec<u8>, _> = parts
            .iter()
            .map(|part| {
                let is_byte =
                    part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
                let byte = u8::from_str_radix(part, 16).ok();
                byte.filter(|_| is_byte).ok_or(NoMacAddress)
            })
            .collect();
        let bytes: [u8; 6] = bytes?.try_into().map_err(|_| NoMacAddress)?;
        match bytes[0] & 1 {
            0 => Ok(Self(bytes)),
            _ => Err(NoMacAddress),
        }
    }
}

/// An interface with a receive queue (0) and a transmit queue (1).
#[derive(Debug)]
pub struct Net {
    mac: MacAddress,
    /// Features of the host's end.
    of_end: u64,
}

impl Net {
    /// Creates an interface with this address before this end.
    pub fn new(mac: MacAddress, end: &dyn HostEnd) -> Self {
        Self {
            mac,
            of_end: end.features(),
        }
    }
}

impl VirtioDevice for Net {
    fn id(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn pci_class(&self) -> [u8; 3] {
        PCI_CLASS
    }

    fn features(&self) -> u64 {
        FEATURES
            .iter()
            .fold(self.of_end, |bits, bit| bits | 1 << bit)
    }

    fn accepts(&self, features: u64) -> bool {
        let has = |feature: u32| features & 1 << feature != 0;
        NEEDS
            .iter()
            .all(|(feature, needed)| !has(*feature) || needed.iter().copied().any(has))
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE, QUEUE_SIZE]
    }

    fn config(&self) -> &[u8] {
        &self.mac.0
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::super::{FrameStream, Tap};
    use super::*;

    #[test]
    fn features_are_offered_and_accepted_with_those_that_they_need() {
        let sockets = || UnixStream::pair().expect("sockets").0.into();
        let stream = FrameStream::new(sockets(), |_| ()).expect("a socket");
        let net = Net::new(MacAddress::local(0), &stream);
        assert!(OFFLOADS.iter().all(|bit| net.features() & 1 << bit == 0));
        assert!(net.accepts(net.features()));
        let tap = Tap::from_socket(sockets()).expect("a socket");
        let net = Net::new(MacAddress::local(0), &tap);
        assert!(net.accepts(net.features()));
        assert!(net.accepts(0));
        for (feature, needed) in NEEDS {
            let alone = 1 << feature;
            assert!(net.features() & alone != 0);
            assert!(!net.accepts(alone), "feature {feature}");
            let without = |bits: u64, bit: &u32| bits & !(1 << bit);
            assert!(!net.accepts(needed.iter().fold(net.features(), without)));
        }
        let checksum_and_segments = [VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO6];
        let bits = |bits: u64, bit: &u32| bits | 1 << bit;
        assert!(net.accepts(checksum_and_segments.iter().fold(0, bits)));
    }

    #[test]
    fn hardware_addresses_are_read_as_they_are_written() {
        let mac: MacAddress = "02:77:0a:FF:00:01".parse().expect("an address");
        assert_eq!(mac.to_string(), "02:77:0a:ff:00:01");
        assert_eq!(mac, MacAddress::local(0x0aff_0001));
        for bad in [
            "",
            "02:77:0a:ff:00",
            "02:77:0a:ff:00:01:02",
            "2:77:0a:ff:00:01",
            "02:77:0a:ff:00:0g",
            "03:77:0a:ff:00:01",
            "ff:ff:ff:ff:ff:ff",
            "+2:77:0a:ff:00:01",
        ] {
            assert_eq!(bad.parse::<MacAddress>(), Err(NoMacAddress), "{bad}");
        }
    }
}
