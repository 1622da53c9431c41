//! Facts of a device as text: one fact a line, `name=value`.
//!
//! A reader ignores unknown names and tolerates missing ones, so that either side may be older than the other.

use core::fmt;

#[cfg(feature = "alloc")]
use alloc::{
    borrow::ToOwned,
    format,
    string::{String, ToString},
    vec::Vec,
};

/// The device's name, as `cuDeviceGetName` returns it.
pub const NAME: &str = "name";
/// The device's UUID, 32 hexadecimal digits.
pub const UUID: &str = "uuid";
/// Bytes of the device's memory.
pub const TOTAL_MEMORY: &str = "memory.total";
/// Bytes of device memory that the tenant's processes have allocated.
pub const USED_MEMORY: &str = "memory.used";
/// Bytes of device memory that are free on the host, where that is known.
pub const FREE_MEMORY: &str = "memory.free";
/// Version that `cuDriverGetVersion` returns.
pub const CUDA_VERSION: &str = "cuda.version";
/// Version of the host's driver, as its NVML reports it.
pub const DRIVER_VERSION: &str = "driver.version";
/// Device and vendor id in the PCI configuration space: `pciDeviceId` of the host's NVML.
pub const PCI_ID: &str = "pci.id";
/// Subsystem id in the PCI configuration space: `pciSubSystemId` of the host's NVML.
pub const PCI_SUBSYSTEM: &str = "pci.subsystem";
/// A process of the tenant: its process id in the guest and the bytes of device memory that it has allocated.
pub const PROCESS: &str = "process";
/// Numbers of the tenant's devices whose memory this one can access, separated by spaces.
pub const PEERS: &str = "peers";
/// The device's NVLinks in their order, separated by spaces: see [`Link`].
pub const LINKS: &str = "links";
/// Prefix of the number of a `nvmlGpuP2PCapsIndex_t`. The value holds the P2P status that the host's NVML reports
/// between the device and each of the tenant's, separated by spaces.
pub const P2P: &str = "p2p.";
/// Prefix of the number of a `CUdevice_attribute`.
pub const ATTRIBUTE: &str = "attribute.";
/// Prefix of the name of an NVML function. The value holds the answers of the host's NVML, one for each call, separated
/// by spaces.
pub const HOST: &str = "host.";
/// Prefix of the number of an NVML field. The value holds the type and the bits of the field's value; a field of links
/// has one such pair for each link, separated by spaces.
pub const FIELD: &str = "field.";

/// Returns the facts of a text, in its order.
pub fn all(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| line.split_once('='))
}

/// Returns the first fact of this name.
///
/// ```
/// use wormhole_ring::control::facts;
/// let text = "uuid=00\nmemory.total=1024\n";
/// assert_eq!(facts::get(text, facts::UUID), Some("00"));
/// assert_eq!(facts::number(text, facts::TOTAL_MEMORY), Some(1024));
/// assert_eq!(facts::number(text, facts::FREE_MEMORY), None);
/// ```
#[must_use]
pub fn get<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    all(text).find_map(|(key, value)| (key == name).then_some(value))
}

/// Returns the first fact of this name if it is a number.
#[must_use]
pub fn number(text: &str, name: &str) -> Option<u64> {
    get(text, name)?.parse().ok()
}

/// Formats 32 hexadecimal digits as CUDA and NVML print a device's UUID. Returns `None` for any other text.
///
/// ```
/// use wormhole_ring::control::facts;
/// let digits = "00112233445566778899aabbccddeeff";
/// let name = facts::uuid_name(digits).unwrap();
/// assert_eq!(name, "GPU-00112233-4455-6677-8899-aabbccddeeff");
/// assert_eq!(facts::uuid_name("0011"), None);
/// ```
#[cfg(feature = "alloc")]
#[must_use]
pub fn uuid_name(digits: &str) -> Option<String> {
    if digits.len() != 32 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| &digits[range]);
    Some(format!("GPU-{a}-{b}-{c}-{d}-{e}"))
}

/// An NVLink of a device, as shown to a tenant.
///
/// ```
/// use wormhole_ring::control::facts::Link;
/// for link in [Link::Switch, Link::Device(7), Link::Inactive, Link::Failed(3)] {
///     assert_eq!(Link::parse(&link.to_string()), Some(link));
/// }
/// assert_eq!(Link::parse("!"), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// The link connects to a switch.
    Switch,
    /// The link connects to the tenant's device with this number.
    Device(u32),
    /// The link is inactive, or connects to a device of another tenant.
    Inactive,
    /// The host's NVML returned this error for the link.
    Failed(u32),
}

impl Link {
    /// Parses the text that `Display` writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "switch" => Some(Self::Switch),
            "-" => Some(Self::Inactive),
            text => match text.strip_prefix('!') {
                Some(code) => code.parse().ok().map(Self::Failed),
                None => text.parse().ok().map(Self::Device),
            },
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch => f.write_str("switch"),
            Self::Device(number) => write!(f, "{number}"),
            Self::Inactive => f.write_str("-"),
            Self::Failed(code) => write!(f, "!{code}"),
        }
    }
}

/// Formats the integers that a call of the host's NVML returned; an empty list is a 0.
#[cfg(feature = "alloc")]
#[must_use]
pub fn answer(numbers: &[u64]) -> String {
    let texts: Vec<String> = numbers.iter().map(u64::to_string).collect();
    if texts.is_empty() {
        "0".to_owned()
    } else {
        texts.join(",")
    }
}

/// Formats the error that a call of the host's NVML returned.
#[cfg(feature = "alloc")]
#[must_use]
pub fn failed(code: u32) -> String {
    format!("!{code}")
}

/// Parses the text that [`answer`] or [`failed`] wrote, integers into `numbers`. Returns `None` if it is neither, or if
/// the number of integers differs.
///
/// ```
/// use wormhole_ring::control::facts;
/// let mut numbers = [0; 2];
/// assert_eq!(facts::read_answer(&facts::answer(&[7, 9]), &mut numbers), Some(Ok(())));
/// assert_eq!(numbers, [7, 9]);
/// assert_eq!(facts::read_answer(&facts::failed(3), &mut numbers), Some(Err(3)));
/// assert_eq!(facts::read_answer("7", &mut numbers), None);
/// assert_eq!(facts::read_answer(&facts::answer(&[]), &mut []), Some(Ok(())));
/// ```
pub fn read_answer(text: &str, numbers: &mut [u64]) -> Option<Result<(), u32>> {
    if let Some(code) = text.strip_prefix('!') {
        return code.parse().ok().filter(|code| *code != 0).map(Err);
    }
    if numbers.is_empty() {
        return (text == "0").then_some(Ok(()));
    }
    let mut texts = text.split(',');
    for number in numbers {
        *number = texts.next()?.parse().ok()?;
    }
    texts.next().is_none().then_some(Ok(()))
}
